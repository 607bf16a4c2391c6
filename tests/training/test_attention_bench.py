"""The command that measures attention: a cost for each kind and length, exponents, a picture."""

import json
import subprocess
import sys

import pytest

from triptych.training.attention_bench import CONTESTANTS, LAYERS, Cost, Shape, fit_exponents, is_affordable, measure


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


def test_what_is_expected_to_take_too_long_or_too_much_is_left_out(monkeypatch):
    """From one length a square is expected, from two what they show."""
    monkeypatch.setattr("triptych.training.attention_bench.memory_size", lambda: 2_000)
    once, twice, slow = Cost("", 64, 1.0, 100), Cost("", 128, 2.0, 200), Cost("", 128, 4.0, 200)
    assert is_affordable([once], 128, 4.1) and not is_affordable([once], 128, 3.9)
    assert is_affordable([once, twice], 256, 4.1) and not is_affordable([once, twice], 256, 3.9)
    assert is_affordable([once, slow], 256, 16.1) and not is_affordable([once, slow], 256, 15.9)
    large = [Cost("", 64, 1.0, 300), Cost("", 128, 1.0, 600)]
    assert not is_affordable(large, 256, 100.0) and is_affordable(large, 192, 100.0)


@pytest.mark.parametrize("contestant", LAYERS)
def test_whole_layers_are_measured_with_their_gradients(contestant):
    cost = measure(contestant, 64, Shape(is_causal=False, window=8, heads=2, head_dim=8, rounds=1))
    assert cost.seconds > 0 and cost.length == 64
