"""Who sees whom: what a mask means is decided here, once per forward; who computes it is the attention backend.

Shapes: B batch, T queries, S key slots (cached ones included), H heads.

A slot is an index into the keys; the rank of a token is its place among the real tokens of its document. Padding moves
slots, never ranks, so windows, chunks, prefixes and positions count ranks. Every rule below is a transformers mask
function `(batch, head, query slot, key slot) -> visible`. Rules are composed, and the backend's registered mask
function turns the result into what its kernel wants: a boolean tensor, an additive one, a block mask, or nothing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from .states import Text
from .tracing import is_tracing
from .unpadding import Places, find_places, find_rows, move, share_rows


@dataclass
class Layout:
    """How the tokens of one forward lie: padding, documents and prefix, over all S key slots.

    `None` means the plain case: no padding, one document, ranks equal slots, no prefix, no mask of the caller's own, no
    order of prediction.
    """

    query_slots: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [B or 1, T] of the queries
    batch_size: int
    padding: torch.Tensor | None = None  # [B, S] True on real tokens
    documents: torch.Tensor | None = None  # [B, S] equal within a document
    ranks: torch.Tensor | None = None  # [B, S]
    prefix: torch.Tensor | None = None  # [B, S] True within the prefix
    custom: torch.Tensor | dict | None = None  # the caller's 4D mask; continuous batching plans one per layer type
    permutation: torch.Tensor | None = None  # [B, S, S] True where an order of prediction lets the row see the column
    lengths: torch.Tensor | None = None  # [B, S] of the texts, where random blocks need them
    global_tokens: torch.Tensor | None = None  # [B, S] True on tokens that see all and are seen by all
    max_global_tokens: int | None = None  # their number in a row, where it is known without looking
    is_in_order: bool = True  # False where `ranks` are positions of the caller's own choice
    grid: tuple[int, ...] | None = None  # tokens along each axis of an image or a video

    @property
    def length(self) -> int:
        return self.query_slots.shape[0]

    def rank(self, batch: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return slot if self.ranks is None else self.ranks[batch, slot]

    def covering(self, slots: int) -> "Layout":
        """The same layout with tables that reach `slots`: a static cache has slots that no token fills yet."""

        def reach(table: torch.Tensor | None, value: int) -> torch.Tensor | None:
            return None if table is None else F.pad(table, (0, max(0, slots - table.shape[1])), value=value)

        return replace(
            self,
            documents=reach(self.documents, -1),
            ranks=reach(self.ranks, 0),
            prefix=reach(self.prefix, False),
            lengths=reach(self.lengths, 0),
            global_tokens=reach(self.global_tokens, False),
        )

    def text_length(self, batch: torch.Tensor, slot: torch.Tensor) -> torch.Tensor | int:
        """Real tokens of the document that a slot belongs to; see `mark_patterns`."""
        return self.length if self.lengths is None else self.lengths[batch, slot]

    def key_positions(self, length: int, offset: int) -> torch.Tensor:
        """Positions [B or 1, length] of the key slots from `offset` on, for biases on distances."""
        if self.ranks is None:
            return (torch.arange(length, device=self.query_slots.device) + offset)[None]
        return self.covering(offset + length).ranks[:, offset : offset + length]

    def unpadded(self, is_causal: bool, may_share: bool) -> tuple["Layout", Places, Places]:
        """The layout of rows without pads but at the end, a text in each, and the places of tokens here and there.

        Args:
            may_share: whether short texts may share a row.
        """
        everything = torch.ones(self.batch_size, self.length, dtype=torch.bool, device=self.query_slots.device)
        places = find_places(everything if self.padding is None else self.padding)
        rows, text = find_rows(places, self.documents)
        shared = share_rows(rows, text) if may_share else rows
        is_shared, rows = shared is not rows, shared
        batch_size, width = rows.shape
        # Nothing looks ahead to pads at the end, unless it reads both ways.
        hides_pads = is_causal and self.prefix is None and self.lengths is None
        is_full = len(rows.index) == batch_size * width

        moved = functools.partial(move, places=places, rows=rows)
        layout = replace(
            self,
            query_slots=torch.arange(width, device=self.query_slots.device),
            position_ids=moved(self.position_ids),
            batch_size=batch_size,
            padding=None if hides_pads or is_full else moved(everything),
            documents=rows.put(text) if is_shared else None,
            ranks=moved(self.ranks) if is_shared or not self.is_in_order else None,
            prefix=moved(self.prefix),
            lengths=None if self.lengths is None else moved(self.lengths).clamp(min=1),  # random blocks divide by it
            global_tokens=moved(self.global_tokens),
            max_global_tokens=None if is_shared else self.max_global_tokens,
        )
        return layout, places, rows

    def beside_encoder(self, places: Places) -> tuple["Layout", Places]:
        """The layout of one row for each of an encoder's, whatever shares rows elsewhere, and the places in them."""
        rows, _ = find_rows(places)
        documents = move(self.documents, places, rows)
        slots = torch.arange(rows.shape[1], device=self.query_slots.device)
        ranks = rank_tokens(None, documents)
        return Layout(slots, slots[None], self.batch_size, documents=documents, ranks=ranks), rows


