"""Not in the source distribution: how its distributed tests start their ranks. Here on this CPU, joined by gloo."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int):
    pass


def _start_rank_processes(function: Callable, args: tuple, nprocs: int):
    """Calls `function(rank, *args)` in `nprocs` processes; an exception in one of them is raised here.

    They are forked from a server that has imported what takes long, once for all tests.
    """
    multiprocessing.set_forkserver_preload(["pytest", "transformers.testing_utils", "triptych"])
    torch.multiprocessing.start_processes(_on_one_thread, (function, args), nprocs, start_method="forkserver")


def _on_one_thread(rank: int, function: Callable, args: tuple):
    torch.set_num_threads(1)
    function(rank, *args)


def run_distributed(world_size: int) -> Callable:
    """A decorator: the function then runs as `function(rank, *args)` on `world_size` ranks of one process group."""

    def decorate(function: Callable) -> Callable:
        def run(*args):
            with tempfile.TemporaryDirectory() as folder:
                rendezvous = (Path(folder) / "rendezvous").as_uri()
                _start_rank_processes(_in_process_group, (function, args, world_size, rendezvous), world_size)

        return run

    return decorate


def _in_process_group(rank: int, function: Callable, args: tuple, world_size: int, rendezvous: str):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()
