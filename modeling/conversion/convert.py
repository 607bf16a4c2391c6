"""Import and export: a transformers model as one of ours with equal weights, and back."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .. import modeling_triptych
from ..configuration_triptych import TOPOLOGIES, TriptychConfig
from ..heads import BASE_MODELS
from ..pretrained import TriptychPreTrainedModel
from .decoders import DECODERS
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .surgery import operate
from .tables import Architecture, Head, Weight, match, within

Tensors = dict[str, torch.Tensor]
logger = logging.get_logger(__name__)

ARCHITECTURES = (*ENCODERS, *DECODERS, *ENCODER_DECODERS)

# What stands in the way of well-known others.
UNSUPPORTED = {
    "deberta": "disentangled attention",
    "deberta-v2": "disentangled attention",
    "falcon": "one norm for attention and feed-forward layer side by side",
    "gemma2": "capped attention scores",
    "gptj": "rotation of neighbouring dimensions",
    "longformer": "projections of its own for global tokens",
    "mamba": "state-space layers",
    "mixtral": "a mixture of experts",
    "mpnet": "learned positions beside relative biases",
    "olmo2": "norms over all heads of queries and keys together",
    "phi": "one norm for attention and feed-forward layer side by side",
    "switch_transformers": "a mixture of experts",
    "umt5": "relative biases of each layer's own",
    "xlnet": "relative positions with biases for content and position",
}
# Fields that say nothing of the function: names of labels and tokens are carried over by themselves.
CARRIED = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "problem_type")
TRAINING_ONLY = ("hidden_dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "initializer_range")


def import_model(
    source: PreTrainedModel | str | Path, attn_implementation: str | None = None, **changes
) -> TriptychPreTrainedModel:
    """A known model as one of the family, with equal weights, head, generation settings and names of labels.

    Args:
        source: a model of transformers, a folder or a repository id with safetensors weights.
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
    architecture, head = find(theirs.config.model_type, type(theirs).__name__)
    config = import_config(architecture, head, theirs)
    weights = to_ours(table_of(architecture, head, theirs, config), own_weights(theirs), config)
    if theirs is source:
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    config, weights, remarks = operate(config, weights, changes)
    for remark in remarks:
        logger.warning(remark)
    backend = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    ours = build(getattr(modeling_triptych, head.ours), config, weights, theirs, **backend)
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


def heads_of(model_type: str) -> dict[str, tuple[Architecture, Head]]:
    """All classes of an architecture that are known, with their entries.

    Raises:
        ValueError: there are none; with the reason where it is a well-known architecture.
    """
    if model_type == "triptych":
        raise ValueError("The source is a Triptych model already; load it with from_pretrained.")
    if model_type in UNSUPPORTED:
        raise ValueError(f"{UNSUPPORTED[model_type].capitalize()} of {model_type} is not supported.")
    entries = [entry for entry in ARCHITECTURES if entry.model_type == model_type]
    if not entries:
        known = ", ".join(sorted({entry.model_type for entry in ARCHITECTURES}))
        raise ValueError(f"The architecture {model_type!r} is not supported; supported are {known}.")
    return {name: (entry, head) for entry in entries for name, head in entry.heads.items()}


def find(model_type: str, class_name: str) -> tuple[Architecture, Head]:
    """The entries of an architecture and of one of its classes.

    Raises:
        ValueError: there is none.
    """
    heads = heads_of(model_type)
    if class_name not in heads:
        raise ValueError(f"{class_name} of {model_type} is not supported; supported are {', '.join(heads)}.")
    return heads[class_name]


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


def import_config(architecture: Architecture, head: Head, theirs: PreTrainedModel) -> TriptychConfig:
    """Our configuration of their model.

    Raises:
        ValueError: something that it says would be lost.
    """
    config = TriptychConfig(**read_fields(architecture, head, theirs.config) | read_model(head, theirs))
    returned = export_config(architecture, head, config, type(theirs.config), check=False)
    for name, value in their_fields(theirs.config).items():
        back = getattr(returned, name)
        if same(value, back) or name in architecture.inert:
            continue
        if name in architecture.training_only:
            logger.warning(f"`{name}` of {architecture.model_type} is {value!r}, but trains as {back!r} here.")
            continue
        raise ValueError(f"`{name}` = {value!r} of {architecture.model_type} is not supported; {back!r} is.")
    config._name_or_path = theirs.config._name_or_path
    return config


