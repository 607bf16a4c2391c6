"""The command line: help that helps, and bad input as exit code 2 with one sentence and nothing written."""

import json
import os
import subprocess
import sys

import pytest

import triptych
from triptych.training.cli import app

DEEP = "[" * 100_000
GOOD = "".join(f"source {number}\ttarget {number}\n" for number in range(20))


@pytest.fixture
def pairs_recipe(tmp_path):
    """A recipe that trains a tiny model on `pairs.tsv` in the test's folder."""
    (tmp_path / "pairs.tsv").write_text(GOOD)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "data: {splits: {train: pairs.tsv, validation: pairs.tsv}}\n"
        "tokenizer: {type: char}\n"
        "model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "generation: {max_new_tokens: 5}\n"
        "max_steps: 2\n"
        "log_every: 1\n"
    )
    return path


def test_train_evaluate_generate(command, pairs_recipe, tmp_path):
    code, out, err = command("train", pairs_recipe)
    assert code == 0, err
    assert "runs/mine: validation loss" in out

    (tmp_path / "input.txt").write_text("source 1\nsource 2\n")
    code, out, err = command("generate", "runs/mine", "--input", "input.txt", "--num-beams", "2")
    assert code == 0, err
    assert len(out.splitlines()) == 2
    code, once, _ = command("generate", "runs/mine", "source 2", "--num-beams", "2")
    assert once.splitlines() == out.splitlines()[1:]
    code, out, _ = command("generate", "runs/mine", "source 2", "--num-beams", "2", "--json")
    assert json.loads(out) == {"source": "source 2", "text": once.rstrip("\n")}

    code, out, err = command("evaluate", "runs/mine")
    assert code == 0, err
    assert '"split": "validation", "examples": 20, "exact_match"' in out
    kept = json.loads((tmp_path / "runs/mine/evaluation.json").read_text())
    assert kept == {"validation": {name: value for name, value in json.loads(out).items() if name != "split"}}
    assert "| validation | 20 | exact_match |" in (tmp_path / "runs/mine/README.md").read_text()
    (tmp_path / "a.txt").write_text("source 1\n")
    code, out, err = command("evaluate", "runs/mine", "--data", "a.txt", "--data", "a.txt")
    assert code == 0, err
    assert '"split": "a.txt a.txt", "examples": 1' in out


def test_perplexity_can_be_of_longer_rows(command, tmp_path):
    """Rows of another length than in training are other predictions, but of the same text."""
    (tmp_path / "text.txt").write_text("".join(f"line {number * number}\n" for number in range(60)))
    (tmp_path / "mine.yaml").write_text(
        "objective: {type: causal_lm}\n"
        "data: {splits: {train: text.txt, validation: text.txt}, format: document, max_length: 9}\n"
        "tokenizer: {type: char}\n"
        "model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "max_steps: 2\nmax_tokens: 90\n"
    )
    assert command("train", "mine.yaml")[0] == 0
    scores = []
    for options in ((), ("--max-length", 9), ("--max-length", 300)):
        code, out, err = command("evaluate", "runs/mine", *options)
        assert code == 0, err
        scores.append(json.loads(out))
    assert scores[0] == scores[1] and scores[0]["perplexity"] != scores[2]["perplexity"]


BAD_DATA = [
    ({}, "data file 'missing.tsv' does not exist"),
    ({"missing.tsv": b""}, "data file 'missing.tsv' is empty"),
    ({"missing.tsv": b"a\tb\n\xff\tb\n"}, "data file 'missing.tsv', line 2: byte 0xff is not UTF-8"),
    ({"missing.tsv": b"a\tb\nc\n"}, "'missing.tsv', line 2: has 1 column, but an example is source, tab, target"),
]


@pytest.mark.parametrize(("files", "sentence"), BAD_DATA)
def test_bad_data_files(command, pairs_recipe, tmp_path, files, sentence):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert_refused(command, tmp_path, ["train", pairs_recipe, "data.splits.train=missing.tsv"], sentence)


