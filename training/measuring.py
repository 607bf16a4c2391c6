"""What the benchmarks share: processes that have done nothing before, clocks that wait for the device, memory."""

import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` of the given arguments returns in a process of its own, whose peak of memory is its own."""
    # The server imports by a path of its own, where Python 3.11 puts the current folder, and what it has of our name.
    os.environ["PYTHONSAFEPATH"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])  # so that no process need import torch anew
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def device() -> torch.device:
    """What is measured: the accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds_of(work: Callable[[], Any]) -> float:
    """How long `work` takes, on whatever device it runs."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def training_step(model: PreTrainedModel, tokens: torch.Tensor) -> Callable[[], None]:
    """Forward, backward and AdamW, torch's fused one, on texts [B, T] that are their own labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def used_memory() -> int:
    """Bytes in use now."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def peak_memory() -> int:
    """The most bytes that this process had in use at once: of the accelerator if there is one, else all that it has."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere
