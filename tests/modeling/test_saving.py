"""Saved folders: whole, exact, loadable by every Auto class, with the package or without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from tiny import SENSES, randomised, sense_inputs, tiny_config

from triptych import TriptychConfig
from triptych.auto_map import AUTO_CLASSES

HEADS = [
    pytest.param(topology, auto_class, id=f"{name}-{auto_class}")
    for topology, classes in AUTO_CLASSES.items()
    for auto_class, name in classes.items()
]
# What the models of an Auto class are built to read here, where that is not text.
READS = {
    "AutoModelForImageClassification": "image",
    "AutoModelForMaskedImageModeling": "image",
    "AutoModelForImageTextToText": "image",
    "AutoModelForVideoClassification": "video",
    "AutoModelForAudioClassification": "audio",
    "AutoModelForSpeechSeq2Seq": "audio",
}
WITHOUT_PACKAGE = Path(__file__).with_name("load_without_package.py")


def build(topology, auto_class, **changes):
    """A tiny head in eval mode, every parameter with values of its own."""
    input_type = READS.get(auto_class) or "text"
    if topology == "encoder_decoder" and input_type != "text":
        changes = {**changes, "encoder": SENSES[input_type]}
    elif input_type != "text":
        changes = {**SENSES[input_type], "position_embedding_type": "learned", **changes}
    return randomised(getattr(transformers, auto_class).from_config(tiny_config(topology, **changes))).eval()


def example(model):
    """Inputs that every head of the model's kind accepts."""
    input_ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    is_pair = model.config.topology == "encoder_decoder"
    targets = {"decoder_input_ids": input_ids.flip(1)} if is_pair else {}
    if model.main_input_name != "input_ids":
        torch.manual_seed(0)
        return {**sense_inputs(model.config.encoder if is_pair else model.config), **targets}
    if is_pair:
        return {"input_ids": input_ids, **targets}
    if "MultipleChoice" in type(model).__name__:
        return {"input_ids": input_ids[None]}
    return {"input_ids": input_ids}


