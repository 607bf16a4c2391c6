"""What an encoder can read beside texts: the fields of images, videos and recordings, and which of them fit."""

from dataclasses import dataclass
from math import prod
from typing import Literal

# What holds the input, how many axes its positions have, and what it is called.
INPUTS = {
    "text": ("input_ids", 1, "texts"),
    "image": ("pixel_values", 2, "images"),
    "video": ("pixel_values", 3, "videos"),
    "audio": ("input_features", 1, "recordings"),
}


@dataclass(kw_only=True, repr=False)
class SensesConfig:
    """Fields of what stands in the place of tokens. Images and videos are grids of patches, of a size that is known;
    recordings are sequences, of any length up to `max_position_embeddings` where positions are learned.

    Args:
        input_type: "text"; "image", patches in place of tokens (Dosovitskiy et al. 2021); "video", tubelets (Arnab et
            al. 2021); or "audio", frames of a log-mel spectrogram behind a small convolution (Radford et al. 2023).
            Beside texts there is no token table. For images and videos, `max_position_embeddings` is the number of
            patches, with the class token.
        image_size, patch_size: in pixels, one number or height and width.
        patch_stride: pixels from one patch to the next, fewer than `patch_size` where patches overlap (Gong et al.
            2021); None is `patch_size`.
        num_channels: of images and videos.
        num_frames, tubelet_size: frames of a video, and of one of its tubelets.
        num_mel_bins: bands of the spectrogram.
        conv_stride: frames from one output to the next, of each convolution over three frames; their product is the
            number of frames that become one token.
        class_token: a learned vector before all others, which stands for the whole.
    """

    input_type: Literal["text", "image", "video", "audio"] = "text"
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    patch_stride: int | list[int] | tuple[int, int] | None = None
    num_channels: int = 3
    num_frames: int = 16
    tubelet_size: int = 2
    num_mel_bins: int = 80
    conv_stride: list[int] | tuple[int, ...] = (1, 2)
    class_token: bool = True

    def __post_init__(self, **kwargs):
        self.conv_stride = list(self.conv_stride)
        self.check_sizes()
        super().__post_init__(**kwargs)
        if self.has_grid:
            self.max_position_embeddings = max(1, prod(self.grid) + self.class_token)

    @property
    def main_input_name(self) -> str:
        """The argument that holds what is read."""
        return INPUTS[self.input_type][0]

    @property
    def position_axes(self) -> int:
        """How many numbers say where a token stands."""
        return INPUTS[self.input_type][1]

    @property
    def num_leading_tokens(self) -> int:
        """Tokens before those of the input itself."""
        return int(self.class_token and self.input_type != "text")

    @property
    def has_grid(self) -> bool:
        """Whether the input has a fixed size."""
        return self.input_type in ("image", "video")

    def sides(self, name: str) -> tuple[int, ...]:
        """Height and width that a field says."""
        size = getattr(self, name)
        return (size, size) if isinstance(size, int) else tuple(size)

    def along(self, frames: int, sides: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes by axis: those of a video begin with time."""
        return (frames, *sides) if self.input_type == "video" else sides

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Frames of a video, height and width of each."""
        return self.along(self.num_frames, self.sides("image_size"))

    @property
    def patch(self) -> tuple[int, ...]:
        """What one token covers, by axis."""
        return self.along(self.tubelet_size, self.sides("patch_size"))

    @property
    def strides(self) -> tuple[int, ...]:
        """From one token to the next, by axis."""
        return self.along(self.tubelet_size, self.sides("patch_size" if self.patch_stride is None else "patch_stride"))

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis of an image or a video."""
        return self.grid_of(self.input_sizes)

    def grid_of(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens along each axis of an input of these sizes."""
        return tuple(
            (size - patch) // step + 1 for size, patch, step in zip(sizes, self.patch, self.strides, strict=True)
        )

    def is_covered(self, sizes: tuple[int, ...]) -> bool:
        """Whether patches reach from one end to the other along every axis."""
        along = zip(sizes, self.patch, self.strides, strict=True)
        return all(size >= patch and (size - patch) % step == 0 for size, patch, step in along)

    def check_sizes(self):
        """Numbers are numbers of something."""
        for name in ("image_size", "patch_size", "patch_stride"):
            if getattr(self, name) is not None and (len(self.sides(name)) != 2 or min(self.sides(name)) < 1):
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be one or two numbers of at least 1.")
        for name in ("num_channels", "num_frames", "tubelet_size", "num_mel_bins"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 1.")
        if not self.conv_stride or min(self.conv_stride) < 1:
            raise ValueError(f"`conv_stride` is {self.conv_stride}, but must be one or more numbers of at least 1.")

    def validate_patches(self):
        """Patches cover the image and leave no gaps, tubelets the video."""
        self.check_sizes()
        if any(step > patch for step, patch in zip(self.strides, self.patch, strict=True)):
            raise ValueError(
                f"`patch_stride` is {self.patch_stride}, but must be at most `patch_size` = {self.patch_size}."
            )
        if self.input_type == "video" and self.num_frames % self.tubelet_size:
            raise ValueError(
                f"`num_frames` is {self.num_frames}, but must be a multiple of `tubelet_size` = {self.tubelet_size}."
            )
        if not self.is_covered(self.input_sizes):
            allowed = f"a multiple of `patch_size` = {self.patch_size}"
            if self.patch_stride is not None:
                allowed = f"`patch_size` = {self.patch_size} and a multiple of `patch_stride` = {self.patch_stride}"
            raise ValueError(f"`image_size` is {self.image_size}, but must be {allowed}.")
