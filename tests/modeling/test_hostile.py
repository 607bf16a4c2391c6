"""Repositories made to harm: each is refused in a sentence that names the thing, and nothing of theirs runs.

What stands in a folder may come from anyone. The folders here are whole but for one fault.
"""

import json
import pickle
import shutil
import struct
import time
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import triptych
from triptych.training.tokenization import train_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP = "[" * 100_000


class Trap:
    """Whoever unpickles this leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A translator's folder, with which nothing is wrong; in shards beside it."""
    folder = tmp_path_factory.mktemp("whole")
    tokenizer = train_tokenizer(["a cat sat on the mat"], "bpe", 300)
    model = tiny_model("encoder_decoder", vocab_size=len(tokenizer))
    for name, size in (("one", "1GB"), ("shards", "30KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole / "one", tmp_path / "model"))


@pytest.fixture
def shards(whole, tmp_path):
    return Path(shutil.copytree(whole / "shards", tmp_path / "shards"))


@pytest.fixture
def sprung(tmp_path):
    """Where a trap shows that it was sprung; none may be."""
    path = tmp_path / "sprung"
    yield path
    assert not path.exists()


def refused(folder, *words, load=AutoModelForSeq2SeqLM.from_pretrained):
    """A folder is refused at once, with all words in the one sentence, and nothing is written."""
    before = sorted(folder.parent.rglob("*"))
    started = time.perf_counter()
    with pytest.raises((ValueError, OSError, StrictDataclassError)) as error:
        load(folder)
    assert time.perf_counter() - started < 5
    cause = error.value if isinstance(error.value, (ValueError, OSError)) else error.value.__cause__
    for word in words:
        assert word in str(cause), f"{word!r} is not in {str(cause)!r}"
    assert "\n" not in str(cause)
    assert sorted(folder.parent.rglob("*")) == before


def edit(file: Path, *, stacks: dict | None = None, **fields):
    """Sets fields of a JSON file, and of both stacks in it."""
    content = json.loads(file.read_text())
    for part in (content["encoder"], content["decoder"]) if stacks else ():
        part.update(stacks)
    file.write_text(json.dumps(content | fields))


# ---------------------------------------------------------------------------------------------------------------------
# Pickles


def test_the_whole_folders_are_loaded(folder, shards):
    for path in (folder, shards):
        AutoModelForSeq2SeqLM.from_pretrained(pretrained_model_name_or_path=path)
        triptych.TriptychForConditionalGeneration.from_pretrained(pretrained_model_name_or_path=path)


def test_a_pickle_is_not_read(folder, sprung):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    refused(folder, WEIGHTS)
    config, load = AutoConfig.from_pretrained(folder), triptych.TriptychForConditionalGeneration.from_pretrained
    refused(folder / "pytorch_model.bin", "pytorch_model.bin", load=lambda file: load(file, config=config))


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "zip"])
def test_a_pickle_under_another_name_is_not_read(folder, sprung, write):
    with (folder / WEIGHTS).open("wb") as file:
        write(Trap(sprung), file)
    refused(folder, str(folder), "weights")


def test_an_index_of_pickles_is_not_read(shards, sprung):
    (shards / "evil.bin").write_bytes(pickle.dumps(Trap(sprung)))
    edit(shards / INDEX, weight_map={"lm_head.weight": "evil.bin"})
    refused(shards, INDEX, "'evil.bin'")


def test_a_configuration_names_no_file_of_weights(folder, sprung):
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    edit(folder / "config.json", transformers_weights="adapter_model.bin")
    refused(folder, "`transformers_weights` is 'adapter_model.bin'")


def test_a_pickled_adapter_is_not_read(folder, sprung):
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(folder), settings).save_pretrained(folder)
    AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    refused(folder, "adapter_model")


# ---------------------------------------------------------------------------------------------------------------------
# Files of weights


