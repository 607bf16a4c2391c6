"""What a trained model writes or predicts, and how well."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import triptych  # noqa: F401 - registers the family with the Auto classes
from triptych.losses import IGNORE
from triptych.training.batching import build_loader, count_items
from triptych.training.data import load_files, load_split
from triptych.training.errors import BROKEN_FILES, UserError, as_user_error
from triptych.training.metrics import compute
from triptych.training.objectives import WRITING, Task, build_examples, encode, has_classes, read_task
from triptych.training.recipe import RECIPE_FILE, Recipe, load_recipe

# What is measured of each objective that predicts; the others are language models, measured by their likelihood.
METRICS = {
    "seq2seq": ["exact_match", "bleu", "chrf", "rouge"],
    "speech_to_text": ["exact_match", "word_error_rate"],
    "sequence_classification": ["accuracy", "f1", "matthews"],
    "regression": ["pearson"],
    "token_classification": ["accuracy"],
    "question_answering": ["span_f1"],
    "multiple_choice": ["accuracy"],
    "image_classification": ["accuracy", "f1", "matthews"],
    "video_classification": ["accuracy", "f1", "matthews"],
    "audio_classification": ["accuracy", "f1", "matthews"],
}
# What metrics give whose scores have other names than their own, as far as objectives that label their input have them.
SCORES = {"pearson": ["pearson", "spearman"], "span_f1": ["span_exact_match", "span_f1"]}


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    batch_size: int = 64,
    **options,
) -> list[str]:
    """Return the text that `model` writes for each of `sources`, in their order.

    A decoder that was trained on pairs reads `source <sep>` and writes the target, any other goes on with the source.

    Args:
        batch_size: texts at a time; texts of like length go together, the longest first.
        **options: of `model.generate`, on top of the model's own generation config.

    Raises:
        UserError: the model refuses a source, for example one that is longer than its position table.
    """
    model.eval()
    is_decoder = not model.config.is_encoder_decoder
    end = [tokenizer.sep_token_id] if is_decoder and tokenizer.sep_token_id is not None else []
    encoded = [ids + end for ids in tokenizer(list(sources))["input_ids"]]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    texts = [""] * len(encoded)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [encoded[index] for index in indices]},
            padding_side="left" if is_decoder else "right",
            return_tensors="pt",
        )
        with as_user_error("the model cannot read this input"):
            written = model.generate(**batch.to(model.device), **options)
        written = written[:, batch["input_ids"].shape[1] :] if is_decoder else written
        decoded = tokenizer.batch_decode(written, skip_special_tokens=True)
        for index, text in zip(indices, decoded, strict=True):
            texts[index] = text
    return texts


@torch.no_grad()
def transcribe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Dataset, recipe: Recipe, **options
) -> list[str]:
    """Return the text that `model` writes for each recording of `examples`; `options` are of `model.generate`."""
    model.eval()
    task = read_task(recipe)
    rows = build_examples(task, encode(task, examples, tokenizer, recipe, []), tokenizer, recipe)
    loader = build_loader(rows, task.collator(tokenizer), recipe.max_tokens, shuffle=False)
    texts = [""] * len(rows)
    for indices, batch in zip(loader.batch_sampler.batches, loader, strict=True):
        inputs = {name: value.to(model.device) for name, value in batch.items() if name != "labels"}
        written = tokenizer.batch_decode(model.generate(**inputs, **options), skip_special_tokens=True)
        for index, text in zip(indices, written, strict=True):
            texts[index] = text
    return texts


def evaluate_examples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    examples: Dataset,
    recipe: Recipe,
    batch_size: int = 64,
    **options,
) -> dict[str, float | str | int]:
    """Return the number of `examples` and the measures of the recipe's objective, in percent where that is customary.

    Args:
        examples: with the objective's columns.
        batch_size, **options: of `generate_texts`, where the objective is to write.
    """
    task = read_task(recipe)
    if task.name in WRITING:
        written = (
            generate_texts(model, tokenizer, examples["source"], batch_size, **options)
            if task.name == "seq2seq"
            else transcribe(model, tokenizer, examples, recipe, **options)
        )
        names = METRICS[task.name]
        # force: that the text is tokenised already is what `tokenize: none` says.
        how = {**vars(recipe.bleu), "force": True} if "bleu" in names else {}
        scores = compute(names, written, list(examples["target"]), **how)
        return {"examples": len(examples), **scores}
    labels = list(model.config.label2id) if has_classes(task) else []
    rows = encode(task, examples, tokenizer, recipe, labels)
    rows = build_examples(task, rows, tokenizer, recipe)
    collator = task.collator(tokenizer)
    if task.name in METRICS:
        return {"examples": len(examples), **score_rows(model, task, rows, collator, recipe)}
    return {"examples": len(examples), **_likelihood(model, task, examples, rows, collator, recipe)}


def score_names(task: Task) -> list[str]:
    """Return the names of the measures that `score_rows` gives."""
    names = [] if task.name in WRITING else METRICS.get(task.name, [])
    return [score for name in names for score in SCORES.get(name, [name])]


def score_rows(model: PreTrainedModel, task: Task, rows: Any, collator: Callable, recipe: Recipe) -> dict[str, float]:
    """Return the measures of an objective that labels its input; none of one that writes or models language."""
    if not score_names(task):
        return {}
    predictions, references = [], []
    for outputs, batch in _outputs(model, rows, collator, recipe.max_tokens):
        if task.name == "question_answering":
            predictions += _best_spans(outputs, batch)
            references += _texts(batch["input_ids"], batch["start_positions"], batch["end_positions"])
            continue
        chosen = outputs.logits.squeeze(-1) if task.name == "regression" else outputs.logits.argmax(-1)
        # Tokens besides a word's first have no class. A text with -100 has one that training has not seen: it counts,
        # as wrong.
        given = (batch["labels"] != IGNORE) | (batch["labels"].ndim == 1)
        predictions += chosen[given].tolist()
        references += batch["labels"][given].tolist()
    options = {"average": "macro"} if "f1" in METRICS[task.name] else {}
    return compute(METRICS[task.name], predictions, references, **options)


def _likelihood(model, task, examples, rows, collator, recipe) -> dict[str, float]:
    losses, items = [], []
    for outputs, batch in _outputs(model, rows, collator, recipe.max_tokens):
        losses.append(float(outputs.loss))
        items.append(int(count_items(batch)))
    # Only a model that predicts every token says how likely the text is.
    sizes = {"num_bytes": sum(len(text.encode()) for text in examples["text"])} if task.name == "causal_lm" else {}
    return compute("perplexity", losses, items, **sizes)


@torch.no_grad()
def _outputs(model: PreTrainedModel, rows: Any, collator: Callable, max_tokens: int) -> Iterator[tuple[Any, dict]]:
    """Yield the model's output for each batch of `rows`, with the sum of its losses, and the batch."""
    model.eval()
    for batch in build_loader(rows, collator, max_tokens, shuffle=False):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        yield model(**batch, num_items_in_batch=1), batch