def read_layout(
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    prefix_length: torch.Tensor | None,
    cache: Cache | None,
    token_type_ids: torch.Tensor | None = None,
) -> Layout:
    """Reads the layout of `tokens` [B, T, ...] from what the caller gave, and fills in `position_ids`.

    Raises:
        ValueError: an input has the wrong shape, or cannot be combined with what the cache already holds.
    """
    batch_size, length = tokens.shape[:2]
    device = tokens.device
    by_token = dict(position_ids=position_ids, seq_idx=seq_idx, token_type_ids=token_type_ids)
    check_shapes(batch_size, length, by_token, prefix_length)
    if isinstance(cache, PagedAttentionCache):  # continuous batching plans its own masks and positions
        return Layout(torch.arange(length, device=device), position_ids, batch_size, custom=attention_mask)
    past = cache.get_seq_length() if cache is not None else 0
    query_slots = torch.arange(length, device=device) + past
    # A static cache counts in a tensor, which a compiled graph must not read: there, nothing is known of the past.
    is_number = isinstance(past, (int, torch.SymInt))
    known_past = past if is_number else None if is_tracing(tokens) else int(past)

    padding = custom = None
    if attention_mask is not None and attention_mask.ndim != 2:
        custom = attention_mask
    elif attention_mask is not None:
        padding = attention_mask.to(device=device, dtype=torch.bool)
        check_padding(padding, batch_size, length, known_past, cache)
        if not is_tracing(tokens) and bool(padding.all()):
            padding = None  # a mask that hides nothing, as generate() gives one, need not be carried along

    documents = find_documents(position_ids, seq_idx, padding, known_past, batch_size, length)
    ranks = rank_tokens(padding, documents)
    prefix = None
    if prefix_length is not None:
        prefix = read_prefix(prefix_length.to(device), padding, documents, ranks, query_slots, known_past)
    is_continuable, is_in_order = documents is None, True
    if position_ids is None:
        position_ids = query_slots[None] if ranks is None else ranks[:, query_slots]
    elif known_past == 0 and not is_plain(position_ids, ranks, padding):
        # Positions of the caller's own choice also place the keys, as far as distances are concerned.
        ranks, is_continuable = position_ids.to(device).expand(batch_size, -1), False
        ranks = ranks if padding is None else torch.where(padding[:, :length], ranks, 0)
        is_in_order = is_tracing(tokens)  # a graph takes them for counted ones where it asks who is near
    remember(cache, known_past, is_continuable or is_tracing(tokens))  # a graph cannot look whether it is
    position_ids = position_ids.to(device)
    tables = dict(padding=padding, documents=documents, ranks=ranks, prefix=prefix, custom=custom)
    return Layout(query_slots, position_ids, batch_size, **tables, is_in_order=is_in_order)


def lay_on_grid(layout: Layout, grid: tuple[int, ...], is_placed: bool):
    """Makes a layout that of a grid, where a patch keeps its place whichever others are masked.

    Args:
        is_placed: whether the caller said where the tokens stand.
    """
    layout.grid = grid
    if layout.padding is not None and not is_placed:
        layout.position_ids = layout.query_slots[None]
        layout.ranks, layout.is_in_order = layout.position_ids.expand(layout.batch_size, -1), False


def read_targets(layout: Layout, perm_mask: torch.Tensor | None, target_mapping: torch.Tensor | None) -> torch.Tensor:
    """The slot [B, P] that each one-hot row of `target_mapping` [B, P, T] names; a row of zeros names slot 0.

    Raises:
        ValueError: an input has the wrong shape, a row is not one-hot, or the layout leaves no room for permutations.
    """
    batch_size, length = layout.batch_size, layout.length
    if layout.custom is not None:
        raise ValueError("`perm_mask` and `target_mapping` cannot be combined with a 4D `attention_mask`.")
    if perm_mask is not None and tuple(perm_mask.shape) != (batch_size, length, length):
        raise ValueError(f"`perm_mask` has shape {list(perm_mask.shape)}, but must be {[batch_size, length, length]}.")
    if target_mapping is None:
        return layout.query_slots.new_empty(batch_size, 0)
    shape = tuple(target_mapping.shape)
    if len(shape) != 3 or shape != (batch_size, shape[1], length) or not shape[1]:
        raise ValueError(f"`target_mapping` has shape {list(shape)}, but must be [{batch_size}, P, {length}], P > 0.")
    named = target_mapping.to(layout.query_slots.device) != 0
    if named.device.type == "cpu" and not is_tracing(named) and bool((named.sum(-1) > 1).any()):
        raise ValueError("`target_mapping` has a row that names several tokens, but each must name one.")
    return named.int().argmax(-1)


