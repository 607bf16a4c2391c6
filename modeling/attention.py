"""Multi-head scaled dot-product attention: self, masked and cross, over any backend.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D model width, d head width.

A backend is a name in transformers' two registries: a function `(module, query [B, H, T, d], key [B, K, S, d],
value [B, K, S, d], attention_mask, dropout, scaling, position_bias, ...) -> (output [B, T, H, d], weights or None)`
and the mask function that builds its mask. `TriptychAttention` looks the name up at every call and never asks which one
it is; a new kernel plugs in by registering both.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations.flex_attention import flex_attention_forward as transformers_flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward as transformers_sdpa_attention
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_torchdynamo_compiling

from .blockwise import blockwise_attention
from .caches import update
from .configuration_triptych import TriptychStackConfig
from .dropout import apply_dropout
from .norms import build_norm
from .positions import apply_rotary
from .projections import TriptychLinear
from .tracing import is_tracing
from .unpadding import Places, lay


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T / sqrt(d) + bias) V (Vaswani et al. 2017, equation 1), the plain form every backend must equal.

    `attention_mask` [B, 1, T, S] is additive, or boolean with True where a key is visible; `position_bias`
    [B, H, T, S] is additive.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = (for_each_query_head(states, query) for states in (key, value))
    # Half precision would overflow when a bias meets the lowest value, which stands for "invisible".
    scores = (query * scaling @ key.transpose(-2, -1)).to(torch.promote_types(query.dtype, torch.float32))
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        is_boolean = attention_mask.dtype == torch.bool
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~attention_mask, lowest) if is_boolean else scores + attention_mask
    weights = scores.softmax(dim=-1).to(query.dtype)
    weights = apply_dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def for_each_query_head(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values [B, K, S, d], each repeated for the group of query heads that it serves: [B, H, S, d]."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def goes_by_blocks(query: torch.Tensor, dropout: float) -> bool:
    """Whether torch's sdpa has no kernel but the plain form, or one that is slower than blocks."""
    if query.device.type != "cpu" or is_tracing(query):
        return False
    return dropout > 0 or (query.dtype.itemsize == 2 and query.requires_grad and torch.is_grad_enabled())


def sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, where torch has a fast kernel for it; else in blocks."""
    if not goes_by_blocks(query, dropout):
        options = dict(is_causal=is_causal, position_bias=position_bias, **kwargs)
        return transformers_sdpa_attention(module, query, key, value, attention_mask, dropout, scaling, **options)
    key, value = (for_each_query_head(states, query) for states in (key, value))
    is_causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1
    output = blockwise_attention(query, key, value, attention_mask, position_bias, dropout, scaling, is_causal)
    return output.transpose(1, 2).contiguous(), None


def flex_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' flex attention, within what torch can do on a CPU: no gradients, and kernels for fixed sizes.

    Raises:
        ValueError: gradients are asked for on a CPU.
    """
    if query.device.type != "cpu" or is_torchdynamo_compiling():
        return transformers_flex_attention(module, query, key, value, *args, **kwargs)
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        raise ValueError(
            "`attn_implementation` is 'flex_attention', which has no gradients on a CPU; use sdpa to train there, or "
            "torch.no_grad() to run only."
        )
    # torch 2.13 writes C++ that does not compile once it takes the sizes of masks and biases for variable.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        return transformers_flex_attention(module, query, key, value, *args, **kwargs)


# transformers' registry, whatever anyone adds to it, with this file's own form of two entries.
ALL_ATTENTION_FUNCTIONS = AttentionInterface()
ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
ALL_ATTENTION_FUNCTIONS["flex_attention"] = flex_attention_forward


class TriptychAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W_O, head_i = Attention(Q W_Q, K W_K, V W_V).

    Vaswani et al. 2017, section 3.2.2; with fewer key/value heads, each serves a group of query heads (Ainslie et al.
    2023). As cross-attention it takes keys and values from the encoder and projects them once per sequence.
    """

    def __init__(self, config: TriptychStackConfig, layer_idx: int, is_cross_attention: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_cross_attention = is_cross_attention
        self.is_causal = config.topology == "decoder" and not is_cross_attention
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.attention_dropout = config.attention_dropout
        layer_type = config.layer_types[layer_idx]
        # Kernels that take a window instead of a mask count it one-sided: the token itself and those before it.
        self.sliding_window = None
        if layer_type == "sliding_attention" and not is_cross_attention:
            self.sliding_window = config.sliding_window if self.is_causal else config.sliding_window // 2 + 1

        memory_size = config.cross_attention_hidden_size if is_cross_attention else config.hidden_size
        query_size, key_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        biases = config.biased_projections()
        self.q_proj = TriptychLinear(config.hidden_size, query_size, bias="q" in biases)
        self.k_proj = TriptychLinear(memory_size, key_size, bias="k" in biases)
        self.v_proj = TriptychLinear(memory_size, key_size, bias="v" in biases)
        self.o_proj = TriptychLinear(query_size, config.hidden_size, bias="o" in biases)
        # Reading a configuration takes longer than some of the products of a small model.
        self.has_qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = build_norm(config, self.head_dim)
            self.k_norm = build_norm(config, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        is_causal: bool | None = None,
        rows: Places | None = None,
        encoder_rows: Places | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output [B, T, D], and weights [B, H, T, S] where the backend computes them.

        Args:
            hidden_states: [B, T, D], what asks.
            encoder_hidden_states: [B, S, D'], what answers, in cross-attention.
            position_bias: [B, H, T, S], added to the scores.
            attention_mask: the backend's own form, see `masks.py`.
            position_embeddings: cosines and sines [B, T, r] of rotary positions.
            layer_idx: this call's place in the cache, if layers are shared.
            is_causal: whether a kernel given no mask must hide later tokens.
            rows, encoder_rows: where the tokens of `hidden_states` and of `encoder_hidden_states` stand in the rows
                [B, T] and [B, S] that attend, if these are streams [1, N, D] without pads.
        """
        query = self.positioned(lay(self.q_proj(hidden_states), rows), "q_norm", position_embeddings)
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        if self.is_cross_attention:
            key, value = self.cross_key_value(encoder_hidden_states, cache, layer_idx, encoder_rows)
        else:
            key, value = self.key_value(hidden_states, position_embeddings, rows)
            if cache is not None:
                key, value = update(cache, key, value, layer_idx, **kwargs)

        is_causal = self.is_causal if is_causal is None else is_causal
        output, weights = self.attend(
            query, key, value, position_bias, attention_mask=attention_mask, is_causal=is_causal, **kwargs
        )
        output = output.flatten(-2)
        return self.o_proj(output if rows is None else rows.take(output)), weights

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position_bias: torch.Tensor | None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the backend reads: [B, T, H, d], and weights [B, H, T, S] where it computes them."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attention(
            self,
            query,
            key,
            value,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_bias=position_bias,
            **kwargs,
        )

    def heads(self, states: torch.Tensor) -> torch.Tensor:
        """[B, T, heads * d] to [B, heads, T, d]; a tensor-parallel rank holds only its own heads."""
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def positioned(
        self, projected: torch.Tensor, norm: str, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Projected queries or keys [B, T, heads * d] by head, normalised and rotated if so: [B, heads, T, d]."""
        states = self.heads(projected)
        if self.has_qk_norm:
            states = getattr(self, norm)(states)
        if position_embeddings is not None:
            states = apply_rotary(states, *position_embeddings)
        return states.to(projected.dtype)  # under autocast, norms and angles are in single precision

    def key_value(
        self,
        memory: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: Places | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, K, S, d] of `memory` [B, S, D]."""
        key = self.positioned(lay(self.k_proj(memory), rows), "k_norm", position_embeddings)
        return key, self.heads(lay(self.v_proj(memory), rows))

    def cross_key_value(
        self,
        encoder_hidden_states: torch.Tensor,
        cache: EncoderDecoderCache | None,
        layer_idx: int,
        rows: Places | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the encoder, which stay the same for the whole generation."""
        if cache is None:
            return self.key_value(encoder_hidden_states, rows=rows)
        if cache.is_updated.get(layer_idx):
            layer = cache.cross_attention_cache.layers[layer_idx]
            return layer.keys, layer.values
        key, value = cache.cross_attention_cache.update(*self.key_value(encoder_hidden_states), layer_idx)
        cache.is_updated[layer_idx] = True
        return key, value
