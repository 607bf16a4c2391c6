"""Exact match and token F1 of answers, as SQuAD defines them."""

import re
import string
from collections import Counter

import datasets
import evaluate

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class SpanF1(evaluate.Metric):
    """Exact match of answers and the F1 of the words they share: the mean over questions, in percent.

    Answers are compared in lower case, without ASCII punctuation, without the words a, an and the, and with words
    apart by single spaces (Rajpurkar et al. 2016, section 6.1). The best of a question's reference answers counts, for
    either score. That there is no answer is an empty text or an empty list, which an empty prediction matches
    (Rajpurkar et al. 2018).
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=(
                "Rajpurkar et al. 2016, SQuAD: 100,000+ Questions for Machine Comprehension of Text, EMNLP, "
                "arXiv 1606.05250; Rajpurkar et al. 2018, Know What You Don't Know, ACL, arXiv 1806.03822."
            ),
            inputs_description="predictions: texts. references: the right answer to each, or a list of right answers.",
            features=[
                datasets.Features({"predictions": text, "references": text}),
                datasets.Features({"predictions": text, "references": datasets.List(text)}),
            ],
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, float]:
        matches, overlaps = 0.0, 0.0
        for prediction, reference in zip(predictions, references, strict=True):
            answers = [reference] if isinstance(reference, str) else reference or [""]
            guess = _words(prediction)
            matches += max(guess == _words(answer) for answer in answers)
            overlaps += max(_f1(guess, _words(answer)) for answer in answers)
        return {"span_exact_match": 100 * matches / len(references), "span_f1": 100 * overlaps / len(references)}


def _words(answer: str) -> list[str]:
    return ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split()


def _f1(guess: list[str], answer: list[str]) -> float:
    if not guess or not answer:
        return float(guess == answer)
    shared = (Counter(guess) & Counter(answer)).total()
    return 2 * shared / (len(guess) + len(answer))  # of precision shared/guess and recall shared/answer
