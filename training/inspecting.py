"""The command `inspect`: what a model is made of, how its layers see, where its heads look, how it was trained."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedModel

from triptych import TriptychConfig, import_model, modeling_triptych
from triptych.auto_map import AUTO_CLASSES
from triptych.configs import preset_names
from triptych.configuration_triptych import STATE_TYPES
from triptych.sharing import input_type
from triptych.training.accounting import Account, stack_configs
from triptych.training.attention_maps import AttentionMaps, read_attention
from triptych.training.converting import find_tokenizer
from triptych.training.describing import Inspection, LayerView, StackView, costs, inspect_model, show_seen
from triptych.training.errors import UserError, as_user_error, unknown_name
from triptych.training.inspection_page import build_page
from triptych.training.plots import LAYER_COLORS, plot_maps, plot_positions
from triptych.training.position_views import view_positions
from triptych.training.reporting import METRICS_FILE

TEXT_LENGTH = 512  # tokens that FLOPs are told for, if windows need no more to be seen
SHADES = "·░▒▓█"
PAGE, MAPS, POSITIONS = "index.html", "maps", "positions.png"


def run_inspection(
    name: str, text: str | None, target: str | None, length: int | None, output: Path, as_json: bool
) -> None:
    """Inspect the model `name`: print tables, and write the page and the pictures into the folder `output`.

    Raises:
        UserError: there is no such model, it cannot read the texts, or `output` is no folder. Nothing is written then.
    """
    if target is not None and text is None:
        raise UserError("--target is what a model writes to a text: give --text too")
    model = load_subject(name)
    inspection = inspect_model(name, model, choose_length(model.config, length))
    maps = [] if text is None else read_texts(name, model, text, target)
    views = view_positions(model)
    metrics = Path(name) / METRICS_FILE
    page = build_page(inspection, stack_configs(model.config), maps, views, metrics if metrics.is_file() else None)
    with as_user_error(f"--output '{output}' cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        (output / PAGE).write_text(page, encoding="utf-8")
    if views:
        plot_positions(views, output / POSITIONS)
    draw_maps(maps, output / MAPS)
    show_inspection(inspection, as_json)
    if not as_json:
        print(f"Page: {output / PAGE}")


def read_texts(name: str, model: PreTrainedModel, text: str, target: str | None) -> list[AttentionMaps]:
    """Maps of the attention to a text, with the tokenizer that lies beside the model."""
    if next(model.parameters()).is_meta:
        raise UserError(f"--text needs weights and a tokenizer, but '{name}' is a preset: give a trained model")
    if (read := input_type(model.config)) != "text":
        raise UserError(f"--text is for models that read texts, but '{name}' reads {read}")
    tokenizer = find_tokenizer(name)
    if tokenizer is None:
        raise UserError(f"--text needs a tokenizer, but there is none beside '{name}'")
    return read_attention(model, tokenizer, text, target)


def draw_maps(maps: list[AttentionMaps], folder: Path) -> None:
    """A picture for each kind of attention and layer, in place of those of an earlier inspection."""
    shutil.rmtree(folder, ignore_errors=True)
    for one in maps:
        folder.mkdir(exist_ok=True)
        for layer_idx, weights in enumerate(one.layers):
            if weights is not None:
                plot_maps(one, layer_idx, folder / f"{one.kind}_{layer_idx + 1}.png")


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_subject(name: str) -> PreTrainedModel:
    """Load the model of a folder or the Hub, ours or one that can be imported; or build a preset, without weights.

    Raises:
        UserError: there is no such model.
    """
    if not Path(name).exists() and name in preset_names():
        return build_preset(name)
    try:
        with as_user_error(f"model '{name}' cannot be loaded"):
            return import_model(name, attn_implementation="eager")  # the backend that returns attention weights
    except UserError:
        if Path(name).exists() or "/" in name:
            raise
        raise unknown_name("model", name, preset_names()) from None


def build_preset(name: str) -> PreTrainedModel:
    """A shipped configuration as the language model of its topology, or as a plain encoder of what is not text."""
    config = TriptychConfig.from_preset(name)
    heads = {"encoder": "AutoModelForMaskedLM", "decoder": "AutoModelForCausalLM"}
    head = heads.get(config.topology, "AutoModelForSeq2SeqLM")
    if config.topology == "encoder" and input_type(config) != "text":
        head = "AutoModel"
    with torch.device("meta"):
        return getattr(modeling_triptych, AUTO_CLASSES[config.topology][head])(config)


def choose_length(config: TriptychConfig, length: int | None) -> int:
    """Tokens of a text: as many as asked for, or as show what windows leave out, where there are positions for them.

    Raises:
        UserError: a table of positions, or the patches of an image, are fewer than asked for.
    """
    stacks = stack_configs(config).items()
    if length is None:
        reaches = [max(stack.sliding_window or 0, stack.attention_chunk_size or 0) for _, stack in stacks]
        return min(max(TEXT_LENGTH, 4 * max(reaches)), *(stack.max_position_embeddings for _, stack in stacks))
    for name, stack in stacks:
        if stack.position_embedding_type == "learned" and length > stack.max_position_embeddings:
            raise UserError(f"--length is {length}, but the {name} has {stack.max_position_embeddings} positions")
    return length


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def show_inspection(inspection: Inspection, as_json: bool, console: Console | None = None) -> None:
    """Print an inspection as tables and drawings, or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(inspection)))
        return
    console = console or Console()
    without = "" if inspection.has_weights else " (a preset without weights)"
    console.print()
    console.print(Text.assemble((inspection.name, "bold"), f"  {inspection.model}{without}"), soft_wrap=True)
    for stack in inspection.stacks:
        console.print()
        console.print(drawing(stack, inspection.account.length))
    console.print()
    console.print(parameter_table(inspection.account))
    console.print(cost_table(inspection.account))


