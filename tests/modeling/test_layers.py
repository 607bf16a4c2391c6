"""What stands between tokens and logits, by hand: residual streams, feed-forward, embeddings, pooling, first weights.

Shapes: B batch, T tokens, D hidden_size, E embedding_size.
"""

import pytest
import torch
from tiny import SIDES, assert_equal, pad_rows, ragged_rows, random_tokens, randomised, tiny_config, tiny_model
from torch.nn import functional as F

import triptych
from triptych.layers import TriptychLayer, TriptychMLP
from triptych.stacks import pool


def by_hand(layer: TriptychLayer, position: str, s: float, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The residual stream of one layer, as its papers draw it."""
    sublayers = (
        ("self_attn", lambda y: layer.self_attn(y, is_causal=False)[0]),
        ("cross_attn", lambda y: layer.cross_attn(y, memory)[0]),
        ("mlp", layer.mlp),
    )
    for name, f in sublayers:
        norm, after = getattr(layer, f"{name}_norm"), getattr(layer, f"{name}_post_norm", None)
        if position == "post":
            x = norm(s * x + f(x))
        elif position == "pre":
            x = x + s * f(norm(x))
        elif position == "none":
            x = x + s * f(x)
        else:
            x = x + s * after(f(norm(x)))
    return x


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("position", ["post", "pre", "sandwich", "none"])
def test_residual_stream(position, scale, norm_type):
    """Post-norm: norm(s x + f(x)); pre-norm: x + s f(norm(x)); sandwich: x + s norm(f(norm(x)));
    none: x + s f(x)."""
    config = tiny_config(
        "decoder", norm_position=position, residual_scale=scale, norm_type=norm_type, add_cross_attention=True
    )
    config._attn_implementation = "eager"
    layer = randomised(TriptychLayer(config, 0)).eval()
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    assert_equal(layer(x, memory, is_causal=False), by_hand(layer, position, scale, x, memory))


@pytest.mark.parametrize("position", ["post", "pre", "sandwich", "none"])
def test_final_norm(position):
    """A post-norm stream is normalised already; those with norms inside get one after the last layer."""
    model = tiny_model(triptych.TriptychEncoderModel, norm_position=position)
    states = {}
    model.layers[-1].register_forward_hook(lambda module, inputs, output: states.update(last=output))
    output = model(random_tokens(2, 5)).last_hidden_state
    has_norm = position in ("pre", "sandwich")
    assert torch.equal(output, model.norm(states["last"]) if has_norm else states["last"])
    assert any(name.startswith("norm.") for name, _ in model.named_parameters()) == has_norm


@pytest.mark.parametrize("act", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["dense", "gated"])
def test_feed_forward(kind, bias, act):
    """Vaswani et al. 2017, equation 2; Shazeer 2020, equation 5."""
    mlp = randomised(TriptychMLP(tiny_config("encoder", mlp_type=kind, mlp_bias=bias, hidden_act=act)))
    x, f = torch.randn(2, 5, 32), getattr(F, act)

    def project(linear, states):
        return states @ linear.weight.T + (linear.bias if bias else 0)

    up = project(mlp.up_proj, x)
    inner = f(project(mlp.gate_proj, x)) * up if kind == "gated" else f(up)
    assert_equal(mlp(x), project(mlp.down_proj, inner))
    assert (mlp.down_proj.bias is not None) == bias


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("size", [32, 16])
def test_embeddings(size, scaled):
    """Scaled tokens + positions + types, normalised, and projected to the stream if the table is narrower."""
    model = tiny_model(
        triptych.TriptychEncoderModel,
        embedding_size=size,
        scale_embedding=scaled,
        position_embedding_type="learned",
        type_vocab_size=3,
        embedding_norm=True,
    )
    ids, types = random_tokens(2, 6), torch.randint(0, 3, (2, 6))
    embedded = model.embed_tokens(ids) * (size**0.5 if scaled else 1)
    embedded = embedded + model.embed_positions(torch.arange(6)) + model.embed_token_types(types)
    expected = model.embed_norm(embedded)
    if size != 32:
        expected = model.embed_proj(expected)
    states = model(ids, token_type_ids=types, output_hidden_states=True).hidden_states
    assert_equal(states[0], expected)
    assert_equal(model(inputs_embeds=model.embed_tokens(ids), token_type_ids=types).last_hidden_state, states[-1])
    zeros = torch.zeros_like(types)
    assert torch.equal(model(ids).last_hidden_state, model(ids, token_type_ids=zeros).last_hidden_state)


@pytest.mark.parametrize("topology", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize("tied", [True, False])
def test_factorised_table_reaches_the_logits(tied, topology):
    """Logits are of the width of the table, and come from the table itself if tied."""
    model = tiny_model(topology, embedding_size=16, tie_word_embeddings=tied)
    assert model.lm_head.weight.shape == (97, 16)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    inputs = dict(input_ids=random_tokens(1, 4))
    if topology == "encoder_decoder":
        inputs["decoder_input_ids"] = random_tokens(1, 3)
    assert model(**inputs).logits.shape[-1] == 97


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_of_an_encoder_decoder(tied, shared):
    """Source, target and output are one table, or two, or three (Press & Wolf 2017)."""
    model = tiny_model("encoder_decoder", tie_word_embeddings=tied, share_embeddings=shared)
    source, target = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
    assert (target is None) == shared  # the decoder then looks up in the encoder's
    target = source if shared else target
    assert (model.lm_head.weight is target.weight) == tied
    tables = [parameter for parameter in model.parameters() if parameter.shape == source.weight.shape]
    assert len(tables) == 3 - tied - shared


@torch.no_grad()
def test_a_shared_table_serves_both_panels():
    """Sources and targets are looked up in one table, and a decoder without one asks for embeddings."""
    model, source, target = tiny_model("encoder_decoder"), random_tokens(2, 5), random_tokens(2, 4)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    table = model.get_input_embeddings()
    embedded = dict(inputs_embeds=table(source), decoder_inputs_embeds=table(target))
    assert_equal(model(**embedded).logits, expected, tolerance=0)
    with pytest.raises(ValueError, match="no table of its own"):
        model.get_decoder()(target, encoder_hidden_states=torch.randn(2, 5, 32))


def test_shared_layers_are_one_layer():
    """ALBERT: depth costs no parameters, and equals a deep model of equal layers."""
    shared = tiny_model(triptych.TriptychEncoderModel, share_layers=True, num_hidden_layers=3)
    deep = tiny_model(triptych.TriptychEncoderModel, num_hidden_layers=3)
    weights = shared.state_dict()
    copies = {
        name.replace("layers.0.", f"layers.{depth}."): tensor for name, tensor in weights.items() for depth in range(3)
    }
    deep.load_state_dict(copies)
    ids = random_tokens(2, 6)
    assert_equal(shared(ids).last_hidden_state, deep(ids).last_hidden_state, tolerance=0)


# ---------------------------------------------------------------------------------------------------------------------
# Pooling


@pytest.mark.parametrize("side", [None, *SIDES])
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_pooling_takes_real_tokens(pooling, side):
    rows = ragged_rows(5, 3, 1) if side != "inside" else ragged_rows(5, 3, 2)
    ids, mask = (torch.stack(ragged_rows(5, 5)), None) if side is None else pad_rows(rows, side, extra=1)
    states = torch.randn(*ids.shape, 32)
    actual = pool(states, mask, pooling)
    for index, state in enumerate(states):
        real = state if mask is None else state[mask[index].bool()]
        expected = {"first": real[0], "last": real[-1], "mean": real.mean(0)}[pooling]
        assert_equal(actual[index], expected, tolerance=1e-6)


def test_a_mean_is_in_reach_of_half_precision_whatever_the_sum():
    """The sum of a text of 2,000 tokens can be more than 65,504, which float16 calls infinite."""
    states = torch.full((1, 2000, 4), 100.0, dtype=torch.float16)
    assert_equal(pool(states, None, "mean"), states[:, 0], tolerance=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize("panel", ["Encoder", "Decoder"])
def test_a_texts_class_does_not_depend_on_its_pads(panel, pooling, side):
    model = tiny_model(getattr(triptych, f"Triptych{panel}ForSequenceClassification"), pooling=pooling, num_labels=3)
    rows = ragged_rows(7, 4, 5)
    ids, mask = pad_rows(rows, side)
    alone = torch.cat([model(row[None]).logits for row in rows])
    assert_equal(model(ids, attention_mask=mask).logits, alone)


# ---------------------------------------------------------------------------------------------------------------------
# First weights

BIG = dict(vocab_size=500, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)  # enough to measure


def deviations(**changes) -> dict[str, float]:
    """Standard deviation of each matrix of a freshly built decoder, in layer 0 and around."""
    model = triptych.TriptychForCausalLM(tiny_config("decoder", **{**BIG, "mlp_type": "gated", **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
    return {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim == 2}


def close(actual: float, expected: float) -> bool:
    return abs(actual / expected - 1) < 0.03  # the smallest matrix has 65,536 entries: 0.3 % of noise


WRITERS = ("o_proj", "down_proj")


@pytest.mark.parametrize("position", ["pre", "sandwich"])
def test_first_weights_of_pre_norm_stacks(position):
    """What writes into the stream is smaller by the square root of twice the depth (Radford et al. 2019)."""
    for name, std in deviations(norm_position=position, initializer_range=0.02).items():
        assert close(std, 0.02 * (8**-0.5 if any(word in name for word in WRITERS) else 1)), name


def test_first_weights_of_post_norm_stacks():
    for name, std in deviations(norm_position="post", initializer_range=0.02).items():
        assert close(std, 0.02), name


def test_first_weights_of_deepnorm():
    """Wang et al. 2022: with alpha in the stream, values, outputs and feed-forward start at 1 / (sqrt(2) alpha)."""
    small = (*WRITERS, "v_proj", "gate_proj", "up_proj")
    for name, std in deviations(norm_position="post", residual_scale=3.0, initializer_range=0.02).items():
        assert close(std, 0.02 / (2**0.5 * 3 if any(word in name for word in small) else 1)), name


def test_first_weights_of_2017():
    """Glorot-uniform projections, and embeddings of deviation D^-0.5, which their scale brings to one."""
    for name, std in deviations(initializer_range=None).items():
        if "embed" in name:
            assert close(std, 256**-0.5), name
        else:
            wide = 1024 if "mlp" in name else 256
            assert close(std, (2 / (256 + wide)) ** 0.5), name


def test_deep_stacks_start_quietly():
    """48 post-norm layers with DeepNorm: the first loss is near that of a uniform guess, and gradients are finite."""
    config = triptych.TriptychConfig.from_preset("transformer_deep_48", vocab_size=97, hidden_size=32)
    small = dict(intermediate_size=64, num_attention_heads=4, head_dim=8, embedding_size=32, num_key_value_heads=4)
    for panel in (config.encoder, config.decoder):
        for name, value in small.items():
            setattr(panel, name, value)
    model = triptych.TriptychForConditionalGeneration(config)
    loss = model(input_ids=random_tokens(2, 9), labels=random_tokens(2, 7)).loss
    loss.backward()
    assert loss < 2 * torch.tensor(97.0).log()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 2, 4])], ids=str)
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
def test_logits_to_keep(topology, keep):
    """The last positions, or those of an index."""
    model, ids = tiny_model(topology), random_tokens(2, 6)
    inputs = dict(input_ids=ids) | (dict(decoder_input_ids=ids) if topology == "encoder_decoder" else {})
    logits = model(**inputs).logits
    expected = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    assert_equal(model(**inputs, logits_to_keep=keep).logits, expected)


@pytest.mark.parametrize("topology", ["encoder", "decoder", "encoder_decoder"])
def test_hidden_states(topology):
    """The input of the first layer and the output of each, the last one normalised; as a tuple too if asked for."""
    model, ids = tiny_model(topology, norm_position="pre"), random_tokens(2, 6)
    inputs = dict(input_ids=ids) | (dict(decoder_input_ids=ids) if topology == "encoder_decoder" else {})
    base = model.model(**inputs, output_hidden_states=True)
    names = {"encoder_decoder": ("encoder_hidden_states", "decoder_hidden_states")}.get(topology, ("hidden_states",))
    for name in names:
        assert len(base[name]) == 3
        assert all(state.shape == (2, 6, 32) for state in base[name])
    assert torch.equal(base[names[-1]][-1], base.last_hidden_state)
    if topology == "encoder_decoder":
        assert torch.equal(base.encoder_hidden_states[-1], base.encoder_last_hidden_state)
    output = model(**inputs, output_hidden_states=True)
    assert torch.equal(output[names[0]][0], base[names[0]][0])
    assert torch.equal(model(**inputs, return_dict=False)[0], output.logits)


@pytest.mark.parametrize("form", ["output", "tuple"])
def test_encoder_outputs_stand_for_the_source(form):
    """An encoder run once serves many targets."""
    model, source, target = tiny_model("encoder_decoder"), random_tokens(2, 5), random_tokens(2, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    outputs = model.get_encoder()(source, attention_mask=mask)
    if form == "tuple":
        outputs = outputs.to_tuple()
    assert_equal(model(encoder_outputs=outputs, attention_mask=mask, decoder_input_ids=target).logits, expected, 0)
