"""Linear attention: every form is the recurrence written down step by step, and every relation of texts holds.

Shapes: B batch, T tokens, S source tokens, H heads, f features, d head width, V vocabulary.
"""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generation import new_tokens
from test_relations import (
    assert_cache_forgets,
    assert_cache_is_no_cache,
    assert_cache_takes_pads,
    inputs_of,
    scattered,
)
from tiny import (
    SIDES,
    TOPOLOGIES,
    Ragged,
    assert_equal,
    assert_equal_gradients,
    gradients,
    random_tokens,
    tiny_config,
    tiny_model,
)
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from triptych.linear_attention import TriptychFeatureMap, TriptychLinearAttention, linear_attention
from triptych.states import TriptychStateLayer

LINEAR = {
    "elu": {},
    "hedgehog": {"linear_feature_map": "hedgehog", "num_key_value_heads": 2},
    "retention": {
        "linear_decay": "fixed",
        "linear_feature_map": "unit",
        "linear_output_gate": True,
        "norm_type": "rmsnorm",
    },
    "gated": {"linear_decay": "gated", "linear_conv_kernel": 3},
    "delta": {
        "linear_update": "delta",
        "linear_feature_map": "unit",
        "linear_decay": "gated",
        "linear_conv_kernel": 4,
        "linear_output_gate": True,
        "norm_type": "rmsnorm",
    },
}
STACKS = {
    **{name: {"layer_types": ["linear_attention"] * 2, **fields} for name, fields in LINEAR.items()},
    "hybrid": dict(
        layer_types=["sliding_attention", "linear_attention", "full_attention"],
        num_hidden_layers=3,
        sliding_window=4,
        **LINEAR["delta"],
    ),
}
POSITIONS = ("sinusoidal", "learned", "rotary", "none")
SEEDS = st.integers(0, 999)
LENGTHS = st.integers(1, 12)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
in_every_stack = pytest.mark.parametrize("stack", STACKS)


@functools.cache
def model_of(topology: str, stack: str, position: str = "rotary"):
    cross = {"decoder": {"linear_cross_attention": stack != "hybrid"}} if topology == "encoder_decoder" else {}
    model = tiny_model(topology, position_embedding_type=position, tie_word_embeddings=False, **STACKS[stack], **cross)
    if topology != "encoder":
        model.generation_config.eos_token_id = None
    # In double precision, as the norm of a single weak product multiplies rounding by up to norm_eps ** -0.5.
    return model.double()


def text_loss(model, texts: Ragged) -> torch.Tensor:
    return F.cross_entropy(model(**texts.batch).logits.flatten(0, 1), texts.labels.flatten())


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence


