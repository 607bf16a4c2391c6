"""Configurations there and back: what one side says and the other cannot is refused by name."""

import dataclasses
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration_triptych import TOPOLOGIES, TriptychConfig
from .tables import Architecture, Head

logger = logging.get_logger(__name__)

# Fields that say nothing of the function: names of labels and tokens are carried over by themselves.
CARRIED = ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "problem_type")
TRAINING_ONLY = ("hidden_dropout", "attention_dropout", "activation_dropout", "classifier_dropout", "initializer_range")


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
    labels = {name: getattr(source, name) for name in ("id2label", "label2id")}
    return fields | {name: dict(mapping) for name, mapping in labels.items() if mapping is not None}


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
