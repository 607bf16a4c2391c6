"""Dropout: how many entries go and what the others become, where no number is drawn, and gradients."""

import pytest
import torch
from torch.nn import functional as F

from triptych.dropout import TriptychDropout, apply_dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_entries_are_zero_with_probability_p_and_else_divided(p, dtype):
    torch.manual_seed(0)
    states = torch.rand(501, 403, dtype=torch.float64).add(0.5).to(dtype)
    output = apply_dropout(states, p)
    kept = output != 0
    assert output.dtype == dtype and output.shape == states.shape
    torch.testing.assert_close(
        output[kept], (states / (1 - p))[kept], rtol=0.01 if dtype.itemsize == 2 else 1e-6, atol=0
    )
    count = states.numel()
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs((~kept).double().mean().item() - p) < 5 * deviation
    # Neither neighbours nor rows nor the draws that share one number know of each other.
    flat = kept.flatten().double() - (1 - p)
    for distance in (1, 2, 3, 4, 403):
        product = (flat[distance:] * flat[:-distance]).mean().item()
        assert abs(product) < 5 * p * (1 - p) / count**0.5, distance


def test_the_gradient_passes_where_the_entry_did():
    states = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    output = apply_dropout(states, 0.4)
    output.sum().backward()
    torch.testing.assert_close(states.grad, (output / states).detach())
    assert set(states.grad.unique().tolist()) == {0.0, 1 / (1 - 0.4)}


def test_a_seed_decides_and_each_call_draws_anew():
    states = torch.ones(5, 3, 2)
    torch.manual_seed(3)
    first, second = (apply_dropout(states, 0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, apply_dropout(states, 0.5)) and not torch.equal(first, second)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.3, False), (1.0, True)])
def test_the_plain_cases_are_torchs_and_draw_nothing(p, training):
    states = torch.randn(4, 5)
    before = torch.get_rng_state()
    layer = TriptychDropout(p).train(training)
    assert torch.equal(layer(states), F.dropout(states, p, training))
    assert torch.equal(torch.get_rng_state(), before) or p == 1


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4, 0), (2, 1, 5)])
def test_any_shape(shape):
    assert apply_dropout(torch.ones(shape), 0.5).shape == shape
    assert apply_dropout(torch.ones(*shape[::-1]).permute(*reversed(range(len(shape)))), 0.5).shape == shape


def test_extreme_probabilities():
    """Beyond 16 bits a probability is rounded, never wrapped."""
    states = torch.ones(100_000)
    assert apply_dropout(states, 1e-9).eq(1).all()
    assert apply_dropout(states, 1 - 1e-9).ne(0).double().mean() < 1e-3
