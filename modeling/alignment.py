"""Cross-attention as recurrent translators had it: additive scores, and windows around an aligned source token.

Shapes: B batch, T target tokens, S source tokens, H heads, D model width, d head width.

Three scores were in use, of a target's state h and a source's m:

| score          | formula             | from                 | here                                               |
|----------------|---------------------|----------------------|----------------------------------------------------|
| dot            | h . m               | Luong et al. 2015    | as the next, whose W can become the identity       |
| multiplicative | h W m               | Luong et al. 2015    | (W_q h) . (W_k m) of one head, `attention_scale` 1 |
| additive       | v . tanh(W h + U m) | Bahdanau et al. 2015 | `cross_attention_score` "additive", a v by head    |

A window of `cross_attention_window` tokens to each side of a place p_t hides all others of the source (Luong et al.
2015, section 3.2). The place is p_t = t ("monotonic", at most that of the last token), or S sigmoid(v . tanh(W h_t))
("predictive"), and then nearness to it counts, as a Gaussian whose deviation is half of `cross_attention_window`. The
paper multiplies weights by it; here it joins the scores before the softmax, so that weights still sum to one.

What is no dot product goes to the backend as a bias on the scores, so that any backend with biases computes it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .attention import TriptychAttention, for_each_query_head
from .configuration_triptych import TriptychDecoderConfig
from .projections import TriptychLinear
from .unpadding import Places, lay


@dataclass
class Alignment:
    """The backend's mask, and where tokens stand in their texts."""

    mask: Any
    targets: torch.Tensor  # [B or 1, T] places of target tokens
    sources: torch.Tensor  # [B or 1, S] places of source tokens
    lengths: torch.Tensor  # [B or 1, T or 1] source tokens that a target token may read


class TriptychAlignedAttention(TriptychAttention):
    """Cross-attention with the scores and windows at the head of this file."""

    def __init__(self, config: TriptychDecoderConfig, layer_idx: int):
        super().__init__(config, layer_idx, is_cross_attention=True)
        self.is_additive = config.cross_attention_score == "additive"
        self.window = config.cross_attention_window
        self.is_predictive = self.window is not None and config.cross_attention_alignment == "predictive"
        if self.is_additive:
            self.score_weight = nn.Parameter(torch.empty(config.num_attention_heads, self.head_dim))
        if self.is_predictive:
            self.place_proj = TriptychLinear(config.hidden_size, config.hidden_size, bias=False)
            self.place_score = TriptychLinear(config.hidden_size, 1, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, *, attention_mask: Any = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The arguments of `TriptychAttention`; with a window, `attention_mask` is an `Alignment`."""
        bias = None
        if self.window is not None:
            bias = self.window_bias(hidden_states, attention_mask, kwargs.get("rows"))
            attention_mask = attention_mask.mask
        return super().forward(hidden_states, encoder_hidden_states, bias, attention_mask=attention_mask, **kwargs)

    def window_bias(self, hidden_states: torch.Tensor, alignment: Alignment, rows: Places | None) -> torch.Tensor:
        """Log weights [B or 1, 1, T, S] of nearness to the aligned place, the lowest value beyond the window."""
        if self.is_predictive:
            share = lay(self.place_score(torch.tanh(self.place_proj(hidden_states))), rows)[..., 0]
            # In single precision at least, as half precision has no 300.5.
            places = share.to(torch.promote_types(share.dtype, torch.float32)).sigmoid() * alignment.lengths
        else:
            places = torch.minimum(alignment.targets, (alignment.lengths - 1).clamp(min=0))
        distance = alignment.sources[:, None] - places[..., None]
        bias = distance.square() / (-2 * (self.window / 2) ** 2) if self.is_predictive else torch.zeros_like(distance)
        bias = bias.to(hidden_states.dtype)
        return bias.masked_fill(distance.abs() > self.window, torch.finfo(bias.dtype).min)[:, None]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position_bias: torch.Tensor | None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores beside the window's bias, of queries [B, H, T, d] and keys [B, K, S, d]."""
        if self.is_additive:
            inner = torch.tanh(query[:, :, :, None] + for_each_query_head(key, query)[:, :, None])  # [B, H, T, S, d]
            scores = torch.einsum("bhtsd,hd->bhts", inner, self.score_weight)
            position_bias = scores if position_bias is None else scores + position_bias
            query = torch.zeros_like(query)
        shape = len(query), query.shape[1], query.shape[2], key.shape[2]
        return super().attend(query, key, value, position_bias.expand(shape), **kwargs)
