"""How the tokens of a batch lie: which are real, where documents and prefixes are, and where each token stands.

Shapes: B batch, T queries, S key slots (cached ones included), P queries of a second stream.

A slot is an index into the keys; the rank of a token is its place among the real tokens of its document. Padding moves
slots, never ranks, so windows, chunks, prefixes and positions count ranks.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from .configuration_triptych import TriptychStackConfig
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
