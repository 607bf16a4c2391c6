"""Pads leave once, before the embeddings, and come back once, behind the last norm.

Shapes: B rows, T tokens of a row with its pads, W real tokens of the longest row, N real tokens of all rows.

In between, linear layers and norms see a stream [1, N, ...] of real tokens. Only attention needs to know which of them
belong together: it lays its projections in rows [B, W, ...] without pads but at the end, whatever the backend, and
takes its outputs back into the stream.
"""

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


def has_pads(padding: torch.Tensor | None) -> bool:
    """Whether something of `padding` [B, T] (True on real tokens) can leave, and something is left."""
    return padding is not None and not bool(padding.all()) and bool(padding.any())


def find_places(padding: torch.Tensor) -> tuple[Places, Places]:
    """Where the real tokens of `padding` [B, T] (True on them) stand, and where once pads are at the end: [B, W]."""
    index = padding.flatten().nonzero()[:, 0]
    counts = padding.cumsum(-1)
    width = int(counts[:, -1].max())
    rows = index // padding.shape[1]
    moved = rows * width + counts.flatten()[index] - 1
    return Places(index, tuple(padding.shape)), Places(moved, (len(padding), width))
