"""Every objective, Muon, and a distillation: two processes, replicated (DDP) or sharded (FSDP2), are one that
accumulates two batches."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_files import EVERY, make_recipe, write_files

from triptych.training import run as run_module
from triptych.training.recipe import save_recipe
from triptych.training.reporting import read_metrics

WORKER = Path(__file__).with_name("processes_worker.py")
CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
# How `run.json` calls an engine, to its launch configuration and what it needs to run on CPUs.
ENGINES = {
    "replicas": ("ddp.yaml", {}),
    "FSDP": ("fsdp2.yaml", {"ACCELERATE_TORCH_DEVICE": "cpu"}),
}
# AdamW divides a gradient by its size, so that where it is next to zero its rounding decides the sign of the update.
# An epsilon above such gradients makes the update as smooth in them as the loss is. An epoch has two updates or more.
SETTINGS = ["model.hidden_dropout=0.0", "adam_epsilon=1e-3", "learning_rate=3e-3", "warmup_steps=1"]
SETTINGS += ["max_tokens=160", "max_steps=5", "validate_every=5"]
# Name to objective, topology and changes; `TEACHER` stands for the folder of a trained pair.
CASES = {f"{name}-{topology}": (name, topology, []) for name, topology in EVERY} | {
    "muon": ("causal_lm", "decoder", ["optimizer=muon"]),
    "distillation": (
        "seq2seq",
        "encoder_decoder",
        ["distillation.teacher=TEACHER", "model.hidden_size=8", "model.attn_implementation=eager"]
        + [f"distillation.{name}.weight=1" for name in ("outputs", "hidden_states", "attentions", "relations")],
    ),
}
COMPARED = ("step", "epoch", "loss", "grad_norm", "items", "tokens", "validation_loss")


def launch(engine: str, recipes: list[Path], cwd: Path) -> None:
    config, needed = ENGINES[engine]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)]
    command += ["--mixed_precision", "no", "--main_process_port", str(port), str(WORKER), engine, *map(str, recipes)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= needed | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory):
    """Returns the recipe of a case that leaves its run in a folder."""
    data, place = (tmp_path_factory.mktemp(name) for name in ("data", "teacher"))
    write_files(data)
    teacher = run_module.train(make_recipe(data, place, "seq2seq", "encoder_decoder", "max_steps=1")).folder

    def recipe(case, folder):
        name, topology, changes = CASES[case]
        changes = [change.replace("TEACHER", str(teacher)) for change in changes]
        return make_recipe(data, folder, name, topology, *SETTINGS, *changes)

    return recipe


@pytest.fixture(scope="module", params=["replicas", pytest.param("FSDP", marks=pytest.mark.slow)])
def pairs(request, recipe_of, tmp_path_factory):
    """An engine, and the folder in which it has trained every case on two processes, in one launch."""
    folder, recipes = tmp_path_factory.mktemp(request.param), []
    for case in CASES:
        place = folder / case
        place.mkdir()
        save_recipe(recipe_of(case, place), place / "full.yaml")
        recipes.append(place / "full.yaml")
    launch(request.param, recipes, folder)
    return request.param, folder


@pytest.fixture(scope="module")
def alone(recipe_of, tmp_path_factory):
    """Returns the folder of one process' run that accumulates two batches."""

    @functools.cache
    def run(case):
        recipe = recipe_of(case, tmp_path_factory.mktemp("alone"))
        recipe.gradient_accumulation_steps = 2
        return run_module.train(recipe).folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "plot_losses", lambda *_: None)  # takes longer than the training
        yield run


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_that_accumulates(pairs, alone, case):
    """A launch that silently runs one process, or another engine, would pass the comparison."""
    engine, folder = pairs
    pair = folder / case / "run"
    record = json.loads((pair / "run.json").read_text())
    assert (record["processes"], record["engine"]) == (2, engine)
    one = alone(case)
    rows, expected = (read_metrics(folder / "metrics.jsonl") for folder in (pair, one))
    assert len(rows) == 6
    for row, other in zip(rows, expected, strict=True):
        for key in set(COMPARED) & set(other):
            assert row[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), (key, row, other)
    weights = load_file(pair / "model.safetensors")
    for tensor_name, tensor in load_file(one / "model.safetensors").items():
        torch.testing.assert_close(
            weights[tensor_name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, at=tensor_name: f"{at}: {text}"
        )
