"""The six position types against their papers and against transformers' own code.

Shapes: B batch, T tokens, H heads, d head width.
"""

import math

import pytest
import torch
from tiny import (
    LAYERS,
    MIXED,
    QUICK_BACKENDS,
    SIDES,
    assert_equal,
    pad_rows,
    ragged_rows,
    random_tokens,
    tiny_config,
    tiny_model,
)
from transformers import AutoModel, LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.glm.modeling_glm import GlmConfig, GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from triptych import TriptychDecoderModel, TriptychEncoderModel
from triptych.positions import (
    TriptychRotaryEmbedding,
    alibi_bias,
    alibi_slopes,
    apply_rotary,
    relative_buckets,
    sinusoidal_embedding,
)

ORIGINAL_LENGTH = 16  # pre-training length from which the scaled rope types depart
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}
LENGTHENED = ("yarn", "longrope", "llama3")  # their `max_position_embeddings` is the length after scaling


def rope_settings(rope_type: str) -> dict:
    """Fields that our configuration and Llama's share."""
    length = ORIGINAL_LENGTH * 4 if rope_type in LENGTHENED else ORIGINAL_LENGTH
    parameters = {"rope_type": rope_type, "rope_theta": 5000.0, **ROPES[rope_type]}
    return dict(max_position_embeddings=length, rope_parameters=parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Sinusoidal


@pytest.mark.parametrize("size", [2, 32, 512])
def test_sinusoidal_is_the_papers_formula(size):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)), at any position."""
    positions = [0, 1, 2, 17, 511, 1024, 5000, 20000]
    actual = sinusoidal_embedding(torch.tensor([positions]), size)[0]
    assert actual.shape == (len(positions), size) and actual.dtype == torch.float32
    for row, position in zip(actual.tolist(), positions, strict=True):
        # float32 holds an angle of `position` radians to 2^-24 of it; frequency, product and sine each round once.
        tolerance = max(1e-6, 4 * position * 2**-24)
        for pair in range(size // 2):
            angle = position / 10000 ** (2 * pair / size)
            assert abs(row[2 * pair] - math.sin(angle)) <= tolerance, (position, pair)
            assert abs(row[2 * pair + 1] - math.cos(angle)) <= tolerance, (position, pair)


def test_sinusoidal_positions_join_the_scaled_embeddings():
    """Section 3.4 and 3.5: sqrt(d_model) times the embedding, plus the encoding, is what the first layer reads."""
    model = tiny_model(TriptychEncoderModel)
    ids = random_tokens(2, 7)
    states = model(ids, output_hidden_states=True).hidden_states[0]
    encoding = sinusoidal_embedding(torch.arange(7)[None], 32)
    assert_equal(states, model.embed_tokens(ids) * math.sqrt(32) + encoding)


@torch.no_grad()
def test_sinusoidal_has_no_length_limit():
    """`max_position_embeddings` bounds a learned table only."""
    model = tiny_model(TriptychDecoderModel, max_position_embeddings=4, num_hidden_layers=1)
    assert model(random_tokens(1, 50)).last_hidden_state.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope_type", ROPES)
def test_rotary_is_llamas(rope_type, dtype):
    """Cosines and sines within the pre-training length, beyond it, beyond that, and back."""
    settings = rope_settings(rope_type)
    config = tiny_config("decoder", position_embedding_type="rotary", **settings)
    ours = TriptychRotaryEmbedding(config, config.rope_parameters)
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4, **settings))
    for length in (8, 40, 60, 8):
        positions, states = torch.arange(length)[None], torch.zeros(1, dtype=dtype)
        for actual, expected in zip(ours(states, positions), theirs(states, positions), strict=True):
            assert actual.dtype == dtype
            assert torch.equal(actual, expected), length


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_partial_rotary_is_glms(factor):
    """`partial_rotary_factor` turns the first dimensions of each head."""
    parameters = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": factor}
    config = tiny_config("decoder", position_embedding_type="rotary", rope_parameters=parameters)
    ours = TriptychRotaryEmbedding(config, config.rope_parameters)
    theirs = GlmRotaryEmbedding(
        GlmConfig(hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=parameters)
    )
    positions, states = torch.arange(20)[None], torch.zeros(1)
    rotated = int(8 * factor)
    for actual, expected in zip(ours(states, positions), theirs(states, positions), strict=True):
        assert actual.shape[-1] == rotated
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("rotated", [2, 6, 8])
def test_rotation_is_llamas(rotated):
    """Of a head of width 8, the first dimensions turn as Llama's do, and the others stay."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    angles = torch.randn(2, 5, rotated // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected = apply_rotary_pos_emb(query[..., :rotated], key[..., :rotated], cos, sin)
    for states, turned in zip((query, key), expected, strict=True):
        actual = apply_rotary(states, cos, sin)
        assert torch.equal(actual[..., :rotated], turned)
        assert torch.equal(actual[..., rotated:], states[..., rotated:])


