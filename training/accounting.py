"""What a model consists of, and what it costs: parameters by part, who sees whom, FLOPs and cache of a token.

Shapes and sizes: T tokens of a text, H query heads, K key/value heads, d head width, S keys that a token sees, C tokens
of a chunk, f features of a key of linear attention, e values that its state keeps of each.

FLOPs are those of products of matrices, two for a multiplication and an addition, as `torch.utils.flop_counter` counts
them and Kaplan et al. (2020, table 1) do. Of one token forward:

| where                       | FLOPs                                                                            |
|-----------------------------|----------------------------------------------------------------------------------|
| a projection W              | 2 |W|, at each depth that uses it                                                |
| attention                   | 4 H d S: scores of S keys, and the sum of their values                           |
| a recurrence                | nothing besides its projections                                                  |
| linear attention            | H (4 f e + 2 C (f + e)): write and read the state, attend within a chunk         |
| - with the delta rule       | H (2 f e + 2 C f) more, and a triangular system, which is not counted            |
| - in an encoder             | twice as many, as it reads both ways                                             |

S is what the last token of a decoder sees, and the middle one of an encoder's text. A backward pass takes two products
for each of the forward: one for the gradient of either factor.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from triptych import TriptychConfig
from triptych.configuration_triptych import RECURRENT_TYPES, TriptychStackConfig
from triptych.layout import mark_patterns, read_layout
from triptych.linear_attention import CHUNK_SIZE, TriptychFeatureMap
from triptych.masks import visibility

# The first pattern that a parameter's name within its stack matches says to which part it belongs.
PARTS = {
    r"pooler\.": "pooling",
    r"norm\.": "norms",
    r"cross_attn\.|join_proj\.": "cross-attention",
    r"self_attn\.": "self-attention",
    r"recurrence\.": "recurrence",
    r"mlp\.": "feed-forward",
    r"embed_positions\.|relative_bias\.": "positions",
    r"embed_": "embeddings",
}
PART_NAMES = (
    "embeddings",
    "positions",
    "self-attention",
    "recurrence",
    "cross-attention",
    "feed-forward",
    "norms",
    "pooling",
)
BACKWARD = 2  # products for each of the forward
PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, TriptychFeatureMap)


@dataclass
class Part:
    """Parameters of one kind in one stack, or in the head; `stack` is empty for the head."""

    stack: str
    name: str
    parameters: int


@dataclass
class Cache:
    """Bytes that a decoder keeps of what it has read, for one text.

    Attributes:
        token: of each token more, in layers that keep all keys and values.
        window: in layers that keep a window or a chunk, once that is full.
        state: in layers of linear attention, whatever the length.
        source_token: of each token of the encoder, for cross-attention.
    """

    token: int = 0
    window: int = 0
    state: int = 0
    source_token: int = 0


@dataclass
class Account:
    """All that is counted of a model.

    Attributes:
        parts: parameters, those that several places share once; their sum is `parameters`.
        tied: what is one and the same, in words.
        weight_bytes: in the dtype of each parameter.
        length: T, for which FLOPs are told.
        flops: of one token forward, by the stack that reads it.
        cache: of a decoder; None without one.
    """

    parameters: int
    parts: list[Part]
    tied: list[str]
    weight_bytes: int
    length: int
    flops: dict[str, int]
    cache: Cache | None


def account(model: PreTrainedModel, length: int) -> Account:
    """Count a model of the family, for texts of `length` tokens; its weights may be on the meta device."""
    configs = stack_configs(model.config)
    dtype = next(model.parameters()).dtype
    return Account(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parts=count_parameters(model),
        tied=tied_weights(model),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        length=length,
        flops=count_flops(model, length),
        cache=cache_size(configs["decoder"], dtype.itemsize) if "decoder" in configs else None,
    )


def stack_configs(config: TriptychConfig) -> dict[str, TriptychStackConfig]:
    """The configuration of each stack, by its name."""
    if config.topology == "encoder_decoder":
        return {"encoder": config.encoder, "decoder": config.decoder}
    return {config.topology: config}


def stacks_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The stacks of a model, by name."""
    base = model.base_model
    return {name: getattr(base, name, base) for name in stack_configs(model.config)}


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


