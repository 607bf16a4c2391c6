"""Metrics against the libraries behind them, against sums done by hand, and through evaluate.load."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
import sacrebleu
import scipy.stats
import sklearn.metrics
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

from triptych.training import metrics
from triptych.training.errors import UserError
from triptych.training.metrics import METRICS, compute

FOLDER = Path(metrics.__file__).parent
GUESSES = ["the cat sat on the mat", "there is a dog here, he said", "", "running dogs run in 1984"]
TEXTS = ["the cat sat on a mat", "There is a dog here, she said", "nothing at all", "Running dogs ran in 1984!"]
CLASSES, TRUE_CLASSES = [1, 0, 1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 1, 1, 0]
EXAMPLES = {
    "accuracy": (CLASSES, TRUE_CLASSES, {}),
    "bleu": (GUESSES, TEXTS, {"tokenize": "none", "smooth_method": "floor", "force": True}),
    "chrf": (GUESSES, TEXTS, {}),
    "exact_match": (["a", "b", "c"], ["a", "b", "d"], {}),
    "f1": (CLASSES, TRUE_CLASSES, {"average": "macro"}),
    "matthews": (CLASSES, TRUE_CLASSES, {}),
    "pearson": ([1.0, 2.5, 2.0, 4.0], [1.0, 2.0, 3.0, 5.0], {}),
    "perplexity": ([3.0, 1.5, 2.5], [2, 1, 3], {"num_bytes": 20}),
    "rouge": (GUESSES, TEXTS, {"use_stemmer": True}),
    "span_f1": (["the cat", "a mat", "two"], [["Cat!", "dog"], ["on the mat"], ["one"]], {}),
    "word_error_rate": (GUESSES, TEXTS, {}),
}
texts = st.lists(st.text(alphabet="ab Zü.,\n", max_size=12), min_size=1, max_size=6)


def paired(values, max_size=30):
    pairs = st.lists(st.tuples(values, values), min_size=1, max_size=max_size)
    return pairs.map(lambda pairs: tuple(zip(*pairs, strict=True)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """evaluate.load of a metric's file by name, with evaluate's files in a folder of their own.

    One folder for the module: Python remembers where the package is that evaluate copies metrics into.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(sys, "path", list(sys.path))
        yield lambda path: evaluate.load(str(path), cache_dir=str(folder / "data"))


