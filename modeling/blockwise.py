"""Softmax attention in training on a CPU, where torch has no kernel (with dropout) or a slow one (half precision).

The plain form writes tables of all scores to memory, reads them again some ten times in a training step, and keeps
three of them for the backward pass. Here a block of them is made at a time, used up while it is in the cache, and made
again on the way back (as Dao et al. 2022, arXiv 2205.14135, do); what is kept is a bit for each weight that dropout
left.

Shapes: B batch, T queries, S keys, H heads, d head width; b, h, t parts of B, H, T, and s of S.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from .dropout import draw_kept

BLOCK_SIZE = 2**18  # scores: a megabyte of them
QUERIES = 128  # of a block where later keys are hidden, so that it need not compute those


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    dropout: float,
    scaling: float,
    is_causal: bool,
) -> torch.Tensor:
    """dropout(softmax(Q K^T s + bias)) V, [B, H, T, d] from queries, keys and values of as many heads.

    Args:
        attention_mask: [B or 1, H or 1, T, S], additive, or boolean with True where a key is visible.
        position_bias: [B, H, T, S], added to the scores.
        dropout: the probability of dropping a weight; may be 0.
        is_causal: whether query i sees no key behind i; in the place of a mask.
    """
    options = attention_mask, dropout, scaling, is_causal
    return BlockwiseAttention.apply(query, key, value, position_bias, *options)


class BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, position_bias, attention_mask, dropout, scaling, is_causal):
        output, kept = torch.empty_like(query), []
        for rows, keys in blocks(query, key, is_causal):
            weights = block_weights(query, key, position_bias, attention_mask, scaling, is_causal, rows, keys)
            if dropout:
                kept.append(draw_kept(weights.shape, dropout))
                weights.mul_(kept[-1])
            output[rows] = weights.to(value.dtype) @ value[keys]
        if dropout:
            output /= 1 - dropout
        ctx.save_for_backward(query, key, value, position_bias, attention_mask, output, *kept)
        ctx.options = dropout, scaling, is_causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, position_bias, attention_mask, output, *kept = ctx.saved_tensors
        dropout, scaling, is_causal = ctx.options
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_bias = None
        if position_bias is not None and ctx.needs_input_grad[3]:
            grad_bias = torch.zeros(position_bias.shape, dtype=position_bias.dtype)
        for number, (rows, keys) in enumerate(blocks(query, key, is_causal)):
            weights = block_weights(query, key, position_bias, attention_mask, scaling, is_causal, rows, keys)
            given = gradient[rows]
            # The mean of each row's gradient under its weights, which dropout does not change.
            mean = (given * output[rows]).sum(-1, keepdim=True).to(weights.dtype)
            given = given / (1 - dropout) if dropout else given
            grad_scores = (given @ value[keys].mT).to(weights.dtype)
            grad_scores = (grad_scores.mul_(kept[number]) if dropout else grad_scores).sub_(mean).mul_(weights)
            weights = weights.mul_(kept[number]) if dropout else weights
            grad_value[keys] += weights.to(value.dtype).mT @ given
            if grad_bias is not None:
                grad_bias[(*rows, keys[2])] = grad_scores.to(grad_bias.dtype)
            grad_scores = grad_scores.mul_(scaling).to(query.dtype)
            grad_query[rows] = grad_scores @ key[keys]
            grad_key[keys] += grad_scores.mT @ query[rows]
        return grad_query, grad_key, grad_value, grad_bias, None, None, None, None


def blocks(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> Iterator[tuple[tuple, tuple]]:
    """Slices (b, h, t) of the queries of each block, and (b, h, s) of its keys."""
    batch_size, heads, length, _ = query.shape
    queries = min(length, QUERIES) if is_causal else length
    fitting = max(1, BLOCK_SIZE // (queries * key.shape[2]))
    texts = max(1, fitting // heads)
    for b in range(0, batch_size, texts):
        for h in range(0, heads, fitting):
            part = slice(b, b + texts), slice(h, h + fitting)
            for t in range(0, length, queries):
                yield (*part, slice(t, t + queries)), (*part, slice(0, t + queries if is_causal else key.shape[2]))


def block_weights(query, key, position_bias, attention_mask, scaling, is_causal, rows, keys) -> torch.Tensor:
    """softmax(Q K^T s + bias) of one block, [b, h, t, s], in single precision at least."""
    scores = query[rows] * scaling @ key[keys].mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    lowest = torch.finfo(scores.dtype).min
    if position_bias is not None:
        scores += position_bias[(*rows, keys[2])]
    if attention_mask is not None:
        part = (slice(None) if size == 1 else index for size, index in zip(attention_mask.shape, rows, strict=False))
        mask = attention_mask[(*part, keys[2])]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, lowest)
        else:
            scores += mask
    if is_causal:
        first, size = rows[2].start, scores.shape[2]
        hidden = torch.ones(size, size, dtype=torch.bool).triu(1)[:, : scores.shape[3] - first]
        scores[..., first:].masked_fill_(hidden, lowest)
    return scores.softmax(-1)
