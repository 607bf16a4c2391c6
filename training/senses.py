"""Images, videos and recordings as model inputs. transformers' processors prepare them and are saved beside the model.

An image is the path of a file, or rows of pixels from 0 to 255; a video is a list of such. A recording is the path of a
WAV file of 16 bits and one channel, or its samples from -32,768 to 32,767.

Shapes: B batch, C channels, H height, W width, M mel bins, F frames.
"""

import inspect
import json
import struct
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Array2D, Array3D, Array4D, Dataset
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    PreTrainedTokenizerBase,
    VideoMAEImageProcessorPil,
    ViTImageProcessorPil,
    WhisperFeatureExtractor,
)

from triptych.losses import IGNORE
from triptych.training.data import find_file
from triptych.training.encoding import Columns, Encoder, encode_targets
from triptych.training.errors import UserError, as_user_error, unknown_name
from triptych.training.padding import Batch, pad_rows, tensors
from triptych.training.recipe import Recipe

Processor = ViTImageProcessorPil | VideoMAEImageProcessorPil | WhisperFeatureExtractor
# What prepares an input, and how it is loaded beside a model.
PROCESSORS = {
    "image": (ViTImageProcessorPil, AutoImageProcessor),
    "video": (VideoMAEImageProcessorPil, AutoImageProcessor),
    "audio": (WhisperFeatureExtractor, AutoFeatureExtractor),
}
MODEL_INPUTS = ("pixel_values", "input_features")
ARRAYS = {2: Array2D, 3: Array3D, 4: Array4D}  # by the number of their dimensions


def build_processor(recipe: Recipe, sense: str) -> Processor:
    """Return the processor of the model to start from, or one of the recipe's fields that fits the model's.

    Raises:
        UserError: an unknown field, or there is no processor beside the model to start from.
    """
    processor_class, auto_class = PROCESSORS[sense]
    model = recipe.model.get("encoder") or recipe.model
    if path := recipe.model.get("path"):
        with as_user_error(f"the processor of '{path}' cannot be loaded"):
            return auto_class.from_pretrained(path)
    if sense == "audio":
        known = set(inspect.signature(processor_class).parameters)
        fields = {"feature_size": model.get("num_mel_bins", 80)}
    else:
        known = set(processor_class.valid_kwargs.__annotations__)
        size = model.get("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        fields = {"size": {"height": height, "width": width}, "do_center_crop": False}
    for name in recipe.processor:
        if name not in known:
            raise unknown_name("recipe key", f"processor.{name}", [f"processor.{field}" for field in known])
    with as_user_error("recipe section 'processor'"):
        return processor_class(**fields | recipe.processor)


def processor_digest(processor: Processor | None) -> str:
    """Return all that decides what a processor makes of its input."""
    return "" if processor is None else json.dumps(json.loads(processor.to_json_string()), sort_keys=True)


def read_image(source: str | list, number: int) -> Image.Image:
    """Return an image in three colours.

    Raises:
        UserError: the file is no image, or one of more than 8 bits a colour, or the pixels are none.
    """
    if isinstance(source, str):
        return _open_image(find_file(source))
    try:
        return Image.fromarray(_exact(source, np.uint8, dimensions=(2, 3))).convert("RGB")
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"image {number} must be rows of equally many pixels from 0 to 255: {error}") from error


def _open_image(path: Path) -> Image.Image:
    with as_user_error(f"image '{path}' cannot be read", Image.DecompressionBombError, SyntaxError, struct.error):
        image = Image.open(path)
        if image.mode.startswith(("I", "F")):  # Pillow would make white of nearly all
            raise UserError(f"image '{path}' has more than 8 bits a colour, but must have 8")
        return image.convert("RGB")


def _exact(source: list, kind: type[np.integer], dimensions: Sequence[int]) -> np.ndarray:
    """Return whole numbers as `kind`.

    Raises:
        TypeError, ValueError, OverflowError: some would be others then, or they do not have one of the `dimensions`.
    """
    values = np.asarray(source)
    if values.ndim not in dimensions or not values.size:
        raise ValueError(f"it has the shape {list(values.shape)}")
    with np.errstate(invalid="ignore"):
        exact = values.astype(kind)
    if not np.array_equal(exact, values):
        raise ValueError(f"{values[exact != values].flat[0]} is none")
    return exact


def read_recording(source: str | list, number: int, sampling_rate: int, seconds: int) -> np.ndarray:
    """Return the samples of a recording, from -1 to 1.

    Args:
        sampling_rate: what a file must have.
        seconds: the longest that is read whole.

    Raises:
        UserError: a recording that is empty, too long, cut short, or of another kind than the model reads.
    """
    name = f"recording '{source}'" if isinstance(source, str) else f"recording {number}"
    if isinstance(source, str):
        source = read_wav(find_file(source), sampling_rate)
    if source is not None and not len(source):
        raise UserError(f"{name} is empty, but must have at least one sample")
    try:
        samples = _exact(source, np.int16, dimensions=(1,))
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name} must be samples from -32,768 to 32,767, in one row: {error}") from error
    if len(samples) > seconds * sampling_rate:
        raise UserError(
            f"{name} lasts {len(samples) / sampling_rate:.2f} s, but the processor's `chunk_length` is {seconds} s"
        )
    return samples.astype(np.float32) / 2**15


