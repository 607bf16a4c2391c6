"""F1: the harmonic mean of precision and recall of class ids."""

import datasets
import evaluate
from sklearn.metrics import f1_score


class F1(evaluate.Metric):
    """The harmonic mean of precision and recall, in percent, by scikit-learn; 0 where no class is hit."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Pedregosa et al. 2011, Scikit-learn: Machine Learning in Python, JMLR 12.",
            inputs_description=(
                "predictions, references: class ids. average: 'binary' is the F1 of class 1, of classes 0 and 1; "
                "'macro' the mean over the classes that occur; 'micro' counts all classes together."
            ),
            # Not int64, which would silently cut a probability to 0: scikit-learn refuses numbers between classes.
            features=datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[float], references: list[float], average: str = "binary") -> dict[str, float]:
        if average not in ("binary", "macro", "micro"):
            raise ValueError(f"average is '{average}', but must be binary, macro or micro")
        if average == "binary" and not set(predictions + references) <= {0, 1}:
            raise ValueError("average is binary, but there are classes besides 0 and 1: choose macro or micro")
        return {"f1": 100 * float(f1_score(references, predictions, average=average, zero_division=0))}