@torch.no_grad()
def outputs(model):
    """The output tensors by name, bitwise reproducible.

    Loaded weights lie where the file was mapped, built ones where the allocator put them, and a matrix product may
    round differently at another alignment: so the weights are copied to fresh memory first.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return {name: value for name, value in model(**example(model)).items() if torch.is_tensor(value)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("topology, auto_class", HEADS)
@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
def test_saved_head_is_loaded_bitwise(tmp_path, topology, auto_class, shard_size):
    model = build(topology, auto_class)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert ("model.safetensors.index.json" in files) == (shard_size == "10KB")
    assert not any(name.endswith((".bin", ".pt", ".py")) for name in files)
    loaded, info = getattr(transformers, auto_class).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info.values()), info
    assert_same(outputs(model), outputs(loaded.eval()))


@pytest.mark.parametrize("topology, auto_class", HEADS)
def test_base_and_head_exchange_weights(tmp_path, topology, auto_class):
    """A load that looks clean re-initialised weights."""
    head = build(topology, auto_class)
    head.save_pretrained(tmp_path / "head")
    base, info = transformers.AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not info["missing_keys"]
    shared = dict((head.model if hasattr(head, "model") else head).named_parameters())
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, shared[name]), name

    base.save_pretrained(tmp_path / "base")
    again, info = getattr(transformers, auto_class).from_pretrained(tmp_path / "base", output_loading_info=True)
    own = set()
    if hasattr(head, "model"):  # what only the head has, and the pooling layer that it reads
        own = {name for name, _ in head.named_parameters()} - {f"model.{name}" for name, _ in base.named_parameters()}
    assert not any(name.startswith("model.") and "pooler" not in name for name in own)
    assert info["missing_keys"] == own
    assert not info["unexpected_keys"]
    for name, parameter in again.named_parameters():
        if name not in own:
            assert torch.equal(parameter, head.get_parameter(name)), name


@pytest.mark.parametrize("shard_size", ["50GB", "10KB"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "topology, auto_class, changes",
    [
        ("encoder", "AutoModelForMaskedLM", {}),
        ("decoder", "AutoModelForCausalLM", {}),
        ("encoder_decoder", "AutoModelForSeq2SeqLM", {"share_embeddings": True}),
        ("encoder_decoder", "AutoModelForSeq2SeqLM", {"share_embeddings": False}),
    ],
)
def test_tied_weights_are_tied_and_stored_once(tmp_path, topology, auto_class, changes, tie, shard_size):
    """Tied weights lost, wrongly forced, or stored twice."""
    share = changes.get("share_embeddings", True)
    model = build(topology, auto_class, tie_word_embeddings=tie, **changes)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    loaded = getattr(transformers, auto_class).from_pretrained(tmp_path)
    for one in (model, loaded):
        target = one.model
        if topology == "encoder_decoder":
            assert (target.decoder.embed_tokens is None) == share
            target = target.encoder if share else target.decoder
        assert (one.lm_head.weight is target.embed_tokens.weight) == tie
    stored = []
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            stored += [name for name in weights.keys() if "embed_tokens" in name or name == "lm_head.weight"]  # noqa: SIM118
    tables = 1 if topology != "encoder_decoder" or share else 2
    assert len(stored) == tables + (not tie)
    assert_same(outputs(model), outputs(loaded.eval()))


def test_a_pair_is_loaded_with_changes(tmp_path):
    """Fields of the panels that are changed as a pair is loaded reached its constructor, or neither panel."""
    build("encoder_decoder", "AutoModelForSeq2SeqLM").save_pretrained(tmp_path)
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    config = load(tmp_path, hidden_dropout=0.5, pad_token_id=3, decoder={"attention_dropout": 0.25}).config
    assert [panel.hidden_dropout for panel in (config.encoder, config.decoder)] == [0.5, 0.5]
    assert [part.pad_token_id for part in (config, config.encoder, config.decoder)] == [3, 3, 3]
    assert [panel.attention_dropout for panel in (config.encoder, config.decoder)] == [0, 0.25]
    assert transformers.AutoConfig.from_pretrained(tmp_path, norm_eps=0.5).encoder.norm_eps == 0.5
    with pytest.raises(StrictDataclassError, match="`hidden_dropout` is 2"):
        load(tmp_path, hidden_dropout=2)


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForSeq2SeqLM"])
def test_a_resized_pair_is_loaded_again(tmp_path, auto_class):
    """Both panels follow their one table, in a head and without one; of two tables, neither can be meant."""
    model = build("encoder_decoder", auto_class)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, auto_class).from_pretrained(tmp_path).eval()
    assert loaded.get_input_embeddings().num_embeddings == loaded.config.encoder.vocab_size == model.config.vocab_size
    assert_same(outputs(model), outputs(loaded))
    with pytest.raises(ValueError, match="`share_embeddings` is False"):
        build("encoder_decoder", auto_class, share_embeddings=False).resize_token_embeddings(3)


def run_without_package(folder: Path, *lines: str):
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(WITHOUT_PACKAGE), *lines]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("topology", AUTO_CLASSES)
def test_folder_with_code_needs_no_package(tmp_path, topology):
    """Code files missing from the saved folder; re-registration raises."""
    lines = []
    for auto_class in AUTO_CLASSES[topology]:
        model = build(topology, auto_class)
        model.save_pretrained(tmp_path / auto_class, with_code=True)
        torch.save((example(model), outputs(model)), tmp_path / auto_class / "example.bin")
        lines.append(f"{auto_class}:{auto_class}")
    result = run_without_package(tmp_path, *lines)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == list(AUTO_CLASSES[topology])


def test_trainer_checkpoint_carries_code(tmp_path):
    """Code files missing from a Trainer checkpoint."""
    model = build("encoder", "AutoModelForSequenceClassification")
    type(model).register_for_auto_class("AutoModelForSequenceClassification")
    try:
        data = [{"input_ids": [3, 4, 5 + i], "labels": i % 2} for i in range(4)]
        arguments = transformers.TrainingArguments(tmp_path / "run", max_steps=1, report_to=[], save_steps=1)
        transformers.Trainer(model, arguments, train_dataset=data).train()
    finally:
        type(model)._auto_class = None
    checkpoint = tmp_path / "run" / "checkpoint-1"
    checkpoint.rename(tmp_path / type(model).__name__)
    checkpoint = tmp_path / type(model).__name__
    torch.save((example(model), outputs(model.eval())), checkpoint / "example.bin")
    result = run_without_package(tmp_path, f"AutoModelForSequenceClassification:{type(model).__name__}")
    assert result.returncode == 0, result.stderr[-3000:]


def test_code_follows_a_folder_that_came_with_it(tmp_path):
    model = build("encoder", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "one", with_code=True)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "modeling_triptych.py").exists()
    loaded.save_pretrained(tmp_path / "three", with_code=False)
    assert not list((tmp_path / "three").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "three" / "config.json").read_text())


def test_import_twice_changes_nothing():
    code = "import triptych, importlib; importlib.reload(triptych); import transformers; "
    code += (
        "print(type(transformers.AutoModel.from_config(triptych.TriptychConfig.from_preset('tiny_encoder'))).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "TriptychEncoderModel", result.stderr


def test_pickled_weights_are_not_read(tmp_path):
    model = build("encoder", "AutoModel")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.AutoModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "auto_class, preset", [("AutoModelForCausalLM", "tiny_encoder"), ("AutoModelForMaskedLM", "tiny_decoder")]
)
def test_wrong_auto_class_is_refused(tmp_path, auto_class, preset):
    model = transformers.AutoModel.from_config(TriptychConfig.from_preset(preset))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        getattr(transformers, auto_class).from_pretrained(tmp_path)
