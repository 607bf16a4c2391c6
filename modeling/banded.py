"""Banded attention: windows, chunks and global tokens at a cost that grows with the length, not with its square.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, G query heads per key/value head, d head width;
n blocks of b queries, c keys that a block reads, g global tokens.

A window leaves most of the T x S scores invisible. Here only a band of them is computed (Beltagy et al. 2020, section
3.1; Zaheer et al. 2020, appendix D): the queries are cut into blocks, a block reads the keys in reach of its first to
its last query, and the mask function decides within the block as it does everywhere else. So the result is exact.
Global keys are read by every block, beside its band; global queries read all keys, in a part of their own.

    keys     . . . . . . . . . . . .
    block 0  # # # #                      b = 4, a window of 3 to the left:
    block 1      # # # # # #              c = 2 + 4 keys for each block
    block 2              # # # # # #

Where the band would be as wide as the text, and for single steps of decoding, `sdpa` does the work.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from .attention import goes_by_blocks, sdpa_attention_forward
from .blockwise import blockwise_attention
from .tracing import is_tracing

BLOCK_SIZE = 128  # queries; measured best on a CPU, of 64, 128 and 256, for windows around 256 and heads of 64


@dataclass
class Reach:
    """What a mask function does not show: how far any query sees, at most.

    Args:
        before, after: so many of the tokens that the window counts, to the left and to the right.
        is_uniform: what a query sees depends on distances alone: no documents, prefix or chunks, and none of what
            follows.
        dilation: the window counts every so many-th token (Beltagy et al. 2020, section 3.1).
        global_tokens: [B, S] True on global tokens; `max_global_tokens` is their number in a row, if it is known.
        random: blocks of keys that are chosen for each block of queries (Zaheer et al. 2020).
    """

    before: int
    after: int
    is_uniform: bool
    dilation: int = 1
    global_tokens: torch.Tensor | None = None
    max_global_tokens: int | None = None
    random: "RandomBlocks | None" = None


@dataclass
class RandomBlocks:
    """Which blocks of `size` ranks a block of queries sees: `number` of them, the same at every call.

    A causal text chooses among the blocks so far, another one among all those of the text.
    """

    number: int
    size: int
    is_causal: bool

    def chosen(self, query_block: torch.Tensor, text_length: torch.Tensor | int) -> list[torch.Tensor]:
        """The blocks for each `query_block` of a text of so many tokens, which may repeat themselves."""
        count = query_block + 1 if self.is_causal else (text_length + self.size - 1) // self.size
        return [scramble(query_block * self.number + draw) % count for draw in range(self.number)]


def scramble(number: torch.Tensor) -> torch.Tensor:
    """An integer hash of small numbers, for draws that need no generator and no table."""
    for factor in (0x45D9F3B, 0x119DE1F3):
        number = ((number + 1) * factor) & 0x7FFFFFFF
        number = number ^ (number >> 16)
    return number


@dataclass
class Part:
    """Some of the T x S scores: those of the queries and keys of each block, as indices into the T and S.

    `visible` says which of them count.
    """

    queries: torch.Tensor  # [B, n, b]
    keys: torch.Tensor  # [B, n, c]
    visible: torch.Tensor  # [B, n, b, c]

    def at_queries(self, table: torch.Tensor) -> torch.Tensor:
        """Values of `table` [B or 1, T] at the queries: [B * n, b]."""
        return look_up(table, self.queries).flatten(0, 1)

    def at_keys(self, table: torch.Tensor) -> torch.Tensor:
        """Values of `table` [B or 1, S] at the keys: [B * n, c]."""
        return look_up(table, self.keys).flatten(0, 1)


@dataclass
class Band:
    """The scores that are computed, in place of a mask of all of them.

    Args:
        band: of all queries, in blocks of consecutive ones, with `context` consecutive keys and others.
        start: the first key of the first block; negative where it would lie before the text.
        order: [B, S], and `query_order` [B, T]: tokens in the order in which neighbours are neighbours, where pads lie
            between them or a window is dilated; None where they are anyway.
        others: [B, n, m] the keys that a block reads beside those: global ones, random blocks.
        rows: of the global queries with all keys, one block per text.
    """

    band: Part
    start: int
    context: int
    order: torch.Tensor | None = None
    query_order: torch.Tensor | None = None
    others: torch.Tensor | None = None
    rows: Part | None = None

    def bias(self, compute: Callable[[Part], torch.Tensor]) -> torch.Tensor:
        """The biases [B * n, H, b, c] that `compute` gives for each part, in one tensor [P, H].

        Gradient checkpointing knows tensors only.
        """
        parts = [compute(part) for part in (self.band, self.rows) if part is not None]
        return torch.cat([bias.movedim(1, -1).flatten(0, -2) for bias in parts])

    def split(self, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The two parts of what `bias` made: [B, n, H, b, c] and [B, 1, H, g, S]."""
        if bias is None:
            return None, None
        size = self.band.visible.numel()
        parts = [bias[:size].unflatten(0, self.band.visible.shape).movedim(-1, 2), None]
        if self.rows is not None:
            parts[1] = bias[size:].unflatten(0, self.rows.visible.shape).movedim(-1, 2)
        return tuple(parts)


