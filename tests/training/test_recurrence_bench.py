"""The command that measures recurrences beside attention: a row for each model and length, and a picture."""

import json

import torch

from triptych.training import recurrence_bench
from triptych.training.recurrence_bench import PRESETS, build, writing


def test_models_of_one_width_are_measured_at_each_length(command, monkeypatch):
    monkeypatch.setattr(recurrence_bench, "run_apart", lambda measure, *arguments: measure(*arguments))
    monkeypatch.setattr(recurrence_bench, "TRAINED", 64)
    code, out, err = command("bench", "recurrence", "--max-length", "32", "--rounds", "1", "--threads", "1", "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["model"], row["length"]) for row in rows] == [(n, t) for t in (16, 32) for n in PRESETS]
    assert all(row["trained"] > 0 and row["written"] > 0 for row in rows)
    assert {build(preset).config.encoder.hidden_size for preset in PRESETS.values()} == {128}


def test_texts_are_written_to_their_full_length():
    """An early end would be taken for speed."""
    sources = torch.randint(3, 4000, (2, 9))
    for preset in PRESETS.values():
        assert writing(build(preset), sources)().shape == (2, 1 + 9), preset
