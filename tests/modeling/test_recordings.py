"""Recordings as frames of a spectrogram: what goes in, that pads are inert, and what is refused."""

import pytest
import torch
from tiny import SENSES, assert_equal, gradients, randomised, sense_inputs, tiny_config, tiny_model
from transformers import WhisperConfig, WhisperForConditionalGeneration

from triptych import (
    TriptychConfig,
    TriptychEncoderForAudioClassification,
    TriptychEncoderModel,
    TriptychForConditionalGeneration,
)

AUDIO = SENSES["audio"]
POSITIONS = ("sinusoidal", "learned", "rotary", "relative", "alibi", "none")
LENGTHS = (9, 4, 1, 7)

WHISPER_NAMES = {
    "encoder.conv1.": "encoder.embed_patches.convolutions.0.",
    "encoder.conv2.": "encoder.embed_patches.convolutions.1.",
    "encoder.layer_norm.": "encoder.norm.",
    "decoder.layer_norm.": "decoder.norm.",
    "self_attn_layer_norm.": "self_attn_norm.",
    "encoder_attn_layer_norm.": "cross_attn_norm.",
    "encoder_attn.": "cross_attn.",
    "final_layer_norm.": "mlp_norm.",
    ".out_proj.": ".o_proj.",
    ".fc1.": ".mlp.up_proj.",
    ".fc2.": ".mlp.down_proj.",
    "proj_out.": "lm_head.",
}


