"""Small random examples for every objective, and recipes of tiny models that train on them."""

import json
import random
import wave
from pathlib import Path

from PIL import Image

from triptych.training.objectives import OBJECTIVES
from triptych.training.recipe import Recipe, load_recipe
from triptych.training.reporting import read_metrics
from triptych.training.run import Run

ROWS = 40
SPECIAL_FILES = {
    "seq2seq": "pairs.tsv",
    "sequence_classification": "classes.tsv",
    "regression": "values.tsv",
    "token_classification": "words.jsonl",
    "question_answering": "spans.jsonl",
    "multiple_choice": "choices.jsonl",
    "image_classification": "images.jsonl",
    "video_classification": "videos.jsonl",
    "audio_classification": "recordings.jsonl",
    "speech_to_text": "recordings.jsonl",
}
PROCESSOR = "processor: {sampling_rate: 8000, hop_length: 80, n_fft: 256, chunk_length: 1}\n"
# What a recipe says beside, where the model reads no text.
SENSES = {
    "image_classification": "model: {image_size: 8, patch_size: 4, ",
    "video_classification": "model: {image_size: 8, patch_size: 4, num_frames: 2, tubelet_size: 2, ",
    "audio_classification": f"{PROCESSOR}model: {{num_mel_bins: 8, ",
    "speech_to_text": f"{PROCESSOR}model: {{encoder: {{num_mel_bins: 8}}, ",
}
EVERY = [(name, topology) for name, objective in OBJECTIVES.items() for topology in objective.heads]


def random_text(draw: random.Random) -> str:
    return " ".join(draw.choice("abcdef") for _ in range(draw.randint(3, 8)))


def write_files(folder: Path) -> Path:
    """Write files of small random examples, one for each kind of objective, and return their folder."""
    draw = random.Random(0)
    texts = [random_text(draw) for _ in range(4 * ROWS)]
    lines = {
        "texts.txt": [f"{one}. {two}. {one}" for one, two in zip(texts[::2], texts[1::2], strict=True)],
        "pairs.tsv": [f"{text}\t{text[::-1]}" for text in texts[:ROWS]],
        "classes.tsv": [f"{text}\t{draw.choice(['yes', 'no'])}" for text in texts[:ROWS]],
        "values.tsv": [f"{text}\t{len(text) / 10}" for text in texts[:ROWS]],
        "words.jsonl": [
            json.dumps({"tokens": text.split(), "labels": ["V" if word in "ae" else "C" for word in text.split()]})
            for text in texts[:ROWS]
        ],
        "spans.jsonl": [
            json.dumps({"question": "a b", "context": text, "answer": text[2:5], "answer_start": 2})
            for text in texts[:ROWS]
        ],
        "choices.jsonl": [
            json.dumps({"text": text, "choices": [text[::-1], "a"], "label": draw.randrange(2)})
            for text in texts[:ROWS]
        ],
    }
    for name, rows in lines.items():
        (folder / name).write_text("\n".join(rows) + "\n")
    write_senses(folder, draw)
    return folder


def write_senses(folder: Path, draw: random.Random) -> None:
    """Write images and recordings, and the tables that name them."""
    images, recordings = [], []
    for number in range(ROWS):
        label = draw.choice(["yes", "no"])
        picture = Image.frombytes("L", (5, 7), draw.randbytes(35))
        picture.save(folder / f"{number}.png")
        images.append(json.dumps({"image": str(folder / f"{number}.png"), "label": label}))
        write_wav(folder / f"{number}.wav", draw.randbytes(2 * draw.randint(500, 1500)))
        recordings.append(json.dumps({"audio": str(folder / f"{number}.wav"), "label": label, "target": label}))
    paths = [str(folder / f"{number}.png") for number in range(ROWS)]
    videos = [json.dumps({"video": draw.sample(paths, 2), "label": draw.choice(["yes", "no"])}) for _ in range(ROWS)]
    (folder / "videos.jsonl").write_text("\n".join(videos))
    (folder / "images.jsonl").write_text("\n".join(images))
    (folder / "recordings.jsonl").write_text("\n".join(recordings))


def write_wav(path: Path, frames: bytes, channels: int = 1, rate: int = 8000) -> None:
    """Write a WAV file of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames)


def make_recipe(folder: Path, tmp_path: Path, name: str, topology: str, *changes: str) -> Recipe:
    """Return a recipe of two updates of a one-layer model on the files in `folder`, which leaves `tmp_path / run`."""
    file = folder / SPECIAL_FILES.get(name, "texts.txt")
    path, head = tmp_path / "mine.yaml", SENSES.get(name, "model: {")
    path.write_text(
        f"objective: {{type: {name}}}\n"
        f"data: {{splits: {{train: {file}, validation: {file}}}, max_length: 24}}\n"
        f"tokenizer: {{type: char}}\n{head}"
        "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,\n"
        f"  topology: {topology}, initializer_range: 0.2, hidden_dropout: 0.1}}\n"
        "generation: {max_new_tokens: 8}\n"
        "max_steps: 2\nlog_every: 1\nvalidate_every: 2\nmax_tokens: 512\nreport_to: []\n"
        f"output: {tmp_path / 'run'}\n"
    )
    return load_recipe(str(path), changes)


def metrics_of(run: Run, key: str) -> list[float]:
    """What the metrics file of a finished run says of `key`, line after line."""
    return [row[key] for row in read_metrics(run.folder / "metrics.jsonl") if key in row]
