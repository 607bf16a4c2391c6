"""ROUGE-1, ROUGE-2 and ROUGE-L, by rouge_score."""

from importlib.metadata import version

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

TYPES = ("rouge1", "rouge2", "rougeL")


class Rouge(evaluate.Metric):
    """The F-measure of shared words, word pairs and the longest common subsequence: the mean over texts, in percent.

    Words are the runs of a-z and 0-9 of the text in lower case: other letters separate words, so text in other scripts
    scores 0. Stemming, where chosen, is Porter's, of words longer than three letters. A text without words, on either
    side, scores 0.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries, ACL workshop.",
            inputs_description="predictions, references: texts. use_stemmer: compare the stems of words.",
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(
        self, predictions: list[str], references: list[str], use_stemmer: bool = False
    ) -> dict[str, float | str]:
        # The tokenizer is the scorer's own default, which it would announce in the log.
        scorer = RougeScorer(TYPES, tokenizer=DefaultTokenizer(use_stemmer))
        pairs = zip(references, predictions, strict=True)
        scores = [scorer.score(reference, prediction) for reference, prediction in pairs]
        means = {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in TYPES}
        stem = "porter" if use_stemmer else "no"
        signature = f"f-measure:mean|case:lc|tok:[a-z0-9]+|stem:{stem}|rouge_score:{version('rouge_score')}"
        return means | {"rouge_signature": signature}
