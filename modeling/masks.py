"""Who sees whom: what a mask means is decided here, once per forward; who computes it is the attention backend.

Shapes: B batch, T queries, S key slots (cached ones included), H heads.

Every rule below is a transformers mask function `(batch, head, query slot, key slot) -> visible`, made of what the
layout of the tokens says. Rules are composed, and the backend's registered mask function turns the result into what its
kernel wants: a boolean tensor, an additive one, a block mask, or nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
)
from transformers.utils.generic import is_flash_attention_requested

from .alignment import Alignment
from .banded import RandomBlocks, Reach
from .configuration_triptych import STATE_TYPES, TriptychStackConfig
from .layout import Layout, rank_tokens
from .states import Text
from .tracing import is_tracing


def visibility(
    config: TriptychStackConfig, layout: Layout, kind: tuple[str, int], is_causal: bool
) -> tuple[Callable, Reach | None]:
    """The mask function of one kind of layer, and how far it reaches; None is without bounds."""
    layer_type, dilation = kind
    sees = causal_mask_function if is_causal else bidirectional_mask_function
    window = local = random = None
    if layout.prefix is not None:
        sees = or_masks(sees, prefix_rule(layout.prefix))
    if layer_type == "sliding_attention":
        # Causal: the last W tokens. Bidirectional: W // 2 to each side. Both as a distance below `window`.
        window = config.sliding_window if is_causal else config.sliding_window // 2 + 1
        local = window_rule(layout, window, dilation)
        if config.num_random_blocks:
            random = RandomBlocks(config.num_random_blocks, config.random_block_size, is_causal)
            local = or_masks(local, random_rule(layout, random))
    elif layer_type == "chunked_attention":
        window = config.attention_chunk_size
        local = chunk_rule(layout, window)
    if local is not None:
        is_global = layout.global_tokens is not None
        sees = and_masks(sees, or_masks(local, global_rule(layout.global_tokens)) if is_global else local)
    if layout.documents is not None:
        sees = and_masks(sees, document_rule(layout.documents, layout.documents))
    if layout.permutation is not None:
        return permutation_rule(sees, layout), None
    if local is None or not layout.is_in_order or (random is not None and layout.documents is not None):
        return sees, None
    return sees, Reach(
        before=window - 1,
        after=window - 1 if layout.prefix is not None or not is_causal else 0,
        is_uniform=layer_type == "sliding_attention" and is_plain_pattern(layout) and not config.is_sparse(kind),
        dilation=dilation,
        global_tokens=layout.global_tokens,
        max_global_tokens=layout.max_global_tokens,
        random=random,
    )


def is_plain_pattern(layout: Layout) -> bool:
    """Whether the topology and the layer type say all of the pattern, up to padding."""
    rules = (layout.documents, layout.prefix, layout.permutation, layout.global_tokens)
    return layout.is_in_order and all(rule is None for rule in rules)


def prefix_rule(prefix: torch.Tensor) -> Callable:
    def both_in_prefix(batch, head, query, key):
        return prefix[batch, query] & prefix[batch, key]

    return both_in_prefix


def window_rule(layout: Layout, window: int, dilation: int) -> Callable:
    def within_window(batch, head, query, key):
        distance = (layout.rank(batch, query) - layout.rank(batch, key)).abs()
        return distance < window if dilation == 1 else (distance < window * dilation) & (distance % dilation == 0)

    return within_window


def random_rule(layout: Layout, random: RandomBlocks) -> Callable:
    def in_chosen_block(batch, head, query, key):
        key_block = layout.rank(batch, key) // random.size
        chosen = random.chosen(layout.rank(batch, query) // random.size, layout.text_length(batch, query))
        return functools.reduce(torch.logical_or, [block == key_block for block in chosen])

    return in_chosen_block


def chunk_rule(layout: Layout, size: int) -> Callable:
    def same_chunk(batch, head, query, key):
        return layout.rank(batch, query) // size == layout.rank(batch, key) // size

    return same_chunk


def global_rule(global_tokens: torch.Tensor) -> Callable:
    def either_is_global(batch, head, query, key):
        return global_tokens[batch, query] | global_tokens[batch, key]

    return either_is_global


def document_rule(query_documents: torch.Tensor, key_documents: torch.Tensor) -> Callable:
    def same_document(batch, head, query, key):
        return query_documents[batch, query] == key_documents[batch, key]

    return same_document


def permutation_rule(sees: Callable, layout: Layout) -> Callable:
    """`sees` within the permutation. A query that would see nothing, as the first of an order, sees itself instead:
    over nothing, a softmax is NaN in one backend, zero in the next, and in another the mean of all that is hidden."""
    slots = layout.query_slots
    batch = torch.arange(layout.permutation.shape[0], device=slots.device)[:, None, None]
    visible = layout.permutation & sees(batch, 0, slots[:, None], slots)  # [B, S, S]
    if layout.padding is not None:
        visible &= layout.padding[:, None]
    visible |= ~visible.any(-1, keepdim=True) & (slots[:, None] == slots)

    def may_see(batch, head, query, key):
        return visible[batch, query, key]

    return may_see


def self_attention_mask(
    config: TriptychStackConfig,
    layout: Layout,
    layer_idx: int,
    is_causal: bool,
    cache: Cache | None,
    dtype: torch.dtype,
):
    """The backend's mask for a layer and its kind, over key slots `offset` to `offset + length` as the cache has them.

    Returns:
        The mask, and (length, offset) of the keys.
    """
    kind = layer_type, _ = config.layer_kind(layer_idx)
    query_length = layout.length
    if layer_type in STATE_TYPES:
        return read_text(layout, layer_type, cache), (query_length, 0)
    if isinstance(cache, PagedAttentionCache):
        if config.num_global_tokens or config.is_sparse(kind):
            raise ValueError(
                "Continuous batching plans its own masks, which have no `num_global_tokens`, `attention_dilation` or "
                "`num_random_blocks`."
            )
        custom = layout.custom
        return (custom.get(layer_type) if isinstance(custom, dict) else custom), (query_length, 0)
    if cache is not None:
        key_length, key_offset = cache.get_mask_sizes(query_length, layer_idx)
        query_offset = cache.get_query_offset(layer_idx)
    else:
        key_length, key_offset, query_offset = query_length, 0, 0
    keys = (key_length, key_offset)
    if layout.custom is not None:
        return check_custom(layout.custom, layout, config, key_length, dtype), keys

    sees, reach = visibility(config, layout.covering(key_offset + key_length), kind, is_causal)
    if cache_says(cache, layer_idx, "is_sliding"):
        check_window_cache(layout.padding, layer_type, query_length)
    # Only the plain pattern can be left to a kernel's own causal flag; see transformers' `sdpa_mask`.
    is_plain = is_plain_pattern(layout) and not config.is_sparse(kind)
    is_static = cache_says(cache, layer_idx, "is_compileable")  # all its slots are there from the start
    is_compiled_step = is_static and query_length == 1
    refuse_on_flash(config, layout, kind)
    mask = backend_mask_function(config)(
        batch_size=layout.batch_size,
        q_length=query_length,
        kv_length=key_length,
        q_offset=query_offset,
        kv_offset=key_offset,
        mask_function=sees,
        attention_mask=layout.padding,
        local_size=reach.before + 1 if reach is not None else None,
        allow_is_causal_skip=is_causal and is_plain and not is_compiled_step,
        allow_is_bidirectional_skip=not is_causal and is_plain,
        reach=None if is_static else reach,
        dtype=dtype,
        config=config,
        device=layout.query_slots.device,
    )
    return mask, keys


def cache_says(cache: Cache | None, layer_idx: int, what: str) -> bool:
    """What a layer's cache says of itself; a cache that is made without a configuration gets its layers later."""
    return cache is not None and layer_idx < len(cache.layers) and getattr(cache.layers[layer_idx], what, False)


