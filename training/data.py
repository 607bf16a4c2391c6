"""Examples from local files.

| format | an example is | file endings |
|---|---|---|
| `lines` | a line: one text, or what the named groups of a `pattern` match | any other, and with a pattern |
| `document` | the whole file, one text | |
| `tsv` | a line, its columns between tabs in the objective's order | `.tsv` |
| `table` | a row between tabs under a header line | |
| `csv` | a row under a header line | `.csv` |
| `json`, `parquet` | a row with named columns | `.jsonl`, `.json`, `.parquet` |
| `conllu` | a sentence of Universal Dependencies: `tokens` (FORM), `labels` (UPOS) and `text` | `.conllu` |
| `babi` | a story of bAbI (Weston et al. 2016): `tokens`, and as `labels` each answer at its question's `?` | |
| `idx` | a row of an array of bytes, as MNIST has them (LeCun 1998): a label, or an image | |

Files given side by side hold a column each: line N of each is an example, or row N of each `idx`. Each but parquet may
be gzipped (`.gz`). Text is UTF-8.
"""

import csv
import gzip
import hashlib
import math
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

from triptych.training.dates import generate_dates
from triptych.training.digits import SPOKEN_DIGITS, generate_moving, generate_sequences, load_spoken, load_written
from triptych.training.errors import UserError, unknown_name
from triptych.training.recall import as_pairs, generate_recall
from triptych.training.recipe import DataRecipe, SourceRecipe

# Variables that stand for folders in the names of files: the folder where one is unset, and what lies there.
FOLDERS = {
    "TRIPTYCH_DATA": ("../shared/data", "the data folder"),
    "FASHION_MNIST": ("/usr/share/datasets/fashion-mnist", "the folder of Debian's package dataset-fashion-mnist"),
}
FORMAT_OF_ENDING = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".conllu": "conllu",
}
NOT_TEXT = ("label", "labels", "answer_start", "image", "video", "audio")
LIST_COLUMNS = ("tokens", "labels", "choices", "video")  # a list of texts; every other column is a text


def load_split(
    recipe: DataRecipe, split: str, columns: Sequence[str], optional: Sequence[str] = (), seed: int = 1
) -> Dataset:
    """Return one split's examples.

    Args:
        recipe: where the examples come from.
        split: a name in `recipe.splits`, or of generated data.
        columns: what the objective reads, in its order; the dataset has these columns, texts or lists of texts.
        optional: columns that the dataset has too where its files do.
        seed: of generated data; files do not depend on it.

    Raises:
        UserError: an unknown split, or a file that is missing, empty, not UTF-8 or malformed.
    """
    known = recipe.named_splits()
    if split not in known:
        raise unknown_name("data split", split, known)
    if recipe.dates:
        return generate_dates(split, recipe.dates[split], seed)
    if recipe.recall.sizes:
        rows = generate_recall(split, recipe.recall, seed)
        return as_pairs(rows) if "source" in columns else rows
    if recipe.digits:
        return load_written(recipe.digits[split])
    if recipe.moving_digits:
        return generate_moving(split, recipe.moving_digits[split], seed)
    if recipe.spoken_sequences:
        return generate_sequences(find_file(SPOKEN_DIGITS), split, recipe.spoken_sequences[split], seed)
    if recipe.spoken_digits:
        numbers = recipe.spoken_digits[split]
        return load_spoken(find_file(SPOKEN_DIGITS), numbers, recipe.held_out_speaker, split)
    return load_files(known[split], columns, optional, recipe)


def load_files(
    files: str | list[str] | list[SourceRecipe],
    columns: Sequence[str],
    optional: Sequence[str] = (),
    recipe: DataRecipe | None = None,
) -> Dataset:
    """Return the examples of a split as a recipe writes it, one source after another."""
    recipe = recipe or DataRecipe()
    parts = [clean(_read(source, columns, optional, recipe), recipe) for source in list_sources(files, columns)]
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def list_sources(files: str | list[str] | list[SourceRecipe], columns: Sequence[str]) -> list[SourceRecipe]:
    """Return the sources of a split as a recipe writes it: a list of files is one source if it has several columns."""
    entries = [files] if isinstance(files, str) else files
    if not entries or any(isinstance(entry, SourceRecipe) and not entry.file for entry in entries):
        raise UserError(f"recipe key 'data.splits' must name a file for each split and source, not {files}")
    if len(columns) > 1 and len(entries) > 1 and all(isinstance(entry, str) for entry in entries):
        entries = [SourceRecipe(file=entries)]
    return [SourceRecipe(file=entry) if isinstance(entry, str) else entry for entry in entries]