def export_config(
    architecture: Architecture,
    head: Head,
    ours: TriptychConfig,
    config_class: type[PreTrainedConfig],
    check: bool = True,
) -> PreTrainedConfig:
    """Their configuration of our model.

    Raises:
        ValueError: our model has something that theirs cannot have.
    """
    fields = {their_name: get(ours, our_name) for our_name, their_name in architecture.fields.items()}
    fields |= carried(ours, config_class) | architecture.write(ours)
    theirs = config_class(**fields)
    theirs.architectures = [name for name, known in architecture.heads.items() if known is head]
    if check:
        returned = flat(TriptychConfig(**read_fields(architecture, head, theirs)))
        for name, value in flat(ours).items():
            back = returned.get(name)
            field = name.rpartition(".")[-1]
            if same(value, back) or field in head.fields or field == "tie_word_embeddings":
                continue
            if field in TRAINING_ONLY:
                logger.warning(f"`{name}` is {value!r}, but trains as {back!r} in {architecture.model_type}.")
                continue
            raise ValueError(f"`{name}` is {value!r}, but must be {back!r} in {architecture.model_type}.")
    return theirs


def read_fields(architecture: Architecture, head: Head, theirs: PreTrainedConfig) -> dict[str, Any]:
    """Our fields, from their configuration."""
    flat_fields = carried(theirs, TOPOLOGIES[architecture.topology])
    flat_fields |= {our_name: getattr(theirs, their_name) for our_name, their_name in architecture.fields.items()}
    flat_fields |= architecture.read(theirs) | architecture.fixed | head.fixed
    fields = {"topology": architecture.topology}
    for name, value in flat_fields.items():
        panel, _, rest = name.rpartition(".")
        (fields.setdefault(panel, {}) if panel else fields)[rest] = value
    return fields


def read_model(head: Head, theirs: PreTrainedModel) -> dict[str, Any]:
    """Our fields that only the model itself knows."""
    fields = {name: read(theirs) for name, read in head.fields.items()}
    if (projection := theirs.get_output_embeddings()) is not None:  # T5 says tied whatever it is
        fields["tie_word_embeddings"] = projection.weight is theirs.get_input_embeddings().weight
    return fields


def carried(source: PreTrainedConfig, target_class: type) -> dict[str, Any]:
    """What both sides call by the same name: special tokens, ties, names of labels."""
    names = [name for name in CARRIED if name in known_fields(target_class)]
    if source.is_encoder_decoder:
        names.append("decoder_start_token_id")
    fields = {name: getattr(source, name) for name in names if hasattr(source, name)}
    return fields | {"id2label": dict(source.id2label), "label2id": dict(source.label2id)}


