import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triptych.training.batching import Examples, TokenBatchSampler, build_loader, count_items, side_lengths
from triptych.training.errors import UserError

BUDGET = 60
lengths = st.lists(st.tuples(st.integers(1, BUDGET), st.integers(1, BUDGET)), min_size=8, max_size=200)


def make_sampler(pairs, **options):
    sources, targets = zip(*pairs, strict=True)
    rows = Dataset.from_dict(
        {name: [[0] * n for n in side] for name, side in (("input_ids", sources), ("labels", targets))}
    )
    return TokenBatchSampler(Examples(rows, side_lengths(rows), seed=0), BUDGET, **options)


@settings(max_examples=60)
@given(lengths, st.integers(0, 5), st.integers(1, 8), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_each_example_once_an_epoch_within_the_budget(pairs, epoch, multiple_of, shuffle, noise):
    whole = make_sampler(pairs, shuffle=shuffle, noise=noise)
    for each in (0, epoch):
        whole.set_epoch(each)
        assume(math.ceil(len(whole) / multiple_of) * multiple_of <= len(pairs))
    sampler = make_sampler(pairs, shuffle=shuffle, noise=noise, multiple_of=multiple_of)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(len(pairs)))
    assert len(batches) == len(sampler)
    assert len(batches) % multiple_of == 0
    for batch in batches:
        for side in (0, 1):
            assert len(batch) * max(pairs[index][side] for index in batch) <= BUDGET


@settings(max_examples=60)
@given(lengths, st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.5]))
def test_seed_and_epoch_decide_the_order(pairs, seed, epoch, noise):
    first, second = (make_sampler(pairs, seed=seed, noise=noise) for _ in range(2))
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


def test_noise_mixes_examples_that_lengths_would_part():
    pairs = [(10, 10), (12, 12)] * 200
    kinds = {noise: [{pairs[i] for i in batch} for batch in make_sampler(pairs, noise=noise)] for noise in (0.0, 0.5)}
    assert sum(len(kind) == 2 for kind in kinds[0.0]) <= 1
    assert sum(len(kind) == 2 for kind in kinds[0.5]) > len(kinds[0.5]) / 2
    in_order = make_sampler(pairs, noise=0.5, shuffle=False)
    assert list(in_order) == list(make_sampler(pairs, shuffle=False))


def test_an_example_beyond_the_budget_is_named():
    with pytest.raises(UserError, match="example 2 has 61 tokens, but max_tokens is 60"):
        make_sampler([(3, 4), (5, 61)])


def test_too_few_examples_for_an_update_are_refused():
    with pytest.raises(UserError, match="3 examples are too few: an update takes 4 batches"):
        make_sampler([(3, 4)] * 3, multiple_of=4)
    with pytest.raises(UserError, match="5 examples are too few: an update takes 4 batches"):
        make_sampler([(60, 4)] * 5, multiple_of=4)


def test_lengths_of_every_kind_of_row():
    columns = {"input_ids": [[1, 2, 3], [4]], "labels": [[1], [2, 3]]}
    assert side_lengths(Dataset.from_dict(columns)).tolist() == [[3, 1], [1, 2]]
    assert side_lengths(Dataset.from_dict(columns | {"labels": [0, 1]})).tolist() == [[3, 1]]
    choices = {"input_ids": [[[1, 2], [3]], [[1], [2]]], "labels": [0, 1]}
    assert side_lengths(Dataset.from_dict(choices)).tolist() == [[4, 2]]


def test_rows_carry_a_seed_of_their_own_in_each_epoch():
    rows = Dataset.from_dict({"input_ids": [[1], [2], [3]]})
    seen = set()
    for seed in (0, 1):
        examples = Examples(rows, side_lengths(rows), seed)
        for epoch in (0, 1):
            examples.set_epoch(epoch)
            seen |= {row["seed"] for row in examples.__getitems__([0, 1, 2])}
            assert examples[1] == examples.__getitems__([2, 1])[1] == {"input_ids": [2], "seed": examples[1]["seed"]}
    assert len(seen) == 12


def test_a_loader_gives_its_collator_whole_batches():
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3], [4, 5]], "labels": [0, 1, 2]})
    loader = build_loader(Examples(rows, side_lengths(rows), seed=0), lambda features: features, 4, shuffle=False)
    batches = [[(row["input_ids"], row["labels"]) for row in batch] for batch in loader]
    assert batches == [[([3], 1), ([1, 2], 0)], [([4, 5], 2)]]


def test_items_are_labels_or_rows():
    assert count_items({"labels": torch.tensor([[1, -100], [2, 3]])}) == 3
    assert count_items({"labels": torch.tensor([0.5, 1.5])}) == 2
    assert count_items({"start_positions": torch.tensor([0, 4, 9])}) == 3
