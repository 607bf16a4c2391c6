"""The command that lets work grow: a row for each value of each axis, and a picture."""

import json

import pytest

from triptych.training import growth_bench
from triptych.training.growth_bench import AXES, measure_growth, run_growth_benchmark, show_growth_benchmark
from triptych.training.measuring import run_apart


def test_every_value_is_measured_apart_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(growth_bench, "AXES", {"texts": (1, 2), "tokens": (16,)})
    show_growth_benchmark(run_growth_benchmark(rounds=1, threads=1), tmp_path / "growth.png", json_lines=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["axis"], row["value"]) for row in rows] == [("texts", 1), ("texts", 2), ("tokens", 16)]
    assert all(row["seconds_per_token"] > 0 for row in rows)
    assert (tmp_path / "growth.png").stat().st_size > 5_000


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_changes_the_work(axis):
    cost = run_apart(measure_growth, axis, AXES[axis][0], 1, 1)
    assert cost.axis == axis and cost.value == AXES[axis][0] and cost.seconds_per_token > 0
