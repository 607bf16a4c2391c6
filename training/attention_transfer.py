"""Softmax to linear, first stage: layers of linear attention learn to give what a teacher's softmax gives.

Each layer learns for itself, at the teacher's own inputs, since what it hands on in training is the teacher's output
(Zhang et al. 2024, arXiv 2402.04347, section 4.2; Zhang et al. 2025, arXiv 2410.10254, section 3.1). Only what the
teacher has no counterpart of learns: feature maps and decays. In eval mode the model is itself, so that validation
says what the linear layers are worth together.

Shapes: B batch, T tokens, D hidden_size.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triptych.linear_attention import TriptychLinearAttention
from triptych.training.errors import UserError
from triptych.training.training_loss import Inputs, TrainingLoss


class AttentionTransfer(TrainingLoss):
    """The loss of the linear layers of `student` against the `teacher`'s attention.

    That is their squared error at real tokens, a mean over D and a sum over layers, per item of the update.

    Args:
        student: the teacher with some layers made linear, and else of equal weights.
        teacher: stays as it is, and follows the student's inputs to their device.

    Raises:
        UserError: no layer of the student is linear where the teacher's is not, they are built differently, or they are
            encoder-decoders.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel):
        if student.config.is_encoder_decoder:
            raise UserError("recipe key 'attention_transfer' needs an encoder or a decoder, not an encoder-decoder")
        self.teacher = teacher.eval().requires_grad_(False)
        theirs = dict(teacher.named_modules())
        layers = {
            name: module
            for name, module in student.named_modules()
            if isinstance(module, TriptychLinearAttention) and type(theirs.get(name)) is not type(module)
        }
        if not layers:
            raise UserError("recipe key 'attention_transfer' needs 'linear_attention' in model.layer_types")
        known = dict(teacher.named_parameters())
        for name, parameter in student.named_parameters():
            if name in known and parameter.shape != known[name].shape:
                raise UserError(
                    f"recipe key 'attention_transfer': the teacher's {name} is {list(known[name].shape)}, but the "
                    f"student's {list(parameter.shape)}; start from the teacher, with model.path"
                )
            parameter.requires_grad_(name not in known)
        # What each layer of the teacher was given, and gave, at each depth that it stands at.
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.error: Tensor | None = None
        for name, module in layers.items():
            theirs[name].register_forward_hook(partial(self._remember, name))
            module.register_forward_pre_hook(partial(self._give, name))
            module.register_forward_hook(partial(self._compare, name), with_kwargs=True)
        super().__init__(student)

    @torch.no_grad()
    def prepare(self, inputs: Inputs) -> Inputs:
        mask = inputs.get("attention_mask")
        self.real = torch.ones_like(inputs["input_ids"]) if mask is None else mask
        self.error = torch.zeros((), device=self.real.device)
        text = {name: inputs[name] for name in inputs if name in TEXT}
        self.teacher.base_model.to(self.real.device)(**text, use_cache=False)
        return inputs

    def _remember(self, name: str, module: nn.Module, args: tuple, output: tuple[Tensor, Tensor | None]) -> None:
        self.seen[name].append((args[0], output[0]))

    def _give(self, name: str, module: nn.Module, args: tuple) -> tuple | None:
        # Whatever stood before it, dropout for one.
        return (self.seen[name][0][0], *args[1:]) if module.training else None

    def _compare(
        self, name: str, module: nn.Module, args: tuple, options: dict[str, Any], output: tuple[Tensor, None]
    ) -> tuple[Tensor, None] | None:
        if not module.training:
            return None
        _, expected = self.seen[name].pop(0)
        errors = (output[0] - expected).float().square().mean(-1)  # [B, T], or [1, N] of real tokens alone
        self.error = self.error + (errors if options["rows"] else errors * self.real).sum()
        return expected, None

    def replace(self, inputs: Inputs, output: Any) -> Tensor:
        return self.error / self.items(inputs)


# What a teacher reads: all of a text but what it is to answer.
TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "seq_idx")
