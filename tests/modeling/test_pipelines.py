"""`transformers.pipeline` gives what a call by hand gives, in tasks of encoder-decoders and in the library's own."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from PIL import Image
from tiny import assert_equal, tiny_model
from tokenizers.processors import Sequence
from transformers import BartConfig, BartForConditionalGeneration, ViTImageProcessor, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import triptych
from triptych.pipelines import RESULT_NAMES, register_pipelines
from triptych.training.tokenization import MASK, train_tokenizer

TEXTS = ["a cat sat on the mat", "the dog", "no one saw the cat that ran to the dog"]
SEARCHES = [{}, {"num_beams": 3}, {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2}]
WITHOUT_PACKAGE = Path(__file__).with_name("translate_without_package.py")


def tokenizer_for(topology, **extra):
    return train_tokenizer(TEXTS, "bpe", 300, topology, **extra)


def model_for(head, tokenizer, **changes):
    """A tiny head in eval mode that knows the tokenizer's ids."""
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return tiny_model(head, vocab_size=len(tokenizer), **ids, **changes)


def translator(**changes):
    """A tokenizer, a tiny encoder-decoder, and their pipeline of six new tokens."""
    tokenizer = tokenizer_for("encoder_decoder")
    model = model_for("encoder_decoder", tokenizer, **changes)
    return tokenizer, model, pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6)


def written_by_hand(model, tokenizer, texts, **options):
    """What `generate()` writes for each text alone: one list of texts for each."""
    return [
        tokenizer.batch_decode(
            model.generate(**tokenizer(text, return_tensors="pt"), **options), skip_special_tokens=True
        )
        for text in texts
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Encoder-decoders


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams", "penalties"])
@pytest.mark.parametrize("task", RESULT_NAMES)
def test_text_to_text_is_what_generate_writes(task, search):
    """Alone, in a list and in ragged batches, padded on either side."""
    tokenizer, model, _ = translator()
    key = {"translation": "translation_text", "summarization": "summary_text"}.get(task, "generated_text")
    options = {"max_new_tokens": 6, **search}
    expected = [{key: texts[0]} for texts in written_by_hand(model, tokenizer, TEXTS, **options)]
    assert len({text[key] for text in expected}) > 1
    at_call = pipeline(task, model=model, tokenizer=tokenizer)
    at_construction = pipeline(task, model=model, tokenizer=tokenizer, **options)
    assert [at_call(text, **options) for text in TEXTS] == [[text] for text in expected]
    assert at_construction(TEXTS) == at_construction(tuple(TEXTS)) == expected
    for tokenizer.padding_side in ("right", "left"):
        assert at_call(TEXTS, batch_size=2, **options) == expected
        assert at_construction(TEXTS, batch_size=3) == expected
    assert list(at_construction(iter_texts())) == [[text] for text in expected]


def iter_texts():
    yield from TEXTS


def test_several_sequences_are_a_list_for_each_text():
    tokenizer, model, pipe = translator()
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = written_by_hand(model, tokenizer, TEXTS, max_new_tokens=6, **options)
    expected = [[{"translation_text": text} for text in texts] for texts in expected]
    assert pipe(TEXTS, batch_size=2, **options) == expected
    assert pipe(TEXTS[0], **options) == expected[0]


def test_tokens_in_the_place_of_text():
    tokenizer, model, pipe = translator()
    expected = model.generate(**tokenizer(TEXTS[1], return_tensors="pt"), max_new_tokens=6)[0]
    (single,) = pipe(TEXTS[1], return_tensors=True)
    assert single.keys() == {"translation_token_ids"}
    assert torch.equal(single["translation_token_ids"], expected)
    assert len(pipe(TEXTS, batch_size=3, return_tensors=True)) == 3


def test_spaces_are_cleaned_up_on_request(monkeypatch):
    """As the tokenizer's `decode` does; transformers leaves byte pairs alone."""
    _, model, pipe = translator()
    pipe.tokenizer = train_tokenizer(["well , he said ."], "word", 10)
    written = pipe.tokenizer("well , he said .", return_tensors="pt")["input_ids"]
    monkeypatch.setattr(model, "generate", lambda **inputs: written)
    assert pipe("any")[0]["translation_text"] == "well , he said ."
    assert pipe("any", clean_up_tokenization_spaces=True)[0]["translation_text"] == "well, he said."


def test_what_else_generate_takes():
    """A configuration, strings to stop at, a dictionary of results, and a model that drafts."""
    tokenizer, model, pipe = translator()
    plain = pipe(TEXTS)
    assert pipe(TEXTS, return_dict_in_generate=True, output_scores=True) == plain
    assert pipe(TEXTS, generation_config=transformers.GenerationConfig(max_new_tokens=6)) == plain
    source, text = next(
        (source, result["translation_text"])
        for source, result in zip(TEXTS, plain, strict=True)
        if result["translation_text"].isascii()
    )
    assert pipe(source, stop_strings=[text[:2]]) == [{"translation_text": text[:2]}]
    drafted = pipeline("translation", model=model, tokenizer=tokenizer, assistant_model=model, max_new_tokens=6)
    assert [drafted(text)[0] for text in TEXTS] == plain


def test_a_prefix_stands_before_every_text():
    tokenizer, model, _ = translator()
    model.config.prefix = "to German: "
    pipe = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6)
    expected = written_by_hand(model, tokenizer, ["to German: " + text for text in TEXTS], max_new_tokens=6)
    assert pipe(TEXTS) == [{"translation_text": texts[0]} for texts in expected]