def check_window_cache(padding: torch.Tensor | None, layer_type: str, query_length: int):
    """A window cache keeps slots, of which pads between real tokens would take the place of tokens in reach."""
    if padding is None or is_tracing(padding) or padding.shape[1] == query_length:  # the first call sees all slots
        return
    begins = F.pad(padding[:, 1:] & ~padding[:, :-1], (1, 0)) | F.pad(padding[:, :1], (0, padding.shape[1] - 1))
    if bool((begins.sum(-1) > 1).any()):
        raise ValueError(
            f"`attention_mask` has pads between real tokens, which the cache of {layer_type!r} layers cannot hold; "
            "pad on the left, or pass `use_cache=False`."
        )


def read_text(layout: Layout, layer_type: str, cache: Cache | None) -> Text:
    """What a layer that keeps a state must know of the new tokens.

    Raises:
        ValueError: the layout has a rule on pairs of tokens, which a state cannot tell apart.
    """
    rules = {
        "continuous batching": cache if isinstance(cache, PagedAttentionCache) else None,
        "a 4D `attention_mask`": layout.custom,
        "`prefix_length`": layout.prefix,
        "`perm_mask` or `target_mapping`": layout.permutation,
    }
    for name, rule in rules.items():
        if rule is not None:
            raise ValueError(f"`layer_types` has {layer_type!r}, which cannot do {name}: it knows no pairs of tokens.")
    tables = (None if table is None else table[:, layout.query_slots] for table in (layout.padding, layout.documents))
    return Text(*tables)


