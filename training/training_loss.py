"""Losses in the place of the one that a model gives of itself, while it trains.

Each sits in hooks on the model, so that whatever calls the model has it: the loop here, transformers' Trainer, a loop
of one's own, and engines that replicate or shard it, which see one forward. In eval mode the model is itself. Of
several on one model each takes for the model's own loss what those before it made of it.
"""

from typing import Any

import torch
from torch import Tensor

from triptych import TriptychForCausalLM, TriptychPreTrainedModel
from triptych.losses import IGNORE

Inputs = dict[str, Any]


class TrainingLoss:
    """Hooks on `model` by which `prepare` changes what it is given in training, and `replace` the loss it gives."""

    def __init__(self, model: TriptychPreTrainedModel):
        self.model = model
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

    def labels_of_logits(self, inputs: Inputs) -> Tensor:
        """Return what each of the logits is to predict: its label, or in a decoder that of the next token."""
        if not isinstance(self.model, TriptychForCausalLM):
            return inputs["labels"]
        if inputs.get("shift_labels") is not None:
            return inputs["shift_labels"]
        names = ("labels", "attention_mask", "position_ids", "seq_idx")
        return self.model.shift(*(inputs.get(name) for name in names))

    def items_of_texts(self, inputs: Inputs) -> Tensor:
        """Return how many labels each text of a batch has, [B]; one, where labels are positions."""
        count = len(inputs["input_ids"])
        if "labels" not in inputs:
            return torch.ones(count, device=inputs["input_ids"].device)
        return (self.labels_of_logits(inputs) != IGNORE).view(count, -1).sum(1)

    def items(self, inputs: Inputs) -> Tensor | int:
        """Return how many items the update has that a batch belongs to: its own, unless it says more."""
        items = inputs.get("num_items_in_batch")
        return self.items_of_texts(inputs).sum().clamp(min=1) if items is None else items

    def _before(self, model: TriptychPreTrainedModel, args: tuple, inputs: Inputs) -> tuple[tuple, Inputs] | None:
        return (args, self.prepare(inputs)) if model.training else None

    def _after(self, model: TriptychPreTrainedModel, args: tuple, inputs: Inputs, output: Any) -> Any:
        if model.training:
            output.loss = self.replace(inputs, output)
        return output
