"""The linear layer of the family: `nn.Linear`, and faster where a CPU decodes.

Shapes: M rows (tokens of all texts), I and O features in and out.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .tracing import is_tracing

MOST_ROWS, FEWEST_FEATURES = 64, 512  # measured on a CPU: beyond them, the plain way is as fast


def few_rows_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`rows @ weight.T + bias`, [M, O], made as the transpose of `weight @ rows.T`.

    With few rows, the time is that of reading the weights. Asked in this order, matrix libraries read them by all
    threads and at the speed of the memory, by up to four times faster than in the other; but not for one row alone.
    """
    columns = (rows if len(rows) > 1 else rows.repeat(2, 1)).t()
    product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return product.t()[: len(rows)].contiguous()


class TriptychLinear(nn.Linear):
    """y = x W^T + b, of whatever shape x [..., I] is."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.in_features >= FEWEST_FEATURES and not torch.is_grad_enabled() and self.is_plain(states):
            rows = states.reshape(-1, states.shape[-1])
            if 0 < len(rows) <= MOST_ROWS:
                return few_rows_linear(rows, self.weight, self.bias).view(*states.shape[:-1], -1)
        return F.linear(states, self.weight, self.bias)

    def is_plain(self, states: torch.Tensor) -> bool:
        """Whether it is about plain tensors on a CPU in single precision, and no graph."""
        weight = self.weight
        return (
            type(weight) is nn.Parameter
            and weight.shape[1] == states.shape[-1]
            and weight.device.type == "cpu"
            and weight.dtype == states.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and not is_tracing(states)
        )
