"""The command `convert`: a known checkpoint as a folder of the family, or the other way round."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from triptych import export_model, import_model
from triptych.training.errors import BROKEN_FILES, UserError, as_user_error
from triptych.training.recipe import read_value

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt")


def convert(source: str, destination: str, model_type: str | None, changes: Sequence[str], overwrite: bool) -> str:
    """Convert the model `source` into the folder `destination`, with its tokenizer, and return what it has become.

    Args:
        source: a folder or repository, of the family or of an architecture that it knows.
        model_type: the architecture to convert to; None is the family.
        changes: fields of the family's configuration, `KEY=VALUE`.
        overwrite: whether an existing `destination` is replaced.

    Raises:
        UserError: something does not fit, or `destination` is there already. Nothing is written then.
    """
    folder = Path(destination)
    if folder.exists() and not overwrite:
        raise UserError(f"'{folder}' is there already: choose another folder or add --overwrite")
    with as_user_error(f"'{source}' cannot be converted", *BROKEN_FILES):
        model = import_model(source, **_read_changes(changes))
        if model_type is not None:
            model = export_model(model, model_type)
    tokenizer = find_tokenizer(source)
    staging = folder.absolute().with_name(f".{folder.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    with as_user_error(f"'{folder}' cannot be written"):
        try:
            model.save_pretrained(staging)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            if folder.exists():
                shutil.rmtree(folder)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    without = "" if tokenizer is not None else ", without a tokenizer, as there is none"
    return f"{folder}: {type(model).__name__}, {parameters:,} parameters{without}"


def find_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer beside a model, if there is one."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None  # transformers would make an empty one
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, *BROKEN_FILES):  # each tokenizer class fails in its own way
        return None


def _read_changes(changes: Sequence[str]) -> dict[str, Any]:
    fields = {}
    for change in changes:
        name, found, text = change.partition("=")
        if not found:
            raise UserError(f"'{change}' is no change: write KEY=VALUE, as in sliding_window=256")
        fields[name] = read_value(change, text)
    return fields