def cross_attention_mask(
    config: TriptychStackConfig,
    layout: Layout,
    key_length: int,
    padding: torch.Tensor | None,
    key_documents: torch.Tensor | None,
    dtype: torch.dtype,
):
    """The backend's mask between decoder tokens [B, T] and encoder tokens [B, S]; packed pairs meet only each other.

    Args:
        padding: [B, S], True on real tokens of the encoder; or the caller's 4D mask.
        key_documents: [B, S], of the encoder's tokens.
    """
    if config.cross_attention_window is not None and padding is not None and padding.ndim == 4:
        raise ValueError("`cross_attention_window` is given, which cannot do a 4D `encoder_attention_mask`.")
    if config.linear_cross_attention and (key_documents is not None or (padding is not None and padding.ndim == 4)):
        raise ValueError(
            "`linear_cross_attention` is True, which cannot do packed documents or a 4D `encoder_attention_mask`: it "
            "knows no pairs of tokens."
        )
    if padding is not None and padding.ndim == 4:
        return check_custom(padding, layout, config, key_length, dtype)
    query_documents = layout.documents
    if (query_documents is None) != (key_documents is None):
        raise ValueError("Packed documents must be packed alike in the encoder and the decoder, but only one side is.")
    if config.linear_cross_attention:
        return Text(padding)
    sees = bidirectional_mask_function
    if query_documents is not None:
        sees = and_masks(sees, document_rule(query_documents, key_documents))
    mask = backend_mask_function(config)(
        batch_size=layout.batch_size,
        q_length=layout.length,
        kv_length=key_length,
        mask_function=sees,
        attention_mask=padding,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=query_documents is None,
        dtype=dtype,
        config=config,
        device=layout.query_slots.device,
    )
    return mask if config.cross_attention_window is None else align(mask, layout, key_length, padding, key_documents)


def align(
    mask: Any,
    layout: Layout,
    key_length: int,
    padding: torch.Tensor | None,
    key_documents: torch.Tensor | None,
) -> Alignment:
    """`mask`, and where decoder tokens [B, T] and encoder tokens [B, S] stand, for a window of cross-attention."""
    slots = layout.query_slots
    sources = rank_tokens(padding, key_documents)
    real = torch.ones(1, 1, key_length, dtype=torch.bool, device=slots.device)
    if padding is not None:
        real = real & padding[:, None]
    if key_documents is not None:
        real = real & (layout.documents[:, slots, None] == key_documents[:, None])
    return Alignment(
        mask,
        targets=slots[None] if layout.ranks is None else layout.ranks[:, slots],
        sources=torch.arange(key_length, device=slots.device)[None] if sources is None else sources,
        lengths=real.sum(-1),
    )


def backend_mask_function(config: TriptychStackConfig) -> Callable:
    """The mask function registered for the chosen backend; without one, masks would silently vanish."""
    name = config._attn_implementation
    if name not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
        raise ValueError(
            f"`attn_implementation` is {name!r}, which has no mask function; register one with "
            "`AttentionMaskInterface.register`, or choose one of "
            f"{', '.join(sorted(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping))}."
        )
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def refuse_on_flash(config: TriptychStackConfig, layout: Layout, kind: tuple[str, int]):
    """Flash attention reads padding, windows and rows of packed documents, and would ignore any other rule."""
    if not is_flash_attention_requested(config):
        return
    name = config._attn_implementation
    rules = (layout.prefix, layout.custom, layout.permutation, layout.global_tokens)
    if config.is_sparse(kind) or any(rule is not None for rule in rules):
        raise ValueError(
            f"`attn_implementation` is {name!r}, which takes no 4D mask, no `prefix_length`, no `perm_mask`, no "
            "`target_mapping`, no global tokens, no `attention_dilation` and no `num_random_blocks`."
        )
    if layout.documents is not None and (layout.batch_size > 1 or layout.padding is not None):
        raise ValueError(f"`attn_implementation` is {name!r}, which takes packed documents only in one unpadded row.")


def check_encoder_padding(mask: torch.Tensor | None, encoder_hidden_states: torch.Tensor) -> torch.Tensor | None:
    """A 2D mask as booleans [B, S], on the device of what it covers."""
    if mask is None or mask.ndim == 4:
        return mask
    expected = encoder_hidden_states.shape[:2]
    if mask.shape != expected:
        raise ValueError(f"`encoder_attention_mask` has shape {list(mask.shape)}, but must be {list(expected)}.")
    return mask.to(device=encoder_hidden_states.device, dtype=torch.bool)


def check_custom(
    mask: torch.Tensor, layout: Layout, config: TriptychStackConfig, key_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """A caller's 4D mask, boolean (True is visible) or additive, as an additive one [B or 1, H or 1, T, S]."""
    batch_size, length = layout.batch_size, layout.length
    allowed = ((1, batch_size), (1, config.num_attention_heads), (length,), (key_length,))
    if mask.ndim != 4 or any(size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)):
        raise ValueError(
            f"`attention_mask` has shape {list(mask.shape)}, but must be 2D, or 4D "
            f"[{batch_size} or 1, {config.num_attention_heads} or 1, {length}, {key_length}]."
        )
    mask, lowest = mask.to(layout.query_slots.device), torch.finfo(dtype).min
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"`attention_mask` is 4D and of {mask.dtype}, but must be boolean, or additive and of floats.")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)
    return mask.to(dtype).clamp(min=lowest)