def _best_spans(outputs: Any, batch: dict[str, torch.Tensor]) -> list[str]:
    """The most likely first and last token, the first before the last, both real."""
    pads = batch["attention_mask"] == 0
    starts, ends = (logits.masked_fill(pads, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits))
    pairs = (starts[:, :, None] + ends[:, None, :]).masked_fill(
        torch.ones_like(starts[0]).diag().cumsum(1) == 0, -torch.inf
    )
    best = pairs.flatten(1).argmax(1)
    return _texts(batch["input_ids"], best // starts.shape[1], best % starts.shape[1])


def _texts(ids: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> list[str]:
    """Spans of tokens, written as text that is equal where the tokens are."""
    return [
        " ".join(map(str, row[start : end + 1].tolist())) for row, start, end in zip(ids, starts, ends, strict=True)
    ]


def examples_to_score(
    folder: Path,
    files: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    max_length: int | None = None,
) -> tuple[dict[str, Dataset], Recipe]:
    """Return the examples to score a model on, by name, and the recipe that says how.

    Args:
        folder: a run's folder, whose recipe names the splits.
        files: one file or several side by side, in place of the recipe's splits.
        splits: names of the recipe's splits; by default all test splits, or validation where there is none.
        max_length: longest example in tokens, in place of the recipe's.

    Raises:
        UserError: unusable files, an unknown split, or neither files nor a recipe in `folder`.
    """
    saved = folder / RECIPE_FILE
    if not saved.is_file() and not files:
        raise UserError(f"'{folder}' holds no {RECIPE_FILE} that names test data: give --data FILE")
    recipe = load_recipe(str(saved)) if saved.is_file() else Recipe()
    if max_length is not None:
        recipe.data.max_length, recipe.max_tokens = max_length, max(max_length, recipe.max_tokens)
    objective = read_task(recipe).objective
    columns = objective.columns, objective.optional
    if files:
        return {" ".join(files): load_files(list(files), *columns, recipe.data)}, recipe
    known = recipe.data.named_splits()
    names = splits or [name for name in known if name not in ("train", "validation")] or ["validation"]
    return {name: load_split(recipe.data, name, *columns, recipe.seed) for name in names}, recipe


def load_model(name: str, head: type | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model and its tokenizer, if it reads texts, onto the device of this process, from a folder or the Hub,
    whose code is never run.

    Args:
        head: the Auto class; by default the one that writes: an encoder-decoder or a decoder.

    Raises:
        UserError: there is no such model, it is of another kind, or its files are broken.
    """
    with as_user_error(f"model '{name}' cannot be loaded", *BROKEN_FILES):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if head is None:
            head = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        reads_text = getattr(config, "input_type", "text") == "text"
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False) if reads_text else None
        model = head.from_pretrained(name, trust_remote_code=False)
    return model.to(PartialState().device), tokenizer
