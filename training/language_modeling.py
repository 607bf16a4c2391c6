"""Next-token objectives: of whole texts, behind a prefix, and of targets given their sources.

Shapes: B batch, S source tokens, T tokens.
"""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.draws import row_seeds, uniforms
from triptych.training.errors import UserError
from triptych.training.padding import (
    Batch,
    check_share,
    compact,
    pad_rows,
    read_column,
    read_texts,
    run_numbers,
    tensors,
    text_inputs,
    token_id,
    type_inputs,
    without_pads,
)


@dataclass
class CausalLMCollator:
    """Texts whose every token is predicted from those before it, except the first (Radford et al. 2018).

    A row may be packed with several documents, which `seq_idx` numbers, one entry for each token. Then positions begin
    anew with each document, and its first token is not predicted either.

    Args:
        tokenizer: its pad token and side fill the batch.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask`, `labels` and, if packed, `position_ids` and `seq_idx`: all [B, T]."""
        ids, real = read_texts(features)
        side = self.tokenizer.padding_side
        batch = text_inputs(ids, real, self.tokenizer)
        if "seq_idx" in features[0]:
            documents = read_column(features, "seq_idx", -1)
            places = places_in_runs(documents)
            batch["position_ids"] = compact(places, real, 0, side)
            batch["seq_idx"] = compact(documents, real, -1, side)
        else:
            places = np.arange(ids.shape[1])
        batch["labels"] = compact(np.where(places == 0, IGNORE, ids), real, IGNORE, side)
        return tensors(batch)


def places_in_runs(groups: np.ndarray) -> np.ndarray:
    """Return the place of each entry in its run of equal ones, [B, T], from 0 on."""
    numbers = run_numbers(groups)
    columns = np.arange(groups.shape[1])
    begins = np.diff(numbers, axis=1, prepend=-1) > 0
    return columns - np.maximum.accumulate(np.where(begins, columns, 0), 1)


@dataclass
class PrefixLMCollator:
    """Texts of which a beginning is given, and read both ways, and the rest is predicted (Raffel et al. 2020, arXiv
    1910.10683, section 3.2).

    The beginning's length is drawn, all from the least to the most equally likely, unless a feature names its
    `prefix_length`. It has at least one token, and so has the rest, where there are two.

    Args:
        tokenizer: its pad token and side fill the batch.
        encoder_decoder: give the beginning to an encoder and the rest to a decoder.
        min_prefix_share, max_prefix_share: bounds of the beginning's length, as shares of the text.

    Raises:
        UserError: the shares are impossible, or a `prefix_length` is longer than its text.
    """

    tokenizer: PreTrainedTokenizerBase
    encoder_decoder: bool = False
    min_prefix_share: float = 0.0
    max_prefix_share: float = 1.0

    def __post_init__(self):
        check_share("min_prefix_share", self.min_prefix_share)
        check_share("max_prefix_share", self.max_prefix_share)
        if self.min_prefix_share > self.max_prefix_share:
            raise UserError(
                f"min_prefix_share is {self.min_prefix_share}, but must be at most max_prefix_share, "
                f"{self.max_prefix_share}"
            )

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask`, `prefix_length` [B] and `labels` [B, T]; for an encoder-decoder without
        `prefix_length`, and `labels` are the rest alone, padded on the right."""
        ids, real = read_texts(features)
        prefix_length = self.prefix_lengths(features, real.sum(1))
        rest = real & (np.arange(ids.shape[1]) >= prefix_length[:, None])
        if self.encoder_decoder:
            batch = text_inputs(ids, real & ~rest, self.tokenizer)
            return tensors(batch | {"labels": compact(ids, rest, IGNORE, "right")})
        batch = text_inputs(ids, real, self.tokenizer) | {"prefix_length": prefix_length}
        rest[:, 0] = False  # nothing comes before it
        batch["labels"] = compact(np.where(rest, ids, IGNORE), real, IGNORE, self.tokenizer.padding_side)
        return tensors(batch)

    def prefix_lengths(self, features: list[dict], lengths: np.ndarray) -> np.ndarray:
        """Return the length [B] of each row's beginning, of its `lengths` [B] tokens."""
        most = np.clip(np.floor(lengths * self.max_prefix_share), 1, np.maximum(lengths - 1, 1))
        least = np.clip(np.ceil(lengths * self.min_prefix_share), 1, most)
        drawn = least + np.floor(uniforms(row_seeds(features), 1)[:, 0] * (most - least + 1))
        for row, feature in enumerate(features):
            given = feature.get("prefix_length")
            if given is None:
                continue
            if not 0 <= given <= lengths[row]:
                raise UserError(
                    f"'prefix_length' of example {row + 1} of the batch is {given}, but must be from 0 to its "
                    f"{lengths[row]} tokens"
                )
            drawn[row] = given
        return drawn.astype(np.int64)


@dataclass
class Seq2SeqCollator:
    """Sources for an encoder and targets for a decoder, which is fed the true target (teacher forcing).

    Labels are padded on the right whatever the tokenizer's side: decoder inputs are made of them, and a decoder would
    read pads that come before its tokens.

    Args:
        tokenizer: its pad token and side fill the sources.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids` and `attention_mask` [B, S], and `labels` [B, T] where the features have them."""
        batch = text_inputs(*read_texts(features), self.tokenizer) | type_inputs(features, self.tokenizer)
        if "labels" in features[0]:
            batch["labels"] = pad_rows([feature["labels"] for feature in features], IGNORE)
        return tensors(batch)


@dataclass
class CausalSeq2SeqCollator:
    """Source and target as one text for a decoder, `source <sep> target </s>`, of which the target is predicted
    (Khandelwal et al. 2019, arXiv 1905.08836).

    Features hold the source as `input_ids`, whose final `</s>` is taken off, and the target as `labels`.

    Args:
        tokenizer: has a separator token.
        prefix_attention: read the source, up to and with `<sep>`, both ways.

    Raises:
        UserError: the tokenizer lacks `<sep>`.
    """

    tokenizer: PreTrainedTokenizerBase
    prefix_attention: bool = False

    def __post_init__(self):
        token_id(self.tokenizer, "sep_token")

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels` [B, T], and with prefix attention `prefix_length` [B]."""
        side = self.tokenizer.padding_side
        texts = [without_end(without_pads(feature, "input_ids"), self.tokenizer) for feature in features]
        sources = [[*ids, self.tokenizer.sep_token_id] for ids in texts]
        rows = [{"input_ids": [*source, *row["labels"]]} for source, row in zip(sources, features, strict=True)]
        ids, real = read_texts(rows)
        source_lengths = np.array([len(source) for source in sources])
        is_source = np.arange(ids.shape[1]) < source_lengths[:, None]
        batch = text_inputs(ids, real, self.tokenizer)
        batch["labels"] = compact(np.where(is_source, IGNORE, ids), real, IGNORE, side)
        if self.prefix_attention:
            batch["prefix_length"] = source_lengths
        return tensors(batch)


def without_end(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return `ids` without a final end-of-text token."""
    return ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_token_id else ids
