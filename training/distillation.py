"""Distillation: a student learns what a trained teacher says of the same batch, beside its labels.

| signal | what the student learns | source |
|---|---|---|
| `outputs` | the teacher's distribution p at each label, t^2 KL(p, q) with p, q = softmax(logits / t) | Hinton 2015 |
| `hidden_states` | states of paired layers, (W s - s')^2; W is learnt where widths differ, else left out | Jiao 2020 |
| `attentions` | attention maps of paired layers, KL at each token, head by head | Wang 2020, section 3.1 |
| `relations` | softmax(A B^T / sqrt(d)) of queries, keys or values with heads cut anew, KL at each token | Wang 2021 |

Hinton et al., arXiv 1503.02531; Jiao et al., arXiv 1909.10351, after Romero et al. 2015, arXiv 1412.6550; Wang et al.,
arXiv 2002.10957 and 2012.15828. The student may begin as some of the teacher's layers (Sanh et al. 2019, arXiv
1910.01108, section 3). For what a teacher writes see `sequence_distillation`.

A label is an item of the loss. The other signals are means over the real tokens of a text, which weighs as many items
as it has labels, and over heads and pairs of layers. So neither pads, nor rows that come twice, nor how an update is
spread over batches and processes changes the loss.

Shapes: B batch, T tokens, S keys, H heads, D width of the student, D' of the teacher, V vocabulary or classes, N
labels, K logits that are looked at.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from triptych import TriptychPreTrainedModel
from triptych.heads import TriptychTokenProjection
from triptych.losses import IGNORE, ProjectedLoss, at_least_float32
from triptych.training.pairing import (
    LayerReader,
    Projected,
    check_pair,
    check_student,
    pair_layers,
    probe,
    teacher_inputs,
)
from triptych.training.recipe import DistillationRecipe
from triptych.training.training_loss import Inputs, TrainingLoss

States = dict[str, tuple[Tensor, ...]]  # hidden states, by stack
PROJECTIONS = "distillation_projections"  # what the student calls its learnt projections


@dataclass
class SoftLabels:
    """What a teacher says at N labels.

    Attributes:
        logits: [N, K], of all tokens or of the likeliest.
        indices: [N, K], which tokens these are, or None where they are all.
    """

    logits: Tensor
    indices: Tensor | None = None


def soft_labels(logits: Tensor, top_k: int | None = None) -> SoftLabels:
    """Return what is learnt of a teacher's `logits` [N, V]: all, or the `top_k` largest of each."""
    return SoftLabels(logits) if top_k is None else SoftLabels(*logits.topk(min(top_k, logits.shape[-1])))


