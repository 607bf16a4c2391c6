"""Whatever ends a training, the same command goes on as if nothing had happened: bitwise, on one process and on two."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_files import make_recipe, write_files
from tiny_dates import TINY

from triptych.training.recipe import load_recipe
from triptych.training.reporting import read_metrics
from triptych.training.run import train

WORKER = Path(__file__).with_name("resume_worker.py")
# Five batches an epoch on one process; checkpoints after updates 4, 8 (the best so far), 5, 10 (regular) and 12.
SETTINGS = ["model.hidden_dropout=0.1", "validate_every=4", "save_every=5", "average_checkpoints=2"]
KILL = {"signal": "SIGKILL"}
WHOLE = {"processes": 1}
PAIR = {"processes": 2}

# What ends a run, and the updates that the sittings after that go on from; in groups that share a worker.
ENDS = {
    "quick": {
        "mid-epoch": ([WHOLE | KILL | {"before": 10}], [8]),
        "at an epoch's end": ([WHOLE | KILL | {"before": 6}], [5]),
        "while a manifest is made": ([WHOLE | KILL | {"within": ["describe", 9]}], [4]),
        "SIGTERM": ([WHOLE | {"signal": "SIGTERM", "before": 7}], [7]),
    },
    "slow": {
        "just before a checkpoint gets its name": ([WHOLE | KILL | {"within": ["_flush", 20]}], [4]),
        "just after a checkpoint got its name": ([WHOLE | KILL | {"within": ["_flush", 21]}], [5]),
        "before the first checkpoint": ([WHOLE | KILL | {"before": 3}], [None]),
        "while the final model is made": ([WHOLE | KILL | {"within": ["average_weights", 0]}], [12]),
        "SIGINT, then a kill": ([WHOLE | {"signal": "SIGINT", "before": 7}, WHOLE | KILL | {"before": 10}], [7, 8]),
        "SIGTERM twice": ([WHOLE | {"signal": "SIGTERM", "before": 7, "times": 2}], [5]),
    },
    "pair": {
        "mid-epoch": ([PAIR | KILL | {"before": 10, "rank": 1}], [8]),
        "during a save": ([PAIR | KILL | {"within": ["describe", 10]}], [4]),
    },
    "slow pair": {
        "at an epoch's end": ([PAIR | KILL | {"before": 7, "rank": 1}], [5]),
        "SIGTERM to one of them": ([PAIR | {"signal": "SIGTERM", "before": 7, "rank": 1}], [7]),
    },
}
CODES = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143, "SIGINT": 130}


def run_worker(folder: Path, runs: dict[str, dict]) -> dict[str, list[dict]]:
    """Train `runs`, by name, in `folder / name`; returns the exit codes and the stderr of each sitting."""
    for name, run in runs.items():
        run["changes"] = [*run.get("changes", SETTINGS), f"output={folder / name}"]
        run["log"] = str(folder / f"{name}.log")
    places = os.pathsep.join([str(WORKER.parent), *sys.path])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    command = [sys.executable, str(WORKER), json.dumps(list(runs.values()))]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    results = iter(json.loads(result.stdout.splitlines()[-1]))
    return {name: [next(results) for _ in run["sittings"]] for name, run in runs.items()}


def metrics(folder: Path) -> list[dict]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert metrics(folder) == metrics(expected)
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    record, other = (json.loads((path / "run.json").read_text()) for path in (folder, expected))
    for key in ("status", "step", "epoch", "items", "tokens", "best", "best_step", "final", "data"):
        assert record[key] == other[key], key
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in expected.iterdir())


def assert_continued(sittings: list[dict], ends: list[dict], continued: list[int | None]) -> None:
    for result, end in zip(sittings, ends, strict=False):
        code = -signal.SIGTERM if end.get("times") else CODES[end["signal"]]
        assert result["codes"][end.get("rank", 0)] == code, result["said"]
    for result, step in zip(sittings[1:], continued, strict=True):
        assert f"{ends[0]['processes']} process(es)" in result["said"]
        assert (f"from update {step} " in result["said"]) if step else ("continues" not in result["said"])
    assert set(sittings[-1]["codes"]) == {0}, sittings[-1]["said"]


@pytest.fixture(scope="module")
def sittings_of(tmp_path_factory):
    """Returns the folder and the sittings of a group of `ENDS`, and of a run that nothing interrupts."""

    @functools.cache
    def run(group):
        processes = PAIR if "pair" in group else WHOLE
        runs = {name: {"sittings": [*planned, processes]} for name, (planned, _) in ENDS[group].items()}
        folder = tmp_path_factory.mktemp("runs")
        return folder, run_worker(folder, {"uninterrupted": {"sittings": [processes]}} | runs)

    return run


@pytest.mark.parametrize(
    ("group", "end"),
    [
        pytest.param(group, end, marks=[pytest.mark.slow] * ("slow" in group), id=f"{group}-{end}")
        for group, ends in ENDS.items()
        for end in ends
    ],
)
def test_a_run_goes_on_exactly(sittings_of, group, end):
    """Resuming changes data order or random state."""
    folder, sittings = sittings_of(group)
    planned, continued = ENDS[group][end]
    assert_continued(sittings[end], planned, continued)
    assert_same_run(folder / end, folder / "uninterrupted")
    if planned[0]["signal"] == "SIGTERM" and "times" not in planned[0]:
        assert "stopped by SIGTERM after update 7; the same command continues" in sittings[end][0]["said"]


# Objectives that draw anew in each epoch, or read what is no text.
OTHERS = {
    "masked_lm": "encoder",
    "image_classification": "encoder",
    "audio_classification": "encoder",
    "speech_to_text": "encoder_decoder",
}


@pytest.fixture(scope="module")
def sittings_of_others(tmp_path_factory):
    """The folder and the sittings of a run that is killed, and of one that is not, for each of `OTHERS`."""
    folder = tmp_path_factory.mktemp("others")
    data, runs = write_files(tmp_path_factory.mktemp("data")), {}
    for name, topology in OTHERS.items():
        (folder / name).mkdir()
        make_recipe(data, folder / name, name, topology)
        changes = ["max_steps=10", "validate_every=3", "warmup_steps=2", "max_tokens=1024"]
        run = {"recipe": str(folder / name / "mine.yaml"), "changes": changes}
        runs[f"{name}, uninterrupted"] = run | {"sittings": [WHOLE]}
        runs[f"{name}, killed"] = run | {"sittings": [WHOLE | KILL | {"before": 9}, WHOLE]}
    return folder, run_worker(folder, runs)


@pytest.mark.parametrize("name", OTHERS)
def test_other_objectives_go_on_exactly(sittings_of_others, name):
    """Resuming changes data order or random state: what is drawn anew in each epoch is no other after a kill."""
    folder, sittings = sittings_of_others
    assert_continued(sittings[f"{name}, killed"], [WHOLE | KILL], [6])
    assert_same_run(folder / f"{name}, killed", folder / f"{name}, uninterrupted")


def test_a_student_goes_on_exactly(tmp_path):
    """Its learnt projections are lost, or its teacher draws random numbers."""
    teacher = train(load_recipe("dates", [*TINY, "max_steps=1", f"output={tmp_path / 'teacher'}"])).folder
    signals = [f"distillation.{name}.weight=1" for name in ("outputs", "hidden_states")]
    run = {"changes": [*SETTINGS, f"distillation.teacher={teacher}", "model.hidden_size=16", *signals]}
    runs = {
        "uninterrupted": run | {"sittings": [WHOLE]},
        "killed": run | {"sittings": [WHOLE | KILL | {"before": 10}, WHOLE]},
    }
    sittings = run_worker(tmp_path, runs)
    assert_continued(sittings["killed"], [WHOLE | KILL], [8])
    assert_same_run(tmp_path / "killed", tmp_path / "uninterrupted")


@pytest.mark.slow
def test_another_number_of_processes_goes_on_from_the_same_share_of_the_epoch(tmp_path):
    """Two processes, then one that accumulates two batches: the data are those of two, to the item."""
    undropped = [*SETTINGS, "model.hidden_dropout=0.0"]
    one = WHOLE | {"changes": ["gradient_accumulation_steps=2"]}
    runs = {
        "two": {"sittings": [PAIR], "changes": undropped},
        "then one": {"sittings": [PAIR | KILL | {"before": 10}, one], "changes": undropped},
    }
    sittings = run_worker(tmp_path, runs)
    said = sittings["then one"][1]["said"]
    assert "1 process(es) instead of 2: it goes on from the same share of the epoch, but data order" in said
    assert sittings["then one"][1]["codes"] == [0], said
    rows, expected = metrics(tmp_path / "then one"), metrics(tmp_path / "two")
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    weights = load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "then one" / "model.safetensors").items():
        assert tensor.sub(weights[name]).abs().max() < 1e-4, name


@pytest.mark.slow
def test_torchrun_stops_on_a_signal_and_goes_on(tmp_path):
    """A signal to the launcher reaches its processes, who save; the same command continues and finishes."""
    changes = [*TINY, "max_steps=300", "validate_every=20", f"output={tmp_path / 'run'}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, "-m", "triptych.training.cli", "train", "dates", *changes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **options)
    while not (tmp_path / "run" / "checkpoints" / "step-00000020").exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.1)
    first.terminate()
    said = first.communicate(timeout=120)[1]
    assert first.returncode != 0
    assert "2 process(es)" in said and "stopped by SIGTERM after update" in said, said
    second = subprocess.run(command, **options, timeout=300)
    assert second.returncode == 0, second.stderr
    assert "2 process(es)" in second.stderr and "continues" in second.stderr
    rows = [row["step"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert rows == list(range(1, 301))
