"""Where a token stands: the six ways the literature tells a Transformer about order.

Shapes: B batch, T queries, S keys, H heads, A axes, D model width, d head width.

| type       | enters at                | source                                            |
|------------|--------------------------|---------------------------------------------------|
| sinusoidal | token embedding          | Vaswani et al. 2017, section 3.5                  |
| learned    | token embedding          | Gehring et al. 2017; a plain table in `layers.py` |
| rotary     | queries and keys         | Su et al. 2021, equation 34                       |
| relative   | attention scores         | Raffel et al. 2020, section 2.1                   |
| alibi      | attention scores         | Press et al. 2022, section 3                      |
| none       | -                        | Haviv et al. 2022                                 |

A token of a text has one number, and a patch of an image or a video one for each axis. Sinusoids and rotations then
give every axis a share of the dimensions: columns first, then rows, then layers of time. A learned table has a row for
each patch. Biases count tokens, as they do in texts.
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_triptych import TriptychStackConfig


def sinusoidal_embedding(position_ids: torch.Tensor, size: int, layout: str = "interleaved") -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / size)), PE(pos, 2i + 1) = cos of the same, at any position.

    Args:
        position_ids: [B, T] integers.
        size: even width of the encoding.
        layout: "interleaved" as above, or all sines before all cosines, "concatenated".

    Returns:
        [B, T, size] in float32.
    """
    # The angle of a late position has many turns, which single precision would take the place of its digits.
    precision = torch.float32 if position_ids.device.type == "mps" else torch.float64
    exponents = torch.arange(0, size, 2, device=position_ids.device, dtype=precision) / size
    angles = position_ids[..., None] / 10000.0**exponents  # [B, T, size / 2]
    waves = angles.sin().float(), angles.cos().float()
    return torch.stack(waves, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(waves, dim=-1)


def grid_coordinates(position_ids: torch.Tensor, grid: tuple[int, ...] = (), leading: int = 0) -> torch.Tensor:
    """Column, row and so on of each token in a grid that is read row by row: [B, T, A], of `position_ids` [B, T].

    Args:
        grid: tokens along each axis, columns last; of no axes or one, tokens are counted.
        leading: so many tokens stand before the grid, and have the coordinates of its first.
    """
    index = (position_ids - leading).clamp(min=0) if leading else position_ids
    if len(grid) < 2:
        return index[..., None]
    coordinates = []
    for size in reversed(grid[1:]):
        coordinates.append(index % size)
        index = index.div(size, rounding_mode="floor")
    return torch.stack((*coordinates, index), dim=-1)


def axis_shares(size: int, axes: int) -> list[int]:
    """How many of `size` dimensions tell each axis, all in pairs: as many for each, and what is left for the last."""
    share = size // (2 * axes) * 2
    return [share] * (axes - 1) + [size - share * (axes - 1)]


def axial_embedding(coordinates: torch.Tensor, size: int, layout: str) -> torch.Tensor:
    """Sinusoids of every axis, [B, T, size] of `coordinates` [B, T, A] (He et al. 2022, arXiv 2111.06377)."""
    along = zip(coordinates.unbind(-1), axis_shares(size, coordinates.shape[-1]), strict=True)
    return torch.cat([sinusoidal_embedding(axis, share, layout) for axis, share in along], dim=-1)


def resize_positions(table: torch.Tensor, grid: tuple[int, ...], new_grid: tuple[int, ...]) -> torch.Tensor:
    """A learned table [leading + N, E] of a grid of N tokens for another grid (Dosovitskiy et al. 2021, section 3.2).

    Bicubic over rows and columns, linear over time; rows of the table before those of the grid stay.
    """
    count = math.prod(grid)
    leading, patches = table[:-count], table[-count:]
    *time, rows, columns = new_grid
    planes = patches.view(-1, *grid[-2:], table.shape[-1]).permute(0, 3, 1, 2)  # [frames, E, rows, columns]
    planes = F.interpolate(planes, size=(rows, columns), mode="bicubic", align_corners=False)
    if time and time[0] != len(planes):
        over_time = planes.flatten(1).t()[None]  # [1, E * rows * columns, frames]
        over_time = F.interpolate(over_time, size=time[0], mode="linear", align_corners=False)
        planes = over_time[0].t().view(-1, *planes.shape[1:])
    return torch.cat((leading, planes.permute(0, 2, 3, 1).flatten(0, 2)))


class TriptychRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotation angles, with any of transformers' rope types.

    `partial_rotary_factor` below one rotates only the first dimensions of each head. The types "dynamic" and "longrope"
    choose their frequencies by the longest text of a batch, so that with them texts do depend on their batch. Of
    several axes, each has its own share of the rotated dimensions (Heo et al. 2024, arXiv 2403.13298, section 3.2).
    """

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: TriptychStackConfig, rope_parameters: dict | None = None):
        super().__init__()
        # transformers' rope functions read flat settings from a configuration.
        self.config = copy.copy(config)
        self.config.rope_parameters = rope_parameters or config.rope_parameters
        self.rope_type = self.config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        initialise = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = initialise(self.config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        """theta_i = rope_theta^(-2i / r) over the r rotated dimensions, or each axis's share of them: [r / 2], and no
        scaling of the result."""
        rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        shares = axis_shares(rotated, config.position_axes)
        exponents = [torch.arange(0, share, 2, dtype=torch.float32, device=device) / share for share in shares]
        return 1.0 / config.rope_parameters["rope_theta"] ** torch.cat(exponents), 1.0

    def _apply(self, fn, recurse: bool = True):
        """A cast of the model moves the frequencies but does not round them."""
        exact = self.inv_freq, self.original_inv_freq
        super()._apply(fn, recurse)
        for name, buffer in zip(("inv_freq", "original_inv_freq"), exact, strict=True):
            if not buffer.is_meta:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, T, r] of `position_ids` [B, T], or of coordinates [B, T, A], in the dtype of
        `hidden_states`."""
        coordinates = position_ids.reshape(*position_ids.shape[:2], -1).float()
        shares = [share // 2 for share in axis_shares(2 * len(self.inv_freq), coordinates.shape[-1])]
        inv_freq = self.inv_freq.to(device=position_ids.device, dtype=torch.float32).split(shares)
        along = zip(coordinates.unbind(-1), inv_freq, strict=True)
        angles = [axis[..., None] * frequencies for axis, frequencies in along]
        angles = torch.cat(angles * 2, dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates dimension pairs (i, i + r/2) of `states` [B, H, T, d] by the angles of `cos`, `sin` [B, T, r], r <= d."""
    cos, sin = cos[:, None], sin[:, None]
    rotated, kept = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated


def alibi_slopes(num_heads: int) -> list[float]:
    """Head slopes: the geometric sequence of ratio 2^(-8/n) for n a power of two; otherwise the sequence of the power
    below, then every second term of the one above, as the authors do."""

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * (head + 1) / n) for head in range(n)]

    power = 2 ** math.floor(math.log2(num_heads))
    return geometric(power) + geometric(2 * power)[::2][: num_heads - power]


def alibi_bias(query_positions: torch.Tensor, key_positions: torch.Tensor, num_heads: int) -> torch.Tensor:
    """-slope * |i - j|: [B, H, T, S] in float32, symmetric so that it serves bidirectional layers too."""
    slopes = torch.tensor(alibi_slopes(num_heads), device=key_positions.device)
    distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs()
    return -slopes[:, None, None] * distance[:, None]


def relative_buckets(
    relative_position: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """Bucket of each key-minus-query distance: half of the buckets exact, the others logarithmic to `max_distance`.

    Bidirectional layers give half of the buckets to keys on the right; causal layers never see those.
    """
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = (relative_position > 0) * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    exact = num_buckets // 2
    # Distances below `exact` take the other branch; the clamp only keeps their logarithm finite.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    far = (exact + far.to(torch.long)).clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < exact, distance, far)


class TriptychRelativeBias(nn.Module):
    """A learned scalar per head and distance bucket, added to the attention scores of every layer."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__()
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.relative_attention_bias = nn.Embedding(self.num_buckets, config.num_attention_heads)

    def forward(self, query_positions: torch.Tensor, key_positions: torch.Tensor, bidirectional: bool) -> torch.Tensor:
        """Bias [B, H, T, S] between `query_positions` [B, T] and `key_positions` [B, S]."""
        relative_position = key_positions[:, None, :] - query_positions[:, :, None]  # [B, T, S]
        buckets = relative_buckets(relative_position, bidirectional, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(buckets).permute(0, 3, 1, 2)
