"""What a recipe asks for, built: data, tokenizer, model and loaders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from triptych import (
    TriptychConfig,
    TriptychDecoderConfig,
    TriptychEncoderConfig,
    TriptychEncoderDecoderConfig,
    import_model,
)
from triptych.configs import recipe_names
from triptych.training.attention_transfer import AttentionTransfer
from triptych.training.batching import Examples, build_loader
from triptych.training.consistency import Consistency
from triptych.training.data import NOT_TEXT, digest_of, load_split
from triptych.training.distillation import Distillation
from triptych.training.errors import BROKEN_FILES, UserError, as_user_error, unknown_name
from triptych.training.evaluation import load_model, score_names, score_rows
from triptych.training.low_rank import add_low_rank
from triptych.training.masking import NextSentencePairs
from triptych.training.objectives import (
    Task,
    build_examples,
    encode,
    has_classes,
    label_names,
    read_task,
    row_lengths,
)
from triptych.training.padding import text_bounds
from triptych.training.recipe import NOT_FIELDS, Recipe
from triptych.training.renaming import RenamedExamples
from triptych.training.senses import Processor, build_processor
from triptych.training.sequence_distillation import teach_targets
from triptych.training.streaming import StreamedExamples, first_window, open_stream
from triptych.training.subwords import RegularizedPairs
from triptych.training.token_dropout import TokenDropout
from triptych.training.tokenization import build_tokenizer, tokenizer_digest


@dataclass
class Parts:
    """All that a training runs on.

    Attributes:
        tokenizer, processor: of texts, and of other inputs; None where there are none.
        model: freshly initialised, or loaded, with the head of the recipe's objective.
        train_loader: batches from a `TokenBatchSampler` whose count is a multiple of processes times accumulation.
        validation_loader: the same for validation, in any order.
        fingerprint: of the training and validation examples as the model reads them.
        score: measures of the objective besides the loss, on the validation data; larger is better.
        examples: number of training examples.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    processor: Processor | None
    train_loader: DataLoader
    validation_loader: DataLoader
    fingerprint: str
    score: Callable[[PreTrainedModel], dict[str, float]]
    examples: int


def build_parts(recipe: Recipe, processes: int) -> Parts:
    """Build what `recipe` asks for, the same in every process.

    Raises:
        UserError: unusable data, settings or model fields.
    """
    set_seed(recipe.seed)
    task = read_task(recipe)
    measures = ["loss", *score_names(task)]
    if recipe.best_metric not in measures:
        raise UserError(f"recipe key 'best_metric' must be one of {', '.join(measures)}, not '{recipe.best_metric}'")
    if start := recipe.model.get("path"):
        _check_start("model.path", start)
        recipe.tokenizer.path = recipe.tokenizer.path or start
    first = _read(recipe, task, "train")
    if recipe.distillation.teacher:
        first = _meet_teacher(recipe, task, first)
    sense, tokenizer, processor = task.objective.sense, None, None
    if recipe.processor and not sense:
        raise UserError(f"recipe key 'processor' must be empty, as {task.name} reads texts")
    if sense:
        processor = build_processor(recipe, sense)
    if task.has_texts:
        tokenizer = build_tokenizer(recipe.tokenizer, _texts(first, task), task.topology, task.extra_tokens)
    labels = label_names(task, first)
    model = build_model(recipe, task, tokenizer, labels)
    labels = list(model.config.label2id) if labels else []
    rows_of = partial(encode, task, tokenizer=tokenizer, recipe=recipe, labels=labels)
    rows = [rows_of(examples) for examples in (first, _read(recipe, task, "validation"))]
    if task.name == "regression":
        _start_at_mean(model, rows[0])
    if recipe.attention_transfer:
        _check_start("attention_transfer", recipe.attention_transfer)
        with as_user_error("recipe key 'attention_transfer'", *BROKEN_FILES):
            teacher = task.head.from_pretrained(recipe.attention_transfer, trust_remote_code=False)
            AttentionTransfer(model, teacher)
    if recipe.low_rank.rank:
        add_low_rank(model, recipe.low_rank)
    if recipe.label_smoothing and task.name in ("regression", "question_answering"):
        raise UserError(f"recipe key 'label_smoothing' must be 0, as the loss of {task.name} is not of classes")
    if recipe.r_drop:
        if task.name in ONE_ANSWER:
            raise UserError(f"recipe key 'r_drop' must be 0, as {task.name} does not choose among labels alone")
        Consistency(model, recipe.r_drop)
    if recipe.distillation.signals():
        Distillation(model, _load_teacher(recipe, task, tokenizer), recipe.distillation)
    train = _training_examples(recipe, task, tokenizer, first, rows[0], rows_of, labels)
    validation = build_examples(task, rows[1], tokenizer, recipe)
    collator = task.collator(tokenizer)
    training_collator = collator
    if recipe.data.token_dropout:
        if sense or task.name == "multiple_choice":
            raise UserError(f"recipe key 'data.token_dropout' must be 0, as {task.name} has not one text a row")
        training_collator = TokenDropout(collator, tokenizer, recipe.data.token_dropout)
    updates = processes * recipe.gradient_accumulation_steps
    return Parts(
        model,
        tokenizer,
        processor,
        build_loader(
            train,
            training_collator,
            recipe.max_tokens,
            noise=recipe.length_noise,
            seed=recipe.seed,
            multiple_of=updates,
        ),
        build_loader(validation, collator, recipe.max_tokens, shuffle=False, multiple_of=processes),
        fingerprint=digest_of(rows),
        score=lambda model: score_rows(model, task, validation, collator, recipe),
        examples=len(train),
    )


