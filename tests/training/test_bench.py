"""The command that races the family: both sides have one result, every row its figures, errors say what there is."""

import json
from importlib.util import find_spec

import pytest
import torch

import triptych.training.bench as bench
from triptych.training.bench import (
    CONTESTS,
    TASKS,
    choose_contests,
    compare_outputs,
    count_tokens,
    masked,
    pairs,
)
from triptych.training.errors import UserError

SMALL = ("Marian", "torch.nn.TransformerEncoder", "x-transformers")


@pytest.mark.parametrize(
    "contest",
    [
        pytest.param(one, id=one.label, marks=[pytest.mark.slow] * ("compiled" in one.task))
        for one in CONTESTS
        if one.dtype == "float32" and any(part in one.name + one.peer for part in SMALL)
    ],
)
def test_both_sides_have_equal_outputs(contest):
    if contest.peer == "x-transformers" and not find_spec("x_transformers"):
        pytest.skip("x-transformers is not installed; it comes with the extra 'bench'")
    torch.manual_seed(0)
    models, batch = contest.pair(), contest.batch()
    assert compare_outputs(contest, models, batch) < 1e-4
    if contest.task == "training step":
        losses = [model.eval()(**batch).loss.item() for model in models]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_batches_have_the_pads_that_they_say():
    torch.manual_seed(0)
    batch = masked(100, 16, 115, 0.42)()
    assert batch["attention_mask"].float().mean().item() == pytest.approx(0.42, abs=0.005)
    assert batch["attention_mask"][0].all() and batch["attention_mask"].sum(-1).min() > 10
    labels = batch["labels"] != -100
    assert not (labels & (batch["attention_mask"] == 0)).any() and labels.sum() / batch["attention_mask"].sum() < 0.2
    batch = pairs(100, 40, 20)()
    assert 0.85 < batch["attention_mask"].float().mean() < 0.95
    assert count_tokens(CONTESTS[0], batch) == int((batch["labels"] != -100).sum())


def test_contests_are_chosen_by_parts_of_their_names():
    assert choose_contests([]) and {one.task for one in choose_contests(["Beams", "greedy"])} == {
        "greedy decoding",
        "decoding with 5 beams",
        "compiled greedy decoding",
    }
    assert {one.peer for one in choose_contests(["torch.nn"])} == {"torch.nn.TransformerEncoder"}
    with pytest.raises(UserError, match=r"'nothing'.*BERT-base, full: training step"):
        choose_contests(["nothing"])
    assert {one.task for one in CONTESTS} == set(TASKS)


@pytest.mark.parametrize("is_fast", [True, False])
def test_bfloat16_is_left_out_where_a_processor_has_no_products_in_it(is_fast, monkeypatch):
    monkeypatch.setattr(bench, "has_bfloat16_products", lambda: is_fast)
    assert {one.dtype for one in choose_contests(["Marian"])} == ({"float32", "bfloat16"} if is_fast else {"float32"})


def test_the_command_prints_a_row_and_draws_it(command, tmp_path):
    code, out, err = command("bench", "--only", "128: forward", "--rounds", "1", "--threads", "1", "--json")
    assert code == 0, err
    (row,) = map(json.loads, out.splitlines())
    assert row["peer"] == "transformers" and row["allocator"] == "tuned" and row["tokens"] == 3600
    assert row["ratio"] > 0 and row["difference"] < 1e-4 and 0 < row["share_of_peak"] < 1.5
    assert row["family_bytes"] > 2**26 and row["peer_bytes"] > 2**26
    assert (tmp_path / "bench.png").stat().st_size > 5_000


def test_the_command_says_what_it_does_not_know(command):
    code, _, err = command("bench", "--allocator", "jemalloc")
    assert code == 2 and "'jemalloc'" in err and "tuned, default, both" in err
