"""Associative recall over a long text: a generated task that needs tokens from anywhere.

A text begins with `queries` keys. Somewhere behind them, among noise, each of these keys stands once with a value after
it, as do others that nobody asks for. The label of a query is the value of its key. This is the task of Arora et al.
(2023, arXiv 2312.04927, section 3) with the queries first, so that they can be global tokens. For encoder-decoders the
text is the source, and the values that are asked for are the target.
"""

import numpy as np
from datasets import Dataset

from triptych.training.errors import UserError
from triptych.training.recipe import RecallRecipe


def generate_recall(split: str, recipe: RecallRecipe, seed: int) -> Dataset:
    """Return the texts of one split as `tokens` and `labels`, where all but the queries have an empty label.

    Raises:
        UserError: the recipe's numbers do not fit into each other.
    """
    check(recipe)
    draw = np.random.default_rng([seed, *split.encode()])
    body = recipe.length - recipe.queries
    tokens, labels = [], []
    for _ in range(recipe.sizes[split]):
        keys = draw.permutation(recipe.keys)[: recipe.pairs]
        values = draw.integers(recipe.values, size=recipe.pairs)
        asked = draw.permutation(recipe.pairs)[: recipe.queries]
        text = [f"n{number}" for number in draw.integers(recipe.noise, size=body)]
        # Places of pairs: gaps between so many things as are left when each pair is one thing.
        places = np.sort(draw.choice(body - recipe.pairs, recipe.pairs, replace=False)) + np.arange(recipe.pairs)
        for place, key, value in zip(places, keys, values, strict=True):
            text[place : place + 2] = f"k{key}", f"v{value}"
        tokens.append([f"k{keys[pair]}" for pair in asked] + text)
        labels.append([f"v{values[pair]}" for pair in asked] + [""] * body)
    return Dataset.from_dict({"tokens": tokens, "labels": labels})


def as_pairs(texts: Dataset) -> Dataset:
    """Return the texts as `source`, and as `target` the values of their queries, in order."""
    return Dataset.from_dict(
        {
            "source": [" ".join(tokens) for tokens in texts["tokens"]],
            "target": [" ".join(label for label in labels if label) for labels in texts["labels"]],
        }
    )


def check(recipe: RecallRecipe) -> None:
    """Raise a `UserError` where a text cannot hold what it should."""
    limits = {
        "pairs": (recipe.queries, min(recipe.keys, (recipe.length - recipe.queries) // 2)),
        "queries": (1, recipe.pairs),
        "values": (1, None),
        "noise": (1, None),
    }
    for name, (least, most) in limits.items():
        value = getattr(recipe, name)
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise UserError(f"recipe key 'data.recall.{name}' is {value}, but must be {allowed}")