def header_and_data(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_weights(file: Path, header: dict, data: bytes, length: int | None = None):
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_cut_weights(folder, keep):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refused(folder, str(folder), "no weights that can be read")


@pytest.mark.parametrize("length", [0, 5, 10**6, 2**62, 2**64 - 1])
def test_a_lie_about_the_length_of_the_header(folder, length):
    write_weights(folder / WEIGHTS, *header_and_data(folder / WEIGHTS), length)
    refused(folder, str(folder), "no weights that can be read")


@pytest.mark.parametrize(
    "lie",
    [
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [-1, 5]},
        {"shape": [2**31, 2**31, 2**31]},
        {"shape": [1]},
        {"dtype": "PICKLE"},
    ],
    ids=lambda lie: f"{lie}",
)
def test_a_lie_about_a_tensor(folder, lie):
    header, data = header_and_data(folder / WEIGHTS)
    next(entry for name, entry in header.items() if name != "__metadata__").update(lie)
    write_weights(folder / WEIGHTS, header, data)
    refused(folder, str(folder), "no weights that can be read")


def test_broken_weights_are_refused_where_no_type_is_given(folder):
    """transformers reads a file for its type before all else."""
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: content[name] for name in content if name != "dtype"}))
    (folder / WEIGHTS).write_bytes(b"")
    refused(folder, str(folder), "no weights that can be read")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 1, None])
def test_an_index_names_files_beside_it(shards, name):
    shutil.copy(next(shards.glob("model-*")), shards.parent / "outside.safetensors")
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    edit(shards / INDEX, weight_map=weight_map | {"lm_head.weight": name})
    refused(shards, INDEX, f"names {name!r}", "beside it")
    with pytest.raises(ValueError, match="beside it"):
        triptych.import_model(shards)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{{",
        "[1]",
        "null",
        DEEP,
        '{"metadata": {}}',
        '{"metadata": 1, "weight_map": {"a": "b"}}',
        '{"metadata": {}, "weight_map": [1]}',
        '{"metadata": {}, "weight_map": {}}',
    ],
    ids=lambda content: content[:20],
)
def test_a_broken_index(shards, content):
    (shards / INDEX).write_text(content)
    refused(shards, INDEX, "is no index of weights")


def test_a_repository_is_read_as_a_folder_is(whole, tmp_path):
    """Through the cache, where files are links and have no folder of their own."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--translator"
    snapshot = repository / "snapshots" / commit
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(whole / "shards", snapshot)
    AutoModelForSeq2SeqLM.from_pretrained("someone/translator", cache_dir=tmp_path)
    edit(snapshot / INDEX, weight_map={"lm_head.weight": "../../../outside.safetensors"})
    with pytest.raises(ValueError, match="beside it"):
        AutoModelForSeq2SeqLM.from_pretrained("someone/translator", cache_dir=tmp_path)


def test_a_missing_shard(shards):
    missing = sorted(shards.glob("model-*"))[0]
    missing.unlink()
    refused(shards, missing.name)


# ---------------------------------------------------------------------------------------------------------------------
# Claims that nothing stands behind


CLAIMS = {
    "hidden_size": dict(hidden_size=10**9, head_dim=8, embedding_size=10**9, cross_attention_hidden_size=10**9),
    "vocab_size": dict(vocab_size=10**9),
    "intermediate_size": dict(intermediate_size=10**9),
    "num_attention_heads": dict(num_attention_heads=10**8, num_key_value_heads=10**8),
    "max_position_embeddings": dict(position_embedding_type="learned", max_position_embeddings=10**9),
    "type_vocab_size": dict(type_vocab_size=10**9),
    "relative_attention_num_buckets": dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=10**9,
        relative_attention_max_distance=2 * 10**9,
    ),
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_more_parameters_than_the_files_hold(folder, claim):
    """Without memory for them: some of these would fill any machine's."""
    edit(folder / "config.json", stacks=claim, **({"vocab_size": 10**9} if "vocab_size" in claim else {}))
    refused(folder, str(folder), "parameters, but its files hold")


def test_more_parameters_than_the_files_of_a_distributed_checkpoint_hold(folder):
    shutil.copy(folder / WEIGHTS, folder / "shard-00000-model-00001-of-00001.safetensors")
    edit(folder / "config.json", stacks=CLAIMS["intermediate_size"])
    refused(folder, str(folder), "parameters, but its files hold")


def test_new_parameters_in_reason_are_loaded(folder):
    """A head for many classes, and a table that the files do not have."""
    save_file({"embed_tokens.weight": torch.ones(97, 32)}, folder / WEIGHTS, {"format": "pt"})
    tiny_model(triptych.TriptychEncoderModel).config.save_pretrained(folder)
    head = triptych.TriptychEncoderForSequenceClassification
    model = head.from_pretrained(folder, num_labels=50_000, type_vocab_size=500)
    assert sum(parameter.numel() for parameter in model.parameters()) > 500 * len(load_file(folder / WEIGHTS)) * 97 * 32
    assert torch.equal(model.model.embed_tokens.weight, torch.ones(97, 32))


