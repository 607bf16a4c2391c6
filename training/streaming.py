"""Data that are read as training needs them: one window of examples after another, of files that may be larger than
memory.

A window takes an epoch's place: batches are made within it, its number is what their order and all draws depend on, and
a training that goes on in window 7 reads on there. After the last example the first one follows.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

from triptych.training.batching import Examples
from triptych.training.data import clean, find_file, format_of, list_sources
from triptych.training.errors import UserError
from triptych.training.recipe import DataRecipe

BUILDERS = {"lines": "text", "csv": "csv", "json": "json", "parquet": "parquet"}


def open_stream(recipe: DataRecipe, split: str, columns: Sequence[str]) -> IterableDataset:
    """Return the examples of one split, read as they are asked for.

    Raises:
        UserError: a file is missing, or is of a form that can only be read as a whole.
    """
    streams = []
    for source in list_sources(recipe.splits[split], columns):
        path = find_file(source.file) if isinstance(source.file, str) else None
        format = format_of(path, source, recipe) if path else "files side by side"
        if format not in BUILDERS or source.pattern or recipe.pattern or source.part:
            raise UserError(
                f"recipe key 'data.window' must be null, as only whole files of the formats {', '.join(BUILDERS)} and "
                f"without a pattern are read in windows, but {source.file} is of {format}"
            )
        streams.append(clean(_open(path, format, columns, recipe.columns | source.columns), recipe))
    return concatenate_datasets(streams) if len(streams) > 1 else streams[0]


def first_window(stream: IterableDataset, window: int) -> Dataset:
    """Return the first `window` examples of a stream."""
    return Dataset.from_list(list(islice(_again_and_again(stream), window)))


def _open(path: Path, format: str, columns: Sequence[str], renamed: dict[str, str]) -> IterableDataset:
    stream = load_dataset(BUILDERS[format], data_files=str(path), split="train", streaming=True)
    names = {"text": columns[0]} if format == "lines" else {renamed.get(column, column): column for column in columns}
    present = list(next(iter(stream), {}))
    for name in names:
        if name not in present:
            raise UserError(f"data file '{path}' has no column '{name}': its columns are {', '.join(present)}")
    stream = stream.select_columns(list(names))
    renames = {name: column for name, column in names.items() if name != column}
    return stream.rename_columns(renames) if renames else stream


class StreamedExamples(Examples):
    """The rows of one window of a stream; `set_epoch` reads the window of that number.

    Args:
        stream: examples, read anew by each iteration.
        window: examples at a time.
        encode: from a window to rows of token ids.
        lengths: from rows to their lengths [sides, rows].
        seed: of the rows' draws.
    """

    def __init__(self, stream: IterableDataset, window: int, encode: Callable, lengths: Callable, seed: int):
        self.stream = stream
        self.window = window
        self.encode = encode
        self.lengths_of = lengths
        self.seed = seed
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Read the window `epoch`, from where the one before ended, or else from the start of the stream."""
        if epoch == self.epoch:
            return
        if epoch != self.epoch + 1 or epoch == 0:
            self.examples = islice(_again_and_again(self.stream), epoch * self.window, None)
        self.epoch = epoch
        self.rows = self.encode(Dataset.from_list(list(islice(self.examples, self.window))))
        self.lengths = self.lengths_of(self.rows)


def _again_and_again(stream: IterableDataset) -> Iterator[dict]:
    while True:
        try:
            yield from stream
        except (DatasetGenerationError, OSError, ValueError) as error:
            raise UserError(f"the data stream broke: {' '.join(str(error.__cause__ or error).split())}") from error