def test_names_are_the_files():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == set(METRICS) == set(EXAMPLES)
    assert list(METRICS) == sorted(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_evaluate_loads_each_file(name, loaded, monkeypatch, tmp_path):
    """A metric that evaluate's import parser cannot read, or whose class it does not find, loads only by import."""
    predictions, references, options = EXAMPLES[name]
    expected = compute(name, predictions, references, **options)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        metric = loaded(os.path.relpath(FOLDER / f"{name}.py"))
        assert metric.name == name and metric.module_type == "metric"
        assert metric.description and metric.inputs_description and (metric.citation or name == "exact_match")
        assert metric.compute(predictions=predictions, references=references, **options) == expected
        # The same metric again, in pieces.
        for part in (slice(0, 1), slice(1, None)):
            metric.add_batch(predictions=predictions[part], references=references[part])
        assert metric.compute(**options) == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_nothing_is_slow_said_or_left_behind(tmp_path):
    """Scores leave no file in the home folder and no line on the screen, and only scores import the libraries."""
    program = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from triptych.training.metrics import compute
slow = {"evaluate", "sklearn", "scipy.stats", "rouge_score", "nltk", "sacrebleu"} & set(sys.modules)
scores = {name: compute(name, *example[:2], **example[2]) for name, example in json.loads(sys.argv[1]).items()}
print(json.dumps([sorted(slow), scores]))
"""
    environment = os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    command = [sys.executable, "-c", program, json.dumps(EXAMPLES)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and not result.stderr, result.stderr
    slow, scores = json.loads(result.stdout)
    assert not slow
    assert scores == {name: compute(name, *example[:2], **example[2]) for name, example in EXAMPLES.items()}
    assert not list(tmp_path.iterdir())


def test_scores_draw_no_random_numbers():
    """A validation that moves a global generator changes the training around it."""
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    for name, (predictions, references, options) in EXAMPLES.items():
        compute(name, predictions, references, **options)
    assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.get_rng_state(), before[1])


def test_several_metrics_at_once_share_options():
    scores = compute(["exact_match", "bleu", "rouge"], GUESSES, TEXTS, tokenize="char", use_stemmer=True)
    assert scores == (
        compute("exact_match", GUESSES, TEXTS)
        | compute("bleu", GUESSES, TEXTS, tokenize="char")
        | compute("rouge", GUESSES, TEXTS, use_stemmer=True)
    )
    # No two metrics write the same score.
    every = [compute(name, *example[:2], **example[2]) for name, example in EXAMPLES.items()]
    assert len(set().union(*every)) == sum(len(scores) for scores in every)


def test_arrays_tensors_and_columns():
    expected = compute("accuracy", CLASSES, TRUE_CLASSES)
    assert compute("accuracy", np.array(CLASSES), torch.tensor(TRUE_CLASSES)) == expected
    assert compute("accuracy", tuple(CLASSES), [bool(label) for label in TRUE_CLASSES]) == expected
    halves = torch.tensor([1.0, 2.5, 2.0], dtype=torch.bfloat16)
    assert compute("pearson", halves, np.float32([1, 2, 3])) == compute("pearson", halves.tolist(), [1, 2, 3])
    rows = Dataset.from_dict({"guess": GUESSES, "text": TEXTS})
    assert compute("chrf", rows["guess"], rows["text"]) == compute("chrf", GUESSES, TEXTS)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("rogue", ["a"], ["a"]), {}, "metric 'rogue' is unknown: did you mean 'rouge'?"),
        ((["bleu", "pearsn"], ["a"], ["a"]), {}, "metric 'pearsn' is unknown: did you mean 'pearson'?"),
        (("bleu", [], []), {}, "predictions is empty: there is nothing to score"),
        (("f1", np.zeros(1), np.zeros(0)), {}, "references is empty: there is nothing to score"),
        (("bleu", ["a"], ["a", "b"]), {}, "predictions has 1 entries, but references has 2"),
        (("bleu", "a b", "a c"), {}, "predictions is the single text 'a b', but must be a list"),
        (("rouge", ["a", "b"], ["a", None]), {}, "entry 2 of references is None, but each must be given"),
        (
            ("exact_match", ["a", 5], ["a", "5"]),
            {},
            "entry 2 of predictions is 5, but each must be given, and all be texts or none",
        ),
        (
            ("span_f1", ["a", "b"], [["a"], "b"]),
            {},
            "entry 2 of references is 'b', but each must be given",
        ),
        (
            ("bleu", ["a"], ["a"]),
            {"tokenise": "none"},
            "option of bleu 'tokenise' is unknown: did you mean 'tokenize'?",
        ),
        (("accuracy", [1], [1]), {"average": "micro"}, "option of accuracy 'average' is unknown: there are none"),
        (("bleu", ["a"], ["a"]), {"tokenize": "flores200"}, "'bleu' refuses this: tokenize is 'flores200', but must"),
        (
            ("bleu", ["a"], ["a"]),
            {"smooth_method": "ex"},
            "smooth_method is 'ex', but must be one of none, floor, add-k",
        ),
        (("f1", [1], [1]), {"average": "mean"}, "average is 'mean', but must be binary, macro or micro"),
        (("f1", [2], [1]), {}, "average is binary, but there are classes besides 0 and 1: choose macro or micro"),
        (("accuracy", ["a"], ["b"]), {}, "metric 'accuracy' refuses this: could not convert string to float: 'a'"),
        (("perplexity", [1.0], [0]), {}, "the sums are over 0 tokens, but must be over one at least"),
        (("perplexity", [1.0], [1]), {"num_bytes": 0}, "num_bytes is 0, but must be at least 1"),
    ],
)
def test_what_cannot_be_scored_is_said_in_a_sentence(arguments, options, message):
    with pytest.raises(UserError) as caught:
        compute(*arguments, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["accuracy", "f1", "matthews"])
def test_probabilities_are_not_classes(name):
    """Cast to integers, which evaluate does without a word, every probability below 1 is class 0."""
    with pytest.raises(UserError, match=r"continuous|besides 0 and 1"):
        compute(name, [0.9, 0.2], [1, 0])


@given(paired(st.integers(0, 3)), st.sampled_from(["macro", "micro"]))
def test_class_scores_are_scikit_learns(pair, average):
    guesses, labels = map(list, pair)
    scores = compute(["accuracy", "f1", "matthews"], guesses, labels, average=average)
    assert scores["accuracy"] == pytest.approx(100 * sklearn.metrics.accuracy_score(labels, guesses))
    expected = sklearn.metrics.f1_score(labels, guesses, average=average, zero_division=0)
    assert scores["f1"] == pytest.approx(100 * expected)
    if len(set(guesses)) > 1 and len(set(labels)) > 1:  # else it warns
        assert scores["matthews"] == pytest.approx(100 * sklearn.metrics.matthews_corrcoef(labels, guesses))
    assert scores == compute(["accuracy", "f1", "matthews"], guesses[::-1], labels[::-1], average=average)


def test_two_classes_by_hand():
    # 3 true positives, 1 false positive, 1 false negative, 3 true negatives.
    scores = compute(["accuracy", "f1", "matthews"], CLASSES, TRUE_CLASSES)
    assert scores["accuracy"] == 75
    assert scores["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 1))
    assert scores["matthews"] == pytest.approx(100 * (3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4))
    assert compute("f1", [0, 2, 1], [2, 2, 1], average="macro")["f1"] == pytest.approx(100 * (0 + 2 / 3 + 1) / 3)
    opposite = [1 - label for label in TRUE_CLASSES]
    assert compute("matthews", opposite, TRUE_CLASSES)["matthews"] == pytest.approx(-100)


@pytest.mark.filterwarnings("error")
def test_a_single_class():
    assert compute("f1", [1, 1], [1, 1])["f1"] == 100
    for guesses, labels in ([0, 0], [0, 0]), ([0, 0], [1, 1]), ([0, 0], [0, 1]), ([1, 1], [0, 0]):
        assert compute("f1", guesses, labels)["f1"] == 0
        assert compute("matthews", guesses, labels)["matthews"] == 0
    assert compute("f1", [2, 2], [2, 2], average="macro")["f1"] == 100
    assert compute("matthews", [1, 1], [1, 1])["matthews"] == 0


@given(paired(st.floats(-100, 100).map(lambda value: round(value, 2)), max_size=10))
def test_correlations_are_scipys(pair):
    guesses, values = map(list, pair)
    scores = compute("pearson", guesses, values)
    if len(set(guesses)) > 1 and len(set(values)) > 1:
        assert scores["pearson"] == pytest.approx(100 * scipy.stats.pearsonr(guesses, values).statistic)
        assert scores["spearman"] == pytest.approx(100 * scipy.stats.spearmanr(guesses, values).statistic)
    else:
        assert scores == {"pearson": 0, "spearman": 0}


@given(paired(st.floats(), max_size=5))
def test_a_correlation_is_never_nan(pair):
    """A score of NaN, kept as the best so far, is never beaten, as every comparison with it is false."""
    scores = compute("pearson", *pair)
    assert all(-100.001 <= score <= 100.001 for score in scores.values())


@pytest.mark.filterwarnings("error")
def test_an_undefined_correlation_is_zero():
    nothing = {"pearson": 0, "spearman": 0}
    for guesses in ([2.0, 2.0, 2.0], [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]):
        assert compute("pearson", guesses, [1.0, 2.0, 3.0]) == compute("pearson", [1.0, 2.0, 3.0], guesses) == nothing
    assert compute("pearson", [1.0], [1.0]) == nothing
    # A constant up to rounding correlates by chance.
    assert compute("pearson", [0.1 + 0.2, 0.3, 0.3], [1.0, 2.0, 3.0])["pearson"] == 0


@pytest.mark.parametrize("tokenize, smooth_method", [("13a", "exp"), ("none", "none"), ("char", "add-k")])
def test_bleu_and_chrf_are_sacrebleus(tokenize, smooth_method):
    scores = compute(["bleu", "chrf"], GUESSES, TEXTS, tokenize=tokenize, smooth_method=smooth_method)
    expected = sacrebleu.corpus_bleu(GUESSES, [TEXTS], tokenize=tokenize, smooth_method=smooth_method)
    assert scores["bleu"] == expected.score > 0
    assert scores["chrf"] == sacrebleu.corpus_chrf(GUESSES, [TEXTS]).score > 0
    assert f"tok:{tokenize}|smooth:{smooth_method}" in scores["bleu_signature"]
    assert scores["chrf_signature"].startswith("nrefs:1|") and sacrebleu.__version__ in scores["chrf_signature"]
    same = compute(["bleu", "chrf"], TEXTS, TEXTS, tokenize=tokenize, smooth_method=smooth_method)
    assert same["bleu"] == pytest.approx(100) and same["chrf"] == pytest.approx(100)


def test_force_silences_the_warning_of_tokenised_text(caplog):
    tokenised = ["this is so ."] * 101
    with caplog.at_level(logging.WARNING, logger="sacrebleu"):
        compute("bleu", tokenised, tokenised, force=True)
        assert not caplog.records
        compute("bleu", tokenised, tokenised)
        assert "tokenized" in caplog.text


@given(texts, st.booleans())
def test_rouge_is_rouge_scores(guesses, use_stemmer):
    references = [*guesses[1:], "a b Z"]
    scores = compute("rouge", guesses, references, use_stemmer=use_stemmer)
    types = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(types, use_stemmer=use_stemmer)
    expected = [scorer.score(reference, guess) for guess, reference in zip(guesses, references, strict=True)]
    for name in types:
        mean = np.mean([score[name].fmeasure for score in expected])
        assert scores[name] == pytest.approx(100 * mean)


def test_rouge_by_hand():
    scores = compute("rouge", ["the cat was found under the bed"], ["The cat was under the bed!"])
    assert scores["rouge1"] == pytest.approx(100 * 2 * 6 / (7 + 6))  # all six words of the reference
    assert scores["rouge2"] == pytest.approx(100 * 2 * 4 / (6 + 5))  # all pairs but 'was under'
    assert scores["rougeL"] == pytest.approx(100 * 2 * 6 / (7 + 6))
    assert scores["rouge_signature"].startswith("f-measure:mean|case:lc|tok:[a-z0-9]+|stem:no|rouge_score:0.")
    assert compute("rouge", ["running its"], ["runs it"], use_stemmer=True)["rouge1"] == 50  # short words stay
    assert compute("rouge", ["running"], ["runs"], use_stemmer=True)["rouge1"] == 100


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("guesses, references", [(["", ""], ["", ""]), (["a", ""], ["", "b"]), (["", ""], ["a", "b"])])
def test_empty_texts_score_nothing(guesses, references):
    scores = compute(["bleu", "chrf", "rouge"], guesses, references)
    assert all(score == 0 for name, score in scores.items() if "signature" not in name)


def test_word_error_rate_counts_words_left_out_put_in_and_mistaken():
    said = ["one two three four", "five six"]
    for guesses, errors in (
        (["one two three four", "five six"], 0),
        (["one three four", "five six"], 1),
        (["one two two three for", "five six"], 2),
        (["", "six five nine"], 4 + 2),  # of which five is put in before, and nine takes the place of the other
        (["a b c d e f g h", "i j k"], 8 + 3),
    ):
        assert compute("word_error_rate", guesses, said)["word_error_rate"] == pytest.approx(100 * errors / 6), guesses
    assert compute("word_error_rate", ["", " "], ["", ""])["word_error_rate"] == 0
    assert compute("word_error_rate", ["one"], [""])["word_error_rate"] == 100


def test_exact_match_is_to_the_character():
    assert compute("exact_match", ["a", "a ", "A", "a\u0308"], ["a", "a", "a", "ä"])["exact_match"] == 25
    assert compute("exact_match", ["", "x"], ["", "x"])["exact_match"] == 100


def test_spans_by_hand():
    def span(prediction, reference):
        return tuple(compute("span_f1", [prediction], [reference]).values())

    assert span("The  Denver\tBroncos.", "denver broncos") == (100, 100)
    assert span("an A, the", "") == (100, 100)  # nothing is left, which is right where nothing is asked for
    assert span("theatre", "the atre") == (0, 0)  # articles are words
    assert span("in the city of New York", "New York City") == (0, pytest.approx(100 * 2 * 3 / (5 + 3)))
    assert span("no no no", "no no yes") == (0, pytest.approx(100 * 2 * 2 / (3 + 3)))  # a word counts as often as it is
    assert span("U.S.", "US") == (100, 100)
    assert span("Ünder", "ünder") == (100, 100)
    assert span("Denver", ["Broncos", "Denver Broncos"]) == (0, pytest.approx(100 * 2 / 3))  # the best answer counts
    assert span("Denver", ["Broncos", "denver"]) == (100, 100)
    assert span("", []) == span("", [""]) == (100, 100)
    assert span("Denver", []) == span("", ["Denver"]) == (0, 0)
    scores = compute("span_f1", ["Denver", "x"], [["Denver", "Broncos"], []])
    assert scores == {"span_exact_match": 50, "span_f1": 50}


class Words(Tokenizer):
    """Words in lower case: what ROUGE-1 compares is then what SQuAD's F1 compares."""

    def tokenize(self, text):
        return text.lower().split()


@given(st.text(alphabet="bcX \n", min_size=1, max_size=12), st.text(alphabet="bcX \n", min_size=1, max_size=12))
def test_token_f1_is_rouge_1_of_its_words(prediction, reference):
    expected = RougeScorer(["rouge1"], tokenizer=Words()).score(reference, prediction)["rouge1"].fmeasure
    both_empty = not prediction.split() and not reference.split()
    scores = compute("span_f1", [prediction], [reference])
    assert scores["span_f1"] == pytest.approx(100 if both_empty else 100 * expected)
    assert scores["span_f1"] >= scores["span_exact_match"]


def test_perplexity_by_hand():
    # A uniform choice among 256 bytes costs 8 bits a byte, however it is cut into sums.
    text = "wörter"
    size = len(text.encode())
    assert size == 7
    nats = size * math.log(256)
    whole = compute("perplexity", [nats], [size], num_bytes=size)
    assert whole == {"perplexity": pytest.approx(256), "bits_per_byte": pytest.approx(8)}
    parts = compute("perplexity", [math.log(256) * count for count in (1, 2, 4)], [1, 2, 4], num_bytes=size)
    assert parts == {name: pytest.approx(score) for name, score in whole.items()}
    # In tokens of two bytes the same likelihood is another perplexity, but the same bits per byte.
    pairs = compute("perplexity", [6 * math.log(256)], [3], num_bytes=6)
    assert pairs == {"perplexity": pytest.approx(256**2), "bits_per_byte": pytest.approx(8)}
    # Sums are pooled: not the mean of perplexities.
    assert compute("perplexity", [0.0, 3 * math.log(16)], [1, 3]) == {"perplexity": pytest.approx(8)}


def test_perplexity_is_torchs_cross_entropy():
    logits, labels = torch.randn(4, 5, 11, dtype=torch.float64), torch.randint(11, (4, 5))
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(4, 5)
    scores = compute("perplexity", losses.sum(1), [5] * 4)
    assert scores["perplexity"] == pytest.approx(losses.mean().exp().item())


@pytest.mark.parametrize("nats", [math.inf, math.nan, 1e6])
def test_a_perplexity_without_bound_is_infinite(nats):
    """NaN would be kept as the best for ever, and exp of a large number is an error in Python."""
    assert compute("perplexity", [nats, 1.0], [1, 1])["perplexity"] == math.inf
