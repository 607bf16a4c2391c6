"""Whole trainings of a tiny model: what they leave behind, and what may not change their results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.utils import LoggerType
from safetensors.torch import load_file
from small_files import make_recipe, metrics_of
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import triptych.training.run as run_module
from triptych.training.dates import generate_dates
from triptych.training.errors import UserError
from triptych.training.evaluation import evaluate_examples, examples_to_score, generate_texts, load_model
from triptych.training.loop import TrainingLoop
from triptych.training.recipe import load_recipe
from triptych.training.run import train


def test_a_run_learns_and_leaves_a_folder_that_loads(tiny_recipe):
    recipe = tiny_recipe("max_steps=30", "validate_every=10", "generation.num_beams=2", "generation.length_penalty=1.5")
    run = train(recipe)
    losses, validations = metrics_of(run, "loss"), metrics_of(run, "validation_loss")
    assert len(losses) == 30
    assert len(validations) == 3
    assert losses[-1] < 0.7 * losses[0]
    assert run.best_loss == min(validations)
    assert metrics_of(run, "step")[-1] == 30
    names = {path.name for path in run.folder.iterdir()}
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "loss.png",
        "metrics.jsonl",
        "model.safetensors",
        "recipe.yaml",
        "run.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } == names
    assert (run.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_recipe(str(run.folder / "recipe.yaml")) == recipe
    assert [path.name for path in run.folder.parent.iterdir()] == ["run"]

    model = AutoModelForSeq2SeqLM.from_pretrained(run.folder)
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    assert type(model).__name__ == "TriptychForConditionalGeneration"
    for name, value in vars(recipe.generation).items():
        assert getattr(model.generation_config, name) == value
    pairs, _ = examples_to_score(run.folder)
    batch = tokenizer(list(pairs["test_dates"]["source"]), padding=True, return_tensors="pt")
    assert model.generate(**batch).shape[0] == 8


def test_a_cpu_without_products_in_bfloat16_trains_in_float32_and_says_so(tiny_recipe, monkeypatch, capsys):
    recipe = tiny_recipe("max_steps=2", "validate_every=2", "mixed_precision=bf16")
    monkeypatch.setattr(run_module, "has_bfloat16_products", lambda: True)
    assert run_module.in_known_precision(recipe) == (recipe, [])
    monkeypatch.setattr(run_module, "has_bfloat16_products", lambda: False)
    run = train(recipe)
    assert "no products in bfloat16" in capsys.readouterr().err
    assert load_recipe(str(run.folder / "recipe.yaml")).mixed_precision is None


def test_the_best_checkpoint_is_kept(tiny_recipe, monkeypatch):
    """The model in the folder is that of the best validation, with the loss that was measured there."""
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(TrainingLoop, "validation_loss", lambda loop, model: next(losses))
    run = train(tiny_recipe("max_steps=6", "validate_every=2", "keep_checkpoints=1"))
    assert (run.best_step, run.best_loss) == (4, 1.0)
    monkeypatch.undo()
    other = train(tiny_recipe("max_steps=4", "validate_every=2", "schedule=inverse_sqrt", "overwrite=true"))
    best = load_file(other.folder / "model.safetensors")
    monkeypatch.setattr(TrainingLoop, "validation_loss", lambda loop, model: abs(loop.state.step - 4.0))
    run = train(tiny_recipe("max_steps=6", "validate_every=2", "schedule=inverse_sqrt", "overwrite=true"))
    assert run.best_step == 4
    assert all(torch.equal(tensor, best[name]) for name, tensor in load_file(run.folder / "model.safetensors").items())


def with_scores(monkeypatch, values):
    """Let the objective measure `values`, one at each validation, as its accuracy."""
    values = iter(values)
    original = run_module.build_parts

    def build(recipe, processes):
        parts = original(replace(recipe, best_metric="loss"), processes)  # seq2seq has no accuracy of its own
        parts.score = lambda model: {"accuracy": next(values)}
        return parts

    monkeypatch.setattr(run_module, "build_parts", build)


def test_a_larger_score_is_better(tiny_recipe, monkeypatch, capsys):
    with_scores(monkeypatch, [0.2, 0.4, 0.3])
    run = train(tiny_recipe("max_steps=6", "validate_every=2", "best_metric=accuracy"))
    assert run.best_step == 4
    assert metrics_of(run, "validation_accuracy") == [0.2, 0.4, 0.3]
    assert run.best_loss == metrics_of(run, "validation_loss")[1]
    said = capsys.readouterr().err
    assert f"validation loss {run.best_loss:.4f}, accuracy 0.4000 (best)" in said
    assert "accuracy 0.3000," in said


def test_an_unknown_metric_is_refused_before_training(tiny_recipe, monkeypatch):
    """After the first checkpoint it could not be changed any more."""
    monkeypatch.setattr(TrainingLoop, "run", lambda loop: pytest.fail("training began"))
    with pytest.raises(UserError, match="recipe key 'best_metric' must be one of loss, not 'acuracy'"):
        train(tiny_recipe("best_metric=acuracy"))


def test_validation_without_a_label_is_refused(tmp_path):
    """Its loss would be 0 / 0, and no later one better."""
    for name, label in (("train", "yes"), ("validation", "no")):
        (tmp_path / f"{name}.tsv").write_text(f"a\t{label}\n")
    recipe = make_recipe(tmp_path, tmp_path, "sequence_classification", "encoder")
    recipe.data.splits = {name: str(tmp_path / f"{name}.tsv") for name in ("train", "validation")}
    with pytest.raises(UserError, match="the validation data have no label to measure the loss of"):
        train(recipe)


def test_training_stops_when_validation_no_longer_improves(tiny_recipe, monkeypatch):
    losses = iter([3.0, 1.0, 2.0, 0.9, 1.5, 0.9, 5.0])
    monkeypatch.setattr(TrainingLoop, "validation_loss", lambda loop, model: next(losses))
    run = train(tiny_recipe("validate_every=1", "patience=2"))
    assert len(metrics_of(run, "validation_loss")) == 6
    assert (run.best_step, run.best_loss) == (4, 0.9)
    assert json.loads((run.folder / "run.json").read_text())["status"] == "finished"


def test_validation_leaves_training_alone(tiny_recipe):
    """Random numbers of training do not depend on how often it is validated."""
    losses = [
        metrics_of(train(tiny_recipe("model.hidden_dropout=0.1", f"validate_every={every}", "overwrite=true")), "loss")
        for every in (2, 12)
    ]
    assert losses[0] == losses[1]


def test_validation_loss_is_weighted_by_tokens(tiny_recipe):
    """However validation is cut into batches, the loss is the mean over its tokens."""
    losses = [
        train(tiny_recipe(f"max_tokens={tokens}", "overwrite=true", "max_steps=1", "learning_rate=1e-12"))
        for tokens in (64, 4096)
    ]
    assert losses[0].best_loss == pytest.approx(losses[1].best_loss, abs=1e-5)


def test_the_same_recipe_gives_the_same_run(tiny_recipe):
    runs = [train(tiny_recipe("model.hidden_dropout=0.1", "overwrite=true")) for _ in range(2)]
    assert runs[0].best_loss == runs[1].best_loss
    other = train(tiny_recipe("model.hidden_dropout=0.1", "overwrite=true", "seed=2"))
    assert other.best_loss != runs[0].best_loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulation_changes_nothing(tiny_recipe, smoothing):
    """Eight ragged examples as one batch of eight and as eight batches of one: the same loss and gradient."""
    changes = ["data.dates.train=8", "max_steps=1", "overwrite=true", f"label_smoothing={smoothing}"]
    changes += ["data.dates.validation=8", "max_grad_norm="]
    together = train(tiny_recipe(*changes))
    values = [metrics_of(together, key) for key in ("loss", "grad_norm", "items", "tokens")]
    apart = train(tiny_recipe(*changes, "gradient_accumulation_steps=8"))
    for key, (expected,) in zip(("loss", "grad_norm", "items", "tokens"), values, strict=True):
        assert metrics_of(apart, key) == [pytest.approx(expected, rel=1e-5)]


def test_gradients_are_clipped_to_the_given_norm(tiny_recipe, monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def step(optimizer, *arguments, **options):
        parameters = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(parameters).norm()))
        return original(optimizer, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    run = train(tiny_recipe("max_steps=3", "max_grad_norm=0.01"))
    assert all(norm > 0.01 for norm in metrics_of(run, "grad_norm"))
    assert norms == pytest.approx([0.01] * 3, rel=1e-3)


def test_the_schedule_counts_updates(tiny_recipe):
    run = train(tiny_recipe("max_steps=8", "schedule=inverse_sqrt", "warmup_steps=4", "gradient_accumulation_steps=2"))
    peak = 3e-3
    expected = [peak * min(step / 4, (4 / step) ** 0.5) for step in range(1, 9)]
    assert metrics_of(run, "learning_rate") == pytest.approx(expected)


def test_a_loss_that_is_not_finite_stops_the_run(tiny_recipe):
    """Before the first checkpoint there is nothing to keep."""
    recipe = tiny_recipe("learning_rate=1e30", "schedule=linear", "warmup_steps=0", "max_grad_norm=")
    with pytest.raises(UserError, match=r"the loss of update \d+ is (nan|inf) \(.*\): lower learning_rate \(1e\+30\)"):
        train(recipe)
    assert not list(Path(recipe.output).parent.iterdir())


def test_batched_generation_equals_one_at_a_time(tiny_recipe):
    # Large initial weights, hardly trained: the answers differ from source to source.
    run = train(tiny_recipe("max_steps=1", "model.initializer_range=0.5"))
    model, tokenizer = load_model(str(run.folder))
    sources = examples_to_score(run.folder)[0]["test_dates"]["source"]
    together = generate_texts(model, tokenizer, sources, batch_size=3)
    assert together == [generate_texts(model, tokenizer, [source])[0] for source in sources]
    assert len(set(together)) > 1
    beams = generate_texts(model, tokenizer, sources, num_beams=3, max_new_tokens=4)
    assert max(len(text) for text in beams) <= 4


def test_evaluation_reports_scores_with_signatures(tiny_recipe):
    run = train(tiny_recipe())
    model, tokenizer = load_model(str(run.folder))
    pairs, recipe = examples_to_score(run.folder)
    assert list(pairs) == ["test_dates", "test_formats"]
    scores = evaluate_examples(model, tokenizer, pairs["test_dates"], recipe)
    assert scores["examples"] == 8
    assert 0 <= scores["exact_match"] <= 100
    assert "tok:13a" in scores["bleu_signature"]
    assert scores["chrf_signature"].startswith("nrefs:1")


def test_counts(tiny_recipe):
    """Items are target tokens with their end, tokens are source tokens with theirs; pads are neither."""
    run = train(tiny_recipe("max_steps=5", "validate_every=5"))
    dates = generate_dates("train", 200, 1)
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    for key, column in (("items", "target"), ("tokens", "source")):
        assert metrics_of(run, key)[-1] == sum(len(tokenizer(text)["input_ids"]) for text in dates[column])


def test_trackers_get_what_the_metrics_file_gets(tiny_recipe):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = train(tiny_recipe("report_to=[tensorboard]", "max_steps=4", "validate_every=2"))
    events = event_accumulator.EventAccumulator(str(run.folder / "trackers" / "run")).Reload()
    for key in ("loss", "learning_rate", "validation_loss"):
        values = [event.value for event in events.Scalars(key)]
        assert values == pytest.approx(metrics_of(run, key))
    with pytest.raises(UserError, match="'report_to': tracker 'paper' is none of all, aim, tensorboard, "):
        train(tiny_recipe("report_to=[paper]", "overwrite=true"))


def test_a_tracker_that_is_not_installed_is_refused(tiny_recipe, monkeypatch):
    """accelerate drops it without a word."""
    monkeypatch.setattr(run_module, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(UserError, match="recipe key 'report_to': tracker 'wandb' is not installed"):
        train(tiny_recipe("report_to=[tensorboard, wandb]"))


def test_a_launch_that_accelerate_does_not_carry_out_is_refused(tiny_recipe, monkeypatch):
    """Two processes that accelerate runs alone would be two runs in one folder, or shards that are no shards."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 processes were launched, .* ACCELERATE_USE_CPU=true"):
        train(tiny_recipe())
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="asks for FSDP, but accelerate does not run it on cpu"):
        train(tiny_recipe())
