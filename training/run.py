"""From a recipe to a run's folder: begun, continued after any kill, and finished as a model that loads.

| in the folder | holds |
|---|---|
| `recipe.yaml` | the recipe with all its values |
| `run.json` | status, counters, seed, versions, what the data and the model were |
| `metrics.jsonl`, `trackers/` | what was measured along the way |
| `checkpoints/` | while it runs; gone once it has finished, as they take several times the model's space |
| config, weights, tokenizer or processor, `loss.png`, `README.md` | the final model and its card |
"""

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    LoggerType,
    ProjectConfiguration,
    broadcast_object_list,
    set_seed,
)
from safetensors.torch import load_model
from transformers import PreTrainedConfig

from triptych.training.building import Parts, build_parts
from triptych.training.checkpoints import MODEL, WEIGHTS, Checkpoints, describe
from triptych.training.distillation import drop_projections
from triptych.training.errors import Failure, UserError, as_user_error
from triptych.training.loop import TrainingLoop, same_command
from triptych.training.low_rank import add_low_rank, merge_low_rank
from triptych.training.plots import plot_losses
from triptych.training.precision import has_bfloat16_products
from triptych.training.recipe import RECIPE_FILE, Recipe, save_recipe
from triptych.training.reporting import (
    CURVE_FILE,
    FINISHED,
    METRICS_FILE,
    RECORD_FILE,
    RUNNING,
    RunLog,
    show_values,
    write_whole,
)
from triptych.training.sharing import write_card
from triptych.training.tokenization import tokenizer_digest

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

CHECKPOINTS, TRACKERS = "checkpoints", "trackers"

# What may differ when a run is continued. Everything else would make it neither the old run nor a new one.
MAY_CHANGE = {
    # what is looked at, said and kept
    *("log_every", "validate_every", "save_every", "keep_checkpoints", "average_checkpoints", "patience"),
    *("report_to", "generation", "bleu", "output", "overwrite"),
    # where things lie: data, tokenizer and model are compared themselves
    *("data", "tokenizer", "model"),
    # an update may be spread over other processes; and a loss that is not finite asks for other values of these
    *("gradient_accumulation_steps", "learning_rate", "max_grad_norm"),
    # how long it goes on, where the schedule is not stretched by it (see `find_changes`)
    "max_steps",
}
STRETCHED_SCHEDULES = ("cosine", "linear")
# What the data that are compared do not show: how examples are drawn from them.
DRAWS = (
    ("tokenizer", "dropout"),
    *(("data", name) for name in ("token_dropout", "interchangeable", "keep_beside", "window")),
)


@dataclass
class Run:
    """A finished training.

    Attributes:
        folder: of the run; `from_pretrained` loads it.
        best_loss: validation loss per item of the model in it.
        best_step: after which update that model stood; the last one, if it is a mean of checkpoints.
        seconds: of this sitting.
    """

    folder: Path
    best_loss: float
    best_step: int
    seconds: float


def train(recipe: Recipe) -> Run:
    """Train as `recipe` says and leave the final model in `recipe.output`; continue an unfinished run that is there.

    An error before the first checkpoint leaves nothing behind; after it, the run can be continued.

    Raises:
        UserError: unusable data, settings or model fields, a folder that is in use, a run that began otherwise, a loss
            that is not finite, or a full disk.
        SystemExit: SIGTERM (143) or SIGINT (130) came; a checkpoint has been saved.
    """
    started = time.perf_counter()
    output = Path(recipe.output)
    check_output(output, recipe.overwrite)
    recipe, remarks = in_known_precision(recipe)
    accelerator = build_accelerator(recipe)
    parts = build_parts(recipe, accelerator.num_processes)
    facts = describe_run(recipe, parts, accelerator)
    keep, average, every = (
        recipe.keep_checkpoints,
        recipe.average_checkpoints,
        recipe.save_every or recipe.validate_every,
    )
    checkpoints = Checkpoints(output / CHECKPOINTS, accelerator, keep=keep, average=average, every=every)
    step, problems = (None, []) if recipe.overwrite else checkpoints.newest()
    if step is not None:
        refuse_changes(recipe, parts.model.config, facts, checkpoints.path(step), accelerator)
    # From here on processes draw different dropout masks.
    set_seed(recipe.seed, device_specific=True)
    with (
        opened_folder(output, recipe, parts, facts, checkpoints, is_new=step is None),
        RunLog(output, recipe.max_steps, accelerator, facts) as log,
    ):
        for remark in (*remarks, *problems):
            log.say(remark)
        values, chosen = run_loop(recipe, parts, checkpoints, step, log)
    if accelerator.is_main_process:
        shutil.rmtree(checkpoints.folder)
    accelerator.end_training()
    return Run(output, values["loss"], chosen, time.perf_counter() - started)


