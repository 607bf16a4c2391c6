"""Keys and values of earlier tokens, with room for those to come.

Shapes: B batch, K key/value heads, S tokens so far, T new tokens, d head width.

transformers' `DynamicCache` copies all that it holds to add a token, and once more to reorder beams. Of a long text,
that takes longer than to attend to it. Here its tensors become the beginnings of larger tables, and all else stays:
what the cache is, what it holds, and what others may do to it.
"""

from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from .tracing import is_tracing

ROOM = 64  # tokens: of a text that is written, only each 64th copies those before it
FEWEST_ENTRIES = 2**15  # of keys: fewer are copied as quickly as they are written behind

# The keys and the values of a layer as they were last given, each with the table that they are the beginning of. No
# attribute, as exported graphs take those for inputs.
Grown = tuple[torch.Tensor, torch.Tensor]
GROWN: WeakKeyDictionary[DynamicLayer, tuple[Grown, Grown]] = WeakKeyDictionary()


def update(
    cache: Cache, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cache.update`, in place where it can be: all keys and values [B, K, S + T, d], new ones [B, K, T, d] last."""
    layer = None if is_tracing(keys) else growing_layer(cache, layer_idx)
    if layer is None:
        return cache.update(keys, values, layer_idx, kwargs=kwargs)
    of_keys, of_values = GROWN.get(layer, (None, None))
    grown = extend(layer.keys, of_keys, keys), extend(layer.values, of_values, values)
    return keep(layer, *grown)


def reorder(cache: Cache, beam_idx: torch.LongTensor) -> None:
    """`cache.reorder_cache`, with room for the one token that comes before beams are reordered again."""
    for layer_idx, own in enumerate(cache.layers):
        layer = growing_layer(cache, layer_idx)
        if layer is None:
            own.reorder_cache(beam_idx)
        else:
            keep(layer, select(layer.keys, beam_idx), select(layer.values, beam_idx))


def growing_layer(cache: Cache, layer_idx: int) -> DynamicLayer | None:
    """The layer of a cache that may be written on: one that grows, holds many tokens, and has no gradient to carry.

    The first tokens are left to transformers, whose exporter wants them as it stores them.
    """
    if type(cache) is not DynamicCache or cache.offloading or torch.is_grad_enabled():
        return None
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.numel() < FEWEST_ENTRIES:
        return None
    return layer


def keep(layer: DynamicLayer, of_keys: Grown, of_values: Grown) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts keys and values into their layer, and returns them."""
    GROWN[layer] = of_keys, of_values
    layer.keys, layer.values = of_keys[0], of_values[0]
    return layer.keys, layer.values


def extend(states: torch.Tensor, grown: Grown | None, new: torch.Tensor) -> Grown:
    """`states` [B, K, S, d] with `new` [B, K, T, d] behind, and their table: the same, if it has room."""
    length = states.shape[2]
    total = length + new.shape[2]
    # If these are not the states that were given, they were cropped, moved or put there, and what is behind the
    # beginning of the table may still be somebody's.
    table = grown[1] if grown is not None and grown[0] is states else None
    if table is None or total > table.shape[2] or table.is_inference() != torch.is_inference_mode_enabled():
        table = new.new_empty(*new.shape[:2], total + ROOM, new.shape[3])
        table[:, :, :length] = states
    table[:, :, length:total] = new
    return table[:, :, :total], table


def select(states: torch.Tensor, index: torch.Tensor) -> Grown:
    """Rows of `states` [B, K, S, d] at `index`, and their table, with room for one token."""
    length = states.shape[2]
    table = states.new_empty(len(index), states.shape[1], length + 1, states.shape[3])
    torch.index_select(states, 0, index.to(states.device), out=table[:, :, :length])
    return table[:, :, :length], table
