"""Digits as people write and as they speak them, and as they move.

| section | an example is | of |
|---|---|---|
| `digits` | an `image` of 8 x 8 pixels with its `label` | 1,797 of scikit-learn (Alpaydin & Kaynak 1998) |
| `moving_digits` | a `video` of 8 frames of 16 x 16 pixels; its `label` is digit and direction | the images |
| `spoken_digits` | an `audio` of 8,000 samples a second with its `label` | 3,000 of the Free Spoken Digit Dataset |
| `spoken_sequences` | an `audio` of 2 to 4 digits, one after the other, with its `target` | these |

Images are shuffled once and for all, and a split is a share of them: the last fifth is the customary test. Videos are
generated, so many for each split, from the images of that split. Recordings have a number from 0 to 49 for each speaker
and digit, and a split is a range of these: 0 to 4 are the official test. With a `held_out_speaker` the tests are of
that one, whom training and validation do not hear. Sequences are generated as videos are.
"""

from pathlib import Path

import numpy as np
from datasets import Dataset

from triptych.training.errors import UserError, unknown_name

SPOKEN_DIGITS = "$TRIPTYCH_DATA/fsdd/fsdd_8khz_int16.npz"


def load_written(share: list[float]) -> Dataset:
    """Return the images from one share to another, such as [0.8, 1], with grey levels from 0 to 255.

    Raises:
        UserError: impossible shares.
    """
    from sklearn.datasets import load_digits  # takes a second

    if len(share) != 2 or not 0 <= share[0] < share[1] <= 1:
        raise UserError(f"a split of recipe key 'data.digits' must be two shares, such as [0, 0.8], not {share}")
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    start, end = (round(part * len(order)) for part in share)
    chosen = order[start:end]
    images = (digits.images[chosen] * (255 / 16)).round().astype(np.uint8)
    return Dataset.from_dict({"image": list(images), "label": [str(label) for label in digits.target[chosen]]})


# Shares of the images that move, and pixels a frame downwards and to the right.
MOVING_SHARES = {"train": [0, 0.72], "validation": [0.72, 0.8], "test": [0.8, 1]}
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
FRAMES, SIDE = 8, 16


def generate_moving(split: str, size: int, seed: int) -> Dataset:
    """Return `size` videos of a digit that moves by a pixel a frame, such as "3 left", in front of black.

    Raises:
        UserError: an unknown split.
    """
    if split not in MOVING_SHARES:
        raise unknown_name("split of moving digits", split, MOVING_SHARES)
    images = load_written(MOVING_SHARES[split])
    pixels = np.array(images["image"], np.uint8)
    draw = np.random.default_rng([seed, *split.encode()])
    videos, labels = [], []
    for number in draw.integers(len(images), size=size):
        name, step = list(DIRECTIONS.items())[draw.integers(len(DIRECTIONS))]
        video = np.zeros((FRAMES, SIDE, SIDE), np.uint8)
        room = SIDE - len(pixels[number]) - (FRAMES - 1) * np.abs(step)  # what the way leaves, on each axis
        start = draw.integers(room + 1) - np.minimum(step, 0) * (FRAMES - 1)
        for time in range(FRAMES):
            top, left = start + time * np.array(step)
            video[time, top : top + len(pixels[number]), left : left + len(pixels[number])] = pixels[number]
        videos.append(video)
        labels.append(f"{images['label'][int(number)]} {name}")
    return Dataset.from_dict({"video": videos, "label": labels})


def load_spoken(path: Path, numbers: list[int], held_out: int | None = None, split: str = "") -> Dataset:
    """Return the recordings with the numbers from one to another, such as [0, 4], of all speakers and digits.

    Args:
        path: of the archive: `audio`, all samples; `offsets`, where each recording begins, and the end; and the
            `digit`, the number, `index`, and the `speaker` of each.
        held_out: the speaker whom tests are of, and only they; None mixes the speakers.
        split: its name, which says whether it is a test.

    Raises:
        UserError: impossible numbers, or an unknown speaker.
    """
    if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise UserError(
            f"a split of recipe key 'data.spoken_digits' must be two numbers, such as [0, 4], not {numbers}"
        )
    with np.load(path) as archive:
        audio, offsets, digit, index, speaker = (
            archive[name] for name in ("audio", "offsets", "digit", "index", "speaker")
        )
    is_chosen = (index >= numbers[0]) & (index <= numbers[1])
    if held_out is not None:
        if held_out not in speaker:
            known = ", ".join(str(number) for number in np.unique(speaker))
            raise UserError(f"recipe key 'data.held_out_speaker' must be one of {known}, not {held_out}")
        is_chosen &= (speaker == held_out) == (split not in ("train", "validation"))
    chosen = np.flatnonzero(is_chosen)
    samples = [audio[offsets[number] : offsets[number + 1]] for number in chosen]
    return Dataset.from_dict({"audio": samples, "label": [str(label) for label in digit[chosen]]})


# Numbers of the recordings that are joined, and the samples of the longest of them.
SEQUENCE_NUMBERS = {"train": [10, 49], "validation": [5, 9], "test": [0, 4]}
LONGEST = 8000


def generate_sequences(path: Path, split: str, size: int, seed: int) -> Dataset:
    """Return `size` recordings of 2 to 4 digits, with a target such as "3 1 4".

    Raises:
        UserError: an unknown split.
    """
    if split not in SEQUENCE_NUMBERS:
        raise unknown_name("split of spoken sequences", split, SEQUENCE_NUMBERS)
    spoken = load_spoken(path, SEQUENCE_NUMBERS[split])
    spoken = [(np.array(row["audio"], np.int16), row["label"]) for row in spoken]
    spoken = [recording for recording in spoken if len(recording[0]) <= LONGEST]
    draw = np.random.default_rng([seed, *split.encode()])
    audio, targets = [], []
    for count in draw.integers(2, 5, size=size):
        parts = [spoken[number] for number in draw.integers(len(spoken), size=count)]
        audio.append(np.concatenate([samples for samples, _ in parts]))
        targets.append(" ".join(label for _, label in parts))
    return Dataset.from_dict({"audio": audio, "target": targets})
