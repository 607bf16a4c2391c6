"""Word error rate, by NLTK's edit distance."""

import datasets
import evaluate
from nltk.metrics.distance import edit_distance


class WordErrorRate(evaluate.Metric):
    """Words that are left out, put in or taken for others, as a share of the words that were said, in percent.

    It is above 100 where more is written than was said. Of references without a word it is 0 if none is written, else
    100.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Levenshtein 1966, Binary codes capable of correcting deletions, insertions and reversals.",
            inputs_description="predictions, references: texts, whose words stand between spaces.",
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        said = [reference.split() for reference in references]
        errors = sum(edit_distance(*both) for both in zip((text.split() for text in predictions), said, strict=True))
        words = sum(map(len, said))
        return {"word_error_rate": 100 * (errors / words if words else bool(errors))}
