"""The family's linear layer: equal to torch's for any number of rows, and plain wherever more than a product is asked.

Shapes: M rows, I and O features in and out.
"""

import pytest
import torch
from tiny import assert_equal
from torch import nn
from torch.nn import functional as F

from triptych import projections
from triptych.projections import TriptychLinear, count_strips


@pytest.fixture
def calls(monkeypatch):
    """How many rows each product had that went the way of few rows."""
    seen = []

    def spy(states, weight, bias):
        seen.append(states.shape[:-1].numel())
        return few_rows_linear(states, weight, bias)

    few_rows_linear = projections.few_rows_linear
    monkeypatch.setattr(projections, "few_rows_linear", spy)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_features", [512, 515, 521])  # a power of two, five strips, and a prime number
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 5), (8, 8), (65,), (3, 0)])
def test_it_is_nn_linear(calls, shape, out_features, bias):
    layer = TriptychLinear(512, out_features, bias=bias)
    states = torch.randn(*shape, 512)
    with torch.no_grad():
        output = layer(states)
    assert_equal(output, F.linear(states, layer.weight, layer.bias))
    assert output.is_contiguous()
    rows = states[..., 0].numel()
    assert calls == ([rows] if 0 < rows <= 64 else [])


def test_a_single_vector_and_a_wrong_width(calls):
    layer, states = TriptychLinear(512, 516), torch.randn(512)
    with torch.no_grad():
        assert_equal(layer(states), F.linear(states, layer.weight, layer.bias))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.randn(2, 1024))
    assert calls == [1]


def test_rows_of_any_strides(calls):
    layer, states = TriptychLinear(512, 512), torch.randn(512, 4, 2).transpose(0, 2)
    with torch.no_grad():
        assert_equal(layer(states), F.linear(states, layer.weight, layer.bias))
    assert calls


def test_weights_of_any_strides(calls):
    layer, states = TriptychLinear(512, 512), torch.randn(2, 512)
    layer.weight = nn.Parameter(layer.weight.detach().t())
    with torch.no_grad():
        assert_equal(layer(states), F.linear(states, layer.weight, layer.bias))
    assert calls == []  # strips would be copies


@pytest.mark.parametrize("features, threads, strips", [(512, 1, 2), (515, 2, 5), (50257, 2, 29), (521, 2, 1)])
def test_strips_are_equal_and_enough_for_all_threads(features, threads, strips):
    assert count_strips(features, threads) == strips


def test_where_more_is_asked_it_is_plain(calls):
    layer, states = TriptychLinear(512, 512), torch.randn(2, 512)
    layer(states).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(states).dtype == torch.bfloat16
        torch.compile(layer, backend="eager", fullgraph=True)(states)
        TriptychLinear(8, 8)(torch.randn(2, 8))
        layer.to(torch.bfloat16)(states.bfloat16())
    assert calls == []


def test_weights_that_are_no_plain_tensors(calls):
    """Quantised or sharded weights are tensors of another type, for which torch.nn.functional.linear is made."""

    class Quantised(torch.Tensor):
        pass

    layer, states = TriptychLinear(512, 512), torch.randn(2, 512)
    expected = layer(states)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised))
    with torch.no_grad():
        assert_equal(layer(states).as_subclass(torch.Tensor), expected.detach())
    assert calls == []
