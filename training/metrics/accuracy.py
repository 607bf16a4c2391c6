"""Accuracy: how many class ids are right."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their references, in percent, by scikit-learn."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Pedregosa et al. 2011, Scikit-learn: Machine Learning in Python, JMLR 12.",
            inputs_description="predictions, references: class ids.",
            # Not int64, which would silently cut a probability to 0: scikit-learn refuses numbers between classes.
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"accuracy": 100 * float(accuracy_score(references, predictions))}
