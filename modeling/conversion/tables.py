"""What a conversion is made of: which field and which weight of a known architecture is which of ours.

An `Architecture` is one entry, read from left to right to import and from right to left to export. Weights are matched
by name, `*` standing for the number of a layer, and most only change their name; an `Operation` says what else happens
to the others.

Shapes: D hidden_size, H query heads, d head width, I inputs of a projection.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_triptych import TriptychConfig, TriptychStackConfig

Tensors = Sequence[torch.Tensor]


class Operation:
    """What happens to a weight on its way: one of theirs becomes one or more of ours, and back."""

    def split(self, theirs: torch.Tensor, config: TriptychConfig) -> Tensors:
        """Ours, of theirs."""
        return [theirs]

    def join(self, ours: Tensors, config: TriptychConfig) -> torch.Tensor:
        """Theirs, of ours."""
        return ours[0]


class Transposed(Operation):
    """A matrix kept the other way round, [inputs, outputs]; biases stay as they are."""

    def split(self, theirs, config):
        return [theirs.t().contiguous()]

    def join(self, ours, config):
        return ours[0].t().contiguous()


class Stacked(Operation):
    """Projections on top of each other in one matrix, in the order of our names.

    Args:
        parts: the last parts of these names, whose sizes the configuration knows.
        transposed: the matrix is kept the other way round.
    """

    def __init__(self, *parts: str, transposed: bool = False):
        self.parts, self.transposed = parts, transposed

    def split(self, theirs, config):
        theirs = theirs.t() if self.transposed else theirs
        # Copies: parts that share one memory would be saved, moved and trained as one.
        sizes = [outputs(part, config) for part in self.parts]
        return [part.clone(memory_format=torch.contiguous_format) for part in theirs.split(sizes)]

    def join(self, ours, config):
        joined = torch.cat(list(ours))
        return joined.t().contiguous() if self.transposed else joined


class StackedByHead(Operation):
    """Queries, keys and values of the first head, then those of the next: [H, 3, d, I]."""

    def split(self, theirs, config):
        heads = theirs.unflatten(0, (config.num_attention_heads, 3, config.head_dim))
        return [part.flatten(0, 1).contiguous() for part in heads.unbind(1)]

    def join(self, ours, config):
        heads = [part.unflatten(0, (config.num_attention_heads, config.head_dim)) for part in ours]
        return torch.stack(heads, dim=1).flatten(0, 2)


class Row(Operation):
    """A tensor that is kept with an axis of one entry before it."""

    def split(self, theirs, config):
        return [theirs[0]]

    def join(self, ours, config):
        return ours[0][None]


class Pointwise(Operation):
    """A projection that is kept as a convolution over one pixel."""

    def split(self, theirs, config):
        return [theirs.flatten(1) if theirs.ndim == 4 else theirs]

    def join(self, ours, config):
        return ours[0][..., None, None] if ours[0].ndim == 2 else ours[0]


class Idle(Operation):
    """A bias of the vocabulary that theirs keeps and never adds."""

    def split(self, theirs, config):
        return []

    def join(self, ours, config):
        return torch.zeros(config.vocab_size)


def outputs(projection: str, config: TriptychStackConfig) -> int:
    """How many rows a projection of ours has."""
    return {
        "q_proj": config.num_attention_heads * config.head_dim,
        "k_proj": config.num_key_value_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
    }[projection]


@dataclass(frozen=True)
class Weight:
    """Which weight of theirs is which of ours.

    Attributes:
        theirs: name of a module, whose weight and bias are meant, or of a single tensor; `*` is the number of a layer.
        ours: the name or names here, with the same `*`; none for a tensor that the configuration alone determines.
        operation: what happens on the way.
        where: whether a model of this configuration has it.
    """

    theirs: str
    ours: str | tuple[str, ...]
    operation: Operation = field(default_factory=Operation)
    where: Callable[[TriptychConfig], bool] = lambda config: True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def match(pattern: str, name: str) -> tuple[str, str] | None:
    """The layer number and the ending (".weight", ".bias" or "") with which `name` is what `pattern` means, or None."""
    if not (found := compiled(pattern).fullmatch(name)):
        return None
    return found.groupdict().get("layer") or "", found["end"]


@cache
def compiled(pattern: str) -> re.Pattern:
    head, *rest = map(re.escape, pattern.split("*"))
    middle = "".join((r"(?P<layer>\d+)" if not i else r"(?P=layer)") + part for i, part in enumerate(rest))
    return re.compile(head + middle + r"(?P<end>(\.weight|\.bias)?)")


def within(theirs: str, ours: str, weights: Sequence[Weight]) -> list[Weight]:
    """The same weights, each side's under a prefix."""
    return [Weight(theirs + w.theirs, tuple(ours + name for name in w.names), w.operation, w.where) for w in weights]


@dataclass(frozen=True)
class Head:
    """A class of theirs, and the one that it is here.

    Attributes:
        ours: the name of our class.
        weights: what it has beside the base model, under full names.
        fixed: our fields that are always the same in it.
        fields: our fields that its instances know, and its configuration does not.
        options: arguments for building theirs, from our configuration.
    """

    ours: str
    weights: Sequence[Weight] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Callable[[PreTrainedModel], Any]] = field(default_factory=dict)
    options: Callable[[TriptychConfig], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Architecture:
    """A known architecture, as a point among ours.

    Attributes:
        model_type: transformers' name of it.
        topology: our panel.
        heads: by the names of their classes.
        weights: of the base model.
        fields: our fields under their names; a stack of an encoder-decoder has its own as "encoder.hidden_size".
        fixed: our fields that are always the same.
        read: more of our fields, from their configuration.
        write: more of their fields, from ours.
        training_only: their fields that matter in training alone, where ours know no such difference.
        inert: their fields that change nothing.
    """

    model_type: str
    topology: str
    heads: Mapping[str, Head]
    weights: Sequence[Weight]
    fields: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}
    write: Callable[[TriptychConfig], dict[str, Any]] = lambda config: {}
    training_only: Sequence[str] = ()
    inert: Sequence[str] = ()
