"""Matthews' correlation of class ids."""

import warnings

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef


class Matthews(evaluate.Metric):
    """Matthews' correlation coefficient times 100, by scikit-learn, for two classes or more.

    It is undefined, and given as 0, where all predictions or all references are of one class.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=(
                "Matthews 1975, Comparison of the predicted and observed secondary structure of T4 phage lysozyme, "
                "Biochimica et Biophysica Acta 405 (2)."
            ),
            inputs_description="predictions, references: class ids.",
            # Not int64, which would silently cut a probability to 0: scikit-learn refuses numbers between classes.
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is one class
            return {"matthews": 100 * float(matthews_corrcoef(references, predictions))}
