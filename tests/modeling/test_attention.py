"""Every attention backend gives what the plain form gives, whatever the positions, layers and padding.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, D model width, d head width, V vocabulary.
"""

import pytest
import torch
from tiny import (
    BACKENDS_SLOW_FLEX,
    LAYERS,
    MIXED,
    POSITIONS,
    QUICK_BACKENDS,
    SIDES,
    TOPOLOGIES,
    VOCAB,
    Ragged,
    assert_equal,
    assert_equal_gradients,
    gradients,
    needs_compiler,
    pad_rows,
    ragged_rows,
    random_tokens,
    tiny_config,
    tiny_model,
)
from torch.nn import functional as F

import triptych.attention
import triptych.banded
import triptych.blockwise
import triptych.dropout
from triptych import TriptychForCausalLM, TriptychForMaskedLM
from triptych.attention import TriptychAttention

VARIANTS = {"plain": {}, "grouped heads": {"num_key_value_heads": 2}, "qk_norm": {"qk_norm": True}}
GROUPED = {"num_key_value_heads": 2, "qk_norm": True, "norm_type": "rmsnorm"}


def text_loss(model, texts: Ragged) -> torch.Tensor:
    """Mean cross-entropy of each real token with its own logits, whatever the head's own loss is."""
    return F.cross_entropy(model(**texts.batch).logits.flatten(0, 1), texts.labels.flatten())


# ---------------------------------------------------------------------------------------------------------------------
# The formula


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("options", [{}, {"attention_scale": 0.7}, {"attention_bias": True, "head_dim": 6}, GROUPED])
def test_layer_is_the_formula(backend, kind, options):
    """softmax(Q K^T s + bias + mask) V, head by head in double precision, and the output projection."""
    config = tiny_config("encoder" if kind == "encoder" else "decoder", **options)
    config.cross_attention_hidden_size = 32
    config._attn_implementation = backend
    layer = TriptychAttention(config, layer_idx=0, is_cross_attention=kind == "cross").eval()
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    if kind != "cross":
        memory = x
    bias = torch.randn(2, 4, 5, memory.shape[1])
    mask = torch.where(torch.rand(2, 1, 5, memory.shape[1]) < 0.3, torch.finfo(torch.float32).min, 0.0)

    actual, _ = layer(x, memory if kind == "cross" else None, bias, attention_mask=mask, is_causal=False)

    double = layer.double()
    query, key, value = double.q_proj(x.double()), double.k_proj(memory.double()), double.v_proj(memory.double())
    size, groups = config.head_dim, 4 // config.num_key_value_heads
    scale = config.attention_scale or size**-0.5
    outputs = []
    for head in range(4):
        shared = head // groups
        q, k, v = (
            states[..., index * size : (index + 1) * size]
            for states, index in ((query, head), (key, shared), (value, shared))
        )
        if config.qk_norm:
            q, k = double.q_norm(q), double.k_norm(k)
        scores = torch.einsum("btd,bsd->bts", q, k) * scale + bias[:, head] + mask[:, 0]
        outputs.append(scores.softmax(-1) @ v)
    assert_equal(actual.double(), double.o_proj(torch.cat(outputs, -1)))


# ---------------------------------------------------------------------------------------------------------------------
# Parity


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_backends_equal_eager_and_unpadded(topology, position, layers, side):
    """Left padding shifts positions: a left-padded row, no position_ids: logits of real tokens = unpadded run."""
    options = dict(position_embedding_type=position, **LAYERS[layers])
    texts = Ragged(topology, side)
    eager = tiny_model(topology, "eager", **options)
    expected, expected_gradients = texts.alone(eager), gradients(eager, text_loss(eager, texts))
    assert_equal(texts.together(eager), expected, what="eager, padded and alone")
    for backend in ("sdpa", "banded"):
        model = tiny_model(topology, backend, **options)
        assert_equal(texts.alone(model), expected, what=f"{backend} and eager, alone")
        assert_equal(texts.together(model), expected, what=f"{backend}, padded and alone")
        assert_equal_gradients(gradients(model, text_loss(model, texts)), expected_gradients)


