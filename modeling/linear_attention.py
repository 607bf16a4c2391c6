"""Linear attention: a state of fixed size in the place of all keys, at a cost that grows with the length alone.

Shapes: B batch, T tokens, H heads, D model width, d head width, f features of a key, n chunks of C tokens,
X channels of the convolution, k taps.

Katharopoulos et al. (2020) write the similarity of a query and a key as a product of features, phi(q) . phi(k), so that
a sum over keys is a product with one matrix, the state S [f, d]. What was added since is a choice each:

    S_t = a_t S_t-1 + b_t phi(k_t) (v_t - e a_t S_t-1^T phi(k_t))^T        o_t = S_t^T phi(q_t)

| field                | says                                                                                 |
|----------------------|--------------------------------------------------------------------------------------|
| `linear_feature_map` | phi: "elu" + 1 (2020, eq. 7), "hedgehog" (learnt, Zhang et al. 2024), "unit" length    |
| `linear_decay`       | a: "none" is 1, "fixed" by the head (Sun et al. 2023), "gated" by the token (Dao 2024) |
| `linear_update`      | "sum" is e = 0, b = 1, "delta" is e = 1, b by the token (Schlag et al. 2021)           |

The first two maps are positive, and their outputs divided by the sum of the weights, as a softmax divides; those of
"unit" are normalised by a norm of each head (Sun et al. 2023, section 2.3).

One function computes it in every form. Within chunks it works as attention does, from chunk to chunk it hands on the
state (Yang et al. 2024, section 2.3; for the delta rule by the WY form of Yang et al. 2025, section 3.3). A decoding
step is a chunk of one token. An encoder reads forwards and then backwards without the token itself; cross-attention
asks the state that the whole memory leaves.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache

from .attention import TriptychAttention
from .banded import has_inner_pads, move_to_end
from .configuration_triptych import TriptychStackConfig
from .norms import build_norm
from .projections import TriptychLinear
from .states import Text, TriptychStateLayer, state_layer
from .unpadding import Places, lay

CHUNK_SIZE = 64  # tokens; measured best on a CPU, of 32, 64 and 128, with heads of 64


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    strength: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    includes_itself: bool = True,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence at the head of this file, chunk by chunk, in single precision or better.

    Args:
        query, key: [B, H, T, f], after the feature map; a key of zeros is a token that is not there.
        value: [B, H, T, d].
        log_decay: [B, H, T], the logarithm of a, at most 0; None is no decay.
        strength: [B, H, T], b of the delta rule; None is the plain sum.
        state: [B, H, f, d] from the tokens before.
        documents: [B, T], numbers of packed texts; where they change, the state begins anew.
        includes_itself: whether a token's output has its own key and value.

    Returns:
        Outputs [B, H, T, d], in the dtype of `value`, and the state after the last token.
    """
    dtype = exact(value).dtype
    batch_size, heads, length, width = value.shape
    size = min(chunk_size or CHUNK_SIZE, length)

    def chunks(states: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """[B, H, T, ...] to [n, B, H, C, ...]; what fills the last chunk up leaves the state as it is."""
        padding = (0, 0) * (states.ndim - 3) + (0, -length % size)
        return F.pad(states, padding, value=value).unflatten(2, (-1, size)).movedim(2, 0)

    query, key, written = (chunks(states.to(dtype)) for states in (query, key, value))
    if state is None:
        state = query.new_zeros(batch_size, heads, key.shape[-1], width)
    log_decay = None if log_decay is None else chunks(log_decay.to(dtype))
    if documents is not None:
        documents = torch.cat((documents, documents[:, -1:].expand(-1, -length % size)), dim=1)
        documents = documents.unflatten(1, (-1, size)).movedim(1, 0)[:, :, None]  # [n, B, 1, C]
    between, at_token, to_end, over_chunk = what_is_left(query, log_decay, documents)
    with single_precision(value.device):
        reads = None
        if strength is not None:
            strength = chunks(strength.to(dtype))[..., None]  # [n, B, H, C, 1]
            written, reads = solve_delta_rule(key, written, strength, between, at_token)
        scores = (query @ key.mT) * between
        scores = scores if includes_itself else scores.tril(-1)
        query, key = query * at_token, (key * to_end).mT
        over_chunk = over_chunk.expand(query.shape[0], *over_chunk.shape[1:])
        outputs = []
        # Unbound, as the gradient of a single chunk taken by its index would be of the size of all.
        tables = [query, key, scores, written, over_chunk, *([] if reads is None else [reads])]
        for query, key, scores, written, over_chunk, *reads in zip(*(table.unbind() for table in tables), strict=True):
            new = written - reads[0] @ state if reads else written
            outputs.append(query @ state + scores @ new)
            state = over_chunk * state + key @ new
    return torch.cat(outputs, dim=2)[:, :, :length].to(value.dtype), state


def what_is_left(
    query: torch.Tensor, log_decay: torch.Tensor | None, documents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is left of a token's key at a later token of its chunk [n, B, H, C, C], of the state before the chunk at
    each token [..., C, 1], of each key at the chunk's end [..., C, 1], and of the state there [..., 1, 1].

    Args:
        query: [n, B, H, C, f].
        log_decay: [n, B, H, C].
        documents: [n, B, 1, C].
    """
    size = query.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    between = causal.to(query.dtype)
    at_token = to_end = over_chunk = query.new_ones(())
    if log_decay is not None:
        decay = log_decay.cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, -torch.inf).exp()
        at_token, to_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
        over_chunk = decay[..., -1:, None].exp()
    if documents is not None:
        before = torch.cat((documents[:1, ..., :1], documents[:-1, ..., -1:]))  # [n, B, 1, 1]
        between = between * (documents[..., :, None] == documents[..., None, :])
        at_token = at_token * (documents == before)[..., None]
        to_end = to_end * (documents == documents[..., -1:])[..., None]
        over_chunk = over_chunk * (documents[..., -1:] == before)[..., None]
    return between, at_token, to_end, over_chunk


def solve_delta_rule(
    key: torch.Tensor, written: torch.Tensor, strength: torch.Tensor, between: torch.Tensor, at_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token of a chunk writes if the state before it is empty [n, B, H, C, d], and what it takes of that
    state otherwise [n, B, H, C, f] (Yang et al. 2025, section 3.3)."""
    system = (strength * (key @ key.mT) * between).tril(-1)  # beside ones on its diagonal
    known = torch.cat((strength * written, strength * at_token * key), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    return solved.split((written.shape[-1], key.shape[-1]), dim=-1)


def single_precision(device: torch.device) -> AbstractContextManager:
    """Products as their factors are, also in automatic mixed precision; without that, a traced graph has none of it."""
    kind = device.type
    is_mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_mixed else nullcontext()


def exact(states: torch.Tensor) -> torch.Tensor:
    """In single precision at least: a state sums up thousands of tokens."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


class TriptychFeatureMap(nn.Module):
    """phi, from a head's query or key [B, H, T, d] to features [B, H, T, f] of which sums are taken."""

    def __init__(self, config: TriptychStackConfig, heads: int):
        super().__init__()
        self.kind = config.linear_feature_map
        if self.kind == "hedgehog":
            self.weight = nn.Parameter(torch.empty(heads, config.head_dim, config.head_dim))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.kind == "hedgehog":
            states = states @ self.weight
            return torch.cat((states.softmax(-1), (-states).softmax(-1)), dim=-1)
        states = exact(states)  # in half precision, nothing would be left of the sum of 1 and almost -1
        if self.kind == "elu":
            return F.elu(states) + 1
        return states * (states.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class TriptychShortConvolution(nn.Module):
    """A filter of k taps for each channel, over the tokens of one document: neighbours before there is a state."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))  # as nn.Conv1d has it

    def forward(
        self, states: torch.Tensor, text: Text, past: torch.Tensor | None, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Filtered `states` [B, T, X], and the last k - 1 tokens [B, k - 1, X] for the call that follows.

        A causal filter reads the token and those before it, `past` [B, k - 1, X] among them; another one both sides.
        """
        taps, length = self.weight.shape[-1], states.shape[1]
        before = taps - 1 if is_causal else taps // 2
        if past is None:
            past = states.new_zeros(states.shape[0], before, states.shape[2])
        states = torch.cat((past, states), dim=1)
        order, documents = None, text.documents
        if text.padding is not None:
            real = F.pad(text.padding, (before, 0), value=True)
            states = states * real[..., None]
            # Pads between tokens, or behind those that a later call follows, would part neighbours.
            if has_inner_pads(real) or not bool(real[:, -1].all()):
                order = move_to_end(real)
                states = take(states, order)
        if documents is not None:
            documents = F.pad(documents, (before, 0), value=-1)
            documents = documents if order is None else documents.gather(1, order)
            documents = F.pad(documents, (0, taps - 1 - before), value=-1)
        padded = F.pad(states, (0, 0, 0, taps - 1 - before))
        filtered = 0
        for tap in range(taps):
            part = padded[:, tap : tap + length]
            if documents is not None:
                part = part * (documents[:, tap : tap + length] == documents[:, before : before + length])[..., None]
            filtered = filtered + part * self.weight[:, 0, tap]
        if order is not None:
            filtered = F.pad(filtered, (0, 0, before, 0))
            filtered = take(filtered, order.argsort(dim=1))[:, before:]
        return filtered, states[:, states.shape[1] - taps + 1 :]


def take(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens of `states` [B, T, X] in the given order [B, T]."""
    return states.gather(1, order[..., None].expand_as(states))


class TriptychLinearAttention(TriptychAttention):
    """Attention whose softmax is replaced by the recurrence at the head of this file."""

    def __init__(self, config: TriptychStackConfig, layer_idx: int, is_cross_attention: bool = False):
        super().__init__(config, layer_idx, is_cross_attention)
        heads, memory_size = config.num_attention_heads, self.k_proj.in_features
        self.q_features = TriptychFeatureMap(config, heads)
        self.k_features = TriptychFeatureMap(config, config.num_key_value_heads)
        if config.linear_conv_kernel > 1 and not is_cross_attention:
            channels = sum(layer.out_features for layer in (self.q_proj, self.k_proj, self.v_proj))
            self.conv = TriptychShortConvolution(channels, config.linear_conv_kernel)
        if config.linear_update == "delta":
            self.strength_proj = TriptychLinear(memory_size, heads, bias=False)
        if config.linear_decay == "gated" and not is_cross_attention:
            self.decay_proj = TriptychLinear(memory_size, heads, bias=False)
            self.decay_rate = nn.Parameter(torch.empty(heads))
            self.decay_bias = nn.Parameter(torch.empty(heads))
        self.is_normalised = config.linear_feature_map != "unit"
        if not self.is_normalised:
            self.o_norm = build_norm(config, config.head_dim)
        if config.linear_output_gate:
            self.gate_proj = TriptychLinear(config.hidden_size, heads * config.head_dim, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        attention_mask: Text | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        is_causal: bool | None = None,
        rows: Places | None = None,
        encoder_rows: Places | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Attention output [B, T, D]; the arguments are those of `TriptychAttention`.

        `attention_mask` is the layout of the text, in cross-attention that of the memory. There is no `position_bias`,
        as there are no scores.
        """
        text = Text() if attention_mask is None else attention_mask
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        is_causal = self.is_causal if is_causal is None else is_causal
        if self.is_cross_attention:
            query = self.q_features(self.positioned(lay(self.q_proj(hidden_states), rows), "q_norm"))
            state = self.memory_state(encoder_hidden_states, text, cache, layer_idx, encoder_rows)
            with single_precision(state.device):
                output = exact(query) @ state
        else:
            layer = None if cache is None else state_layer(cache, layer_idx)
            output = self.read(hidden_states, text, position_embeddings, layer, is_causal, rows)
        if self.is_normalised:
            # Where nothing was read, both are zero.
            output = output[..., :-1] / output[..., -1:].clamp(min=1e-20)
        output = output.to(hidden_states.dtype).transpose(1, 2)  # [B, T, H, d]
        output = output if rows is None else rows.take(output)
        if not self.is_normalised:
            output = self.o_norm(output)
        output = output.flatten(-2)
        if self.config.linear_output_gate:
            output = output * F.silu(self.gate_proj(hidden_states))
        return self.o_proj(output), None

    def read(
        self,
        hidden_states: torch.Tensor,
        text: Text,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        layer: TriptychStateLayer | None,
        is_causal: bool,
        rows: Places | None,
    ) -> torch.Tensor:
        """What each token reads of its own text: [B, H, T, d], with the sum of weights as a last column if any."""
        projected = [lay(proj(hidden_states), rows) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        state, past = (None, None) if layer is None else layer.past()
        tail = None
        if hasattr(self, "conv"):
            joined = torch.cat(projected, dim=-1)
            filtered, tail = self.conv(joined, text, past, is_causal)
            projected = F.silu(filtered).split([states.shape[-1] for states in projected], dim=-1)
        query = self.q_features(self.positioned(projected[0], "q_norm", position_embeddings))
        inputs = query, *self.written(hidden_states, *projected[1:], text, position_embeddings, rows)
        output, new_state = linear_attention(*inputs, state, text.documents)
        if not is_causal:
            flipped = [None if states is None else states.flip(2) for states in inputs]
            documents = None if text.documents is None else text.documents.flip(1)
            backward, _ = linear_attention(*flipped, None, documents, includes_itself=False)
            output = output + backward.flip(2)
        if layer is not None:

            def replay(length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
                """State and tail after the first `length` of these tokens."""
                if not length:
                    return state, past
                kept = [None if states is None else states[:, :, :length] for states in inputs]
                shorter = (
                    None if tail is None else self.conv(joined[:, :length], text.first(length), past, is_causal)[1]
                )
                return linear_attention(*kept, state)[1], shorter

            layer.advance(new_state, tail, hidden_states.shape[1], replay)
        return output

    def written(
        self,
        memory: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text: Text,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: Places | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What the tokens of `memory` [B, T, D] add to a state: keys [B, H, T, f], values, log decays and strengths.

        `key` and `value` are its projections. A pad adds nothing and lets nothing decay.
        """
        key = self.k_features(self.positioned(key, "k_norm", position_embeddings))
        value = self.heads(value)
        key, value = (states.repeat_interleave(self.num_key_value_groups, dim=1) for states in (key, value))
        value = exact(value)
        if self.is_normalised:
            value = F.pad(value, (0, 1), value=1.0)
        log_decay = strength = None
        if not self.is_cross_attention:
            log_decay = self.log_decay(memory, rows)
        if hasattr(self, "strength_proj"):
            strength = lay(exact(self.strength_proj(memory)).sigmoid(), rows).transpose(1, 2)
        if text.padding is not None:
            real = text.padding[:, None]
            key = key * real[..., None]
            log_decay, strength = (None if states is None else states * real for states in (log_decay, strength))
        return key, value, log_decay, strength

    def log_decay(self, hidden_states: torch.Tensor, rows: Places | None) -> torch.Tensor | None:
        """log a [B, H, T]: by the token, -rate softplus(W x + bias); or a = 1 - 2^(-5 - h) of head h."""
        kind = self.config.linear_decay
        if kind == "none":
            return None
        if kind == "gated":
            # Contiguous, as torch 2.13 traces the gradient of softplus with the strides of another layout.
            gate = lay(exact(self.decay_proj(hidden_states)) + exact(self.decay_bias), rows)
            gate = gate.transpose(1, 2).contiguous()
            return -exact(self.decay_rate).exp()[:, None] * F.softplus(gate)
        heads = torch.arange(self.config.num_attention_heads, device=hidden_states.device)
        decay = torch.log1p(-(2.0 ** (-5.0 - heads)))
        batch_size, length = hidden_states.shape[:2] if rows is None else rows.shape
        return decay[None, :, None].expand(batch_size, -1, length)

    def memory_state(
        self,
        memory: torch.Tensor,
        text: Text,
        cache: EncoderDecoderCache | None,
        layer_idx: int,
        rows: Places | None,
    ) -> torch.Tensor:
        """The state [B, H, f, d] that the encoder's tokens leave, which stays the same for the whole generation."""
        if cache is not None and cache.is_updated.get(layer_idx):
            return cache.cross_attention_cache.layers[layer_idx].keys
        key, value = lay(self.k_proj(memory), rows), lay(self.v_proj(memory), rows)
        written = self.written(memory, key, value, text, rows=rows)
        _, state = linear_attention(written[0], *written)
        if cache is not None:
            cache.cross_attention_cache.update(state, state[..., :0], layer_idx)
            cache.is_updated[layer_idx] = True
        return state
