"""Videos as tubelets: what goes in, where tubelets stand, and what is refused."""

import pytest
import torch
from tiny import SENSES, assert_equal, randomised, tiny_config
from transformers import VivitConfig, VivitModel

from triptych import TriptychConfig, TriptychEncoderForVideoClassification, TriptychEncoderModel
from triptych.positions import resize_positions

VIDEOS = {**SENSES["video"], "scale_embedding": False}
SHAPE = (4, 2, 8, 12)  # frames, channels, height, width


def test_a_whole_vivit():
    """Arnab et al. 2021: tubelets, learned positions, norms first; with their weights, their outputs."""
    torch.manual_seed(0)
    theirs = VivitModel(
        VivitConfig(
            image_size=[8, 12], num_frames=4, tubelet_size=[2, 4, 3], num_channels=2, hidden_size=32,
            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2, hidden_act="gelu",
        ),
        add_pooling_layer=False,
    ).eval()  # fmt: skip
    randomised(theirs)
    torch.nn.init.normal_(theirs.embeddings.position_embeddings)
    ours = TriptychEncoderModel(
        tiny_config(
            "encoder", position_embedding_type="learned", norm_position="pre", hidden_act="gelu",
            attention_bias=True, norm_eps=theirs.config.layer_norm_eps, **VIDEOS,
        )
    ).eval()  # fmt: skip
    names = {
        "embeddings.cls_token": "embed_patches.class_token",
        "embeddings.patch_embeddings.": "embed_patches.",
        "embeddings.position_embeddings": "embed_positions.weight",
        ".attention.": ".self_attn.",
        ".mlp.fc1.": ".mlp.up_proj.",
        ".mlp.fc2.": ".mlp.down_proj.",
        ".layernorm_before.": ".self_attn_norm.",
        ".layernorm_after.": ".mlp_norm.",
        "layernorm.": "norm.",
    }
    weights = {}
    for name, tensor in theirs.state_dict().items():
        for their_name, our_name in names.items():
            name = name.replace(their_name, our_name)
        weights[name] = tensor[0] if name == "embed_positions.weight" else tensor
    ours.load_state_dict(weights)
    videos = torch.randn(3, *SHAPE)
    assert_equal(ours(pixel_values=videos).last_hidden_state, theirs(videos).last_hidden_state)


def test_coordinates_are_column_row_and_layer():
    model = TriptychEncoderModel(tiny_config("encoder", hidden_size=24, **VIDEOS))
    coordinates = model.coordinates(torch.arange(17)[None], model.grid)[0]
    assert coordinates[0].tolist() == [0, 0, 0]  # the class token
    expected = [[column, row, layer] for layer in range(2) for row in range(2) for column in range(4)]
    assert coordinates[1:].tolist() == expected


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_every_axis_moves_its_share(positions):
    """Columns and rows have a third of the dimensions each, in pairs, and layers the rest."""
    model = TriptychEncoderModel(
        tiny_config("encoder", hidden_size=28, num_attention_heads=2, position_embedding_type=positions, **VIDEOS)
    )
    places = torch.tensor([[1, 2, 5, 9]])  # the first tubelet, and its neighbours along each axis
    if positions == "sinusoidal":
        vectors, shares = model.positions(places, model.grid)[0], (8, 8, 12)
    else:
        sines = model.rotary_emb["full_attention"](torch.zeros(1), model.coordinates(places, model.grid))[1][0]
        vectors, shares = sines[:, :7], (2, 2, 3)  # of 14 dimensions; each angle is there twice
    for axis in range(3):
        moved = [part.any().item() for part in (vectors[1 + axis] != vectors[0]).split(shares)]
        assert moved == [axis == 0, axis == 1, axis == 2]


def test_learned_positions_of_other_sizes():
    """Over time linear: frames between two of them have their mean. Over space as for images, frame by frame."""
    table = torch.randn(1 + 2 * 2 * 4, 5)
    assert_equal(resize_positions(table, (2, 2, 4), (2, 2, 4)), table)
    wider = resize_positions(table, (2, 2, 4), (2, 3, 6))
    assert_equal(wider[1 + 3 * 6 :], resize_positions(table[9:], (2, 4), (3, 6)))
    longer = resize_positions(table, (2, 2, 4), (4, 2, 4))
    first, second = table[1:9], table[9:]
    for index, share in enumerate((0.0, 0.25, 0.75, 1.0)):
        assert_equal(longer[1 + 8 * index : 9 + 8 * index], (1 - share) * first + share * second)
    assert_equal(longer[0], table[0])
    model = TriptychEncoderModel(tiny_config("encoder", position_embedding_type="learned", **VIDEOS))
    output = model(pixel_values=torch.randn(1, 6, 2, 16, 12), interpolate_pos_encoding=True)
    assert output.last_hidden_state.shape == (1, 1 + 3 * 4 * 4, 32)
    output.last_hidden_state.sum().backward()
    assert model.embed_positions.weight.grad.abs().min() > 0


def test_bad_input():
    model = TriptychEncoderForVideoClassification(tiny_config("encoder", **VIDEOS))
    for shape in ([1, 1, 2, 8, 12], [1, 4, 3, 8, 12], [0, *SHAPE], [1, 2, 8, 12], [1, 4, 2, 8, 9]):
        with pytest.raises(
            ValueError,
            match=r"`pixel_values` has shape .* must be a batch of videos \[4, 2, 8, 12\], as `num_frames`, "
            "`num_channels` and `image_size` say",
        ):
            model(pixel_values=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"shape \[1, 1, 2, 8, 12\], .* patches of \[2, 4, 3\] at every"):
        model(pixel_values=torch.zeros(1, 1, 2, 8, 12), interpolate_pos_encoding=True)  # shorter than one tubelet
    with pytest.raises(
        ValueError, match="`input_type` is 'text', but TriptychEncoderForVideoClassification reads videos"
    ):
        TriptychEncoderForVideoClassification(tiny_config("encoder"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_frames": 5}, "`num_frames` is 5, but must be a multiple of `tubelet_size` = 2"),
        ({"num_frames": 1}, "`num_frames` is 1, but must be a multiple of `tubelet_size` = 2"),
        ({"tubelet_size": 0}, "`tubelet_size` is 0, but must be at least 1"),
        ({"embedding_size": 4}, "`embedding_size` is 4, but for sinusoidal positions must be even and at least 6"),
    ],
)
def test_impossible_videos_are_refused(changes, sentence):
    with pytest.raises(Exception, match=sentence):
        TriptychConfig(topology="encoder", **{**VIDEOS, **changes})
