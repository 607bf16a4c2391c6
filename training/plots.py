"""Pictures of a training and of a model: the loss curve, what positions do, and where attention looks."""

import os
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.colors import PowerNorm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from triptych.training.attention_maps import AttentionMaps, read_attention
from triptych.training.errors import UserError
from triptych.training.position_views import PositionView
from triptych.training.reporting import read_metrics

Curves = dict[str, list[tuple[float, float]]]  # by their labels
# Colours of the palette by Okabe and Ito (2008), told apart with any colour vision.
TRAINING_COLOR, VALIDATION_COLOR = "#0072B2", "#D55E00"
SCORE_COLORS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MOST_LABELS = 48  # tokens that are named beside a map; more could not be read
# Of what a layer sees.
LAYER_COLORS = {
    "full_attention": "#0072B2",
    "sliding_attention": "#009E73",
    "chunked_attention": "#CC79A7",
    "linear_attention": "#E69F00",
    "lstm": "#56B4E9",
    "gru": "#56B4E9",
}


def check_picture(picture: Path) -> None:
    """Raise a `UserError` where nothing can be drawn into the file `picture`, before hours of measuring for it."""
    formats = FigureCanvasBase.get_supported_filetypes()
    if picture.suffix.lower().removeprefix(".") not in formats:
        raise UserError(f"--picture '{picture}' must end in one of .{', .'.join(sorted(formats))}")
    if picture.is_dir() or not os.access(picture.parent, os.W_OK):
        raise UserError(f"--picture '{picture}' must be a file in a folder that can be written")


def plot_losses(metrics: Path, picture: Path, title: str) -> None:
    """Draw training and validation loss over updates, from a metrics file to a PNG file.

    Below them, where the file has them, come the other measures of validation, or else the learning rate.
    """
    rows = read_metrics(metrics)
    scores = sorted({key for row in rows for key in row if key.startswith("validation_")} - {"validation_loss"})
    lower = scores or [key for key in ("learning_rate",) if any(key in row for row in rows)]
    figure, panels = plt.subplots(
        1 + bool(lower), figsize=(8, 8 if lower else 5), layout="constrained", sharex=True, squeeze=False
    )
    axes = panels[0, 0]
    training = {"color": TRAINING_COLOR, "linewidth": 1}
    validation = {"color": VALIDATION_COLOR, "marker": "o", "linewidth": 2}
    axes.plot(*_curve(rows, "loss"), label="training (as optimised)", **training)
    axes.plot(*_curve(rows, "validation_loss"), label="validation", **validation)
    axes.set(title=title, ylabel="loss per item", yscale="log")
    axes.legend()
    for key, color in zip(lower, cycle(SCORE_COLORS)):
        style = validation if scores else training
        panels[1, 0].plot(*_curve(rows, key), label=key.removeprefix("validation_"), **style | {"color": color})
    if lower:
        panels[1, 0].set(ylabel="validation" if scores else "learning rate")
    if scores:
        panels[1, 0].legend()
    for panel in panels[:, 0]:
        panel.grid(alpha=0.3, which="both")
    panels[-1, 0].set(xlabel="update")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def plot_costs(costs: list, exponents: dict[str, tuple[float, float]], picture: Path) -> None:
    """Draw seconds and bytes of `attention_bench.Cost`s against their lengths, to a PNG file, both on log scales."""
    curves: dict[str, Curves] = {"seconds, forward and backward": {}, "MiB at the peak": {}}
    for contestant in dict.fromkeys(cost.contestant for cost in costs):
        own = [cost for cost in costs if cost.contestant == contestant]
        drawn = [[cost.seconds for cost in own], [cost.peak_bytes / 2**20 for cost in own]]
        exponent = exponents.get(contestant, (None, None))
        for panel, values, power in zip(curves.values(), drawn, exponent, strict=True):
            label = contestant if power is None else f"{contestant}: T^{power:.2f}"
            panel[label] = list(zip([cost.length for cost in own], values, strict=True))
    plot_curves(curves, picture)