# Objectives whose output is not, or not only, a distribution at each label.
ONE_ANSWER = ("regression", "question_answering", "next_sentence")


def _start_at_mean(model: PreTrainedModel, rows: Dataset) -> None:
    """Let a new head's bias be the mean of what it is to learn, which it would take many small steps to reach."""
    if type(model).__name__ not in (model.config.architectures or []):  # of a loaded model, what was saved
        torch.nn.init.constant_(model.classifier.bias, float(np.mean(rows["labels"])))


def _read(recipe: Recipe, task: Task, split: str) -> Dataset:
    """Return a split's examples; of training data that are read in windows, the first window."""
    columns, optional = task.objective.columns, task.objective.optional
    if split == "train" and recipe.data.window:
        return first_window(open_stream(recipe.data, split, columns), recipe.data.window)
    return load_split(recipe.data, split, columns, optional, recipe.seed)


def _training_examples(
    recipe: Recipe,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    examples: Dataset,
    rows: Dataset,
    rows_of: Callable[[Dataset], Dataset],
    labels: list[str],
) -> Examples | NextSentencePairs:
    """Return what training draws its batches from: all rows, rows split anew in each epoch, or a window of a stream."""
    dropout, window, groups = recipe.tokenizer.dropout, recipe.data.window, recipe.data.interchangeable
    if dropout:
        if task.name != "seq2seq" or task.topology != "encoder_decoder" or recipe.data.max_length or window:
            raise UserError(
                "recipe key 'tokenizer.dropout' must be 0, unless the objective is seq2seq with an encoder-decoder and "
                "data.max_length and data.window are null"
            )
        return RegularizedPairs(examples["source"], examples["target"], tokenizer, dropout, recipe.seed)
    if window:
        if has_classes(task) or task.name == "next_sentence":
            raise UserError(f"recipe key 'data.window' must be null, as {task.name} has to see all examples")
        stream = open_stream(recipe.data, "train", task.objective.columns)
        return StreamedExamples(stream, window, rows_of, partial(row_lengths, task), recipe.seed)
    if groups:
        if task.name != "token_classification":
            raise UserError(f"recipe key 'data.interchangeable' must be empty, as {task.name} does not label words")
        return RenamedExamples(
            rows, row_lengths(task, rows), recipe.seed, groups, tokenizer, labels, recipe.data.keep_beside
        )
    return build_examples(task, rows, tokenizer, recipe)


def _meet_teacher(recipe: Recipe, task: Task, examples: Dataset) -> Dataset:
    """Take over what the teacher decides: the tokenizer, where more than texts pass, and perhaps the targets."""
    distillation = recipe.distillation
    _check_start("distillation.teacher", distillation.teacher)
    if distillation.signals() or distillation.start_from:
        recipe.tokenizer.path = recipe.tokenizer.path or distillation.teacher
    if not distillation.sequences:
        return examples
    if task.name != "seq2seq" or recipe.data.window:
        raise UserError(
            "recipe key 'distillation.sequences' must be null, unless the objective is seq2seq and data.window is null"
        )
    return teach_targets(examples, distillation.teacher, Path(distillation.sequences))


