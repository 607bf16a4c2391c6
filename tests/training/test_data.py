import gzip
import json
import struct

import pyarrow as pa
import pyarrow.parquet
import pytest

from triptych.training.data import load_files, load_split
from triptych.training.errors import UserError
from triptych.training.recipe import DataRecipe, SourceRecipe, load_recipe

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
    dataset = load_files([str(path) for path in write(tmp_path / "pairs.tsv")], COLUMNS)
    assert list(zip(dataset["source"], dataset["target"], strict=True)) == PAIRS


def test_columns_are_chosen_by_name(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "a", "de": "b", "fr": "c"}\n')
    recipe = DataRecipe(columns={"source": "de", "target": "fr"})
    assert load_files(str(path), COLUMNS, recipe=recipe)[:] == {"source": ["b"], "target": ["c"]}
    one = SourceRecipe(file=str(path), columns={"target": "en"})  # on top of the recipe's
    assert load_files([one, one], COLUMNS, recipe=recipe)[:] == {"source": ["b", "b"], "target": ["a", "a"]}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.tsv", b"", "is empty"),
        ("a.tsv", b"\n \n", "is empty"),
        ("a.tsv", b"one\ttwo\nthree\n", "line 2: has 1 column, but an example is source, tab, target"),
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
        ("a.csv", b"source,target\n", "has no examples"),
        ("a.conllu", b"# nothing but a comment\n", "has no examples"),
        ("a.docx", b"junk", "needs a pattern with a named group for each of the columns source, target"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_files([str(path)], COLUMNS)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_field_of_a_table_may_be_a_long_document(tmp_path):
    """Python's csv refuses fields above 131,072 characters unless told otherwise."""
    (tmp_path / "a.csv").write_text("source,target\n" + "x" * 200_000 + ",y\n")
    (row,) = load_files(str(tmp_path / "a.csv"), COLUMNS)
    assert len(row["source"]) == 200_000


@pytest.mark.parametrize("files", [[], [SourceRecipe(file=[])]])
def test_a_split_without_files_is_refused(files):
    with pytest.raises(UserError, match=r"'data\.splits' must name a file for each split and source"):
        load_files(files, COLUMNS)


def test_parallel_files_of_unequal_length_name_both_counts(tmp_path):
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    with pytest.raises(UserError, match=r"a\.de' has 2 and '.*a\.en' 3"):
        load_files([str(tmp_path / "a.de"), str(tmp_path / "a.en")], COLUMNS)


def idx(values, shape):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(values)


def test_arrays_in_the_format_of_mnist(tmp_path):
    (tmp_path / "images").write_bytes(idx(range(12), (2, 3, 2)))
    (tmp_path / "labels.gz").write_bytes(gzip.compress(idx([7, 9], (2,))))
    pair = [str(tmp_path / "images"), str(tmp_path / "labels.gz")]
    recipe = DataRecipe(format="idx")
    examples = load_files(pair, ("image", "label"), recipe=recipe)[:]
    assert examples == {"image": [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]], "label": [7, 9]}
    (tmp_path / "images").write_bytes(idx(range(6), (1, 3, 2)))
    with pytest.raises(UserError, match=r"equally many rows, but '.*images' has 1 and '.*labels\.gz' 2"):
        load_files(pair, ("image", "label"), recipe=recipe)
    with pytest.raises(UserError, match="one for each of the columns image, label, but 1 are given"):
        load_files(pair[:1], ("image", "label"), recipe=recipe)
    for content, sentence in (
        (b"", "is no IDX file of unsigned bytes"),
        (b"\0\0\x08", "is no IDX file of unsigned bytes"),
        (b"\0\0\x08\3\0\0", "is no IDX file of unsigned bytes"),
        (b"\0\0\x0b\1\0\0\0\0", "is no IDX file of unsigned bytes"),
        (idx(range(5), (1, 3, 2)), "has 5 values, but says 6"),
    ):
        (tmp_path / "images").write_bytes(content)
        with pytest.raises(UserError, match=rf"images' {sentence}"):
            load_files(pair, ("image", "label"), recipe=recipe)


