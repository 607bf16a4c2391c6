"""Distillation in transformers' Trainer."""

from typing import Any

from transformers import PreTrainedModel, Trainer

from triptych import TriptychPreTrainedModel
from triptych.training.distillation import Distillation
from triptych.training.recipe import DistillationRecipe


class DistillationTrainer(Trainer):
    """A Trainer whose model learns from a teacher, too; accumulated steps equal one big batch.

    Checkpoints hold projections of hidden states, if some are learnt; after training the model is free of them.

    Args:
        model: the student.
        teacher: a model of the family or of transformers, with the same tokenizer.
        distillation: the signals and their weights.
        **options: of Trainer.

    Raises:
        UserError: the two cannot be paired.
    """

    def __init__(
        self,
        model: TriptychPreTrainedModel,
        *,
        teacher: PreTrainedModel,
        distillation: DistillationRecipe,
        **options: Any,
    ):
        self.distillation = Distillation(model, teacher, distillation)
        super().__init__(model, **options)

    def train(self, *args: Any, **options: Any):
        """Train as Trainer does; the model then is a student no longer."""
        result = super().train(*args, **options)
        self.distillation.remove()
        return result
