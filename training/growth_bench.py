"""What a token of a training step costs as the work grows: more texts, longer ones, more layers, a larger vocabulary.

Shapes: B texts, T tokens.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from triptych import TriptychConfig, TriptychForCausalLM
from triptych.training.measuring import device, run_apart, seconds_of, training_step
from triptych.training.memory import keep_freed_memory
from triptych.training.plots import check_picture, plot_growth
from triptych.training.reporting import follow

# What grows, from where all the others stay at.
BASE = {"texts": 8, "tokens": 128, "layers": 4, "vocabulary": 8000}
AXES = {
    "texts": (1, 2, 4, 8, 16, 32, 64),
    "tokens": (16, 32, 64, 128, 256, 512, 1024, 2048),
    "layers": (1, 2, 4, 8, 16, 32),
    "vocabulary": (1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000),
}


@dataclass
class Growth:
    """Median seconds for a token of a training step, where one thing is `value` and the others are as in `BASE`."""

    axis: str
    value: int
    seconds_per_token: float


def run_growth_benchmark(rounds: int, threads: int = 0) -> Iterator[Growth]:
    """Measure along every axis, each value in a process of its own."""
    for axis, values in AXES.items():
        for value in values:
            yield run_apart(measure_growth, axis, value, rounds, threads)


def measure_growth(axis: str, value: int, rounds: int, threads: int) -> Growth:
    """A training step of a decoder of width 256 with AdamW, in a process that has done nothing before."""
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = BASE | {axis: value}
    config = TriptychConfig(
        topology="decoder", vocab_size=shape["vocabulary"], hidden_size=256, intermediate_size=1024,
        num_hidden_layers=shape["layers"], num_attention_heads=4, position_embedding_type="rotary",
        norm_position="pre",
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (shape["texts"], shape["tokens"]), device=device())
    step = training_step(TriptychForCausalLM(config).to(device()), tokens)
    times = [seconds_of(step) for _ in range(rounds + 1)][1:]  # the first one warms up
    return Growth(axis, value, statistics.median(times) / tokens.numel())


def show_growth_benchmark(costs: Iterable[Growth], picture: Path, json_lines: bool) -> None:
    """Print a row for each measurement, as a table or as JSON lines as they come, and draw a curve for each axis."""
    check_picture(picture)
    done = follow(costs, "warming up", lambda last: f"after {last.axis} {last.value:,}", json_lines)
    table = Table("what grows", "to", "microseconds a token", title=f"{torch.get_num_threads()} threads")
    for cost in done:
        table.add_row(cost.axis, f"{cost.value:,}", f"{1e6 * cost.seconds_per_token:.1f}")
    if not json_lines:
        Console().print(table)
    plot_growth(done, picture)
