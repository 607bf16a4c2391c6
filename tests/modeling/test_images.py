"""Images as patches: what goes in, where patches stand, what is refused, and that it learns."""

import pytest
import torch
from sklearn.datasets import load_digits
from tiny import IMAGES as TINY_IMAGES
from tiny import SENSES, assert_equal, randomised, sense_inputs, tiny_config, tiny_model
from torch.nn import functional as F
from transformers import (
    ASTConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    ViTConfig,
    ViTMAEConfig,
    ViTModel,
)
from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import ASTEmbeddings
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEEmbeddings

import triptych
from triptych import (
    TriptychConfig,
    TriptychEncoderForImageClassification,
    TriptychEncoderForMaskedImageModeling,
    TriptychEncoderForSequenceClassification,
    TriptychEncoderModel,
    TriptychForMaskedLM,
)

IMAGES = {**TINY_IMAGES, "scale_embedding": False}
AXIAL = {"rope_type": "default", "rope_theta": 100.0}


def test_patches_are_read_row_by_row_behind_the_class_token():
    config = tiny_config("encoder", position_embedding_type="learned", **IMAGES)
    assert config.max_position_embeddings == 1 + 2 * 4
    model = randomised(TriptychEncoderModel(config)).eval()
    images = torch.randn(2, 2, 8, 12)
    patches = model.embed_patches(images)
    weight, bias = model.embed_patches.projection.weight.flatten(1), model.embed_patches.projection.bias
    assert_equal(patches[:, 0], model.embed_patches.class_token[:, 0].expand(2, -1))
    for row in range(2):
        for column in range(4):
            pixels = images[:, :, 4 * row : 4 * row + 4, 3 * column : 3 * column + 3].flatten(1)
            assert_equal(patches[:, 1 + 4 * row + column], pixels @ weight.T + bias)
    assert_equal(model(pixel_values=images).last_hidden_state, model(inputs_embeds=patches).last_hidden_state)
    assert model.get_input_embeddings() is model.embed_patches


def test_another_size_is_interpolated_as_in_vit():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=36, intermediate_size=53, num_hidden_layers=2, num_attention_heads=6, initializer_range=0.2,
        image_size=12, patch_size=4, num_channels=2,
    )  # fmt: skip
    theirs = ViTModel(config).eval()
    ours = triptych.import_model(theirs)
    for height, width in ((12, 12), (20, 20), (8, 24), (4, 4), (24, 12)):
        images = torch.randn(2, 2, height, width)
        expected = theirs(images, interpolate_pos_encoding=True)
        actual = ours(pixel_values=images, interpolate_pos_encoding=True)
        assert_equal(actual.last_hidden_state, expected.last_hidden_state, what=f"{height} x {width}")
        assert_equal(actual.pooler_output, expected.pooler_output)


def test_overlapping_patches_are_those_of_ast():
    """Gong et al. 2021: a spectrogram is an image of mel bins by frames, and patches overlap by six."""
    theirs = ASTEmbeddings(
        ASTConfig(hidden_size=32, num_mel_bins=24, max_length=44, patch_size=16, frequency_stride=8, time_stride=7)
    )
    config = tiny_config(
        "encoder", input_type="image", image_size=[24, 44], patch_size=16, patch_stride=[8, 7], num_channels=1
    )
    ours = randomised(TriptychEncoderModel(config)).embed_patches
    assert config.grid == (2, 5) and config.max_position_embeddings == 11
    theirs.patch_embeddings.projection.load_state_dict(ours.projection.state_dict())
    spectrograms = torch.randn(3, 44, 24)
    expected = theirs.patch_embeddings(spectrograms)
    assert_equal(ours(spectrograms.transpose(1, 2)[:, None])[:, 1:], expected)


def test_sinusoids_of_two_axes_are_those_of_mae():
    config = tiny_config("encoder", sinusoidal_layout="concatenated", **IMAGES)
    model = TriptychEncoderModel(config)
    theirs = ViTMAEEmbeddings(ViTMAEConfig(hidden_size=32, image_size=16, patch_size=4))
    theirs.initialize_weights()
    assert_equal(model.positions(torch.arange(17)[None], (4, 4)), theirs.position_embeddings)
    states = torch.zeros(1, 9, 32)
    assert_equal(model.add_positions(states, torch.arange(9)[None], None)[0, 0], torch.zeros(32))


