import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.training.errors import UserError
from triptych.training.subwords import VARIANTS, MergeDropout, RegularizedPairs
from triptych.training.tokenization import train_tokenizer

TEXTS = [
    "two young men are outside near many bushes .",
    "several men in hard hats are operating a giant pulley system .",
    "a little girl climbing into a wooden playhouse .",
    "  spaces and 2021年 , größer",
]
TOKENIZER = train_tokenizer(TEXTS * 3, "bpe", 400)


def make_pairs(dropout, sources=TEXTS, targets=TEXTS[::-1], seed=1):
    return RegularizedPairs(sources, targets, TOKENIZER, dropout, seed)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_without_dropout_a_text_is_split_as_the_tokenizer_splits_it(texts):
    pairs = make_pairs(0.0, [*TEXTS, *texts], [*texts, *TEXTS])
    for index, text in enumerate([*TEXTS, *texts]):
        assert pairs[index]["input_ids"] == TOKENIZER(text)["input_ids"]
    assert pairs[0]["labels"] == TOKENIZER(texts[0])["input_ids"]


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.integers(0, 3), st.integers(0, 5))
def test_every_split_spells_its_text(dropout, seed, epoch):
    pairs = make_pairs(dropout, seed=seed)
    pairs.set_epoch(epoch)
    for index, text in enumerate(TEXTS):
        assert TOKENIZER.decode(pairs[index]["input_ids"], skip_special_tokens=True) == text
        assert pairs[index]["input_ids"][-1] == TOKENIZER.eos_token_id
        assert [len(pairs[index][side]) for side in ("input_ids", "labels")] == pairs.lengths[:, index].tolist()


def test_without_merges_every_byte_is_a_token():
    assert make_pairs(1.0).lengths[0].tolist() == [len(text.encode()) + 1 for text in TEXTS]


def test_a_merge_is_left_out_with_its_probability():
    """Of a word with a single merge, that share of the splits is in two."""
    tokenizer = train_tokenizer(["ab ab"], "bpe", 261)
    whole = tokenizer.convert_tokens_to_ids("ab")
    splits = [split for seed in range(100) for split in MergeDropout(tokenizer, 0.3, seed).variants("ab")]
    share = np.mean([split != [whole] for split in splits])
    assert len(splits) == 100 * VARIANTS
    assert share == pytest.approx(0.3, abs=4 * (0.21 / len(splits)) ** 0.5)


def test_seed_epoch_and_place_decide_a_split():
    def rows(seed, epoch):
        pairs = make_pairs(0.5, seed=seed)
        pairs.set_epoch(3)  # what was before does not matter
        pairs.set_epoch(epoch)
        return [pairs[index] for index in range(len(TEXTS))]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(1, 1)
    assert rows(1, 0) != rows(2, 0)
    twice = make_pairs(0.5, TEXTS[:1] * 2, TEXTS[:1] * 2)
    assert twice[0]["input_ids"] != twice[1]["input_ids"]


def test_a_tokenizer_of_words_has_no_merges():
    with pytest.raises(UserError, match=r"'tokenizer\.dropout' must be 0, as the tokenizer is no BPE but WordLevel"):
        RegularizedPairs(["a"], ["a"], train_tokenizer(["a"], "word", 10), 0.1, 1)
