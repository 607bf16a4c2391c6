"""chrF of a corpus, by sacrebleu."""

import datasets
import evaluate
from sacrebleu.metrics import CHRF


class Chrf(evaluate.Metric):
    """The F-score of character sequences over the whole corpus, in percent, by sacrebleu, with its signature."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Popović 2015, chrF: character n-gram F-score for automatic MT evaluation, WMT.",
            inputs_description="predictions, references: texts.",
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float | str]:
        metric = CHRF()
        score = metric.corpus_score(predictions, [references]).score
        return {"chrf": score, "chrf_signature": str(metric.get_signature())}
