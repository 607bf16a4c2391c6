"""Texts with labels: of the whole, of each token, of a span, or of the right one among several.

Shapes: B batch, C choices, T tokens, L labels.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.errors import UserError
from triptych.training.padding import (
    Batch,
    read_column,
    read_texts,
    tensors,
    text_inputs,
    type_inputs,
)


def padded_texts(features: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """Return `input_ids`, `attention_mask` and, where the features have them, `token_type_ids`: [B, T]."""
    return text_inputs(*read_texts(features), tokenizer) | type_inputs(features, tokenizer)


@dataclass
class SequenceClassificationCollator:
    """Texts with one label each: a class, a number to regress, or several numbers.

    Args:
        tokenizer: its pad token and side fill the batch.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` [B, T], and `labels`: integers [B], or float32 [B] or [B, L]."""
        labels = np.array([feature["labels"] for feature in features])
        labels = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)
        return tensors(padded_texts(features, self.tokenizer) | {"labels": labels})


@dataclass
class TokenClassificationCollator:
    """Texts with a label for each token, -100 where none is asked for, as inside a word.

    Args:
        tokenizer: its pad token and side fill the batch.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels` [B, T]."""
        labels = read_column(features, "labels", IGNORE, self.tokenizer.padding_side)
        return tensors(padded_texts(features, self.tokenizer) | {"labels": labels})


@dataclass
class SpanExtractionCollator:
    """Texts with an answer in them, whose first and last token are to be found (Devlin et al. 2019, section 4.2).

    Features name both as `start_positions` and `end_positions`, counted from the text's first token. A position outside
    the text, as where an answer was cut off, becomes -100, which the loss ignores.

    Args:
        tokenizer: its pad token and side fill the batch.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` [B, T], `start_positions` and `end_positions` [B]."""
        batch = padded_texts(features, self.tokenizer)
        lengths = batch["attention_mask"].sum(1)
        pads_before = batch["attention_mask"].argmax(1)
        for name in ("start_positions", "end_positions"):
            positions = np.array([feature[name] for feature in features], np.int64)
            is_inside = (positions >= 0) & (positions < lengths)
            batch[name] = np.where(is_inside, positions + pads_before, IGNORE)
        return tensors(batch)


@dataclass
class MultipleChoiceCollator:
    """Several texts an example, of which one is right.

    Features hold a list of texts in `input_ids` (and in `token_type_ids` and `attention_mask`, where they have these),
    and the right one's number in `labels`.

    Args:
        tokenizer: its pad token and side fill the batch.

    Raises:
        UserError: the examples have unequal numbers of choices.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` [B, C, T] and `labels` [B]."""
        counts = {len(feature["input_ids"]) for feature in features}
        if len(counts) > 1:
            raise UserError(f"examples of one batch have {sorted(counts)} choices, but must all have equally many")
        columns = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in features[0]]
        texts = [
            dict(zip(columns, choice, strict=True))
            for feature in features
            for choice in zip(*(feature[name] for name in columns), strict=True)
        ]
        batch = padded_texts(texts, self.tokenizer)
        batch = {name: table.reshape(len(features), *counts, -1) for name, table in batch.items()}
        return tensors(batch | {"labels": np.array([feature["labels"] for feature in features], np.int64)})
