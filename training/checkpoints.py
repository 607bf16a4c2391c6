"""Checkpoints that a kill cannot spoil: written beside, sealed, and only then given their names.

| in `checkpoints/step-00000100/` | holds |
|---|---|
| `model/` | the model as `save_pretrained` writes it, loadable by itself |
| what `accelerator.save_state` writes | optimiser, random states of every process, an engine's own shards |
| `state.json` | step, position in the data, best validation, counters |
| `manifest.json` | size and SHA-256 of every other file; written last |

Names that begin with a dot are unfinished: a save or a deletion was cut short, and the next start removes them. A
folder whose files are not those of its manifest is torn, and passed over. All processes need the same disk.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file
from torch import nn

from triptych.training.errors import Failure

MANIFEST, STATE, MODEL, WEIGHTS = "manifest.json", "state.json", "model", "model.safetensors"
# What full disks raise, depending on the library that writes.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


class Checkpoints:
    """Saves, finds, restores and prunes the checkpoints of one run; every method is called by all processes together.

    Args:
        folder: where they are kept.
        accelerator: with the model and the optimiser prepared by the time something is saved or loaded.
        keep: how many of the newest to keep.
        average: how many of the newest regular ones to keep, besides.
        every: updates between regular ones. A checkpoint for a new best model, or because of a signal, is not regular.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, *, keep: int, average: int, every: int):
        self.folder = folder
        self.accelerator = accelerator
        self.keep = keep
        self.average = average
        self.every = every
        accelerator.register_save_state_pre_hook(self._save_model)
        accelerator.register_load_state_pre_hook(self._load_model)

    def steps(self) -> list[int]:
        """Return the updates after which there are checkpoints, in order."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` updates."""
        return self.folder / f"step-{step:08d}"

    def averaged_steps(self, last: int) -> list[int]:
        """Return the steps that an average over the last checkpoints takes in, when training ended at `last`.

        Where kills and signals fell does not change them.
        """
        regular = [step for step in self.steps() if step % self.every == 0 or step == last]
        return regular[max(0, len(regular) - self.average) :]

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint of model, optimiser, random states and `state`; then remove those that are not needed.

        Raises:
            UserError: it cannot be written, on any process; those before are intact.
        """
        step, staging = state["step"], self._hidden(state["step"])
        self._write(step, lambda: self._on_main(_make_empty, staging))
        self._write(step, lambda: self.accelerator.save_state(str(staging)))
        self._write(step, lambda: self._on_main(publish, staging, self.path(step), state))
        kept = {*self.steps()[-self.keep :], *self.averaged_steps(last=step), state["best_step"]}
        self._on_main(self._remove, set(self.steps()) - kept)

    def newest(self) -> tuple[int | None, list[str]]:
        """Return the last step with a whole checkpoint, and what is wrong with those after it; nothing changes."""
        found, problems = None, []
        if self.accelerator.is_main_process:
            for step in reversed(self.steps()):
                problem = find_damage(self.path(step))
                if problem is None:
                    found = step
                    break
                problems.append(f"{self.path(step)} is skipped: {problem}")
        return tuple(broadcast_object_list([found, problems]))

    def load(self, step: int) -> dict[str, Any]:
        """Restore what `save` wrote after `step` updates, and return its `state`.

        All that is torn, unfinished or later is removed. A process that the saving run did not have keeps its own
        random state.
        """
        self._on_main(self._tidy, step)
        self.accelerator.wait_for_everyone()
        self.accelerator.load_state(str(self.path(step)))
        # Checkpoints lie between updates, however many batches the next update accumulates.
        self.accelerator.step = 0
        return json.loads((self.path(step) / STATE).read_text(encoding="utf-8"))

    def export(self, steps: list[int], folder: Path) -> None:
        """Write the mean of the models after `steps` (or the one) to `folder`, on the main process."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.path(steps[-1]) / MODEL, folder)
        if len(steps) > 1:
            mean = average_weights(self.path(step) / MODEL / WEIGHTS for step in steps)
            save_file(mean, folder / WEIGHTS, metadata={"format": "pt"})

    def _hidden(self, step: int) -> Path:
        return self.folder / f".{self.path(step).name}"

    def _on_main(self, work: Callable[..., None], *arguments: Any) -> None:
        if self.accelerator.is_main_process:
            work(*arguments)

    def _write(self, step: int, work: Callable[[], None]) -> None:
        """Do a part of saving; where it fails on one process it fails on all, instead of leaving them waiting."""
        problem = None
        try:
            work()
        except WRITE_ERRORS as error:
            problem = error
        failures = torch.tensor(int(problem is not None), device=self.accelerator.device)
        if self.accelerator.reduce(failures, "sum"):
            self._on_main(shutil.rmtree, self._hidden(step), True)
            cause = str(problem or "another process failed").strip().splitlines()[0]
            before = f"; the one of update {self.steps()[-1]} is intact" if self.steps() else ""
            raise Failure(f"the checkpoint of update {step} cannot be written: {cause}{before}") from problem

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            # A deletion that is cut short must not leave something that looks like a checkpoint.
            self.path(step).rename(self._hidden(step))
            shutil.rmtree(self._hidden(step))

    def _tidy(self, last: int) -> None:
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path)
        self._remove(step for step in self.steps() if step > last or find_damage(self.path(step)))

    def _save_model(self, models: list[nn.Module], weights: list[dict], folder: str) -> None:
        """Save the model in one form for every engine and number of processes, in place of accelerate's."""
        weights.clear()
        # Sharded parameters are gathered by all processes together, before the main one writes.
        state_dict = self.accelerator.get_state_dict(models[0])
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(models[0])
            # Gathered tensors no longer show that they are one.
            tied = model.all_tied_weights_keys
            state_dict = {name: tensor for name, tensor in state_dict.items() if tied.get(name) not in state_dict}
            model.save_pretrained(Path(folder) / MODEL, state_dict=state_dict, max_shard_size="1TB")

    def _load_model(self, models: list[nn.Module], folder: str) -> None:
        while models:  # engines that shard load their own files
            load_model(self.accelerator.unwrap_model(models.pop()), Path(folder) / MODEL / WEIGHTS)