def test_other_models_of_transformers_are_served(tmp_path):
    """From a folder, as the Auto classes load it."""
    tokenizer = tokenizer_for("encoder_decoder")
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None)
    config = BartConfig(vocab_size=len(tokenizer), encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.2, **sizes, **ids)
    model = BartForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("summarization", model=str(tmp_path), max_new_tokens=6)
    expected = written_by_hand(model, tokenizer, TEXTS, max_new_tokens=6)
    assert pipe(TEXTS, batch_size=3) == [{"summary_text": texts[0]} for texts in expected]


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be read


LIMITS = {
    "positions": (dict(position_embedding_type="learned", max_position_embeddings=12), None, "max_position_embeddings"),
    "tokenizer": ({}, 12, "tokenizer.model_max_length"),
    "both": (dict(position_embedding_type="learned", max_position_embeddings=12), 30, "max_position_embeddings"),
}


@pytest.mark.parametrize("changes, model_max_length, name", LIMITS.values(), ids=LIMITS)
def test_a_text_that_is_too_long_is_refused_or_cut(changes, model_max_length, name):
    tokenizer, model, pipe = translator(**changes)
    if model_max_length:
        tokenizer.model_max_length = model_max_length
    long = " ".join(TEXTS)
    ids = tokenizer(long)["input_ids"]
    for texts in (long, [*TEXTS, long]):
        with pytest.raises(ValueError) as error:
            pipe(texts, batch_size=3)
        assert f"The text has {len(ids)} tokens, but the model reads at most" in str(error.value)
        assert f"{name}` = 12; `truncation=True` cuts it." in str(error.value)
        assert "\n" not in str(error.value)
    cut = torch.tensor([[*ids[:11], tokenizer.eos_token_id]])
    expected = tokenizer.decode(model.generate(cut, max_new_tokens=6)[0], skip_special_tokens=True)
    assert pipe(long, truncation=True)[0]["translation_text"] == expected
    cutting = pipeline("translation", model=model, tokenizer=tokenizer, max_new_tokens=6, truncation=True)
    assert cutting([*TEXTS, long], batch_size=4) == [*pipe(TEXTS), {"translation_text": expected}]


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative", "alibi"])
def test_positions_without_a_table_have_no_limit(positions):
    tokenizer, model, pipe = translator(position_embedding_type=positions, max_position_embeddings=12)
    long = " ".join(TEXTS)
    expected = [{"translation_text": texts[0]} for texts in written_by_hand(model, tokenizer, [long], max_new_tokens=6)]
    assert pipe(long) == pipe(long, truncation=True) == expected