def format_of(path: Path, source: SourceRecipe, recipe: DataRecipe) -> str:
    """Return the format of a file: the one given, or what its ending says; with a pattern, its lines."""
    ending = "" if source.pattern or recipe.pattern else Path(path.name.removesuffix(".gz")).suffix
    format = source.format or recipe.format or FORMAT_OF_ENDING.get(ending, "lines")
    if format not in READERS:
        raise unknown_name("data format", format, READERS)
    return format


def find_file(name: str) -> Path:
    """Return the path that `name` stands for, with a variable of `FOLDERS`, such as `$TRIPTYCH_DATA`, filled in.

    Raises:
        UserError: there is no such file; where its folder is a variable's, what to set that to.
    """
    hint = ""
    for variable, (default, what) in FOLDERS.items():
        if f"${variable}" in name:
            folder = os.environ.get(variable, default)
            name = name.replace(f"${variable}", folder)
            hint = f": set {variable} to {what} (now '{folder}')"
    path = Path(name).expanduser()
    if path.is_file():
        return path
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise UserError(f"data file '{path}' {problem}{hint}")


def read_bytes(path: Path) -> bytes:
    """Return what a file holds, plain or gzipped.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(path) as file:
        return file.read()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, plain or gzipped; what is wrong with reading it is a `UserError`."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"data file '{path}' cannot be read: {error}") from error


def _not_utf8(path: Path, line: int, byte: int) -> UserError:
    return UserError(f"data file '{path}', line {line}: byte 0x{byte:02x} is not UTF-8")


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, plain or gzipped.

    Raises:
        UserError: the file cannot be read, is empty, or is not UTF-8 (the line is named).
    """
    raw = read_bytes(path)
    if not raw.strip():
        raise UserError(f"data file '{path}' is empty")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _not_utf8(path, line, raw[error.start]) from error


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file as `read_text` reads it, without their ends.

    Raises:
        UserError: as `stream_lines`, and the file is empty.
    """
    lines = list(stream_lines(path))
    if not any(map(str.strip, lines)):
        raise UserError(f"data file '{path}' is empty")
    return lines


def stream_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, plain or gzipped, without their ends.

    Only a line feed (or carriage return and line feed) ends a line: text may hold other Unicode separators.

    Raises:
        UserError: the file cannot be read, or is not UTF-8 (the line is named).
    """
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, raw[error.start]) from error
            yield line.removesuffix("\n").removesuffix("\r")


def read_idx(path: Path) -> list[np.ndarray]:
    """Return the rows of an array of unsigned bytes in the IDX format, plain or gzipped: numbers, or rows of pixels.

    Raises:
        UserError: the file cannot be read, is of another format, or is not as long as it says.
    """
    raw = read_bytes(path)
    dimensions = raw[3] if raw.startswith(b"\0\0\x08") and len(raw) > 3 else 0
    start = 4 + 4 * dimensions
    if not dimensions or len(raw) < start:
        raise UserError(f"data file '{path}' is no IDX file of unsigned bytes")
    shape = [int(size) for size in np.frombuffer(raw[4:start], ">u4")]
    if len(raw) - start != math.prod(shape):
        raise UserError(f"data file '{path}' has {len(raw) - start:,} values, but says {math.prod(shape):,}")
    return list(np.frombuffer(raw[start:], np.uint8).reshape(shape))


def digest_of(datasets: Iterable[Dataset]) -> str:
    """Return a hash of all that the columns of `datasets` hold, texts and numbers."""
    digest = hashlib.sha256()
    for dataset in datasets:
        table = dataset.with_format("arrow")[:]
        for name in sorted(table.column_names):
            values = table[name].combine_chunks()
            digest.update(name.encode())
            while pa.types.is_list(values.type):
                digest.update(np.diff(values.offsets.to_numpy()).tobytes())
                values = values.flatten()
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                digest.update("\0".join(str(value) for value in values.to_pylist()).encode())
            else:
                digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _read(source: SourceRecipe, columns: Sequence[str], optional: Sequence[str], recipe: DataRecipe) -> Dataset:
    names = [source.file] if isinstance(source.file, str) else source.file
    paths = [find_file(name) for name in names]
    renamed = recipe.columns | source.columns
    format = format_of(paths[0], source, recipe)
    if len(paths) > 1:
        dataset = _read_side_by_side(paths, [*columns, *optional][: max(len(columns), len(paths))], format)
    else:
        names = [renamed.get(column, column) for column in columns]
        dataset = READERS[format](paths[0], names, source.pattern or recipe.pattern)
    present = [column for column in optional if {column, renamed.get(column)} & set(dataset.column_names)]
    dataset = _choose_columns(dataset, paths[0], [*columns, *present], renamed)
    return _take_part(dataset, source.part) if source.part else dataset


