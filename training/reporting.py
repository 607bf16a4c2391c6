"""What a training says while it runs: a progress bar, a line per validation, and metrics as JSON lines."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from triptych.training.loop import TrainingState


class RunLog:
    """Writes `metrics.jsonl` and shows progress on stderr, on the main process; elsewhere it does nothing.

    A line of the file holds `step` and either `loss`, `grad_norm`, `learning_rate`, `epoch`, `tokens` (target tokens
    so far) and `tokens_per_second`, or `validation_loss`.

    Args:
        path: the metrics file, which is begun anew.
        max_steps: updates to come.
        enabled: whether this is the main process.
    """

    def __init__(self, path: Path, max_steps: int, enabled: bool):
        self.path = path
        self.max_steps = max_steps
        self.enabled = enabled
        self.started = time.perf_counter()
        self.speed = 0.0
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s  left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self.bar = self.progress.add_task("training", total=max_steps, loss=math.nan, speed=0.0)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def advance(self, step: int, loss: float) -> None:
        """Move the progress bar."""
        self.progress.update(self.bar, completed=step, loss=loss, speed=self.speed)

    def training(
        self, state: "TrainingState", loss: float, grad_norm: float, learning_rate: float, speed: float
    ) -> None:
        """Record one update; `speed` is in target tokens per second."""
        self.speed = speed
        self._write(
            step=state.step,
            epoch=state.epoch,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=state.tokens,
            tokens_per_second=round(speed, 1),
        )

    def validation(self, state: "TrainingState", loss: float) -> None:
        """Record one validation and say it, with the time left."""
        self._write(step=state.step, validation_loss=loss)
        elapsed = time.perf_counter() - self.started
        left = elapsed / state.step * (self.max_steps - state.step)
        best = " (best)" if state.best_step == state.step else ""
        self.say(
            f"step {state.step:,} of {self.max_steps:,}: validation loss {loss:.4f}{best}, "
            f"{self.speed:,.0f} tokens/s, {_clock(elapsed)} spent, {_clock(left)} left"
        )

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.progress.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, **values: Any) -> None:
        if self.enabled:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