def in_known_precision(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe in float32 where it asks for bfloat16 and this machine is slow in it, and what to say then."""
    if recipe.mixed_precision != "bf16" or has_bfloat16_products():
        return recipe, []
    remark = "this processor has no products in bfloat16 and would be much slower in it: training in float32"
    return replace(recipe, mixed_precision=None), [remark]


def run_loop(
    recipe: Recipe, parts: Parts, checkpoints: Checkpoints, step: int | None, log: RunLog
) -> tuple[dict[str, float], int]:
    """Train, from the checkpoint after `step` updates or from the start, and write the final model.

    Returns:
        The final model's validation measures, and after which update it stood.
    """
    accelerator, output = checkpoints.accelerator, Path(recipe.output)
    vocabulary = "" if parts.tokenizer is None else f"vocabulary {len(parts.tokenizer):,}, "
    log.say(
        f"{parts.examples:,} training examples, {vocabulary}{log.facts['parameters']:,} parameters, "
        f"{accelerator.num_processes} process(es) on {accelerator.device}"
    )
    model_class = type(parts.model)
    loop = TrainingLoop(recipe, parts, accelerator, checkpoints, log)
    if step is not None:
        resume(loop, step, log, output)
    log.start(loop.state.step)
    log.record(loop.state)
    loop.run()
    values, chosen = write_model(recipe, loop, model_class, output)
    if accelerator.is_main_process:
        plot_losses(output / METRICS_FILE, output / CURVE_FILE, f"{output.name}: loss")
    log.record(loop.state, FINISHED, final={"step": chosen, **values})
    if accelerator.is_main_process:
        write_card(output)
    accelerator.wait_for_everyone()
    return values, chosen


def build_accelerator(recipe: Recipe) -> Accelerator:
    """Return the accelerator of the current launch, with the recipe's precision, accumulation and trackers.

    Raises:
        UserError: an unknown tracker, an optimiser that the launch's engine cannot run, or a launch that accelerate
            does not carry out on this machine.
    """
    # Every process and every update gets equally many batches from the sampler: nothing is left over to even out,
    # and an epoch's end must not cut an update short.
    accumulation = GradientAccumulationPlugin(recipe.gradient_accumulation_steps, sync_with_dataloader=False)
    # A launch on a machine without a GPU means processes on its CPU; accelerate wants to be told, and would else make
    # each of them a run of its own.
    is_cpu_launch = "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()
    check_trackers(recipe.report_to)
    with as_user_error("recipe key 'mixed_precision'"):
        accelerator = Accelerator(
            cpu=is_cpu_launch and "ACCELERATE_TORCH_DEVICE" not in os.environ,
            mixed_precision=recipe.mixed_precision,
            gradient_accumulation_plugin=accumulation,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
            log_with=recipe.report_to or None,
            project_config=ProjectConfiguration(recipe.output, str(Path(recipe.output) / TRACKERS)),
        )
    check_launch(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if recipe.optimizer == "muon":
            raise UserError("optimizer 'muon' works on whole matrices, which DeepSpeed cuts up: use adamw, or FSDP2")
        config = accelerator.deepspeed_plugin.deepspeed_config
        # It insists on a number of rows, but batches here are counted in tokens; only its logs use the number.
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_clipping"] = recipe.max_grad_norm or 0.0  # its engine clips, not the loop
    return accelerator


def check_trackers(names: list[str]) -> None:
    """Raise a `UserError` where accelerate does not know a tracker, or would quietly do without it."""
    installed = [tracker.value for tracker in get_available_trackers()]
    for name in names:
        if name not in ("all", *installed):
            known = LoggerType.list()
            problem = "is not installed" if name in known else f"is none of {', '.join(known)}"
            raise UserError(f"recipe key 'report_to': tracker '{name}' {problem}")


def check_launch(accelerator: Accelerator) -> None:
    """Raise a `UserError` where accelerate has quietly made something else of what was launched."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise UserError(
            f"{launched} processes were launched, but accelerate runs each of them alone on {accelerator.device}; set "
            "ACCELERATE_USE_CPU=true to run them on the CPU"
        )
    for engine in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        is_asked_for = os.environ.get(f"ACCELERATE_USE_{engine.value}", "false") == "true"
        if is_asked_for and accelerator.distributed_type != engine:
            raise UserError(
                f"the launch configuration asks for {engine.value}, but accelerate does not run it on "
                f"{accelerator.device}; use configs/accelerate/ddp.yaml"
            )


