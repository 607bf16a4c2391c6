"""One layer, for every panel: attention or a recurrence, cross-attention where there is an encoder, feed-forward.

Shapes: B batch, T tokens, S encoder tokens, D hidden_size.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from .alignment import TriptychAlignedAttention
from .attention import TriptychAttention
from .configuration_triptych import RECURRENT_TYPES, TriptychStackConfig
from .dropout import TriptychDropout
from .linear_attention import TriptychLinearAttention
from .norms import build_norm
from .projections import TriptychLinear
from .recurrence import TriptychRecurrence
from .unpadding import Places


def activation(name: str) -> nn.Module:
    """transformers' activation; of two that are one function, the one that computes it in one pass."""
    return ACT2FN["gelu_pytorch_tanh" if name == "gelu_new" else name]


class TriptychMLP(nn.Module):
    """FFN(x) = W_down act(W_up x) (Vaswani et al. 2017, equation 2), or gated: W_down (act(W_gate x) * W_up x)."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__()
        self.is_gated = config.mlp_type == "gated"
        if self.is_gated:
            self.gate_proj = TriptychLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = TriptychLinear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = TriptychLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = activation(config.hidden_act)
        self.dropout = TriptychDropout(config.activation_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D], each token by itself."""
        up = self.up_proj(hidden_states)
        inner = self.act(self.gate_proj(hidden_states)) * up if self.is_gated else self.act(up)
        return self.down_proj(self.dropout(inner) if self.training else inner)


def residual_gain(config: TriptychStackConfig, projection: str) -> float:
    """Factor on the first weights of a projection, which keeps the residual stream of a deep stack in bounds.

    If norms come first, what writes into the stream shrinks by `(2 * layers) ** -0.5` (Radford et al. 2019, section
    2.3). In a post-norm stack with DeepNorm's alpha as `residual_scale`, values, outputs and feed-forward layers shrink
    by its beta = 1 / (sqrt(2) * alpha) (Wang et al. 2022, table 1).
    """
    if config.norm_position == "none":
        return 1.0
    if config.norm_position != "post":
        return (2 * config.num_hidden_layers) ** -0.5 if projection in ("o_proj", "down_proj") else 1.0
    if config.residual_scale != 1 and projection not in ("q_proj", "k_proj"):
        return (2**0.5 * config.residual_scale) ** -1
    return 1.0


class TriptychLayer(GradientCheckpointingLayer):
    """Sublayers joined to the residual stream; s is `residual_scale`.

    ```
        post               pre                sandwich           none
          x                  x                   x                  x
          |---.              |---.               |---.              |---.
          |   f              |   norm            |   norm           |   f
          |   |              |   f               |   f              |   |
          | s |              |   | s             |   norm           |   | s
          '-+-'              '-+-'               '-+-' s            '-+-'
          norm                 |                   |                  |
    ```
    """

    def __init__(self, config: TriptychStackConfig, layer_idx: int):
        super().__init__()
        self.norm_position = config.norm_position
        self.parallel_residual = config.parallel_residual
        self.residual_scale = config.residual_scale
        self.residual = config.residual
        layer_type = config.layer_types[layer_idx]
        if layer_type in RECURRENT_TYPES:
            self.recurrence = TriptychRecurrence(config, layer_idx)
        else:
            is_linear = layer_type == "linear_attention"
            self.self_attn = (TriptychLinearAttention if is_linear else TriptychAttention)(config, layer_idx)
        if getattr(config, "add_cross_attention", False) and config.reads_encoder(layer_idx):
            if config.is_aligned:
                self.cross_attn = TriptychAlignedAttention(config, layer_idx)
            else:
                cross_class = TriptychLinearAttention if config.linear_cross_attention else TriptychAttention
                self.cross_attn = cross_class(config, layer_idx, is_cross_attention=True)
        if config.mlp_type != "none":
            self.mlp = TriptychMLP(config)
        self.sublayers = [name for name, _ in self.named_children()]  # in the order of their calls
        self.dropout = TriptychDropout(config.hidden_dropout)
        for sublayer in self.sublayers:
            is_first = sublayer == self.sublayers[0] and layer_idx == 0
            has_norm = config.norm_position != "none" and not (config.skip_first_norm and is_first)
            setattr(self, f"{sublayer}_norm", build_norm(config, config.hidden_size) if has_norm else nn.Identity())
            if config.norm_position == "sandwich":
                setattr(self, f"{sublayer}_post_norm", build_norm(config, config.hidden_size))
        if not config.residual and "cross_attn" in self.sublayers:
            self.join_proj = TriptychLinear(2 * config.hidden_size, config.hidden_size, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                module.init_gain = residual_gain(config, name.rpartition(".")[-1])

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1 else self.residual_scale * x

    def dropped(self, output: torch.Tensor) -> torch.Tensor:
        return self.dropout(output) if self.training else output  # a call of a module takes its time, too

    def join(self, sublayer: str, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`x` after sublayer `f`, as the drawing has it."""
        if not self.residual:
            output = f(x)
            if sublayer == "cross_attn":
                output = torch.tanh(self.join_proj(torch.cat((output, x), dim=-1)))
            return self.dropped(output)
        if self.norm_position == "post":
            return getattr(self, f"{sublayer}_norm")(self.scaled(x) + self.dropped(f(x)))
        return x + self.branch(sublayer, x, f)

    def branch(self, sublayer: str, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What a sublayer adds to the stream, where it is not the sum that is normalised."""
        output = f(getattr(self, f"{sublayer}_norm")(x))
        if self.norm_position == "sandwich":
            output = getattr(self, f"{sublayer}_post_norm")(output)
        return self.scaled(self.dropped(output))

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        layer_idx: int | None = None,
        is_causal: bool | None = None,
        rows: Places | None = None,
        cross_rows: Places | None = None,
        encoder_rows: Places | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """[B, T, D] to [B, T, D]; see `TriptychAttention` for the arguments. What needs a gradient comes by position,
        as gradient checkpointing wants it."""
        is_pair = isinstance(cache, EncoderDecoderCache)
        mix = getattr(self, self.sublayers[0])

        def mixed(x: torch.Tensor) -> torch.Tensor:
            output, _ = mix(
                x,
                position_bias=position_bias,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                cache=cache.self_attention_cache if is_pair else cache,
                layer_idx=layer_idx,
                is_causal=is_causal,
                rows=rows,
                **kwargs,
            )
            return output

        def cross_attention(x: torch.Tensor) -> torch.Tensor:
            output, _ = self.cross_attn(
                x,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                cache=cache if is_pair else None,
                layer_idx=layer_idx,
                rows=cross_rows,
                encoder_rows=encoder_rows,
            )
            return output

        calls = {self.sublayers[0]: mixed, "cross_attn": cross_attention, "mlp": getattr(self, "mlp", None)}
        if self.parallel_residual:
            return hidden_states + sum(self.branch(name, hidden_states, calls[name]) for name in self.sublayers)
        for name in self.sublayers:
            hidden_states = self.join(name, hidden_states, calls[name])
        return hidden_states
