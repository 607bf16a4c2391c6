"""What a model makes of places: how alike the vectors of two positions are, or what their distance does to a score.

Shapes: P positions, N distances, H heads, E width of a position's vector.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from triptych.configuration_triptych import TriptychStackConfig, rope_by_layer_type
from triptych.positions import TriptychRotaryEmbedding, alibi_bias, sinusoidal_embedding
from triptych.training.accounting import is_causal, stack_configs, stacks_of

MOST_POSITIONS, MOST_DISTANCE = 128, 256


@dataclass
class PositionView:
    """Of one stack, or of two that are alike.

    Attributes:
        stacks: their names.
        says: what is drawn.
        similarity: [P, P], the cosine between the vectors of two positions; None where distances say it.
        distances: [N], of the key from the query.
        curves: by name, a value for each distance.
    """

    stacks: list[str]
    says: str
    similarity: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    curves: dict[str, torch.Tensor] = field(default_factory=dict)


def view_positions(model: PreTrainedModel) -> list[PositionView]:
    """What there is to draw of each stack: nothing where positions are learnt and the model has no weights."""
    views = []
    configs = stack_configs(model.config)
    for stack, module in stacks_of(model).items():
        for view in stack_views(stack, configs[stack], module):
            alike = next((other for other in views if is_alike(other, view)), None)
            if alike is None:
                views.append(view)
            else:
                alike.stacks += view.stacks
    return views


def is_alike(one: PositionView, other: PositionView) -> bool:
    """Whether two views draw the same."""
    if one.says != other.says or one.curves.keys() != other.curves.keys():
        return False
    pairs = [(one.similarity, other.similarity), (one.distances, other.distances)]
    pairs += [(values, other.curves[name]) for name, values in one.curves.items()]
    return all(left is right or (left is not None and torch.equal(left, right)) for left, right in pairs)


@torch.no_grad()
def stack_views(stack: str, config: TriptychStackConfig, module: nn.Module) -> Iterator[PositionView]:
    kind = config.position_embedding_type
    is_meta = next(module.parameters()).is_meta
    if kind in ("sinusoidal", "learned") and not (kind == "learned" and is_meta):
        vectors = F.normalize(position_vectors(config, module), dim=-1)
        yield PositionView([stack], f"how alike {kind} positions are", vectors @ vectors.T)
    elif kind == "rotary":
        distances = torch.arange(MOST_DISTANCE + 1)
        ropes = rope_by_layer_type(config)
        if all(rope == config.rope_parameters for rope in ropes.values()):
            ropes = {"all layers": config.rope_parameters}
        curves = {name: mean_rotation(config, rope, distances) for name, rope in ropes.items()}
        yield PositionView([stack], "mean cosine of the rotations", distances=distances, curves=curves)
    elif kind == "alibi" or (kind == "relative" and not is_meta):
        after = 0 if is_causal(config) else MOST_DISTANCE // 2
        distances = torch.arange(-MOST_DISTANCE // 2, after + 1)
        query, keys = torch.zeros(1, 1, dtype=torch.long), distances[None]
        if kind == "alibi":
            bias = alibi_bias(query, keys, config.num_attention_heads)
        else:
            table = module.relative_bias
            device = table.relative_attention_bias.weight.device
            bias = table(query.to(device), keys.to(device), bidirectional=not is_causal(config)).float().cpu()
        curves = {f"head {head + 1}": values for head, values in enumerate(bias[0, :, 0])}
        yield PositionView([stack], f"{kind} bias of the scores", distances=distances, curves=curves)


def position_vectors(config: TriptychStackConfig, module: nn.Module) -> torch.Tensor:
    """What is added to the tokens at the first positions, [P, E]."""
    positions = torch.arange(min(MOST_POSITIONS, config.max_position_embeddings))
    if config.position_embedding_type == "sinusoidal":
        return sinusoidal_embedding(positions[None], config.embedding_size, config.sinusoidal_layout)[0]
    return module.embed_positions.weight[config.position_offset :][: len(positions)].float().cpu()


def mean_rotation(config: TriptychStackConfig, rope: dict, distances: torch.Tensor) -> torch.Tensor:
    """What the rotations leave of the product of two equal vectors, at each distance: the mean of cos(n theta_i)."""
    cos, _ = TriptychRotaryEmbedding(config, rope)(torch.zeros(()), distances[None])
    return cos[0].mean(-1)
