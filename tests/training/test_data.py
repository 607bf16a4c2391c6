import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from triptych.training.data import load_pairs, load_split
from triptych.training.errors import UserError
from triptych.training.recipe import load_recipe

PAIRS = [("ein Haus", "a house"), ("007, NA", "line\u2028separator"), ("", 'quoted "word"')]
COLUMNS = ["source", "target"]


def write_tsv(path):
    path.write_bytes("".join(f"{source}\t{target}\r\n" for source, target in PAIRS).encode())
    return [path]


def write_tsv_gz(path):
    path = path.with_suffix(".tsv.gz")
    path.write_bytes(gzip.compress("\n".join("\t".join(pair) for pair in PAIRS).encode("utf-8-sig")))
    return [path]


def write_csv(path):
    rows = ['"007, NA","line\u2028separator"', "ein Haus,a house", ',"quoted ""word"""']
    path = path.with_suffix(".csv")
    path.write_text("\n".join(["source,target", rows[1], rows[0], rows[2]]) + "\n", encoding="utf-8")
    return [path]


def write_json_lines(path):
    path = path.with_suffix(".jsonl.gz")
    rows = [json.dumps({"n": 1, "source": source, "target": target}) for source, target in PAIRS]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return [path]


def write_parquet(path):
    path = path.with_suffix(".parquet")
    columns = [list(column) for column in zip(*PAIRS, strict=True)]
    pyarrow.parquet.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True))), path)
    return [path]


def write_parallel(path):
    paths = [path.with_suffix(".de"), path.with_suffix(".en.gz")]
    sources, targets = ("\n".join(column) + "\n" for column in zip(*PAIRS, strict=True))
    paths[0].write_text(sources, encoding="utf-8")
    paths[1].write_bytes(gzip.compress(targets.encode()))
    return paths


@pytest.mark.parametrize("write", [write_tsv, write_tsv_gz, write_csv, write_json_lines, write_parquet, write_parallel])
def test_every_format_gives_the_same_pairs(tmp_path, write):
    dataset = load_pairs([str(path) for path in write(tmp_path / "pairs.tsv")], COLUMNS)
    assert list(zip(dataset["source"], dataset["target"], strict=True)) == PAIRS


def test_columns_are_chosen_by_name(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "a", "de": "b", "fr": "c"}\n')
    dataset = load_pairs([str(path)], ["de", "fr"])
    assert dataset[:] == {"source": ["b"], "target": ["c"]}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.tsv", b"", "is empty"),
        ("a.tsv", b"\n \n", "is empty"),
        ("a.tsv", b"one\ttwo\nthree\n", "line 2: has 1 column, but a pair is source, tab, target"),
        ("a.tsv", b"one\ttwo\tthree\n", "line 1: has 3 columns"),
        ("a.tsv", b"one\ttwo\nd\xe9j\xe0\tvu\n", "line 2: byte 0xe9 is not UTF-8"),
        ("a.csv", b"source,target\nd\xe9j\xe0,vu\n", "line 2: byte 0xe9 is not UTF-8"),
        ("a.csv", b"source,other\na,b\n", "has no column 'target': its columns are source, other"),
        ("a.csv", b"source,target\na,b\nc\n", "line 3: has 1 column, but the header 2 columns"),
        ("a.csv", b"source,target\na,b\nc,d,e\n", "line 3: has 3 columns, but the header 2 columns"),
        ("a.csv", b'source,target\na,"b\n', "line 2: unexpected end of data"),
        ("a.jsonl", b'{"source": "a"}\n', "has no column 'target': its columns are source"),
        ("a.jsonl", b'{"source": "a", "target": 5}\n', "row 1: column 'target' holds 5, not text"),
        ("a.jsonl", b'{"source": \n', "is no json table"),
        ("a.parquet", b"junk", "is no parquet table"),
        ("a.tsv.gz", b"junk", "cannot be read"),
        ("a.docx", b"junk", "must end in one of .tsv, .csv, .jsonl, .json, .parquet"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_pairs([str(path)], COLUMNS)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_parallel_files_of_unequal_length_name_both_counts(tmp_path):
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    with pytest.raises(UserError, match=r"a\.de' has 2 and '.*a\.en' 3"):
        load_pairs([str(tmp_path / "a.de"), str(tmp_path / "a.en")], COLUMNS)


def test_missing_corpora_name_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIPTYCH_DATA", str(tmp_path / "nowhere"))
    recipe = load_recipe("multi30k_en_de")
    with pytest.raises(UserError, match=r"train\.en\.gz' does not exist: set TRIPTYCH_DATA .*nowhere"):
        load_split(recipe.data, "train", seed=1)


def test_an_unknown_split_suggests_the_nearest():
    recipe = load_recipe("multi30k_en_de")
    with pytest.raises(UserError, match="data split 'test2016' is unknown: did you mean 'test_2016'"):
        load_split(recipe.data, "test2016", seed=1)


@pytest.mark.data
def test_multi30k_has_its_counts(monkeypatch, data_folder):
    monkeypatch.setenv("TRIPTYCH_DATA", str(data_folder))
    recipe = load_recipe("multi30k_en_de")
    counts = [load_split(recipe.data, split, seed=1).num_rows for split in recipe.data.splits]
    assert counts == [29000, 1014, 1000, 1000]