def _read_side_by_side(paths: list[Path], columns: Sequence[str], format: str) -> Dataset:
    if len(paths) != len(columns):
        raise UserError(
            f"files side by side are one for each of the columns {', '.join(columns)}, but {len(paths)} are given"
        )
    read, what = (read_idx, "rows") if format == "idx" else (read_lines, "lines")
    values = [read(path) for path in paths]
    for path, own in zip(paths, values, strict=True):
        if len(own) != len(values[0]):
            raise UserError(
                f"files side by side need equally many {what}, but '{paths[0]}' has {len(values[0])} and "
                f"'{path}' {len(own)}"
            )
    return Dataset.from_dict(dict(zip(columns, values, strict=True)))


def _rows_by_pattern(path: Path, lines: Iterable[str], columns: list[str], pattern: str | None) -> Iterator[dict]:
    if pattern is None and len(columns) == 1:
        pattern = f"(?P<{columns[0]}>.*)"
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise UserError(f"pattern '{pattern}' of data file '{path}' is no regular expression: {error}") from error
    if not expression.groupindex:
        raise UserError(
            f"data file '{path}' needs a pattern with a named group for each of the columns {', '.join(columns)}"
        )
    for number, line in enumerate(lines, start=1):
        match = expression.fullmatch(line)
        if match is None:
            raise UserError(f"data file '{path}', line {number} does not match the pattern '{pattern}'")
        yield match.groupdict()


def _rows_of_tsv(path: Path, lines: Iterable[str], columns: list[str], _: Any) -> Iterator[dict]:
    for number, line in enumerate(lines, start=1):
        row = line.split("\t")
        if len(row) != len(columns):
            raise UserError(
                f"data file '{path}', line {number}: has {_count_columns(row)}, but an example is "
                f"{', tab, '.join(columns)}"
            )
        yield dict(zip(columns, row, strict=True))


def _rows_of_table(path: Path, lines: Iterable[str], *_: Any) -> Iterator[dict]:
    return _rows_under_header(path, csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def _rows_of_csv(path: Path, lines: Iterable[str], *_: Any) -> Iterator[dict]:
    # Read here and not by pandas, which turns 007 into a number, and a row that ends early into empty text.
    return _rows_under_header(path, csv.reader((line + "\n" for line in lines), strict=True))


def _rows_under_header(path: Path, reader: Any) -> Iterator[dict]:
    csv.field_size_limit(sys.maxsize)  # a field may be a whole document
    try:
        header = next(reader, [])
        for row in reader:
            if len(row) != len(header):
                problem = f"has {_count_columns(row)}, but the header {_count_columns(header)}"
                raise UserError(f"data file '{path}', line {reader.line_num}: {problem}")
            yield dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"data file '{path}', line {reader.line_num}: {error}") from error


def _count_columns(row: list[str]) -> str:
    return f"{len(row)} column{'s' * (len(row) != 1)}"


# Formats whose rows can be read one after the other.
ROWS = {"lines": _rows_by_pattern, "tsv": _rows_of_tsv, "table": _rows_of_table, "csv": _rows_of_csv}


def _read_rows(format: str, path: Path, columns: list[str], pattern: str | None) -> Dataset:
    return Dataset.from_list(list(ROWS[format](path, read_lines(path), columns, pattern)))


def _read_document(path: Path, columns: list[str], _: Any) -> Dataset:
    return Dataset.from_dict({columns[0]: [read_text(path)]})


def _read_json(path: Path, *_: Any) -> Dataset:
    read_text(path)  # for its errors, which name the line
    return _load_table(path, "json")


def _read_parquet(path: Path, *_: Any) -> Dataset:
    return _load_table(path, "parquet")


def _load_table(path: Path, builder: str) -> Dataset:
    try:
        return load_dataset(builder, data_files=str(path), split="train")
    except (DatasetGenerationError, OSError, ValueError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"data file '{path}' is no {builder} table: {reason}") from error


def _read_conllu(path: Path, *_: Any) -> Dataset:
    rows, tokens, labels, text = [], [], [], None
    for number, line in enumerate([*read_lines(path), ""], start=1):
        if not line and tokens:
            rows.append({"tokens": tokens, "labels": labels, "text": text or " ".join(tokens)})
            tokens, labels, text = [], [], None
        elif line.startswith("# text = "):
            text = line.removeprefix("# text = ")
        elif line and not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != 10:
                raise UserError(f"data file '{path}', line {number}: has {len(fields)} fields, but a word has 10")
            # 3-4 is a contraction of words 3 and 4, and 3.1 an elided word: neither is a word of the sentence.
            if fields[0].isdigit():
                tokens.append(fields[1])
                labels.append(fields[3])
    return Dataset.from_list(rows)


