"""Weights there and back, by the table of an architecture."""

import torch
from transformers import PreTrainedModel

from .. import modeling_triptych
from ..configuration_triptych import TriptychConfig
from ..heads import BASE_MODELS
from .tables import Architecture, Head, Weight, match, within

Tensors = dict[str, torch.Tensor]


def table_of(architecture: Architecture, head: Head, theirs: PreTrainedModel, config: TriptychConfig) -> list[Weight]:
    """All weights that a model of this configuration has, under their full names on both sides."""
    is_base = getattr(modeling_triptych, head.ours) in BASE_MODELS.values()
    prefix = theirs.base_model_prefix
    prefix = f"{prefix}." if prefix and hasattr(theirs, prefix) else ""
    table = [*head.weights, *within(prefix, "" if is_base else "model.", architecture.weights)]
    return [weight for weight in table if weight.where(config)]


def to_ours(table: list[Weight], theirs: Tensors, config: TriptychConfig) -> Tensors:
    """Their weights, or gradients of these, under our names.

    Raises:
        ValueError: there is one that nothing here corresponds to.
    """
    ours, unknown = {}, []
    for name, tensor in theirs.items():
        entry = next(((weight, found) for weight in table if (found := match(weight.theirs, name))), None)
        if entry is None:
            unknown.append(name)
            continue
        weight, (layer, end) = entry
        parts = weight.operation.split(tensor, stack_of(config, weight))
        ours |= {our_name.replace("*", layer) + end: part for our_name, part in zip(weight.names, parts, strict=True)}
    if unknown:
        raise ValueError(f"Weights of the source that have no place here: {', '.join(unknown)}.")
    return ours


def to_theirs(table: list[Weight], ours: Tensors, config: TriptychConfig) -> Tensors:
    """Our weights under their names, and what their models keep that follows from the configuration.

    Raises:
        ValueError: there is one that nothing there corresponds to.
    """
    theirs = {weight.theirs: weight.operation.join([], config) for weight in table if not weight.names}
    unknown = []
    for name in ours:
        entry = next(
            ((weight, found) for weight in table for our_name in weight.names if (found := match(our_name, name))), None
        )
        if entry is None:
            unknown.append(name)
            continue
        weight, (layer, end) = entry
        parts = [ours[our_name.replace("*", layer) + end] for our_name in weight.names]
        theirs[weight.theirs.replace("*", layer) + end] = weight.operation.join(parts, stack_of(config, weight))
    if unknown:
        raise ValueError(f"Weights that have no place in the other architecture: {', '.join(unknown)}.")
    return theirs


def own_weights(model: PreTrainedModel) -> Tensors:
    """The weights of a model, each once."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


def stack_of(config: TriptychConfig, rule: Weight) -> TriptychConfig:
    """The configuration of the stack that a weight belongs to."""
    if config.topology != "encoder_decoder" or not rule.names:
        return config
    return config.encoder if "encoder." in rule.names[0] else config.decoder