def test_images_in_a_table_are_paths_or_pixels(tmp_path):
    path = tmp_path / "images.jsonl"
    path.write_text('{"image": [[0, 255]], "label": "a"}\n')
    assert load_files(str(path), ("image", "label"))[:] == {"image": [[[0, 255]]], "label": ["a"]}
    path.write_text('{"image": 5, "label": "a"}\n')
    with pytest.raises(UserError, match="row 1: column 'image' holds 5, not a path or numbers"):
        load_files(str(path), ("image", "label"))


def test_clothes_say_which_package_has_them(monkeypatch, tmp_path):
    monkeypatch.setenv("FASHION_MNIST", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"train-images.* set FASHION_MNIST .* package dataset-fashion-mnist .*nowhere"):
        load_split(load_recipe("fashion_mnist").data, "train", ("image", "label"))


def read(tmp_path, content, wanted, **source):
    path = tmp_path / source.pop("name", "file.txt")
    path.write_text(content, encoding="utf-8")
    optional = source.pop("optional", ())
    return load_files([SourceRecipe(file=str(path), **source)], wanted, optional)[:]


def test_a_pattern_names_its_columns(tmp_path):
    content = "1 so good\n0 so bad\n"
    pattern = "(?P<label>[01]) (?P<text>.*)"
    # With a pattern, the file's ending says nothing.
    rows = read(tmp_path, content, ["text", "label"], pattern=pattern, name="file.tsv")
    assert rows == {"text": ["so good", "so bad"], "label": ["1", "0"]}
    with pytest.raises(UserError, match=r"file.txt', line 2 does not match the pattern '1 \(\?P<text>\.\*\)'"):
        read(tmp_path, content, ["text"], pattern="1 (?P<text>.*)")
    with pytest.raises(UserError, match=r"pattern '\(' of data file '.*' is no regular expression"):
        read(tmp_path, content, ["text"], pattern="(")
    with pytest.raises(UserError, match="has no column 'label': its columns are text"):
        read(tmp_path, content, ["text", "label"], pattern="(?P<text>.*)")
    with pytest.raises(UserError, match="needs a pattern with a named group for each of the columns text"):
        read(tmp_path, content, ["text"], pattern=".*")


def test_one_text_a_line_and_one_text_a_file(tmp_path):
    assert read(tmp_path, "a b\n\nc\n", ["text"]) == {"text": ["a b", "", "c"]}
    assert read(tmp_path, "a b\nc\n", ["text"], format="document") == {"text": ["a b\nc\n"]}
    paths = [tmp_path / name for name in "xy"]
    for path in paths:
        path.write_text(path.name)
    # Side by side where there are several columns, one after the other where there is one.
    names = [str(path) for path in paths]
    assert load_files(names, ["text"])[:] == {"text": ["x", "y"]}
    assert load_files(names, COLUMNS)[:] == {"source": ["x"], "target": ["y"]}


def test_parts_of_a_file(tmp_path):
    content = "".join(f"{number}\n" for number in range(10))
    first, rest = (read(tmp_path, content, ["text"], part=part)["text"] for part in ([0, 0.7], [0.7, 1]))
    assert first + rest == [str(number) for number in range(10)]
    assert len(first) == 7
    text = read(tmp_path, "abcdefghij", ["text"], format="document", part=[0.9, 1])
    assert text == {"text": ["j"]}  # of one text, the characters
    with pytest.raises(UserError, match=r"'part' must be two shares, such as \[0, 0.9\], not \[0.9, 0.1\]"):
        read(tmp_path, content, ["text"], part=[0.9, 0.1])
    with pytest.raises(UserError, match=r"'part' is \[0, 0.01\], which is nothing of 10"):
        read(tmp_path, content, ["text"], part=[0, 0.01])
    pair = read(tmp_path, "a\tb\n", COLUMNS, part=[0, 1], name="one.tsv")
    assert pair == {"source": ["a"], "target": ["b"]}  # one example is not always one text


