"""Random numbers that belong to an example: its batch, its padding, the order of the data and what was drawn before do
not change them.

They are counter-based (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): draw t of a stream is a hash
of (seed, stream, t), made with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators").

Shapes: B rows.
"""

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment
MASK = 2**64 - 1


def uniforms(seeds: np.ndarray, width: int, stream: int = 0) -> np.ndarray:
    """Return draws in [0, 1), float64 [B, width]; draw t of a row is the same for every `width` above t.

    Args:
        seeds: uint64 [B], as `row_seeds` gives them.
        width: draws of each row.
        stream: which of a seed's independent sequences.
    """
    rows = _absorb(_absorb(np.zeros(1, np.uint64), seeds), np.array([stream], np.uint64))
    hashed = _absorb(rows[:, None], np.arange(width, dtype=np.uint64))
    return (hashed >> 11) * 2.0**-53


def row_seeds(features: list[dict]) -> np.ndarray:
    """Return one seed for each feature, uint64 [B]: its own, or one of torch's global generator where it has none."""
    seeds = [feature.get("seed") for feature in features]
    missing = iter(torch.randint(2**63 - 1, (seeds.count(None),)).tolist())
    return np.array([next(missing) if seed is None else int(seed) & MASK for seed in seeds], np.uint64)


def mix(*keys: int) -> int:
    """Return one seed made of several integers, of 63 bits so that every table and tensor can hold it."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _absorb(state, np.array([key & MASK], np.uint64))
    return int(state[0]) >> 1


def _absorb(state: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Hash `value` into `state`, both uint64 arrays, which wrap around. From state 0 this is SplitMix64's sequence."""
    state = state + (value + 1) * GOLDEN
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)
