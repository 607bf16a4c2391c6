import gzip
import json
from itertools import chain

import numpy as np
import pytest
from datasets import Dataset

from triptych.training.building import build_parts
from triptych.training.data import load_files
from triptych.training.errors import UserError
from triptych.training.recipe import DataRecipe, load_recipe
from triptych.training.reporting import RunLog, read_metrics
from triptych.training.run import train
from triptych.training.streaming import StreamedExamples, first_window, open_stream

TEXTS = [f"Text {number}" for number in range(10)]


def write_lines(folder):
    (folder / "a.txt").write_text("\n".join(TEXTS[:6]) + "\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress(("\n".join(TEXTS[6:]) + "\n").encode()))
    return [str(folder / name) for name in ("a.txt", "b.txt.gz")]


def write_json_lines(folder):
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps({"n": 1, "body": text}) for text in TEXTS).encode()))
    return str(path)


def write_csv(folder):
    path = folder / "a.csv"
    path.write_text("\n".join(["n,body", *(f"1,{text}" for text in TEXTS)]) + "\n")
    return str(path)


def make_examples(stream, window):
    seen = []

    def encode(examples):
        seen.append(examples["text"][:])
        return Dataset.from_dict({"input_ids": [[int(text.split()[1])] for text in examples["text"]]})

    return StreamedExamples(stream, window, encode, lambda rows: np.ones((1, len(rows)), int), seed=1), seen


@pytest.mark.parametrize("write", [write_lines, write_json_lines, write_csv])
def test_windows_follow_each_other_and_the_first_follows_the_last(tmp_path, write):
    recipe = DataRecipe(splits={"train": write(tmp_path)}, columns={"text": "body"}, lowercase=True)
    examples, seen = make_examples(open_stream(recipe, "train", ["text"]), 4)
    for epoch in range(4):
        examples.set_epoch(epoch)
        assert len(examples) == 4
    assert [*chain(*seen)] == [text.lower() for text in TEXTS * 2][:16]
    # A training that goes on in window 2, or goes back, reads the same.
    for epoch in (2, 1, 3):
        again, _ = make_examples(open_stream(recipe, "train", ["text"]), 4)
        again.set_epoch(epoch)
        examples.set_epoch(epoch)
        assert again[0] == examples[0]
        assert again[0]["input_ids"] == [epoch * 4 % 10]


def make_recipe(tmp_path, *changes):
    text = "abcdef"
    (tmp_path / "texts.txt").write_text("\n".join(" ".join(text[i % 6 :] + text) for i in range(60)) + "\n")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "objective: {type: causal_lm}\n"
        f"data: {{splits: {{train: {tmp_path}/texts.txt, validation: {tmp_path}/texts.txt}}, window: 25}}\n"
        "tokenizer: {type: char}\n"
        "model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "max_steps: 12\nlog_every: 1\nmax_tokens: 128\nreport_to: []\nsave_every: 5\n"
        f"output: {tmp_path / 'run'}\n"
    )
    return load_recipe(str(path), changes)


def losses_of(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_a_training_goes_on_in_the_window_where_it_stopped(tmp_path, monkeypatch):
    whole = train(make_recipe(tmp_path, "save_every=100"))
    rows = read_metrics(whole.folder / "metrics.jsonl")
    assert max(row.get("epoch", 0) for row in rows) >= 2

    def stop(log, step, loss):
        if step == 8:
            raise RuntimeError("power cut")

    cut = make_recipe(tmp_path, f"output={tmp_path / 'cut'}")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(RunLog, "advance", stop)
        train(cut)
    train(cut)
    assert losses_of(tmp_path / "cut") == losses_of(whole.folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("data.format=document", "as only whole files of the formats lines, tsv, table, csv, json, parquet are read"),
        ("objective.type=next_sentence", "'data.window' must be null, as next_sentence has to see all examples"),
        ("tokenizer.dropout=0.1", "'tokenizer.dropout' must be 0, unless the objective is seq2seq"),
        ("data.splits.train=none.txt", "data file 'none.txt' does not exist"),
    ],
)
def test_what_cannot_be_read_in_windows_is_refused(tmp_path, change, sentence):
    with pytest.raises(UserError) as error:
        build_parts(make_recipe(tmp_path, change), processes=1)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"\xef\xbb\xbfone\r\ntwo\x0b\xe2\x80\xa8 and\rmore\n\nlast"),
        ("a.csv", b'text\r\n007\r\n1e3\r\nNA\r\n"in\r\nquotes"\r\n'),
        ("a.csv", b"\xef\xbb\xbftext\n" + b"long " * 50_000 + b"\n"),
        ("a.jsonl", b'{"text": "1"}\r\n{"text": "b"}\n'),
    ],
)
def test_a_window_holds_what_the_whole_file_does(tmp_path, name, content):
    """Read by pandas, 007 is a number and NA no text; text files break their lines at other marks too."""
    path = tmp_path / name
    path.write_bytes(content)
    whole = load_files(str(path), ["text"])[:]
    stream = open_stream(DataRecipe(splits={"train": str(path)}), "train", ["text"])
    assert first_window(stream, len(whole["text"]))[:] == whole


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"a\ncaf\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        ("a.txt", b"", "has no examples"),
        # without a time in it, as each process that runs tests must know them by one name
        ("a.txt.gz", gzip.compress(b"a\nb\n" * 10_000, mtime=0)[:-20], "cannot be read: Compressed file ended before"),
        ("a.csv", b"text,label\na\n", "line 2: has 1 column, but the header 2 columns"),
        ("a.csv", b"text\n", "has no examples"),
        ("a.csv", b"", "has no examples"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "row 2: column 'text' holds None, not text"),
        ("a.jsonl", b'{"text": 7}\n', "row 1: column 'text' holds 7, not text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "is no json table"),
    ],
)
def test_a_bad_stream_is_named_with_what_is_wrong(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        first_window(open_stream(DataRecipe(splits={"train": str(path)}), "train", ["text"]), 20_001)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_column_is_named(tmp_path):
    recipe = DataRecipe(splits={"train": write_csv(tmp_path)})
    with pytest.raises(UserError, match=r"a\.csv' has no column 'text': its columns are n, body"):
        open_stream(recipe, "train", ["text"])
