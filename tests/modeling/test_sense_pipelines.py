"""transformers' processors stand beside a saved model and are found there, and its pipelines take both by a folder."""

import numpy
import pytest
import torch
from PIL import Image
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    GitProcessor,
    PreTrainedTokenizerFast,
    VideoMAEImageProcessorPil,
    ViTImageProcessorPil,
    WhisperFeatureExtractor,
    pipeline,
)

from triptych import (
    TriptychEncoderForAudioClassification,
    TriptychEncoderForImageClassification,
    TriptychEncoderForVideoClassification,
    TriptychForConditionalGeneration,
)

SIZE = {"height": 8, "width": 12}
IMAGES = dict(input_type="image", image_size=[8, 12], patch_size=4)
AUDIO = dict(input_type="audio", num_mel_bins=12)
GREEDY = dict(max_new_tokens=6, num_beams=1, do_sample=False)


def image() -> Image.Image:
    return Image.fromarray(numpy.random.randint(0, 256, (30, 20, 3), dtype=numpy.uint8))


def recording(samples: int = 3000) -> numpy.ndarray:
    return numpy.random.randn(samples).astype(numpy.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number below 97, and three special tokens."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{str(n): n for n in range(3, 97)}}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def feature_extractor() -> WhisperFeatureExtractor:
    """Features of one second, in frames of ten milliseconds."""
    return WhisperFeatureExtractor(feature_size=12, sampling_rate=8000, hop_length=80, n_fft=256, chunk_length=1)


def assert_scores(answer: list[dict], logits: torch.Tensor):
    expected = logits.softmax(-1)[0]
    assert len(answer) == len(expected)
    for entry in answer:
        assert entry["score"] == pytest.approx(expected[int(entry["label"].removeprefix("LABEL_"))].item(), abs=1e-6)


def test_image_classification(tmp_path):
    model = tiny_model(TriptychEncoderForImageClassification, num_labels=4, **IMAGES)
    for part in (model, ViTImageProcessorPil(size=SIZE)):
        part.save_pretrained(tmp_path)
    picture = image()
    inputs = AutoImageProcessor.from_pretrained(tmp_path)(picture, return_tensors="pt")
    assert_scores(pipeline("image-classification", str(tmp_path))(picture), model(**inputs).logits)


def test_audio_classification(tmp_path):
    """Behind a recording stand pads, which to Whisper's extractor are silence."""
    model = tiny_model(TriptychEncoderForAudioClassification, num_labels=4, **AUDIO)
    for part in (model, feature_extractor()):
        part.save_pretrained(tmp_path)
    sound = recording()
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path)
    inputs = extractor(sound, sampling_rate=8000, return_tensors="pt")
    assert inputs["input_features"].shape == (1, 12, 100)
    assert_scores(pipeline("audio-classification", str(tmp_path))(sound), model(**inputs).logits)
    with pytest.raises(ValueError, match=r"a sampling rate of 8000.* and not 16000"):
        extractor(sound, sampling_rate=16000)


def test_automatic_speech_recognition(tmp_path):
    model = tiny_model(TriptychForConditionalGeneration, encoder=AUDIO)
    for part in (model, feature_extractor(), tokenizer()):
        part.save_pretrained(tmp_path)
    sound = recording()
    inputs = feature_extractor()(sound, sampling_rate=8000, return_tensors="pt", return_attention_mask=True)
    assert inputs["attention_mask"].sum() == 38  # of 100 frames
    expected = tokenizer().decode(model.generate(**inputs, **GREEDY)[0], skip_special_tokens=True)
    recogniser = pipeline("automatic-speech-recognition", str(tmp_path))
    assert expected and recogniser(sound, generate_kwargs=GREEDY)["text"] == expected
    assert recogniser([sound, sound], batch_size=2, generate_kwargs=GREEDY)[1]["text"] == expected


def test_image_to_text(tmp_path):
    model = tiny_model(TriptychForConditionalGeneration, encoder=IMAGES)
    model.save_pretrained(tmp_path)
    GitProcessor(image_processor=ViTImageProcessorPil(size=SIZE), tokenizer=tokenizer()).save_pretrained(tmp_path)
    picture = image()
    pixels = AutoProcessor.from_pretrained(tmp_path)(images=picture, return_tensors="pt")["pixel_values"]
    prompt = torch.tensor([[1, 5]])
    expected = tokenizer().decode(model.generate(pixel_values=pixels, decoder_input_ids=prompt, **GREEDY)[0, 2:])
    writer = pipeline("image-text-to-text", str(tmp_path))
    answer = writer(images=picture, text="<s> 5", generate_kwargs=GREEDY, return_full_text=False)
    assert expected and answer[0]["generated_text"].strip() == expected
    # Of two beginnings in one batch, the shorter is padded on the left.
    writer.processor.tokenizer.padding_side = "left"
    answers = writer(images=[picture] * 2, text=["<s> 5", "<s> 5 6 7"], generate_kwargs=GREEDY, return_full_text=False)
    assert answers[0]["generated_text"].strip() == expected


def test_video_processor(tmp_path):
    """transformers' pipeline for videos reads files by another package; the processor makes what the model takes."""
    model = tiny_model(
        TriptychEncoderForVideoClassification, num_labels=4, **{**IMAGES, "input_type": "video"}, num_frames=4
    )
    for part in (model, VideoMAEImageProcessorPil(size=SIZE, do_center_crop=False)):
        part.save_pretrained(tmp_path)
    inputs = AutoImageProcessor.from_pretrained(tmp_path)([image() for _ in range(4)], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 4, 3, 8, 12)
    assert model(**inputs).logits.shape == (1, 4)
