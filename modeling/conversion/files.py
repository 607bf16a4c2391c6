"""Folders and repositories as models of transformers, with nothing lost or run on the way."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import modeling_triptych
from ..configuration_triptych import TriptychConfig
from ..weight_files import check_claim, check_source
from .configurations import read_fields
from .registry import find

logger = logging.get_logger(__name__)


def load_source(source: str | Path) -> PreTrainedModel:
    """The model in a folder or repository, as transformers' own.

    Raises:
        ValueError: its architecture is not supported, or files are missing, pickled or broken.
    """
    name = str(source)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"'{name}' has no configuration that can be read: {str(error).splitlines()[0]}") from error
    names = config.architectures or [AutoModel._model_mapping[type(config)].__name__]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"`architectures` of '{name}' is {names!r}, but must be a list of names of classes.")
    class_name = names[0]
    check_files(Path(name))
    if config.model_type == TriptychConfig.model_type:
        if class_name not in modeling_triptych.__all__:
            raise ValueError(f"'{name}' names the class {class_name!r}, which is none of the family's.")
        model_class = getattr(modeling_triptych, class_name)
    else:
        check_sizes(Path(name), config, class_name)
        model_class = getattr(transformers, class_name)
    check_source(name)
    try:
        model, info = model_class.from_pretrained(
            name, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"'{name}' has no weights that can be read: {str(error).splitlines()[0]}") from error
    refuse_loss(f"'{name}' as {class_name}", info, ("missing", "mismatched"))
    if unexpected := sorted(info["unexpected_keys"]):
        logger.warning(f"'{name}' has weights that {class_name} does not, which stay behind: {', '.join(unexpected)}.")
    return model


def check_sizes(source: Path, config: PreTrainedConfig, class_name: str):
    """Refuses sizes that no model has, or that far exceed the weights in a folder, before their model is built."""
    architecture, head = find(config.model_type, class_name)
    ours = TriptychConfig(**read_fields(architecture, head, config))
    if files := list(source.glob("*.safetensors")):
        with torch.device("meta"):
            check_claim(getattr(modeling_triptych, head.ours)(ours), files, source)


def check_files(folder: Path):
    """Refuses pickles and broken files of weights by name."""
    if not folder.is_dir():
        return
    files, pickles = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.bin"))
    if not files and pickles:
        raise ValueError(
            f"'{pickles[0]}' is a pickle, which can run code and is not read. If you trust it, convert it in place: "
            f"model = AutoModel.from_pretrained('{folder}', use_safetensors=False); model.save_pretrained('{folder}')."
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"'{file}' is truncated or corrupted: {error}.") from error


def refuse_loss(name: str, info: dict[str, Any], kinds: tuple[str, ...] = ("missing", "unexpected", "mismatched")):
    """Raises a ValueError that lists the weights which `from_pretrained` did not find, or did not take."""
    for kind in kinds:
        if keys := info[f"{kind}_keys"]:
            names = ", ".join(sorted(key if isinstance(key, str) else key[0] for key in keys))
            raise ValueError(f"{kind.capitalize()} weights of {name}: {names}.")