def plot_curves(curves: dict[str, Curves], picture: Path) -> None:
    """Draw a panel of curves over numbers of tokens for each measure, to a PNG file, all on log scales."""
    figure, panels = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 5), layout="constrained")
    for panel, (what, own) in zip(panels, curves.items(), strict=True):
        for color, (label, points) in zip(cycle(SCORE_COLORS), own.items()):
            panel.plot(*zip(*points, strict=True), color=color, marker="o", linewidth=2, label=label)
        panel.set(xlabel="tokens", ylabel=what, xscale="log", yscale="log")
        lengths = sorted({length for points in own.values() for length, _ in points})
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.xaxis.minorticks_off()
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def plot_ratios(measurements: list, picture: Path) -> None:
    """Draw the ratios of `bench.Measurement`s as bars, those of one peer in one colour, to a PNG file."""
    peers = list(dict.fromkeys(row.peer for row in measurements))
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.32 * len(measurements)), layout="constrained")
    for peer, color in zip(peers, cycle(SCORE_COLORS)):
        own = [(place, row.ratio) for place, row in enumerate(measurements) if row.peer == peer]
        bars = axes.barh(*zip(*own, strict=True), color=color, label=f"beside {peer}")
        axes.bar_label(bars, fmt="%.2f", padding=3, bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
    are_several = len({row.allocator for row in measurements}) > 1
    names = [
        f"{row.name}: {row.task}{'' if row.dtype == 'float32' else ', ' + row.dtype}"
        f"{f' ({row.allocator})' if are_several else ''}"
        for row in measurements
    ]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.margins(x=0.1)
    axes.set(xlabel="times as fast, with equal weights on equal batches")
    figure.legend(loc="outside lower center", ncols=len(peers))
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def plot_growth(costs: list, picture: Path) -> None:
    """Draw microseconds a token of `growth_bench.Growth`s against what grows, a panel for each, to a PNG file."""
    axes = list(dict.fromkeys(cost.axis for cost in costs))
    figure, panels = plt.subplots(1, len(axes), figsize=(3.2 * len(axes), 3.4), layout="constrained", squeeze=False)
    for panel, axis, color in zip(panels[0], axes, cycle(SCORE_COLORS)):
        own = [(cost.value, 1e6 * cost.seconds_per_token) for cost in costs if cost.axis == axis]
        panel.plot(*zip(*own, strict=True), color=color, marker="o", linewidth=2)
        panel.set(xlabel=axis)
        panel.set_ylim(bottom=0)
        if axis in ("texts", "tokens"):
            panel.set(xscale="log")
        else:  # where the cost grows along a straight line
            panel.locator_params(axis="x", nbins=4)
        panel.grid(alpha=0.3, which="both")
    panels[0, 0].set(ylabel="microseconds a token")
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _curve(rows: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def plot_cross_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, picture: Path
) -> None:
    """Draw which source tokens the decoder looks at as it writes each target token.

    The picture shows the mean over the heads of the last decoder layer. The model must run with
    `attn_implementation="eager"`, the one that returns weights.
    """
    *_, maps = read_attention(model, tokenizer, source)
    width, height = (max(4.0, 0.28 * len(labels) + 2) for labels in (maps.keys, maps.queries))
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    image = axes.imshow(maps.layers[-1].mean(0).numpy(), cmap="cividis", vmin=0, aspect="auto")
    axes.set_xticks(range(len(maps.keys)), _plain(maps.keys))
    axes.set_yticks(range(len(maps.queries)), _plain(maps.queries))
    axes.set(title="Cross-attention, last layer, mean of heads", xlabel="source token", ylabel="target token")
    figure.colorbar(image, label="attention weight")
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def _plain(labels: list[str]) -> list[str]:
    """Labels that matplotlib does not take for formulae."""
    return [label.replace("$", r"\$") for label in labels]


def plot_maps(maps: AttentionMaps, layer_idx: int, picture: Path) -> None:
    """Draw every head of one layer side by side, each from none of the weight to its largest, to a PNG file."""
    weights = maps.layers[layer_idx].numpy()
    columns = next(number for number in (4, 3, 2, 1) if len(weights) % number == 0)
    is_labelled = max(len(maps.keys), len(maps.queries)) <= MOST_LABELS
    width, height = (max(2.4, 0.16 * len(labels) if is_labelled else 0) + 0.4 for labels in (maps.keys, maps.queries))
    size = columns * width, len(weights) // columns * height
    figure, panels = plt.subplots(
        len(weights) // columns, columns, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for head, (panel, values) in enumerate(zip(panels.flat, weights, strict=True)):
        # By the square root, as most weights of long texts are small.
        panel.imshow(values, cmap="cividis", norm=PowerNorm(0.5, vmin=0), aspect="auto")
        panel.set_title(f"head {head + 1}: 0 to {values.max():.2f}", fontsize=9)
    if is_labelled:
        panel.set_yticks(range(len(maps.queries)), _plain(maps.queries))
        panel.set_xticks(range(len(maps.keys)), _plain(maps.keys))
    for panel in panels.flat:
        panel.tick_params(labelsize=7)
    for panel in panels[-1]:
        for label in panel.get_xticklabels():
            label.set_rotation(90 if len(label.get_text()) > 2 else 0)
    figure.suptitle(f"{maps.kind}, layer {layer_idx + 1}: who (rows) looks at whom (columns)")
    figure.savefig(picture, dpi=100)
    plt.close(figure)


def plot_positions(views: list[PositionView], picture: Path) -> None:
    """Draw each view as a map of two positions, or as curves over the distance, to a file."""
    figure, panels = plt.subplots(1, len(views), figsize=(5.5 * len(views), 4.2), layout="constrained", squeeze=False)
    for view, panel in zip(views, panels[0], strict=True):
        panel.set_title(f"{' and '.join(view.stacks)}: {view.says}", fontsize=9)
        if view.similarity is not None:
            image = panel.imshow(view.similarity.numpy(), cmap="cividis")
            panel.set(xlabel="position", ylabel="position")
            figure.colorbar(image, label="cosine")
            continue
        shades = plt.get_cmap("viridis")(np.linspace(0.25, 0.85, len(view.curves)))
        colors = SCORE_COLORS if len(view.curves) < len(SCORE_COLORS) else shades
        for (name, values), color in zip(view.curves.items(), colors, strict=False):
            panel.plot(view.distances.numpy(), values.numpy(), label=name.replace("_", " "), color=color)
        panel.set(xlabel="distance of the key from the query, in tokens")
        panel.grid(alpha=0.3)
        if len(view.curves) <= 12:
            panel.legend(fontsize=8)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
