"""Recurrent layers, which attention replaced: the same family, with an LSTM or a GRU in the place of self-attention.

Shapes: B batch, T tokens, N real tokens of all texts, D model width.

A recurrence reads token by token, and all that it knows of those before is its last output h_t-1 [D]:

| `layer_types` | h_t                                       | of gates                                          |
|---------------|-------------------------------------------|---------------------------------------------------|
| "lstm"        | o tanh(c_t), where c_t = f c_t-1 + i g    | i, f, o and g = s(W x_t + U h_t-1 + b)            |
| "gru"         | (1 - z) n + z h_t-1                       | r, z likewise, n = tanh(W x_t + r (U h_t-1 + b))  |

Products are by element, s is the sigmoid, or for g the tanh, and each gate has a W, U and b of its own. So Gers et al.
(2000) have the LSTM, and Cho et al. (2014) the GRU, but for r, which they put before U.

A decoder's reads left to right, and (h, c) is its cache. An encoder's reads both ways, by two recurrences of half the
width whose outputs lie side by side (Bahdanau et al. 2015, section 3.2). torch's own kernels compute it, each text by
itself.

In a layer, what cross-attention reads is asked for by h_t (Luong et al. 2015). In the first paper h_t-1 asks, and what
it reads is an input of h_t; there, as with "input feeding", target tokens cannot be trained on all at once.
A decoder starts from zeros: it knows of the source by attention alone.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from transformers.cache_utils import Cache

from .configuration_triptych import TriptychStackConfig
from .states import Text, state_layer
from .unpadding import Places, find_places, find_rows

State = tuple[torch.Tensor, torch.Tensor]  # h [B, D] and c [B, D], or [B, 0] in a GRU


class TriptychRecurrence(nn.Module):
    """An LSTM or a GRU, called as `TriptychAttention` is."""

    def __init__(self, config: TriptychStackConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.is_lstm = config.layer_types[layer_idx] == "lstm"
        directions = 2 if config.topology == "encoder" else 1
        kind = nn.LSTM if self.is_lstm else nn.GRU
        width = config.hidden_size // directions
        self.rnn = kind(config.hidden_size, width, batch_first=True, bidirectional=directions == 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Text | None = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        is_causal: bool | None = None,
        rows: Places | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Outputs [B, T, D]; zeros at pads.

        Args:
            hidden_states: [B, T, D].
            attention_mask: the layout of the text.
            layer_idx: this call's place in the cache, if layers are shared.
            is_causal: must be as the topology has it.
            rows: where the tokens of `hidden_states` stand in rows [B, T], if it is a stream [1, N, D] without pads.

        Raises:
            ValueError: `is_causal` is given and says otherwise.
        """
        if is_causal is not None and is_causal == self.rnn.bidirectional:
            direction = "both ways" if self.rnn.bidirectional else "left to right"
            raise ValueError(f"`is_causal` is {is_causal}, but a recurrent layer of this stack reads {direction}.")
        text = Text() if attention_mask is None else attention_mask
        if cache is None:
            return self.read(hidden_states, text, None, rows)[0], None

        layer = state_layer(cache, self.layer_idx if layer_idx is None else layer_idx)
        state = layer.past()
        if state[0] is None:
            state = self.start(hidden_states)
        output, new_state = self.read(hidden_states, text, state, rows)

        def replay(length: int) -> State:
            """The state after the first `length` of these tokens."""
            return self.read(hidden_states[:, :length], text.first(length), state, rows)[1] if length else state

        layer.advance(*new_state, hidden_states.shape[1], replay)
        return output, None

    def start(self, hidden_states: torch.Tensor) -> State:
        """What a text begins with."""
        zeros = hidden_states.new_zeros(len(hidden_states), self.rnn.hidden_size)
        return zeros, zeros if self.is_lstm else zeros[:, :0]

    def read(
        self, hidden_states: torch.Tensor, text: Text, state: State | None, rows: Places | None
    ) -> tuple[torch.Tensor, State | None]:
        """Outputs [B, T, D], or the stream of them, and the state after the last token, if one is given."""
        if rows is None and text.padding is None and text.documents is None:
            return self.run(hidden_states, state)
        places, stream = rows, hidden_states
        if rows is None:
            real = torch.ones_like(text.documents, dtype=torch.bool) if text.padding is None else text.padding
            places = find_places(real)
            if not len(places.index):
                return torch.zeros_like(hidden_states), state
            stream = places.take(hidden_states)
        each, number = find_rows(places, text.documents)
        lengths = number[0].bincount(minlength=each.shape[0])
        # A text without a token here is given one, as packed sequences ask for it, and keeps its state.
        packed = pack_padded_sequence(each.put(stream), lengths.clamp(min=1).cpu(), True, enforce_sorted=False)
        # Packed documents fill a cache at once, so that no state goes in, and none that comes out is asked for.
        output, new_state = self.run(packed, state if text.documents is None else None)
        stream = each.take(pad_packed_sequence(output, batch_first=True, total_length=each.shape[1])[0])
        if state is not None and text.documents is None:
            is_longer = (lengths > 0)[:, None]
            state = tuple(torch.where(is_longer, new, old) for new, old in zip(new_state, state, strict=True))
        return stream if rows is not None else places.put(stream), state

    def run(
        self, inputs: torch.Tensor | PackedSequence, state: State | None
    ) -> tuple[torch.Tensor | PackedSequence, State]:
        """torch's recurrence over whole texts, from `state` or from zeros.

        On a CPU it stays in the precision of its weights: for a narrower one, torch takes a kernel that not all have.
        """
        weight, exactly = self.rnn.weight_hh_l0, nullcontext()
        if weight.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            exactly = torch.autocast("cpu", enabled=False)
            inputs = inputs.to(weight.dtype)
            state = None if state is None else tuple(part.to(weight.dtype) for part in state)
        if state is not None:
            h, c = (part[None] for part in state)
            state = (h, c) if self.is_lstm else h
        with exactly:
            output, state = self.rnn(inputs, state)
        h, c = state if self.is_lstm else (state, state[..., :0])
        return output, (h[-1], c[-1])


def first_weights(name: str, parameter: torch.Tensor, std: float | None, is_lstm: bool) -> torch.Tensor:
    """Initial values of a recurrence's parameter, named as torch names it; the gates lie one below the other."""
    values = torch.zeros_like(parameter)
    gates = values.chunk(4 if is_lstm else 3)
    if name.startswith("bias_ih") and is_lstm:
        gates[1].fill_(1.0)
    elif name.startswith("weight"):
        for gate in gates:
            if std is not None:
                nn.init.normal_(gate, std=std)
            elif name.startswith("weight_hh"):
                nn.init.orthogonal_(gate)
            else:
                nn.init.xavier_uniform_(gate)
    return values
