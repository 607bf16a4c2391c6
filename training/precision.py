"""Which number formats this machine multiplies in."""

import torch


def has_bfloat16_products() -> bool:
    """Whether an accelerator is at hand, or a CPU whose instructions or vectors serve bfloat16.

    Without them torch takes it one number at a time, some sixty times slower than float32.
    """
    if torch.accelerator.is_available():
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