@pytest.mark.parametrize("layers", ["full", "sliding", "global", "dilated"])
@pytest.mark.parametrize("position", ["rotary", "alibi"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_dropout_falls_on_every_weight_once(monkeypatch, topology, position, layers):
    """Every backend drops attention weights out, here none, and divides by the rest, here a half."""
    for module in (triptych.dropout, triptych.blockwise):
        monkeypatch.setattr(module, "draw_kept", lambda shape, p: torch.ones(shape, dtype=torch.bool))
    # Without a kink, beside which the last digit decides about a gradient.
    options = dict(position_embedding_type=position, attention_dropout=0.5, hidden_act="gelu", **LAYERS[layers])
    texts = Ragged(topology, "left", lengths=(140, 135, 128), target_lengths=(4, 6, 5))
    plain = tiny_model(topology, "eager", **options)
    undropped = texts.together(plain)
    expected, expected_gradients = texts.together(plain.train()), gradients(plain, text_loss(plain, texts))
    assert (expected - undropped).abs().max() > 0.1
    for backend in ("sdpa", "banded"):
        model = tiny_model(topology, backend, **options).train()
        assert_equal(texts.together(model), expected, what=backend)
        assert_equal_gradients(gradients(model, text_loss(model, texts)), expected_gradients)


@pytest.mark.parametrize("backend", ["sdpa", "banded"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_training_in_half_precision_goes_by_blocks(monkeypatch, topology, backend):
    """torch's kernel is slow at its gradients on a CPU; what comes out is as near to single precision as eager's."""
    calls = []
    for module in (triptych.attention, triptych.banded):
        work = module.blockwise_attention
        monkeypatch.setattr(
            module, "blockwise_attention", lambda *args, work=work, **options: calls.append(1) or work(*args, **options)
        )
    texts, options = Ragged(topology, "right"), {"hidden_act": "gelu", "sliding_window": 4}
    exact = tiny_model(topology, "eager", **options).train()
    exact = gradients(exact, text_loss(exact, texts))
    errors = {}
    for name in ("eager", backend):
        model = tiny_model(topology, name, **options).bfloat16().train()
        found = gradients(model, text_loss(model, texts))
        errors[name] = max(((found[key] - exact[key]).norm() / (exact[key].norm() + 1e-3)).item() for key in exact)
    assert calls and errors[backend] < max(0.1, 1.5 * errors["eager"])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_head_variants(topology, variant, position, side):
    """Grouped key/value heads and normalised heads, in a stack of all layer types."""
    options = dict(position_embedding_type=position, **VARIANTS[variant], **MIXED)
    texts = Ragged(topology, side)
    eager = tiny_model(topology, "eager", **options)
    expected, expected_gradients = texts.alone(eager), gradients(eager, text_loss(eager, texts))
    assert_equal(texts.together(eager), expected)
    for backend in ("sdpa", "banded"):
        model = tiny_model(topology, backend, **options)
        assert_equal(texts.together(model), expected)
        assert_equal_gradients(gradients(model, text_loss(model, texts)), expected_gradients)


def check_flex(topology: str, side: str, **options):
    """flex_attention has no backward on a CPU: outputs only. Equal shapes share compiled kernels."""
    texts = Ragged(topology, side, lengths=(9, 5, 7), target_lengths=(4, 9, 5))
    expected = texts.alone(tiny_model(topology, "eager", **options))
    with torch.no_grad():
        assert_equal(texts.together(tiny_model(topology, "flex_attention", **options)), expected)


@needs_compiler
@pytest.mark.parametrize("position", POSITIONS)
def test_flex_positions(position):
    check_flex("decoder", "left", position_embedding_type=position, num_hidden_layers=1)


@needs_compiler
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
def test_flex_layer_types(topology):
    check_flex(topology, "inside", position_embedding_type="rotary", **MIXED)


@needs_compiler
def test_flex_encoder_decoder():
    check_flex("encoder_decoder", "right", num_hidden_layers=1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_flex_grid(topology, position, layers, side):
    check_flex(topology, side, position_embedding_type=position, **LAYERS[layers])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_flex_head_variants(topology, variant):
    check_flex(topology, "left", position_embedding_type="relative", **MIXED, **VARIANTS[variant])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("position", ["none", "relative"])
def test_flex_takes_texts_of_any_length(position):
    """One model reads batch after batch, each of another length, and so may compile for lengths in general."""
    model = tiny_model("decoder", "flex_attention", position_embedding_type=position, num_hidden_layers=1)
    eager = tiny_model("decoder", "eager", position_embedding_type=position, num_hidden_layers=1)
    for lengths in ((9, 5, 7), (12, 17, 3), (23, 4, 6)):
        texts = Ragged("decoder", "left", lengths)
        with torch.no_grad():
            assert_equal(texts.together(model), texts.alone(eager), what=f"lengths {lengths}")


# ---------------------------------------------------------------------------------------------------------------------
# No mask


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_mask_is_an_all_ones_mask(topology, backend):
    """With no mask given, sdpa turns encoder or cross-attention causal."""
    texts = Ragged(topology, "right", lengths=(6, 6), target_lengths=(5, 5))
    model, eager = tiny_model(topology, backend), tiny_model(topology, "eager")
    bare = {name: value for name, value in texts.batch.items() if "mask" not in name}
    with torch.no_grad():
        expected = eager(**bare).logits
        assert_equal(model(**bare).logits, expected)
        assert_equal(model(**texts.batch).logits, expected)
        if topology != "decoder":
            edited = dict(bare, input_ids=bare["input_ids"].clone())
            edited["input_ids"][:, -1] = edited["input_ids"][:, -1] % 50 + 40
            change = (model(**edited).logits - expected).abs().amax(-1)  # [B, T]
            assert (change[:, 0] > 1e-3).all(), "the last source token must reach output 0"


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("how", ["at load", "live"])
def test_every_backend_keeps_its_mask(how, backend):
    """A new attention name without a mask function loses its mask."""
    model = tiny_model("decoder", backend if how == "at load" else None)
    if how == "live":
        model.set_attn_implementation(backend)
    ids, mask = pad_rows(ragged_rows(9, 6), "left")
    last, pad = ids.clone(), ids.clone()
    last[:, -1] = (last[:, -1] + 1) % VOCAB
    pad[1, :3] = (pad[1, :3] + 1) % VOCAB
    with torch.no_grad():
        logits, after_last, after_pad = (model(x, attention_mask=mask).logits for x in (ids, last, pad))
    real = mask.bool()
    assert_equal(after_last[:, :-1][real[:, :-1]], logits[:, :-1][real[:, :-1]], what="logits before an edited token")
    assert (after_last[:, -1] - logits[:, -1]).abs().max() > 1e-3
    assert_equal(after_pad[real], logits[real], what="logits beside an edited pad")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_switching_backends_live(topology):
    """A model keeps its weights and its answers while its backend is switched, panel by panel too."""
    texts = Ragged(topology, "left")
    model = tiny_model(topology, "eager", position_embedding_type="relative")
    expected = texts.together(model)
    model.set_attn_implementation("sdpa")
    assert {config._attn_implementation for config in configs_of(model)} == {"sdpa"}
    assert_equal(texts.together(model), expected)
    if topology == "encoder_decoder":
        model.set_attn_implementation({"encoder": "eager", "decoder": "sdpa"})
        assert model.model.encoder.config._attn_implementation == "eager"
        assert model.model.decoder.config._attn_implementation == "sdpa"
        assert_equal(texts.together(model), expected)


def configs_of(model) -> list:
    base = model.model
    return [base.encoder.config, base.decoder.config] if hasattr(base, "encoder") else [base.config]


# ---------------------------------------------------------------------------------------------------------------------
# 4D masks


def custom_masks(batch: int, heads: int, length: int) -> dict[str, torch.Tensor]:
    """4D masks that hide a third of the pairs, never a token from itself."""
    visible = (torch.rand(batch, heads, length, length) < 0.67) | torch.eye(length, dtype=torch.bool)
    shared, lowest = visible[:, :1], torch.finfo(torch.float32).min
    return {
        "boolean": shared,
        "boolean, one for all rows": shared[:1],
        "boolean, per head": visible,
        "additive": torch.where(shared, 0.0, lowest),
        "additive, minus infinity": torch.where(shared, 0.0, -torch.inf),
        "additive, per head, soft": torch.where(visible, torch.randn(visible.shape), lowest),
    }


@pytest.mark.parametrize("topology", ["encoder", "decoder"])
@pytest.mark.parametrize("position", ["rotary", "relative"])
@pytest.mark.parametrize("name", custom_masks(1, 4, 1))
def test_4d_masks(topology, position, name):
    """A 4D mask is the whole mask: each backend gives eager's outputs and gradients."""
    mask, ids = custom_masks(2, 4, 7)[name], random_tokens(2, 7)
    eager, sdpa = (
        tiny_model(topology, backend, position_embedding_type=position, **GROUPED) for backend in ("eager", "sdpa")
    )
    expected = eager(ids, attention_mask=mask).logits
    actual = sdpa(ids, attention_mask=mask).logits
    assert_equal(actual, expected)
    weights = torch.randn_like(expected) / expected.numel() ** 0.5
    assert_equal_gradients(gradients(sdpa, (actual * weights).sum()), gradients(eager, (expected * weights).sum()))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", custom_masks(1, 4, 1))
@torch.no_grad()
def test_4d_masks_with_flex(name):
    mask, ids = custom_masks(2, 4, 7)[name], random_tokens(2, 7)
    options = dict(position_embedding_type="alibi", num_hidden_layers=1)
    eager, flex = (tiny_model("decoder", backend, **options) for backend in ("eager", "flex_attention"))
    assert_equal(flex(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("position", POSITIONS)
def test_4d_causal_mask_is_the_decoders_own(position, kind, backend):
    """A lower triangle given by hand changes nothing in a decoder, and makes an encoder of equal weights causal."""
    model = tiny_model(TriptychForCausalLM, backend, position_embedding_type=position)
    ids = random_tokens(2, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    if kind == "additive":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    assert_equal(model(ids, attention_mask=mask).logits, model(ids).logits)


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_4d_mask_decides_who_sees_whom(kind, backend):
    """In one layer, token j changes output i exactly where the mask says so."""
    visible = custom_masks(1, 4, 8)["boolean"]
    mask = visible if kind == "boolean" else torch.where(visible, 0.0, -torch.inf)
    model = tiny_model(TriptychForMaskedLM, backend, num_hidden_layers=1, position_embedding_type="none")
    embeddings = torch.randn(1, 8, 32, requires_grad=True)
    logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
    for query in range(8):
        (gradient,) = torch.autograd.grad(logits[0, query].square().sum(), embeddings, retain_graph=True)
        assert torch.equal(gradient[0].abs().amax(-1) > 0, visible[0, 0, query])


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
def test_4d_cross_attention_mask(backend):
    """A mask between targets and sources, of the decoder's own."""
    model = tiny_model("encoder_decoder", backend, share_embeddings=False).model.decoder
    memory, ids = torch.randn(2, 5, 32), random_tokens(2, 4)
    padding = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = model(ids, encoder_hidden_states=memory, encoder_attention_mask=padding).last_hidden_state
    mask = padding.bool()[:, None, None].expand(2, 1, 4, 5)
    assert_equal(model(ids, encoder_hidden_states=memory, encoder_attention_mask=mask).last_hidden_state, expected)


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_4d_cross_attention_mask_of_padded_targets(side):
    """Its rows are the target tokens as given, among them those whose pads leave on the way."""
    model = tiny_model("encoder_decoder", share_embeddings=False).model.decoder
    rows, memory = ragged_rows(6, 4), torch.randn(2, 5, 32)
    ids, padding = pad_rows(rows, side, extra=1)
    mask = torch.rand(2, 1, ids.shape[1], 5) < 0.5
    mask[..., 0] = True
    inputs = dict(encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False)
    actual = model(ids, attention_mask=padding, **inputs).last_hidden_state
    for index, row in enumerate(rows):
        real = padding[index].bool()
        inputs = dict(encoder_hidden_states=memory[index, None], encoder_attention_mask=mask[index, None, :, real])
        assert_equal(actual[index, real], model(row[None], **inputs).last_hidden_state[0])


# ---------------------------------------------------------------------------------------------------------------------
# Dropout, weights, half precision


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"norm_type": "layernorm"}, {"sliding_window": 4}], ids=str)
def test_mixed_precision_trains(changes, backend):
    """Norms and angles are in single precision under autocast, but what attends is of one type, there and back."""
    changes = {**GROUPED, "position_embedding_type": "rotary", "attention_dropout": 1e-9, **changes}  # drops nothing
    texts, model = Ragged("decoder", "left"), tiny_model("decoder", backend, **changes).train()
    expected = gradients(model, text_loss(model, texts))
    with torch.autocast("cpu", torch.bfloat16):
        loss = text_loss(model, texts)
    actual = gradients(model, loss)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() < 0.15 * gradient.norm(), name


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@torch.no_grad()
def test_dropout_is_off_in_eval(topology, backend):
    """Dropout stays on in eval."""
    dropouts = dict(attention_dropout=0.5, hidden_dropout=0.5, activation_dropout=0.5)
    texts = Ragged(topology, "right")
    model, without = (tiny_model(topology, backend, num_hidden_layers=1, **changes) for changes in (dropouts, {}))
    first = texts.together(model)
    assert torch.equal(first, texts.together(model))
    assert torch.equal(first, texts.together(without))


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout", "activation_dropout"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_dropout_is_on_in_training(topology, name, backend):
    texts = Ragged(topology, "right")
    model = tiny_model(topology, backend, **{name: 0.5}).train()
    assert (texts.together(model) - texts.together(model)).abs().max() > 1e-3


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_weights(topology):
    """Eager returns the weights of each layer: distributions, zero on pads."""
    texts = Ragged(topology, "left")
    model = tiny_model(topology, "eager")
    outputs = model(**texts.batch, output_attentions=True)
    names = {"encoder_decoder": ("encoder_attentions", "decoder_attentions", "cross_attentions")}
    source = texts.batch["attention_mask"].bool()
    for name in names.get(topology, ("attentions",)):
        weights = outputs[name]
        assert len(weights) == 2
        pads = ~(texts.mask if name == "decoder_attentions" else source)
        queries = source if name == "encoder_attentions" else texts.mask
        for layer in weights:
            assert_equal(layer.sum(-1), torch.ones(layer.shape[:-1]))
            on_pads = layer.masked_select(pads[:, None, None] & queries[:, None, :, None])
            assert on_pads.numel() and (on_pads == 0).all()


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@torch.no_grad()
def test_bfloat16(topology, position, backend):
    """Half precision stays near float32; bfloat16 keeps 8 bits, and two layers add up their rounding."""
    texts = Ragged(topology, "left")
    expected = texts.together(tiny_model(topology, backend, position_embedding_type=position))
    actual = texts.together(tiny_model(topology, backend, position_embedding_type=position).bfloat16())
    assert actual.dtype == torch.bfloat16
    assert_equal(actual.float(), expected, tolerance=0.1)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gradient_checkpointing_changes_nothing(topology, backend, use_reentrant):
    texts = Ragged(topology, "left")
    model = tiny_model(topology, backend, position_embedding_type="relative").train()
    expected = gradients(model, text_loss(model, texts))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_equal_gradients(gradients(model, text_loss(model, texts)), expected, tolerance=1e-6)


@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_double_precision(position):
    """A double-precision model is one in all its parts: backends then agree to twelve digits."""
    texts = Ragged("decoder", "left")
    eager, sdpa = (tiny_model("decoder", name, position_embedding_type=position).double() for name in ("eager", "sdpa"))
    expected = texts.together(sdpa)
    assert expected.dtype == torch.float64
    assert_equal(texts.together(eager), expected, tolerance=1e-12)
