"""Banded attention computes the band alone, and what it gives is exactly attention with the mask.

The grids of test_attention.py, test_masks.py and test_relations.py run it on tiny texts; here are long ones, what it
skips, and when it leaves the work to sdpa.

Shapes: B batch, T tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POSITIONS, assert_equal, assert_equal_gradients, gradients, random_tokens, tiny_model

from triptych import TriptychDecoderModel, TriptychEncoderModel, banded

MODELS = {"encoder": TriptychEncoderModel, "decoder": TriptychDecoderModel}
LOCAL = ("sliding_window", "attention_chunk_size")
SEEDS = st.integers(0, 999)


def build(topology: str, backend: str, **changes):
    return tiny_model(MODELS[topology], backend, num_hidden_layers=1, **changes)


def random_inputs(topology: str, length: int, kinds: set[str]) -> dict[str, torch.Tensor]:
    """Two rows of random tokens, with the named inputs beside them."""
    inputs = {"input_ids": random_tokens(2, length)}
    if "padding" in kinds:
        inputs["attention_mask"] = (torch.rand(2, length) < torch.rand(2, 1).clamp(min=0.2)).long()
        inputs["attention_mask"][:, torch.randint(length, (1,))] = 1
    if "documents" in kinds:
        inputs["seq_idx"] = torch.randint(0, 4, (2, length)).sort(-1).values
    elif "prefix" in kinds and topology == "decoder":
        real = inputs["attention_mask"].sum(-1) if "padding" in kinds else torch.full((2,), length)
        inputs["prefix_length"] = (torch.rand(2) * (real + 1)).long()
    if "global" in kinds and topology == "encoder":
        inputs["global_attention_mask"] = (torch.rand(2, length) < 0.03).long()
    return inputs


@pytest.mark.parametrize("topology", MODELS)
@pytest.mark.parametrize("field", LOCAL)
@settings(max_examples=40)
@given(
    length=st.integers(1, 300),
    window=st.floats(0, 2),
    position=st.sampled_from(POSITIONS),
    heads=st.sampled_from((1, 2, 4)),
    num_global_tokens=st.integers(0, 3),
    sparse=st.sampled_from(({}, {"attention_dilation": 3}, {"num_random_blocks": 2, "random_block_size": 5})),
    kinds=st.sets(st.sampled_from(("padding", "documents", "prefix", "global"))),
    block=st.sampled_from((1, 3, 16, 128)),
    seed=SEEDS,
)
def test_the_band_is_the_whole(
    topology, field, length, window, position, heads, num_global_tokens, sparse, kinds, block, seed
):
    """Lengths of no whole blocks, windows of 2 to 2T, pads, documents and prefixes anywhere, global tokens,
    grouped heads and every position: outputs to 1e-5 and gradients to 1e-4 are those of eager."""
    torch.manual_seed(seed)
    inputs = random_inputs(topology, length, kinds)
    changes = {
        field: 2 + int(window * length),
        "position_embedding_type": position,
        "num_key_value_heads": heads,
        "num_global_tokens": num_global_tokens,
        **(sparse if field == "sliding_window" else {}),
    }
    real = inputs.get("attention_mask", torch.ones(2, length)).bool()
    weights = torch.randn(2, length, 32)
    outputs, grads = [], []
    for backend in ("eager", "banded"):
        banded.BLOCK_SIZE = block  # put back by the fixture
        model = build(topology, backend, **changes)
        states = model(**inputs).last_hidden_state
        outputs.append(states[real])
        grads.append(gradients(model, (states * weights)[real].mean() * 32))
    assert_equal(outputs[1], outputs[0])
    assert_equal_gradients(grads[1], grads[0])


@pytest.fixture
def computed(monkeypatch):
    """Numbers of scores that each call of sdpa within a band computes."""
    scores = []

    def attend(query, key, value, visible, bias, **options):
        scores.append(visible.numel())
        return original(query, key, value, visible, bias, **options)

    original = banded.attend
    monkeypatch.setattr(banded, "attend", attend)
    return scores


@pytest.mark.parametrize(("topology", "reach"), [("encoder", 8 + 16 + 8), ("decoder", 15 + 16)])
@torch.no_grad()
def test_no_score_outside_the_band_is_computed(topology, reach, computed, monkeypatch):
    """Of 1,000 x 1,000 scores, those of 63 blocks of 16 queries with what is in reach; and of 2 global tokens."""
    monkeypatch.setattr(banded, "BLOCK_SIZE", 16)
    build(topology, "banded", sliding_window=16)(random_tokens(1, 1000))
    assert computed == [63 * 16 * reach]
    computed.clear()
    build(topology, "banded", sliding_window=16, num_global_tokens=2)(random_tokens(1, 1000))
    assert computed == [63 * 16 * (reach + 2), 2 * 1000]


@pytest.mark.parametrize("topology", MODELS)
@torch.no_grad()
def test_what_is_left_to_sdpa(topology, computed):
    """Texts no longer than the band, full layers, masks of the caller's own, steps of decoding."""
    model = build(topology, "banded", sliding_window=4)
    model(random_tokens(1, 5))
    build(topology, "banded")(random_tokens(1, 50))
    model(random_tokens(1, 50), attention_mask=torch.ones(1, 1, 50, 50, dtype=torch.bool))
    assert computed == []
    model(random_tokens(1, 50))
    assert len(computed) == 1
    if topology == "decoder":
        cache = model(random_tokens(1, 50), use_cache=True).cache
        computed.clear()
        model(random_tokens(1, 1), cache=cache)
        assert computed == []


@pytest.mark.parametrize("topology", MODELS)
@torch.no_grad()
def test_dropout_is_on_in_training_alone(topology):
    model = build(topology, "banded", sliding_window=4, attention_dropout=0.5)
    ids = random_tokens(1, 50)
    assert_equal(model(ids).last_hidden_state, model(ids).last_hidden_state, 0)
    model.train()
    assert (model(ids).last_hidden_state - model(ids).last_hidden_state).abs().max() > 0.1


@pytest.mark.parametrize("topology", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_half_precision(topology, dtype):
    """As near to single precision as eager is, with biases and global tokens, and finite where pads see nothing."""
    changes = dict(sliding_window=6, position_embedding_type="relative", num_global_tokens=2)
    inputs = random_inputs(topology, 60, {"padding"})
    real = inputs["attention_mask"].bool()
    expected = build(topology, "eager", **changes)(**inputs).last_hidden_state
    errors = []
    for backend in ("eager", "banded"):
        states = build(topology, backend, **changes).to(dtype)(**inputs).last_hidden_state.float()
        assert states.isfinite().all()
        errors.append((states - expected)[real].square().mean().sqrt())
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("kinds", ["", "padding", "documents", "padding global"])
@pytest.mark.parametrize("topology", MODELS)
@torch.no_grad()
def test_it_is_traced_whole(topology, kinds):
    """torch.compile finds no reason to leave the graph, and the graph gives the same."""
    model = build(topology, "banded", sliding_window=4, num_global_tokens=2, position_embedding_type="relative")
    inputs = random_inputs(topology, 40, set(kinds.split()))
    real = inputs.get("attention_mask", torch.ones(2, 40)).bool()
    expected = model(**inputs).last_hidden_state
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal(compiled(**inputs).last_hidden_state[real], expected[real])