def publish(staging: Path, final: Path, state: dict[str, Any]) -> None:
    """Complete the checkpoint in `staging`, see to it that it is on the disk, and give it its name."""
    (staging / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    seal(staging)
    shutil.rmtree(final, ignore_errors=True)
    staging.rename(final)
    _flush(final.parent)


def seal(folder: Path) -> None:
    """Write the manifest of `folder`, once all its files are on the disk."""
    files = _files(folder)
    for path in files.values():
        _flush(path)
    for path in {path.parent for path in files.values()}:
        _flush(path)
    manifest = {name: describe(path) for name, path in files.items()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _flush(folder / MANIFEST)
    _flush(folder)


def find_damage(folder: Path) -> str | None:
    """Return in what way the files of `folder` are not those of its manifest, or None where they are."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it has no readable {MANIFEST}"
    files = _files(folder)
    for name, expected in manifest.items():
        if name not in files:
            return f"'{name}' is missing"
        if files[name].stat().st_size != expected["size"]:
            return f"'{name}' has {files[name].stat().st_size} bytes instead of {expected['size']}"
        if describe(files[name]) != expected:
            return f"'{name}' has other content than was written"
    return None


def describe(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def average_weights(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of each tensor over safetensors files, summed in float64 and in its own type again.

    Checkpoint averaging as in Vaswani et al. 2017 (arXiv 1706.03762, section 6.1).
    """
    files = list(files)
    sums, types = {}, {}
    for path in files:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                tensor = weights.get_tensor(name)
                types[name] = tensor.dtype
                sums[name] = sums.get(name, 0) + tensor.double()
    return {name: (total / len(files)).to(types[name]) for name, total in sums.items()}


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths if path != folder / MANIFEST}


def _flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
