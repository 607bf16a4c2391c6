"""A model in words and numbers: what its stacks and layers are, who sees whom in them, what a token costs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from triptych.configuration_triptych import RECURRENT_TYPES, STATE_TYPES, TriptychStackConfig
from triptych.training.accounting import (
    BACKWARD,
    Account,
    account,
    is_causal,
    seen_keys,
    stack_configs,
    typical_query,
    visible,
)

STRIP, PICTURE = 24, 64  # cells across a drawing of what one token sees, of what all do


@dataclass
class LayerView:
    """What there is to say of a layer's attention.

    Attributes:
        kind: its layer type, as the configuration names it.
        says: the kind and its settings in words.
        seen: tokens that the typical one sees, of T.
        row: what that token sees, a share of visible ones for each of `STRIP` cells of the text.
    """

    number: int
    kind: str
    says: str
    seen: int
    row: list[float]


@dataclass
class StackView:
    """A stack in words, and its layers; `typical` says which token of a text stands for all."""

    name: str
    typical: str
    says: list[str]
    layers: list[LayerView]


@dataclass
class Inspection:
    """All that is said of a model without running it; `has_weights` is False of a preset."""

    name: str
    model: str
    has_weights: bool
    account: Account
    stacks: list[StackView]


def inspect_model(name: str, model: PreTrainedModel, length: int) -> Inspection:
    """Say what the model `name` is made of, for texts of `length` tokens."""
    stacks = [view_stack(stack, config, length) for stack, config in stack_configs(model.config).items()]
    has_weights = not next(model.parameters()).is_meta
    return Inspection(name, type(model).__name__, has_weights, account(model, length), stacks)


def view_stack(name: str, config: TriptychStackConfig, length: int) -> StackView:
    query = torch.tensor([typical_query(config, length)])
    layers = []
    for layer_idx, layer_type in enumerate(config.layer_types):
        row = shares(visible(config, layer_idx, length, query), 1, STRIP)[0].tolist()
        says = describe_layer(config, layer_idx)
        layers.append(LayerView(layer_idx + 1, layer_type, says, seen_keys(config, layer_idx, length), row))
    return StackView(name, "last" if is_causal(config) else "middle", describe_stack(config), layers)


def shares(sees: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Which part of each cell is visible, of booleans [Q, T]: at most `rows` by `columns` cells."""
    cells = min(rows, sees.shape[0]), min(columns, sees.shape[1])
    return F.adaptive_avg_pool2d(sees.float()[None], cells)[0]


def pattern(config: TriptychStackConfig, layer_idx: int, length: int) -> list[list[float]]:
    """Who sees whom in a layer, as a picture of shares: a row for each of `PICTURE` parts of the text."""
    queries = torch.linspace(0, length - 1, min(length, 4 * PICTURE)).long()  # of a long text, some stand for all
    return shares(visible(config, layer_idx, length, queries), PICTURE, PICTURE).tolist()


def show_seen(layer: LayerView, length: int) -> str:
    """What a layer's typical token meets of a text of `length` tokens, in words."""
    return "a state" if layer.kind in STATE_TYPES else f"{layer.seen:,} of {length:,} keys"


def describe_layer(config: TriptychStackConfig, layer_idx: int) -> str:
    """A layer's attention in words."""
    layer_type, dilation = config.layer_kind(layer_idx)
    if layer_type == "linear_attention":
        map_name = {"elu": "elu + 1", "hedgehog": "learnt features", "unit": "unit keys"}[config.linear_feature_map]
        words = ["linear attention", map_name]
        words += ["delta rule"] if config.linear_update == "delta" else []
        words += [f"{config.linear_decay} decay"] if config.linear_decay != "none" else []
    elif layer_type in RECURRENT_TYPES:
        words = [f"{layer_type.upper()}, {'left to right' if is_causal(config) else 'both ways'}"]
    else:
        sizes = {
            "full_attention": "full attention",
            "sliding_attention": f"sliding window of {config.sliding_window}",
            "chunked_attention": f"chunks of {config.attention_chunk_size}",
        }
        words = [sizes[layer_type]]
        words += [f"dilated by {dilation}"] if dilation > 1 else []
        is_sliding = layer_type == "sliding_attention"
        words += [f"random blocks: {config.num_random_blocks}"] if is_sliding and config.num_random_blocks else []
        is_global = layer_type != "full_attention" and config.num_global_tokens > 0
        words += [f"global tokens: {config.num_global_tokens}"] if is_global else []
    if getattr(config, "add_cross_attention", False) and config.reads_encoder(layer_idx):
        words.append("linear cross-attention" if config.linear_cross_attention else "cross-attention")
    return ", ".join(words)


def describe_stack(config: TriptychStackConfig) -> list[str]:
    """Sizes and choices of a stack, each in a few words."""
    heads = f"{config.num_attention_heads} heads of {config.head_dim}"
    if config.num_key_value_heads != config.num_attention_heads:
        heads += f", {config.num_key_value_heads} for keys and values"
    positions = config.position_embedding_type
    norm = config.norm_type.replace("_", " ")
    act = f"gated {config.hidden_act}" if config.mlp_type == "gated" else config.hidden_act
    return [
        f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        heads,
        "no positions" if positions == "none" else f"{positions} positions",
        "no norms"
        if config.norm_position == "none"
        else f"{norm}, {config.norm_position}{', sublayers side by side' if config.parallel_residual else ''}",
        "no feed-forward" if config.mlp_type == "none" else f"feed-forward {config.intermediate_size}, {act}",
    ]


def costs(counted: Account) -> Iterable[tuple[str, str]]:
    """Weights, FLOPs and cache as a person reads them."""
    yield "weights", show_bytes(counted.weight_bytes)
    tokens = dict.fromkeys(counted.flops, "token")
    if len(tokens) > 1:
        tokens = {"encoder": "source token", "decoder": "target token"}
    for stack, flops in counted.flops.items():
        yield f"a {tokens[stack]}, forward", show_flops(flops)
        yield f"a {tokens[stack]}, forward and backward", show_flops((1 + BACKWARD) * flops)
    if cache := counted.cache:
        yield f"cache of a {tokens['decoder']}", show_bytes(cache.token)
        yield from (
            (what, show_bytes(size))
            for what, size in (
                ("cache of windows", cache.window),
                ("cache of states", cache.state),
                ("cache of a source token", cache.source_token),
            )
            if size
        )


def show_bytes(size: int) -> str:
    """Bytes with a binary prefix."""
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):,.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def show_flops(count: int) -> str:
    """FLOPs with a decimal prefix."""
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:,.{1 if power else 0}f} {('', 'k', 'M', 'G', 'T')[power]}FLOP"