def count_parameters(model: PreTrainedModel) -> list[Part]:
    """Parameters of each part of each stack, and of the head, which has what no stack has."""
    counts = Counter()
    for stack, module in stacks_of(model).items():
        for name, parameter in module.named_parameters():
            counts[stack, part_of(name)] += parameter.numel()
    parts = [
        Part(stack, name, counts[stack, name])
        for stack in stack_configs(model.config)
        for name in PART_NAMES
        if counts[stack, name]
    ]
    of_head = sum(parameter.numel() for parameter in model.parameters()) - counts.total()
    return [*parts, Part("", "head", of_head)] if of_head else parts


def part_of(name: str) -> str:
    """The part that a parameter of a stack belongs to."""
    return next(part for pattern, part in PARTS.items() if re.search(pattern, name))


def tied_weights(model: PreTrainedModel) -> list[str]:
    """What is used in several places but stored once, a sentence each."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name.removeprefix("model."))
    tied = [f"{other} is {first}" for first, *others in names.values() for other in others]
    if getattr(model.config, "share_embeddings", False):
        tied.append("source and target have one token table")
    for stack, config in stack_configs(model.config).items():
        if config.share_layers:
            tied.append(f"the {config.num_hidden_layers} layers of the {stack} are one")
    return tied


# ---------------------------------------------------------------------------------------------------------------------
# Who sees whom


def visible(config: TriptychStackConfig, layer_idx: int, length: int, queries: torch.Tensor) -> torch.Tensor:
    """Which of T = `length` tokens each of `queries` [Q] sees in a layer's self-attention: booleans [Q, T].

    The family's own mask functions say so. Linear attention sees what full attention does.
    """
    layout = read_layout(torch.zeros(1, length, dtype=torch.long), None, None, None, None, None)
    mark_patterns(layout, config)
    sees, _ = visibility(config, layout, config.layer_kind(layer_idx), is_causal(config))
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(length)
    return torch.as_tensor(sees(zero, zero, queries[:, None], keys[None])).expand(len(queries), length)


def is_causal(config: TriptychStackConfig) -> bool:
    return getattr(config, "is_causal", False)


def typical_query(config: TriptychStackConfig, length: int) -> int:
    """The token that stands for all: the last one of a decoder, the middle one of an encoder."""
    return length - 1 if is_causal(config) else length // 2


def seen_keys(config: TriptychStackConfig, layer_idx: int, length: int) -> int:
    """S: how many tokens the typical one sees."""
    return int(visible(config, layer_idx, length, torch.tensor([typical_query(config, length)])).sum())


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs


def count_flops(model: PreTrainedModel, length: int) -> dict[str, int]:
    """FLOPs of one token forward, by the stack that reads it; source and target have T = `length` tokens each.

    What is done once for a text, such as pooling and classifying it, is left out.
    """
    configs = stack_configs(model.config)
    counts = projection_flops(model)
    for stack, config in configs.items():
        counts[stack] += sum(layer_flops(config, layer_idx, length) for layer_idx in range(config.num_hidden_layers))
        if getattr(config, "add_cross_attention", False):
            counts.update(cross_attention_flops(config, length))
    return {stack: counts[stack] for stack in configs}


def projection_flops(model: PreTrainedModel) -> Counter[str]:
    """Of all products with weights."""
    configs = stack_configs(model.config)
    counts = Counter()
    for name, module in model.named_modules():
        if isinstance(module, PRODUCTS) and not is_once_a_text(model, name):
            stack = reader(name, list(configs))
            is_shared = configs[stack].share_layers and re.search(r"\blayers\.", name)
            times = configs[stack].num_hidden_layers if is_shared else 1
            if isinstance(module, nn.Conv1d):  # of the first convolutions, several outputs become one token
                times = prod(configs[stack].conv_stride[int(name.rpartition(".")[2]) + 1 :])
            weights = (weight for own, weight in module.named_parameters(recurse=False) if own.startswith("weight"))
            counts[stack] += 2 * sum(weight.numel() for weight in weights) * times
    return counts


def is_once_a_text(model: PreTrainedModel, name: str) -> bool:
    """Whether a module of that name answers for a whole text."""
    is_head = not name.startswith("model.")
    return "pooler" in name or name == "seq_relationship" or (is_head and getattr(model, "reads_texts", False))


def reader(name: str, stacks: list[str]) -> str:
    """Which stack's tokens a module works on: keys and values of cross-attention are made of the encoder's."""
    is_memory = re.search(r"\bencoder\.|cross_attn\.(k_proj|v_proj|k_features|strength_proj)", name)
    return stacks[0] if is_memory else stacks[-1]


def layer_flops(config: TriptychStackConfig, layer_idx: int, length: int) -> int:
    """Of a layer's self-attention, besides its projections; a recurrence has nothing else."""
    if config.layer_types[layer_idx] in RECURRENT_TYPES:
        return 0
    if config.layer_types[layer_idx] == "linear_attention":
        return linear_attention_flops(config, length) * (1 if is_causal(config) else 2)
    return attention_flops(config, seen_keys(config, layer_idx, length))


