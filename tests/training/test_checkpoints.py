"""What a run's folder goes through: checkpoints kept, torn, averaged and refused; full disks; losses that explode."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from triptych.training import checkpoints, run
from triptych.training.checkpoints import average_weights, find_damage
from triptych.training.errors import UserError
from triptych.training.loop import TrainingLoop
from triptych.training.reporting import read_metrics
from triptych.training.run import train

SETTINGS = ["validate_every=4", "save_every=3", "max_steps=12", "schedule=inverse_sqrt"]


class Stop(Exception):
    """Ends a training as a kill would, as seen from the folder."""


def stop_before(monkeypatch, update):
    original = TrainingLoop._update

    def stopping(loop, batches):
        if loop.state.step == update - 1:
            raise Stop
        return original(loop, batches)

    monkeypatch.setattr(TrainingLoop, "_update", stopping)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    return tmp_path_factory.mktemp("shared") / "run"


@pytest.fixture
def unfinished(shared_run, tiny_recipe, tmp_path):
    """A folder with the checkpoints of updates 3, 4 and 6 of a run that was killed, and a recipe that continues it."""
    if not shared_run.exists():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            stop_before(patch, 8)
            train(tiny_recipe(*SETTINGS, f"output={shared_run}", "keep_checkpoints=9"))
    shutil.copytree(shared_run, tmp_path / "run")
    return tmp_path / "run", lambda *changes: tiny_recipe(*SETTINGS, "keep_checkpoints=9", *changes)


def steps_of(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_loads_by_itself_and_its_manifest_names_every_file(unfinished):
    folder, _ = unfinished
    assert steps_of(folder) == [3, 4, 6]
    checkpoint = folder / "checkpoints" / "step-00000006"
    assert find_damage(checkpoint) is None
    names = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert set(json.loads((checkpoint / "manifest.json").read_text())) == names - {"manifest.json"}
    assert type(AutoModelForSeq2SeqLM.from_pretrained(checkpoint / "model")).__name__.startswith("Triptych")
    state = json.loads((checkpoint / "state.json").read_text())
    assert (state["step"], state["epoch"], state["batches"], state["epoch_batches"]) == (6, 1, 1, 5)
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "running"
    assert {"seed", "versions", "data", "parameters", "processes", "items", "seconds"} <= set(record)


DAMAGE = {
    "a truncated file": lambda folder: cut(folder / "model" / "model.safetensors"),
    "a changed byte": lambda folder: change(folder / "optimizer.bin"),
    "a missing file": lambda folder: (folder / "random_states_0.pkl").unlink(),
    "a manifest that is cut short": lambda folder: cut(folder / "manifest.json"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def change(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(unfinished, damage):
    folder, _ = unfinished
    checkpoint = folder / "checkpoints" / "step-00000006"
    DAMAGE[damage](checkpoint)
    assert find_damage(checkpoint) is not None


def test_a_torn_checkpoint_is_skipped_and_what_is_unfinished_is_removed(unfinished, capsys, monkeypatch):
    folder, recipe = unfinished
    cut(folder / "checkpoints" / "step-00000006" / "optimizer.bin")
    (folder / "checkpoints" / ".step-00000007").mkdir()
    with pytest.raises(Stop):
        stop_before(monkeypatch, 5)
        train(recipe())
    said = capsys.readouterr().err
    assert "step-00000006 is skipped: 'optimizer.bin' has" in said
    assert "from update 4 (epoch 1)" in said
    assert steps_of(folder) == [3, 4]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 4]


def test_without_a_whole_checkpoint_a_run_begins_anew(unfinished, capsys):
    folder, recipe = unfinished
    for step in steps_of(folder):
        cut(folder / "checkpoints" / f"step-{step:08d}" / "manifest.json")
    train(recipe("max_steps=2"))
    said = capsys.readouterr().err
    assert said.count("is skipped: it has no readable manifest.json") == 3
    assert "continues" not in said
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 2]


def test_a_torn_best_checkpoint_is_no_longer_the_best(unfinished):
    folder, recipe = unfinished
    cut(folder / "checkpoints" / "step-00000004" / "optimizer.bin")
    finished = train(recipe("max_steps=7", "validate_every=100"))
    assert finished.best_step == 7


@pytest.mark.parametrize(
    ("measured", "settings", "kept"),
    [
        # Validation after 2, 4, 6, 8, regular checkpoints after 3, 6, 9; the last one after 9.
        ([3.0, 1.0, 2.0, 2.0], ["keep_checkpoints=1"], [4, 9]),
        ([3.0, 1.0, 2.0, 2.0], ["keep_checkpoints=2"], [4, 6, 9]),
        ([3.0, 2.0, 2.0, 1.0], ["keep_checkpoints=1"], [8, 9]),
        ([3.0, 1.0, 2.0, 2.0], ["keep_checkpoints=1", "average_checkpoints=3"], [3, 4, 6, 9]),
    ],
)
def test_old_checkpoints_are_removed(tiny_recipe, monkeypatch, tmp_path, measured, settings, kept):
    """The newest, the best and those to average stay while the run goes on, and none once it has finished."""
    losses = iter([*measured, 5.0, 5.0])
    monkeypatch.setattr(TrainingLoop, "validation_loss", lambda loop, model: next(losses))
    seen = []
    original = run.write_model
    monkeypatch.setattr(run, "write_model", lambda *all: (seen.append(steps_of(tmp_path / "run")), original(*all))[1])
    finished = train(tiny_recipe("validate_every=2", "save_every=3", "max_steps=9", *settings))
    assert seen == [kept]
    assert not (finished.folder / "checkpoints").exists()


def test_the_average_is_the_mean_of_the_files(tmp_path):
    weights = [{"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()} for _ in range(3)]
    for number, tensors in enumerate(weights):
        checkpoints.save_file(tensors, tmp_path / f"{number}.safetensors")
    mean = average_weights(tmp_path / f"{number}.safetensors" for number in range(3))
    for name, tensor in mean.items():
        expected = torch.stack([tensors[name].double() for tensors in weights]).mean(0)
        assert tensor.dtype == weights[0][name].dtype
        torch.testing.assert_close(tensor.double(), expected, atol=0, rtol=1e-7 if name == "a" else 4e-3)


def test_the_final_model_is_the_mean_of_the_last_checkpoints(tiny_recipe, monkeypatch):
    """The best checkpoint and one that a signal left are not among them."""
    files = {}
    original = run.write_model

    def spy(recipe, loop, *others):
        steps = loop.checkpoints.steps()
        files.update({step: load_file(loop.checkpoints.path(step) / "model" / "model.safetensors") for step in steps})
        return original(recipe, loop, *others)

    monkeypatch.setattr(run, "write_model", spy)
    finished = train(tiny_recipe(*SETTINGS[:2], "max_steps=8", "average_checkpoints=2", "keep_checkpoints=5"))
    assert set(files) >= {3, 4, 6, 8}
    for name, tensor in load_file(finished.folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, (files[6][name] + files[8][name]) / 2, rtol=1e-6, atol=1e-7)
    record = json.loads((finished.folder / "run.json").read_text())
    assert record["final"] == {"step": 8, "loss": finished.best_loss}
    assert finished.best_loss not in [
        row.get("validation_loss") for row in read_metrics(finished.folder / "metrics.jsonl")
    ]


def test_another_architecture_data_or_setting_is_refused_with_what_differs(unfinished):
    folder, recipe = unfinished
    before = snapshot(folder)
    for changes, words in [
        (["model.hidden_size=64"], "model.encoder.hidden_size is 64 instead of 32"),
        (["model.hidden_dropout=0.1"], "model.decoder.hidden_dropout is 0.1 instead of 0.0"),
        (["data.dates.train=201"], "the data are others"),
        (["tokenizer.type=bpe", "tokenizer.vocab_size=300"], "the tokenizer is another one"),
        (["optimizer=muon"], "optimizer is 'muon' instead of 'adamw'"),
        (["schedule=linear", "max_steps=12"], "schedule is 'linear' instead of 'inverse_sqrt'"),
        (["warmup_steps=3", "seed=7"], "seed is 7 instead of 1; warmup_steps is 3 instead of 2"),
        (["label_smoothing=0.1"], "label_smoothing is 0.1 instead of 0.0"),
        (["tokenizer.dropout=0.1", "tokenizer.type=bpe"], "tokenizer.dropout is 0.1 instead of 0.0"),
    ]:
        with pytest.raises(UserError, match=r"run' cannot be continued, as .*: change that back, choose") as error:
            train(recipe(*changes))
        assert words in str(error.value)
    assert snapshot(folder) == before


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_said_and_kept_may_change(unfinished, capsys):
    folder, recipe = unfinished
    changes = ["log_every=2", "validate_every=5", "save_every=2", "learning_rate=1e-3", "max_grad_norm=0.5"]
    finished = train(recipe(*changes, "max_steps=10", "patience=7"))
    assert "from update 6 (epoch 2)" in capsys.readouterr().err
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 8, 10]
    assert [row["step"] for row in rows if "validation_loss" in row] == [4, 10]
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    assert rates[5:] == pytest.approx([3e-3 * (2 / 6) ** 0.5, 1e-3 * (2 / 8) ** 0.5, 1e-3 * (2 / 10) ** 0.5])
    assert finished.best_step == 10


def test_a_run_from_before_there_was_a_setting_goes_on(unfinished, capsys):
    folder, recipe = unfinished
    recorded = yaml.safe_load((folder / "recipe.yaml").read_text())
    for name in ("interchangeable", "keep_beside", "window"):
        del recorded["data"][name]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recorded))
    train(recipe())
    assert "from update 6 (epoch 2)" in capsys.readouterr().err


def test_a_schedule_that_max_steps_stretches_keeps_it(tiny_recipe, monkeypatch):
    changes = ["schedule=cosine", "save_every=2"]
    with pytest.raises(Stop), monkeypatch.context() as patch:
        stop_before(patch, 4)
        train(tiny_recipe(*changes))
    with pytest.raises(UserError, match="max_steps is 20 instead of 12"):
        train(tiny_recipe(*changes, "max_steps=20"))


def test_folders_that_are_no_unfinished_runs(tiny_recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    train(tiny_recipe("max_steps=1"))  # an empty folder is as good as none
    finished = snapshot(folder)
    with pytest.raises(UserError, match="is not empty: choose another or add overwrite=true"):
        train(tiny_recipe("max_steps=1"))
    assert snapshot(folder) == finished
    train(tiny_recipe("max_steps=2", "overwrite=true"))
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 2]

    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for overwrite in ("true", "false"):  # what is there is not a run: it is not replaced either
        with pytest.raises(UserError, match="is not empty and holds no run: choose another"):
            train(tiny_recipe(f"output={other}", f"overwrite={overwrite}"))
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("overwrite", ["true", "false"])
def test_a_folder_that_another_training_writes_to_is_left_alone(unfinished, overwrite):
    """Two at once would write over each other's checkpoints, and the first to fail would remove both."""
    folder, recipe = unfinished
    before = snapshot(folder)
    lock = run.claim(folder)
    with pytest.raises(UserError, match=r"run' is in use by another training"):
        train(recipe(f"overwrite={overwrite}"))
    assert snapshot(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    os.close(lock)
    assert train(recipe(f"overwrite={overwrite}")).folder == folder


def test_of_two_trainings_that_begin_in_one_folder_the_second_is_refused(tiny_recipe, tmp_path, monkeypatch):
    """While the second still reads its data there is no folder yet."""
    locks, describe_run = [], run.describe_run

    def other_begins(recipe, parts, accelerator):
        facts = describe_run(recipe, parts, accelerator)
        locks.append(run.begin_folder(tmp_path / "run", parts, facts))
        return facts

    monkeypatch.setattr(run, "describe_run", other_begins)
    with pytest.raises(UserError, match=r"run' is in use by another training"):
        train(tiny_recipe())
    assert (tmp_path / "run" / "run.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    os.close(*locks)


def test_overwriting_an_unfinished_run_begins_anew(unfinished, capsys):
    folder, recipe = unfinished
    train(recipe("overwrite=true", "max_steps=1", "seed=5"))
    assert "continues" not in capsys.readouterr().err
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 1]


@pytest.mark.parametrize(("changes", "command"), [((), ""), (("overwrite=true",), " without overwrite=true")])
def test_a_loss_that_is_not_finite_leaves_the_last_checkpoint_to_go_on_from(unfinished, monkeypatch, changes, command):
    """Where the first loss is spoilt, the message says at which update, epoch and examples."""
    folder, recipe = unfinished
    original = TrainingLoop._require_finite
    monkeypatch.setattr(
        TrainingLoop,
        "_require_finite",
        lambda loop, value, *others: original(loop, value * torch.nan if loop.state.step == 8 else value, *others),
    )
    words = (
        r"^the loss of update 9 is nan \(epoch 2, batches 4 to 4, examples (\d+, ){8}\.\.\.\): lower learning_rate "
        rf"\(0.003\) or max_grad_norm \(1.0\); the same command{command} then continues from update 8$"
    )
    with pytest.raises(UserError, match=words):
        train(recipe("validate_every=8", *changes))
    assert steps_of(folder)[-1] == 8
    monkeypatch.undo()
    monkeypatch.chdir(folder.parent)
    assert train(recipe("validate_every=8", "learning_rate=1e-3")).folder == folder


def test_a_gradient_that_is_not_finite_stops_before_it_is_used(unfinished, monkeypatch):
    folder, recipe = unfinished
    backward = run.Accelerator.backward

    def explode(accelerator, loss):
        backward(accelerator, loss)
        parameter = next(iter(accelerator._models[0].parameters()))
        parameter.grad.fill_(torch.inf)

    monkeypatch.setattr(run.Accelerator, "backward", explode)
    with pytest.raises(UserError, match=r"the gradient norm of update 7 is (inf|nan)"):
        train(recipe())
    assert find_damage(folder / "checkpoints" / "step-00000006") is None


@pytest.mark.parametrize("library", ["safetensors", "torch", "ours"])
def test_a_full_disk_leaves_the_checkpoint_before(unfinished, monkeypatch, library):
    """Writing to /dev/full fails as on a full disk, in each library that writes a part of a checkpoint."""
    folder, recipe = unfinished
    if library == "safetensors":
        original = checkpoints.Checkpoints._save_model

        def fill(manager, models, weights, place):
            (Path(place) / "model").mkdir()
            (Path(place) / "model" / "config.json").symlink_to("/dev/full")
            original(manager, models, weights, place)

        monkeypatch.setattr(checkpoints.Checkpoints, "_save_model", fill)
    elif library == "torch":
        save = torch.save
        monkeypatch.setattr(torch, "save", lambda content, path, **options: save(content, "/dev/full", **options))
    else:
        original_publish = checkpoints.publish

        def full(staging, *others):
            (staging / "state.json").symlink_to("/dev/full")
            original_publish(staging, *others)

        monkeypatch.setattr(checkpoints, "publish", full)
    words = "the checkpoint of update 8 cannot be written: .*; the one of update 6 is intact"
    with pytest.raises(UserError, match=words):
        train(recipe())
    monkeypatch.undo()
    assert steps_of(folder) == [3, 4, 6]  # and nothing unfinished
    assert find_damage(folder / "checkpoints" / "step-00000006") is None


def test_a_full_disk_while_metrics_are_written(unfinished):
    folder, recipe = unfinished
    whole = snapshot(folder / "checkpoints")
    (folder / ".metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"no space is left on the disk of '.*run'; the last checkpoint is intact"):
        train(recipe())
    assert snapshot(folder / "checkpoints") == whole
