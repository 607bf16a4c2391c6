"""Dropout (Srivastava et al. 2014) at a fraction of what it costs torch on a CPU.

There torch draws a number of 32 bits or more for each entry, one after another, which takes a fifth of a small model's
training step. Sixteen bits decide as well, and one draw holds four of them.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing

STEPS = 2**16  # probabilities are multiples of its inverse


def apply_dropout(states: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
    """`states` with each entry zero with probability `p`, else divided by 1 - p; as they are where not `training`.

    Random numbers come from torch's global generator of the device.
    """
    if not training or not 0 < p < 1 or states.device.type != "cpu" or is_tracing(states):
        return F.dropout(states, p, training)
    draws = torch.empty((states.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    draws = draws.view(torch.int16)[: states.numel()].view(states.shape)
    limit = min(round(p * STEPS), STEPS - 1) - STEPS // 2  # the lowest draw that keeps an entry
    return states * (draws >= limit).to(states.dtype).mul_(1 / (1 - p))


class TriptychDropout(nn.Dropout):
    """`nn.Dropout` by way of `apply_dropout`."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return apply_dropout(states, self.p, self.training)