def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Values [B or 1, n, m] of `table` [B or 1, X] at `index` [B or 1, n, m]."""
    rows = max(len(table), len(index))
    return table.expand(rows, -1).gather(1, index.flatten(1).expand(rows, -1)).unflatten(1, index.shape[1:])


def banded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = bidirectional_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    reach: Reach | None = None,
    **kwargs,
) -> Band | torch.Tensor | None:
    """The band of one layer type, or sdpa's mask where there is none or it would be no narrower than the text.

    Args:
        reach: of the mask function, where it is bounded. The other arguments are those of transformers' `sdpa_mask`.
    """
    block = BLOCK_SIZE if reach is None or reach.random is None else reach.random.size
    if not can_be_banded(reach, block, q_length, kv_length):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **kwargs,
        )
    real = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    rows = torch.arange(batch_size, device=device)[:, None, None, None]

    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether queries [B or 1, n, b] see keys [B or 1, n, c], given as indices: [B or 1, n, b, c]."""
        visible = mask_function(rows, 0, queries[..., :, None] + q_offset, keys[..., None, :] + kv_offset)
        return visible if real is None else visible & real[rows, keys[..., None, :]]

    def part(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> Part:
        # A query that sees nothing, as a pad may, sees all it has: a softmax over nothing would be NaN.
        visible = visible | ~visible.any(-1, keepdim=True)
        return Part(*(table.expand(batch_size, *table.shape[1:]) for table in (queries, keys, visible)))

    # Blocks, as if no pads lay between tokens: a query and the key of its own token are `shift` apart.
    shift, context = kv_length - q_length, reach.before + block + reach.after
    start = shift - reach.before
    begins = torch.arange(0, q_length, block, device=device)[:, None]
    queries = (begins + torch.arange(block, device=device))[None]  # [1, n, b]
    keys = (begins + torch.arange(context, device=device) + start)[None]  # [1, n, c]
    exists = (keys >= 0) & (keys < kv_length)
    queries, keys = queries.clamp(max=q_length - 1), keys.clamp(0, kv_length - 1)
    if reach.is_uniform and real is None:
        # One block is like the other, and what it sees a sum of lengths away from here.
        middle = torch.arange(block, device=device) + reach.before, torch.arange(context, device=device)
        visible = mask_function(0, 0, middle[0][:, None], middle[1]) & exists[:, :, None]
        return Band(part(queries, keys, visible), start, context)

    order, query_order = find_order(real, q_length, kv_length, reach, device)
    if order is not None:
        queries, keys = look_up(query_order, queries), look_up(order, keys)
    visible = sees(queries, keys) & exists[:, :, None]
    tables, others, global_rows = [(keys, visible)], [], None
    if reach.global_tokens is not None:
        is_global = reach.global_tokens[:, kv_offset : kv_offset + kv_length]
        tables = [(keys, visible & ~is_global[rows, keys[..., None, :]])]
        columns, is_filled = find_tokens(is_global, reach.max_global_tokens)
        others.append((columns[:, None].expand(-1, len(begins), -1), is_filled[:, None].expand(-1, len(begins), -1)))
        # Rows that are there to fill up are of other queries, for which the mask function is just as right.
        index, _ = find_tokens(is_global[:, shift:], reach.max_global_tokens)
        if index.shape[1]:
            index, everything = index[:, None], torch.arange(kv_length, device=device)[None, None]
            global_rows = part(index, everything, sees(index, everything))
    if reach.random is not None:
        index, is_new = random_keys(reach, block, order, real, kv_length, device)
        if reach.global_tokens is not None:
            is_new = is_new & ~look_up(is_global, index)
        others.append((index, is_new))
    tables += [(index, sees(queries, index) & is_new[:, :, None]) for index, is_new in others]

    def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([table.expand(batch_size, *table.shape[1:]) for table in parts], dim=-1)

    keys, visible = (joined(side) for side in zip(*tables, strict=True))
    others = joined(index for index, _ in others) if others else None
    if order is not None:
        order, query_order = (table.expand(batch_size, -1) for table in (order, query_order))
    return Band(part(queries, keys, visible), start, context, order, query_order, others, global_rows)


def can_be_banded(reach: Reach | None, block: int, q_length: int, kv_length: int) -> bool:
    """Whether there is a band, narrower than the text, which can be cut into blocks."""
    if reach is None or q_length == 1 or reach.before + block + reach.after >= kv_length:
        return False
    if (reach.dilation > 1 or reach.random is not None) and q_length != kv_length:
        return False  # their orders of queries and of keys would be two
    if reach.global_tokens is None or reach.max_global_tokens is not None:
        return True
    return not is_tracing(reach.global_tokens)  # a compiled graph must not count them


def find_order(
    real: torch.Tensor | None, q_length: int, kv_length: int, reach: Reach, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The orders [B or 1, S] of keys and [B or 1, T] of queries in which those that see each other are neighbours."""
    order = query_order = None
    if real is not None and reach.random is not None:
        order = query_order = move_to_end(~real)  # so that a token's place is its rank
    elif real is not None and has_inner_pads(real):
        order, query_order = move_to_end(real), move_to_end(real[:, kv_length - q_length :])
    if reach.dilation > 1:
        places = torch.arange(kv_length, device=device)
        apart = (places % reach.dilation * kv_length + places // reach.dilation).argsort()
        order = query_order = apart[None] if order is None else order[:, apart]
    return order, query_order


def random_keys(
    reach: Reach, block: int, order: torch.Tensor | None, real: torch.Tensor | None, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B or 1, n, m] of the blocks chosen at random, and which of them a block of queries does not read yet."""
    query_blocks = torch.arange(-(-length // block), device=device)[None]  # [1, n]
    text_length = length if real is None else real.sum(-1, keepdim=True)  # [B, 1]
    chosen = torch.stack(torch.broadcast_tensors(*reach.random.chosen(query_blocks, text_length)), dim=-1)
    is_first = torch.stack(
        [(chosen[..., :draw] != chosen[..., draw, None]).all(-1) for draw in range(chosen.shape[-1])], dim=-1
    )
    ranks = chosen[..., None] * block + torch.arange(block, device=device)  # [B or 1, n, number, b]
    begins = (query_blocks * block)[..., None, None]
    in_band = (ranks >= begins - reach.before) & (ranks < begins + block + reach.after)
    is_new = is_first[..., None] & ~in_band & (ranks < (length if real is None else text_length[..., None, None]))
    keys, is_new = ranks.clamp(max=length - 1).flatten(2), is_new.flatten(2)
    return keys if order is None else look_up(order, keys), is_new


def has_inner_pads(real: torch.Tensor) -> bool:
    """Whether pads may lie between the real tokens [B, S] of a row; a compiled graph must not look."""
    if is_tracing(real):
        return True
    return bool(((real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1).any())


def move_to_end(real: torch.Tensor) -> torch.Tensor:
    """The order [B, S] that puts the real tokens of each row behind the others."""
    return real.long().argsort(dim=-1, stable=True)


def find_tokens(chosen: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [B, g] of the `chosen` [B, S] in each row, filled up with others, and which of them are chosen."""
    if count is None or not is_tracing(chosen):
        count = int(chosen.sum(-1).max())
    index = (~chosen).long().argsort(dim=-1, stable=True)[:, :count]
    return index, chosen.gather(1, index)


def banded_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Band | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """softmax(Q K^T s + bias) V over the band alone; `position_bias` as `Band.bias` makes it."""
    if not isinstance(attention_mask, Band):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, position_bias=position_bias, **kwargs
        )
    band, options = attention_mask, {"dropout": dropout, "scaling": scaling}
    biases = band.split(position_bias)
    blocks = take_blocks(query, band)
    contexts = take_contexts(key, band), take_contexts(value, band)
    output = attend(blocks, *contexts, band.band.visible, biases[0], **options)  # [B, n, H, b, d]
    output = output.transpose(2, 3).flatten(1, 2)[:, : query.shape[2]]  # [B, T, H, d]
    if band.query_order is not None:
        output = put_tokens(torch.zeros_like(output), band.query_order, output)
    if band.rows is not None:
        index = band.rows.queries[:, 0]
        one = (states[:, None] for states in (gather_tokens(query, index), key, value))
        rows = attend(*one, band.rows.visible, biases[1], **options)
        output = put_tokens(output, index, rows[:, 0].transpose(1, 2))
    return output.contiguous(), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    scaling: float,
) -> torch.Tensor:
    """Attention [B, n, H, b, d] of each block of queries [B, n, H, b, d] over its keys and values [B, n, K, c, d].

    `visible` is [B, n, b, c] and `bias` [B, n, H, b, c].
    """
    batch_size, blocks, heads, length, _ = query.shape
    groups = heads // key.shape[2]
    # Query heads of one group are further rows of their key/value head, which so need not be copied for each.
    query = query.unflatten(2, (-1, groups)).flatten(3, 4)
    mask = visible[:, :, None].expand(-1, -1, groups, -1, -1)
    if bias is None:
        mask = mask.flatten(2, 3)[:, :, None]  # [B, n, 1, G * b, c]
    else:
        bias = bias.unflatten(2, (-1, groups))
        mask = bias.masked_fill(~mask[:, :, None], torch.finfo(bias.dtype).min).flatten(3, 4)  # [B, n, K, G * b, c]
    query, key, value, mask = (states.flatten(0, 1) for states in (query, key, value, mask))
    if goes_by_blocks(query, dropout):
        tables = (mask, None) if bias is None else (None, mask)
        output = blockwise_attention(query, key, value, *tables, dropout, scaling, is_causal=False)
    else:  # [B * n, K, G * b, d]
        output = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scaling)
    return output.unflatten(0, (batch_size, blocks)).unflatten(3, (groups, length)).flatten(2, 3)


def take_blocks(query: torch.Tensor, band: Band) -> torch.Tensor:
    """Queries [B, H, T, d] in blocks [B, n, H, b, d], the last one filled up."""
    blocks, block = band.band.queries.shape[1:]
    query = query if band.query_order is None else gather_tokens(query, band.query_order)
    query = F.pad(query, (0, 0, 0, blocks * block - query.shape[2]))
    return query.unflatten(2, (blocks, block)).transpose(1, 2)


def take_contexts(states: torch.Tensor, band: Band) -> torch.Tensor:
    """What each block reads of keys or values [B, K, S, d]: [B, n, K, c, d]."""
    blocks, block = band.band.queries.shape[1:]
    end = band.start + (blocks - 1) * block + band.context
    ordered = states if band.order is None else gather_tokens(states, band.order)
    ordered = F.pad(ordered, (0, 0, -band.start, end - states.shape[2]))  # where negative, it cuts off
    contexts = ordered.unfold(2, band.context, block).permute(0, 2, 1, 4, 3)
    if band.others is not None:
        others = gather_tokens(states, band.others.flatten(1)).unflatten(2, band.others.shape[1:])
        contexts = torch.cat((contexts, others.transpose(1, 2)), dim=3)
    return contexts


def gather_tokens(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Tokens `index` [B, m] of `states` [B, K, S, d]: [B, K, m, d]."""
    return states.gather(2, index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1]))


def put_tokens(states: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`states` [B, T, H, d] with `tokens` [B, m, H, d] at the places `index` [B, m]."""
    return states.scatter(1, index[:, :, None, None].expand_as(tokens), tokens)


AttentionInterface.register("banded", banded_attention_forward)
AttentionMaskInterface.register("banded", banded_mask)