def test_rotary_scores_depend_on_distances_only():
    """Su et al. 2021, equation 16: q at m and k at n meet as q at m + s and k at n + s do."""
    config = tiny_config("decoder", position_embedding_type="rotary")
    rotary = TriptychRotaryEmbedding(config, config.rope_parameters)
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    scores = []
    for shift in (0, 13):
        angles = rotary(query, torch.arange(6)[None] + shift)
        scores.append(apply_rotary(query, *angles) @ apply_rotary(key, *angles).mT)
    assert_equal(scores[0], scores[1])


def test_each_layer_type_has_its_own_rotary():
    """Nested settings, as Gemma and ModernBERT have them: a slow rotation for full layers, a fast one for local."""
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "chunked_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    }
    model = tiny_model(TriptychDecoderModel, position_embedding_type="rotary", rope_parameters=nested, **MIXED)
    for layer_type, parameters in nested.items():
        theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=parameters))
        assert torch.equal(model.rotary_emb[layer_type].inv_freq, theirs.inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope_type", [*ROPES, "nested"])
def test_buffers_survive_loading(rope_type, dtype, tmp_path):
    """Non-persistent buffers are garbage after loading: every buffer equals a freshly built model's."""
    if rope_type == "nested":
        parameters = {"rope_type": "default", "rope_theta": 1e6}
        nested = {"full_attention": parameters, "sliding_attention": rope_settings("linear")["rope_parameters"]}
        nested["chunked_attention"] = parameters
        options = dict(rope_parameters=nested, **MIXED)
    else:
        options = rope_settings(rope_type)
    fresh = tiny_model(TriptychDecoderModel, position_embedding_type="rotary", **options)
    fresh.save_pretrained(tmp_path)
    expected = dict(fresh.named_buffers())
    loaded = AutoModel.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype and expected
    actual = dict(loaded.named_buffers())
    assert actual.keys() == expected.keys()
    for name, buffer in expected.items():
        assert actual[name].dtype == torch.float32, f"{name}: angles need float32 frequencies"
        assert torch.equal(actual[name], buffer), name
    ids, same = random_tokens(1, 40), TriptychDecoderModel._from_config(fresh.config, dtype=dtype).eval()
    same.load_state_dict(fresh.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, same(ids).last_hidden_state)


@pytest.mark.parametrize("rope_type", ROPES)
def test_casting_a_model_keeps_its_angles(rope_type):
    """`model.bfloat16()`, which DeepSpeed also calls, must not round frequencies: at 1000 tokens, that is radians."""
    config = tiny_config("decoder", position_embedding_type="rotary", **rope_settings(rope_type))
    rotary, cast = (TriptychRotaryEmbedding(config, config.rope_parameters) for _ in range(2))
    cast = cast.bfloat16().float()
    states, positions = torch.zeros(1), torch.arange(1000)[None]
    assert_equal(cast(states, positions)[0], rotary(states, positions)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Relative


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (6, 4), (64, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_t5s(bidirectional, buckets, distance):
    relative_position = torch.arange(-1500, 1501)[None]
    actual = relative_buckets(relative_position, bidirectional, buckets, distance)
    expected = T5Attention._relative_position_bucket(relative_position, bidirectional, buckets, distance)
    assert torch.equal(actual, expected)
    assert actual.min() == 0 and actual.max() == buckets - 1


@pytest.mark.parametrize("bidirectional", [True, False])
@torch.no_grad()
def test_relative_bias_is_t5s(bidirectional):
    """The whole bias [1, H, T, T], from an equal table."""
    topology, model_class = ("encoder", TriptychEncoderModel) if bidirectional else ("decoder", TriptychDecoderModel)
    module = tiny_model(model_class, position_embedding_type="relative").relative_bias
    theirs = T5Attention(t5_config(is_decoder=topology == "decoder"), has_relative_attention_bias=True)
    theirs.relative_attention_bias.weight.copy_(module.relative_attention_bias.weight)
    positions = torch.arange(50)[None]
    actual = module(positions, positions, bidirectional=bidirectional)
    assert torch.equal(actual, theirs.compute_bias(50, 50))


def t5_config(**changes) -> T5Config:
    return T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, vocab_size=97, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# ALiBi


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_alibi_is_blooms(num_heads):
    """Slopes, and biases: BLOOM adds slope * key position, which differs by a constant per query only."""
    length = 9
    theirs = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), num_heads, torch.float32)
    slopes = theirs[:, 0, 1] - theirs[:, 0, 0]
    assert_equal(torch.tensor(alibi_slopes(num_heads)), slopes, tolerance=1e-7)
    positions = torch.arange(length)[None]
    bias = alibi_bias(positions, positions, num_heads)[0]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    expected = theirs - slopes[:, None, None] * positions[0][:, None]
    assert_equal(bias[:, causal], expected[:, causal])


def test_alibi_is_symmetric():
    """A bidirectional layer is as near to the token on the right as to the one on the left."""
    bias = alibi_bias(torch.arange(6)[None], torch.arange(6)[None], 4)
    assert torch.equal(bias, bias.mT)
    assert (bias.diagonal(dim1=-2, dim2=-1) == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# Learned, none, and positions of the caller's own


def test_learned_positions_are_rows_of_a_table():
    model = tiny_model(TriptychEncoderModel, position_embedding_type="learned", scale_embedding=False)
    ids, positions = random_tokens(1, 5), torch.tensor([[3, 1, 4, 1, 5]])
    states = model(ids, position_ids=positions, output_hidden_states=True).hidden_states[0]
    assert_equal(states, model.embed_tokens(ids) + model.embed_positions(positions), tolerance=0)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "relative", "alibi"])
