"""R-Drop (Wu et al. 2021, arXiv 2106.14448): two passes of one batch, each with its own dropout, are made to agree.

Shapes: B batch, T tokens, V vocabulary or classes.
"""

import torch
from torch import Tensor

from triptych import TriptychPreTrainedModel
from triptych.losses import IGNORE, at_least_float32
from triptych.training.training_loss import Inputs, TrainingLoss


class Consistency(TrainingLoss):
    """Cross-entropy of two passes, and their disagreement.

    It is half of what the paper minimises, so that a weight of 0 leaves the mean of the two cross-entropies.

    Args:
        model: gives a distribution at each label.
        weight: of the disagreement, the paper's alpha.
    """

    def __init__(self, model: TriptychPreTrainedModel, weight: float):
        super().__init__(model)
        self.weight = weight

    def prepare(self, inputs: Inputs) -> Inputs:
        return twice(inputs) | {"num_items_in_batch": 2 * self.items(inputs), "output_logits": True}

    def replace(self, inputs: Inputs, output) -> Tensor:
        labels = self.labels_of_logits(inputs)
        return output.loss + self.weight * disagreement(output.logits, labels) / inputs["num_items_in_batch"]


def twice(inputs: Inputs) -> Inputs:
    """Return `inputs` with every row a second time, after all the others, so that each has dropout of its own."""
    return {
        name: torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in inputs.items()
    }


def disagreement(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how far the two halves of a batch made by `twice` are apart, in nats, summed over its labels.

    Args:
        logits: [2 B, ..., V].
        labels: [2 B, ...], what each of the logits is to predict; -100 is left out.

    Returns:
        Half of KL(first, second) + KL(second, first), equation 2 of the paper, summed over the labels of one half.
    """
    first, second = at_least_float32(logits).log_softmax(-1).chunk(2)
    # p log(p / q) + q log(q / p) = (p - q) (log p - log q)
    divergences = ((first.exp() - second.exp()) * (first - second)).sum(-1)
    return divergences[labels.chunk(2)[0] != IGNORE].sum() / 2
