"""Changes to an imported model that leave its weights their meaning, and what each costs.

| change                                 | what becomes of the weights         | exact                           |
|----------------------------------------|-------------------------------------|---------------------------------|
| layer_types, sliding_window,           | nothing                             | where windows hold a whole text |
| attention_chunk_size, global tokens,   |                                     |                                 |
| dilation, random blocks                |                                     |                                 |
| layer_types to linear_attention,       | feature maps and decays are added,  | no                              |
| linear_feature_map, linear_decay       | as new models begin with them       |                                 |
| max_position_embeddings                | a learned table is stretched or cut | if cut, or not learned          |
| rope_parameters                        | nothing                             | no                              |
| layers, num_hidden_layers              | other layers are left out           | no                              |
| num_key_value_heads                    | heads of a group become their mean  | no                              |
| dropouts, initializer_range, use_cache | nothing                             | yes                             |

Where it is not exact the model needs training. In an encoder-decoder a change is meant for both stacks; of one alone it
is given as `encoder={...}` or `decoder={...}`.
"""

import re
from typing import Any

import torch
from torch.nn import functional as F

from ..configuration_triptych import RECURRENT_TYPES, TriptychConfig, TriptychStackConfig

Tensors = dict[str, torch.Tensor]
FREE = ("hidden_dropout", "attention_dropout", "activation_dropout", "classifier_dropout")
FREE += ("initializer_range", "use_cache")
REACH = ("layer_types", "sliding_window", "attention_chunk_size", "num_global_tokens", "attention_dilation")
REACH += ("num_random_blocks", "random_block_size")
LINEAR = ("linear_feature_map", "linear_decay")
# What only a layer of linear attention has.
NEW_IN_LINEAR = re.compile(r"(?:^|\.)layers\.\d+\.self_attn\.(?:[qk]_features|decay_\w+)(?:\.|$)")
ALLOWED = (
    *REACH,
    *LINEAR,
    "max_position_embeddings",
    "rope_parameters",
    "layers",
    "num_hidden_layers",
    "num_key_value_heads",
)


def operate(
    config: TriptychConfig, weights: Tensors, changes: dict[str, Any]
) -> tuple[TriptychConfig, Tensors, list[str]]:
    """The configuration and the weights after `changes`, and what is to be said of them.

    Raises:
        ValueError: a change that would leave weights without meaning, or a value that is not possible.
    """
    if not changes:
        return config, weights, []
    fields = config.to_dict()
    if config.topology != "encoder_decoder":
        own, weights, remarks = operate_on_stack(config, weights, changes, "")
        return TriptychConfig(**{**fields, **own}), weights, remarks
    changes, remarks = dict(changes), []
    panels = {name: changes.pop(name, {}) for name in ("encoder", "decoder")}
    for name, panel in panels.items():
        own, weights, said = operate_on_stack(getattr(config, name), weights, {**changes, **panel}, f"{name}.")
        fields[name] = {**fields[name], **own}
        remarks += [f"{name}: {remark}" for remark in said]
    return TriptychConfig(**fields), weights, remarks


def operate_on_stack(
    config: TriptychStackConfig, weights: Tensors, changes: dict[str, Any], stack: str
) -> tuple[dict[str, Any], Tensors, list[str]]:
    """Changed fields and weights of one stack, whose weights' names have `stack` in them, and remarks."""
    for name in changes:
        if name not in ALLOWED + FREE:
            raise ValueError(
                f"`{name}` cannot be changed, as the weights would lose their meaning; what can is "
                f"{', '.join(ALLOWED + FREE)}."
            )
    fields, remarks = {name: changes[name] for name in changes if name in FREE}, []
    if "layers" in changes or "num_hidden_layers" in changes:
        kept = chosen_layers(config, changes)
        weights = keep_layers(weights, kept, stack)
        fields |= {"num_hidden_layers": len(kept), "layer_types": [config.layer_types[layer] for layer in kept]}
        if readers := getattr(config, "cross_attention_layers", None):
            fields["cross_attention_layers"] = [kept.index(layer) for layer in readers if layer in kept]
        remarks.append(f"layers {', '.join(map(str, kept))} of {config.num_hidden_layers} are kept: needs training.")
    if changes.get("num_key_value_heads", config.num_key_value_heads) != config.num_key_value_heads:
        heads = changes["num_key_value_heads"]
        weights = pool_heads(weights, config, heads, stack)
        fields["num_key_value_heads"] = heads
        size = config.num_key_value_heads // heads
        remarks.append(f"keys and values of every {size} heads are their mean now: needs training.")
    if "max_position_embeddings" in changes:
        length = changes["max_position_embeddings"]
        fields["max_position_embeddings"] = length
        if config.position_embedding_type == "learned":
            weights = stretch_positions(weights, config, length, stack)
            longer = length > config.max_position_embeddings
            remarks.append(
                f"{config.max_position_embeddings} learned positions are stretched to {length}: needs training."
                if longer
                else f"the first {length} learned positions are kept: exact for texts up to that length."
            )
        else:
            remarks.append(f"texts up to {length} tokens: exact up to {config.max_position_embeddings}.")
    if "rope_parameters" in changes:
        fields["rope_parameters"] = changes["rope_parameters"]
        remarks.append("positions rotate at other speeds: needs training, unless the source was made for it.")
    if reach := {name: changes[name] for name in REACH if name in changes}:
        refuse_recurrences(fields.get("layer_types", config.layer_types), reach.get("layer_types"))
        if "layer_types" not in reach:  # as a new configuration would choose them
            fields["layer_types"] = None
        fields |= reach
    if linear := {name: changes[name] for name in LINEAR if name in changes}:
        refuse_other_weights(linear)
        fields |= linear
    linear_layers = (fields.get("layer_types") or []).count("linear_attention")
    if linear_layers and linear_layers != config.layer_types.count("linear_attention"):
        remarks.append(f"attention of {linear_layers} layers is linear: needs training.")
    elif reach:
        is_full = set(fields["layer_types"] or ()) == {"full_attention"}
        which = "full: exact where the source's" if is_full else "local: exact where"
        remarks.append(f"attention is {which} windows or chunks hold the whole text, else needs training.")
    return fields, weights, remarks


