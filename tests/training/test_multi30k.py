"""A real corpus: the first 300 updates of the shipped translation recipe."""

import json
import os
import subprocess
import sys

import pytest


def triptych(folder, *arguments):
    result = subprocess.run(
        [sys.executable, "-m", "triptych.training.cli", *arguments],
        cwd=folder,
        # Where the tests share their cores, threads that spin for long would make this several times slower.
        env=os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "GOMP_SPINCOUNT": "1000"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# The recipe takes its time; so a few updates lead somewhere.
QUICKER = ("model.norm_position=pre", "optimizer=muon", "schedule=trapezoidal", "cooldown_steps=100")


@pytest.mark.data
@pytest.mark.slow
def test_300_updates_translate(tmp_path, data_folder, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_DATA", str(data_folder))
    triptych(tmp_path, "train", "multi30k_en_de", "max_steps=300", "warmup_steps=100", *QUICKER)
    run = "runs/multi30k_en_de"
    assert (tmp_path / run / "loss.png").is_file()
    scores = json.loads(triptych(tmp_path, "evaluate", run, "--split", "validation", "--num-beams", "1"))
    assert scores["examples"] == 1014
    assert scores["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:none|smooth:none")
    assert scores["bleu"] > 15
    (translation,) = triptych(tmp_path, "generate", run, "a man in a blue shirt .").splitlines()
    assert translation.startswith("ein mann")
    assert "@@" not in translation
