"""Perplexity and bits per byte, from negative log-likelihoods that a model gave."""

import math

import datasets
import evaluate


class Perplexity(evaluate.Metric):
    """exp of the negative log-likelihood per token and, for models with other tokens to compare, bits per byte.

    Sums of single texts or batches are pooled, so that every token weighs the same. A likelihood that is not a number,
    or too small to tell from zero, gives infinity.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=(
                "Jelinek et al. 1977, Perplexity: a measure of the difficulty of speech recognition tasks, JASA 62; "
                "bits per byte as Gao et al. 2020, The Pile, arXiv 2101.00027, section 3.1."
            ),
            inputs_description=(
                "predictions: negative log-likelihoods in nats, each summed over some tokens. references: how many "
                "tokens each is a sum over. num_bytes: length of the whole text in UTF-8, for bits_per_byte."
            ),
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(
        self, predictions: list[float], references: list[int], num_bytes: int | None = None
    ) -> dict[str, float]:
        nats, tokens = math.fsum(predictions), sum(references)
        if tokens < 1:
            raise ValueError(f"the sums are over {tokens} tokens, but must be over one at least")
        if num_bytes is not None and num_bytes < 1:
            raise ValueError(f"num_bytes is {num_bytes}, but must be at least 1")
        if math.isnan(nats):
            nats = math.inf
        scores = {"perplexity": _exp(nats / tokens)}
        if num_bytes is not None:
            scores["bits_per_byte"] = nats / math.log(2) / num_bytes
        return scores


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
