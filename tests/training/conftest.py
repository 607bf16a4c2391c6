import sys

import pytest
from tiny_dates import TINY

from triptych.training.cli import main
from triptych.training.recipe import load_recipe


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
