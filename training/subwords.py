"""Subword regularisation: in each epoch of training a text is split in another way.

BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267) leaves out some merges at random. The tokenizers library draws
from a generator that cannot be seeded, so that no run could be repeated or resumed exactly; hence the merges are made
here. A word is split `VARIANTS` times before training, and each of its occurrences takes one of these splits, anew in
each epoch.

Shapes: W distinct words, V variants of each, N words of the whole text, R rows.
"""

import json
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.training.batching import Examples
from triptych.training.draws import mix, uniforms
from triptych.training.errors import UserError

VARIANTS = 32


class MergeDropout:
    """Splits words as a BPE tokenizer does, but for merges that are left out at random.

    Args:
        tokenizer: a fast tokenizer of the BPE model.
        dropout: probability of a merge to be left out.
        seed: of the draws; with the word it decides the splits.

    Raises:
        UserError: the tokenizer is of another model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        if model["type"] != "BPE":
            raise UserError(f"recipe key 'tokenizer.dropout' must be 0, as the tokenizer is no BPE but {model['type']}")
        self.vocabulary = model["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self.dropout = dropout
        self.seed = seed

    def variants(self, word: str) -> list[list[int]]:
        """Return `VARIANTS` splits of `word`, as token ids."""
        draw = random.Random(f"{self.seed} {word}").random
        return [self._split(word, draw) for _ in range(VARIANTS)]

    def _split(self, word: str, draw) -> list[int]:
        pieces = list(word)
        while len(pieces) > 1:
            # A merge that is left out here may be made after the next one: it is drawn anew (their algorithm 1).
            ranks = [
                (self.ranks[pair], place)
                for place, pair in enumerate(pairwise(pieces))
                if pair in self.ranks and draw() >= self.dropout
            ]
            if not ranks:
                break
            _, place = min(ranks)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        return [self.vocabulary[piece] for piece in pieces]


class SplitColumn:
    """One column of texts whose words are split anew in each epoch; each text ends in `end`."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, dropout: MergeDropout, end: int):
        backend = tokenizer.backend_tokenizer
        numbers: dict[str, int] = {}
        words, self.counts = [], []
        for text in texts:
            text = backend.normalizer.normalize_str(text) if backend.normalizer else text
            pieces = [
                numbers.setdefault(piece, len(numbers) + 1) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)
            ]
            words += [*pieces, 0]
            self.counts.append(len(pieces) + 1)
        self.words = np.array(words)  # [N]; word 0 is the end of a text
        splits = [[[end]] * VARIANTS, *map(dropout.variants, numbers)]
        self.sizes = np.array([[len(split) for split in variants] for variants in splits])  # [W, V]
        self.ids = np.array([token for variants in splits for split in variants for token in split])
        self.starts = (self.sizes.cumsum() - self.sizes.ravel()).reshape(self.sizes.shape)  # [W, V], into ids

    def draw(self, seed: int) -> None:
        """Choose a split for each word: from now on the column's rows are these."""
        draws = uniforms(np.array([seed], np.uint64), len(self.words))[0]
        chosen = self.words, (draws * VARIANTS).astype(np.int64)
        sizes, starts = self.sizes[chosen], self.starts[chosen]  # [N]
        ends = sizes.cumsum()
        self.tokens = self.ids[np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1])]
        self.row_ends = ends[np.cumsum(self.counts) - 1]
        self.lengths = np.diff(self.row_ends, prepend=0)  # [R]

    def __getitem__(self, index: int) -> list[int]:
        end = self.row_ends[index]
        return self.tokens[end - self.lengths[index] : end].tolist()


class RegularizedPairs(Examples):
    """Pairs of texts, `input_ids` and `labels`, whose words are split anew in each epoch."""

    def __init__(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        dropout: float,
        seed: int,
    ):
        merges = MergeDropout(tokenizer, dropout, seed)
        self.columns = [SplitColumn(texts, tokenizer, merges, tokenizer.eos_token_id) for texts in (sources, targets)]
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose splits and draws the rows have."""
        self.epoch = epoch
        for side, column in enumerate(self.columns):
            column.draw(mix(self.seed, epoch, side))
        self.lengths = np.stack([column.lengths for column in self.columns])

    def __len__(self) -> int:
        return self.lengths.shape[1]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        return [
            {
                "input_ids": self.columns[0][index],
                "labels": self.columns[1][index],
                "seed": mix(self.seed, self.epoch, index),
            }
            for index in indices
        ]