@torch.no_grad()
def test_order_matters_with_positions(position):
    """Swapping two tokens moves their outputs' values, not only their places."""
    model = tiny_model(TriptychEncoderModel, position_embedding_type=position)
    ids, order = random_tokens(1, 6), torch.tensor([1, 0, 2, 3, 4, 5])
    states = model(ids).last_hidden_state
    assert (model(ids[:, order]).last_hidden_state - states[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["rotary", "relative", "alibi"])
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@torch.no_grad()
def test_distances_ignore_a_common_shift(backend, position):
    """`position_ids` that start anywhere give equal outputs where only distances count."""
    model = tiny_model(TriptychDecoderModel, backend, position_embedding_type=position)
    ids = random_tokens(2, 7)
    expected = model(ids, use_cache=False).last_hidden_state
    shifted = torch.arange(7)[None] + 11
    assert_equal(model(ids, position_ids=shifted, use_cache=False).last_hidden_state, expected)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("position", ["learned", "rotary", "relative", "alibi"])
@torch.no_grad()
def test_position_ids_of_the_callers_own(position, use_cache):
    """Positions with gaps place queries and keys alike, with a cache or without: equal to a run with real gaps."""
    model = tiny_model(TriptychDecoderModel, position_embedding_type=position)
    ids = random_tokens(1, 5)
    positions = torch.tensor([[0, 2, 3, 7, 8]])
    gapped, mask = random_tokens(1, 9), torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    gapped[0, positions[0]] = ids[0]
    seen = torch.zeros(9, dtype=torch.bool)
    seen[positions[0]] = True
    mask[0, 0] = torch.ones(9, 9, dtype=torch.bool).tril() & seen
    expected = model(gapped, attention_mask=mask).last_hidden_state[:, positions[0]]
    actual = model(ids, position_ids=positions, use_cache=use_cache).last_hidden_state
    assert_equal(actual, expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("position", ["learned", "rotary", "relative", "alibi"])
@torch.no_grad()
def test_pads_and_documents_leave_the_callers_own_positions(position, layers, side):
    """Keys stand where the caller's positions say, and not where they are in the row, beside pads and packed texts."""
    model = tiny_model(TriptychEncoderModel, position_embedding_type=position, **LAYERS[layers])
    rows, placed = ragged_rows(6, 4), [torch.tensor([3, 5, 6, 7, 11, 12]), torch.tensor([0, 1, 4, 5])]
    apart = zip(rows, placed, strict=True)
    expected = torch.cat([model(row[None], position_ids=places[None]).last_hidden_state[0] for row, places in apart])
    ids, mask = pad_rows(rows, side, extra=2)
    places = torch.full_like(ids, 9).masked_scatter(mask.bool(), torch.cat(placed))
    padded = model(ids, attention_mask=mask, position_ids=places).last_hidden_state
    assert_equal(padded[mask.bool()], expected, what="padded texts")
    packed, seq_idx = torch.cat(rows)[None], torch.tensor([[0] * 6 + [1] * 4])
    packed = model(packed, position_ids=torch.cat(placed)[None], seq_idx=seq_idx).last_hidden_state
    assert_equal(packed[0], expected, what="packed texts")


# ---------------------------------------------------------------------------------------------------------------------
# Beyond the length of training


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}], ids=["full", "windows"])
@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "relative", "alibi", "none"])
@torch.no_grad()
def test_positions_that_are_computed_have_no_end(position, options):
    """A text five times as long as `max_position_embeddings` runs, and its beginning reads as it does alone."""
    model = tiny_model(TriptychDecoderModel, position_embedding_type=position, max_position_embeddings=16, **options)
    ids = random_tokens(1, 80)
    states = model(ids).last_hidden_state
    assert states.isfinite().all()
    assert_equal(states[:, :16], model(ids[:, :16]).last_hidden_state)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3"])
@torch.no_grad()
def test_scaled_rotary_positions_are_llamas_beyond_training(rope_type):
    """Angles of a text four times as long as the model was trained on."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = tiny_config("decoder", position_embedding_type="rotary", rope_parameters=rope, max_position_embeddings=64)
    theirs = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=dict(rope), max_position_embeddings=64
    )
    states, positions = torch.zeros(1, 64, 32), torch.arange(64)[None]
    expected = LlamaRotaryEmbedding(theirs)(states, positions)
    for actual, wanted in zip(TriptychRotaryEmbedding(config)(states, positions), expected, strict=True):
        assert_equal(actual, wanted, tolerance=1e-6)


@torch.no_grad()
def test_learned_positions_end_with_their_table():
    """The error names the field, the position and the length of what is read, be it a text or a recording."""
    model = tiny_model(TriptychDecoderModel, position_embedding_type="learned", max_position_embeddings=16)
    model(random_tokens(1, 16))
    with pytest.raises(ValueError, match=r"sequence of 17 tokens.*0 to 15, as `max_position_embeddings` is 16"):
        model(random_tokens(1, 17))
