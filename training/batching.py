"""Length-bucketed batches within a token budget.

Examples of like length share a batch, so that little is padding, and a batch holds as many as its budget allows, so
that batches cost alike (Ott et al. 2018, "Scaling Neural Machine Translation", section 3.1).
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

from triptych.losses import IGNORE
from triptych.training.draws import mix
from triptych.training.errors import UserError


class Examples(torch.utils.data.Dataset):
    """Rows of token ids, each with the `seed` that its collator draws from: a mix of seed, epoch and position.

    Attributes:
        lengths: what a row costs in tokens, on each side that the model reads: [sides, rows].
    """

    def __init__(self, rows: Dataset, lengths: np.ndarray, seed: int):
        self.rows = rows
        self.lengths = lengths
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose draws the rows carry."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        columns = self.rows[indices]
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for index, row in zip(indices, rows, strict=True):
            row["seed"] = mix(self.seed, self.epoch, index)
        return rows


def count_items(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the loss of `batch` is a mean over: its labels, or its rows where they are positions."""
    if "labels" in batch:
        return (batch["labels"] != IGNORE).sum()
    return torch.tensor(len(batch["start_positions"]), device=batch["start_positions"].device)


def side_lengths(rows: Dataset) -> np.ndarray:
    """Return the lengths of the token columns `input_ids` and, where it holds lists, `labels`: [sides, rows].

    Several texts in one row (choices) cost as many tokens as the longest, each.
    """
    table = rows.with_format("arrow")[:]
    return np.stack([_lengths(table[name]) for name in ("input_ids", "labels") if _is_list(table, name)])


def _is_list(table: pa.Table, name: str) -> bool:
    return name in table.column_names and pa.types.is_list(table[name].type)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    lengths = pc.list_value_length(column).to_numpy()
    if not pa.types.is_list(column.type.value_type):
        return lengths
    longest = np.maximum.reduceat(_lengths(pc.list_flatten(column)), np.cumsum(lengths) - lengths)
    return lengths * longest


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of example indices: every example exactly once an epoch, in an order that seed and epoch decide.

    A batch's rows times its longest row, on every side, stay within `max_tokens`. The number of batches is a multiple
    of `multiple_of` (the largest batches are halved until it is), so that every process and every accumulated update
    gets equally many.

    Args:
        examples: have `lengths` [sides, rows] and `set_epoch`, which may change them.
        max_tokens: the budget, padding included.
        shuffle: draw another order in each epoch, or keep batches sorted by length.
        noise: by up to so much of itself a length is taken for more before examples are sorted by it. Where lengths
            tell what kind of example it is, batches would otherwise be of one kind each.
        seed: of the order.
        multiple_of: processes times accumulation steps.

    Raises:
        UserError: an example is longer than the budget, or there are fewer examples than `multiple_of`.
    """

    def __init__(
        self,
        examples: Examples,
        max_tokens: int,
        *,
        shuffle: bool = True,
        noise: float = 0.0,
        seed: int = 0,
        multiple_of: int = 1,
    ):
        self.examples = examples
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.noise = noise
        self.seed = seed
        self.multiple_of = multiple_of
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch
        self.examples.set_epoch(epoch)
        self.lengths = self.examples.lengths
        longest = self.lengths.max(0)
        if longest.max() > self.max_tokens:
            index = int(longest.argmax())
            raise UserError(f"example {index + 1} has {longest[index]} tokens, but max_tokens is {self.max_tokens}")
        self.batches = self._draw()

    def _draw(self) -> list[np.ndarray]:
        draw = np.random.default_rng([self.seed, self.epoch])
        count = self.lengths.shape[1]
        order = draw.permutation(count) if self.shuffle else np.arange(count)
        keys = self.lengths[:, order]
        if self.shuffle and self.noise:
            keys = keys * (1 + self.noise * draw.random(count))
        # Sorted by target length first: the decoder's side, with the vocabulary, costs the most. The sort is stable,
        # so examples of equal lengths stay shuffled.
        batches = self._cut(order[np.lexsort(keys)])
        return [batches[position] for position in draw.permutation(len(batches))] if self.shuffle else batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def _cut(self, order: np.ndarray) -> list[np.ndarray]:
        batches, start, longest = [], 0, 0
        for position, length in enumerate(self.lengths.max(0)[order].tolist()):
            longest = max(longest, length)
            if longest * (position - start + 1) > self.max_tokens:
                batches.append(order[start:position])
                start, longest = position, length
        batches.append(order[start:])
        while len(batches) % self.multiple_of:
            largest = batches.pop(max(range(len(batches)), key=lambda number: len(batches[number])))
            if len(largest) == 1:
                raise UserError(f"{len(order)} examples are too few: an update takes {self.multiple_of} batches")
            batches += np.array_split(largest, 2)
        return batches


def build_loader(examples: Examples, collator: Callable, max_tokens: int, **options) -> DataLoader:
    """Return a loader of `collator`'s batches of at most `max_tokens`; `options` are of `TokenBatchSampler`."""
    return DataLoader(examples, batch_sampler=TokenBatchSampler(examples, max_tokens, **options), collate_fn=collator)
