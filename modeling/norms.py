"""What keeps the scale of a vector: layer norm (Ba et al. 2016) and root-mean-square norms (Zhang & Sennrich 2019)."""

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_triptych import TriptychStackConfig


class TriptychZeroCenteredRMSNorm(nn.Module):
    """x / RMS(x) * (1 + w): the gain is learnt as its distance from one, so that weight decay pulls it there (Gemma
    Team 2024, arXiv 2403.08295)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # In float32 throughout: half precision would round small gains away beside the one.
        normalised = F.rms_norm(hidden_states.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps)
        return normalised.to(hidden_states.dtype)


def build_norm(config: TriptychStackConfig, size: int) -> nn.Module:
    """The norm that `norm_type` names, over the last `size` dimensions."""
    if config.norm_type == "layernorm":
        return nn.LayerNorm(size, eps=config.norm_eps, bias=config.norm_bias)
    if config.norm_type == "rmsnorm":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return TriptychZeroCenteredRMSNorm(size, eps=config.norm_eps)
