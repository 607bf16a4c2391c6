"""What a trained model writes, and how well: batched generation, exact match, BLEU and chrF."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from sacrebleu.metrics import BLEU, CHRF
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import triptych  # noqa: F401 - registers the family with the Auto classes
from triptych.training.data import load_pairs, load_split
from triptych.training.errors import UserError, as_user_error
from triptych.training.recipe import RECIPE_FILE, BleuRecipe, Recipe, load_recipe
from triptych.training.tokenization import join_subwords


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    batch_size: int = 64,
    **options,
) -> list[str]:
    """Return the text that `model` writes for each of `sources`, in their order.

    Args:
        batch_size: texts at a time; texts of like length go together, the longest first.
        **options: of `model.generate`, on top of the model's own generation config.

    Raises:
        UserError: the model refuses a source, for example one that is longer than its position table.
    """
    model.eval()
    encoded = [tokenizer(source)["input_ids"] for source in sources]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]), reverse=True)
    texts = [""] * len(encoded)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[index] for index in indices]}, return_tensors="pt")
        with as_user_error("the model cannot read this input"):
            written = model.generate(**batch.to(model.device), **options)
        decoded = tokenizer.batch_decode(written, skip_special_tokens=True)
        for index, text in zip(indices, decoded, strict=True):
            texts[index] = text
    return texts


def score(predictions: Sequence[str], references: Sequence[str], bleu: BleuRecipe) -> dict[str, float | str]:
    """Compare texts: `exact_match` in percent, sacrebleu's `bleu` and `chrf` with the signatures that define them.

    BLEU is Papineni et al. 2002 as Post 2018 (arXiv 1804.08771) standardises it; chrF is Popović 2015.
    """
    # force=True: that the text is tokenised already is what `tokenize: none` says.
    bleu_metric = BLEU(tokenize=bleu.tokenize, smooth_method=bleu.smooth_method, force=True)
    chrf_metric = CHRF()
    matches = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
    return {
        "examples": len(references),
        "exact_match": 100 * matches / len(references),
        "bleu": bleu_metric.corpus_score(list(predictions), [list(references)]).score,
        "chrf": chrf_metric.corpus_score(list(predictions), [list(references)]).score,
        "bleu_signature": str(bleu_metric.get_signature()),
        "chrf_signature": str(chrf_metric.get_signature()),
    }


def evaluate_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Dataset,
    recipe: Recipe,
    batch_size: int = 64,
    **options,
) -> dict[str, float | str]:
    """Let `model` write a target for each source of `pairs` and `score` it; subwords are joined on both sides."""
    joiner = recipe.data.joiner
    written = generate_texts(model, tokenizer, pairs["source"], batch_size, **options)
    predictions = [join_subwords(text, joiner) for text in written]
    references = [join_subwords(text, joiner) for text in pairs["target"]]
    return score(predictions, references, recipe.bleu)


def pairs_to_score(
    folder: Path, files: Sequence[str] | None = None, splits: Sequence[str] | None = None
) -> tuple[dict[str, Dataset], Recipe]:
    """Return the text pairs to score a model on, by name, and the recipe that says how.

    Args:
        folder: a run's folder, whose recipe names the splits.
        files: one file of pairs or two parallel files, in place of the recipe's splits.
        splits: names of the recipe's splits; by default all test splits, or validation where there is none.

    Raises:
        UserError: unusable files, an unknown split, or neither files nor a recipe in `folder`.
    """
    saved = folder / RECIPE_FILE
    if not saved.is_file() and not files:
        raise UserError(f"'{folder}' holds no {RECIPE_FILE} that names test data: give --data FILE")
    recipe = load_recipe(str(saved)) if saved.is_file() else Recipe()
    if files:
        return {" ".join(files): load_pairs(list(files), recipe.data.columns)}, recipe
    known = recipe.data.dates or recipe.data.splits
    names = splits or [name for name in known if name not in ("train", "validation")] or ["validation"]
    return {name: load_split(recipe.data, name, recipe.seed) for name in names}, recipe


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an encoder-decoder and its tokenizer from a folder or the Hub, onto the device of this process.

    Raises:
        UserError: there is no such model, or it is of another kind.
    """
    with as_user_error(f"model '{name}' cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name)
    return model.to(PartialState().device), tokenizer
