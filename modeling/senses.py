"""What is not text, as a sequence: patches of images, tubelets of videos, frames of recordings.

Each becomes one vector by a convolution, behind a learned vector that stands for the whole (Dosovitskiy et al. 2021,
arXiv 2010.11929, equation 1). From there on it is read like any text.

Shapes: B batch, C channels, F frames, H height, W width, M mel bins, N tokens, E embedding_size.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_senses import INPUTS
from .configuration_triptych import TriptychEncoderConfig
from .tracing import is_tracing


class SenseEmbedding(nn.Module):
    """What the embeddings of all senses share: the class token, and what the rest of the stack asks of them."""

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__()
        self.config = config
        if config.class_token:
            self.class_token = nn.Parameter(torch.zeros(1, 1, config.embedding_size))

    def behind_class_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, N, E] to [B, 1 + N, E], or as they are if there is none."""
        if not hasattr(self, "class_token"):
            return tokens
        return torch.cat((self.class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)

    def token_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Which tokens are real, from the mask that the input came with."""
        return attention_mask


class TriptychPatchEmbedding(SenseEmbedding):
    """The patches of an image, row by row; the tubelets of a video, one layer after the other (Arnab et al. 2021, arXiv
    2103.15691, section 3.2)."""

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[config.position_axes]
        self.projection = convolution(
            config.num_channels, config.embedding_size, kernel_size=config.patch, stride=config.strides
        )

    def grid(self, pixel_values: torch.Tensor, may_differ: bool) -> tuple[int, ...]:
        """Patches along each axis: rows and columns, behind layers of time if it is a video.

        Args:
            may_differ: whether sizes may be others than the configuration says.

        Raises:
            ValueError: a size or a number of channels that is not allowed.
        """
        config = self.config
        is_video = config.input_type == "video"
        channels, sizes = pixel_values.shape[1:2], tuple(pixel_values.shape[2:])
        if is_video and pixel_values.ndim == 5:
            channels, sizes = pixel_values.shape[2:3], (pixel_values.shape[1], *pixel_values.shape[3:])
        is_batch = len(sizes) == config.position_axes and pixel_values.shape[0] and channels == (config.num_channels,)
        if not is_batch or not (config.is_covered(sizes) if may_differ else sizes == config.input_sizes):
            self.refuse(pixel_values, may_differ)
        return config.grid_of(sizes)

    def refuse(self, pixel_values: torch.Tensor, may_differ: bool):
        config = self.config
        frames, (height, width) = config.num_frames, config.sides("image_size")
        names = ["num_frames"] if config.input_type == "video" else []
        names += ["num_channels", "image_size"]
        reason = f"as {', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}` say"
        if may_differ:
            frames, height, width = "F", "H", "W"
            reason = f"where patches of {list(config.patch)} at every {list(config.strides)} cover all"
        shape = [config.num_channels, height, width]
        shape = [frames, *shape] if config.input_type == "video" else shape
        raise ValueError(
            f"`pixel_values` has shape {list(pixel_values.shape)}, but must be a batch of "
            f"{INPUTS[config.input_type][2]} [{', '.join(map(str, shape))}], {reason}."
        )

    def forward(self, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Images [B, C, H, W] or videos [B, F, C, H, W] of any type to [B, 1 + N, E], whoever is masked."""
        if self.config.input_type == "video":
            pixel_values = pixel_values.transpose(1, 2)
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        return self.behind_class_token(patches.flatten(2).transpose(1, 2))


class TriptychFrameEmbedding(SenseEmbedding):
    """The frames of a log-mel spectrogram, through convolutions over three of them each (Radford et al. 2023, arXiv
    2212.04356, section 2.2).

    To a convolution, what lies behind the end of a recording is silence of zeros, whether the recording ends there or
    is followed by pads.
    """

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        sizes = [config.num_mel_bins] + [config.embedding_size] * len(config.conv_stride)
        self.convolutions = nn.ModuleList(
            [
                nn.Conv1d(inputs, outputs, kernel_size=3, stride=stride, padding=1)
                for inputs, outputs, stride in zip(sizes, sizes[1:], config.conv_stride, strict=False)
            ]
        )

    def grid(self, input_features: torch.Tensor, may_differ: bool) -> None:
        """None: a recording has the length that it has.

        Raises:
            ValueError: another number of mel bins, or no frames.
        """
        bins = self.config.num_mel_bins
        if input_features.ndim != 3 or input_features.shape[1] != bins or 0 in input_features.shape:
            raise ValueError(
                f"`input_features` has shape {list(input_features.shape)}, but must be a batch of recordings "
                f"[{bins}, F] of at least one frame, as `num_mel_bins` says."
            )

    def check_mask(self, attention_mask: torch.Tensor, input_features: torch.Tensor):
        expected = [input_features.shape[0], input_features.shape[2]]
        if list(attention_mask.shape) != expected:
            raise ValueError(
                f"`attention_mask` has shape {list(attention_mask.shape)}, but must be {expected}, of recordings and "
                "their frames."
            )
        if attention_mask.device.type != "cpu" or is_tracing(attention_mask):
            return
        is_real = attention_mask.bool()
        if not bool(is_real[:, 0].all()):
            row = int((~is_real[:, 0]).int().argmax())
            raise ValueError(
                f"`attention_mask` begins with a pad in row {row}, but a recording must begin with a frame."
            )
        if bool((is_real[:, 1:] & ~is_real[:, :-1]).any()):
            raise ValueError("`attention_mask` has pads between frames, but recordings are padded at their ends only.")

    def token_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """[B, F], 1 on real frames, to [B, 1 + N]: a token is real if the frame in its middle is."""
        for stride in self.config.conv_stride:
            attention_mask = attention_mask[:, ::stride]
        return F.pad(attention_mask, (self.config.num_leading_tokens, 0), value=1)

    def forward(self, input_features: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """[B, M, F] of any type to [B, 1 + N, E]; `attention_mask` [B, F] is 1 on real frames, which stand first."""
        if attention_mask is not None:
            self.check_mask(attention_mask, input_features)
        states = input_features.to(self.convolutions[0].weight.dtype)
        for convolution in self.convolutions:
            if attention_mask is not None:
                states = states.masked_fill(~attention_mask[:, None].bool(), 0)
                attention_mask = attention_mask[:, :: convolution.stride[0]]
            states = F.gelu(convolution(states))
        return self.behind_class_token(states.transpose(1, 2))


SENSES = {"image": TriptychPatchEmbedding, "video": TriptychPatchEmbedding, "audio": TriptychFrameEmbedding}
