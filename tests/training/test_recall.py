"""The recall task: each query's label is the value that stands behind its key."""

import pytest

from triptych.training.data import load_split
from triptych.training.errors import UserError
from triptych.training.recall import generate_recall
from triptych.training.recipe import DataRecipe, RecallRecipe

SMALL = {"sizes": {"train": 20, "test": 5}, "length": 60, "queries": 4, "pairs": 10, "keys": 20, "values": 3}


def test_the_label_of_a_query_is_the_value_behind_its_key():
    for tokens, labels in zip(*generate_recall("train", RecallRecipe(**SMALL), 1).to_dict().values(), strict=True):
        assert len(tokens) == len(labels) == 60
        queries, text = tokens[:4], tokens[4:]
        assert len(set(queries)) == 4 and labels[4:] == [""] * 56
        for query, label in zip(queries, labels, strict=False):
            assert text.count(query) == 1 and text[text.index(query) + 1] == label
        places = [place for place, token in enumerate(text) if token.startswith("k")]
        assert len({text[place] for place in places}) == len(places) == 10
        assert all(text[place + 1].startswith("v") for place in places)
        assert sum(token.startswith("n") for token in text) == 56 - 2 * 10


def test_pairs_may_fill_the_text():
    rows = generate_recall("train", RecallRecipe(**{**SMALL, "length": 24}), 1)
    assert not any(token.startswith("n") for tokens in rows["tokens"] for token in tokens)


def test_splits_differ_and_seeds_decide():
    recipe = DataRecipe(recall=RecallRecipe(**SMALL))
    train, test, again, other = (
        load_split(recipe, split, ("tokens", "labels"), seed=seed)["tokens"]
        for split, seed in (("train", 1), ("test", 1), ("train", 1), ("train", 2))
    )
    assert train == again and train != other and train[:5] != test


def test_an_encoder_decoder_writes_the_values():
    recipe = DataRecipe(recall=RecallRecipe(**SMALL))
    texts = load_split(recipe, "train", ("tokens", "labels"))
    for row, text in zip(load_split(recipe, "train", ("source", "target")), texts, strict=True):
        assert row["source"].split() == text["tokens"]
        assert row["target"].split() == text["labels"][:4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pairs": 29}, "'data.recall.pairs' is 29, but must be from 4 to 20"),
        ({"pairs": 3}, "'data.recall.pairs' is 3, but must be from 4 to 20"),
        ({"length": 20}, "'data.recall.pairs' is 10, but must be from 4 to 8"),
        ({"queries": 0}, "'data.recall.queries' is 0, but must be from 1 to 10"),
        ({"values": 0}, "'data.recall.values' is 0, but must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        generate_recall("train", RecallRecipe(**SMALL | changes), 1)
