"""Images and recordings: read from files and arrays, prepared as transformers' pipelines do, refused in a sentence."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from small_files import make_recipe, write_files, write_wav
from transformers import ViTImageProcessorPil, WhisperFeatureExtractor, pipeline

from triptych.losses import IGNORE
from triptych.training.building import build_parts
from triptych.training.data import load_split
from triptych.training.digits import DIRECTIONS, LONGEST, load_written
from triptych.training.errors import UserError
from triptych.training.evaluation import transcribe
from triptych.training.recipe import DataRecipe, Recipe, load_recipe
from triptych.training.senses import build_processor, read_image, read_recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("data"))


def recording_of(source, seconds=1):
    return read_recording(source, 3, 8000, seconds)


@torch.no_grad()
def test_a_pipeline_reads_as_training_does(folder, tmp_path):
    """The processor beside the model prepares what it is given as that which the model has learnt from."""
    for name, kind in (("image_classification", "image"), ("audio_classification", "audio")):
        recipe = make_recipe(folder, tmp_path, name, "encoder")
        parts = build_parts(recipe, processes=1)
        for part in (parts.model.eval(), parts.processor):
            part.save_pretrained(tmp_path / name)
        scores = torch.cat([parts.model(**batch).logits.softmax(-1) for batch in parts.validation_loader])
        inputs = load_split(recipe.data, "validation", (kind, "label"))[kind]
        inputs = [recording_of(path) for path in inputs] if kind == "audio" else list(inputs)
        for answer, expected in zip(
            pipeline(f"{kind}-classification", str(tmp_path / name))(inputs), scores, strict=True
        ):
            given = {entry["label"]: entry["score"] for entry in answer}
            for number, label in parts.model.config.id2label.items():
                assert given[label] == pytest.approx(expected[number].item(), abs=1e-5)
        assert scores.std(0).min() > 1e-3, "one answer for all: the comparison says little"


def test_an_image_is_a_file_or_pixels(tmp_path):
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    for source in (str(tmp_path / "grey.png"), pixels.tolist()):
        assert np.array_equal(np.array(read_image(source, 1)), np.stack([pixels] * 3, axis=-1))


def test_a_recording_is_a_file_or_samples(tmp_path):
    samples = np.array([0, 16384, -32768, 7], np.int16)
    write_wav(tmp_path / "one.wav", samples.tobytes())
    for source in (str(tmp_path / "one.wav"), samples.tolist()):
        assert np.array_equal(recording_of(source), samples.astype(np.float32) / 2**15)


def test_bad_images_and_recordings(tmp_path):
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UserError, match=r"image '.*text\.png' cannot be read"):
        read_image(str(tmp_path / "text.png"), 1)
    for pixels in ([[1, 2], [3]], [[300]], [["a"]], [["1"]], [[0.5]], [1, 2], [], [[]], [[None]], None, [[10**30]]):
        with pytest.raises(UserError, match="image 2 must be rows of equally many pixels from 0 to 255"):
            read_image(pixels, 2)
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(UserError, match=r"image '.*bomb\.png' cannot be read: DecompressionBombError"):
        read_image(str(tmp_path / "bomb.png"), 1)
    Image.fromarray(np.full((2, 2), 300, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(UserError, match=r"image '.*deep\.png' has more than 8 bits a colour, but must have 8"):
        read_image(str(tmp_path / "deep.png"), 1)
    with pytest.raises(UserError, match="recording 3 is empty, but must have at least one sample"):
        recording_of([])
    for samples in ([40_000], [0.5, -0.5], [[1, 2], [3, 4]], [[1], [2, 3]], ["a"], [float("nan")], None):
        with pytest.raises(UserError, match="recording 3 must be samples from -32,768 to 32,767, in one row"):
            recording_of(samples)
    with pytest.raises(UserError, match=r"recording 3 lasts 1\.25 s, but the processor's `chunk_length` is 1 s"):
        recording_of([0] * 10_000)
    write_wav(tmp_path / "empty.wav", b"")
    write_wav(tmp_path / "two.wav", bytes(8), channels=2)
    write_wav(tmp_path / "fast.wav", bytes(8), rate=16000)
    write_wav(tmp_path / "whole.wav", bytes(200))
    (tmp_path / "cut.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:-100])
    (tmp_path / "short.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:20])
    (tmp_path / "text.wav").write_text("no recording at all")
    for name, sentence in (
        ("empty", "is empty"),
        ("two", "has 2 channels, but must have 1"),
        ("fast", "has 16000 samples a second, but must have 8000"),
        ("cut", "is cut short: it has 50 samples of 100"),
        ("text", "is no WAV file: file does not start with RIFF id"),
        ("short", "is no WAV file: it ends early"),
    ):
        with pytest.raises(UserError, match=rf"recording '.*{name}\.wav' {sentence}"):
            recording_of(str(tmp_path / f"{name}.wav"))


def test_a_processor_fits_the_model():
    recipe = Recipe(model={"image_size": [8, 12]}, processor={"do_normalize": False})
    processor = build_processor(recipe, "image")
    assert isinstance(processor, ViTImageProcessorPil)
    assert (processor.size["height"], processor.size["width"], processor.do_normalize) == (8, 12, False)
    processor = build_processor(Recipe(model={"num_mel_bins": 20}, processor={"n_fft": 512}), "audio")
    assert isinstance(processor, WhisperFeatureExtractor)
    assert (processor.feature_size, processor.n_fft) == (20, 512)
    with pytest.raises(UserError, match=r"recipe key 'processor\.n_ftt' is unknown: did you mean 'processor\.n_fft'"):
        build_processor(Recipe(processor={"n_ftt": 512}), "audio")


def test_a_later_training_starts_with_the_processor_of_the_first(folder, tmp_path):
    recipe = make_recipe(folder, tmp_path, "image_classification", "encoder", "processor.do_normalize=false")
    parts = build_parts(recipe, processes=1)
    for part in (parts.model, parts.processor):
        part.save_pretrained(tmp_path / "start")
    again = Recipe(model={"path": str(tmp_path / "start")})
    assert not build_processor(again, "image").do_normalize
    with pytest.raises(UserError, match="the processor of 'nowhere' cannot be loaded"):
        build_processor(Recipe(model={"path": "nowhere"}), "image")


def test_what_is_of_texts_and_what_is_not(folder, tmp_path):
    recipe = make_recipe(folder, tmp_path, "image_classification", "encoder", "data.token_dropout=0.1")
    with pytest.raises(UserError, match=r"'data\.token_dropout' must be 0, as image_classification has not one text"):
        build_parts(recipe, processes=1)
    recipe = make_recipe(folder, tmp_path, "masked_lm", "encoder", "processor.n_fft=8")
    with pytest.raises(UserError, match="'processor' must be empty, as masked_lm reads texts"):
        build_parts(recipe, processes=1)


def test_written_digits_are_split_once_and_for_all():
    recipe = load_recipe("digits")
    parts = {name: load_split(recipe.data, name, ("image", "label")) for name in recipe.data.digits}
    assert [len(part) for part in parts.values()] == [1294, 144, 359]
    digits = load_digits()
    known = {(digits.images[i].tobytes(), str(digits.target[i])) for i in range(len(digits.images))}
    seen = [
        ((np.array(row["image"]) * 16 / 255).round().astype(float).tobytes(), row["label"])
        for part in parts.values()
        for row in part
    ]
    assert len(seen) == 1797 and set(seen) == known
    with pytest.raises(UserError, match=r"'data\.digits' must be two shares, such as \[0, 0\.8\], not \[0\.5, 0\.2\]"):
        load_split(DataRecipe(digits={"train": [0.5, 0.2]}), "train", ("image", "label"))


def test_moving_digits_move_by_a_pixel_a_frame():
    recipe = DataRecipe(moving_digits={"train": 60, "test": 3})
    videos = load_split(recipe, "train", ("video", "label"), seed=2)
    assert videos.to_dict() == load_split(recipe, "train", ("video", "label"), seed=2).to_dict()
    assert len(videos) == 60 and len(set(videos["label"])) > 20
    known = {np.array(row["image"]).tobytes(): row["label"] for row in load_written([0, 0.72])}
    for row in videos:
        digit, direction = row["label"].split()
        frames = np.array(row["video"])
        assert frames.shape == (8, 16, 16)
        for before, after in pairwise(frames):
            assert np.array_equal(np.roll(before, DIRECTIONS[direction], (0, 1)), after)
        corners = [(row, column) for row in range(9) for column in range(9)]
        seen = [known.get(frames[0, row : row + 8, column : column + 8].tobytes()) for row, column in corners]
        assert digit in seen
        assert frames[0].sum() == frames[-1].sum()  # it is never cut off
    with pytest.raises(UserError, match="split of moving digits 'tests' is unknown: did you mean 'test'"):
        load_split(DataRecipe(moving_digits={"tests": 3}), "tests", ("video", "label"))


def test_spoken_digits_are_split_by_their_numbers(tmp_path, monkeypatch):
    (tmp_path / "fsdd").mkdir()
    arrays = dict(
        audio=np.arange(6, dtype=np.int16), offsets=[0, 1, 3, 6], digit=[7, 8, 9], index=[0, 5, 4], speaker=[0, 1, 2]
    )
    np.savez(tmp_path / "fsdd" / "fsdd_8khz_int16.npz", **arrays)
    monkeypatch.setenv("TRIPTYCH_DATA", str(tmp_path))
    recipe = DataRecipe(spoken_digits={"train": [5, 49], "test": [0, 4]})
    assert load_split(recipe, "train", ("audio", "label")).to_dict() == {"audio": [[1, 2]], "label": ["8"]}
    assert load_split(recipe, "test", ("audio", "label")).to_dict() == {"audio": [[0], [3, 4, 5]], "label": ["7", "9"]}
    with pytest.raises(UserError, match=r"'data\.spoken_digits' must be two numbers, such as \[0, 4\], not \[4\]"):
        load_split(DataRecipe(spoken_digits={"train": [4]}), "train", ("audio", "label"))


def test_a_held_out_speaker_is_heard_in_tests_alone(tmp_path, monkeypatch):
    (tmp_path / "fsdd").mkdir()
    arrays = dict(audio=np.arange(4, dtype=np.int16), offsets=[0, 1, 2, 3, 4], digit=[5, 6, 7, 8])
    np.savez(tmp_path / "fsdd" / "fsdd_8khz_int16.npz", **arrays, index=[0, 0, 9, 9], speaker=[0, 1, 0, 1])
    monkeypatch.setenv("TRIPTYCH_DATA", str(tmp_path))
    whole = {"train": [0, 49], "validation": [9, 49], "test": [0, 49]}
    splits = DataRecipe(spoken_digits=whole, held_out_speaker=1)
    heard = {name: load_split(splits, name, ("audio", "label"))["label"][:] for name in whole}
    assert heard == {"train": ["5", "7"], "validation": ["7"], "test": ["6", "8"]}
    with pytest.raises(UserError, match=r"'data\.held_out_speaker' must be one of 0, 1, not 2"):
        load_split(DataRecipe(spoken_digits=whole, held_out_speaker=2), "test", ("audio", "label"))


def test_sequences_are_joined_of_short_recordings_of_their_split(tmp_path, monkeypatch):
    (tmp_path / "fsdd").mkdir()
    lengths = np.array([3, 4, 5, LONGEST + 1, 6])
    arrays = dict(
        audio=np.arange(lengths.sum()).astype(np.int16), offsets=[0, *lengths.cumsum()], digit=[1, 2, 3, 4, 5],
        index=[10, 20, 0, 30, 49], speaker=[0, 0, 0, 0, 0],
    )  # fmt: skip
    np.savez(tmp_path / "fsdd" / "fsdd_8khz_int16.npz", **arrays)
    monkeypatch.setenv("TRIPTYCH_DATA", str(tmp_path))
    recipe = DataRecipe(spoken_sequences={"train": 40})
    sequences = load_split(recipe, "train", ("audio", "target"), seed=3)
    audio, offsets = arrays["audio"].tolist(), arrays["offsets"]
    parts = {"1": audio[:3], "2": audio[3:7], "5": audio[offsets[4] :]}  # 3 is for tests, and 4 lasts too long
    for row in sequences:
        digits = row["target"].split()
        assert 2 <= len(digits) <= 4
        assert row["audio"] == [sample for digit in digits for sample in parts[digit]]
    assert len({len(row["target"]) for row in sequences}) == 3
    with pytest.raises(UserError, match="split of spoken sequences 'dev' is unknown"):
        load_split(DataRecipe(spoken_sequences={"dev": 2}), "dev", ("audio", "target"))


def test_a_batch_of_recordings_is_what_the_extractor_makes_of_each(folder, tmp_path, monkeypatch):
    """Frames, their mask and the order of what is written, for recordings of unequal lengths."""
    recipe = make_recipe(folder, tmp_path, "speech_to_text", "encoder_decoder")
    parts = build_parts(recipe, processes=1)
    model, tokenizer = parts.model.eval(), parts.tokenizer
    assert model.main_input_name == "input_features" and not model.config.share_embeddings
    examples = load_split(recipe.data, "validation", ("audio", "target"))
    paths = list(examples["audio"])
    options = dict(sampling_rate=8000, return_tensors="pt", return_attention_mask=True)
    alone = [parts.processor(recording_of(path), **options) for path in paths]
    batch = next(iter(parts.validation_loader))
    logits = model(**batch).logits
    for index, row, labels in zip(
        parts.validation_loader.batch_sampler.batches[0], logits, batch["labels"], strict=True
    ):
        expected = model(**alone[index], labels=labels[None]).logits[0]
        assert torch.allclose(row[labels != IGNORE], expected[labels != IGNORE], atol=1e-5)
    odd, even = tokenizer("no", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(
        model, "generate", lambda attention_mask, **_: torch.where(attention_mask.sum(1) % 2 == 1, odd, even)[:, None]
    )
    written = ["n" if inputs["attention_mask"].sum() % 2 == 1 else "o" for inputs in alone]
    assert transcribe(model, tokenizer, examples, recipe) == written


@pytest.mark.data
def test_the_official_test_has_three_hundred_recordings(data_folder, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_DATA", str(data_folder))
    recipe = load_recipe("spoken_digits")
    sizes = {name: len(load_split(recipe.data, name, ("audio", "label"))) for name in recipe.data.spoken_digits}
    assert sizes == {"train": 2400, "validation": 300, "test": 300}
