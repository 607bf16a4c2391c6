"""The optimisation of one model, on `accelerate.Accelerator`: one process or many, any precision, exactly resumable.

The loss of an update is the mean over all its items, however they are spread over accumulated batches and processes:
every batch's loss is its sum divided by the update's number of items, and gradients are summed. An item is a label that
counts (a token, or the class of an example), or an example where there are no labels.

Nothing but the model draws from the global random state: the order of the data comes from its seed and the epoch. So
parameters, optimiser, random states and `TrainingState` are all that a training goes on from.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import FrameType
from typing import Self

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from triptych.training.batching import count_items
from triptych.training.building import Parts
from triptych.training.checkpoints import Checkpoints
from triptych.training.errors import Failure, UserError
from triptych.training.optimization import build_optimizer, build_schedule
from triptych.training.recipe import Recipe
from triptych.training.reporting import RunLog
from triptych.training.senses import MODEL_INPUTS, input_size

Batch = dict[str, Tensor]


@dataclass
class TrainingState:
    """Where a training stands, besides its parameters, its optimiser and its random states.

    Attributes:
        step: optimiser updates done.
        epoch: passes over the data done.
        batches, epoch_batches: batches done of the current pass, of how many, on each process.
        items: what the loss was summed over.
        tokens: input tokens without pads.
        seconds: spent, over all sittings.
        best, best_step: the best validation, and after which update it was made.
        stale: validations since then.
        processes: that train.
    """

    step: int = 0
    epoch: int = 0
    batches: int = 0
    epoch_batches: int = 0
    items: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    stale: int = 0
    processes: int = 1


class TrainingLoop:
    """Trains a model, and keeps checkpoints to go on from and to choose the final model from.

    Args:
        recipe: the training's settings.
        parts: model, data and measures.
        accelerator: made by `build_accelerator`.
        checkpoints: where checkpoints go.
        log: where progress and metrics go.
    """

    def __init__(self, recipe: Recipe, parts: Parts, accelerator: Accelerator, checkpoints: Checkpoints, log: RunLog):
        self.recipe = recipe
        self.score = parts.score
        self.accelerator = accelerator
        self.checkpoints = checkpoints
        self.log = log
        self.state = TrainingState(processes=accelerator.num_processes)
        self.sampler = parts.train_loader.batch_sampler
        parts.train_loader.generator = torch.Generator()  # or each start of a pass would draw from the global one
        # The schedule is not prepared: accelerate would step it once per process, but it counts updates.
        self.torch_optimizer = build_optimizer(parts.model, recipe)
        self.schedule = build_schedule(self.torch_optimizer, recipe)
        self.model, self.optimizer, self.train_loader, self.validation_loader = accelerator.prepare(
            parts.model, self.torch_optimizer, parts.train_loader, parts.validation_loader
        )

    def resume(self, step: int) -> int:
        """Go on from the checkpoint after `step` updates; return how many processes saved it.

        Where they were others than now, training goes on from the same share of the epoch, with other random numbers.
        """
        state = self.state = TrainingState(**self.checkpoints.load(step))
        if not self.checkpoints.path(state.best_step).exists():
            state.best, state.best_step = {}, 0  # torn, or none yet
        self.schedule = build_schedule(self.torch_optimizer, self.recipe, state.step)
        processes, state.processes = state.processes, self.accelerator.num_processes
        if processes != state.processes:
            set_seed(self.recipe.seed + state.step, device_specific=True)
        self._set_epoch(self.train_loader)
        steps = self.accelerator.gradient_accumulation_steps
        if state.epoch_batches != len(self.train_loader) or state.batches % steps:
            state.batches = state.batches * len(self.train_loader) // state.epoch_batches // steps * steps
        return processes

    @property
    def is_finished(self) -> bool:
        """Whether all updates are done, or validation has stopped getting better."""
        patience = self.recipe.patience
        return self.state.step >= self.recipe.max_steps or (patience is not None and self.state.stale >= patience)

    def run(self) -> TrainingState:
        """Train until `is_finished`; the last update leaves a checkpoint.

        Raises:
            UserError: the loss or its gradient became infinite or NaN, or a checkpoint cannot be written.
            SystemExit: a signal asked to stop; a checkpoint has been saved.
        """
        state = self.state
        updates = self._updates()
        meter = Meter(state)
        with StopRequest() as self.stop:
            while not self.is_finished:
                loss, grad_norm, signals = self._update(next(updates))
                self.log.advance(state.step, loss)
                if self._is_due(self.recipe.log_every):
                    self.log.training(state, loss, grad_norm, self.schedule.get_last_lr()[0], meter.read())
                if self._is_due(self.recipe.validate_every):
                    with meter.paused():
                        self._validate()
                if self._is_due(self.checkpoints.every) or state.best_step == state.step or signals:
                    with meter.paused():
                        self._save(meter)
                if signals:
                    done = f"stopped by {signals.name} after update {state.step:,}"
                    self.log.say(f"{done}; {same_command(self.recipe)} continues")
                    raise SystemExit(128 + signals)
        return state

    def _is_due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.is_finished

    def _updates(self) -> Iterator[list[Batch]]:
        """Yield the batches of one update after another, epoch after epoch, from where `state` stands."""
        state = self.state
        while True:
            loader = self.train_loader
            if state.batches:  # indices are skipped, not examples fetched
                loader = self.accelerator.skip_first_batches(loader, state.batches)
            self._set_epoch(loader)
            state.epoch_batches = len(self.train_loader)
            batches = iter(loader)
            while group := list(islice(batches, self.accelerator.gradient_accumulation_steps)):
                yield group
            state.epoch, state.batches = state.epoch + 1, 0

    def _set_epoch(self, loader: DataLoader) -> None:
        loader.set_epoch(self.state.epoch)
        self.sampler.set_epoch(self.state.epoch)  # accelerate passes it on to the sampler on one process only

    def _update(self, batches: list[Batch]) -> tuple[float, float, signal.Signals | None]:
        """Make one optimiser update; return its loss, the norm of its gradient before clipping, and a signal to stop.

        A signal that any process has had reaches all of them here, with the numbers of items.
        """
        accelerator, state = self.accelerator, self.state
        counts = sum(torch.stack([count_items(batch), count_tokens(batch)]) for batch in batches)
        counts = torch.cat([counts, torch.tensor(self.stop.received, device=counts.device)])
        items, tokens, terminations, interrupts = accelerator.reduce(counts, "sum").unbind()
        # accelerate divides by the accumulation steps and averages over processes; this undoes both.
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
        total = torch.zeros((), device=accelerator.device)
        self.model.train()
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self._loss(batch, items)
                accelerator.backward(loss * scale)
                total += loss.detach()
                if accelerator.sync_gradients:
                    total = accelerator.reduce(total, "sum")
                    self._require_finite(total, "loss", len(batches))
                    grad_norm = self._clip_gradients(len(batches))
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.schedule.step()
        state.step += 1
        state.batches += len(batches)
        state.items += int(items)
        state.tokens += int(tokens)
        stop = signal.SIGTERM if terminations else signal.SIGINT if interrupts else None
        return float(total), grad_norm, stop

    def _loss(self, batch: Batch, items: Tensor) -> Tensor:
        """Return the share that `batch` has in the mean loss over the `items` of an update."""
        options = {"label_smoothing": self.recipe.label_smoothing} if self.recipe.label_smoothing else {}
        with self.accelerator.autocast():  # around the hooks of a `TrainingLoss` too
            return self.model(**batch, num_items_in_batch=items, **options).loss

    def _require_finite(self, value: Tensor, what: str, batches: int) -> None:
        """Stop where the update at hand, made of the next `batches` batches of each process, went wrong."""
        if torch.isfinite(value):
            return
        state, processes = self.state, self.accelerator.num_processes
        first, last = state.batches * processes, (state.batches + batches) * processes
        examples = sorted(index + 1 for batch in islice(self.sampler, first, last) for index in batch)
        shown = ", ".join(map(str, examples[:8])) + (", ..." if len(examples) > 8 else "")
        self._fail(
            f"the {what} of update {state.step + 1} is {float(value)} "
            f"(epoch {state.epoch + 1}, batches {first + 1} to {last}, examples {shown})"
        )

    def _fail(self, problem: str) -> None:
        steps = self.checkpoints.steps()
        kept = f"; {same_command(self.recipe)} then continues from update {steps[-1]}" if steps else ""
        raise Failure(
            f"{problem}: lower learning_rate ({self.recipe.learning_rate}) "
            f"or max_grad_norm ({self.recipe.max_grad_norm}){kept}"
        )

    def _clip_gradients(self, batches: int) -> float:
        limit = self.recipe.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        if norm is None:
            return math.nan
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
        if self.accelerator.mixed_precision != "fp16":  # whose scaler expects infinite gradients, and skips the update
            self._require_finite(norm, "gradient norm", batches)
        return float(norm)

    def _validate(self) -> None:
        state = self.state
        values = self.evaluate(self.model)
        metric = self.recipe.best_metric
        sign = -1 if metric == "loss" else 1
        if not state.best or sign * values[metric] > sign * state.best[metric]:
            state.best, state.best_step, state.stale = values, state.step, 0
        else:
            state.stale += 1
        self.log.validation(state, values)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return `loss` and the objective's other measures of `model` on the validation data."""
        device = self.accelerator.device
        # Whether and when there is validation leaves the random numbers of training alone.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            values = {"loss": self.validation_loss(model)}
            values |= self.score(self.accelerator.unwrap_model(model))
        return broadcast_object_list([values])[0]  # decisions that follow must not differ by a rounding

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss per item of the validation data; without smoothing, so that cross-entropy is in nats."""
        model.eval()
        self.validation_loader.set_epoch(0)  # accelerate counts passes, but every validation masks the same tokens
        sums = torch.zeros(2, device=self.accelerator.device, dtype=torch.float64)
        for batch in self.validation_loader:
            with self.accelerator.autocast():
                loss = model(**batch, num_items_in_batch=1, output_logits=False, use_cache=False).loss
            sums += torch.stack([loss.double(), count_items(batch).double()])
        total, items = self.accelerator.reduce(sums, "sum")
        if not items:
            raise UserError(
                "the validation data have no label to measure the loss of, but must have one: nothing was masked in "
                "them, or training has not seen their classes"
            )
        if not torch.isfinite(total):
            self._fail(f"the validation loss after update {self.state.step} is {float(total)}")
        return float(total / items)

    def _save(self, meter: "Meter") -> None:
        self.state.seconds += meter.lap()
        self.checkpoints.save(asdict(self.state))
        self.log.record(self.state)


class Meter:
    """Input tokens per second since the last reading, pauses left out; and seconds since the last lap, all in."""

    def __init__(self, state: TrainingState):
        self.state = state
        self.lap_began = self.since = time.perf_counter()
        self.tokens = state.tokens

    def read(self) -> float:
        now = time.perf_counter()
        speed = (self.state.tokens - self.tokens) / (now - self.since)
        self.since, self.tokens = now, self.state.tokens
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.since += time.perf_counter() - began

    def lap(self) -> float:
        began, self.lap_began = self.lap_began, time.perf_counter()
        return self.lap_began - began


class StopRequest:
    """Notes SIGTERM and SIGINT instead of dying from them; a second one stops at once.

    Attributes:
        received: how many of each have come, in that order, where each counts once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    # A terminal signals a launcher's children, and so does the launcher: the same request, twice.
    SAME_REQUEST_SECONDS = 2.0

    def __init__(self):
        self.received = [0, 0]
        self.time = math.inf
        self.previous = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if any(self.received) and time.monotonic() - self.time > self.SAME_REQUEST_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
        elif not any(self.received):
            self.received[self.SIGNALS.index(number)] = 1
            self.time = time.monotonic()


def same_command(recipe: Recipe) -> str:
    """Say how a training that was stopped is continued, where `overwrite` would begin it anew."""
    return "the same command without overwrite=true" if recipe.overwrite else "the same command"


def count_tokens(batch: Batch) -> Tensor:
    """Return how many input tokens of `batch` are no pads; of images, how many pixels, and of recordings, frames."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    inputs = next(batch[name] for name in ("input_ids", *MODEL_INPUTS) if name in batch)
    count = inputs.numel() if "input_ids" in batch else len(inputs) * input_size(inputs[0])
    return torch.tensor(count, device=inputs.device)