def drawing(stack: StackView, length: int) -> RenderableType:
    """A line for each layer: what its typical token sees, and what its attention is."""
    heading = Text.assemble((stack.name, "bold"), "  ", " · ".join(stack.says))
    table = Table.grid(Column(justify="right", style="dim"), Column(no_wrap=True), "", "", padding=(0, 2))
    for layer in reversed(stack.layers):  # as in figure 1 of the 2017 paper, the first is at the bottom
        table.add_row(str(layer.number), strip(layer), layer.says, show_seen(layer, length))
    drawn = Text(f"what the {stack.typical} token of {length:,} sees, in each layer", style="dim")
    return Group(heading, Padding(Group(table, drawn), (0, 0, 0, 2)))


def strip(layer: LayerView) -> Text:
    """What a token sees, drawn with characters; of a layer that keeps a state, that it does."""
    drawn = (
        "~" * len(layer.row)
        if layer.kind in STATE_TYPES
        else "".join(SHADES[math.ceil(share * 4)] for share in layer.row)
    )
    return Text(drawn, style=LAYER_COLORS[layer.kind])


def parameter_table(counted: Account) -> Group:
    """Parameters of each part, and their share; below, what is counted once."""
    table = Table("", Column("parameters", justify="right"), Column("share", justify="right"), "")
    for part in counted.parts:
        share = part.parameters / counted.parameters
        name = f"{part.stack} {part.name}".strip()
        table.add_row(name, f"{part.parameters:,}", f"{100 * share:.1f} %", "█" * math.ceil(share * 24))
    table.add_section()
    table.add_row("all", f"{counted.parameters:,}", "", "", style="bold")
    return Group(table, *(Text(f"counted once: {sentence}", style="dim") for sentence in counted.tied))


def cost_table(counted: Account) -> Table:
    """What a token costs."""
    table = Table("", "", show_header=False)
    for what, value in costs(counted):
        table.add_row(what, value)
    return table