def check_output(output: Path, overwrite: bool) -> None:
    """Raise a `UserError` where `output` or a folder above it is a file, or `output` holds no run to continue or, with
    `overwrite`, to replace."""
    for folder in (output, *output.parents):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"output '{output}' needs a folder, but '{folder}' is a file")
    if not output.is_dir() or not any(output.iterdir()):
        return
    status = read_record(output).get("status")
    if status is None:  # what is there is not ours to replace
        raise UserError(f"output folder '{output}' is not empty and holds no run: choose another")
    if status != RUNNING and not overwrite:
        raise UserError(f"output folder '{output}' is not empty: choose another or add overwrite=true")


def read_record(output: Path) -> dict[str, Any]:
    """Return what `run.json` in `output` says, or nothing where there is none."""
    try:
        return json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def describe_run(recipe: Recipe, parts: Parts, accelerator: Accelerator) -> dict[str, Any]:
    """Return what identifies a run and what it ran on, as it stands in `run.json`."""
    engines = (DistributedType.FSDP, DistributedType.DEEPSPEED)
    packages = ("triptych", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
    facts = {
        "seed": recipe.seed,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "device": str(accelerator.device),
        "processes": accelerator.num_processes,
        "engine": accelerator.distributed_type.value if accelerator.distributed_type in engines else "replicas",
        "examples": parts.examples,
        # DeepSpeed's stage 3 leaves an empty shard, and remembers what it was.
        "parameters": sum(getattr(tensor, "ds_numel", tensor.numel()) for tensor in parts.model.parameters()),
        "data": parts.fingerprint,
        "tokenizer": tokenizer_digest(parts.tokenizer),
    }
    if teacher := recipe.distillation.teacher:
        facts["teacher"] = [describe(path)["sha256"] for path in sorted(Path(teacher).glob("*.safetensors"))]
    return facts


def refuse_changes(
    recipe: Recipe, config: PreTrainedConfig, facts: dict[str, Any], checkpoint: Path, accelerator: Accelerator
) -> None:
    """Raise a `UserError` that names all in which this training is another one than `checkpoint` was made by."""
    changes = find_changes(recipe, config, facts, checkpoint) if accelerator.is_main_process else None
    if changes := broadcast_object_list([changes])[0]:
        raise UserError(
            f"'{recipe.output}' cannot be continued, as {'; '.join(changes)}: change that back, choose another output "
            "or add overwrite=true"
        )


def find_changes(recipe: Recipe, config: PreTrainedConfig, facts: dict[str, Any], checkpoint: Path) -> list[str]:
    """Return in what this training differs from the one that made `checkpoint`, a clause each, save what may change."""
    output = checkpoint.parents[1]
    now, then = asdict(recipe), yaml.safe_load((output / RECIPE_FILE).read_text(encoding="utf-8"))
    fixed = set(now) & set(then) - MAY_CHANGE | ({"max_steps"} if recipe.schedule in STRETCHED_SCHEDULES else set())
    compared = {key: (now[key], then[key]) for key in now if key in fixed}
    for section, key in DRAWS:
        new, old = now[section][key], then[section].get(key)
        if new or old:  # a run that was begun before there was such a setting did without it
            compared[f"{section}.{key}"] = new, old
    old_config = flatten(type(config).from_pretrained(checkpoint / MODEL).to_dict(), "model.")
    config = flatten(config.to_dict(), "model.")
    compared |= {key: (config.get(key), old_config.get(key)) for key in {**config, **old_config}}
    before = read_record(output)
    compared["engine"] = facts["engine"], before["engine"]
    if facts["engine"] == DistributedType.DEEPSPEED.value:  # its shards fit no other number
        compared["processes"] = facts["processes"], before["processes"]
    changes = [f"{key} is {new!r} instead of {old!r}" for key, (new, old) in compared.items() if new != old]
    words = {"data": "the data are others"}
    words |= {name: f"the {name} is another one" for name in ("tokenizer", "teacher")}
    return changes + [words[key] for key in words if facts.get(key) != before.get(key)]


def flatten(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of nested dicts under dotted keys, without those that say nothing of the architecture."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif key not in ("_name_or_path", "transformers_version", "dtype", "architectures"):
            flat[prefix + str(key)] = list(value) if isinstance(value, tuple) else value
    return flat


@contextmanager
def opened_folder(
    output: Path,
    recipe: Recipe,
    parts: Parts,
    facts: dict[str, Any],
    checkpoints: Checkpoints,
    is_new: bool,
) -> Iterator[None]:
    """Begin the run's folder, or go on in it; an error before the first checkpoint removes it again."""
    accelerator = checkpoints.accelerator
    made = [folder for folder in output.absolute().parents if not folder.exists()]
    lock = None
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with as_user_error(f"output folder '{output}' cannot be made"):
            lock = begin_folder(output, parts, facts) if is_new else claim(output)
            save_recipe(recipe, output / f".{RECIPE_FILE}")
            (output / f".{RECIPE_FILE}").rename(output / RECIPE_FILE)
    accelerator.wait_for_everyone()
    try:
        yield
    except BaseException as error:
        has_checkpoints = bool(checkpoints.steps())
        if accelerator.is_main_process and not has_checkpoints:
            shutil.rmtree(output, ignore_errors=True)
            for folder in made:
                with suppress(OSError):  # something else is in it by now
                    folder.rmdir()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            intact = f"; the last checkpoint is intact, {same_command(recipe)} continues from it"
            kept = intact if has_checkpoints else ""
            raise Failure(f"no space is left on the disk of '{output}'{kept}") from error
        raise
    finally:
        release(lock)


def begin_folder(output: Path, parts: Parts, facts: dict[str, Any]) -> int | None:
    """Put a new run's folder in place of `output`, so that whatever is found there later is known as a run.

    Returns:
        Its lock, as `claim` does.
    """
    output = output.absolute()
    staging, replaced = (output.with_name(f".{output.name}.{word}") for word in ("new", "old"))
    for left_over in (staging, replaced):
        if left_over.exists():
            release(claim(left_over))
            shutil.rmtree(left_over)
    staging.mkdir(parents=True)
    lock = claim(staging)  # it stays with the folder when that is renamed
    write_whole(staging / RECORD_FILE, json.dumps({"status": RUNNING, **facts}, indent=1))
    for part in (parts.tokenizer, parts.processor):
        if part is not None:
            part.save_pretrained(staging)
    try:
        if output.exists():
            release(claim(output))
            output.rename(replaced)
        staging.rename(output)
    except (OSError, UserError):  # another training was quicker
        shutil.rmtree(staging)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    return lock


def claim(folder: Path) -> int | None:
    """Lock a folder against other trainings, where the system can; this process's end unlocks it, if `release` has not.

    Raises:
        UserError: another training has it.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UserError(f"output folder '{folder}' is in use by another training: choose another") from error
    except OSError:
        pass  # some network disks have no locks
    return handle


def release(lock: int | None) -> None:
    """Give up what `claim` returned."""
    if lock is not None:
        os.close(lock)


def resume(loop: TrainingLoop, step: int, log: RunLog, output: Path) -> None:
    """Go on from the checkpoint after `step` updates, and say so."""
    before, now = loop.resume(step), loop.state.processes
    log.say(f"continues '{output}' from update {step:,} (epoch {loop.state.epoch + 1})")
    if now != before:
        log.say(
            f"{now} process(es) instead of {before}: it goes on from the same share of the epoch, but data order and "
            "random numbers are not those of the uninterrupted run"
        )


def write_model(recipe: Recipe, loop: TrainingLoop, model_class: type, output: Path) -> tuple[dict[str, float], int]:
    """Write the final model to `output`; return its validation measures, and after which update it stood.

    It is the best one, or the mean of the last `average_checkpoints`, measured as the sum of its parts may be worse.
    """
    state, accelerator, checkpoints = loop.state, loop.accelerator, loop.checkpoints
    best = state.best_step or state.step
    steps = checkpoints.averaged_steps(state.step) if recipe.average_checkpoints else [best]
    staging = output / ".model"
    if accelerator.is_main_process:
        checkpoints.export(steps, staging)
        if recipe.distillation.hidden_states.weight:
            drop_projections(staging / WEIGHTS)
    accelerator.wait_for_everyone()
    values = state.best
    if recipe.average_checkpoints or recipe.low_rank.rank or not values:
        trained = accelerator.unwrap_model(loop.model)
        model = model_class(trained.config)  # whole, whatever the engine does to the other
        if recipe.low_rank.rank:
            add_low_rank(model, recipe.low_rank)
        load_model(model, staging / WEIGHTS)
        merge_low_rank(model)
        values = loop.evaluate(model.to(accelerator.device))
        single = len(steps) == 1
        what = f"the checkpoint of update {steps[0]}" if single else f"mean of the checkpoints of updates {steps}"
        loop.log.say(f"{what}: validation {show_values(values)}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if recipe.low_rank.rank:
            if model.can_generate():
                model.generation_config = trained.generation_config
            model.save_pretrained(staging)
        for path in staging.iterdir():
            path.replace(output / path.name)
        staging.rmdir()
    return values, steps[-1]
