"""What attention replaced, beside it: tokens a second in training and in writing as texts grow, of models of one width.

All take turns, so that a machine whose speed drifts slows them alike.

Shapes: B texts, T tokens of each source and of each target.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from triptych import TriptychConfig, TriptychForConditionalGeneration
from triptych.training.measuring import device, run_apart, seconds_of, training_step
from triptych.training.memory import keep_freed_memory
from triptych.training.plots import check_picture, plot_curves
from triptych.training.reporting import follow

PRESETS = {
    "Transformer": "transformer_tiny",
    "LSTMs with attention": "lstm_attention",
    "RNNsearch": "rnn_search",
    "LSTMs behind a Transformer": "recurrent_decoder",
}
VOCABULARY = 4000
TRAINED = 4096  # target tokens of an update, in few long texts or many short ones
WRITTEN = 8  # texts that are written at a time


@dataclass
class Pace:
    """Of one model at one length: parameters, and median target tokens a second of updates and of greedy writing."""

    model: str
    parameters: int
    length: int
    trained: float
    written: float


def run_recurrence_benchmark(lengths: Iterable[int], rounds: int, threads: int = 0) -> Iterator[Pace]:
    """Measure all models at each length T, in a process of its own."""
    for length in sorted(lengths):
        yield from run_apart(measure_paces, length, rounds, threads)


def measure_paces(length: int, rounds: int, threads: int) -> list[Pace]:
    """Let the models train and write in turns, in a process that has done nothing before."""
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    models = {name: build(preset) for name, preset in PRESETS.items()}
    trained, written = (
        torch.randint(3, VOCABULARY, (texts, length), device=device()) for texts in (max(1, TRAINED // length), WRITTEN)
    )
    turns = {(name, "train"): training_step(model, trained) for name, model in models.items()}
    turns |= {(name, "write"): writing(model, written) for name, model in models.items()}
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for _ in range(1 + rounds):
        for turn, work in turns.items():
            times[turn].append(seconds_of(work))
    seconds = {turn: statistics.median(own[1:]) for turn, own in times.items()}  # the first round warms up
    return [
        Pace(
            name,
            model.num_parameters(),
            length,
            trained.numel() / seconds[name, "train"],
            written.numel() / seconds[name, "write"],
        )
        for name, model in models.items()
    ]


def build(preset: str) -> TriptychForConditionalGeneration:
    """A preset's model, of the width that all of these presets have."""
    config = TriptychConfig.from_preset(preset, vocab_size=VOCABULARY, hidden_dropout=0.0)
    return TriptychForConditionalGeneration(config).to(device())


def writing(model: TriptychForConditionalGeneration, sources: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Greedy writing of as many tokens as `sources` [B, T] have."""
    length = sources.shape[1]
    return lambda: model.eval().generate(sources, min_new_tokens=length, max_new_tokens=length, do_sample=False)


def show_recurrence_benchmark(paces: Iterable[Pace], picture: Path, json_lines: bool) -> None:
    """Print a row for each model and length, as a table or as JSON lines as they come, and draw their curves."""
    check_picture(picture)
    done = follow(paces, "warming up", lambda last: f"{last.model}: {last.length:,} tokens", json_lines)
    table = Table("tokens", "model", "parameters", "trained", "written", title="tokens a second")
    for pace in done:
        speeds = (f"{speed:,.0f}" for speed in (pace.trained, pace.written))
        table.add_row(f"{pace.length:,}", pace.model, f"{pace.parameters:,}", *speeds)
    panels = {"trained tokens a second": "trained", "written tokens a second": "written"}
    plot_curves(
        {
            label: {name: [(row.length, getattr(row, field)) for row in done if row.model == name] for name in PRESETS}
            for label, field in panels.items()
        },
        picture,
    )
    if not json_lines:
        Console().print(table)
        Console().print(f"picture: {picture}")