def read_wav(path: Path, sampling_rate: int) -> np.ndarray:
    """Return the samples of a WAV file.

    Raises:
        UserError: it is none, is cut short, or is not of one channel, 16 bits and this sampling rate.
    """
    try:
        with wave.open(str(path)) as file:
            frames = file.readframes(file.getnframes())
            found, count = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()), file.getnframes()
    except (wave.Error, EOFError, OSError) as error:
        raise UserError(f"recording '{path}' is no WAV file: {str(error) or 'it ends early'}") from error
    for what, value, expected in zip(
        ("channels", "bits", "samples a second"), found, (1, 16, sampling_rate), strict=True
    ):
        if value != expected:
            raise UserError(f"recording '{path}' has {value} {what}, but must have {expected}")
    samples = np.frombuffer(frames[: len(frames) // 2 * 2], "<i2")
    if len(samples) < count:
        raise UserError(f"recording '{path}' is cut short: it has {len(samples)} samples of {count}")
    return samples


def encode_images(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `image` into `pixel_values` [C, H, W], and `label` into its class's number."""
    images = [read_image(source, number) for number, source in enumerate(examples["image"], start=1)]
    values = encoder.processor(images, return_tensors="np")["pixel_values"]
    return {"pixel_values": list(values), "labels": [encoder.number(label) for label in examples["label"]]}


def encode_videos(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `video` into `pixel_values` [frames, C, H, W], and `label` into its class's number."""
    videos = [
        [read_image(source, number) for source in frames] for number, frames in enumerate(examples["video"], start=1)
    ]
    values = encoder.processor(videos, return_tensors="np")["pixel_values"]
    return {"pixel_values": list(values), "labels": [encoder.number(label) for label in examples["label"]]}


def encode_recordings(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `audio` into `input_features` [M, F], and `label` into its class's number.

    As in transformers' pipeline, what is missing to the longest recording is silence, and is read as such.
    """
    values = _features(examples, encoder)["input_features"]
    return {"input_features": list(values), "labels": [encoder.number(label) for label in examples["label"]]}


def encode_transcripts(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `audio` into `input_features` [M, F] and their number, `frames`, and `target` into `labels`."""
    encoded = _features(examples, encoder, return_attention_mask=True)
    frames = encoded["attention_mask"].sum(1).tolist()
    return {
        "input_features": [values[:, :count] for values, count in zip(encoded["input_features"], frames, strict=True)],
        "frames": frames,
        "labels": encode_targets(examples, encoder),
    }


def _features(examples: Columns, encoder: Encoder, **options: bool) -> Mapping[str, np.ndarray]:
    rate, seconds = encoder.processor.sampling_rate, encoder.processor.chunk_length
    recordings = [read_recording(source, row, rate, seconds) for row, source in enumerate(examples["audio"], start=1)]
    return encoder.processor(recordings, sampling_rate=rate, return_tensors="np", **options)


def read_whole(rows: Dataset, name: str) -> Dataset:
    """Return rows whose inputs, all of one size, are read as arrays: list by list it takes four times as long."""
    shape = np.array(rows[0][name]).shape
    return rows.cast_column(name, ARRAYS[len(shape)](shape, "float32"))


def input_size(values: Any) -> int:
    """Return what an input counts for, as a text does by its tokens: pixels of all frames, or frames of a recording.

    Args:
        values: [C, H, W] of an image, [frames, C, H, W] of a video, [M, F] of a recording.
    """
    is_recording = values.ndim == 2
    return values.shape[-1] if is_recording else int(np.prod(values.shape)) // values.shape[-3]


@dataclass
class SenseClassificationCollator:
    """Images, videos or recordings of one size, with a class each."""

    def __call__(self, features: list[dict]) -> Batch:
        """Return `pixel_values` [B, C, H, W] or [B, frames, C, H, W], or `input_features` [B, M, F]; `labels` [B]."""
        name = next(name for name in MODEL_INPUTS if name in features[0])
        values = np.stack([np.asarray(feature[name], np.float32) for feature in features])
        return tensors({name: values, "labels": np.array([feature["labels"] for feature in features], np.int64)})


@dataclass
class SpeechToTextCollator:
    """Recordings of any length for an encoder, and texts for a decoder, which is fed the true text (teacher forcing).

    Args:
        tokenizer: of the texts.
    """

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_features` [B, M, F], their `attention_mask` [B, F], and `labels` [B, T]."""
        values = [np.asarray(feature["input_features"], np.float32) for feature in features]
        lengths = np.array([recording.shape[1] for recording in values])
        table = np.zeros((len(values), len(values[0]), lengths.max()), np.float32)
        for row, recording in zip(table, values, strict=True):
            row[:, : recording.shape[1]] = recording
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        labels = pad_rows([feature["labels"] for feature in features], IGNORE)
        return tensors({"input_features": table, "attention_mask": mask, "labels": labels})
