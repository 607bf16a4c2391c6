"""Dropout (Srivastava et al. 2014) at a fraction of what it costs torch on a CPU.

There torch draws a number of 32 bits or more for each entry, one after another, which takes a fifth of a small model's
training step. Sixteen bits decide as well, and one draw holds four of them.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .tracing import is_tracing

STEPS = 2**16  # probabilities are multiples of its inverse


def apply_dropout(states: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
    """`states` with each entry zero with probability `p`, else divided by 1 - p; as they are where not `training`.

    Random numbers come from torch's global generator of the device.
    """
    if not training:
        return states
    if not 0 < p < 1 or states.device.type != "cpu" or is_tracing(states):
        return F.dropout(states, p)
    return states * draw_kept(states.shape, p).to(states.dtype).mul_(1 / (1 - p))


def draw_kept(shape: torch.Size, p: float) -> torch.Tensor:
    """A table of booleans on the CPU, each False with probability `p`, from torch's global generator."""
    count = math.prod(shape)
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    limit = min(round(p * STEPS), STEPS - 1) - STEPS // 2  # the lowest draw that keeps an entry
    return (draws.view(torch.int16)[:count] >= limit).view(shape)


class TriptychDropout(nn.Dropout):
    """`nn.Dropout` by way of `apply_dropout`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return apply_dropout(states, self.p, self.training)
