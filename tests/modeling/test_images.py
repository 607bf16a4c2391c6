"""Images as patches: what goes in, what is refused, and that it learns."""

import pytest
import torch
from sklearn.datasets import load_digits
from tiny import assert_equal, randomised, tiny_config
from transformers import AutoModel, AutoModelForImageClassification

from triptych import (
    TriptychConfig,
    TriptychEncoderForImageClassification,
    TriptychEncoderForSequenceClassification,
    TriptychEncoderModel,
    TriptychForMaskedLM,
)

IMAGES = dict(input_type="image", image_size=[8, 12], patch_size=[4, 3], num_channels=2, scale_embedding=False)


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


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "relative", "alibi", "none"])
def test_every_position_type_reads_images(positions):
    model = TriptychEncoderModel(tiny_config("encoder", position_embedding_type=positions, class_token=False, **IMAGES))
    assert model(pixel_values=torch.randn(1, 2, 8, 12)).last_hidden_state.shape == (1, 8, 32)


def test_bad_input():
    config = tiny_config("encoder", position_embedding_type="learned", **IMAGES)
    model = TriptychEncoderModel(config)
    for shape in ([1, 2, 8, 8], [1, 3, 8, 12], [0, 2, 8, 12], [2, 8, 12]):
        with pytest.raises(ValueError, match=r"`pixel_values` has shape .* must be a batch of images \[2, 8, 12\]"):
            model(pixel_values=torch.zeros(shape))
    with pytest.raises(ValueError, match="this stack has no table of its own"):
        model(torch.ones(1, 3, dtype=torch.long))
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
    ],
)
def test_impossible_images_are_refused(changes, sentence):
    with pytest.raises(Exception, match=sentence):
        TriptychConfig(topology="encoder", input_type="image", **changes)


def test_a_decoder_beside_an_image_encoder_is_refused():
    with pytest.raises(Exception, match=r"`encoder.input_type` is 'image', but must be 'text' beside a decoder"):
        TriptychConfig(topology="encoder_decoder", encoder={"input_type": "image"})


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
