"""How the C library keeps memory that torch gives back on a CPU."""

import ctypes


def keep_freed_memory() -> None:
    """Tell glibc to keep big freed blocks instead of handing them back to the kernel.

    A training step allocates and frees the same big tensors again and again. By default glibc maps each one anew, and
    the kernel clears every page of it, which costs more than the arithmetic of a small model: the multi30k recipe's
    tokens per second grow several times with this. It has no effect where the C library has no `mallopt`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # parameter numbers in malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
    mallopt(top_pad, 256 * 2**20)
