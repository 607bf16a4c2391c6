"""Length-bucketed batches within a token budget.

Examples of like length share a batch, so that little is padding, and a batch holds as many as its budget allows, so
that batches cost alike (Ott et al. 2018, "Scaling Neural Machine Translation", section 3.1).
"""

from collections.abc import Iterator

import numpy as np
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from triptych.training.errors import UserError


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of example indices: every example exactly once an epoch, in an order that seed and epoch decide.

    A batch's rows times its longest source, and times its longest target, stay within `max_tokens`. The number of
    batches is a multiple of `multiple_of` (the largest batches are halved until it is), so that every process and
    every accumulated update gets equally many.

    Args:
        source_lengths, target_lengths: tokens of each example.
        max_tokens: the budget, padding included.
        shuffle: draw another order in each epoch, or keep batches sorted by length.
        seed: of the order.
        multiple_of: processes times accumulation steps.

    Raises:
        UserError: an example is longer than the budget, or there are fewer examples than `multiple_of`.
    """

    def __init__(
        self,
        source_lengths: list[int],
        target_lengths: list[int],
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        multiple_of: int = 1,
    ):
        self.lengths = np.stack([np.asarray(source_lengths), np.asarray(target_lengths)])  # [2, examples]
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.multiple_of = multiple_of
        longest = self.lengths.max(0)
        if longest.max() > max_tokens:
            index = int(longest.argmax())
            raise UserError(f"example {index + 1} has {longest[index]} tokens, but max_tokens is {max_tokens}")
        # The sorted lengths, and so the cuts, are the same in every epoch.
        self.num_batches = len(self._cut(np.lexsort(self.lengths)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        draw = np.random.default_rng([self.seed, self.epoch])
        count = self.lengths.shape[1]
        order = draw.permutation(count) if self.shuffle else np.arange(count)
        # Sorted by target length first: the decoder's side, with the vocabulary, costs the most. The sort is stable,
        # so examples of equal lengths stay shuffled.
        order = order[np.lexsort(self.lengths[:, order])]
        batches = self._cut(order)
        for position in draw.permutation(len(batches)) if self.shuffle else range(len(batches)):
            yield batches[position].tolist()

    def __len__(self) -> int:
        return self.num_batches

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


def build_loader(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    **options,
) -> DataLoader:
    """Return a loader of plain model inputs: `input_ids` and `attention_mask` [B, S], `labels` [B, T], pads -100.

    Args:
        dataset: token ids, as `tokenize_pairs` gives them.
        tokenizer: its padding side and pad token fill the inputs.
        max_tokens: a batch's budget.
        **options: of `TokenBatchSampler`.
    """
    lengths = [[len(ids) for ids in dataset[column]] for column in ("input_ids", "labels")]
    sampler = TokenBatchSampler(*lengths, max_tokens, **options)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer))