def divergence_of_rows(
    soft: SoftLabels, temperature: float, logits: Tensor, rows: slice = slice(None), needs_gradient: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return t^2 KL(p, q) summed over `rows` of N labels, and its gradient where asked for, as `ProjectedLoss` asks.

    p is the teacher's distribution, over the logits that are looked at, and q the student's over all. What the teacher
    holds impossible, a logit of -inf, counts nothing.

    Args:
        logits: the student's, of these rows: [C, V].
    """
    log_q = (logits / temperature).log_softmax(-1)
    log_p = (soft.logits[rows].to(logits) / temperature).log_softmax(-1)
    p = log_p.exp()
    indices = None if soft.indices is None else soft.indices[rows]
    terms = p * (log_p - (log_q if indices is None else log_q.gather(-1, indices)))
    total = temperature**2 * terms.masked_fill(p == 0, 0).sum()
    if not needs_gradient:
        return total, None
    gradient = log_q.exp()
    gradient = gradient - p if indices is None else gradient.scatter_add(-1, indices, -p)
    return total, temperature * gradient


def mean_of_real(values: Tensor, real: Tensor) -> Tensor:
    """Return the mean of `values` [B, T] over the `real` tokens [B, T] of each text: [B]."""
    return values.masked_fill(~real, 0).sum(-1) / real.sum(-1).clamp(min=1)


def state_errors(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Return the mean squared error of states [B, T, D'] at the `real` tokens of each text: [B]."""
    return mean_of_real((at_least_float32(student) - at_least_float32(teacher)).square().mean(-1), real)


def map_divergences(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Return KL(teacher, student) of attention maps [B, H, T, S], a mean over heads and `real` tokens: [B]."""
    student, teacher = at_least_float32(student), at_least_float32(teacher)
    # What a window of the student's hides from it has a weight of 0, of which there is no logarithm.
    smallest = torch.finfo(student.dtype).tiny
    log_ratio = teacher.clamp(min=smallest).log() - student.clamp(min=smallest).log()
    return mean_of_real((teacher * log_ratio).sum(-1).mean(1), real)


def relations(left: Tensor, right: Tensor, heads: int, visible: Tensor) -> Tensor:
    """Return log softmax(A B^T / sqrt(d)) of projected states [B, T, D], cut into `heads` of width d: [B, heads, T, T].

    Args:
        visible: [B, T, T], True where a token (row) is related with another.
    """
    left, right = (states.unflatten(-1, (heads, -1)).transpose(1, 2) for states in (left, right))
    scores = at_least_float32(left @ right.transpose(-2, -1)) * left.shape[-1] ** -0.5
    return scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min).log_softmax(-1)


def relation_divergences(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """Return KL(teacher, student) of `relations`, a mean over heads and `real` tokens: [B]."""
    return mean_of_real((teacher.exp() * (teacher - student)).sum(-1).mean(1), real)


class Distillation(TrainingLoss):
    """The labels' loss and the signals of `recipe`, each times its weight.

    Of a teacher only logits, hidden states and attentions are read; relations need layers of our names, too. The
    student's logits need not be there for tokens without a label, and not all at once.

    Args:
        student: of this family. Where widths of hidden states differ it gets projections, which learn with it.
        teacher: of this family or of transformers; it is put into eval mode and learns no more.

    Raises:
        UserError: the two cannot be paired.
    """

    def __init__(self, student: TriptychPreTrainedModel, teacher: PreTrainedModel, recipe: DistillationRecipe):
        self.signals = recipe.signals()
        self.labels_weight = recipe.labels
        check_student(student, self.signals)
        self.teacher = teacher.eval().requires_grad_(False)
        self.reader, self.teacher_reader = (LayerReader(model, self.signals) for model in (student, teacher))
        given = probe(student, self.reader), probe(teacher, self.teacher_reader)
        check_pair(student, teacher, self.signals, *given)
        self.pairs = pair_layers(self.signals, *given)
        if "hidden_states" in self.signals:
            self._add_projections(student, *(layers["hidden_states"] for _, layers in given))
        super().__init__(student)
        self.hooks += [*self.reader.hooks, *self.teacher_reader.hooks]
        head = getattr(student, "lm_head", None)
        if "outputs" in self.signals and isinstance(head, TriptychTokenProjection):
            # The loss is made within the head, as engines that shard weights make them whole there alone.
            self.hooks.append(head.register_forward_hook(self._compare_rows, with_kwargs=True))

    def remove(self) -> None:
        super().remove()
        if hasattr(self.model, PROJECTIONS):
            delattr(self.model, PROJECTIONS)

    def _add_projections(self, student: TriptychPreTrainedModel, ours: States, theirs: States) -> None:
        """Give the student a projection for each stack whose states are of another width than the teacher's."""
        widths = {
            stack: (ours[stack][0].shape[-1], theirs[stack][0].shape[-1]) for stack in self.pairs["hidden_states"]
        }
        linears = {stack: nn.Linear(*both, bias=False) for stack, both in widths.items() if both[0] != both[1]}
        if linears:
            setattr(student, PROJECTIONS, nn.ModuleDict(linears).to(student.device, student.dtype))

    @torch.no_grad()
    def prepare(self, inputs: Inputs) -> Inputs:
        read = teacher_inputs(self.teacher, inputs)
        output = self.teacher.to(inputs["input_ids"].device)(**read, **self.teacher_reader.start())
        self.layers = self.teacher_reader.stop(output)
        self.soft, self.divergence = None, None
        if outputs := self.signals.get("outputs"):
            is_given = self.labels_of_logits(inputs) != IGNORE
            self.soft = soft_labels(output.logits[is_given], outputs.top_k)
        return inputs | self.reader.start()

    def _compare_rows(self, head: nn.Module, args: tuple, options: dict[str, Any], output: Tensor) -> None:
        """Note how far the logits are from the teacher's that `head` has made the labels' loss of."""
        states, *labels = args
        if head.training and labels and labels[0] is not None:
            loss_of_rows = partial(divergence_of_rows, self.soft, self.signals["outputs"].temperature)
            scale = options.get("scale", 1.0)
            self.divergence = ProjectedLoss.apply(states, head.weight, head.bias, scale, loss_of_rows, 1)  # a sum

    def replace(self, inputs: Inputs, output: Any) -> Tensor:
        layers, items = self.reader.stop(output), self.items(inputs)
        loss = self.labels_weight * output.loss
        for name, signal in self.signals.items():
            total = self._compare_logits(inputs, output) if name == "outputs" else self._compare(name, inputs, layers)
            loss = loss + signal.weight * total / items
        self.layers, self.soft, self.divergence = None, None, None
        return loss

    def _compare_logits(self, inputs: Inputs, output: Any) -> Tensor:
        """Return the divergence at all labels, summed."""
        if self.divergence is not None:
            return self.divergence
        logits = output.logits[self.labels_of_logits(inputs) != IGNORE]
        return divergence_of_rows(self.soft, self.signals["outputs"].temperature, at_least_float32(logits))[0]

    def _compare(self, name: str, inputs: Inputs, layers: dict[str, dict[str, Any]]) -> Tensor:
        """Return what a signal of paired layers comes to, a mean over pairs, summed over the items of the batch."""
        values = []
        for stack, pairs in self.pairs[name].items():
            real = real_tokens(inputs, stack)
            for ours, theirs in pairs:
                both = layers[name][stack][ours], self.layers[name][stack][theirs]
                if name == "hidden_states":
                    values.append(state_errors(self._project(stack, both[0]), both[1], real))
                elif name == "attentions":
                    values.append(map_divergences(*both, real))
                else:
                    values.append(self._compare_relations(*both, real, self._visible(inputs, stack, real)))
        items = self.items_of_texts(inputs)  # a text may be several, of which one is chosen
        return (torch.stack(values).mean(0).view(len(items), -1).mean(1) * items).sum()

    def _project(self, stack: str, states: Tensor) -> Tensor:
        projections = getattr(self.model, PROJECTIONS, {})
        return projections[stack](states) if stack in projections else states

    def _compare_relations(self, ours: Projected, theirs: Projected, real: Tensor, visible: Tensor) -> Tensor:
        signal, values = self.signals["relations"], []
        heads = signal.heads or ours["query"].shape[2]
        for kind in signal.kinds:
            both = (relations(*related(states, kind), heads, visible) for states in (ours, theirs))
            values.append(relation_divergences(*both, real))
        return torch.stack(values).mean(0)

    def _visible(self, inputs: Inputs, stack: str, real: Tensor) -> Tensor:
        """Return which tokens are related with which: real ones of one document, and in a decoder earlier ones."""
        visible = real[:, None].expand(-1, real.shape[1], -1)
        documents = inputs.get("decoder_seq_idx" if stack == "decoder" else "seq_idx")
        if documents is not None:
            visible = visible & (documents[:, None] == documents[:, :, None])
        is_decoder = stack == "decoder" or self.model.config.topology == "decoder"
        return visible.tril() if is_decoder else visible


def related(states: Projected, kind: str) -> tuple[Tensor, Tensor]:
    """Return the two sides of a relation, [B, T, D] each: with fewer key/value heads, each for all that it serves."""
    heads = states["query"].shape[2]
    sides = (states[name] for name in kind.split("_"))
    return tuple(side.repeat_interleave(heads // side.shape[2], dim=2).flatten(2) for side in sides)


def real_tokens(inputs: Inputs, stack: str) -> Tensor:
    """Return which tokens of a stack are no pads: [B, T], with a row for each of several texts of an example."""
    if stack in ("decoder", "cross"):
        return inputs["labels"] != IGNORE
    mask = inputs.get("attention_mask")
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
    if inputs.get("target_mapping") is not None:  # a query for each label stands behind the tokens
        real = torch.cat([real, inputs["labels"] != IGNORE], 1)
    return real.flatten(0, -2)


def drop_projections(file: Path) -> None:
    """Take learnt projections out of a safetensors file of the student's weights."""
    weights = load_file(file)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{PROJECTIONS}.")}
    if len(kept) < len(weights):
        save_file(kept, file, metadata={"format": "pt"})