def test_rotations_of_two_axes_are_those_of_rope_vit():
    """Heo et al. 2024, section 3.2: half of the dimensions turn with the column, half with the row, and the class token
    does not turn."""
    model = TriptychEncoderModel(
        tiny_config("encoder", position_embedding_type="rotary", rope_parameters=AXIAL, **IMAGES)
    )
    cos, sin = model.rotary_emb["full_attention"](torch.zeros(1), model.coordinates(torch.arange(9)[None], (2, 4)))
    angles = torch.atan2(sin, cos)[0]  # [9, 8]: four pairs, of which each angle is there twice
    frequencies = torch.tensor([1.0, 100**-0.5])
    assert_equal(angles[0], torch.zeros(8))
    for patch in range(8):
        row, column = divmod(patch, 4)
        expected = torch.cat((column * frequencies, row * frequencies))
        assert_equal(angles[1 + patch], expected.repeat(2))


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative", "learned"])
def test_a_masked_patch_leaves_the_others_where_they_are(positions):
    """Texts without their pads close up; images do not."""
    model = tiny_model(TriptychEncoderModel, position_embedding_type=positions, **IMAGES)
    images = torch.randn(2, 2, 8, 12)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, [2, 3, 7]] = 0
    actual = model(pixel_values=images, attention_mask=mask).last_hidden_state
    seen = mask[:, None, None].bool().expand(-1, 1, 9, -1)
    expected = model(pixel_values=images, attention_mask=seen).last_hidden_state
    assert_equal(actual[mask.bool()], expected[mask.bool()])


def test_an_order_of_prediction_leaves_patches_where_they_are():
    model = tiny_model(TriptychEncoderModel, position_embedding_type="learned", **IMAGES)
    images, hidden = torch.randn(2, 2, 8, 12), torch.rand(2, 9, 9) < 0.3
    actual = model(pixel_values=images, perm_mask=hidden).last_hidden_state
    seen = ~hidden | torch.eye(9, dtype=torch.bool)
    assert_equal(actual, model(pixel_values=images, attention_mask=seen[:, None]).last_hidden_state)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "none"])
def test_other_sizes_of_uninterpolated_positions(positions):
    """The upper left corner of a larger image has the positions that it has alone."""
    config = tiny_config("encoder", position_embedding_type=positions, **IMAGES)
    model = TriptychEncoderModel(config).eval()
    image = torch.randn(1, 2, 16, 18)
    whole = model(pixel_values=image, interpolate_pos_encoding=True, attention_mask=corner(1 + 4 * 6, 6))
    alone = model(pixel_values=image[:, :, :8, :12])
    assert_equal(whole.last_hidden_state[:, corner(1 + 4 * 6, 6)[0].bool()], alone.last_hidden_state)


