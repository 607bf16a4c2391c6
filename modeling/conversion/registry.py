"""Which architectures are known, and what stands in the way of others."""

from .decoders import DECODERS
from .encoder_decoders import ENCODER_DECODERS
from .encoders import ENCODERS
from .tables import Architecture, Head

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


def heads_of(model_type: str) -> dict[str, tuple[Architecture, Head]]:
    """All classes of an architecture that are known, with their entries.

    Raises:
        ValueError: there are none; with the reason where it is a well-known architecture.
    """
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
