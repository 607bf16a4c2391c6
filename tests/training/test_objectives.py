"""Every objective from files to a saved model, its scores, and the model in the Auto class that it was trained for."""

import json
import math

import pytest
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, matthews_corrcoef
from small_files import EVERY, make_recipe, write_files

from triptych.training import evaluation
from triptych.training.building import build_parts
from triptych.training.data import digest_of
from triptych.training.encoding import _cut as cut
from triptych.training.errors import UserError
from triptych.training.evaluation import evaluate_examples, examples_to_score, load_model
from triptych.training.metrics import compute
from triptych.training.objectives import OBJECTIVES, read_task
from triptych.training.run import train

MEASURES = {
    "seq2seq": {"exact_match", "bleu", "chrf", "rougeL"},
    "speech_to_text": {"exact_match", "word_error_rate"},
    "sequence_classification": {"accuracy", "f1", "matthews"},
    "regression": {"pearson"},
    "token_classification": {"accuracy"},
    "question_answering": {"span_f1", "span_exact_match"},
    "multiple_choice": {"accuracy"},
    "image_classification": {"accuracy", "f1", "matthews"},
    "video_classification": {"accuracy", "f1", "matthews"},
    "audio_classification": {"accuracy", "f1", "matthews"},
    "causal_lm": {"perplexity", "bits_per_byte"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """A curve takes as long to draw as these trainings take; test_run and test_plots draw them."""
    monkeypatch.setattr("triptych.training.run.plot_losses", lambda *_: None)


@pytest.mark.parametrize(("name", "topology"), EVERY)
def test_train_save_load_score(folder, tmp_path, name, topology):
    recipe = make_recipe(folder, tmp_path, name, topology)
    run = train(recipe)
    model, tokenizer = load_model(str(run.folder), read_task(recipe).head)
    assert model.config.topology == topology
    ((split, examples),) = examples_to_score(run.folder)[0].items()
    assert split == "validation"
    scores = evaluate_examples(model, tokenizer, examples, recipe)
    assert scores.pop("examples") == len(examples)
    assert MEASURES.get(name, {"perplexity"}) <= set(scores)
    assert all(math.isfinite(score) for score in scores.values() if isinstance(score, float))
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (validation,) = [row for row in rows if "validation_loss" in row]
    if name in ("masked_lm", "causal_lm", "span_corruption"):  # the measure is the loss itself
        assert scores["perplexity"] == pytest.approx(math.exp(validation["validation_loss"]), rel=1e-4)
    measured = {key.removeprefix("validation_") for key in validation} - {"step", "loss"}
    assert measured == set(evaluation.score_names(read_task(recipe)))  # what may be a `best_metric`
    for key in set(scores) & set(validation):
        assert scores[key] == pytest.approx(validation[key])


@pytest.mark.parametrize("name", ["regression", "question_answering"])
def test_a_loss_that_is_not_of_classes_is_not_smoothed(folder, tmp_path, name):
    """It would be left as it is without a word."""
    with pytest.raises(UserError, match=f"'label_smoothing' must be 0, as the loss of {name} is not of classes"):
        build_parts(make_recipe(folder, tmp_path, name, "encoder", "label_smoothing=0.1"), processes=1)


@pytest.mark.parametrize(("name", "topology"), EVERY)
def test_every_parameter_learns(folder, tmp_path, name, topology):
    """A parameter without a gradient breaks DDP."""
    parts = build_parts(make_recipe(folder, tmp_path, name, topology), processes=1)
    for batch in parts.train_loader:
        parts.model(**batch).loss.backward()
    assert [name for name, parameter in parts.model.named_parameters() if parameter.grad is None] == []


def test_classes_are_scored_by_what_the_model_says(folder, tmp_path):
    recipe = make_recipe(folder, tmp_path, "sequence_classification", "encoder")
    parts = build_parts(recipe, processes=1)
    parts.model.eval()
    examples = Dataset.from_dict(
        {"text": ["a b", "b c", "a", "c d e", "f"], "label": ["yes", "no", "yes", "no", "yes"]}
    )
    with torch.no_grad():
        chosen = [
            int(parts.model(**parts.tokenizer(text, return_tensors="pt")).logits.argmax()) for text in examples["text"]
        ]
    named = [parts.model.config.id2label[number] for number in chosen]
    scores = evaluate_examples(parts.model, parts.tokenizer, examples, recipe)
    assert scores["accuracy"] == pytest.approx(100 * accuracy_score(examples["label"], named))
    assert scores["matthews"] == pytest.approx(100 * matthews_corrcoef(examples["label"], named))
    unseen = Dataset.from_dict({"text": examples["text"], "label": ["maybe", *examples["label"][1:]]})
    right = sum(name == label for name, label in zip(named, unseen["label"], strict=True))
    assert evaluate_examples(parts.model, parts.tokenizer, unseen, recipe)["accuracy"] == pytest.approx(100 * right / 5)


def test_the_best_span_ends_after_it_begins(folder, tmp_path, monkeypatch):
    recipe = make_recipe(folder, tmp_path, "question_answering", "encoder")
    parts = build_parts(recipe, processes=1)
    pairs = []
    monkeypatch.setattr(
        evaluation, "compute", lambda names, *texts: pairs.extend(zip(*texts, strict=True)) or compute(names, *texts)
    )
    parts.score(parts.model)
    batches = list(parts.validation_loader)
    expected = []
    for batch in batches:
        with torch.no_grad():
            outputs = parts.model(**batch)
        for row, mask in enumerate(batch["attention_mask"]):
            spans = [(i, j) for i in range(mask.sum()) for j in range(i, mask.sum())]
            start, end = max(
                spans, key=lambda span: outputs.start_logits[row, span[0]] + outputs.end_logits[row, span[1]]
            )
            expected.append(" ".join(map(str, batch["input_ids"][row, start : end + 1].tolist())))
    assert [predicted for predicted, _ in pairs] == expected


def test_a_trained_model_is_the_start_of_another_objective(folder, tmp_path):
    first = train(make_recipe(folder, tmp_path, "masked_lm", "encoder", f"output={tmp_path / 'first'}"))
    recipe = make_recipe(folder, tmp_path, "sequence_classification", "encoder", f"model.path={first.folder}")
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "initializer_range"):
        del recipe.model[key]
    parts = build_parts(recipe, processes=1)
    pretrained, tokenizer = load_model(str(first.folder), OBJECTIVES["masked_lm"].heads["encoder"])
    assert tokenizer.get_vocab() == parts.tokenizer.get_vocab()
    for name, parameter in pretrained.model.named_parameters():
        assert torch.equal(parameter, parts.model.model.get_parameter(name)), name
    assert parts.model.config.num_labels == 2
    with pytest.raises(UserError, match="'nowhere' cannot be loaded"):
        build_parts(make_recipe(folder, tmp_path, "masked_lm", "encoder", "model.path=nowhere"), 1)
    with pytest.raises(UserError, match="there is no 'runs/dates' yet, make it with: triptych train dates"):
        build_parts(make_recipe(folder, tmp_path, "masked_lm", "encoder", "model.path=runs/dates"), 1)


def test_a_new_head_regresses_from_the_mean(folder, tmp_path):
    recipe = make_recipe(folder, tmp_path, "regression", "encoder", "max_steps=1", "learning_rate=1e-9")
    values = [float(line.split("\t")[1]) for line in (folder / "values.tsv").read_text().splitlines()]
    parts = build_parts(recipe, processes=1)
    assert parts.model.classifier.bias.item() == pytest.approx(sum(values) / len(values))
    with torch.no_grad():
        parts.model.classifier.bias.fill_(7.0)
    parts.model.save_pretrained(tmp_path / "start")
    parts.tokenizer.save_pretrained(tmp_path / "start")
    again = build_parts(make_recipe(folder, tmp_path, "regression", "encoder", f"model.path={tmp_path}/start"), 1)
    assert again.model.classifier.bias.item() == 7.0  # a trained head goes on from where it was
    first = train(make_recipe(folder, tmp_path, "masked_lm", "encoder", f"output={tmp_path / 'first'}"))
    other = build_parts(make_recipe(folder, tmp_path, "regression", "encoder", f"model.path={first.folder}"), 1)
    assert other.model.classifier.bias.item() == pytest.approx(sum(values) / len(values))


def test_token_ids_are_kept_in_the_cache_for_the_same_texts_only(folder, tmp_path, monkeypatch):
    def rows(*changes):
        parts = build_parts(make_recipe(folder, tmp_path, "masked_lm", "encoder", *changes), processes=1)
        return parts.fingerprint

    cache = f"data.cache={tmp_path / 'cache'}"
    plain = rows()
    calls = []
    monkeypatch.setattr("triptych.training.encoding._cut", lambda *args: calls.append(1) or cut(*args))
    assert rows(cache) == plain
    made, files = len(calls), sorted((tmp_path / "cache").iterdir())
    assert made > 0
    assert len(files) == 1  # training and validation are one file here
    assert rows(cache) == plain
    assert len(calls) == made
    assert rows(cache, "data.max_length=12") != plain
    assert len(calls) > made
    assert len(sorted((tmp_path / "cache").iterdir())) == 2


def test_the_digest_is_of_what_the_columns_hold():
    def digest(**columns):
        return digest_of([Dataset.from_dict(columns)])

    same = digest(input_ids=[[1, 2], [3]], labels=[0, 1])
    assert same == digest(labels=[0, 1], input_ids=[[1, 2], [3]])
    others = [
        digest(input_ids=[[1], [2, 3]], labels=[0, 1]),
        digest(input_ids=[[1, 2], [3]], labels=[1, 0]),
        digest(input_ids=[[1, 2], [4]], labels=[0, 1]),
        digest(input_ids=[[1, 2], [3]]),
        digest(text=["ab", "c"]),
        digest(text=["a", "bc"]),
        digest(text=[["a"], ["bc"]]),
    ]
    assert len({same, *others}) == 8