def _read_babi(path: Path, *_: Any) -> Dataset:
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        index, space, text = line.partition(" ")
        if not space or not index.isdigit() or (not rows and index != "1"):
            first = "" if rows else ", 1"
            raise UserError(f"data file '{path}', line {number} does not begin with the number of a sentence{first}")
        if index == "1":
            rows.append({"tokens": [], "labels": []})
        sentence, *answer = text.split("\t")
        tokens = re.findall(r"\w+|[^\w\s]", sentence)
        rows[-1]["tokens"] += tokens
        rows[-1]["labels"] += [""] * (len(tokens) - 1) + answer[:1] if answer else [""] * len(tokens)
    return Dataset.from_list(rows)


def _read_idx(path: Path, columns: list[str], _: Any) -> Dataset:
    return _read_side_by_side([path], columns, "idx")


READERS = {
    **{format: partial(_read_rows, format) for format in ROWS},
    "document": _read_document,
    "json": _read_json,
    "parquet": _read_parquet,
    "conllu": _read_conllu,
    "babi": _read_babi,
    "idx": _read_idx,
}


def _choose_columns(dataset: Dataset, path: Path, columns: Sequence[str], renamed: dict[str, str]) -> Dataset:
    chosen = name_columns(dataset.column_names, path, columns, renamed)
    for name, column in chosen.items():
        for number, value in enumerate(dataset[name], start=1):
            check_value(value, column, f"data file '{path}', row {number}: column '{name}'")
    return dataset.select_columns(list(chosen)).rename_columns(chosen)


def name_columns(present: Sequence[str], path: Path, columns: Sequence[str], renamed: dict[str, str]) -> dict[str, str]:
    """Return which of the columns that are `present` in a file are the objective's `columns`."""
    if not present:
        raise UserError(f"data file '{path}' has no examples")
    chosen = {column if column in present else renamed.get(column, column): column for column in columns}
    for name in chosen:
        if name not in present:
            raise UserError(f"data file '{path}' has no column '{name}': its columns are {', '.join(present)}")
    return chosen


def check_value(value: Any, column: str, where: str) -> None:
    if column in LIST_COLUMNS:
        fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
        expected = "a list of texts"
    elif column in ("label", "answer_start"):
        fits, expected = isinstance(value, str | int | float), "text or a number"
    elif column in ("image", "audio"):
        fits, expected = isinstance(value, str | list), "a path or numbers"
    else:
        fits, expected = isinstance(value, str), "text"
    if not fits:
        raise UserError(f"{where} holds {value!r}, not {expected}")


def _take_part(dataset: Dataset, part: list[float]) -> Dataset:
    if len(part) != 2 or not 0 <= part[0] < part[1] <= 1:
        raise UserError(f"recipe key 'part' must be two shares, such as [0, 0.9], not {part}")
    names = dataset.column_names
    is_one_text = len(dataset) == len(names) == 1
    parted = dataset[0][names[0]] if is_one_text else dataset  # of one text, the characters
    start, end = (int(share * len(parted)) for share in part)
    if start == end:
        raise UserError(f"recipe key 'part' is {part}, which is nothing of {len(parted)}")
    return Dataset.from_dict({names[0]: [parted[start:end]]}) if is_one_text else dataset.select(range(start, end))


def clean(dataset: Dataset | IterableDataset, recipe: DataRecipe) -> Dataset | IterableDataset:
    """Join subwords and lower-case, where the recipe says so."""
    if not recipe.joiner and not recipe.lowercase:
        return dataset
    present = dataset.column_names or next(iter(dataset))  # a stream need not know its columns
    names = [name for name in present if name not in NOT_TEXT]
    options = {"names": names, "joiner": recipe.joiner, "lowercase": recipe.lowercase}
    return dataset.map(_clean_columns, batched=True, fn_kwargs=options)


def _clean_columns(rows: dict[str, list], names: list[str], joiner: str | None, lowercase: bool) -> dict[str, list]:
    return {name: _clean_value(rows[name], joiner, lowercase) for name in names}


def _clean_value(value: str | list, joiner: str | None, lowercase: bool) -> str | list:
    if isinstance(value, list):
        return [_clean_value(text, joiner, lowercase) for text in value]
    value = re.sub(re.escape(joiner) + "( |$)", "", value) if joiner else value
    return value.lower() if lowercase else value
