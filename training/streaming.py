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
from triptych.training.data import (
    ROWS,
    check_value,
    clean,
    find_file,
    format_of,
    list_sources,
    name_columns,
    stream_lines,
)
from triptych.training.errors import UserError
from triptych.training.recipe import DataRecipe

FORMATS = (*ROWS, "json", "parquet")


def open_stream(recipe: DataRecipe, split: str, columns: Sequence[str]) -> IterableDataset:
    """Return the examples of one split, read as they are asked for.

    Raises:
        UserError: a file is missing, or is of a form that can only be read as a whole.
    """
    streams = []
    for source in list_sources(recipe.splits[split], columns):
        path = find_file(source.file) if isinstance(source.file, str) else None
        format = format_of(path, source, recipe) if path else "files side by side"
        if format not in FORMATS or source.part:
            raise UserError(
                f"recipe key 'data.window' must be null, as only whole files of the formats {', '.join(FORMATS)} are "
                f"read in windows, but {source.file} is {f'the part {source.part}' if source.part else f'of {format}'}"
            )
        options = {
            "path": path,
            "format": format,
            "columns": tuple(columns),
            "renamed": recipe.columns | source.columns,
            "pattern": source.pattern or recipe.pattern,
        }
        next(_read(**options), None)  # for its errors
        streams.append(clean(IterableDataset.from_generator(_read, gen_kwargs=options), recipe))
    return concatenate_datasets(streams) if len(streams) > 1 else streams[0]


def first_window(stream: IterableDataset, window: int) -> Dataset:
    """Return the first `window` examples of a stream."""
    return Dataset.from_list(list(islice(_again_and_again(stream), window)))


def _read(
    path: Path, format: str, columns: Sequence[str], renamed: dict[str, str], pattern: str | None
) -> Iterator[dict]:
    """Yield the examples of a file one after another, as `load_split` would give them all at once."""
    if format in ROWS:
        names = [renamed.get(column, column) for column in columns]
        rows = ROWS[format](path, stream_lines(path), names, pattern)
    else:
        rows = _rows_of_builder(path, format)
    chosen = None
    for number, row in enumerate(rows, start=1):
        chosen = chosen or name_columns(list(row), path, columns, renamed)
        for name, column in chosen.items():
            check_value(row[name], column, f"data file '{path}', row {number}: column '{name}'")
        yield {column: row[name] for name, column in chosen.items()}
    if chosen is None:
        raise UserError(f"data file '{path}' has no examples")


def _rows_of_builder(path: Path, builder: str) -> Iterator[dict]:
    try:
        yield from load_dataset(builder, data_files=str(path), split="train", streaming=True)
    except (DatasetGenerationError, EOFError, OSError, TypeError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"data file '{path}' is no {builder} table: {reason}") from error


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
        yield from stream
