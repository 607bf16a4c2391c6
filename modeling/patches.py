"""Images as sequences: square patches, each projected to one vector (Dosovitskiy et al. 2021, arXiv 2010.11929).

Shapes: B batch, C channels, N patches, E embedding_size.
"""

import torch
from torch import nn

from .configuration_triptych import TriptychEncoderConfig


class TriptychPatchEmbedding(nn.Module):
    """The patches of an image, row by row, behind a learned vector that stands for the whole (their equation 1)."""

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__()
        self.shape = (config.num_channels, *config.sides("image_size"))
        patch = config.sides("patch_size")
        self.projection = nn.Conv2d(config.num_channels, config.embedding_size, kernel_size=patch, stride=patch)
        if config.class_token:
            self.class_token = nn.Parameter(torch.zeros(1, 1, config.embedding_size))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[B, C, height, width] to [B, 1 + N, E].

        Raises:
            ValueError: images of another size, or with other channels, than the configuration says.
        """
        if pixel_values.shape[1:] != self.shape or not pixel_values.shape[0]:
            raise ValueError(
                f"`pixel_values` has shape {list(pixel_values.shape)}, but must be a batch of images "
                f"{list(self.shape)}, as `num_channels` and `image_size` say."
            )
        patches = self.projection(pixel_values).flatten(2).transpose(1, 2)
        if not hasattr(self, "class_token"):
            return patches
        return torch.cat((self.class_token.expand(patches.shape[0], -1, -1), patches), dim=1)
