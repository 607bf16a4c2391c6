"""The family's linear layer: equal to torch's for any number of rows, and plain wherever more than a product is asked.

Shapes: M rows, I and O features in and out.
"""

import pytest
import torch
from tiny import assert_equal
from torch import nn
from torch.nn import functional as F

from triptych import projections
from triptych.projections import TriptychLinear


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the rows that went the way of few rows."""
    seen = []

    def spy(rows, weight, bias):
        seen.append(tuple(rows.shape))
        return few_rows_linear(rows, weight, bias)

    few_rows_linear = projections.few_rows_linear
    monkeypatch.setattr(projections, "few_rows_linear", spy)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 5), (8, 8), (65,), (3, 0)])
def test_it_is_nn_linear(calls, shape, bias):
    layer = TriptychLinear(512, 257, bias=bias)
    states = torch.randn(*shape, 512)
    with torch.no_grad():
        output = layer(states)
    assert_equal(output, F.linear(states, layer.weight, layer.bias))
    assert output.is_contiguous()
    rows = states[..., 0].numel()
    assert calls == ([(rows, 512)] if 0 < rows <= 64 else [])


def test_a_single_vector_and_a_wrong_width(calls):
    layer, states = TriptychLinear(512, 3), torch.randn(512)
    with torch.no_grad():
        assert_equal(layer(states), F.linear(states, layer.weight, layer.bias))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.randn(2, 1024))
    assert calls == [(1, 512)]


def test_rows_of_any_strides(calls):
    layer, states = TriptychLinear(512, 512), torch.randn(512, 4, 2).transpose(0, 2)
    with torch.no_grad():
        assert_equal(layer(states), F.linear(states, layer.weight, layer.bias))
    assert calls


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
