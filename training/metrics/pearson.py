"""Pearson's and Spearman's correlations of numbers."""

import math
import warnings
from collections.abc import Callable

import datasets
import evaluate
from scipy.stats import DegenerateDataWarning, pearsonr, spearmanr


class Pearson(evaluate.Metric):
    """Pearson's correlation of the numbers and Spearman's of their ranks, times 100, by SciPy.

    Where a correlation is undefined, it is given as 0: of fewer than two pairs, where either side is constant (for
    Pearson's, constant up to rounding), and of numbers that are not finite.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Virtanen et al. 2020, SciPy 1.0, Nature Methods 17.",
            inputs_description="predictions, references: numbers.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {
            "pearson": 100 * _correlation(pearsonr, predictions, references),
            "spearman": 100 * _correlation(spearmanr, predictions, references),
        }


def _correlation(function: Callable, predictions: list[float], references: list[float]) -> float:
    if len(predictions) < 2 or not all(map(math.isfinite, predictions + references)):
        return 0.0
    undefined = (DegenerateDataWarning, RuntimeWarning)  # a constant side, and overflow
    with warnings.catch_warnings():
        for category in undefined:
            warnings.simplefilter("error", category)
        try:
            return float(function(predictions, references).statistic)
        except undefined:
            return 0.0
