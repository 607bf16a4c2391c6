"""The page of the command `inspect`: one file that needs nothing else, neither a network nor a library.

`inspection_page.html` holds style and script; this file fills in what there is to say. Text of others (tokens, names)
enters through `escape` or as JSON without a "<".
"""

import base64
import io
import json
import math
import re
import zlib
from collections.abc import Callable
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from triptych.configuration_triptych import RECURRENT_TYPES, TriptychStackConfig
from triptych.training.accounting import Account
from triptych.training.attention_maps import AttentionMaps
from triptych.training.describing import Inspection, LayerView, StackView, costs, pattern, show_seen
from triptych.training.errors import as_user_error
from triptych.training.plots import plot_losses, plot_positions
from triptych.training.position_views import PositionView

TEMPLATE = Path(__file__).with_suffix(".html")
INK = "#123456"  # what matplotlib draws in this colour takes that of the page's text
PLOT_STYLE = {
    "savefig.format": "svg",
    "svg.fonttype": "none",
    "svg.hashsalt": "triptych",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.framealpha": 0,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
UNITS = 65535  # of a weight, in 16 bits
STRENGTHS = 4  # shades of a mask


def build_page(
    inspection: Inspection,
    configs: dict[str, TriptychStackConfig],
    maps: list[AttentionMaps],
    views: list[PositionView],
    metrics: Path | None,
) -> str:
    """The whole page.

    Args:
        configs: of the stacks, by name.
        maps: of attention, if a text was given.
        views: of positions, if there are any to draw.
        metrics: of a training, if there was one.
    """
    sections = [("layers", "Layers", layers_section(inspection, configs))]
    if maps:
        sections.append(("attention", "Attention", ATTENTION))
    sections.append(("parameters", "Parameters", parameters_section(inspection.account)))
    sections.append(("costs", "Costs", costs_section(inspection.account)))
    if views:
        sections.append(("positions", "Positions", figure("positions", lambda file: plot_positions(views, file))))
    if metrics:
        with as_user_error(f"'{metrics}' cannot be drawn"):
            curves = figure("training", lambda file: plot_losses(metrics, file, "loss"))
        sections.append(("training", "Training", curves))
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = header(inspection) + f'<nav aria-label="Sections">{links}</nav>\n'
    for name, title, content in sections:
        body += f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{title}</h2>\n'
        body += f"{content}\n</section>\n"
    fields = {"title": escape(inspection.name), "data": json_of(maps), "body": body}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fields[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def header(inspection: Inspection) -> str:
    counted = inspection.account
    about = inspection.model + ("" if inspection.has_weights else ", a preset without weights")
    numbers = [("parameters", f"{counted.parameters:,}"), *costs(counted)]
    items = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
        for what, value in numbers
        if "backward" not in what
    )
    return (
        f'<header>\n<h1>{escape(inspection.name)}</h1>\n<p class="quiet">{escape(about)}</p>\n'
        f'<dl class="numbers">{items}</dl>\n</header>\n'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def layers_section(inspection: Inspection, configs: dict[str, TriptychStackConfig]) -> str:
    length = inspection.account.length
    parts = [
        f'<p class="quiet">Who sees whom, in a text of {length:,} tokens: a row is a token that looks, a column one '
        "that it may look at.</p>"
    ]
    for stack in inspection.stacks:
        config = configs[stack.name]
        parts.append(
            f'<div class="card">\n<h3>{escape(stack.name.capitalize())}</h3>\n'
            f'<p class="quiet">{escape(" · ".join(stack.says))}</p>\n'
            f'<div class="stack"><div class="scroll">{block_drawing(config)}</div>\n'
            f"{mask_drawings(stack, config, length)}</div>\n</div>"
        )
    return "\n".join(parts)


def mask_drawings(stack: StackView, config: TriptychStackConfig, length: int) -> str:
    """A small picture for each layer, and below them what each kind of layer is."""
    drawings, kinds = {}, {}
    items = []
    for layer_idx, layer in enumerate(stack.layers):
        kind = config.layer_kind(layer_idx)
        if kind not in drawings:
            drawings[kind] = mask_drawing(pattern(config, layer_idx, length), layer)
            kinds[layer.says] = layer, show_seen(layer, length)
        items.append(f"<li>{drawings[kind]}{layer.number}</li>")
    legend = "".join(
        f'<li class="{color_of(layer)}"><span>{escape(says)}: {seen}</span></li>'
        for says, (layer, seen) in kinds.items()
    )
    return f'<ol class="layers">{"".join(items)}</ol>\n<ul class="kinds">{legend}</ul>'


def color_of(layer: LayerView) -> str:
    """The class of a kind of layer, whose colour the style sheet knows."""
    return layer.kind.removesuffix("_attention")


def mask_drawing(shares: list[list[float]], layer: LayerView) -> str:
    """A picture of shares, with a path for each strength."""
    paths = {strength: "" for strength in range(1, STRENGTHS + 1)}
    for y, row in enumerate(shares):
        strengths = [math.ceil(share * STRENGTHS) for share in row]
        start = 0
        for x in range(1, len(row) + 1):
            if x == len(row) or strengths[x] != strengths[start]:
                if strengths[start]:
                    paths[strengths[start]] += f"M{start} {y}h{x - start}v1h{start - x}z"
                start = x
    drawn = "".join(
        f'<path d="{path}" fill="currentColor" fill-opacity="{strength / STRENGTHS}"/>'
        for strength, path in paths.items()
        if path
    )
    return (
        f'<svg class="mask {color_of(layer)}" viewBox="0 0 {len(shares[0])} {len(shares)}" role="img" '
        f'aria-label="layer {layer.number}: {escape(layer.says)}" shape-rendering="crispEdges">{drawn}</svg>'
    )


STREAM, BRANCH, LEVEL = 28, 84, 46  # heights of the residual stream, of the first branch, between branches
NORM_WIDTH, SUBLAYER_WIDTH, GAP = 56, 124, 16


def block_drawing(config: TriptychStackConfig) -> str:
    """One layer from left to right: the residual stream above, below it the branches that add to it."""
    names = ["recurrence" if config.layer_types[-1] in RECURRENT_TYPES else "self-attention"]
    names += ["cross-attention"] * getattr(config, "add_cross_attention", False)
    names += ["feed-forward"] * (config.mlp_type != "none")
    groups = [names] if config.parallel_residual else [[name] for name in names]
    x, drawn = 2 * GAP, ""
    for group in groups:
        boxes = [
            *[("norm", NORM_WIDTH)] * (config.norm_position in ("pre", "sandwich")),
            ("", SUBLAYER_WIDTH),
            *[("norm", NORM_WIDTH)] * (config.norm_position == "sandwich"),
        ]
        end = x + sum(width + GAP for _, width in boxes) + GAP
        for level, name in enumerate(group):
            y = BRANCH + level * LEVEL if config.residual else STREAM
            drawn += f'<path class="wire" d="M{x} {STREAM}V{y}H{end}V{STREAM}"/>'
            left = x + GAP
            for label, width in boxes:
                drawn += box(left, y, width, label or name)
                left += width + GAP
        if config.residual:
            drawn += f'<circle cx="{end}" cy="{STREAM}" r="9"/><text x="{end}" y="{STREAM}">+</text>'
        x = end + 2 * GAP
        if config.norm_position == "post":
            drawn += box(x - GAP, STREAM, NORM_WIDTH, "norm")
            x += NORM_WIDTH + GAP
    height = BRANCH + LEVEL * (max(map(len, groups)) - 1) + 26
    words = f"{config.norm_position} norm: {', '.join(names)}"
    return (
        f'<svg class="block" width="{x + GAP}" height="{height}" role="img" aria-label="one layer, {words}">'
        f'<path class="wire" d="M0 {STREAM}H{x + GAP - 6}m-6 -5l6 5l-6 5"/>{drawn}</svg>'
    )


def box(x: float, y: float, width: float, label: str) -> str:
    return (
        f'<g class="{label}"><rect x="{x}" y="{y - 15}" width="{width}" height="30" rx="6"/>'
        f'<text x="{x + width / 2}" y="{y}">{label}</text></g>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def parameters_section(counted: Account) -> str:
    largest = max(part.parameters for part in counted.parts)
    rows = "".join(
        f'<tr><th scope="row">{escape(part.stack)} {escape(part.name)}</th><td>{part.parameters:,}</td>'
        f"<td>{100 * part.parameters / counted.parameters:.1f} %</td>"
        f'<td class="share"><i style="width:{100 * part.parameters / largest:.1f}%"></i></td></tr>\n'
        for part in counted.parts
    )
    tied = "".join(f'<p class="quiet">Counted once: {escape(sentence)}.</p>\n' for sentence in counted.tied)
    return (
        f'<div class="card"><table>\n<tbody>\n{rows}</tbody>\n<tfoot><tr><th scope="row">all</th>'
        f'<td>{counted.parameters:,}</td><td></td><td class="share"></td></tr></tfoot>\n</table></div>\n{tied}'
    )


def costs_section(counted: Account) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(what)}</th><td>{escape(value)}</td></tr>\n' for what, value in costs(counted)
    )
    return (
        f'<p class="quiet">Of a text of {counted.length:,} tokens: of a decoder the last one, of an encoder the middle '
        "one. A multiplication and an addition are two FLOPs.</p>\n"
        f'<div class="card"><table>\n<tbody>\n{rows}</tbody>\n</table></div>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Attention and pictures

ATTENTION = """<p class="quiet">A row is a token that looks, a column one that it looks at; the weights of a row sum
to 1. Each map is coloured from 0 to its own largest weight, by the square root, so that small weights show.</p>
<div class="card">
<div class="controls">
<fieldset id="kinds"><legend>attention of</legend></fieldset>
<div><label for="layer">layer</label><select id="layer"></select></div>
</div>
<p id="none" hidden>This layer compares no pairs of tokens: it keeps a state of what it has read, or reads no source. So
there is no map.</p>
<div id="heads" class="heads" role="group" aria-label="heads"></div>
<div id="viewer" class="viewer">
<div id="frame"><canvas id="map" tabindex="0" role="application" aria-label="attention map: arrow keys choose a pair of
tokens" aria-describedby="said"></canvas><span id="scale" class="quiet"></span></div>
<div>
<p id="said" aria-live="polite"></p>
<h3>Tokens that look</h3><p id="queries" class="tokens"></p>
<h3>Tokens looked at</h3><p id="keys" class="tokens"></p>
</div>
</div>
<noscript>The maps of this page are drawn by its script; the folder maps beside it has them as pictures.</noscript>
</div>"""


def json_of(maps: list[AttentionMaps]) -> str:
    """Maps as JSON that a page can hold: the weights in 16 bits, compressed."""
    kinds = [
        {
            "kind": one.kind,
            "queries": one.queries,
            "keys": one.keys,
            "layers": [None if weights is None else pack(weights) for weights in one.layers],
        }
        for one in maps
    ]
    return json.dumps(kinds, ensure_ascii=False).replace("<", "\\u003c")


def pack(weights: torch.Tensor) -> str:
    """Weights [H, T, S] in units of 1 / 65535, compressed, as letters."""
    units = (weights * UNITS).round().numpy().astype("<u2")
    return base64.b64encode(zlib.compress(units.tobytes(), level=9)).decode()


def figure(name: str, draw: Callable[[io.StringIO], None]) -> str:
    """A picture of matplotlib as part of the page, in its colours; `name` sets its ids apart from other pictures'."""
    file = io.StringIO()
    with plt.rc_context(PLOT_STYLE):
        draw(file)
    svg = file.getvalue()
    svg = re.sub("<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace(INK, "currentColor")
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)
    return f'<div class="card scroll figure">{svg}</div>'
