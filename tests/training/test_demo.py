import re
import subprocess
import sys

import pytest

from triptych.training import demo
from triptych.training.run import train


def test_show_scores_and_draws_a_saved_model(tiny_recipe, capsys):
    run = train(tiny_recipe("data.dates.test_dates=60"))
    demo.show(run.folder)
    said = capsys.readouterr().out
    assert "dates held out of training: 0.0 % of 60 right" in said
    assert "date formats held out of training: 0.0 % of 8 right" in said
    assert len(re.findall(r"\d{4}-\d\d-\d\d", said)) >= 10
    assert (run.folder / demo.ATTENTION_FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("found", "command"), [("/bin/triptych", "triptych"), (None, ".venv/bin/triptych")])
def test_the_command_to_try_next_can_be_copied(monkeypatch, capsys, found, command):
    """`make demo` puts the command where the shell does not look for it."""
    monkeypatch.setattr(demo, "_python", lambda *arguments: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: found)
    monkeypatch.setattr(sys, "argv", [".venv/bin/triptych", "demo"])
    demo.run_demo("runs/demo")
    assert f'try: {command} generate runs/demo "fr: 14 juillet 1989"' in capsys.readouterr().out


@pytest.mark.slow
def test_the_demo_learns_dates(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "triptych.training.cli", "demo"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    scores = [float(score) for score in re.findall(r"training: ([\d.]+) %", result.stdout)]
    dates, formats = scores
    assert dates >= 99
    assert formats >= 95
    assert result.stdout.splitlines()[-1].startswith("Done in ")
    assert {"model.safetensors", "loss.png", demo.ATTENTION_FILE} <= {
        path.name for path in (tmp_path / "runs/demo").iterdir()
    }
