"""Exact match: how many texts are right to the character."""

import datasets
import evaluate


class ExactMatch(evaluate.Metric):
    """The share of predictions that equal their references character for character, in percent."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        matches = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
        return {"exact_match": 100 * matches / len(references)}
