"""Attention with dropout in blocks: equal to the formula with the same weights dropped, gradients too, in any blocks.

Shapes: B batch, T queries, S keys, H heads, d head width.
"""

import itertools

import pytest
import torch
from tiny import assert_equal

from triptych import blockwise
from triptych.blockwise import blockwise_attention
from triptych.dropout import draw_kept

SIZE = (2, 3, 7, 4)  # B, H, T, d
MASKS = {
    "none": lambda keys: None,
    "boolean": lambda keys: torch.rand(2, 1, 7, keys) < 0.7,
    "boolean, one for all": lambda keys: torch.rand(1, 3, 7, keys) < 0.7,
    "additive": lambda keys: torch.randn(2, 3, 7, keys, dtype=torch.double),
}


@pytest.fixture(params=[2**18, 40, 1], ids=["one block", "some heads", "a head"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_SIZE", request.param)
    monkeypatch.setattr(blockwise, "QUERIES", 3)


@pytest.fixture
def kept(monkeypatch):
    """What is kept of each weight [B, H, T, S], decided beforehand; blocks ask for their parts in their order."""
    whole = torch.rand(2, 3, 7, 9) < 0.6
    parts = []

    def draw(shape, p):
        assert p == 0.4
        (b, h, t), (*_, s) = next(parts[-1])
        part = whole[b, h, t, s][..., : shape[3]]
        assert part.shape == shape
        return part

    monkeypatch.setattr(blockwise, "draw_kept", draw)
    return whole, parts


def tensors(keys, dtype=torch.double):
    sizes = SIZE, (*SIZE[:2], keys, 4), (*SIZE[:2], keys, 4)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def formula(query, key, value, mask, bias, kept, is_causal):
    scores = 0.7 * query @ key.mT + (0 if bias is None else bias)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * kept[..., : key.shape[2]] / 0.6) @ value


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("is_causal", "mask"), [(True, "none"), *((False, mask) for mask in MASKS)])
def test_it_is_the_formula(block_size, kept, is_causal, mask, has_bias):
    torch.manual_seed(0)
    keys = 7 if is_causal else 9
    states, mask = tensors(keys), MASKS[mask](keys)
    bias = torch.randn(1, 3, 7, keys, dtype=torch.double, requires_grad=True) if has_bias else None
    leaves = [*states, *([bias] if has_bias else [])]
    whole = None if bias is None else bias.expand(2, -1, -1, -1)
    direction = torch.randn(SIZE, dtype=torch.double)

    expected = formula(*states, mask, whole, kept[0], is_causal)
    expected_gradients = torch.autograd.grad(expected, leaves, direction)
    kept[1].append(blockwise.blocks(*states[:2], is_causal))
    actual = blockwise_attention(*states, mask, whole, 0.4, 0.7, is_causal)
    assert_equal(actual.detach(), expected.detach(), 1e-12)
    for one, other in zip(torch.autograd.grad(actual, leaves, direction), expected_gradients, strict=True):
        assert_equal(one, other, 1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_dropout_it_is_torchs(block_size, is_causal):
    states = tensors(7)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, scale=0.7, is_causal=is_causal)
    actual = blockwise_attention(*states, None, None, 0.0, 0.7, is_causal)
    assert_equal(actual.detach(), expected.detach(), 1e-12)
    direction = torch.randn(SIZE, dtype=torch.double)
    gradients = (torch.autograd.grad(output, states, direction) for output in (actual, expected))
    for one, other in zip(*gradients, strict=True):
        assert_equal(one, other, 1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_cover_every_score_once(block_size, is_causal):
    query, key, _ = tensors(7)
    seen = torch.zeros(2, 3, 7, 7, dtype=torch.long)
    for (b, h, t), (*_, s) in blockwise.blocks(query, key, is_causal):
        seen[b, h, t, s] += 1
    assert (seen <= 1).all()
    assert (seen == 1).logical_or(torch.ones(7, 7).triu(1).bool() & is_causal).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kept, dtype):
    states = tensors(9, torch.float32)
    expected = formula(*states, None, None, kept[0], False)
    halves = [state.detach().to(dtype).requires_grad_() for state in states]
    kept[1].append(blockwise.blocks(*halves[:2], False))
    actual = blockwise_attention(*halves, None, None, 0.4, 0.7, False)
    assert actual.dtype == dtype
    assert_equal(actual.float().detach(), expected.detach(), 0.05)
    gradients = torch.autograd.grad(actual.float().sum(), halves), torch.autograd.grad(expected.sum(), states)
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == dtype
        assert_equal(one.float(), other, 0.1)


def test_tables_of_scores_are_not_kept():
    query, key, value = (torch.randn(1, 2, 600, 4, requires_grad=True) for _ in range(3))
    output = blockwise_attention(query, key, value, None, None, 0.1, 0.5, True)
    sizes = [(tensor.element_size(), tensor.numel()) for tensor in output.grad_fn.saved_tensors if tensor is not None]
    assert all(size == 1 or count == query.numel() for size, count in sizes)
    kept = sum(count for size, count in sizes if size == 1)
    assert 2 * 600 * 600 / 2 < kept < 0.65 * 2 * 600 * 600  # what lies behind a block of queries is not made


def test_dropout_differs_by_call_and_is_of_its_rate():
    ones = torch.ones(4, 4, 64, 1)
    outputs = [blockwise_attention(ones, ones, ones, None, None, 0.3, 1.0, False) for _ in range(2)]
    assert not torch.equal(*outputs)
    assert torch.stack(outputs).mean().item() == pytest.approx(1, abs=0.02)
    assert draw_kept((100, 100), 0.3).float().mean().item() == pytest.approx(0.7, abs=0.03)
    assert len(set(itertools.chain(*(output.flatten().tolist() for output in outputs)))) > 10
