"""The tools around a model: Trainer, LoRA, torch.compile, and loading over two processes."""

import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from tiny import DELTA, TOPOLOGIES, Ragged, random_tokens, tiny_model
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from triptych.auto_map import AUTO_CLASSES

TWO_PROCESSES = Path(__file__).with_name("load_on_two_processes.py")


def examples(topology, count=16):
    """Ragged examples that any language model of the topology learns from."""
    rows = [random_tokens(3 + index % 5).tolist() for index in range(count)]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [pad] * (length - len(row[name])) for row in rows])
        for name, pad in pads.items()
    }


def trainer_for(model, folder, **arguments):
    is_pair = model.config.topology == "encoder_decoder"
    trainer_class, arguments_class = (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments) if is_pair else (Trainer, TrainingArguments)
    )
    arguments = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "use_cpu": True,
        **arguments,
    }
    data = examples(model.config.topology)
    return trainer_class(
        model, arguments_class(folder, **arguments), train_dataset=data, eval_dataset=data, data_collator=collate
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_trainer_learns_and_resumes(tmp_path, topology):
    """Resuming changes data order or random state: dropout is on, and the later losses are bitwise those of one go."""
    whole = trainer_for(tiny_model(topology, hidden_dropout=0.1), tmp_path / "whole")
    whole.train()
    resumed = trainer_for(tiny_model(topology, hidden_dropout=0.1), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, resumed)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name


def test_seq2seq_trainer_evaluates_by_generating(tmp_path):
    trainer = trainer_for(tiny_model("encoder_decoder"), tmp_path, predict_with_generate=True, max_steps=1)
    trainer.train()
    prediction = trainer.predict(trainer.eval_dataset, max_length=8, num_beams=2)
    assert prediction.predictions.shape[0] == len(trainer.eval_dataset)
    assert prediction.predictions.max() < trainer.model.config.vocab_size


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gradients_do_not_grow_with_accumulation(tmp_path, topology):
    """Gradients grow with gradient accumulation because the item count is dropped."""
    norms = []
    for batch_size, steps in ((8, 1), (1, 8)):
        settings = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = trainer_for(tiny_model(topology), tmp_path / str(steps), **settings)
        trainer.train()
        norms.append(next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


TASKS = {"encoder": None, "decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lora_trains_saves_and_merges(tmp_path, topology):
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type=TASKS[topology])
    adapted = peft.get_peft_model(tiny_model(topology), settings)
    frozen = {name: value.clone() for name, value in adapted.named_parameters() if not value.requires_grad}
    trainer = trainer_for(adapted, tmp_path / "run", max_steps=3)
    trainer.train()
    for name, value in frozen.items():
        assert torch.equal(value, adapted.get_parameter(name)), name
    batch = collate(examples(topology)[:4])
    adapted.eval()
    with torch.no_grad():
        plain = tiny_model(topology)(**batch).logits
        trained = adapted(**batch).logits
        assert not torch.allclose(plain, trained, atol=1e-3)
        adapted.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(tiny_model(topology), tmp_path / "adapter").eval()
        # What stands at pads depends on whether there is a cache, which Trainer turns off.
        real = batch["labels"] != -100
        assert torch.equal(trained[real], loaded(**batch).logits[real])
        merged = adapted.merge_and_unload()
        assert torch.allclose(trained, merged(**batch).logits, atol=1e-4)


# Sizes that peft cannot read from a configuration of two stacks.
SIZES = {"num_layers": 2, "token_dim": 32, "num_attention_heads": 4}
TUNERS = {
    "prefix": lambda task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3, **SIZES),
    "prompt": lambda task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3, **SIZES),
    "p-tuning": lambda task: peft.PromptEncoderConfig(
        task_type=task, num_virtual_tokens=3, encoder_hidden_size=16, **SIZES
    ),
    "ia3": lambda task: peft.IA3Config(
        task_type=task, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def tokens_one_by_one(model, batch, steps):
    """The likeliest tokens [B, steps], each from a call of its own without what generate() keeps."""
    batch = dict(batch)
    is_pair = "decoder_input_ids" in batch
    ids, mask = ("decoder_input_ids", None) if is_pair else ("input_ids", "attention_mask")
    for _ in range(steps):
        batch[ids] = torch.cat((batch[ids], model(**batch).logits[:, -1:].argmax(-1)), dim=1)
        if mask:
            batch[mask] = torch.nn.functional.pad(batch[mask], (0, 1), value=1)
    return batch[ids][:, -steps:]


@torch.no_grad()
def randomise(adapted):
    """Virtual tokens as strong as others: so that they show, and their gradients are not zero by chance."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
def test_learnt_prompts_train_and_generate(topology, tuner):
    """A learnt prefix fills the cache before the first call, and generate() must not begin with an empty one. The
    first loss must not take the labels' length for that of all that is cached."""
    model = tiny_model(topology, position_embedding_type="rotary")
    ragged = Ragged(topology, "left")
    prompt = {name: ragged.batch[name] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if topology == "encoder_decoder":
        settings["decoder_start_token_id"] = 1
    plain = model.generate(**prompt, **settings)
    adapted = peft.get_peft_model(model, TUNERS[tuner](TASKS[topology]))
    randomise(adapted)
    adapted.train()(**prompt, labels=ragged.labels).loss.backward()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert all(parameter.grad.abs().sum() > 0 for parameter in trained)
    adapted.eval()
    generated = adapted.generate(**prompt, **settings)
    if topology == "encoder_decoder":
        prompt["decoder_input_ids"] = torch.ones(3, 1, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(generated[:, -4:], tokens_one_by_one(adapted, prompt, 4))
    assert not torch.equal(generated, plain)


@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
def test_generation_from_embeddings(topology):
    """generate() refuses them where the method that prepares its inputs does not name them."""
    model, ids = tiny_model(topology), random_tokens(2, 5)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}
    expected = model.generate(ids, **settings)[:, -3:]
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **settings)[:, -3:], expected)


def test_architectures_are_found_by_their_names():
    """`transformers serve` and TRL ask transformers itself for the class that a configuration names."""
    names = [name for classes in AUTO_CLASSES.values() for name in classes.values()]
    found = (
        "import sys, triptych, transformers; print(*(getattr(transformers, name).__name__ for name in sys.argv[1:]))"
    )
    result = subprocess.run([sys.executable, "-c", found, *names], capture_output=True, text=True, check=True)
    assert result.stdout.split() == names


HYBRID = {
    "layer_types": ["linear_attention", "sliding_attention"],
    "sliding_window": 4,
    **DELTA,
}
COMPILED = [
    pytest.param("encoder", {}, id="encoder"),
    pytest.param("decoder", {"position_embedding_type": "rotary", "sliding_window": 4}, id="decoder-rotary-sliding"),
    pytest.param("encoder_decoder", {"position_embedding_type": "relative"}, id="pair-relative"),
    pytest.param(
        "decoder", {"layer_types": ["linear_attention"] * 2, "linear_feature_map": "hedgehog"}, id="decoder-linear"
    ),
    pytest.param("decoder", HYBRID, id="decoder-hybrid"),
    pytest.param("encoder", HYBRID, id="encoder-hybrid"),
]


@pytest.mark.parametrize("topology, changes", COMPILED)
def test_compile_has_no_graph_break(tmp_path, topology, changes):
    """Masks break compiled graphs; saved keys gain prefixes. The graph is traced whole, padding and loss included."""
    torch._dynamo.reset()
    model = tiny_model(topology, **changes)
    batch = collate(examples(topology)[:4])
    expected = model(**batch)
    # The tracing is what could break; generating machine code for it takes longer and is tested in the slow suite.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = compiled(**batch)
    real = batch["labels"] != -100  # a compiled graph computes pads, too
    assert torch.allclose(output.logits[real], expected.logits[real], atol=1e-5)
    assert torch.allclose(output.loss, expected.loss, atol=1e-5)
    model.train()
    compiled(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    compiled.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) <= set(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("topology, changes", COMPILED)
def test_compiled_training_step_equals_eager(topology, changes):
    torch._dynamo.reset()
    batch = collate(examples(topology)[:4])
    models = [tiny_model(topology, **changes).train() for _ in range(2)]
    models[0](**batch).loss.backward()
    torch.compile(models[1], fullgraph=True)(**batch).loss.backward()
    for name, parameter in models[0].named_parameters():
        assert torch.allclose(parameter.grad, models[1].get_parameter(name).grad, atol=1e-5), name


@pytest.mark.parametrize("mode", ["tp_size", "fsdp_size"])
def test_two_processes_load_equal_logits(tmp_path, mode):
    folders = []
    for topology in TOPOLOGIES:
        for position, norm_position in (("rotary", "pre"), ("relative", "post")):
            model = tiny_model(topology, position_embedding_type=position, norm_position=norm_position)
            folders.append(f"{type(model).__name__}-{position}")
            model.save_pretrained(tmp_path / folders[-1])
            batch = collate(examples(topology)[:4])
            with torch.no_grad():
                torch.save((batch, model(**batch).logits), tmp_path / folders[-1] / "example.bin")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += [str(TWO_PROCESSES), mode, *folders]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == [f"{folder}:2" for folder in folders]