def test_nothing_to_read():
    tokenizer, model, pipe = translator()
    assert pipe([]) == pipe(()) == []
    expected = model.generate(torch.tensor([[tokenizer.eos_token_id]]), max_new_tokens=6)[0]
    assert pipe("") == [{"translation_text": tokenizer.decode(expected, skip_special_tokens=True)}]
    tokenizer.backend_tokenizer.post_processor = Sequence([])  # no end of text either
    for texts in ("", ["a", ""]):
        with pytest.raises(ValueError, match="The text '' has no token, but must have at least one"):
            pipe(texts, batch_size=2)


@pytest.mark.parametrize("wrong", [None, 5, [1], {"text": "a"}])
def test_what_is_no_text_is_refused(wrong):
    _, _, pipe = translator()
    with pytest.raises(ValueError, match=r"The input is .*, but must be a text or a list of texts"):
        pipe(wrong)


# ---------------------------------------------------------------------------------------------------------------------
# The library's own tasks


@pytest.fixture
def quiet(caplog):
    """Pipelines find nothing wrong with the model, such as that they do not know its class."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def logits_by_hand(model, tokenizer, *texts):
    return model(**tokenizer(*texts, return_tensors="pt")).logits


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beams", "penalties"])
def test_text_generation(quiet, search):
    tokenizer = tokenizer_for("decoder")
    model = model_for("decoder", tokenizer)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=6, do_sample=False)
    expected = [texts[0] for texts in written_by_hand(model, tokenizer, TEXTS, max_new_tokens=6, **search)]
    for batch_size in (1, 3):
        written = pipe(TEXTS, batch_size=batch_size, **search)
        assert [texts[0]["generated_text"] for texts in written] == expected


NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
CLASSIFIERS = [
    triptych.TriptychEncoderForSequenceClassification,
    triptych.TriptychDecoderForSequenceClassification,
]


@pytest.mark.parametrize("head", CLASSIFIERS)
def test_text_classification(quiet, head):
    tokenizer = tokenizer_for(head.config_class.topology)
    model = model_for(head, tokenizer, id2label={0: "cat", 1: "dog", 2: "mat"})
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    for batch_size in (1, 3):
        for text, answers in zip(TEXTS, pipe(TEXTS, batch_size=batch_size), strict=True):
            scores = {answer["label"]: answer["score"] for answer in answers}
            expected = logits_by_hand(model, tokenizer, text).softmax(-1)[0]
            assert [scores[label] for label in ("cat", "dog", "mat")] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("head", CLASSIFIERS)
def test_zero_shot_classification(quiet, head):
    """A label's score is the softmax, over the labels, of the entailment logits."""
    tokenizer = tokenizer_for(head.config_class.topology)
    model = model_for(head, tokenizer, id2label=NLI, label2id={name: index for index, name in NLI.items()})
    pipe = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
    labels = ["cat", "dog", "the mat"]
    for batch_size in (1, 3):
        for text, answer in zip(TEXTS, pipe(TEXTS, labels, batch_size=batch_size), strict=True):
            pairs = [logits_by_hand(model, tokenizer, text, f"This example is {label}.")[0, 2] for label in labels]
            expected = dict(zip(labels, torch.stack(pairs).softmax(0).tolist(), strict=True))
            assert dict(zip(answer["labels"], answer["scores"], strict=True)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "head", [triptych.TriptychEncoderForTokenClassification, triptych.TriptychDecoderForTokenClassification]
)
def test_token_classification(quiet, head):
    tokenizer = tokenizer_for(head.config_class.topology)
    model = model_for(head, tokenizer, id2label={0: "X", 1: "Y", 2: "Z"})
    pipe = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])
    for batch_size in (1, 3):
        for text, tokens in zip(TEXTS, pipe(TEXTS, batch_size=batch_size), strict=True):
            special = tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
            expected = logits_by_hand(model, tokenizer, text).softmax(-1)[0][~torch.tensor(special).bool()]
            assert [token["entity"] for token in tokens] == ["XYZ"[index] for index in expected.argmax(-1)]
            scores = torch.tensor([float(token["score"]) for token in tokens])
            assert_equal(scores, expected.max(-1).values)