def two_streams(layout: Layout, perm_mask: torch.Tensor | None, targets: torch.Tensor) -> Layout:
    """The layout of T tokens and, behind them, P queries that stand where the tokens `targets` [B, P] do.

    Two-stream self-attention (Yang et al. 2019, arXiv 1906.08237, section 2.3): both streams see the tokens that
    `perm_mask` [B, T, T] leaves them (1 is hidden); a token also sees itself, a query never its own token, and nobody
    sees a query. So the content stream h and the query stream g are one text for the layers.
    """
    batch_size, queries = targets.shape
    length = layout.length
    slots = torch.cat((layout.query_slots.expand(batch_size, -1), targets), dim=1)  # [B, T + P] where each one stands
    own = slots[:, :, None] == layout.query_slots  # [B, T + P, T]
    sees = ~own
    if perm_mask is not None:
        hidden = perm_mask.to(slots.device, torch.bool)
        sees &= ~hidden.gather(1, slots[:, :, None].expand(-1, -1, length))
    sees[:, :length] |= own[:, :length]

    def stand(table: torch.Tensor | None) -> torch.Tensor | None:
        return None if table is None else table.expand(batch_size, -1).gather(1, slots)

    return Layout(
        query_slots=torch.arange(length + queries, device=slots.device),
        position_ids=stand(layout.position_ids),
        batch_size=batch_size,
        padding=None if layout.padding is None else F.pad(layout.padding, (0, queries), value=True),
        documents=stand(layout.documents),
        ranks=slots if layout.ranks is None else stand(layout.ranks),
        permutation=F.pad(sees, (0, queries)),
        lengths=stand(torch.full_like(slots[:1, :length], length) if layout.lengths is None else layout.lengths),
        global_tokens=stand(layout.global_tokens),
        grid=layout.grid,
    )


def is_plain(position_ids: torch.Tensor, ranks: torch.Tensor | None, padding: torch.Tensor | None) -> bool:
    """Whether the positions [B or 1, T] of real tokens are their ranks [B, T]; a compiled graph must not look, and
    takes the general way."""
    if is_tracing(position_ids):
        return False
    length, device = position_ids.shape[-1], position_ids.device
    ranks = torch.arange(length, device=device) if ranks is None else ranks[:, :length].to(device)
    is_rank = position_ids == ranks
    return bool((is_rank if padding is None else is_rank | ~padding[:, :length].to(device)).all())


def remember(cache: Cache | None, known_past: int | None, is_continuable: bool):
    """Marks a cache whose keys lie where no later call could know them, and refuses such a call."""
    if cache is None or known_past is None:
        return
    if known_past == 0:
        cache.is_continuable = is_continuable
    elif not getattr(cache, "is_continuable", True):
        raise ValueError(
            "The cache holds packed documents, or positions of the caller's own, which a later call cannot continue; "
            "give each text a row of its own."
        )


def check_shapes(batch_size, length, by_token, prefix_length):
    for name, value in by_token.items():
        if value is not None and tuple(value.shape) not in ((batch_size, length), (1, length)):
            raise ValueError(f"`{name}` has shape {list(value.shape)}, but must be {[batch_size, length]}.")
    if prefix_length is not None and tuple(prefix_length.shape) != (batch_size,):
        raise ValueError(f"`prefix_length` has shape {list(prefix_length.shape)}, but must be [{batch_size}].")


def check_padding(padding: torch.Tensor, batch_size: int, length: int, known_past: int | None, cache: Cache | None):
    """A 2D mask covers the cached tokens and the new ones; a static cache may be given all its slots at once."""
    expected = length if known_past is None else known_past + length
    is_fixed = getattr(cache, "is_compileable", False)
    fits = padding.shape[1] >= expected if is_fixed else padding.shape[1] == expected
    if padding.shape[0] != batch_size or not fits:
        cached = f", of which {known_past} are cached" if cache is not None else ""
        raise ValueError(
            f"`attention_mask` has shape {list(padding.shape)}, but must be [{batch_size}, {expected}] "
            f"(tokens{cached}) or a 4D mask."
        )


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


