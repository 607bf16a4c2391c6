"""Words that could change places without changing what is true: names of people, rooms or things.

In each epoch every example has them renamed in another way, the same throughout the example, in its text and in its
labels, so that a model cannot learn by heart who does what.
"""

from collections.abc import Sequence

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.batching import Examples
from triptych.training.draws import uniforms
from triptych.training.errors import UserError


class RenamedExamples(Examples):
    """Rows of words with a label each, in which the words of each group change places.

    Args:
        rows, lengths, seed: as of `Examples`.
        groups: words that may stand for each other.
        tokenizer: in which each of these words is one token.
        labels: names of the classes, in any case; one that lists several words has commas between them.
        keep_beside: words beside which names mean something: an example that has one of them stays as it is.

    Raises:
        UserError: a word is no token of its own.
    """

    def __init__(
        self,
        rows: Dataset,
        lengths: np.ndarray,
        seed: int,
        groups: Sequence[Sequence[str]],
        tokenizer: PreTrainedTokenizerBase,
        labels: Sequence[str],
        keep_beside: Sequence[str] = (),
    ):
        super().__init__(rows, lengths, seed)
        self.groups = [[word.lower() for word in group] for group in groups]
        self.ids = {word: tokenizer.convert_tokens_to_ids(word) for group in self.groups for word in group}
        for word, id in self.ids.items():
            if id in (None, tokenizer.unk_token_id):
                raise UserError(
                    f"recipe key 'data.interchangeable' has '{word}', which is no token of the tokenizer, in lower case"
                )
        self.kept = set(tokenizer.convert_tokens_to_ids(list(keep_beside))) - {tokenizer.unk_token_id}
        self.vocab_size = len(tokenizer)
        self.names = [label.lower() for label in labels]
        self.numbers = {name: number for number, name in enumerate(self.names)}

    def __getitems__(self, indices: list[int]) -> list[dict]:
        rows = super().__getitems__(indices)
        for row in rows:
            if self.kept.intersection(row["input_ids"]):
                continue
            renamed = self.draw(row["seed"])
            table = np.arange(self.vocab_size)
            for word, other in renamed.items():
                table[self.ids[word]] = self.ids[other]
            row["input_ids"] = table[row["input_ids"]].tolist()
            row["labels"] = [self.rename_class(label, renamed) for label in row["labels"]]
        return rows

    def draw(self, seed: int) -> dict[str, str]:
        """Return what each word is called in the example with `seed`."""
        draws = uniforms(np.array([seed], np.uint64), len(self.ids), stream=1)[0]
        renamed, start = {}, 0
        for group in self.groups:
            order = draws[start : start + len(group)].argsort()
            renamed |= {word: group[place] for word, place in zip(group, order, strict=True)}
            start += len(group)
        return renamed

    def rename_class(self, label: int, renamed: dict[str, str]) -> int:
        """Return the class of the renamed words; -100 where there is none."""
        if label == IGNORE:
            return label
        words = self.names[label].split(",")
        return self.numbers.get(",".join(renamed.get(word, word) for word in words), IGNORE)
