"""What the heads minimise. Every loss ignores the label -100, is a sum over items divided by `num_items_in_batch` when
the trainer gives it (so that accumulated steps weigh each item alike), and their mean otherwise.

Shapes: B batch, T tokens, V vocabulary, L labels.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .tracing import is_tracing

IGNORE = -100


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **kwargs,
) -> torch.Tensor:
    """Cross-entropy of `logits` [..., V] against `labels` [...], smoothed as in Szegedy et al. 2016, section 7.

    `z_loss` is the weight of the square of the logits' log-sum-exp, which it keeps near zero (Chowdhery et al. 2022,
    arXiv 2204.02311, section 5).

    Raises:
        ValueError: `labels` has another shape than `logits`, or a label outside the vocabulary.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"`labels` has shape {list(labels.shape)}, but must be {list(logits.shape[:-1])}.")
    labels = labels.to(logits.device)
    check_labels(labels, logits.shape[-1])
    logits, labels = at_least_float32(logits).flatten(0, -2), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        total = total + z_loss * (logits.logsumexp(-1).square() * (labels != IGNORE)).sum()
    return per_item(total, (labels != IGNORE).sum(), num_items_in_batch)


def projected_cross_entropy(
    states: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """`cross_entropy` of the logits `scale * (states @ weight.T + bias)`, which are never there all at once.

    A table of all logits takes more memory, and more time to read and write, than the rest of a small model. Here some
    rows of it are made at a time, turned into gradients while they are in the cache, and forgotten.

    Args:
        states: [N, E].
        labels: [N], all of them from 0 to V - 1.
        weight, bias: [V, E] and [V].
    """
    check_labels(labels, len(weight))
    loss_of_rows = partial(cross_entropy_of_rows, labels, label_smoothing, z_loss)
    items = item_count(len(labels), num_items_in_batch, states.device)
    return ProjectedLoss.apply(states, weight, bias, scale, loss_of_rows, items)


# Entries of a table of logits that are made at a time, and the fewest rows, for which all of `weight` is read.
TABLE_SIZE, FEWEST_ROWS = 2**22, 256

# Of some rows of logits [C, V], which are theirs to write on, given which rows these are: the sum of a loss, and its
# gradient [C, V] if that is needed.
LossOfRows = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None]]