def ragged_recordings(bins: int = 6) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Recordings [M, F] of several lengths; a batch of them behind which stands noise, and its mask [B, F]."""
    recordings = [torch.randn(bins, length) for length in LENGTHS]
    batch, mask = torch.randn(len(LENGTHS), bins, 11), torch.zeros(len(LENGTHS), 11, dtype=torch.long)
    for row, recording in enumerate(recordings):
        batch[row, :, : recording.shape[1]], mask[row, : recording.shape[1]] = recording, 1
    return recordings, batch, mask


def test_a_whole_whisper():
    """Radford et al. 2023: with their weights, their encoder states, logits and loss."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=97, num_mel_bins=6, d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=53, decoder_ffn_dim=55, max_source_positions=7,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, init_std=0.2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    theirs = randomised(WhisperForConditionalGeneration(config)).eval()
    both = dict(
        hidden_size=32, norm_position="pre", hidden_act="gelu", attention_bias="qvo", scale_embedding=False,
        position_embedding_type="learned", hidden_dropout=0.0,
    )  # fmt: skip
    encoder = dict(
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=53, max_position_embeddings=7, class_token=False
    )
    decoder = dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=55, max_position_embeddings=20)
    ours = TriptychForConditionalGeneration(
        TriptychConfig(vocab_size=97, encoder={**both, **encoder, **AUDIO}, decoder={**both, **decoder})
    ).eval()
    weights = {}
    for name, tensor in theirs.state_dict().items():
        for their_name, our_name in WHISPER_NAMES.items():
            name = name.replace(their_name, our_name)
        weights[name] = tensor
    ours.load_state_dict(weights)
    features, tokens = torch.randn(3, 6, 14), torch.randint(3, 97, (3, 5))
    expected = theirs(input_features=features, decoder_input_ids=tokens, labels=tokens)
    actual = ours(input_features=features, decoder_input_ids=tokens, labels=tokens)
    assert_equal(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    assert_equal(actual.logits, expected.logits)
    assert_equal(actual.loss, expected.loss)


@pytest.mark.parametrize("strides", [[1], [1, 2], [2, 2], [3, 1, 2]])
@pytest.mark.parametrize("class_token", [True, False])
def test_a_recording_is_the_same_in_any_batch(strides, class_token):
    """A convolution at the end of a recording that sees the pads behind it."""
    changes = {**AUDIO, "conv_stride": strides, "class_token": class_token, "scale_embedding": False}
    model = tiny_model(TriptychEncoderModel, **changes, pooling="mean")
    recordings, batch, mask = ragged_recordings()
    together = model(input_features=batch, attention_mask=mask)
    for row, recording in enumerate(recordings):
        alone = model(input_features=recording[None])
        length = alone.last_hidden_state.shape[1]
        assert length == class_token + -(-recording.shape[1] // torch.tensor(strides).prod())
        assert_equal(together.last_hidden_state[row, :length], alone.last_hidden_state[0])
        assert_equal(together.pooler_output[row], alone.pooler_output[0])


@pytest.mark.parametrize("positions", POSITIONS)
def test_pads_are_inert_for_every_position_type(positions):
    model = tiny_model(TriptychEncoderForAudioClassification, position_embedding_type=positions, **AUDIO)
    recordings, batch, mask = ragged_recordings()
    labels = torch.tensor([0, 1, 1, 0])
    together = model(input_features=batch, attention_mask=mask, labels=labels)
    alone = [model(recording[None]).logits[0] for recording in recordings]
    assert_equal(together.logits, torch.stack(alone))
    expected = gradients(model, together.loss)
    noise = torch.where(mask[:, None].bool(), batch, torch.full_like(batch, torch.nan))
    loss = model(input_features=noise, attention_mask=mask, labels=labels).loss
    for name, gradient in gradients(model, loss).items():
        assert_equal(gradient, expected[name], what=name)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("is_static", [False, True])
def test_generated_texts_are_those_of_each_recording_alone(beams, is_static):
    """The decoder looks at pads of frames, whose mask is not one of tokens."""
    model = tiny_model(TriptychForConditionalGeneration, encoder=AUDIO)
    recordings, batch, mask = ragged_recordings()
    options = dict(max_new_tokens=8, num_beams=beams, do_sample=False, eos_token_id=None, repetition_penalty=1.3)
    options |= dict(cache_implementation="static", disable_compile=True) if is_static else {}
    together = model.generate(input_features=batch, attention_mask=mask, **options)
    for row, recording in enumerate(recordings):
        assert together[row].tolist() == model.generate(input_features=recording[None], **options)[0].tolist()
    assert len({tuple(text) for text in together.tolist()}) > 1, "all texts are the same: the comparison says little"
    assert torch.equal(together, model.generate(input_features=batch, attention_mask=mask, use_cache=False, **options))


@pytest.mark.parametrize("sense", ["image", "video"])
def test_texts_are_generated_of_images_and_videos(sense):
    model = tiny_model(TriptychForConditionalGeneration, encoder=SENSES[sense])
    inputs = sense_inputs(model.config.encoder, batch_size=3)
    assert model.main_input_name == "pixel_values" and model.get_input_embeddings() is model.model.decoder.embed_tokens
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    texts = model.generate(**inputs, **options)
    tokens = torch.full((3, 1), model.config.decoder_start_token_id)
    for _ in range(6):  # greedily by hand, without a cache
        logits = model(**inputs, decoder_input_ids=tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(texts, tokens)
    prompt = torch.tensor([[1, 9]]).expand(3, -1)
    assert torch.equal(model.generate(**inputs, input_ids=prompt, **options)[:, :2], prompt)


def test_the_vocabulary_of_a_transcriber_grows():
    """There is one table, that of the target, though it is not shared."""
    model = tiny_model(TriptychForConditionalGeneration, encoder=AUDIO)
    model.resize_token_embeddings(100)
    inputs = sense_inputs(model.config.encoder)
    assert model(**inputs, decoder_input_ids=torch.tensor([[99], [98]])).logits.shape == (2, 1, 100)


def test_bad_input():
    model = TriptychEncoderForAudioClassification(tiny_config("encoder", **AUDIO))
    for shape in ([2, 9, 6], [2, 6, 0], [6, 9], [0, 6, 9]):
        with pytest.raises(
            ValueError, match=r"`input_features` has shape .* of recordings \[6, F\] of at least one frame"
        ):
            model(torch.zeros(shape))
    features = torch.zeros(2, 6, 4)
    for mask, sentence in (
        (
            [[1, 1, 1], [1, 1, 1]],
            r"`attention_mask` has shape \[2, 3\], but must be \[2, 4\], of recordings and their frames",
        ),
        ([[1, 1, 1, 1], [0, 1, 1, 1]], "`attention_mask` begins with a pad in row 1, but a recording must begin with"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "`attention_mask` begins with a pad in row 1"),  # an empty recording
        (
            [[1, 1, 0, 1], [1, 1, 1, 1]],
            "`attention_mask` has pads between frames, but recordings are padded at their ends",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(features, attention_mask=torch.tensor(mask))
    learned = tiny_config("encoder", position_embedding_type="learned", max_position_embeddings=3, **AUDIO)
    with pytest.raises(
        ValueError, match=r"`position_ids` has 3 .*but must be from 0 to 2, as `max_position_embeddings` is 3"
    ):
        TriptychEncoderModel(learned)(input_features=torch.zeros(1, 6, 5))
    with pytest.raises(ValueError, match="`input_type` is 'text', but TriptychEncoderForAudioClassification reads"):
        TriptychEncoderForAudioClassification(tiny_config("encoder"))
    with pytest.raises(
        ValueError, match="`pixel_values` are given, but `input_type` is 'audio', read from `input_features`"
    ):
        TriptychEncoderModel(tiny_config("encoder", **AUDIO))(pixel_values=torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_mel_bins": 0}, "`num_mel_bins` is 0, but must be at least 1"),
        ({"conv_stride": []}, r"`conv_stride` is \[\], but must be one or more numbers of at least 1"),
        ({"conv_stride": [2, 0]}, r"`conv_stride` is \[2, 0\]"),
    ],
)
def test_impossible_recordings_are_refused(changes, sentence):
    with pytest.raises(Exception, match=sentence):
        TriptychConfig(topology="encoder", **{**AUDIO, **changes})
