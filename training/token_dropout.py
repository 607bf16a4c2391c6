"""Texts with holes: tokens that are hidden at random in training, so that a model leans on no single word."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.training.draws import row_seeds, uniforms
from triptych.training.padding import Batch, check_share, ordinary_tokens, read_texts, token_id


@dataclass
class TokenDropout:
    """A collator whose texts have lost some of their tokens (Iyyer et al. 2015, "Deep unordered composition rivals
    syntactic methods for text classification"; for translation Sennrich et al. 2016, arXiv 1606.02891).

    What is hidden becomes the mask token, which a model pre-trained on it knows how to read, or else `<unk>`.

    Args:
        collator: makes the batch.
        tokenizer: says which tokens are special and stay.
        probability: of each other token of `input_ids` to be hidden.

    Raises:
        UserError: the probability is impossible, or the tokenizer has neither token.
    """

    collator: Callable[[list[dict]], Batch]
    tokenizer: PreTrainedTokenizerBase
    probability: float

    def __post_init__(self):
        check_share("token_dropout", self.probability)
        mask = self.tokenizer.mask_token_id
        self.hidden = token_id(self.tokenizer, "unk_token") if mask is None else mask

    def __call__(self, features: list[dict]) -> Batch:
        ids, real = read_texts(features)
        dropped = uniforms(row_seeds(features), ids.shape[1], stream=2) < self.probability
        dropped &= ordinary_tokens(ids, real, self.tokenizer)
        ids = np.where(dropped, self.hidden, ids)
        rows = zip(features, ids, real, strict=True)
        return self.collator([{**feature, "input_ids": row[kept].tolist()} for feature, row, kept in rows])
