"""What layers share that keep a state in the place of all keys: how a text lies, and the state's place in a cache.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from .configuration_triptych import STATE_LAYER_TYPE


@dataclass
class Text:
    """What such a layer must know of the T tokens of a forward, in place of a mask.

    `None` means the plain case: no padding, one document.
    """

    padding: torch.Tensor | None = None  # [B, T] True on real tokens
    documents: torch.Tensor | None = None  # [B, T]

    def first(self, length: int) -> "Text":
        """The first `length` tokens."""
        return Text(*(None if table is None else table[:, :length] for table in (self.padding, self.documents)))


class TriptychStateLayer(DynamicLayer):
    """The cache of a layer that keeps a state: two tensors [B, ...], which each kind of layer chooses.

    They lie where other layers have keys and values, so that beams and devices are seen to by the base class. A state
    cannot be taken back; where the past is recorded, `crop` makes it anew from that before the last call.
    """

    _layer_type = STATE_LAYER_TYPE
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.length = 0
        self.record_past = False
        self.replay = None

    def past(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both parts of the state that earlier calls left."""
        return (self.keys, self.values) if self.length else (None, None)

    def advance(self, state: torch.Tensor, rest: torch.Tensor | None, length: int, replay: Callable):
        """Takes in what a call of `length` tokens leaves, and how to make what fewer of them would have left."""
        self.set(state, rest)
        self.length += length
        self.replay = (length, replay) if self.record_past else None

    def set(self, state: torch.Tensor | None, rest: torch.Tensor | None):
        self.is_initialized = state is not None
        self.keys, self.values = state, state[..., :0] if self.is_initialized and rest is None else rest

    def get_seq_length(self) -> int:
        return self.length

    def activate_past_recording(self):
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens, all of the last call.

        Raises:
            ValueError: they are more than the last call brought, or that was not recorded.
        """
        removed = abs(tokens_to_remove)
        if not removed or not self.length:
            return
        length, replay = self.replay or (0, None)
        if removed > length:
            raise ValueError(
                f"{removed} tokens are to be forgotten, but a state can forget those of the last call only, which are "
                f"{length}; call `activate_past_recording` before it."
            )
        self.length -= removed
        self.replay = None
        self.set(*replay(length - removed))

    def reset(self) -> None:
        super().reset()
        self.length, self.replay = 0, None


STATIC_LAYER_TYPE_MAPPING[TriptychStateLayer._layer_type] = TriptychStateLayer  # its size is fixed as it is


def state_layer(cache: Cache, layer_idx: int) -> TriptychStateLayer:
    """The place of one layer's state in a cache."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not isinstance(layer, TriptychStateLayer):
        raise ValueError(
            f"`cache` has {layer} in the place of layer {layer_idx}, which keeps a state; make the cache with this "
            "model's configuration, as in `DynamicCache(config=model.config)`."
        )
    return layer
