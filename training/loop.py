"""The optimisation of one model, on `accelerate.Accelerator`: one process or many, any precision.

The loss of an update is the mean over all its target tokens, however they are spread over accumulated batches and
processes: every batch's loss is its sum divided by the update's token count, and gradients are summed.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, get_scheduler

from triptych.training.errors import UserError
from triptych.training.recipe import Recipe
from triptych.training.reporting import RunLog

Batch = dict[str, Tensor]


@dataclass
class TrainingState:
    """Where a training stands, besides its parameters and its optimiser.

    Attributes:
        step: optimiser updates done.
        epoch: passes over the data done.
        tokens: target tokens trained on.
        best_loss, best_step: the lowest validation loss, and after which update it was measured.
    """

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    best_loss: float = math.inf
    best_step: int = 0


class TrainingLoop:
    """Trains a model and keeps the checkpoint with the lowest validation loss.

    Args:
        recipe: the training's settings.
        model: takes `input_ids`, `attention_mask`, `labels`, `num_items_in_batch` and `label_smoothing`, and returns
            an output with a `loss`.
        train_loader: batches from a `TokenBatchSampler` whose count is a multiple of processes times accumulation.
        validation_loader: the same for validation, in any order.
        accelerator: made by `build_accelerator`.
        log: where progress and metrics go.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        train_loader: DataLoader,
        validation_loader: DataLoader,
        accelerator: Accelerator,
        log: RunLog,
    ):
        self.recipe = recipe
        self.accelerator = accelerator
        self.log = log
        self.state = TrainingState()
        self.sampler = train_loader.batch_sampler
        optimizer = build_optimizer(model, recipe)
        # The schedule is not prepared: accelerate would step it once per process, but it counts updates.
        self.scheduler = get_scheduler(recipe.schedule, optimizer, recipe.warmup_steps, recipe.max_steps)
        self.model, self.optimizer, self.train_loader, self.validation_loader = accelerator.prepare(
            model, optimizer, train_loader, validation_loader
        )

    def run(self, folder: Path) -> TrainingState:
        """Train for `recipe.max_steps` updates; the best checkpoint so far is always in `folder`.

        Raises:
            UserError: the loss became infinite or NaN.
        """
        recipe, state = self.recipe, self.state
        since, tokens_before = time.perf_counter(), 0
        for batches in islice(self._updates(), recipe.max_steps):
            loss, grad_norm = self._update(batches)
            self.log.advance(state.step, loss)
            if state.step % recipe.log_every == 0 or state.step == recipe.max_steps:
                speed = (state.tokens - tokens_before) / (time.perf_counter() - since)
                learning_rate = self.scheduler.get_last_lr()[0]
                self.log.training(state, loss, grad_norm, learning_rate, speed)
                since, tokens_before = time.perf_counter(), state.tokens
            if state.step % recipe.validate_every == 0 or state.step == recipe.max_steps:
                paused = time.perf_counter()
                self._validate(folder)
                since += time.perf_counter() - paused
        return state

    def _updates(self) -> Iterator[list[Batch]]:
        """Yield the batches of one update after another, epoch after epoch."""
        while True:
            # accelerate passes the epoch on to the sampler on one process only.
            self.train_loader.set_epoch(self.state.epoch)
            self.sampler.set_epoch(self.state.epoch)
            batches = iter(self.train_loader)
            while group := list(islice(batches, self.recipe.gradient_accumulation_steps)):
                yield group
            self.state.epoch += 1

    def _update(self, batches: list[Batch]) -> tuple[float, float]:
        """Make one optimiser update; return its loss and the norm of its gradient before clipping."""
        accelerator = self.accelerator
        tokens = accelerator.reduce(sum((batch["labels"] != -100).sum() for batch in batches), "sum")
        # accelerate divides by the accumulation steps and averages over processes; this undoes both.
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
        total = torch.zeros((), device=accelerator.device)
        self.model.train()
        for batch in batches:
            with accelerator.accumulate(self.model):
                smoothing = self.recipe.label_smoothing
                loss = self.model(**batch, num_items_in_batch=tokens, label_smoothing=smoothing).loss
                accelerator.backward(loss * scale)
                total += loss.detach()
                if accelerator.sync_gradients:
                    total = accelerator.reduce(total, "sum")
                    self._require_finite(total, f"the loss of update {self.state.step + 1}")
                    grad_norm = self._clip_gradients()
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.scheduler.step()
        self.state.step += 1
        self.state.tokens += int(tokens)
        return float(total), grad_norm

    def _require_finite(self, loss: Tensor, what: str) -> None:
        if not torch.isfinite(loss):
            raise UserError(
                f"{what} is {float(loss)}: lower learning_rate ({self.recipe.learning_rate}) "
                f"or max_grad_norm ({self.recipe.max_grad_norm})"
            )

    def _clip_gradients(self) -> float:
        limit = self.recipe.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        return float(norm) if norm is not None else math.nan

    def _validate(self, folder: Path) -> None:
        state = self.state
        loss = self.validation_loss()
        if loss < state.best_loss:
            state.best_loss, state.best_step = loss, state.step
            self._save(folder)
        self.log.validation(state, loss)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean cross-entropy per target token, in nats, of the validation data; without smoothing."""
        self.model.eval()
        sums = torch.zeros(2, device=self.accelerator.device, dtype=torch.float64)
        for batch in self.validation_loader:
            loss = self.model(**batch, num_items_in_batch=1).loss
            sums += torch.stack([loss.double(), (batch["labels"] != -100).sum().double()])
        total, tokens = self.accelerator.reduce(sums, "sum")
        self._require_finite(total, f"the validation loss after update {self.state.step}")
        return float(total / tokens)

    def _save(self, folder: Path) -> None:
        # Sharded parameters are gathered by all processes together, before the main one writes.
        state_dict = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).save_pretrained(folder, state_dict=state_dict)


def build_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) that decays matrices, not gains and biases."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=tuple(recipe.adam_betas), eps=recipe.adam_epsilon)