@pytest.mark.parametrize("size", [2**31, 10**12, 10**30, -(10**30)])
@pytest.mark.parametrize("name", ["hidden_size", "sliding_window"])
def test_sizes_that_no_tensor_has(folder, name, size):
    edit(folder / "config.json", stacks={name: size, "head_dim": 8})
    refused(folder, f"`{name}` is {size}")


@pytest.mark.parametrize("layers", [1001, 10**9, 10**30])
def test_more_layers_than_were_ever_trained(folder, layers):
    edit(folder / "config.json", stacks={"num_hidden_layers": layers, "layer_types": None})
    refused(folder, f"`num_hidden_layers` is {layers}", "1000")


@pytest.mark.parametrize("labels", [10**6 + 1, 10**12, "many", [1]])
def test_more_classes_than_words(folder, labels):
    edit(folder / "config.json", num_labels=labels)
    refused(folder, f"`num_labels` is {labels!r}", "1000000")


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["norm_eps", "attention_scale", "hidden_dropout"])
def test_numbers_that_are_none(folder, name, value):
    edit(folder / "config.json", stacks={name: value})
    refused(folder, f"`{name}` is {value}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rope_with_numbers_that_are_none(folder, value):
    rope = {"rope_type": "default", "rope_theta": value}
    edit(folder / "config.json", stacks={"position_embedding_type": "rotary", "rope_parameters": rope})
    refused(folder, "`rope_parameters`", f"{value}", "`rope_theta`")


@pytest.mark.parametrize("name", ["to_dict", "validate_topology", "__class__", "get_text_config"])
def test_a_key_that_would_hide_a_method(folder, name):
    edit(folder / "config.json", **{name: "x"})
    refused(folder, f"`{name}` is no field")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["load", "__import__", "os.system", "nn"])
def test_a_type_that_is_none(folder, key, name):
    edit(folder / "config.json", dtype=None)
    edit(folder / "config.json", **{key: name})
    refused(folder, f"`dtype` is {name!r}")


GENERATION = {
    "beams": ({"num_beams": 10**9}, "`generation_config.num_beams` is 1000000000"),
    "sequences": ({"num_return_sequences": 10**9, "do_sample": True}, "`generation_config.num_return_sequences`"),
    "text": ({"num_beams": "x"}, "`generation_config.num_beams` is 'x'"),
    "list": ({"max_length": [1]}, "`generation_config.max_length` is [1]"),
    "fraction": ({"max_new_tokens": 1e300}, "`generation_config.max_new_tokens` is 1e+300"),
}


@pytest.mark.parametrize("fields, sentence", GENERATION.values(), ids=GENERATION)
def test_settings_of_generation_that_cannot_be_run(folder, fields, sentence):
    edit(folder / "generation_config.json", **fields)
    refused(folder, sentence)


@pytest.mark.parametrize("content", ["[1]", "5", DEEP], ids=["list", "number", "deep"])
def test_settings_of_generation_that_are_none(folder, content):
    (folder / "generation_config.json").write_text(content)
    refused(folder, "'generation_config.json' cannot be read")


# ---------------------------------------------------------------------------------------------------------------------
# Code


def set_code_traps(folder, sprung):
    """Modules that leave a file behind when they are imported, named wherever a folder may name code."""
    (folder / "evil.py").write_text(f"open({str(sprung)!r}, 'w')\nclass Evil: pass\n")
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "evil.py", folder / "custom_generate" / "generate.py")
    classes = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")
    tasks = {"translation": {"impl": "evil.Evil", "pt": ["AutoModelForSeq2SeqLM"]}}
    edit(folder / "config.json", auto_map=dict.fromkeys(classes, "evil.Evil"), custom_pipelines=tasks)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]})


@pytest.mark.parametrize("trust", [None, False])
def test_code_is_not_run_without_trust(folder, sprung, trust):
    set_code_traps(folder, sprung)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=trust)
    assert type(model) is triptych.TriptychForConditionalGeneration
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model.generate(**tokenizer("a cat", return_tensors="pt"), max_new_tokens=2)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipeline("translation", model=str(folder), trust_remote_code=trust)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        edit(folder / "config.json", model_type="evil")
        AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False)
