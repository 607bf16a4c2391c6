"""BLEU of a corpus, by sacrebleu."""

import datasets
import evaluate
from sacrebleu.metrics import BLEU

# sacrebleu has more, which want a download or a package of their own.
TOKENIZERS = ("13a", "intl", "zh", "char", "none")


class Bleu(evaluate.Metric):
    """BLEU of the whole corpus, in percent, by sacrebleu, with the signature that defines the score.

    Where no word sequence of some length is right, `smooth_method` decides: with 'none' the score is 0.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=(
                "Papineni et al. 2002, BLEU: a Method for Automatic Evaluation of Machine Translation, ACL; "
                "as Post 2018, A Call for Clarity in Reporting BLEU Scores, WMT, arXiv 1804.08771, standardises it."
            ),
            inputs_description=(
                f"predictions, references: texts. tokenize: one of {', '.join(TOKENIZERS)}. "
                f"smooth_method: one of {', '.join(BLEU.SMOOTH_DEFAULTS)}. "
                "force: do not warn of text that looks tokenised already."
            ),
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        tokenize: str = "13a",
        smooth_method: str = "exp",
        force: bool = False,
    ) -> dict[str, float | str]:
        if tokenize not in TOKENIZERS:
            raise ValueError(f"tokenize is '{tokenize}', but must be one of {', '.join(TOKENIZERS)}")
        if smooth_method not in BLEU.SMOOTH_DEFAULTS:
            allowed = ", ".join(BLEU.SMOOTH_DEFAULTS)
            raise ValueError(f"smooth_method is '{smooth_method}', but must be one of {allowed}")
        metric = BLEU(tokenize=tokenize, smooth_method=smooth_method, force=force)
        score = metric.corpus_score(predictions, [references]).score
        return {"bleu": score, "bleu_signature": str(metric.get_signature())}
