"""Text pairs from local files.

| file | a pair is |
|---|---|
| two files | line N of the first and line N of the second |
| `.tsv` | a line: source, tab, target |
| `.csv`, `.jsonl`, `.parquet` | a row with a source and a target column |

Each but parquet may be gzipped (`.gz`). Text is UTF-8.
"""

import csv
import gzip
import os
import zlib
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from triptych.training.dates import generate_dates
from triptych.training.errors import UserError, unknown_name
from triptych.training.recipe import DataRecipe

DATA_VARIABLE = "TRIPTYCH_DATA"
TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_split(recipe: DataRecipe, split: str, seed: int) -> Dataset:
    """Return one split's text pairs, a dataset with the string columns `source` and `target`.

    Args:
        recipe: where the pairs come from.
        split: a name in `recipe.splits` or `recipe.dates`.
        seed: of generated data; files do not depend on it.

    Raises:
        UserError: an unknown split, or a file that is missing, empty, not UTF-8 or malformed.
    """
    known = recipe.dates or recipe.splits
    if split not in known:
        raise unknown_name("data split", split, known)
    if recipe.dates:
        return generate_dates(split, recipe.dates[split], seed)
    files = recipe.splits[split]
    return load_pairs([files] if isinstance(files, str) else files, recipe.columns)


def load_pairs(files: list[str], columns: list[str]) -> Dataset:
    """Return the text pairs of one table file, or of two parallel files (see the table above)."""
    paths = [find_file(file) for file in files]
    if len(paths) == 2:
        return _read_parallel(*paths)
    if len(paths) != 1:
        raise UserError(f"a data split is one file of pairs or two parallel files, not {len(paths)} files")
    suffix = Path(paths[0].name.removesuffix(".gz")).suffix
    if suffix == ".tsv":
        return _read_tsv(paths[0])
    if suffix == ".csv":
        return _read_csv(paths[0], columns)
    if suffix not in TABLE_BUILDERS:
        allowed = ", ".join([".tsv", ".csv", *TABLE_BUILDERS])
        raise UserError(f"data file '{paths[0]}' must end in one of {allowed} (or be one of two parallel files)")
    return _read_table(paths[0], TABLE_BUILDERS[suffix], columns)


def find_file(name: str) -> Path:
    """Return the path that `name` stands for, with `$TRIPTYCH_DATA` filled in.

    Where that variable is unset it is `../shared/data`, seen from the current folder.
    """
    folder = os.environ.get(DATA_VARIABLE, "../shared/data")
    path = Path(name.replace(f"${DATA_VARIABLE}", folder)).expanduser()
    if path.is_file():
        return path
    problem = "is a folder" if path.is_dir() else "does not exist"
    hint = f": set {DATA_VARIABLE} to the data folder (now '{folder}')" if DATA_VARIABLE in name else ""
    raise UserError(f"data file '{path}' {problem}{hint}")


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file, plain or gzipped, without their ends.

    Only a line feed (or carriage return and line feed) ends a line: text may hold other Unicode separators.

    Raises:
        UserError: the file cannot be read, is empty, or is not UTF-8 (the line is named).
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"data file '{path}' cannot be read: {error}") from error
    if not raw.strip():
        raise UserError(f"data file '{path}' is empty")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"data file '{path}', line {line}: byte 0x{raw[error.start]:02x} is not UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _read_parallel(source: Path, target: Path) -> Dataset:
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise UserError(
            f"parallel files need equally many lines, but '{source}' has {len(sources)} and '{target}' {len(targets)}"
        )
    return Dataset.from_dict({"source": sources, "target": targets})


def _read_tsv(path: Path) -> Dataset:
    rows = [line.split("\t") for line in read_lines(path)]
    for number, row in enumerate(rows, start=1):
        if len(row) != 2:
            raise UserError(
                f"data file '{path}', line {number}: has {_columns(row)}, but a pair is source, tab, target"
            )
    sources, targets = zip(*rows, strict=True)
    return Dataset.from_dict({"source": list(sources), "target": list(targets)})


def _read_csv(path: Path, columns: list[str]) -> Dataset:
    # Read here and not by pandas, which turns 007 into a number, and a row that ends early into empty text.
    reader = csv.reader((line + "\n" for line in read_lines(path)), strict=True)
    try:
        header = next(reader)
        rows = []
        for row in reader:
            if len(row) != len(header):
                problem = f"has {_columns(row)}, but the header {_columns(header)}"
                raise UserError(f"data file '{path}', line {reader.line_num}: {problem}")
            rows.append(row)
    except csv.Error as error:
        raise UserError(f"data file '{path}', line {reader.line_num}: {error}") from error
    return _choose_columns(Dataset.from_list([dict(zip(header, row, strict=True)) for row in rows]), path, columns)


def _columns(row: list[str]) -> str:
    return f"{len(row)} column{'s' * (len(row) != 1)}"


def _read_table(path: Path, builder: str, columns: list[str]) -> Dataset:
    if builder == "json":
        read_lines(path)  # for its errors, which name the line
    try:
        dataset = load_dataset(builder, data_files=str(path), split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"data file '{path}' is no {builder} table: {reason}") from error
    return _choose_columns(dataset, path, columns)


def _choose_columns(dataset: Dataset, path: Path, columns: list[str]) -> Dataset:
    for column in columns:
        if column not in dataset.column_names:
            present = ", ".join(dataset.column_names)
            raise UserError(f"data file '{path}' has no column '{column}': its columns are {present}")
        for number, text in enumerate(dataset[column], start=1):
            if not isinstance(text, str):
                raise UserError(f"data file '{path}', row {number}: column '{column}' holds {text!r}, not text")
    return dataset.select_columns(columns).rename_columns(dict(zip(columns, ("source", "target"), strict=True)))
