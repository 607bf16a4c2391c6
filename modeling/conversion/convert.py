"""Import and export: a transformers model as one of ours with equal weights, and back."""

import copy
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import modeling_triptych
from ..pretrained import TriptychPreTrainedModel
from .configurations import export_config, import_config
from .files import load_source, refuse_loss
from .registry import find, heads_of
from .surgery import NEW_IN_LINEAR, operate
from .weights import Tensors, own_weights, table_of, to_ours, to_theirs

logger = logging.get_logger(__name__)


def import_model(
    source: PreTrainedModel | str | Path, attn_implementation: str | None = None, **changes
) -> TriptychPreTrainedModel:
    """A known model as one of the family, with equal weights, head, generation settings and names of labels.

    Args:
        source: a model of transformers, a folder or a repository id with safetensors weights; or one of the family,
            to change it.
        attn_implementation: the backend of the imported model.
        changes: fields of our configuration that become others, as far as the weights keep their meaning: see
            `surgery.operate`.

    Returns:
        The model in eval mode, in the source's dtype, on the source's device.

    Raises:
        ValueError: the architecture or a feature of it does not fit, a change would not leave the weights their
            meaning, or files are missing, pickled or broken.
    """
    theirs = source if isinstance(source, PreTrainedModel) else load_source(source)
    if isinstance(theirs, TriptychPreTrainedModel):
        model_class, config, weights = type(theirs), theirs.config, own_weights(theirs)
    else:
        architecture, head = find(theirs.config.model_type, type(theirs).__name__)
        model_class = getattr(modeling_triptych, head.ours)
        config = import_config(architecture, head, theirs)
        weights = to_ours(table_of(architecture, head, theirs, config), own_weights(theirs), config)
    if theirs is source:
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    config, weights, remarks = operate(config, weights, changes)
    for remark in remarks:
        logger.warning(remark)
    backend = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    ours = build(model_class, config, weights, theirs, begins=NEW_IN_LINEAR if changes else None, **backend)
    if ours.can_generate() and theirs.can_generate():
        ours.generation_config = copy.deepcopy(theirs.generation_config)
    return ours


def export_model(model: TriptychPreTrainedModel, model_type: str) -> PreTrainedModel:
    """A model of the family as transformers' own, with equal weights.

    Args:
        model: with a configuration that is a point of that architecture.
        model_type: transformers' name of the architecture.

    Raises:
        ValueError: the architecture is not known, has no such head, or differs in a field.
    """
    name = next((name for name, (_, head) in heads_of(model_type).items() if head.ours == type(model).__name__), None)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no counterpart in {model_type}.")
    architecture, head = find(model_type, name)
    their_class = getattr(transformers, name)
    config = export_config(architecture, head, model.config, their_class.config_class)
    options = head.options(model.config)
    with torch.device("meta"):
        blank = their_class(copy.deepcopy(config), **options)
    weights = to_theirs(table_of(architecture, head, blank, model.config), own_weights(model), model.config)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    theirs = build(their_class, config, weights, model, **options)
    if theirs.can_generate() and model.can_generate():
        theirs.generation_config = copy.deepcopy(model.generation_config)
    return theirs


def build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Tensors,
    like: PreTrainedModel,
    begins: re.Pattern | None = None,
    **options,
) -> PreTrainedModel:
    """A model of these weights, in the dtype and on the device of another; what `begins` matches may be new.

    Raises:
        ValueError: there are too few or too many weights, or some of another shape.
    """
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=like.dtype,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **options,
    )
    if begins is not None:
        info["missing_keys"] = [name for name in info["missing_keys"] if not begins.search(name)]
    refuse_loss(model_class.__name__, info)
    return model.to(like.device)
