"""R-Drop (Wu et al. 2021, arXiv 2106.14448): two passes of one batch, each with its own dropout, are made to agree.

Shapes: B batch, T tokens, V vocabulary or classes.
"""

import torch
from torch import Tensor, nn

from triptych.losses import IGNORE, at_least_float32, next_token_labels


def consistent_loss(
    model: nn.Module, batch: dict[str, Tensor], items: Tensor, weight: float, predicts_next: bool, **options
) -> Tensor:
    """Return the share that `batch` has in the mean loss over the `items` of an update.

    It is half of what the paper minimises, so that a weight of 0 leaves the mean of the two cross-entropies.

    Args:
        weight: of the disagreement, the paper's alpha.
        predicts_next: whether logits predict the label of the next token instead of their own.
        **options: of the model's forward.
    """
    batch = twice(batch)
    output = model(**batch, num_items_in_batch=2 * items, output_logits=True, **options)
    labels = next_token_labels(batch["labels"]) if predicts_next else batch["labels"]
    return output.loss + weight / 2 * disagreement(output.logits, labels) / items


def twice(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `batch` with every row a second time, after all the others, so that each has dropout of its own."""
    return {name: torch.cat([value, value]) for name, value in batch.items()}


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