def test_parallel_files_of_unequal_length(command, pairs_recipe, tmp_path):
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_text("1\n")
    arguments = ["train", pairs_recipe, "data.splits.train=[a, b]"]
    assert_refused(command, tmp_path, arguments, "'a' has 2 and 'b' 1")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "date"], "recipe 'date' is unknown: did you mean 'dates'?"),
        (["train", "mine.yaml", "max_step=5"], "recipe key 'max_step' is unknown: did you mean 'max_steps'?"),
        (["train", "mine.yaml", "max_steps=few"], "recipe key 'max_steps' must be a whole number, not 'few'"),
        (
            ["train", "mine.yaml", "model.hiden_size=5"],
            "'model.hiden_size' is unknown: did you mean 'model.hidden_size'?",
        ),
        (
            ["train", "mine.yaml", "model.encoder.num_layers=5"],
            "'model.encoder.num_layers' is unknown: did you mean 'model.encoder.num_hidden_layers'?",
        ),
        (["train", "mine.yaml", "model.norm_position=around"], "norm_position"),
        (["train", "mine.yaml", "model.hidden_size=wide"], "hidden_size"),
        (["train", "mine.yaml", "model.hidden_size=15"], "hidden_size"),
        (["train", "mine.yaml", "model.preset=tiniest"], "tiniest"),
        (["train", "mine.yaml", "generation.num_beams=0"], "num_beams"),
        (["train", "mine.yaml", "max_tokens=4"], "tokens, but max_tokens is 4"),
        (["train", "mine.yaml", "gradient_accumulation_steps=64"], "20 examples are too few: an update takes 64"),
        (["train", "mine.yaml", "tokenizer.path=nowhere"], "tokenizer 'nowhere' cannot be loaded"),
        (["train", "mine.yaml", "output=pairs.tsv"], "output 'pairs.tsv' needs a folder, but 'pairs.tsv' is a file"),
        (["train", "mine.yaml", "output=pairs.tsv/run"], "needs a folder, but 'pairs.tsv' is a file"),
        (["train", "mine.yaml", "output=."], "output folder '.' is not empty and holds no run: choose another"),
        (["generate", "nowhere", "text"], "model 'nowhere' cannot be loaded"),
        (["generate", "/nowhere", "text"], "model '/nowhere' cannot be loaded: there is no such folder, and no "),
        (["inspect", "/nowhere"], "model '/nowhere' cannot be loaded: there is no such folder, and no repository "),
        (["generate", "nowhere"], "needs texts or --input FILE"),
        (["generate", "nowhere", "--input", "none.txt"], "data file 'none.txt' does not exist"),
        (["evaluate", "nowhere"], "'nowhere' holds no recipe.yaml that names test data: give --data FILE"),
    ],
)
def test_bad_arguments(command, pairs_recipe, tmp_path, arguments, sentence):
    assert_refused(command, tmp_path, arguments, sentence)


def test_an_input_that_is_too_long_for_the_model(command, pairs_recipe, tmp_path):
    table = ["model.position_embedding_type=learned", "model.max_position_embeddings=12"]
    code, _, err = command("train", pairs_recipe, *table)
    assert code == 0, err
    sentence = "the model cannot read this input"
    assert_refused(command, tmp_path, ["generate", "runs/mine", "source " * 9], sentence)


def test_work_that_breaks_off_has_a_code_of_its_own(command, pairs_recipe, tmp_path):
    diverges = ["learning_rate=1e30", "warmup_steps=0", "max_grad_norm=", "max_steps=50"]
    assert_refused(command, tmp_path, ["train", pairs_recipe, *diverges], "the loss of", exit_code=1)


BROKEN = [
    ("config.json", "null"),
    ("config.json", DEEP),
    ("tokenizer.json", "[1]"),
    ("tokenizer.json", DEEP),
    ("tokenizer_config.json", "[1]"),
    ("generation_config.json", DEEP),
    ("model.safetensors", ""),
]


def test_broken_folders(command, pairs_recipe, tmp_path):
    """Whatever is broken in a folder, and wherever a reader notices, it is a sentence."""
    code, _, err = command("train", pairs_recipe)
    assert code == 0, err
    run = tmp_path / "runs" / "mine"
    for name, content in BROKEN:
        whole = (run / name).read_bytes()
        (run / name).write_text(content)
        assert_refused(command, tmp_path, ["generate", "runs/mine", "text"], "model 'runs/mine' cannot be loaded: ")
        if name in ("config.json", "model.safetensors"):
            assert_refused(command, tmp_path, ["evaluate", "runs/mine"], "model 'runs/mine' cannot be loaded: ")
            assert_refused(command, tmp_path, ["convert", "runs/mine", "new"], "'runs/mine' cannot be converted: ")
        (run / name).write_bytes(whole)


def test_code_in_a_folder_is_not_run(command, pairs_recipe, tmp_path):
    """Nor is anyone asked whether it should be."""
    code, _, err = command("train", pairs_recipe)
    assert code == 0, err
    run = tmp_path / "runs" / "mine"
    (run / "evil.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    config = json.loads((run / "config.json").read_text())
    auto_map = dict.fromkeys(("AutoConfig", "AutoModelForSeq2SeqLM"), "evil.Evil")
    (run / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": auto_map}))
    for arguments in (
        ["generate", "runs/mine", "source 1"],
        ["evaluate", "runs/mine"],
        ["convert", "runs/mine", "new"],
    ):
        assert_refused(command, tmp_path, arguments, "contains custom code")


def assert_refused(command, folder, arguments, sentence, exit_code=2):
    before = sorted(path for path in folder.rglob("*"))
    code, out, err = command(*arguments)
    *_, last = err.splitlines()
    assert sentence in last
    assert last.startswith("triptych: ")
    assert "Traceback" not in err
    assert code == exit_code
    assert out == ""
    assert sorted(path for path in folder.rglob("*")) == before


def test_bad_input_is_one_line_without_traceback_from_a_shell(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "triptych.training.cli", "train", "datse"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["triptych: recipe 'datse' is unknown: did you mean 'dates'?"]


@pytest.mark.parametrize("name", [None, *(command.name for command in app.registered_commands)])
def test_help_gives_examples(command, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command(*([name] if name else []), "--help")
    assert code == 0
    assert f"triptych {name or ''}".strip() in out


def test_version(command):
    assert command("--version") == (0, f"triptych {triptych.__version__}\n", "")


def test_a_shell_completes_names_of_recipes(tmp_path):
    shell = {"_TRIPTYCH_COMPLETE": "complete_bash", "COMP_WORDS": "triptych train scan", "COMP_CWORD": "2"}
    result = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['triptych']; from triptych.training.cli import main; main()"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **shell},
    )  # fmt: skip
    assert result.stdout.split() == ["scan_length", "scan_simple"], result.stderr
