"""The command that measures attention: a cost for each kind and length, exponents, a picture."""

import json
import subprocess
import sys

from triptych.training.attention_bench import CONTESTANTS, Cost, fit_exponents


def test_the_command_measures_every_kind_and_draws_it(tmp_path):
    """In a folder that has a folder of the package's name, which its processes must not import."""
    (tmp_path / "triptych").mkdir()
    script = tmp_path / "scripts" / "run.py"  # its own folder is on the path, as the installed command's is
    script.parent.mkdir()
    script.write_text("from triptych.training.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    command = [sys.executable, str(script), "bench", "attention", "--max-length", "32", "--window", "8"]
    command += ["--heads", "2", "--head-dim", "8", "--rounds", "1", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["contestant"], row["length"]) for row in rows] == [(n, t) for n in CONTESTANTS for t in (16, 32)]
    assert all(row["seconds"] > 0 and row["peak_bytes"] >= 0 for row in rows)
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_exponents_are_the_slopes_of_logarithms():
    costs = [Cost("square", t, 3e-9 * t**2, 40 * t) for t in (64, 128, 256, 512, 1024)]
    costs += [Cost("line", t, 2e-6 * t, 8 * t) for t in (64, 128)] + [Cost("once", 64, 1.0, 1)]
    exponents = fit_exponents(costs)
    assert exponents.keys() == {"square", "line"}
    for name, expected in (("square", (2, 1)), ("line", (1, 1))):
        assert all(abs(actual - wanted) < 1e-9 for actual, wanted in zip(exponents[name], expected, strict=True))