def test_a_table_under_a_header_line(tmp_path):
    content = 'id\tA\tB\tscore\n1\tsay "hi\tb\t4.5\n'
    columns = {"text": "A", "text_pair": "B", "label": "score"}
    expected = {"text": ['say "hi'], "label": ["4.5"], "text_pair": ["b"]}
    assert (
        read(tmp_path, content, ["text", "label"], format="table", columns=columns, optional=["text_pair"]) == expected
    )
    del columns["text_pair"], expected["text_pair"]
    assert (
        read(tmp_path, content, ["text", "label"], format="table", columns=columns, optional=["text_pair"]) == expected
    )


CONLLU = """# sent_id = 1
# text = Don't go.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tthere\t_\tADV\t_\t_\t_\t_\t_\t_

1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_
"""


def test_sentences_of_universal_dependencies(tmp_path):
    rows = read(tmp_path, CONLLU, ["tokens", "labels"], name="a.conllu")
    assert rows == {"tokens": [["Do", "n't", "go"], ["Yes"]], "labels": [["AUX", "PART", "VERB"], ["INTJ"]]}
    assert read(tmp_path, CONLLU, ["text"], name="a.conllu") == {"text": ["Don't go.", "Yes"]}
    with pytest.raises(UserError, match="line 1: has 2 fields, but a word has 10"):
        read(tmp_path, "1\tDo\n", ["tokens", "labels"], name="a.conllu")


def test_stories_with_their_questions(tmp_path):
    content = "1 Mary went home.\n2 Where is Mary?\thome\t1\n3 She's left.\n4 Where?\tn,w\t1 3\n1 Hi.\n"
    rows = read(tmp_path, content, ["tokens", "labels"], format="babi")
    first, second = (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))
    assert " ".join(first["tokens"]) == "Mary went home . Where is Mary ? She ' s left . Where ?"
    assert {place: label for place, label in enumerate(first["labels"]) if label} == {7: "home", 14: "n,w"}
    assert second == {"tokens": ["Hi", "."], "labels": ["", ""]}
    for content in ("Hi.\n", "2 Hi.\n"):
        with pytest.raises(UserError, match="line 1 does not begin with the number of a sentence, 1"):
            read(tmp_path, content, ["tokens", "labels"], format="babi")


def test_subwords_are_joined_and_text_lower_cased(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("1 Two pul@@ leys end@@\n")
    recipe = DataRecipe(joiner="@@", lowercase=True, pattern="(?P<label>.) (?P<text>.*)")
    assert load_files(str(path), ["text", "label"], recipe=recipe)[:] == {"text": ["two pulleys end"], "label": ["1"]}


def test_an_unknown_format_suggests_the_nearest(tmp_path):
    with pytest.raises(UserError, match="data format 'conll' is unknown: did you mean 'conllu'"):
        read(tmp_path, "a", ["text"], format="conll")


def test_missing_corpora_name_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIPTYCH_DATA", str(tmp_path / "nowhere"))
    recipe = load_recipe("multi30k_en_de")
    with pytest.raises(UserError, match=r"train\.en\.gz' does not exist: set TRIPTYCH_DATA .*nowhere"):
        load_split(recipe.data, "train", COLUMNS)


def test_an_unknown_split_suggests_the_nearest():
    recipe = load_recipe("multi30k_en_de")
    with pytest.raises(UserError, match="data split 'test2016' is unknown: did you mean 'test_2016'"):
        load_split(recipe.data, "test2016", COLUMNS)


@pytest.mark.data
def test_multi30k_has_its_counts(monkeypatch, data_folder):
    monkeypatch.setenv("TRIPTYCH_DATA", str(data_folder))
    recipe = load_recipe("multi30k_en_de")
    counts = [load_split(recipe.data, split, COLUMNS).num_rows for split in recipe.data.splits]
    assert counts == [29000, 1014, 1000, 1000]