def attention_flops(config: TriptychStackConfig, keys: int) -> int:
    return 4 * config.num_attention_heads * config.head_dim * keys


def linear_attention_flops(config: TriptychStackConfig, length: int) -> int:
    """Of a token that is written into the state, and reads it."""
    features, values = state_size(config)
    chunk = min(CHUNK_SIZE, length)
    flops = 4 * features * values + 2 * chunk * (features + values)
    if config.linear_update == "delta":
        flops += 2 * features * values + 2 * chunk * features
    return config.num_attention_heads * flops


def cross_attention_flops(config: TriptychStackConfig, length: int) -> dict[str, int]:
    """Of all layers: of a token that asks, and of one of the encoder's, which linear attention writes into a state."""
    asking, written = attention_flops(config, length), 0
    if config.linear_cross_attention:
        features, values = state_size(config)
        asking = 2 * config.num_attention_heads * features * values
        written = linear_attention_flops(config, length)
    layers = sum(map(config.reads_encoder, range(config.num_hidden_layers)))
    return {"decoder": asking * layers, "encoder": written * layers}


def state_size(config: TriptychStackConfig) -> tuple[int, int]:
    """f and e of each head: the sum of weights, where outputs are divided by it, is one value more."""
    features = config.head_dim * (2 if config.linear_feature_map == "hedgehog" else 1)
    return features, config.head_dim + (config.linear_feature_map != "unit")


# ---------------------------------------------------------------------------------------------------------------------
# Cache


def cache_size(config: TriptychStackConfig, itemsize: int) -> Cache:
    """What a decoder keeps between the tokens that it writes, with `itemsize` bytes a number."""
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * itemsize
    kept = {"sliding_attention": config.sliding_window, "chunked_attention": config.attention_chunk_size}
    features, values = state_size(config)
    state = config.num_attention_heads * features * values * torch.float32.itemsize
    cache = Cache()
    for layer_type, kept_as in zip(config.layer_types, config.cache_layer_types(), strict=True):
        if layer_type in RECURRENT_TYPES:
            cache.state += (2 if layer_type == "lstm" else 1) * config.hidden_size * itemsize
        elif layer_type == "linear_attention":
            channels = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
            cache.state += state + (config.linear_conv_kernel - 1) * channels * itemsize
        elif kept_as in kept:
            cache.window += keys_and_values * (kept[kept_as] - 1)  # the last token of a window is the one that asks
        else:
            cache.token += keys_and_values
    reading = sum(map(config.reads_encoder, range(config.num_hidden_layers))) if config.add_cross_attention else 0
    if config.linear_cross_attention:
        cache.state += state * reading
    else:
        cache.source_token = keys_and_values * reading
    return cache