def _load_teacher(recipe: Recipe, task: Task, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the teacher with the objective's head; only with the student's tokenizer does it say something of it."""
    path = recipe.distillation.teacher
    teacher, its_tokenizer = load_model(path, task.head)
    if "attentions" in recipe.distillation.signals():
        teacher.set_attn_implementation("eager")
    if tokenizer_digest(its_tokenizer) != tokenizer_digest(tokenizer):
        raise UserError(
            f"recipe key 'tokenizer.path' is '{recipe.tokenizer.path}' ({len(tokenizer):,} tokens), but must be "
            f"'{path}' ({len(its_tokenizer):,} tokens) or null, as what a teacher says is about its own tokens; with "
            "another tokenizer, use distillation.sequences alone"
        )
    return teacher


def _check_start(key: str, path: str) -> None:
    """Name the recipe that trains the model to start from, where it has not been trained yet."""
    name = Path(path).name
    if not Path(path).exists() and name in recipe_names():
        raise UserError(f"recipe key '{key}': there is no '{path}' yet, make it with: triptych train {name}")


def _texts(examples: Dataset, task: Task) -> Iterator[str]:
    """All texts of the columns that the model reads."""
    for column in task.objective.columns:
        for value in examples[column] if column not in NOT_TEXT else ():
            yield from [value] if isinstance(value, str) else value


def text_fields(tokenizer: PreTrainedTokenizerBase, topology: str) -> dict[str, Any]:
    """Return what a tokenizer says of a model's configuration."""
    begin, end = text_bounds(tokenizer)
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": begin,
        "eos_token_id": end,
    }
    if topology == "encoder_decoder":  # T5's tokenizer has nothing that a text begins with: its models start with a pad
        fields["decoder_start_token_id"] = tokenizer.pad_token_id if begin is None else begin
    if topology == "encoder" and tokenizer.mask_token is not None:
        fields["mask_token_id"] = tokenizer.mask_token_id
    if "token_type_ids" in tokenizer.model_input_names:
        fields["type_vocab_size"] = 2
    return fields


def build_model(
    recipe: Recipe, task: Task, tokenizer: PreTrainedTokenizerBase | None, labels: list[str]
) -> PreTrainedModel:
    """Return the objective's head with the recipe's fields and the tokenizer's ids, initialised or loaded.

    Raises:
        UserError: an unknown preset or field, or a value that the configuration refuses.
    """
    sense = task.objective.sense
    changes = text_fields(tokenizer, task.topology) if task.has_texts else {}
    if sense and task.topology == "encoder":
        changes["input_type"] = sense
    given = {name: value for name, value in recipe.model.items() if name not in NOT_FIELDS}
    _check_model_fields(given, task.topology)
    if sense and task.topology == "encoder_decoder":
        given["encoder"] = {"input_type": sense, **given.get("encoder", {})}
    heads = {"num_labels": 1, "problem_type": "regression"} if task.name == "regression" else {}
    if labels:
        heads = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    name = recipe.model.get("attn_implementation")
    backend = {"attn_implementation": name} if name else {}
    path, chosen = recipe.model.get("path"), recipe.distillation.start_from
    with as_user_error("recipe section 'model'", *BROKEN_FILES if path or chosen else ()):
        if chosen:
            model = _begin_as_teacher(recipe, task, given | backend)
        elif path:
            model = task.head.from_pretrained(path, trust_remote_code=False, **given | heads, **backend)
        else:
            fields = changes | given | heads
            preset = recipe.model.get("preset")
            config = (
                TriptychConfig.from_preset(preset, **fields)
                if preset
                else TriptychConfig(topology=task.topology, **fields)
            )
            model = task.head.from_config(config, **backend)
        if model.can_generate():
            model.generation_config.update(**vars(recipe.generation))
            model.generation_config.validate()
    return model


def _begin_as_teacher(recipe: Recipe, task: Task, changes: dict[str, Any]) -> PreTrainedModel:
    """Return the teacher's chosen layers with its head, as a model of the family.

    Raises:
        ValueError: a layer is not there, a change would leave weights without meaning, or the head is another one.
    """
    chosen = recipe.distillation.start_from
    if isinstance(chosen, dict):
        changes |= {stack: changes.get(stack, {}) | {"layers": layers} for stack, layers in chosen.items()}
    else:
        changes["layers"] = chosen
    model = import_model(recipe.distillation.teacher, **changes)
    expected = task.head._model_mapping[type(model.config)]
    if type(model) is not expected:
        raise ValueError(f"the teacher is {type(model).__name__}, but {task.name} needs {expected.__name__}")
    return model


def _check_model_fields(changes: dict[str, Any], topology: str) -> None:
    """Refuse unknown fields: transformers keeps them as attributes, so that a typo would change nothing."""
    stacks = {"encoder": TriptychEncoderConfig, "decoder": TriptychDecoderConfig}
    known = {stack: {field.name for field in fields(config)} for stack, config in stacks.items()}
    sections = {}
    if topology == "encoder_decoder":
        known[topology] = (
            {field.name for field in fields(TriptychEncoderDecoderConfig)} | known["encoder"] | known["decoder"]
        )
        sections = {f"model.{stack}": (changes.get(stack) or {}, known[stack]) for stack in stacks}
    sections["model"] = (changes, known[topology].union(NOT_FIELDS))
    for section, (given, allowed) in sections.items():
        for name in given:
            if name not in allowed:
                raise unknown_name("recipe key", f"{section}.{name}", [f"{section}.{field}" for field in allowed])
