"""Scores of predictions: `evaluate` metrics as local modules, as the Hub's scripts cannot be fetched offline.

| metric | scores | of |
|---|---|---|
| `accuracy`, `f1`, `matthews` | the same names | class ids |
| `pearson` | `pearson`, `spearman` | numbers |
| `exact_match`, `word_error_rate` | the same names | texts |
| `span_f1` | `span_exact_match`, `span_f1` | answers cut from a text |
| `bleu`, `chrf` | the same names, `bleu_signature`, `chrf_signature` | translations |
| `rouge` | `rouge1`, `rouge2`, `rougeL`, `rouge_signature` | summaries |
| `perplexity` | `perplexity`, `bits_per_byte` | negative log-likelihoods |

One convention: every score is in percent, correlations too (a coefficient of 0.8 is 80), as GLUE reports them (Wang et
al. 2018, arXiv 1804.07461); perplexity and bits per byte are what their names say. A correlation that is undefined, as
of constant predictions, is 0 and never NaN, so that it cannot win a comparison.

Each file stands alone: `evaluate.load("training/metrics/rouge.py")` takes it too.
"""

import inspect
import tempfile
from collections.abc import Iterable, Sequence

from triptych.training.errors import UserError, as_user_error, unknown_name

METRICS = (
    "accuracy",
    "bleu",
    "chrf",
    "exact_match",
    "f1",
    "matthews",
    "pearson",
    "perplexity",
    "rouge",
    "span_f1",
    "word_error_rate",
)


def compute(
    name: str | Sequence[str], predictions: Sequence, references: Sequence, **options
) -> dict[str, float | str]:
    """Return the scores of `predictions` against `references`, one reference for each.

    Labels to be ignored, such as -100, are to be left out before.

    Args:
        name: one of `METRICS`, or several.
        predictions, references: lists, arrays or tensors of one dimension.
        **options: of the metrics; each gets those that it knows.

    Raises:
        UserError: an unknown name or option, nothing to score, unequal lengths, or values that a metric refuses.
    """
    from evaluate.loading import import_main_class  # takes seconds, which only a score should cost

    names = [name] if isinstance(name, str) else list(name)
    for unknown in names:
        if unknown not in METRICS:
            raise unknown_name("metric", unknown, METRICS)
    _check_entries("predictions", predictions)
    _check_entries("references", references)
    if len(predictions) != len(references):
        raise UserError(f"predictions has {len(predictions)} entries, but references has {len(references)}")
    classes = {name: import_main_class(f"{__name__}.{name}") for name in names}
    allowed = {name: _option_names(metric) for name, metric in classes.items()}
    _check_options(options, allowed)
    scores = {}
    # evaluate makes a folder for its files even where it writes none.
    with tempfile.TemporaryDirectory() as folder:
        for name, metric in classes.items():
            known = {option: value for option, value in options.items() if option in allowed[name]}
            with as_user_error(f"metric '{name}' refuses this"):
                instance = metric(keep_in_memory=True, cache_dir=folder)
                scores |= instance.compute(predictions=predictions, references=references, **known)
    return scores


def _check_entries(name: str, values: Sequence) -> None:
    if isinstance(values, str):
        raise UserError(f"{name} is the single text '{values[:40]}', but must be a list")
    if len(values) == 0:
        raise UserError(f"{name} is empty: there is nothing to score")
    are_texts = isinstance(values[0], str)
    # evaluate looks at the first entry only, and takes the others' string for a text.
    for index, value in enumerate(values):
        if value is None or isinstance(value, str) != are_texts:
            problem = "but each must be given, and all be texts or none"
            raise UserError(f"entry {index + 1} of {name} is {value!r:.40}, {problem}")


def _check_options(options: Iterable[str], allowed: dict[str, set[str]]) -> None:
    what, every = f"option of {', '.join(allowed)}", set().union(*allowed.values())
    for option in options:
        if not every:
            raise UserError(f"{what} '{option}' is unknown: there are none")
        if option not in every:
            raise unknown_name(what, option, every)


def _option_names(metric: type) -> set[str]:
    return set(inspect.signature(metric._compute).parameters) - {"self", "predictions", "references"}
