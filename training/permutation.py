"""Permutation language modelling (Yang et al. 2019, XLNet, arXiv 1906.08237, sections 2.2 and 2.3).

Shapes: B batch, T tokens, P predicted tokens, K spans.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.draws import row_seeds, uniforms
from triptych.training.errors import UserError
from triptych.training.padding import (
    Batch,
    compact,
    ordinary_tokens,
    read_texts,
    tensors,
    text_inputs,
    type_inputs,
)

LENGTH, START, ORDER = range(3)  # streams of draws


@dataclass
class PermutationLMCollator:
    """Predicts the tokens of some spans in a random order, each from those before it in that order and all others.

    With n predicted tokens, P the matrix of their factorisation order and M the strictly lower triangular matrix of
    causal attention, who of them sees whom is P M P^-1. All other tokens come first: everyone sees them, and they see
    none that is predicted. `input_ids` keep the predicted tokens, as only the query stream must not see them.

    Spans are drawn as in transformers' collator: one of 1 to `max_span_length` tokens in each stretch that is
    1 / `plm_probability` times as long. Special tokens are never predicted.

    Args:
        tokenizer: its pad token and side fill the batch.
        plm_probability: share of tokens in spans.
        max_span_length: the longest span.

    Raises:
        UserError: an option is impossible.
    """

    tokenizer: PreTrainedTokenizerBase
    plm_probability: float = 1 / 6
    max_span_length: int = 5

    def __post_init__(self):
        if not 0 < self.plm_probability <= 1:
            raise UserError(f"plm_probability is {self.plm_probability}, but must be above 0 and at most 1")
        if self.max_span_length < 1:
            raise UserError(f"max_span_length is {self.max_span_length}, but must be at least 1")

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids` and `attention_mask` [B, T], `perm_mask` [B, T, T], 1 where row i may not see column j,
        `target_mapping` [B, P, T], whose rows pick the predicted tokens, and `labels` [B, P]."""
        ids, real = read_texts(features)
        seeds = row_seeds(features)
        predicted = self.in_spans(ids.shape[1], seeds) & ordinary_tokens(ids, real, self.tokenizer)
        order = np.where(predicted, uniforms(seeds, ids.shape[1], ORDER), -1.0)
        batch = text_inputs(ids, real, self.tokenizer) | type_inputs(features, self.tokenizer)
        order = compact(order, real, -1.0, self.tokenizer.padding_side)
        batch["perm_mask"] = hidden_pairs(order, batch["attention_mask"] == 1)
        batch["target_mapping"], batch["labels"] = targets(batch["input_ids"], order >= 0)
        return tensors(batch)

    def in_spans(self, width: int, seeds: np.ndarray) -> np.ndarray:
        """Return which of `width` tokens [B, T] lie in a span."""
        shortest = int(1 / self.plm_probability)
        count = width // shortest + 1
        lengths = 1 + (uniforms(seeds, count, LENGTH) * self.max_span_length).astype(np.int64)
        stretches = (lengths / self.plm_probability).astype(np.int64)
        shifts = (uniforms(seeds, count, START) * (stretches - lengths + 1)).astype(np.int64)
        starts = stretches.cumsum(1) - stretches + shifts
        steps = np.zeros((len(seeds), width + 1), np.int64)
        rows = np.arange(len(seeds))[:, None]
        np.add.at(steps, (rows, np.minimum(starts, width)), 1)
        np.add.at(steps, (rows, np.minimum(starts + lengths, width)), -1)
        return steps[:, :-1].cumsum(1) > 0


def hidden_pairs(order: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return 1.0 where token i must not see token j, else 0.0: float32 [B, T, T].

    Args:
        order: [B, T] rises along the factorisation order; -1 for tokens that are not predicted.
        real: [B, T], False on pads, which nobody sees.
    """
    later = (order[:, :, None] <= order[:, None, :]) & (order >= 0)[:, None, :]
    return (later | ~real[:, None, :]).astype(np.float32)


def targets(ids: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `target_mapping` [B, P, T] and `labels` [B, P] of the `predicted` tokens [B, T], by place."""
    labels = compact(ids, predicted, IGNORE, "right")
    mapping = np.zeros((*labels.shape, ids.shape[1]), np.float32)
    rows, columns = predicted.nonzero()
    mapping[rows, predicted.cumsum(1)[rows, columns] - 1, columns] = 1
    return mapping, labels