def step_by_step(query, key, value, log_decay, strength, state, documents, includes_itself):
    """S_t = a_t S_t-1 + b_t k_t (v_t - e a_t S_t-1^T k_t)^T and o_t = S_t^T q_t, one token after the other."""
    outputs = []
    for t in range(query.shape[2]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        if log_decay is not None:
            state = state * log_decay[:, :, t, None, None].exp()
        before, k, v = state, key[:, :, t], value[:, :, t]
        if strength is not None:
            v = strength[:, :, t, None] * (v - torch.einsum("bhf,bhfd->bhd", k, state))
        state = state + k[..., None] * v[..., None, :]
        outputs.append(torch.einsum("bhf,bhfd->bhd", query[:, :, t], state if includes_itself else before))
    return torch.stack(outputs, dim=2), state


@given(
    length=st.integers(1, 40),
    chunk_size=st.sampled_from((1, 2, 3, 8, 16, 64)),
    rate=st.sampled_from((None, 0.1, 2.0, 40.0)),
    is_delta=st.booleans(),
    begins=st.sampled_from(("empty", "a state", "documents")),
    includes_itself=st.booleans(),
    seed=SEEDS,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_chunks_are_the_recurrence(dtype, length, chunk_size, rate, is_delta, begins, includes_itself, seed):
    """Outputs, state and gradients, with chunks of 1 to 64 tokens, odd lengths, resets, against a loop in float64."""
    torch.manual_seed(seed)
    query, key = (F.normalize(torch.randn(2, 3, length, 5, dtype=torch.float64), dim=-1) for _ in range(2))
    value, state = torch.randn(2, 3, length, 4, dtype=torch.float64), torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    log_decay = None if rate is None else -rate * torch.rand(2, 3, length, dtype=torch.float64)
    strength = torch.rand(2, 3, length, dtype=torch.float64) if is_delta else None
    documents = torch.randint(0, 4, (2, length)).sort(-1).values if begins == "documents" else None
    if begins == "a state":
        state = torch.randn_like(state)
    inputs = [None if x is None else x.requires_grad_() for x in (query, key, value, log_decay, strength, state)]
    wanted = step_by_step(*inputs, documents, includes_itself)
    given = [None if x is None else x.to(dtype) for x in inputs]
    got = linear_attention(*given, documents, includes_itself, chunk_size)

    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    leaves = [x for x in inputs if x is not None]
    weights = [torch.randn_like(x) for x in wanted]
    sums = [sum((x * w).sum() for x, w in zip(pair, weights, strict=True)) for pair in (got, wanted)]
    got_gradients, wanted_gradients = (torch.autograd.grad(total, leaves) for total in sums)
    for actual, expected in zip((*got, *got_gradients), (*wanted, *wanted_gradients), strict=True):
        assert_equal(actual.double(), expected, tolerance * max(1, expected.abs().max().item()))


@pytest.mark.parametrize("is_delta", [False, True])
def test_mixed_precision_rounds_no_state(is_delta):
    """Sums over many tokens in bfloat16, though their docstring says single precision."""
    query, key = (F.normalize(torch.randn(2, 3, 40, 5), dim=-1) for _ in range(2))
    value, strength = torch.randn(2, 3, 40, 4), torch.rand(2, 3, 40) if is_delta else None
    inputs = query, key, value, -torch.rand(2, 3, 40), strength
    expected = linear_attention(*inputs, chunk_size=8)
    with torch.autocast("cpu", torch.bfloat16):
        actual = linear_attention(*inputs, chunk_size=8)
    for mine, other in zip(actual, expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["elu", "unit"])
def test_features_are_exact(kind, dtype):
    """elu(x) + 1 of half precision is zero for x below -6, and x^2 infinite for x above 256."""
    phi = TriptychFeatureMap(tiny_config("decoder", linear_feature_map=kind), heads=1)
    x = torch.linspace(-9, 2, 64).view(1, 1, 8, 8).to(dtype)
    x[..., 0, :] *= 100 if kind == "unit" else 1
    expected = F.elu(x.double()) + 1 if kind == "elu" else F.normalize(x.double(), dim=-1)
    assert ((phi(x) - expected).abs() <= 1e-3 * expected.abs()).all()


def test_the_delta_rule_is_that_of_transformers():
    """The reference implementation of Qwen3-Next, outputs and state."""
    query, key, value = (torch.randn(2, 150, 3, 16) for _ in range(3))
    log_decay, strength = -torch.rand(2, 150, 3), torch.rand(2, 150, 3)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, state = torch_chunk_gated_delta_rule(query, key, value, log_decay, strength, **options)
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key)]
    inputs = [x.transpose(1, 2) for x in (unit[0] / 4, unit[1], value, log_decay, strength)]
    actual, new_state = linear_attention(*inputs)
    assert_equal(actual.transpose(1, 2), expected, 1e-6)
    assert_equal(new_state, state, 1e-6)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("feature_map", ["elu", "hedgehog"])
