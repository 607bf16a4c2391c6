"""Pads leave once, before the embeddings, and come back once, behind the last norm.

Shapes: B rows, T tokens of a row with its pads, W real tokens of the longest row, N real tokens of all rows.

In between, linear layers and norms see a stream [1, N, ...] of real tokens. Only attention needs to know which of them
belong together: it lays its projections in rows [B, W, ...] without pads but at the end, whatever the backend, and
takes its outputs back into the stream.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch


class Take(torch.autograd.Function):
    """Rows of `states` [M, ...] at `index` [N], each of which is named once at most: then the gradient is a copy."""

    @staticmethod
    def forward(ctx, states, index):
        ctx.save_for_backward(index)
        ctx.size = len(states)
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return Put.apply(gradient, index, ctx.size), None


class Put(torch.autograd.Function):
    """`states` [N, ...] as the rows at `index` [N] of a table [size, ...] of zeros."""

    @staticmethod
    def forward(ctx, states, index, size):
        ctx.save_for_backward(index)
        return states.new_zeros(size, *states.shape[1:]).index_copy_(0, index, states)

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return Take.apply(gradient, index), None, None


@dataclass
class Places:
    """Where each token of the stream stands in a batch of rows."""

    index: torch.Tensor  # [N], row * length + slot
    shape: tuple[int, int]  # rows and their length

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The stream [1, N, ...] of a table [B or 1, T, ...]."""
        table = table.expand(self.shape[0], *table.shape[1:]).flatten(0, 1)
        return Take.apply(table, self.index.to(table.device))[None]

    def put(self, stream: torch.Tensor) -> torch.Tensor:
        """The table [B, T, ...] of a stream [1, N, ...], zero where no token stands."""
        rows, length = self.shape
        return Put.apply(stream[0], self.index.to(stream.device), rows * length).unflatten(0, self.shape)


def lay(stream: torch.Tensor, rows: Places | None) -> torch.Tensor:
    """`stream` in rows, if it is one."""
    return stream if rows is None else rows.put(stream)


def move(table: torch.Tensor | None, places: Places, rows: Places) -> torch.Tensor | None:
    """`table` of the tokens at `places`, once these stand in `rows`."""
    return None if table is None else rows.put(places.take(table))


def has_pads(padding: torch.Tensor | None) -> bool:
    """Whether something of `padding` [B, T] (True on real tokens) can leave, and something is left."""
    return padding is not None and not bool(padding.all()) and bool(padding.any())


def find_places(padding: torch.Tensor) -> Places:
    """Where the real tokens of `padding` [B, T], True on them, stand."""
    return Places(padding.flatten().nonzero()[:, 0], tuple(padding.shape))


def find_rows(places: Places, documents: torch.Tensor | None = None) -> tuple[Places, torch.Tensor]:
    """A row of its own for each text, or each document of a row, and the number [1, N] of the one a token belongs to.

    Args:
        documents: [B, T], equal within a document; without, each of the B rows is one text.
    """
    text = places.index // places.shape[1]
    if documents is not None:
        numbers = places.take(documents)[0]
        text = text * (numbers.max() - numbers.min() + 1) + numbers - numbers.min()
        text = text.unique(return_inverse=True)[1]
    lengths = text.bincount(minlength=0 if documents is not None else places.shape[0])
    order = text.argsort(stable=True)  # tokens of one text side by side, as they came
    starts = lengths.cumsum(0) - lengths
    ranks = torch.empty_like(text).scatter(0, order, torch.arange(len(text), device=text.device) - starts[text[order]])
    width = int(lengths.max())
    return Places(text * width + ranks, (len(lengths), width)), text[None]


def share_rows(rows: Places, text: torch.Tensor) -> Places:
    """`rows` with several texts in one row, end to end, if at most half as many rows are left then; else as they are.

    Attention costs as much for what is empty in a row as for what is not. It is dearer, though, where it has to tell
    texts of one row apart.
    """
    count, width = rows.shape
    if 2 * len(rows.index) > count * width:
        return rows
    lengths = text[0].bincount(minlength=count).tolist()
    row_of, offset_of, left = [0] * count, [0] * count, []  # left: (places free, row), in order
    number = 0
    for index in sorted(range(count), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        fitting = bisect_left(left, (length, -1))
        if fitting < len(left):
            free, row = left.pop(fitting)
        else:
            free, row, number = width, number, number + 1
        row_of[index], offset_of[index] = row, width - free
        insort(left, (free - length, row))
    if 2 * number > count:
        return rows
    row_of, offset_of = (torch.tensor(table, device=text.device)[text[0]] for table in (row_of, offset_of))
    return Places(row_of * width + offset_of + rows.index % width, (number, width))
