import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.training.draws import _absorb, mix, row_seeds, uniforms

BITS = 2**64 - 1
keys = st.integers(0, BITS)


def splitmix64(state):
    """Steele, Lea and Flood's generator in plain integers: one hash of a state."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & BITS
    return state ^ (state >> 31)


def slow_hash(*values):
    state = 0
    for value in values:
        state = splitmix64((state + (value + 1) * 0x9E3779B97F4A7C15) & BITS)
    return state


def test_from_zero_the_hash_is_the_published_sequence():
    # The first numbers of SplitMix64 with seed 0, as its reference code prints them.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert _absorb(np.zeros(1, np.uint64), np.arange(3, dtype=np.uint64)).tolist() == expected


@given(st.lists(keys, min_size=1, max_size=4), st.integers(0, 9), st.integers(1, 20))
def test_a_draw_is_a_hash_of_seed_stream_and_column(seeds, stream, width):
    expected = [[(slow_hash(seed, stream, column) >> 11) / 2**53 for column in range(width)] for seed in seeds]
    assert uniforms(np.array(seeds, np.uint64), width, stream).tolist() == expected


@given(keys, keys, st.integers(-(2**63), BITS))
def test_mixed_seeds_fit_every_table(first, second, third):
    assert mix(first, second, third) == slow_hash(first, second, third & BITS) >> 1 < 2**63


@given(keys, st.integers(0, 30), st.integers(0, 30))
def test_a_draw_does_not_depend_on_the_width(seed, width, more):
    seeds = np.array([seed], np.uint64)
    assert (uniforms(seeds, width + more)[:, :width] == uniforms(seeds, width)).all()


@pytest.mark.parametrize("seeds", [range(400), [mix(seed, 3, 5) for seed in range(400)], [k << 40 for k in range(400)]])
def test_draws_are_uniform_and_independent(seeds):
    draws = np.stack([uniforms(np.array(seeds, np.uint64), 250, stream) for stream in range(3)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, 100, (0, 1))[0]
    expected = draws.size / 100
    chi_square = ((counts - expected) ** 2 / expected).sum()  # 99 degrees of freedom: 99 on average, variance 198
    assert abs(chi_square - 99) < 5 * 198**0.5
    centred = draws - 0.5
    neighbours = [
        centred[:, :, 1:] * centred[:, :, :-1],
        centred[:, 1:] * centred[:, :-1],
        centred[1:] * centred[:-1],
    ]
    for products in neighbours:  # of columns, seeds and streams; each product has variance 1 / 144
        assert abs(products.mean()) < 5 / 12 / products.size**0.5


def test_seeds_of_examples_are_taken_as_they_are():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert row_seeds([{"seed": 3}, {"seed": BITS}, {"seed": np.int64(-1)}]).tolist() == [3, BITS, BITS]
    assert torch.equal(torch.get_rng_state(), before)


def test_examples_without_a_seed_get_one_of_torch():
    torch.manual_seed(0)
    first = row_seeds([{}, {"seed": 7}, {"seed": None}]).tolist()
    second = row_seeds([{}] * 2).tolist()
    torch.manual_seed(0)
    expected = torch.randint(2**63 - 1, (2,)).tolist()
    assert first == [expected[0], 7, expected[1]]
    assert len({*first, *second}) == 5
