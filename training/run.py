"""From a recipe to a run's folder: model, tokenizer, metrics and loss curve, complete or not there at all."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from triptych import TriptychConfig, TriptychDecoderConfig, TriptychEncoderConfig, TriptychEncoderDecoderConfig
from triptych.training.batching import build_loader
from triptych.training.data import load_split
from triptych.training.errors import UserError, as_user_error, unknown_name
from triptych.training.loop import TrainingLoop
from triptych.training.plots import plot_losses
from triptych.training.recipe import RECIPE_FILE, Recipe, save_recipe
from triptych.training.reporting import RunLog
from triptych.training.tokenization import build_tokenizer, tokenize_pairs

METRICS_FILE, CURVE_FILE = "metrics.jsonl", "loss.png"


@dataclass
class Run:
    """A finished training: its folder, and the best checkpoint's validation loss (nats per target token)."""

    folder: Path
    best_loss: float
    best_step: int
    seconds: float


def train(recipe: Recipe) -> Run:
    """Train as `recipe` says and leave the best checkpoint in `recipe.output`.

    The folder holds what `from_pretrained` loads (config, safetensors, tokenizer, generation config), the recipe with
    all its values, `metrics.jsonl` and `loss.png`. It appears at the end, whole; an error leaves nothing behind.

    Raises:
        UserError: unusable data, settings or model fields, a folder that is in use, or a loss that is not finite.
    """
    started = time.perf_counter()
    output = Path(recipe.output)
    check_output(output, recipe.overwrite)
    accelerator = build_accelerator(recipe)
    set_seed(recipe.seed)
    pairs = {split: load_split(recipe.data, split, recipe.seed) for split in ("train", "validation")}
    tokenizer = build_tokenizer(recipe.tokenizer, pairs["train"], recipe.data.joiner)
    model = build_model(recipe, tokenizer)
    loaders = build_loaders(recipe, pairs, tokenizer, accelerator.num_processes)
    # From here on processes draw different dropout masks.
    set_seed(recipe.seed, device_specific=True)
    with (
        staged_folder(output, accelerator) as folder,
        RunLog(folder / METRICS_FILE, recipe.max_steps, accelerator.is_main_process) as log,
    ):
        log.say(
            f"{len(pairs['train']):,} training pairs, vocabulary {len(tokenizer):,}, "
            f"{model.num_parameters():,} parameters, {accelerator.num_processes} process(es) on {accelerator.device}"
        )
        state = TrainingLoop(recipe, model, *loaders, accelerator, log).run(folder)
        if accelerator.is_main_process:
            tokenizer.save_pretrained(folder)
            save_recipe(recipe, folder / RECIPE_FILE)
            plot_losses(folder / METRICS_FILE, folder / CURVE_FILE, f"{output.name}: loss")
    accelerator.end_training()
    return Run(output, state.best_loss, state.best_step, time.perf_counter() - started)


def build_accelerator(recipe: Recipe) -> Accelerator:
    """Return the accelerator of the current launch, with the recipe's precision and accumulation."""
    # Every process and every update gets equally many batches from the sampler: nothing is left over to even out,
    # and an epoch's end must not cut an update short.
    accumulation = GradientAccumulationPlugin(recipe.gradient_accumulation_steps, sync_with_dataloader=False)
    accelerator = Accelerator(
        mixed_precision=recipe.mixed_precision,
        gradient_accumulation_plugin=accumulation,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.deepspeed_plugin.deepspeed_config
        # It insists on a number of rows, but batches here are counted in tokens; only its logs use the number.
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_clipping"] = recipe.max_grad_norm or 0.0  # its engine clips, not the loop
    return accelerator


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a freshly initialised encoder-decoder with the recipe's fields and the tokenizer's ids.

    Raises:
        UserError: an unknown preset or field, or a value that the configuration refuses.
    """
    changes = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.bos_token_id,
    } | recipe.model
    preset = changes.pop("preset", None)
    _check_model_fields(changes)
    with as_user_error("recipe section 'model'"):
        if preset:
            config = TriptychConfig.from_preset(preset, **changes)
        else:
            config = TriptychConfig(topology="encoder_decoder", **changes)
        model = AutoModelForSeq2SeqLM.from_config(config)
        model.generation_config.update(**vars(recipe.generation))
        model.generation_config.validate()
    return model


def _check_model_fields(changes: dict[str, Any]) -> None:
    """Refuse unknown fields: transformers keeps them as attributes, so that a typo would change nothing."""
    stacks = {"encoder": TriptychEncoderConfig, "decoder": TriptychDecoderConfig}
    known = {stack: {field.name for field in fields(config)} for stack, config in stacks.items()}
    top = known["encoder"] | known["decoder"] | {field.name for field in fields(TriptychEncoderDecoderConfig)}
    sections = {"model": (changes, top)}
    sections |= {f"model.{stack}": (changes.get(stack) or {}, known[stack]) for stack in stacks}
    for section, (given, allowed) in sections.items():
        for name in given:
            if name not in allowed:
                raise unknown_name("recipe key", f"{section}.{name}", [f"{section}.{field}" for field in allowed])


def build_loaders(recipe: Recipe, pairs: dict[str, Any], tokenizer: PreTrainedTokenizerBase, processes: int):
    """Return the loaders of training batches (shuffled) and of validation batches (sorted by length)."""
    tokens = {split: tokenize_pairs(dataset, tokenizer) for split, dataset in pairs.items()}
    updates = processes * recipe.gradient_accumulation_steps
    return (
        build_loader(tokens["train"], tokenizer, recipe.max_tokens, seed=recipe.seed, multiple_of=updates),
        build_loader(tokens["validation"], tokenizer, recipe.max_tokens, shuffle=False, multiple_of=processes),
    )


def check_output(output: Path, overwrite: bool) -> None:
    """Raise a `UserError` where `output` or a folder above it is a file, or `output` is in use."""
    for folder in (output, *output.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output '{output}' needs a folder, but '{folder}' is a file")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UserError(f"output folder '{output}' is not empty: choose another or add overwrite=true")


@contextmanager
def staged_folder(output: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Give a hidden folder, near `output`, that takes its place at the end, or vanishes on an error."""
    parent = next(folder for folder in output.absolute().parents if folder.is_dir())
    staging = parent / f".{output.name}.{os.getpid()}"
    if accelerator.is_main_process:
        with as_user_error(f"output folder '{output}' cannot be made"):
            staging.mkdir()
    try:
        yield staging
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(output, ignore_errors=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            staging.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
