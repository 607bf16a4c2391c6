import sys

import pytest

from triptych.training.cli import main
from triptych.training.recipe import load_recipe

TINY = (
    "data.dates.train=200",
    "data.dates.validation=40",
    "data.dates.test_dates=8",
    "data.dates.test_formats=8",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.hidden_dropout=0.0",
    "max_tokens=1024",
    "learning_rate=3e-3",
    "warmup_steps=2",
    "max_steps=12",
    "log_every=1",
    "validate_every=6",
    "report_to=[]",
)


@pytest.fixture
def tiny_changes(tmp_path):
    """Changes that make the dates recipe a two-layer model of width 32 on 200 dates."""
    return [*TINY, f"output={tmp_path / 'run'}"]


@pytest.fixture
def tiny_recipe(tiny_changes):
    return lambda *changes: load_recipe("dates", [*tiny_changes, *changes])


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run the command line in an empty folder; returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["triptych", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        output = capsys.readouterr()
        return stop.value.code or 0, output.out, output.err

    return run