def read_prefix(prefix_length, padding, documents, ranks, query_slots, known_past) -> torch.Tensor:
    """Which slots [B, S] lie in the prefix. Its tokens see each other, so none of them can wait for a later call."""
    if documents is not None:
        raise ValueError("`prefix_length` cannot be combined with packed documents.")
    if ranks is None:  # a compiled step, which knows no past, asks only for slots behind the prefix
        ranks = torch.arange((known_past or 0) + query_slots.shape[0], device=query_slots.device)[None]
    if known_past is not None:
        at_once = known_past or query_slots.shape[0]
        seen = torch.full_like(prefix_length, at_once) if padding is None else padding[:, :at_once].sum(-1)
        if bool((prefix_length > seen).any()):
            raise ValueError(
                f"`prefix_length` is {prefix_length.tolist()}, but only {seen.tolist()} real tokens were given "
                "at once; a prefix must be given whole, in the first call."
            )
    return ranks < prefix_length[:, None]


def find_documents(
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    padding: torch.Tensor | None,
    known_past: int | None,
    batch_size: int,
    length: int,
) -> torch.Tensor | None:
    """Document number [B, S] of each slot: `seq_idx` where given, else a new one wherever positions restart at 0.

    Packed documents fill a cache at once; later calls can neither add to them nor bring others.
    """
    if seq_idx is None and (position_ids is None or length == 1 or known_past != 0):
        return None
    if known_past != 0:
        raise ValueError("`seq_idx` is given, but the cache already holds tokens; packed documents fill it at once.")
    if seq_idx is not None:
        documents = seq_idx
    else:
        starts = position_ids == 0
        if padding is not None:
            starts = starts & padding[:, :length]
        if not is_tracing(position_ids) and not (starts.sum(-1) > 1).any():
            return None
        documents = starts.cumsum(-1) - 1  # numbered as `seq_idx` is
    documents = documents.expand(batch_size, -1)
    slots = padding.shape[1] if padding is not None else length
    return F.pad(documents, (0, slots - length), value=-1)


def text_lengths(ranks: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Real tokens [B, S] of the document that each slot belongs to: one more than its highest rank."""
    if documents is None:
        return (ranks.amax(-1, keepdim=True) + 1).expand_as(ranks)
    runs = F.pad((documents[:, 1:] != documents[:, :-1]).cumsum(-1), (1, 0))
    return torch.zeros_like(ranks).scatter_reduce(1, runs, ranks, "amax").gather(1, runs) + 1


def rank_tokens(padding: torch.Tensor | None, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Place [B, S] of each token among the real tokens of its document; a pad has that of the token before it."""
    if padding is None and documents is None:
        return None
    real = padding.long() if padding is not None else torch.ones_like(documents, dtype=torch.long)
    ranks = (real.cumsum(-1) - 1).clamp(min=0)
    if documents is not None:
        is_start = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        # The count of real tokens before the document, carried along it.
        before = torch.where(is_start, real.cumsum(-1) - real, 0).cummax(-1)[0]
        ranks = (real.cumsum(-1) - 1 - before).clamp(min=0)
    return ranks


def mark_patterns(
    layout: Layout,
    config: TriptychStackConfig,
    global_attention_mask: torch.Tensor | None = None,
    cache: Cache | None = None,
):
    """Adds to a layout what sparse patterns ask for: global tokens, and the lengths of texts for random blocks.

    Global are the first `num_global_tokens` real ones of each document, and those that the caller names.
    """
    if global_attention_mask is not None and cache is not None:
        raise ValueError(
            "`global_attention_mask` is given, but a cache cannot keep the tokens that it names; pass "
            "`use_cache=False`, or choose `num_global_tokens`."
        )
    if config.num_random_blocks and layout.ranks is not None:
        layout.lengths = text_lengths(layout.ranks, layout.documents)
    num_global_tokens = config.num_global_tokens
    chosen = None
    if num_global_tokens:
        # A compiled step, which knows no past, asks for slots behind its table; those are not global.
        slots = max(num_global_tokens, layout.length)
        ranks = torch.arange(slots, device=layout.query_slots.device)[None] if layout.ranks is None else layout.ranks
        chosen = (ranks < num_global_tokens).expand(layout.batch_size, -1)
    if global_attention_mask is not None:
        check_shapes(layout.batch_size, layout.length, {"global_attention_mask": global_attention_mask}, None)
        named = global_attention_mask.to(layout.query_slots.device, torch.bool).expand(layout.batch_size, -1)
        chosen = named if chosen is None else chosen[:, : named.shape[1]] | named
    if chosen is not None and layout.padding is not None:
        chosen = chosen & layout.padding
    layout.global_tokens = chosen
    if layout.documents is None and global_attention_mask is None:
        layout.max_global_tokens = num_global_tokens


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
