import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collators import BOS, EOS, FIRST_WORD, MASK, SEP, UNK, VOCAB, make_tokenizer, pair, text, words

from triptych.training.draws import uniforms
from triptych.training.errors import UserError
from triptych.training.masking import MaskedLMCollator, NextSentencePairs, ordinary_ids

ORDINARY = list(range(FIRST_WORD, VOCAB))


def draws_of(seed, width, stream):
    return uniforms(np.array([seed], np.uint64), width, stream)[0].tolist()


def masked_slowly(ids, seed, words=None, probability=0.15, mask_share=0.8, random_share=0.1):
    """Devlin et al.'s rule, token by token."""
    choice, kind, other = (draws_of(seed, len(ids), stream) for stream in range(3))
    inputs, labels, word_number = [], [], 0
    for place, token in enumerate(ids):
        if words and place and words[place] != words[place - 1]:
            word_number += 1
        is_chosen = choice[word_number if words else place] < probability
        if token < FIRST_WORD or not is_chosen:
            inputs.append(token)
            labels.append(-100)
            continue
        labels.append(token)
        if kind[place] < mask_share:
            inputs.append(MASK)
        elif kind[place] < mask_share + random_share:
            inputs.append(ORDINARY[int(other[place] * len(ORDINARY))])
        else:
            inputs.append(token)
    return inputs, labels


@pytest.mark.parametrize("shares", [{}, {"mask_share": 0.3, "random_share": 0.3}, {"mask_share": 0, "random_share": 1}])
def test_by_hand_token_by_token(shares):
    features = [text(length) for length in (30, 12, 60)]
    collator = MaskedLMCollator(make_tokenizer(), masking_probability=0.5, **shares)
    batch = collator(features)
    for row, feature in enumerate(features):
        inputs, labels = masked_slowly(feature["input_ids"], feature["seed"], probability=0.5, **shares)
        assert batch["input_ids"][row, : len(inputs)].tolist() == inputs
        assert batch["labels"][row, : len(inputs)].tolist() == labels


def test_whole_words_by_hand():
    ids, word_ids = [BOS, *words(9), EOS, *words(3), EOS], [None, 0, 0, 1, 2, 2, 2, 3, 4, 4, None, 0, 0, 1, None]
    collator = MaskedLMCollator(make_tokenizer(), masking_probability=0.5, whole_word=True)
    seen = set()
    for seed in range(40):
        batch = collator([{"input_ids": ids, "word_ids": word_ids, "seed": seed}])
        inputs, labels = masked_slowly(ids, seed, word_ids, probability=0.5)
        assert batch["input_ids"][0].tolist() == inputs
        assert batch["labels"][0].tolist() == labels
        chosen = (batch["labels"][0] != -100).tolist()
        assert chosen[4] == chosen[5] == chosen[6]
        seen.add((chosen[1], chosen[11]))
    assert len(seen) == 4  # the first words of a pair's two texts are drawn apart


def test_pads_and_specials_are_never_chosen_and_shares_are_as_asked():
    """Pads get masked."""
    row = [BOS, *words(7), UNK, SEP, *words(7), EOS, *words(4), EOS]
    collator = MaskedLMCollator(make_tokenizer("left", pad="</s>"))
    batch = collator([{"input_ids": row[: 12 + seed % 12], "seed": seed} for seed in range(10_000)])
    ids, labels, real = batch["input_ids"], batch["labels"], batch["attention_mask"] == 1
    chosen = labels != -100
    assert not chosen[~real].any()
    assert (labels[chosen] >= FIRST_WORD).all()
    changed = chosen & (ids != labels) & (ids != MASK)
    assert (ids[changed] >= FIRST_WORD).all()
    originals = torch.where(chosen, labels, ids)
    ordinary = real & (originals >= FIRST_WORD)

    def assert_share(count, total, share):
        assert abs(count - total * share) < 4 * (total * share * (1 - share)) ** 0.5

    total = int(chosen.sum())
    assert_share(total, int(ordinary.sum()), 0.15)
    assert_share(int((ids[chosen] == MASK).sum()), total, 0.8)
    assert_share(int(changed.sum()), total, 0.1 * (1 - 1 / len(ORDINARY)))  # a random token may be the same


def test_random_tokens_are_all_ordinary_ones_equally_likely():
    tokenizer = make_tokenizer(unk_token="w50")  # a special token in the midst of the others
    ordinary = [token for token in ORDINARY if token != 50] + [UNK]
    draws = (np.arange(10 * len(ordinary)) + 0.5) / (10 * len(ordinary))
    assert ordinary_ids(tokenizer, draws).tolist() == np.repeat(sorted(ordinary), 10).tolist()


