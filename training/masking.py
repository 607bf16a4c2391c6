"""Masked tokens, and the pairs of next-sentence prediction (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

Shapes: B batch, T tokens.
"""

from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.draws import mix, row_seeds, uniforms
from triptych.training.errors import UserError
from triptych.training.padding import (
    Batch,
    check_share,
    compact,
    ordinary_tokens,
    read_groups,
    read_texts,
    run_numbers,
    special_ids,
    tensors,
    text_bounds,
    text_inputs,
    token_id,
    type_inputs,
)

CHOICE, KIND, REPLACEMENT, PAIR = range(4)  # streams of draws


@dataclass
class MaskedLMCollator:
    """Hides some tokens, which the model is to name.

    Each ordinary token is chosen by a draw of its own. A chosen one becomes `<mask>`, another ordinary token, or stays.
    `token_type_ids` and `next_sentence_label` are passed on.

    Args:
        tokenizer: has a mask token.
        masking_probability: of a token to be chosen.
        mask_share, random_share: of chosen tokens that become `<mask>`, and a random token.
        whole_word: draw once for each word; features then name each token's word in `word_ids`, as fast tokenizers'
            `word_ids()` does (None, or -1, for special tokens).

    Raises:
        UserError: a share is impossible, the tokenizer lacks `<mask>`, or `word_ids` are missing.
    """

    tokenizer: PreTrainedTokenizerBase
    masking_probability: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    whole_word: bool = False

    def __post_init__(self):
        token_id(self.tokenizer, "mask_token")
        for name in ("masking_probability", "mask_share", "random_share"):
            check_share(name, getattr(self, name))
        check_share("mask_share + random_share", self.mask_share + self.random_share)

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids`, `attention_mask` and `labels` [B, T], and what is passed on."""
        ids, real = read_texts(features)
        seeds = row_seeds(features)
        draws = uniforms(seeds, ids.shape[1], CHOICE)
        if self.whole_word:
            # By runs, as the ids of a pair's second text begin at 0 again.
            draws = np.take_along_axis(draws, run_numbers(read_groups(features, "word_ids")), 1)
        chosen = ordinary_tokens(ids, real, self.tokenizer) & (draws < self.masking_probability)
        kinds = uniforms(seeds, ids.shape[1], KIND)
        others = ordinary_ids(self.tokenizer, uniforms(seeds, ids.shape[1], REPLACEMENT))
        replaced = np.where(kinds < self.mask_share + self.random_share, others, ids)
        replaced = np.where(kinds < self.mask_share, self.tokenizer.mask_token_id, replaced)
        labels = np.where(chosen, ids, IGNORE)
        batch = text_inputs(np.where(chosen, replaced, ids), real, self.tokenizer)
        batch |= type_inputs(features, self.tokenizer)
        batch["labels"] = compact(labels, real, IGNORE, self.tokenizer.padding_side)
        if "next_sentence_label" in features[0]:
            batch["next_sentence_label"] = np.array([feature["next_sentence_label"] for feature in features], np.int64)
        return tensors(batch)


def ordinary_ids(tokenizer: PreTrainedTokenizerBase, draws: np.ndarray) -> np.ndarray:
    """Return ids that are not special, as evenly spread as `draws` are in [0, 1)."""
    special = special_ids(tokenizer)
    numbers = (draws * (len(tokenizer) - len(special))).astype(np.int64)
    # The n-th ordinary id is n and the special ids before it: those that leave at most n ordinary ones before them.
    return numbers + np.searchsorted(special - np.arange(len(special)), numbers, side="right")


class NextSentencePairs(Dataset):
    """Pairs `<s> A </s> B </s>`: B follows A in its document (label 0), or comes from another one (label 1).

    A is each segment that another one follows; half of the pairs, drawn anew in each epoch, keep that one as B. Pairs
    that are too long lose tokens of the longer text: A at its beginning and B at its end, so that they still meet.

    Args:
        segments: rows with `input_ids`, without special tokens, and `document`, an id; consecutive rows of one document
            follow each other.
        tokenizer: has `<s>` and `</s>`, or `[CLS]` and `[SEP]`.
        max_length: tokens of a pair, special ones included.
        seed: of the pairs, and with the epoch and the position of all that collators draw for them.

    Raises:
        UserError: all segments are of one document, none has a next one, or `max_length` has no room for a token each.
    """

    def __init__(self, segments: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int = 512, seed: int = 0):
        if max_length < 5:
            raise UserError(f"max_length is {max_length}, but must be at least 5: three special tokens and one each")
        self.segments = segments
        self.start, self.end = text_bounds(tokenizer)
        if None in (self.start, self.end):
            raise UserError("next-sentence pairs need a tokenizer with <s> and </s>, or with [CLS] and [SEP]")
        self.room = max_length - 3
        self.seed = seed
        self.epoch = 0
        _, self.documents, self.sizes = np.unique(
            np.asarray(segments["document"]), return_inverse=True, return_counts=True
        )
        self.ends = self.sizes.cumsum()
        self.by_document = self.documents.argsort(kind="stable")  # rows, one document after another
        self.firsts = (self.documents[1:] == self.documents[:-1]).nonzero()[0]
        self.lengths = np.full((1, len(self.firsts)), max_length)  # a bound: each epoch has other pairs
        if len(self.sizes) < 2:
            raise UserError(f"next-sentence pairs need at least 2 documents, but there are {len(self.sizes)}")
        if not len(self.firsts):
            raise UserError("next-sentence pairs need documents of several segments, but each has only one")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose pairs are returned."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, index: int) -> dict:
        first = int(self.firsts[index])
        seed = mix(self.seed, self.epoch, index)
        kind, place = uniforms(np.array([seed], np.uint64), 2, PAIR)[0]
        is_random = kind >= 0.5
        second = self._elsewhere(self.documents[first], place) if is_random else first + 1
        a, b = (list(self.segments[row]["input_ids"]) for row in (first, second))
        kept = min(len(a), max(self.room - len(b), self.room // 2))
        a, b = a[len(a) - kept :], b[: self.room - kept]
        return {
            "input_ids": [self.start, *a, self.end, *b, self.end],
            "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1),
            "next_sentence_label": int(is_random),
            "seed": seed,
        }

    def _elsewhere(self, document: int, draw: float) -> int:
        """The row of a segment outside `document`, each equally likely."""
        own = self.sizes[document]
        number = int(draw * (len(self.documents) - own))
        return int(self.by_document[number if number < self.ends[document] - own else number + own])