def refuse_recurrences(old: list[str], new: list[str] | None):
    """Raises a ValueError where a recurrence would take the place of attention, or attention that of a recurrence."""
    pairs = zip(old, new or ["attention"] * len(old), strict=False)
    if any(one != other and {one, other} & set(RECURRENT_TYPES) for one, other in pairs):
        raise ValueError(
            f"`layer_types` is {new}, but was {old}: attention and recurrences cannot change places, as they share no "
            "weights."
        )


def refuse_other_weights(linear: dict[str, Any]):
    """Raises a ValueError for a kind of linear attention that does not read the weights as softmax attention does."""
    if linear.get("linear_feature_map") == "unit":
        raise ValueError(
            "`linear_feature_map` is 'unit', but must be 'elu' or 'hedgehog', which weigh as softmax does."
        )


def chosen_layers(config: TriptychStackConfig, changes: dict[str, Any]) -> list[int]:
    """Numbers of the layers that stay: `layers`, or `num_hidden_layers` of them evenly from the first to the last."""
    depth, count = config.num_hidden_layers, changes.get("num_hidden_layers")
    if config.share_layers:
        raise ValueError("`layers` cannot be chosen, as all are one (`share_layers`).")
    if "layers" in changes:
        kept = list(changes["layers"])
        if not kept or sorted(set(kept)) != kept or kept[0] < 0 or kept[-1] >= depth:
            raise ValueError(f"`layers` is {kept}, but must be rising numbers from 0 to {depth - 1}.")
        return kept
    if not 1 <= count <= depth:
        raise ValueError(f"`num_hidden_layers` is {count}, but must be from 1 to {depth}.")
    return [round(index * (depth - 1) / max(count - 1, 1)) for index in range(count)]


def keep_layers(weights: Tensors, kept: list[int], stack: str) -> Tensors:
    """Only these layers, numbered anew."""
    numbers = {old: new for new, old in enumerate(kept)}
    result = {}
    for name, tensor in weights.items():
        if found := re.fullmatch(rf"((?:.*\.)?{re.escape(stack)}layers\.)(\d+)(\..*)", name):
            before, layer, after = found.groups()
            if int(layer) not in numbers:
                continue
            name = f"{before}{numbers[int(layer)]}{after}"
        result[name] = tensor
    return result


def pool_heads(weights: Tensors, config: TriptychStackConfig, heads: int, stack: str) -> Tensors:
    """Key and value heads of each group as their mean (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)."""
    if not isinstance(heads, int) or heads < 1 or config.num_key_value_heads % heads:
        raise ValueError(
            f"`num_key_value_heads` is {heads}, but must divide the {config.num_key_value_heads} of the source."
        )

    def pooled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not re.search(rf"(^|\.){re.escape(stack)}layers\.\d+\.\w+_attn\.[kv]_proj\.", name):
            return tensor
        groups = tensor.unflatten(0, (heads, -1, config.head_dim))
        return groups.mean(1).flatten(0, 1)

    return {name: pooled(name, tensor) for name, tensor in weights.items()}


def stretch_positions(weights: Tensors, config: TriptychStackConfig, length: int, stack: str) -> Tensors:
    """The learned table of `length` positions: cut, or interpolated between its first and its last row."""

    def stretched(name: str, table: torch.Tensor) -> torch.Tensor:
        if not re.search(rf"(^|\.){re.escape(stack)}embed_positions\.weight$", name):
            return table
        before, rows = table[: config.position_offset], table[config.position_offset :]
        if length <= len(rows):
            return table[: config.position_offset + length].clone()
        rows = F.interpolate(rows.float().T[None], size=length, mode="linear", align_corners=True)[0].T
        return torch.cat((before, rows.to(table.dtype)))

    return {name: stretched(name, tensor) for name, tensor in weights.items()}
