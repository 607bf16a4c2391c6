"""Files of weights as they may come from anyone: what is refused before a model is filled from them.

A safetensors file begins with the names, types and shapes of its tensors, and holds nothing that could run. So it can
be compared with what a configuration claims before memory is spent on the claim. A pickle can run code as it is read,
and an index can name files that lie anywhere.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

SUFFIX = ".safetensors"
# A model may have parameters that its files have not: a new head, or a longer table. It is refused if that makes it so
# many times what the files hold, and by so many parameters more that it matters.
MOST_TIMES, MOST_NEW_PARAMETERS = 10, 100_000_000


def check_source(source: str | Path, variant: str | None = None, **where):
    """Refuses a file that is not safetensors, and an index that is broken or names files elsewhere.

    Args:
        source: a folder, a repository or a file.
        variant: what stands in a file's name before its suffix.
        where: which folder and revision of the repository, as `cached_file` takes them.
    """
    if Path(source).is_file():
        check_names([source])
        return
    name = SAFE_WEIGHTS_INDEX_NAME if variant is None else SAFE_WEIGHTS_INDEX_NAME.replace("json", f"{variant}.json")
    # What else is wrong with a source is said by who loads from it.
    silent = [f"_raise_exceptions_for_{what}" for what in ("missing_entries", "gated_repo", "connection_errors")]
    if index := cached_file(source, name, **where, **dict.fromkeys(silent, False)):
        check_index(index)


def check_index(index: str | Path):
    """Refuses an index of weights that is not one, or whose files are not safetensors files beside it."""
    try:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{index}' is no index of weights: {error}.") from error
    content = content if isinstance(content, dict) else {}
    metadata, weight_map = content.get("metadata"), content.get("weight_map")
    if not (isinstance(metadata, dict) and isinstance(weight_map, dict) and weight_map):
        raise ValueError(f"'{index}' is no index of weights: it must have `metadata` and a `weight_map`.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise ValueError(f"'{index}' names {name!r}, but must name {SUFFIX} files beside it.")


def check_names(files: Iterable[str | Path]):
    """Refuses what would be read as a pickle."""
    for file in files:
        if not str(file).endswith(SUFFIX):
            raise ValueError(f"'{file}' may run code and is not read: weights are only read from {SUFFIX} files.")


def count_numbers(file: str | Path) -> int:
    """Returns how many numbers a safetensors file holds, as its header says."""
    with safe_open(file, framework="pt") as weights:
        return sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def check_claim(model: nn.Module, files: Iterable[str | Path], source: str | Path):
    """Refuses a model that is far larger than what it is to be filled with.

    Args:
        model: without memory of its own yet, on the meta device.
        files: all safetensors files that `source` holds.
    """
    held = sum(map(count_numbers, files))
    claimed = sum(parameter.numel() for parameter in model.parameters())
    if claimed > MOST_TIMES * held + MOST_NEW_PARAMETERS:
        raise ValueError(
            f"The configuration of '{source}' is that of {claimed:,} parameters, but its files hold {held:,}; they do "
            "not belong together."
        )
