import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triptych.training.batching import TokenBatchSampler, build_loader
from triptych.training.errors import UserError
from triptych.training.tokenization import tokenize_pairs, train_tokenizer

BUDGET = 60
lengths = st.lists(st.tuples(st.integers(1, BUDGET), st.integers(1, BUDGET)), min_size=8, max_size=200)


def make_sampler(pairs, **options):
    sources, targets = zip(*pairs, strict=True)
    return TokenBatchSampler(list(sources), list(targets), BUDGET, **options)


@settings(max_examples=60)
@given(lengths, st.integers(0, 5), st.integers(1, 8), st.booleans())
def test_each_example_once_an_epoch_within_the_budget(pairs, epoch, multiple_of, shuffle):
    assume(math.ceil(len(make_sampler(pairs)) / multiple_of) * multiple_of <= len(pairs))
    sampler = make_sampler(pairs, shuffle=shuffle, multiple_of=multiple_of)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    assert len(batches) == len(sampler)
    assert len(batches) % multiple_of == 0
    for batch in batches:
        for side in (0, 1):
            assert len(batch) * max(pairs[index][side] for index in batch) <= BUDGET


@settings(max_examples=60)
@given(lengths, st.integers(0, 3), st.integers(0, 3))
def test_seed_and_epoch_decide_the_order(pairs, seed, epoch):
    first, second = (make_sampler(pairs, seed=seed) for _ in range(2))
    list(first)  # what was iterated before does not matter
    first.set_epoch(epoch)
    second.set_epoch(epoch)
    assert list(first) == list(second)


def test_another_epoch_or_seed_has_another_order():
    draw = np.random.default_rng(0)
    pairs = [tuple(draw.integers(1, 6, 2)) for _ in range(300)]
    sampler = make_sampler(pairs, seed=1)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    orders.append(list(make_sampler(pairs, seed=2)))
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    # Not only the batches change places: other examples meet in them.
    first, second = ({frozenset(batch) for batch in order} for order in orders[:2])
    assert len(first & second) < len(first) / 2


def test_like_lengths_share_a_batch():
    draw = np.random.default_rng(0)
    pairs = [(int(length), int(length)) for length in draw.integers(1, 30, 500)]
    padded = sum(len(batch) * max(pairs[index][0] for index in batch) for batch in make_sampler(pairs))
    real = sum(source for source, _ in pairs)
    assert padded < 1.1 * real


def test_an_example_beyond_the_budget_is_named():
    with pytest.raises(UserError, match="example 2 has 61 tokens, but max_tokens is 60"):
        make_sampler([(3, 4), (5, 61)])


def test_too_few_examples_for_an_update_are_refused():
    with pytest.raises(UserError, match="3 examples are too few: an update takes 4 batches"):
        make_sampler([(3, 4)] * 3, multiple_of=4)
    with pytest.raises(UserError, match="5 examples are too few: an update takes 4 batches"):
        make_sampler([(60, 4)] * 5, multiple_of=4)


def test_a_batch_is_plain_model_input():
    pairs = Dataset.from_dict({"source": ["abc", "a"], "target": ["b", "cab"]})
    tokenizer = train_tokenizer(["abc"], "char", 0)
    (batch,) = build_loader(tokenize_pairs(pairs, tokenizer), tokenizer, 100, shuffle=False)
    a, b, c, end, pad = tokenizer.convert_tokens_to_ids(["a", "b", "c", "</s>", "<pad>"])
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
    assert torch.equal(batch["input_ids"], torch.tensor([[a, b, c, end], [a, end, pad, pad]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([[b, end, -100, -100], [c, a, b, end]]))
