"""Losses in the place of the one that a model gives of itself, while it trains.

Each sits in hooks on the model, so that whatever calls the model has it: the loop here, transformers' Trainer, a loop
of one's own, and engines that replicate or shard it, which see one forward. In eval mode the model is itself. Of
several on one model each takes for the model's own loss what those before it made of it.
"""

from typing import Any

from torch import Tensor, nn

from triptych import TriptychForCausalLM, TriptychPreTrainedModel
from triptych.training.batching import count_items

Inputs = dict[str, Any]


class TrainingLoss:
    """Hooks on `model` by which `prepare` changes what it is given in training, and `replace` the loss it gives."""

    def __init__(self, model: nn.Module):
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def prepare(self, inputs: Inputs) -> Inputs:
        """Return what the model is to be given instead of `inputs`."""
        return inputs

    def replace(self, inputs: Inputs, output: Any) -> Tensor:
        """Return the share that a batch has in the mean loss over the items of an update.

        Args:
            inputs: what `prepare` returned.
            output: of the model, with its own `loss`.
        """
        raise NotImplementedError

    def remove(self) -> None:
        """Take all hooks away again."""
        for hook in self.hooks:
            hook.remove()

    def _before(self, model: nn.Module, args: tuple, inputs: Inputs) -> tuple[tuple, Inputs] | None:
        return (args, self.prepare(inputs)) if model.training else None

    def _after(self, model: nn.Module, args: tuple, inputs: Inputs, output: Any) -> Any:
        if model.training:
            output.loss = self.replace(inputs, output)
        return output


def items_of(inputs: Inputs) -> Tensor | int:
    """Return how many items the update has that the batch `inputs` belongs to: its own, where it is all of it."""
    items = inputs.get("num_items_in_batch")
    return count_items(inputs).clamp(min=1) if items is None else items


def labels_of_logits(model: TriptychPreTrainedModel, inputs: Inputs) -> Tensor:
    """Return what each of the logits of `model` is to predict: its label, or in a decoder that of the next token."""
    if not isinstance(model, TriptychForCausalLM):
        return inputs["labels"]
    if inputs.get("shift_labels") is not None:
        return inputs["shift_labels"]
    return model.shift(*(inputs.get(name) for name in ("labels", "attention_mask", "position_ids", "seq_idx")))