def test_layer_is_the_formula(kind, feature_map):
    """The sum of values weighted by phi(q) . phi(k), divided by the sum of weights (Katharopoulos 2020, equation 4)."""
    config = tiny_config("encoder" if kind == "encoder" else "decoder", linear_feature_map=feature_map)
    config.cross_attention_hidden_size = 32
    layer = TriptychLinearAttention(config, layer_idx=0, is_cross_attention=kind == "cross")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, memory = torch.randn(2, 11, 32), torch.randn(2, 7, 32)
    actual, _ = layer(x, memory if kind == "cross" else None)
    memory = memory if kind == "cross" else x
    query, key = layer.q_features(layer.heads(layer.q_proj(x))), layer.k_features(layer.heads(layer.k_proj(memory)))
    weights = query @ key.mT
    assert (weights > 0).all()
    weights = weights.tril() if kind == "decoder" else weights
    output = (weights / weights.sum(-1, keepdim=True)) @ layer.heads(layer.v_proj(memory))
    assert_equal(actual, layer.o_proj(output.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stack", LINEAR)
@torch.no_grad()
def test_half_precision_is_stable(stack, dtype):
    """4,096 tokens with keys of up to 100 times the usual size: finite, and near what single precision gives."""
    fields = {**LINEAR[stack], "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    model = tiny_model("decoder", position_embedding_type="none", **fields)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight *= 30
    states = torch.randn(1, 4096, 32)
    expected = attention(states)[0]
    actual = attention.to(dtype)(states.to(dtype))[0].float()
    assert actual.isfinite().all()
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.1, f"relative error {error:.3f}"


# ---------------------------------------------------------------------------------------------------------------------
# Texts


@pytest.mark.parametrize("side", SIDES)
@in_every_stack
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_padded_batches_equal_texts_alone(topology, stack, side):
    model, texts = model_of(topology, stack), Ragged(topology, side)
    assert_equal(texts.together(model), texts.alone(model))


@pytest.mark.parametrize("position", POSITIONS)
@in_every_stack
@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(length=LENGTHS, pads=st.integers(0, 7), seed=SEEDS)
@torch.no_grad()
def test_padding_is_inert(topology, stack, position, length, pads, seed):
    torch.manual_seed(seed)
    model, ids = model_of(topology, stack, position), random_tokens(1, length)
    padded, mask = scattered(ids, pads)
    torch.manual_seed(seed)
    expected = model(**inputs_of(topology, ids)).logits[0]
    torch.manual_seed(seed)
    assert_equal(model(**inputs_of(topology, padded, mask)).logits[mask.bool()], expected)


@in_every_stack
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
@given(length=LENGTHS, place=st.integers(0, 11), seed=SEEDS)
@torch.no_grad()
def test_causality(topology, stack, length, place, seed):
    torch.manual_seed(seed)
    model, ids = model_of(topology, stack), random_tokens(1, length)
    place %= length
    inputs = inputs_of(topology, torch.cat((ids, ids)))
    inputs["decoder_input_ids" if topology == "encoder_decoder" else "input_ids"][1, place:] = random_tokens(
        length - place
    )
    before, after = model(**inputs).logits
    assert_equal(after[:place], before[:place])


@in_every_stack
@torch.no_grad()
def test_an_encoder_reads_both_ways(stack):
    """Every token reaches every output: a change of either end shows at the other."""
    model, ids = model_of("encoder", stack), random_tokens(1, 9)
    expected = model(ids).logits
    for place in (0, 8):
        edited = ids.clone()
        edited[0, place] = (edited[0, place] + 40) % 97
        assert ((model(edited).logits - expected).abs().amax(-1) > 1e-5).all()


@in_every_stack
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), pads=st.integers(0, 3), seed=SEEDS)
@torch.no_grad()
def test_packing_is_running_apart(topology, stack, lengths, pads, seed):
    """A state begins anew with each document, and the convolution does not look into the one before."""
    torch.manual_seed(seed)
    model = model_of(topology, stack)
    documents = [random_tokens(1, length) for length in lengths]
    expected = torch.cat([model(document).logits for document in documents], dim=1)[0]
    numbers = torch.cat([torch.full((n,), index) for index, n in enumerate(lengths)])
    ids, mask = scattered(torch.cat(documents, dim=1), pads)
    slots = mask[0].bool()
    packed = torch.zeros_like(mask)
    packed[0, slots] = numbers
    # A pad belongs to the document before it.
    packed = torch.where(mask.bool(), packed, 0).cummax(-1).values
    assert_equal(model(ids, attention_mask=mask, seq_idx=packed).logits[0, slots], expected)


@in_every_stack
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gradients_of_padded_batches(topology, stack):
    """Gradients of a padded batch are those of its texts, weighted by their lengths."""
    model, texts = model_of(topology, stack), Ragged(topology, "inside")
    together = gradients(model, text_loss(model, texts) * len(texts.labels[texts.mask]))
    logits = texts.alone(model)
    apart = gradients(model, F.cross_entropy(logits, texts.labels[texts.mask], reduction="sum"))
    assert_equal_gradients(together, apart, 2e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Caches


@in_every_stack
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
@given(sizes=SIZES, pads=st.integers(0, 6), seed=SEEDS)
@torch.no_grad()
def test_cache_is_no_cache(topology, kind, stack, sizes, pads, seed):
    torch.manual_seed(seed)
    assert_cache_is_no_cache(model_of(topology, stack), kind, sizes, pads)


@pytest.mark.parametrize("stack", LINEAR)
@given(sizes=SIZES, pads=st.integers(0, 6), seed=SEEDS)
@torch.no_grad()
def test_cache_with_pads_anywhere(stack, sizes, pads, seed):
    """A state takes pads in the middle of a cached text, as after a right-padded prompt."""
    torch.manual_seed(seed)
    assert_cache_takes_pads(model_of("decoder", stack), sizes, pads)


@in_every_stack
@given(sizes=SIZES, removed=st.integers(0, 5), seed=SEEDS)
@torch.no_grad()
def test_a_recorded_call_can_be_forgotten(stack, sizes, removed, seed):
    """After `crop`, the text goes on as if the last tokens of the last call had never been."""
    torch.manual_seed(seed)
    assert_cache_forgets(model_of("decoder", stack), sizes, removed)


@pytest.mark.parametrize("stack", ["delta", "hybrid"])
def test_what_was_not_recorded_cannot_be_forgotten(stack):
    model = model_of("decoder", stack)
    cache = model(random_tokens(1, 6), use_cache=True).cache
    layer = next(layer for layer in cache.layers if isinstance(layer, TriptychStateLayer))
    with pytest.raises(ValueError, match="those of the last call only"):
        layer.crop(-2)


def test_a_cache_made_for_another_model_is_refused():
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model_of("decoder", "elu")(random_tokens(1, 6), cache=DynamicCache())


GENERATIONS = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("strategy", GENERATIONS)
@in_every_stack
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
def test_generation_with_a_state_is_without(topology, stack, strategy):
    if strategy == "chunked prefill" and topology == "encoder_decoder":
        pytest.skip("chunked prefill is of decoders only")
    model, ids = model_of(topology, stack), random_tokens(1, 8)
    options = GENERATIONS[strategy]
    plain = {name: value for name, value in options.items() if name in ("num_beams", "do_sample", "top_k")}
    torch.manual_seed(1)
    expected = new_tokens(model, ids, use_cache=False, **plain)
    torch.manual_seed(1)
    assert new_tokens(model, ids, **options) == expected


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("topology", "inputs", "named"),
    [
        ("decoder", {"prefix_length": torch.tensor([2])}, "prefix_length"),
        ("decoder", {"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "4D"),
        ("encoder", {"perm_mask": torch.zeros(1, 5, 5)}, "perm_mask"),
    ],
)
def test_rules_on_pairs_are_refused(topology, inputs, named):
    with pytest.raises(ValueError, match=f"linear_attention.*{named}"):
        model_of(topology, "elu")(random_tokens(1, 5), **inputs)
