"""Whether code runs, or is only being read into a graph that must hold for other inputs too."""

import torch
from transformers.utils.import_utils import is_tracing as transformers_is_tracing


def is_tracing(tensor: torch.Tensor) -> bool:
    """Whether a graph is made of what happens to `tensor`: compiled, exported, traced or captured.

    transformers' function of the same name takes as long as a product of a small model, of which a token has dozens.
    Of a plain tensor on a CPU less is to be asked.
    """
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
        return torch.compiler.is_compiling() or torch.jit.is_tracing()
    return transformers_is_tracing(tensor)
