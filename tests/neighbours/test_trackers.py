"""Trackers: what a training logs is in trackio's own files, without a network."""

import pytest
from tiny import random_tokens, tiny_model
from transformers import Trainer, TrainingArguments

from triptych.training.recipe import load_recipe
from triptych.training.reporting import read_metrics
from triptych.training.run import train

RECIPE = """\
objective: {type: causal_lm}
data: {splits: {train: FILE, validation: FILE}, max_length: 24}
tokenizer: {type: char}
model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
max_steps: 3
log_every: 1
validate_every: 3
max_tokens: 128
report_to: [trackio]
"""


@pytest.fixture
def logged(neighbour):
    """Reads what trackio's files say of a key, in a project with one run."""
    trackio, storage = neighbour("trackio"), neighbour("trackio.sqlite_storage").SQLiteStorage

    def read(project, key):
        (run,) = trackio.Api().runs(project)
        return [entry[key] for entry in storage.get_logs(project, run.name, run_id=run.id) if key in entry]

    return read


def test_a_recipe_reports_to_trackio(tmp_path, logged):
    (tmp_path / "texts.txt").write_text("one two three\n" * 20)
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("FILE", str(tmp_path / "texts.txt")))
    run = train(load_recipe(str(tmp_path / "mine.yaml"), [f"output={tmp_path / 'recipe_run'}"]))
    rows = read_metrics(run.folder / "metrics.jsonl")
    for key in ("loss", "validation_loss"):
        expected = [row[key] for row in rows if key in row]
        assert expected and logged("recipe_run", key) == pytest.approx(expected)


def test_trainer_reports_to_trackio(tmp_path, logged):
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(8, 6)]
    settings = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(tmp_path, report_to=["trackio"], project="trainer", run_name="one", **settings)
    trainer = Trainer(tiny_model("decoder"), arguments, train_dataset=rows)
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(expected) == 2 and logged("trainer", "train/loss") == pytest.approx(expected)