def test_next_sentence_label_and_types_are_passed_on():
    features = [pair(5), pair(9)]
    batch = MaskedLMCollator(make_tokenizer())(features)
    assert batch["next_sentence_label"].tolist() == [row["next_sentence_label"] for row in features]
    assert batch["token_type_ids"][0].tolist() == features[0]["token_type_ids"] + [0] * 4


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match=r"masking_probability is 1\.5, but must be from 0 to 1"):
        MaskedLMCollator(make_tokenizer(), masking_probability=1.5)
    with pytest.raises(UserError, match="random_share is 1"):
        MaskedLMCollator(make_tokenizer(), mask_share=0.7, random_share=0.5)
    with pytest.raises(UserError, match="the tokenizer has no mask_token"):
        MaskedLMCollator(make_tokenizer(mask_token=None))
    with pytest.raises(UserError, match="example 1 of the batch has no 'word_ids'"):
        MaskedLMCollator(make_tokenizer(), whole_word=True)([text(3)])


def segments_of(*documents):
    """Documents of so many segments, each segment a single token of its own."""
    rows = [document for document, count in enumerate(documents) for _ in range(count)]
    return Dataset.from_dict({"input_ids": [[FIRST_WORD + row] for row in range(len(rows))], "document": rows})


def test_pairs_by_hand():
    segments = segments_of(3, 1, 2, 4)
    documents = segments["document"][:]
    dataset = NextSentencePairs(segments, make_tokenizer(), seed=5)
    assert len(dataset) == 2 + 1 + 3  # each segment that another one follows
    firsts, labels, seconds = [], [], []
    for epoch in range(1200):
        dataset.set_epoch(epoch)
        for row in (dataset[index] for index in range(len(dataset))):
            ids = row["input_ids"]
            assert [ids[0], ids[2], ids[4]] == [BOS, EOS, EOS] and len(ids) == 5
            assert row["token_type_ids"] == [0, 0, 0, 1, 1]
            a, b = ids[1] - FIRST_WORD, ids[3] - FIRST_WORD
            if row["next_sentence_label"] == 0:
                assert b == a + 1 and documents[a] == documents[b]
            else:
                assert documents[a] != documents[b]
            firsts.append(a)
            labels.append(row["next_sentence_label"])
            seconds.append(b if row["next_sentence_label"] else -1)
    assert firsts[:6] == [0, 1, 4, 6, 7, 8]
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / len(labels) ** 0.5
    # Of the first segment's random partners, the 7 segments of other documents, each is as likely.
    counts = np.bincount([b for a, b in zip(firsts, seconds, strict=True) if a == 0 and b >= 0], minlength=10)
    assert (counts[:3] == 0).all()
    assert (abs(counts[3:] - counts.sum() / 7) < 4 * (counts.sum() / 7) ** 0.5).all()


def test_a_document_whose_rows_lie_apart_is_still_one():
    segments = Dataset.from_dict({"input_ids": [[20], [21], [30], [22]], "document": ["x", "x", "y", "x"]})
    dataset = NextSentencePairs(segments, make_tokenizer())
    assert len(dataset) == 1
    for epoch in range(30):
        dataset.set_epoch(epoch)
        row = dataset[0]
        assert row["input_ids"][3] == (30 if row["next_sentence_label"] else 21)


def test_pairs_depend_on_seed_epoch_and_position_only():
    segments, tokenizer = segments_of(5, 5, 5), make_tokenizer()
    first, second = (NextSentencePairs(segments, tokenizer, seed=3) for _ in range(2))
    rows = [first[index] for index in range(12)]
    assert [second[index] for index in reversed(range(12))] == rows[::-1]
    second.set_epoch(1)
    assert [second[index] for index in range(12)] != rows
    assert [NextSentencePairs(segments, tokenizer, seed=4)[index] for index in range(12)] != rows
    assert len({row["seed"] for row in rows}) == 12


@settings(max_examples=50)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(5, 30))
def test_long_pairs_lose_tokens_of_the_longer_text(first, second, max_length):
    a, b = list(range(100, 100 + first)), list(range(200, 200 + second))
    segments = Dataset.from_dict({"input_ids": [a, b, [50]], "document": [0, 0, 1]})
    dataset = NextSentencePairs(segments, make_tokenizer(), max_length)
    while dataset[0]["next_sentence_label"]:
        dataset.set_epoch(dataset.epoch + 1)
    row = dataset[0]
    ids = row["input_ids"]
    middle = ids.index(EOS)
    kept_a, kept_b = ids[1:middle], ids[middle + 1 : -1]
    assert len(ids) == min(first + second + 3, max_length) == len(row["token_type_ids"])
    assert kept_a == a[first - len(kept_a) :] and kept_b == b[: len(kept_b)]
    # What was cut off made the texts more alike, never less.
    assert len(kept_a) == first or len(kept_a) >= len(kept_b) - 1
    assert len(kept_b) == second or len(kept_b) >= len(kept_a) - 1


def test_pairs_that_cannot_be_made_are_refused():
    tokenizer = make_tokenizer()
    with pytest.raises(UserError, match="need at least 2 documents, but there are 1"):
        NextSentencePairs(segments_of(4), tokenizer)
    with pytest.raises(UserError, match="documents of several segments"):
        NextSentencePairs(segments_of(1, 1), tokenizer)
    with pytest.raises(UserError, match="max_length is 4, but must be at least 5"):
        NextSentencePairs(segments_of(2, 2), tokenizer, 4)
