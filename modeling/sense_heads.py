"""The heads of images, videos and recordings: their classes, and what a masked patch looks like.

Shapes: B batch, C channels, H height, W width, N patches, L labels.
"""

from typing import Unpack

import torch
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput, MaskedImageModelingOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple

from .classifiers import SequenceClassification
from .configuration_senses import INPUTS
from .configuration_triptych import TriptychEncoderConfig
from .heads import HeadKwargs, TriptychHead
from .losses import at_least_float32, per_item
from .projections import TriptychLinear


class SenseHead(TriptychHead):
    """A head of what is read in the place of texts, of one kind."""

    config: TriptychEncoderConfig
    input_type: str

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        if config.input_type != self.input_type:
            name, read = type(self).__name__, INPUTS[self.input_type][2]
            raise ValueError(f"`input_type` is {config.input_type!r}, but {name} reads {read}.")


class TriptychEncoderForImageClassification(SenseHead, SequenceClassification):
    """One answer per image, `logits` [B, L]; `labels` as of texts."""

    main_input_name = "pixel_values"
    output_class = ImageClassifierOutput
    input_type = "image"

    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[HeadKwargs],
    ) -> ImageClassifierOutput:
        """`pixel_values` as `TriptychEncoderModel.forward` takes them, and what `TriptychHead.forward` takes."""
        inputs = dict(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        return super().forward(labels=labels, **inputs, **kwargs)


class TriptychEncoderForVideoClassification(TriptychEncoderForImageClassification):
    """One answer per video."""

    input_type = "video"


class TriptychEncoderForAudioClassification(SenseHead, SequenceClassification):
    """One answer per recording, `logits` [B, L]; `labels` as of texts."""

    main_input_name = "input_features"
    output_class = SequenceClassifierOutput
    input_type = "audio"

    def forward(
        self,
        input_features: torch.FloatTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> SequenceClassifierOutput:
        """Recordings as `TriptychEncoderModel.forward` takes them, and what `TriptychHead.forward` takes."""
        inputs = dict(input_features=input_features, attention_mask=attention_mask)
        return super().forward(labels=labels, **inputs, **kwargs)


class TriptychEncoderForMaskedImageModeling(SenseHead):
    """What masked patches look like, beside those that are not (SimMIM, Xie et al. 2022, arXiv 2111.09886)."""

    main_input_name = "pixel_values"
    input_type = "image"

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        if config.strides != config.patch:
            raise ValueError(
                f"`patch_stride` is {config.patch_stride}, but must be `patch_size` = {config.patch_size} where each "
                "pixel is predicted once."
            )
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.embedding_size))
        height, width = config.patch
        self.decoder = TriptychLinear(config.hidden_size, config.num_channels * height * width)
        self.post_init()

    def paint(self, states: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Images [B, C, H, W] of hidden states [B, N, D], each of which becomes its patch."""
        pixels = self.decoder(states).unflatten(-1, (self.config.num_channels, *self.config.patch)).unflatten(1, grid)
        return pixels.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

    def loss(self, reconstruction, pixel_values, bool_masked_pos, grid, num_items_in_batch=None):
        """The mean absolute error over the pixels of masked patches; items are such patches."""
        height, width = self.config.patch
        error = at_least_float32(reconstruction - pixel_values).abs().mean(1)  # [B, H, W]
        error = error.unflatten(2, (grid[1], width)).unflatten(1, (grid[0], height)).mean((2, 4)).flatten(1)  # [B, N]
        return per_item((error * bool_masked_pos).sum(), bool_masked_pos.sum(), num_items_in_batch)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> MaskedImageModelingOutput:
        """The arguments of `TriptychEncoderModel.forward`, and:

        Args:
            bool_masked_pos: [B, N], True on patches that are hidden behind the mask token.
            num_items_in_batch: masked patches in all the batches of one (accumulated) step; the loss is divided by it.

        Returns:
            `reconstruction` [B, C, H, W], and the `loss` if patches are masked.
        """
        if pixel_values is None:
            raise ValueError("`pixel_values` must be given.")
        leading = self.config.num_leading_tokens
        grid = self.model.embed_patches.grid(pixel_values, interpolate_pos_encoding)
        patches = self.model.embed_patches(pixel_values)
        if bool_masked_pos is not None:
            expected = [len(patches), patches.shape[1] - leading]
            if list(bool_masked_pos.shape) != expected:
                raise ValueError(f"`bool_masked_pos` has shape {list(bool_masked_pos.shape)}, but must be {expected}.")
            bool_masked_pos = bool_masked_pos.to(patches.device, torch.bool)
            is_masked = nn.functional.pad(bool_masked_pos, (leading, 0))
            patches = torch.where(is_masked[..., None], self.mask_token.to(patches.dtype), patches)
        outputs = self.model(inputs_embeds=patches, grid=grid, **kwargs)
        reconstruction = self.paint(outputs.last_hidden_state[:, leading:], grid)
        loss = None
        if bool_masked_pos is not None:
            loss = self.loss(reconstruction, pixel_values, bool_masked_pos, grid, num_items_in_batch)
        return MaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