def corner(length: int, columns: int) -> torch.Tensor:
    """A mask [1, 1 + N] of the class token and of 2 x 4 patches in the upper left corner."""
    patches = torch.arange(length) - 1
    return ((patches < 0) | ((patches // columns < 2) & (patches % columns < 4)))[None].long()


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative", "alibi", "none"])
def test_every_position_type_reads_images(positions):
    model = TriptychEncoderModel(tiny_config("encoder", position_embedding_type=positions, class_token=False, **IMAGES))
    assert model(pixel_values=torch.randn(1, 2, 8, 12)).last_hidden_state.shape == (1, 8, 32)


@pytest.mark.parametrize("sense", SENSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_inputs_of_any_precision(sense, dtype):
    """Processors give float32, or bytes, whatever the precision of the model."""
    model = tiny_model(TriptychEncoderModel, position_embedding_type="learned", **SENSES[sense]).to(dtype)
    name, values = next(iter(sense_inputs(model.config).items()))
    expected = model(**{name: values.to(dtype)}).last_hidden_state
    for given in (values.to(dtype).float(), values.to(dtype).double()):
        assert torch.equal(model(**{name: given}).last_hidden_state, expected)
    values = values.abs().to(torch.uint8)
    assert torch.equal(model(**{name: values})[0], model(**{name: values.to(dtype)})[0])


def test_bad_input():
    config = tiny_config("encoder", position_embedding_type="learned", **IMAGES)
    model = TriptychEncoderModel(config)
    for shape in ([1, 2, 8, 8], [1, 3, 8, 12], [0, 2, 8, 12], [2, 8, 12]):
        with pytest.raises(ValueError, match=r"`pixel_values` has shape .* must be a batch of images \[2, 8, 12\]"):
            model(pixel_values=torch.zeros(shape))
    for shape in ([1, 2, 8, 13], [1, 2, 3, 12], [1, 3, 8, 12]):
        with pytest.raises(
            ValueError, match=r"shape .* \[2, H, W\], where patches of \[4, 3\] at every \[4, 3\] cover all"
        ):
            model(pixel_values=torch.zeros(shape), interpolate_pos_encoding=True)
    with pytest.raises(
        ValueError, match="`input_features` are given, but `input_type` is 'image', read from `pixel_values`"
    ):
        model(input_features=torch.zeros(1, 80, 4))
    with pytest.raises(ValueError, match="this stack has no table of its own"):
        model(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="Exactly one of `pixel_values` and `inputs_embeds` must be given"):
        model()
    for name, tokens in (("input_ids", torch.ones(1, 9, dtype=torch.long)), ("inputs_embeds", torch.zeros(1, 9, 32))):
        with pytest.raises(ValueError, match=f"`pixel_values` and `{name}` are both given"):
            model(pixel_values=torch.zeros(1, 2, 8, 12), **{name: tokens})
    with pytest.raises(ValueError, match="`pixel_values` are given, but `input_type` is 'text'"):
        TriptychEncoderModel(tiny_config("encoder"))(pixel_values=torch.zeros(1, 2, 8, 12))
    with pytest.raises(ValueError, match="`input_type` is 'image', but TriptychForMaskedLM predicts tokens"):
        TriptychForMaskedLM(config)
    with pytest.raises(
        ValueError, match="`input_type` is 'text', but TriptychEncoderForImageClassification reads images"
    ):
        TriptychEncoderForImageClassification(tiny_config("encoder"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"image_size": 30}, "`image_size` is 30, but must be a multiple of `patch_size` = 16"),
        ({"image_size": [32, 32, 3]}, r"`image_size` is .*, but must be one or two numbers of at least 1"),
        ({"patch_size": 0}, "`patch_size` is 0, but must be one or two numbers"),
        ({"num_channels": 0}, "`num_channels` is 0"),
        ({"patch_stride": 17}, "`patch_stride` is 17, but must be at most `patch_size` = 16"),
        (
            {"patch_stride": 10},
            "`image_size` is 224, but must be `patch_size` = 16 and a multiple of `patch_stride` = 10",
        ),
        ({"embedding_size": 2}, "`embedding_size` is 2, but for sinusoidal positions must be even and at least 4"),
        (
            {"position_embedding_type": "rotary", "head_dim": 2},
            "Rotary positions turn 2 dimensions of a head, but it must be even and at least 4, for pairs of each of 2",
        ),
        (
            {"position_embedding_type": "rotary", "rope_parameters": {**AXIAL, "rope_type": "linear", "factor": 2.0}},
            "`rope_parameters` has the `rope_type` 'linear', but it must be one of default",
        ),
    ],
)
def test_impossible_images_are_refused(changes, sentence):
    with pytest.raises(Exception, match=sentence):
        TriptychConfig(topology="encoder", input_type="image", **changes)


def test_an_image_shares_no_token_table():
    assert not TriptychConfig(topology="encoder_decoder", encoder={"input_type": "image"}).share_embeddings
    with pytest.raises(
        Exception, match=r"`share_embeddings` is True, but must be False where `encoder\.input_type` is"
    ):
        TriptychConfig(topology="encoder_decoder", encoder={"input_type": "image"}, share_embeddings=True)


class TestMaskedPatches:
    """Outputs, losses and gradients equal ViT's in test_conversion.py."""

    def test_masked_patches_do_not_matter_and_the_loss_is_theirs_alone(self):
        config = tiny_config("encoder", position_embedding_type="learned", **IMAGES)
        model = randomised(TriptychEncoderForMaskedImageModeling(config)).eval()
        images, masked = torch.randn(2, 2, 8, 12), torch.zeros(2, 8, dtype=torch.bool)
        masked[0, [1, 6]] = masked[1, 3] = True
        output = model(pixel_values=images, bool_masked_pos=masked)
        pixels = torch.zeros(2, 1, 8, 12, dtype=torch.bool)
        pixels[0, :, :4, 3:6] = pixels[0, :, 4:, 6:9] = pixels[1, :, :4, 9:] = True
        difference = (output.reconstruction - images).abs()
        assert_equal(output.loss, difference.masked_select(pixels).mean())
        other = torch.where(pixels, 5.0, images)
        assert_equal(model(pixel_values=other, bool_masked_pos=masked).reconstruction, output.reconstruction)
        assert model(pixel_values=images).loss is None
        nothing = model(pixel_values=images, bool_masked_pos=torch.zeros(2, 8))
        assert nothing.loss == 0
        halves = [
            model(pixel_values=images[i, None], bool_masked_pos=masked[i, None], num_items_in_batch=3) for i in (0, 1)
        ]
        assert_equal(sum(half.loss for half in halves), output.loss)

    def test_another_size(self):
        config = tiny_config("encoder", position_embedding_type="rotary", **IMAGES)
        model = TriptychEncoderForMaskedImageModeling(config)
        output = model(torch.randn(1, 2, 16, 15), torch.ones(1, 20), interpolate_pos_encoding=True)
        assert output.reconstruction.shape == (1, 2, 16, 15) and output.loss > 0

    def test_bad_input(self):
        config = tiny_config("encoder", **IMAGES)
        with pytest.raises(ValueError, match=r"`bool_masked_pos` has shape \[2, 9\], but must be \[2, 8\]"):
            TriptychEncoderForMaskedImageModeling(config)(**sense_inputs(config), bool_masked_pos=torch.ones(2, 9))
        with pytest.raises(ValueError, match="`pixel_values` must be given"):
            TriptychEncoderForMaskedImageModeling(config)()
        config = tiny_config("encoder", **{**IMAGES, "patch_stride": [2, 3]})
        with pytest.raises(ValueError, match=r"`patch_stride` is \[2, 3\], but must be `patch_size` = \[4, 3\]"):
            TriptychEncoderForMaskedImageModeling(config)

    def test_hidden_digits_are_seen(self):
        """Three in ten patches are hidden, and the others tell more of them than the best constant image does."""
        images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
        config = tiny_config(
            "encoder", input_type="image", image_size=8, patch_size=2, num_channels=1, norm_position="pre",
            position_embedding_type="learned", scale_embedding=False, initializer_range=None,
        )  # fmt: skip
        model = AutoModelForMaskedImageModeling.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(300):
            chosen = images[torch.randint(0, 1500, (64,))]
            model(chosen, torch.rand(64, 16) < 0.3).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        masked = torch.rand(297, 16) < 0.3
        with torch.no_grad():
            loss = model(images[1500:], masked).loss
        constant = images[:1500].median(0, keepdim=True).values
        pixels = F.interpolate(masked.view(-1, 1, 4, 4).float(), scale_factor=2).bool()
        assert loss < 0.9 * (images[1500:] - constant).abs()[pixels].mean()


def test_digits_are_learnt_and_saved(tmp_path):
    """Handwritten digits of 8 x 8 pixels (scikit-learn's), in patches of 2 x 2."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    config = TriptychConfig(
        topology="encoder", input_type="image", image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, norm_position="pre",
        position_embedding_type="learned", scale_embedding=False, classifier_head="linear", hidden_dropout=0.0,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        chosen = torch.randint(0, 1500, (64,))
        model(pixel_values=images[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(pixel_values=images[1500:]).logits
        assert (logits.argmax(-1) == labels[1500:]).float().mean() > 0.8  # 0.1 by chance
        model.save_pretrained(tmp_path)
        again = AutoModelForImageClassification.from_pretrained(tmp_path)
        assert_equal(again(pixel_values=images[1500:]).logits, logits)
        base = AutoModel.from_pretrained(tmp_path)
        assert_equal(base(pixel_values=images[:3]).last_hidden_state, model.model(pixel_values=images[:3])[0])


def test_text_heads_and_image_heads_share_the_classifier():
    config = tiny_config("encoder", position_embedding_type="learned", **IMAGES)
    images = torch.randn(2, 2, 8, 12)
    head = randomised(TriptychEncoderForImageClassification(config)).eval()
    other = TriptychEncoderForSequenceClassification(config).eval()
    other.load_state_dict(head.state_dict())
    assert_equal(other(pixel_values=images).logits, head(pixel_values=images).logits)
