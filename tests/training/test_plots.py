import json
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from triptych.training.attention_bench import Shape, show_attention_benchmark
from triptych.training.bench import show_benchmarks
from triptych.training.errors import UserError
from triptych.training.evaluation import load_model
from triptych.training.growth_bench import show_growth_benchmark
from triptych.training.plots import plot_cross_attention, plot_losses, plot_ratios
from triptych.training.recurrence_bench import show_recurrence_benchmark
from triptych.training.run import train


@pytest.mark.parametrize(
    "show",
    [
        show_benchmarks,
        show_growth_benchmark,
        show_recurrence_benchmark,
        lambda rows, *options: show_attention_benchmark(rows, Shape(True, 2, 1, 1, 1, 1), *options),
    ],
    ids=["bench", "growth", "recurrence", "attention"],
)
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing/bench.png", "must be a file in a folder that can be written"),
        ("folder.png", "must be a file in a folder that can be written"),
        ("bench.pgn", r"must end in one of .*\.png"),
        ("bench", r"must end in one of .*\.png"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, show, name, sentence):
    (tmp_path / "folder.png").mkdir()
    measurements = (pytest.fail("this was measured") for _ in range(1))
    with pytest.raises(UserError, match=rf"--picture '.*{name}' {sentence}"):
        show(measurements, tmp_path / name, True)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, kept open to look at."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    yield figures
    monkeypatch.undo()
    plt.close("all")


def test_the_loss_curve_shows_both_losses(tmp_path, drawn):
    rows = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 3.0}]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_losses(metrics, tmp_path / "loss.png", "mine: loss")
    (axes,) = drawn[0].axes
    assert axes.get_title() == "mine: loss"
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 4], [2, 2]], [[2, 3]]]
    assert plt.imread(tmp_path / "loss.png").shape[2] in (3, 4)


@pytest.mark.parametrize(
    ("allocators", "shown"), [(["tuned"], [""]), (["tuned", "default"], [" (tuned)", " (default)"])]
)
def test_allocators_are_named_where_there_are_several(tmp_path, drawn, allocators, shown):
    row = dict(name="BERT", task="forward", peer="transformers", dtype="bfloat16", ratio=2.0)
    rows = [SimpleNamespace(**row, allocator=allocator) for allocator in allocators]
    plot_ratios(rows, tmp_path / "bench.png")
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == [f"BERT: forward, bfloat16{name}" for name in shown]


@pytest.mark.parametrize(
    ("rows", "label", "curves"),
    [
        ([{"step": 1, "loss": 4.0, "learning_rate": 0.1}], "learning rate", {"learning_rate": [[1, 0.1]]}),
        (
            [
                {"step": 1, "loss": 4.0, "learning_rate": 0.1},
                {"step": 1, "validation_loss": 3.0, "validation_f1": 0.5, "validation_accuracy": 0.6},
            ],
            "validation",
            {"accuracy": [[1, 0.6]], "f1": [[1, 0.5]]},
        ),
    ],
)
def test_a_second_panel_shows_the_scores_or_else_the_learning_rate(tmp_path, drawn, rows, label, curves):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_losses(metrics, tmp_path / "loss.png", "mine: loss")
    _, axes = drawn[0].axes
    assert axes.get_ylabel() == label
    assert {line.get_label(): line.get_xydata().tolist() for line in axes.lines} == curves
    assert len({line.get_color() for line in axes.lines}) == len(curves)


def test_the_attention_map_shows_the_last_layers_mean(tiny_recipe, tmp_path, drawn):
    run = train(tiny_recipe("max_steps=1", "model.initializer_range=0.5"))
    model, tokenizer = load_model(str(run.folder))
    model.set_attn_implementation("eager")
    source = "de: 5. März 2021"
    plot_cross_attention(model, tokenizer, source, tmp_path / "attention.png")

    axes, _ = drawn[-1].axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [*source.replace(" ", "␣"), "</s>"]
    weights = np.asarray(axes.images[0].get_array())  # [T, S]
    assert weights.shape[1] == len(labels)
    assert weights.shape[0] == len(axes.get_yticklabels())
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-5)
    inputs = tokenizer(source, return_tensors="pt")
    start = torch.tensor([[model.config.decoder_start_token_id]])
    attentions = model(**inputs, decoder_input_ids=start, output_attentions=True).cross_attentions
    np.testing.assert_allclose(weights[0], attentions[-1][0, :, 0].mean(0).detach(), atol=1e-5)
