"""The linear layer of the family: `nn.Linear`, and faster where a CPU decodes.

Shapes: M rows (tokens of all texts), I and O features in and out, S strips of O features.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from .tracing import is_tracing

MOST_ROWS, FEWEST_WEIGHTS = 64, 512 * 512  # measured on a CPU: beyond them, the plain way is as fast


def few_rows_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`states @ weight.T + bias`, [..., O], made as the transpose of `weight @ states.T`, in S strips of the weights.

    With few rows, the time is that of reading the weights. Matrix libraries read those of one product of this kind by
    one thread, and those of a batch of products by all.
    """
    out_features, in_features = weight.shape
    strips = count_strips(out_features, torch.get_num_threads())
    weight_SOI = weight.view(strips, -1, in_features)
    states_SIM = states.reshape(-1, in_features).t().expand(strips, -1, -1)
    if bias is None:
        product_SOM = weight_SOI @ states_SIM
    else:
        product_SOM = torch.baddbmm(bias.view(strips, -1, 1), weight_SOI, states_SIM)
    return product_SOM.flatten(0, 1).t().contiguous().view(*states.shape[:-1], out_features)


@cache
def count_strips(features: int, threads: int) -> int:
    """The fewest strips of equal width that occupy all threads; one, where there are none."""
    return next((strips for strips in range(2 * threads, 32 * threads) if features % strips == 0), 1)


class TriptychLinear(nn.Linear):
    """y = x W^T + b, of whatever shape x [..., I] is."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and self.meets_few_rows(states):
            return few_rows_linear(states, self.weight, self.bias)
        return F.linear(states, self.weight, self.bias)

    def meets_few_rows(self, states: torch.Tensor) -> bool:
        """Whether a few rows meet many weights, as plain tensors on a CPU in single precision, and no graph."""
        weight = self.weight
        return (
            type(weight) is nn.Parameter
            and weight.numel() >= FEWEST_WEIGHTS
            and 0 < states.numel() <= MOST_ROWS * weight.shape[1]
            and weight.shape[1] == states.shape[-1]
            and weight.device.type == "cpu"
            and weight.is_contiguous()
            and weight.dtype == states.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and not is_tracing(states)
        )