def test_fill_mask(quiet):
    tokenizer = tokenizer_for("encoder", extra_tokens=[MASK])
    tokenizer.backend_tokenizer.encode_special_tokens = False
    tokenizer.split_special_tokens = False
    model = model_for("encoder", tokenizer)
    texts = [f"a {MASK} sat", f"the dog that ran to the {MASK}"]
    pipe = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=5)
    for batch_size in (1, 2):
        for text, answers in zip(texts, pipe(texts, batch_size=batch_size), strict=True):
            place = tokenizer(text)["input_ids"].index(tokenizer.mask_token_id)
            expected = logits_by_hand(model, tokenizer, text)[0, place].softmax(-1).topk(5)
            assert [answer["token"] for answer in answers] == expected.indices.tolist()
            assert [answer["score"] for answer in answers] == pytest.approx(expected.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("head", [triptych.TriptychEncoderModel, triptych.TriptychDecoderModel])
def test_feature_extraction(quiet, head):
    tokenizer = tokenizer_for(head.config_class.topology)
    model = model_for(head, tokenizer)
    pipe = pipeline("feature-extraction", model=model, tokenizer=tokenizer, return_tensors=True)
    for text, states in zip(TEXTS, pipe(TEXTS), strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        assert_equal(states, expected)


def test_image_classification(quiet):
    images = [numpy.random.randint(0, 256, (height, 20, 3), dtype=numpy.uint8) for height in (8, 30)]
    images = [Image.fromarray(image) for image in images]
    sizes = dict(input_type="image", image_size=[8, 12], patch_size=4, position_embedding_type="learned")
    model = tiny_model(triptych.TriptychEncoderForImageClassification, id2label={0: "cat", 1: "dog"}, **sizes)
    processor = ViTImageProcessor(size={"height": 8, "width": 12})
    pipe = pipeline("image-classification", model=model, image_processor=processor)
    for batch_size in (1, 2):
        for image, answers in zip(images, pipe(images, batch_size=batch_size), strict=True):
            expected = model(**processor(image, return_tensors="pt")).logits.softmax(-1)[0]
            scores = {answer["label"]: answer["score"] for answer in answers}
            assert [scores["cat"], scores["dog"]] == pytest.approx(expected.tolist(), abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Registration and code


def test_registered_once_and_politely(monkeypatch, quiet):
    mine = {"impl": object, "pt": ()}
    monkeypatch.setitem(PIPELINE_REGISTRY.supported_tasks, "translation", mine)
    register_pipelines()
    assert PIPELINE_REGISTRY.supported_tasks["translation"] is mine
    assert set(RESULT_NAMES) <= set(PIPELINE_REGISTRY.get_supported_tasks())


def test_saved_pipeline_is_loaded(tmp_path):
    """Without code, unless it is asked for."""
    _, _, pipe = translator()
    pipe.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    again = pipeline("translation", model=str(tmp_path), max_new_tokens=6)
    assert again(TEXTS) == pipe(TEXTS)


def test_folder_with_code_translates_without_the_package(tmp_path):
    _, model, pipe = translator()
    pipe.save_pretrained(tmp_path / "translator", with_code=True)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(WITHOUT_PACKAGE), "translator", *TEXTS]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout) == [text["translation_text"] for text in pipe(TEXTS)]
    assert model.config.custom_pipelines
    model.save_pretrained(tmp_path / "plain", with_code=False)
    assert "custom_pipelines" not in (tmp_path / "plain" / "config.json").read_text()
