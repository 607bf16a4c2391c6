"""What a training says while it runs: a progress bar, a line per validation, metrics as JSON lines, and the record of
the run as a whole."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from triptych.training.loop import TrainingState

METRICS_FILE, RECORD_FILE, CURVE_FILE = "metrics.jsonl", "run.json", "loss.png"
RUNNING, FINISHED = "running", "finished"


def follow(results: Iterable[Any], waiting: str, describe: Callable[[Any], str], json_lines: bool) -> list[Any]:
    """Collect dataclasses as they come, say which was the last, and print each as a JSON line if asked to.

    Args:
        waiting: what is said before the first.
        describe: what is said after each.
    """
    done = []
    with Console().status(waiting) as status:
        for result in results:
            done.append(result)
            status.update(describe(result))
            if json_lines:
                print(json.dumps(asdict(result)), flush=True)
    return done


class RunLog:
    """Writes `metrics.jsonl`, `run.json` and the trackers, and shows progress on stderr, on the main process only.

    A line of the metrics file holds `step` and either

    - `epoch` (full passes over the data), `loss`, `grad_norm`, `learning_rate`, `items` (what the loss was summed over,
      so far: tokens with a label, or examples), `tokens` (input tokens without pads, so far), `tokens_per_second`; or
    - `validation_loss` and `validation_NAME` for each of the objective's measures.

    Args:
        folder: of the run; it exists.
        max_steps: updates in all.
        accelerator: with the trackers that the recipe names.
        facts: what `run.json` says besides the training's state.
    """

    def __init__(self, folder: Path, max_steps: int, accelerator: Accelerator, facts: dict[str, Any]):
        self.folder = folder
        self.max_steps = max_steps
        self.accelerator = accelerator
        self.facts = facts
        self.enabled = accelerator.is_main_process
        self.first_step = 0
        self.started = time.perf_counter()
        self.speed = 0.0
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self.enabled,
        )
        self.bar = self.progress.add_task("training", total=max_steps, loss=math.nan, speed=0.0)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def start(self, step: int) -> None:
        """Begin after `step` updates: what the files say about later ones is cut off."""
        self.first_step = step
        self.started = time.perf_counter()
        self.progress.reset(self.bar, total=self.max_steps, completed=step)
        metrics = self.folder / METRICS_FILE
        if self.enabled and metrics.exists():
            rows = [line for line in metrics.read_text(encoding="utf-8").splitlines() if _is_upto(line, step)]
            write_whole(metrics, "".join(row + "\n" for row in rows))
        options = {"tensorboard": {"purge_step": step + 1}} if step else {}
        self.accelerator.init_trackers(self.folder.name, init_kwargs=options)

    def advance(self, step: int, loss: float) -> None:
        """Move the progress bar."""
        self.progress.update(self.bar, completed=step, loss=loss, speed=self.speed)

    def training(
        self, state: "TrainingState", loss: float, grad_norm: float, learning_rate: float, speed: float
    ) -> None:
        """Record one update; `speed` is in input tokens per second, of all processes together."""
        self.speed = speed
        self._write(
            state.step,
            epoch=state.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            items=state.items,
            tokens=state.tokens,
            tokens_per_second=round(speed, 1),
        )

    def validation(self, state: "TrainingState", values: dict[str, float]) -> None:
        """Record one validation and say it, with the time left."""
        self._write(state.step, **{f"validation_{name}": value for name, value in values.items()})
        elapsed = time.perf_counter() - self.started
        left = elapsed / max(1, state.step - self.first_step) * (self.max_steps - state.step)
        best = " (best)" if state.best_step == state.step else ""
        self.say(
            f"step {state.step:,} of {self.max_steps:,}: validation {show_values(values)}{best}, "
            f"{self.speed:,.0f} tokens/s, {_clock(elapsed)} spent, {_clock(left)} left"
        )

    def record(self, state: "TrainingState", status: str = RUNNING, **more: Any) -> None:
        """Write `run.json` anew."""
        if self.enabled:
            record = {"status": status, **asdict(state), **self.facts, **more}
            write_whole(self.folder / RECORD_FILE, json.dumps(record, indent=1))

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.progress.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, step: int, **values: Any) -> None:
        self.accelerator.log(values, step)
        if self.enabled:
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old content or the new."""
    staging = path.with_name(f".{path.name}")
    with staging.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staging.rename(path)


def show_values(values: dict[str, float]) -> str:
    """Return measures as `loss 1.2345, accuracy 67.8900`."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def _is_upto(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except ValueError:  # a kill cut it short
        return False


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