class ProjectedLoss(torch.autograd.Function):
    """The sum of a loss over the rows of logits, divided by `items`.

    Gradients are made on the way forward, where the logits are. That of `weight`, which may be as large as all else, is
    divided there, in place, so that the way back needs no copy of it.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, scale, loss_of_rows: LossOfRows, items: torch.Tensor | int):
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
        inputs, table = states.to(dtype), weight.to(dtype)
        exact = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=states.device)
        needs_gradient = any(ctx.needs_input_grad)
        grad_states = []
        grad_weight, grad_bias = (  # those of a frozen projection, as under an adapter, need not be made
            torch.zeros_like(parameter, dtype=exact) if is_needed else None
            for parameter, is_needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        size = max(TABLE_SIZE // len(weight), FEWEST_ROWS)
        for number, part in enumerate(inputs.split(size)):
            logits = gradient = None  # the last tables go before the next is made
            logits = F.linear(part, table, None if bias is None else bias.to(dtype)).to(exact)
            logits = logits if scale == 1 else logits * scale
            loss, gradient = loss_of_rows(logits, slice(number * size, (number + 1) * size), needs_gradient)
            total += loss
            if not needs_gradient:
                continue
            if scale != 1:
                gradient *= scale
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(dtype)
            grad_states.append(gradient @ table)
            if grad_weight is None:
                continue
            if dtype == exact:
                grad_weight.addmm_(gradient.T, part)
            else:
                grad_weight += gradient.T @ part
        if grad_weight is not None:
            grad_weight /= items
        if needs_gradient:
            ctx.items = items
            given = (torch.cat(grad_states), states), (grad_weight, weight), (grad_bias, bias)
            ctx.save_for_backward(*(None if gradient is None else gradient.to(of.dtype) for gradient, of in given))
        return total / items

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        grad_states, grad_weight, grad_bias = ctx.saved_tensors
        grad_total = grad_loss / ctx.items
        if grad_weight is not None and not (grad_loss.device.type == "cpu" and grad_loss == 1):
            grad_weight = grad_weight * grad_loss  # also by one, where to look would be to wait for the device
        grad_bias = None if grad_bias is None else grad_bias * grad_total
        return grad_states * grad_total, grad_weight, grad_bias, None, None, None


def cross_entropy_of_rows(
    labels: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    logits: torch.Tensor,
    rows: slice,
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `ProjectedLoss` asks for, of the sum that `cross_entropy` divides."""
    answers, vocabulary = labels[rows, None], logits.shape[-1]
    shares = logits.log_softmax(-1)  # [C, V]
    chosen = shares.gather(-1, answers)
    total = -(1 - label_smoothing) * chosen.sum()
    if label_smoothing:
        total -= label_smoothing / vocabulary * shares.sum()
    if z_loss:
        normaliser = logits.gather(-1, answers) - chosen  # log-sum-exp
        total += z_loss * normaliser.square().sum()
    if not needs_gradient:
        return total, None
    gradient = shares.exp_()
    if z_loss:
        gradient *= 1 + 2 * z_loss * normaliser
    if label_smoothing:
        gradient -= label_smoothing / vocabulary
    gradient.scatter_add_(-1, answers, gradient.new_full(chosen.shape, label_smoothing - 1))
    return total, gradient


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Sums of exponentials need more than half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def per_item(total: torch.Tensor, count: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor:
    """`total` over the items of the whole (accumulated) batch; nothing to learn from is a loss of zero."""
    return total / item_count(count, num_items_in_batch, total.device)


def item_count(
    count: torch.Tensor | int, num_items_in_batch: torch.Tensor | int | None, device: torch.device
) -> torch.Tensor:
    """What a sum of losses is divided by: the trainer's number of items, or those that are here; one at least."""
    return torch.as_tensor(count if num_items_in_batch is None else num_items_in_batch, device=device).clamp(min=1)


def check_labels(labels: torch.Tensor, num_classes: int):
    """On a CPU the check is free; elsewhere it would wait for the device, which checks by itself."""
    if labels.device.type != "cpu" or is_tracing(labels):
        return
    wrong = labels[(labels >= num_classes) | ((labels < 0) & (labels != IGNORE))]
    if wrong.numel():
        raise ValueError(f"`labels` has {wrong[0]}, but labels must be {IGNORE} or from 0 to {num_classes - 1}.")


def next_token_labels(
    labels: torch.Tensor, attention_mask: torch.Tensor | None = None, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """At each token, the label of the next real token of its document: [B, T], -100 where there is none.

    Pads between tokens are skipped, and neither a pad nor another document's end predicts anything.
    """
    if attention_mask is None and documents is None:
        return F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    real = torch.ones_like(labels, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    slots = torch.arange(labels.shape[1], device=labels.device)
    last_real = torch.where(real, slots, -1).cummax(-1)[0]
    previous = F.pad(last_real[:, :-1], (1, 0), value=-1)  # the real token before each slot
    is_predicted = real & (previous >= 0)
    previous = previous.clamp(min=0)
    if documents is not None:
        is_predicted &= documents == documents.gather(1, previous)
    targets = torch.full_like(labels, IGNORE)
    return targets.scatter_reduce(1, previous, torch.where(is_predicted, labels, IGNORE), reduce="amax")


def classification_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    problem_type: str | None,
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
    **kwargs,
) -> torch.Tensor:
    """Loss of `logits` [B, L]: squared error for "regression" (labels [B] or [B, L]), cross-entropy for
    "single_label_classification" (integers [B]), binary cross-entropy for "multi_label_classification" (floats [B, L]).

    Without a `problem_type`: one label is a regression, integer labels are single, others are multiple labels.
    """
    num_labels = logits.shape[-1]
    if problem_type is None:
        is_single = labels.dtype in (torch.long, torch.int)
        problem_type = "single_label_classification" if is_single else "multi_label_classification"
        problem_type = "regression" if num_labels == 1 else problem_type
    if problem_type == "single_label_classification":
        return cross_entropy(logits, labels, num_items_in_batch, label_smoothing)
    if labels.numel() != logits.numel():
        raise ValueError(f"`labels` has shape {list(labels.shape)}, but must be {list(logits.shape)}.")
    elementwise = F.mse_loss if problem_type == "regression" else F.binary_cross_entropy_with_logits
    logits = at_least_float32(logits)
    labels = labels.to(logits).view_as(logits)
    is_given = labels != IGNORE
    each = torch.where(is_given, elementwise(logits, labels, reduction="none"), 0.0)
    return per_item(each.sum(), is_given.sum(), num_items_in_batch)


def span_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor,
    end_positions: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of a span's two ends: logits [B, T], positions [B]; a position outside the text is ignored.

    Items are texts: with `num_items_in_batch`, the loss of each end is the sum over texts divided by it. `padding`
    [B, T] is True on real tokens.
    """

    def end_loss(name: str, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.view(-1).to(logits.device)
        if positions.shape[0] != logits.shape[0]:
            raise ValueError(f"`{name}` has shape [{len(positions)}], but must be [{len(logits)}].")
        last = logits.shape[-1] - 1
        outside = (positions < 0) | (positions > last)
        if padding is not None:
            outside = outside | ~padding.gather(1, positions.clamp(0, last)[:, None])[:, 0]
        return cross_entropy(logits, positions.masked_fill(outside, IGNORE), num_items_in_batch)

    start_loss = end_loss("start_positions", start_logits, start_positions)
    return (start_loss + end_loss("end_positions", end_logits, end_positions)) / 2
