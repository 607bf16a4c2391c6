"""Keys and values of earlier tokens, with room for those to come.

Shapes: B batch, K key/value heads, S tokens so far, T new tokens, d head width.

transformers' cache copies all that it holds to add a token, and once more to reorder beams. Of a long text, that takes
longer than to attend to it.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .configuration_triptych import TriptychStackConfig
from .tracing import is_tracing

ROOM = 64  # tokens: of a text that is written, only each 64th copies those before it


class TriptychGrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer`, whose keys and values are the beginning of tables that have room behind it.

    Where there may be gradients, or a graph is made, nothing is written in place, and it works as its base class does.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key_table = self.value_table = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [B, K, S + T, d], with the new ones [B, K, T, d]."""
        if torch.is_grad_enabled() or is_tracing(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.key_table = extend(self.keys, self.key_table, key_states)
        self.values, self.value_table = extend(self.values, self.value_table, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if torch.is_grad_enabled() or self.get_seq_length() == 0:
            super().reorder_cache(beam_idx)
            return
        self.keys, self.key_table = reorder(self.keys, beam_idx)
        self.values, self.value_table = reorder(self.values, beam_idx)


def extend(states: torch.Tensor, table: torch.Tensor | None, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`states` [B, K, S, d] with `new` [B, K, T, d] behind, and their table: the same, if it has room."""
    length = states.shape[2] if states.numel() else 0
    total = length + new.shape[2]
    if not begins(table, states) or total > table.shape[2]:
        table = new.new_empty(*new.shape[:2], total + ROOM, new.shape[3])
        if length:
            table[:, :, :length] = states
    table[:, :, length:total] = new
    return table[:, :, :total], table


def begins(table: torch.Tensor | None, states: torch.Tensor) -> bool:
    """Whether `states` are the beginning of `table`, which may be written on: somebody may have put others there."""
    if table is None or table.is_inference() != torch.is_inference_mode_enabled():
        return False
    return table.data_ptr() == states.data_ptr() and table.stride() == states.stride() and len(table) == len(states)


def reorder(states: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `states` [B, K, S, d] at `index`, and their table, with room for the one token before the next time."""
    length = states.shape[2]
    table = states.new_empty(len(index), states.shape[1], length + 1, states.shape[3])
    torch.index_select(states, 0, index.to(states.device), out=table[:, :, :length])
    return table[:, :, :length], table


def give_room(cache: Cache) -> Cache:
    """The same new cache, with layers that have room in the place of those that would copy."""
    cache.layers = [TriptychGrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def dynamic_cache(config: TriptychStackConfig) -> DynamicCache:
    """The cache that a model of this configuration makes for itself."""
    return give_room(DynamicCache(config=config))
