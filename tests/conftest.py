"""Shared by all tests: no network, fixed seeds, and fresh memory full of NaN, so that a read before a write shows."""

import os
import random
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; a Hub name would wait for the network

# Tiny tensors: on busy cores, threads that wait for each other cost twenty times the work. Child processes follow, as
# sums over another number of threads round otherwise.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("triptych", deadline=None, derandomize=True, database=None, max_examples=8)
settings.load_profile("triptych")


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Each test draws the same numbers, alone or among others."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch fills memory that it allocates with NaN, or the largest integer."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8).isnan().all() and torch.ones(8, dtype=torch.bfloat16).new_empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(was_deterministic)


@pytest.fixture(scope="session")
def data_folder():
    """The folder of real corpora, or a skip where this machine has none."""
    folder = Path(os.environ.get("TRIPTYCH_DATA", Path(__file__).parents[1] / "../shared/data")).resolve()
    if not (folder / "multi30k").is_dir():
        pytest.skip(f"no corpora in {folder}: set TRIPTYCH_DATA")
    return folder