def known_fields(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def their_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What their configuration says beyond what every one does."""
    names = known_fields(type(config)) - known_fields(PreTrainedConfig) - {"use_cache", "decoder_start_token_id"}
    return {name: getattr(config, name) for name in sorted(names)}


def flat(config: TriptychConfig, prefix: str = "") -> dict[str, Any]:
    """Our configuration, with the fields of stacks as "encoder.hidden_size"."""
    fields = {}
    names = known_fields(type(config)) - known_fields(PreTrainedConfig) - {"use_cache", "decoder_start_token_id"}
    for name in sorted(names):
        value = getattr(config, name)
        fields |= flat(value, f"{name}.") if isinstance(value, TriptychConfig) else {prefix + name: value}
    return fields


def get(config: TriptychConfig, name: str) -> Any:
    """A field, also of a stack; one that both stacks of an encoder-decoder share is asked of the decoder."""
    for part in name.split("."):
        config = getattr(config, part) if hasattr(config, part) else getattr(config.decoder, part)
    return config


def same(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return list(value) == list(other)
    return value == other


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def table_of(architecture: Architecture, head: Head, theirs: PreTrainedModel, config: TriptychConfig) -> list[Weight]:
    """All weights that a model of this configuration has, under their full names on both sides."""
    is_base = getattr(modeling_triptych, head.ours) in BASE_MODELS.values()
    prefix = theirs.base_model_prefix
    prefix = f"{prefix}." if prefix and hasattr(theirs, prefix) else ""
    table = [*head.weights, *within("" if is_base else "model.", architecture.weights, prefix)]
    return [weight for weight in table if weight.where(config)]


def to_ours(table: list[Weight], theirs: Tensors, config: TriptychConfig) -> Tensors:
    """Their weights, or gradients of these, under our names.

    Raises:
        ValueError: there is one that nothing here corresponds to.
    """
    ours, unknown = {}, []
    for name, tensor in theirs.items():
        entry = next(((weight, found) for weight in table if (found := match(weight.theirs, name))), None)
        if entry is None:
            unknown.append(name)
            continue
        weight, (layer, end) = entry
        parts = weight.operation.split(tensor, stack_of(config, weight))
        ours |= {our_name.replace("*", layer) + end: part for our_name, part in zip(weight.names, parts, strict=True)}
    if unknown:
        raise ValueError(f"Weights of the source that have no place here: {', '.join(unknown)}.")
    return ours


def to_theirs(table: list[Weight], ours: Tensors, config: TriptychConfig) -> Tensors:
    """Our weights under their names, and what their models keep that follows from the configuration.

    Raises:
        ValueError: there is one that nothing there corresponds to.
    """
    theirs = {f"{weight.theirs}.weight": weight.operation.join([], config) for weight in table if not weight.names}
    unknown = []
    for name in ours:
        entry = next(
            ((weight, found) for weight in table for our_name in weight.names if (found := match(our_name, name))), None
        )
        if entry is None:
            unknown.append(name)
            continue
        weight, (layer, end) = entry
        parts = [ours[our_name.replace("*", layer) + end] for our_name in weight.names]
        theirs[weight.theirs.replace("*", layer) + end] = weight.operation.join(parts, stack_of(config, weight))
    if unknown:
        raise ValueError(f"Weights that have no place in the other architecture: {', '.join(unknown)}.")
    return theirs


def own_weights(model: PreTrainedModel) -> Tensors:
    """The weights of a model, each once."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


def stack_of(config: TriptychConfig, rule: Weight) -> TriptychConfig:
    """The configuration of the stack that a weight belongs to."""
    if config.topology != "encoder_decoder" or not rule.names:
        return config
    return config.encoder if "encoder." in rule.names[0] else config.decoder


def build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Tensors,
    like: PreTrainedModel,
    **options,
) -> PreTrainedModel:
    """A model of these weights, in the dtype and on the device of another.

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
    refuse_loss(model_class.__name__, info)
    return model.to(like.device)


def refuse_loss(name: str, info: dict[str, Any], kinds: tuple[str, ...] = ("missing", "unexpected", "mismatched")):
    """Raises a ValueError that lists the weights which `from_pretrained` did not find, or did not take."""
    for kind in kinds:
        if keys := info[f"{kind}_keys"]:
            names = ", ".join(sorted(key if isinstance(key, str) else key[0] for key in keys))
            raise ValueError(f"{kind.capitalize()} weights of {name}: {names}.")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def load_source(source: str | Path) -> PreTrainedModel:
    """The model in a folder or repository, as transformers' own.

    Raises:
        ValueError: its architecture is not supported, or files are missing, pickled or broken.
    """
    name = str(source)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"'{name}' has no configuration that can be read: {str(error).splitlines()[0]}") from error
    class_name = (config.architectures or [AutoModel._model_mapping[type(config)].__name__])[0]
    find(config.model_type, class_name)
    check_files(Path(name))
    try:
        model, info = getattr(transformers, class_name).from_pretrained(
            name, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"'{name}' has no weights that can be read: {str(error).splitlines()[0]}") from error
    refuse_loss(f"'{name}' as {class_name}", info, ("missing", "mismatched"))
    if unexpected := sorted(info["unexpected_keys"]):
        logger.warning(f"'{name}' has weights that {class_name} does not, which stay behind: {', '.join(unexpected)}.")
    return model


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
