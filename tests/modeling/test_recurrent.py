"""Recurrent layers and the scores of their time are the equations, text by text, and every relation of texts holds.

Shapes: B batch, T tokens, S source tokens, H heads, d head width, D model width.
"""

import functools

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_generation import new_tokens
from test_linear_attention import GENERATIONS
from test_relations import (
    assert_cache_forgets,
    assert_cache_is_no_cache,
    assert_cache_takes_pads,
)
from test_saving import example, outputs, run_without_package
from tiny import (
    QUICK_BACKENDS,
    SIDES,
    TOPOLOGIES,
    Ragged,
    assert_equal,
    assert_equal_gradients,
    gradients,
    random_tokens,
    randomised,
    tiny_config,
    tiny_model,
)
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache

from triptych import TriptychConfig, TriptychForCausalLM, TriptychForConditionalGeneration
from triptych.alignment import TriptychAlignedAttention
from triptych.layers import TriptychLayer
from triptych.layout import Layout
from triptych.masks import align
from triptych.recurrence import TriptychRecurrence
from triptych.states import Text

PLAIN = dict(position_embedding_type="none", norm_position="none", mlp_type="none", scale_embedding=False)
PREDICTIVE = dict(cross_attention_window=2, cross_attention_alignment="predictive")
STACKS = {
    "search": dict(layer_types=["gru"] * 2, residual=False, **PLAIN),  # the net of 2014 and its additive scores
    "deep": dict(layer_types=["lstm"] * 3, num_hidden_layers=3, **PLAIN),  # that of 2016, with a residual stream
    "mixed": dict(
        layer_types=["lstm", "sliding_attention"],
        sliding_window=4,
        position_embedding_type="rotary",
        norm_position="pre",
    ),
}
DECODERS = {
    "search": dict(cross_attention_score="additive", cross_attention_layers=[1]),
    "deep": dict(cross_attention_window=1, attention_scale=1.0),
    "mixed": PREDICTIVE,
}
SEEDS = st.integers(0, 999)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
in_every_stack = pytest.mark.parametrize("stack", STACKS)
in_every_kind = pytest.mark.parametrize("kind", ["lstm", "gru"])


@functools.cache
def model_of(topology: str, stack: str, backend: str | None = None):
    fields = {**STACKS[stack], "tie_word_embeddings": False}
    if topology == "encoder_decoder":
        fields["decoder"] = DECODERS[stack]
    model = tiny_model(topology, backend, **fields)
    if topology != "encoder":
        model.generation_config.eos_token_id = None
    return model.double()


def layer_of(kind: str, topology: str) -> TriptychRecurrence:
    """A recurrence in double precision whose parameters are all random."""
    layer = TriptychRecurrence(tiny_config(topology, layer_types=[kind] * 2), layer_idx=0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence


def step_by_step(layer: TriptychRecurrence, x: torch.Tensor, suffix: str = "") -> torch.Tensor:
    """Outputs of one text [T, D] by the equations at the head of `recurrence.py`, one token after the other."""
    w, u, b, a = (getattr(layer.rnn, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    h = c = x.new_zeros(u.shape[1])
    states = []
    for token in x:
        if layer.is_lstm:
            i, f, g, o = (w @ token + b + u @ h + a).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (r, z, n), (hr, hz, hn) = (w @ token + b).chunk(3), (u @ h + a).chunk(3)
            z = (z + hz).sigmoid()
            h = (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * h
        states.append(h)
    return torch.stack(states)


def by_hand(layer: TriptychRecurrence, x: torch.Tensor) -> torch.Tensor:
    """Outputs of one text [T, D]; an encoder's second half reads backwards."""
    forward = step_by_step(layer, x)
    if not layer.rnn.bidirectional:
        return forward
    return torch.cat((forward, step_by_step(layer, x.flip(0), "_reverse").flip(0)), dim=-1)


@in_every_kind
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), pads=st.integers(0, 4), seed=SEEDS)
def test_every_text_is_read_by_itself(kind, topology, lengths, pads, seed):
    """Rows with pads anywhere, each of several documents: outputs and gradients are those of the equations."""
    torch.manual_seed(seed)
    layer, length = layer_of(kind, topology), sum(lengths) + pads
    x = torch.randn(2, length, 32, dtype=torch.float64, requires_grad=True)
    slots = torch.randperm(length)[: sum(lengths)].sort().values
    padding = torch.stack((torch.zeros(length, dtype=torch.bool).scatter(0, slots, True), torch.ones(length) > 0))
    documents = torch.zeros(2, length, dtype=torch.long)
    documents[0, slots] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = documents.cummax(-1).values
    actual, _ = layer(x, Text(padding if pads else None, documents if len(lengths) > 1 else None))
    texts = [*slots.split(lengths), torch.arange(length)]
    expected = [by_hand(layer, x[row][text]) for row, text in zip([0] * len(lengths) + [1], texts, strict=True)]
    actual = torch.cat((actual[0, slots], actual[1]))
    assert_equal(actual, torch.cat(expected), 1e-10)
    weights = torch.randn_like(actual)
    leaves = [x, *layer.parameters()]
    got, wanted = (torch.autograd.grad((y * weights).sum(), leaves) for y in (actual, torch.cat(expected)))
    for one, other in zip(got, wanted, strict=True):
        assert_equal(one, other, 1e-10)


@in_every_kind
def test_first_weights(kind):
    """Orthogonal to the state, within Glorot's bounds from the input, for each gate; an LSTM remembers at first."""
    changes = dict(layer_types=[kind] * 2, initializer_range=None)
    rnn = TriptychForCausalLM(tiny_config("decoder", **changes)).model.layers[0].recurrence.rnn
    for gate in rnn.weight_hh_l0.split(32):
        assert_equal(gate @ gate.T, torch.eye(32))
    assert 0.9 < rnn.weight_ih_l0.abs().max() / (6 / 64) ** 0.5 <= 1
    biases = torch.zeros_like(rnn.bias_ih_l0)
    if kind == "lstm":
        biases[32:64] = 1.0
    assert torch.equal(rnn.bias_ih_l0, biases)
    assert not rnn.bias_hh_l0.any()
    changes["initializer_range"] = 0.3
    rnn = TriptychForCausalLM(tiny_config("decoder", **changes)).model.layers[0].recurrence.rnn
    assert all(weight.detach().std() == pytest.approx(0.3, rel=0.1) for weight in (rnn.weight_ih_l0, rnn.weight_hh_l0))


# ---------------------------------------------------------------------------------------------------------------------
# What stands around it


@pytest.mark.parametrize("residual", [True, False])
def test_layers_before_2017(residual):
    """Wu et al. 2016: x + f(x). Luong et al. 2015: f(x), then tanh(W [c; h])."""
    config = tiny_config("decoder", layer_types=["lstm"] * 2, residual=residual, add_cross_attention=True, **PLAIN)
    config._attn_implementation = "eager"
    layer = randomised(TriptychLayer(config, 0)).eval()
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    h, _ = layer.recurrence.rnn(x)
    h = x + h if residual else h
    c, _ = layer.cross_attn(h, memory)
    assert_equal(layer(x, memory), h + c if residual else torch.tanh(torch.cat((c, h), -1) @ layer.join_proj.weight.T))
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == {"recurrence", "cross_attn"} | (
        set() if residual else {"join_proj"}
    )


def test_the_last_layer_alone_reads_the_encoder():
    decoder = model_of("encoder_decoder", "search").model.decoder
    assert [hasattr(layer, "cross_attn") for layer in decoder.layers] == [False, True]


# ---------------------------------------------------------------------------------------------------------------------
# Scores and windows of cross-attention


@pytest.mark.parametrize("std", [None, 0.3])
def test_first_weights_of_a_score(std):
    model = TriptychForConditionalGeneration(
        tiny_config("encoder_decoder", initializer_range=std, decoder={"cross_attention_score": "additive"})
    )
    weights = torch.cat([layer.cross_attn.score_weight for layer in model.model.decoder.layers])
    assert weights.detach().std() == pytest.approx(std or 8**-0.5, rel=0.25)


def aligned(backend: str, **fields) -> TriptychAlignedAttention:
    config = tiny_config("decoder", add_cross_attention=True, num_key_value_heads=2, **fields)
    config._attn_implementation = backend
    layer = TriptychAlignedAttention(config, 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def attention_by_hand(layer, x, memory, scores, visible):
    """Weighted values of one text [T, D]; `scores` [H, T, S], where `visible` [T, S]."""
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    values = (memory @ layer.v_proj.weight.T).view(len(memory), 2, 8).repeat_interleave(2, 1)  # [S, H, d]
    return torch.einsum("hts,shd->thd", weights, values).flatten(1) @ layer.o_proj.weight.T


def scores_by_hand(layer, x, memory, is_additive):
    """v . tanh(W h + U m) (Bahdanau et al. 2015, appendix A.1.2), or the scaled product, [H, T, S]."""
    query = (x @ layer.q_proj.weight.T).view(len(x), 4, 8)
    key = (memory @ layer.k_proj.weight.T).view(len(memory), 2, 8).repeat_interleave(2, 1)
    if not is_additive:
        return torch.einsum("thd,shd->hts", query, key) / 8**0.5
    inner = torch.tanh(query[:, None] + key[None])  # [T, S, H, d]
    return torch.stack([inner[:, :, head] @ layer.score_weight[head] for head in range(4)])


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize(
    ("score", "window"),
    [("additive", None), *((score, window) for score in ("dot", "additive") for window in ("monotonic", "predictive"))],
)
def test_alignment_is_the_formula(backend, score, window):
    """Outputs and gradients of a batch with source pads, against each text by hand, on any backend."""
    fields = {} if window is None else dict(cross_attention_window=2, cross_attention_alignment=window)
    layer = aligned(backend, cross_attention_score=score, **fields)
    x, memory = torch.randn(2, 9, 32, dtype=torch.float64), torch.randn(2, 7, 32, dtype=torch.float64)
    padding = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [1] * 7]).bool()
    mask = padding[:, None, None].expand(-1, 1, 9, -1)
    if window is not None:
        mask = align(mask, Layout(torch.arange(9), torch.arange(9)[None], 2), 7, padding, None)
    actual, _ = layer(x, memory, attention_mask=mask, is_causal=False)

    expected = []
    for row in range(2):
        source = memory[row][padding[row]]
        scores, length = scores_by_hand(layer, x[row], source, score == "additive"), len(source)
        place = torch.arange(9).clamp(max=length - 1).double()
        if window == "predictive":
            place = length * (torch.tanh(x[row] @ layer.place_proj.weight.T) @ layer.place_score.weight[0]).sigmoid()
        distance = torch.arange(length) - place[:, None]
        if window == "predictive":
            scores = scores - distance**2 / 2  # deviation 2 / 2
        visible = distance.abs() <= (2 if window else 99)
        assert window is None or not visible.all()
        expected.append(attention_by_hand(layer, x[row], source, scores, visible))
    expected = torch.stack(expected)
    assert_equal(actual, expected, 1e-10)
    weights = torch.randn_like(actual)
    got, wanted = (
        torch.autograd.grad((y * weights).sum(), list(layer.parameters()), allow_unused=True)
        for y in (actual, expected)
    )
    for (name, _), one, other in zip(layer.named_parameters(), got, wanted, strict=True):
        if other is not None:
            assert_equal(one, other, 1e-10, name)


@in_every_stack
def test_a_source_of_pads_leaves_all_finite(stack):
    """No key is visible then; the model learns nothing of such a text, and breaks nothing."""
    model, source, target = model_of("encoder_decoder", stack), random_tokens(2, 5), random_tokens(2, 4)
    mask = torch.tensor([[1] * 5, [0] * 5])
    output = model(source, attention_mask=mask, decoder_input_ids=target)
    assert output.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model, output.logits[0].sum()).values())


# ---------------------------------------------------------------------------------------------------------------------
# Texts


@in_every_stack
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_padded_batches_equal_texts_alone(topology, side, stack):
    """Outputs, and gradients weighted by lengths."""
    model, texts = model_of(topology, stack), Ragged(topology, side)
    together, alone = texts.together(model), texts.alone(model)
    assert_equal(together, alone)
    labels = texts.labels[texts.mask]
    assert_equal_gradients(
        gradients(model, F.cross_entropy(together, labels)), gradients(model, F.cross_entropy(alone, labels)), 1e-6
    )


@in_every_stack
@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), use_cache=st.booleans(), seed=SEEDS)
@torch.no_grad()
def test_packing_is_running_apart(topology, stack, lengths, use_cache, seed):
    """A state begins anew with each document, and packed pairs meet only each other."""
    torch.manual_seed(seed)
    model, prefix = model_of(topology, stack), "decoder_" if topology == "encoder_decoder" else ""
    documents = [random_tokens(1, length) for length in lengths]
    inputs = [{f"{prefix}input_ids": document} for document in documents]
    if prefix:
        sources = [random_tokens(1, length + 1) for length in lengths]
        inputs = [one | {"input_ids": source} for one, source in zip(inputs, sources, strict=True)]
    expected = torch.cat([model(**one).logits for one in inputs], dim=1)
    packed = {name: torch.cat([one[name] for one in inputs], dim=1) for name in inputs[0]}
    for name in inputs[0]:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor([one[name].shape[1] for one in inputs]))
        packed[name.replace("input_ids", "seq_idx")] = numbers[None]
    if topology != "encoder":
        packed["use_cache"] = use_cache
    assert_equal(model(**packed).logits, expected)


@in_every_stack
@torch.no_grad()
def test_an_encoder_reads_both_ways_and_a_decoder_one(stack):
    ids = random_tokens(1, 9)
    for topology, place, reached in (("encoder", 0, 9), ("encoder", 8, 9), ("decoder", 5, 4)):
        model, edited = model_of(topology, stack), ids.clone()
        edited[0, place] = (edited[0, place] + 40) % 97
        changed = (model(edited).logits - model(ids).logits).abs().amax(-1) > 1e-6
        assert changed.sum() == reached


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


@pytest.mark.parametrize("stack", ["search", "deep"])
@given(sizes=SIZES, pads=st.integers(0, 6), seed=SEEDS)
@torch.no_grad()
def test_cache_with_pads_anywhere(stack, sizes, pads, seed):
    """A state takes pads in the middle of a cached text, and a call of pads only."""
    torch.manual_seed(seed)
    assert_cache_takes_pads(model_of("decoder", stack), sizes, pads)


@torch.no_grad()
def test_a_state_goes_with_its_beam():
    """After a reordering, each row goes on from the text of the row that it was chosen from."""
    model, ids, more = model_of("decoder", "deep"), random_tokens(3, 5), random_tokens(3, 2)
    cache, order = model(ids, use_cache=True).cache, torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    assert [[part.shape for part in layer.past()] for layer in cache.layers] == [[(3, 32), (3, 32)]] * 3
    expected = model(torch.cat((ids[order], more), dim=1), use_cache=False).logits[:, 5:]
    assert_equal(model(more, cache=cache).logits, expected)


@in_every_stack
@given(sizes=SIZES, removed=st.integers(0, 5), seed=SEEDS)
@torch.no_grad()
def test_a_recorded_call_can_be_forgotten(stack, sizes, removed, seed):
    torch.manual_seed(seed)
    assert_cache_forgets(model_of("decoder", stack), sizes, removed)


@in_every_stack
@pytest.mark.parametrize(
    ("topology", "strategy"),
    [("decoder", name) for name in GENERATIONS]
    + [("encoder_decoder", name) for name in GENERATIONS if name != "chunked prefill"],  # which is of decoders only
)
def test_generation_with_a_state_is_without(topology, stack, strategy):
    """On a batch whose second text is padded, on the left."""
    model, ids, mask = model_of(topology, stack), random_tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    options = GENERATIONS[strategy]
    if "prompt_lookup_num_tokens" in options:
        ids, mask = ids[:1], mask[:1]  # transformers assists one text at a time
    plain = {name: value for name, value in options.items() if name in ("num_beams", "do_sample", "top_k")}
    torch.manual_seed(1)
    expected = new_tokens(model, ids, mask, use_cache=False, **plain)
    torch.manual_seed(1)
    assert new_tokens(model, ids, mask, **options) == expected


# ---------------------------------------------------------------------------------------------------------------------
# The world around


@pytest.mark.parametrize("name", ["rnn_search", "lstm_attention", "recurrent_decoder"])
def test_presets_learn(name):
    """A few texts are learnt backwards, by each of the shipped translators."""
    sizes = dict(vocab_size=20, hidden_size=32, intermediate_size=64, hidden_dropout=0.0)
    model = TriptychForConditionalGeneration(TriptychConfig.from_preset(name, **sizes)).train()
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randint(3, 20, (8, 5))
    losses = []
    for _ in range(50):
        loss = model(ids, labels=ids.flip(1)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.5 and losses[-1] < 1.0


def test_folders_with_code_need_no_package(tmp_path):
    for stack, fields in STACKS.items():
        model = tiny_model("encoder_decoder", **fields, decoder=DECODERS[stack])
        model.save_pretrained(tmp_path / stack, with_code=True)
        torch.save((example(model), outputs(model)), tmp_path / stack / "example.bin")
    result = run_without_package(tmp_path, *(f"AutoModelForSeq2SeqLM:{stack}" for stack in STACKS))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == list(STACKS)


@in_every_stack
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(stack, use_reentrant):
    model, texts = model_of("encoder_decoder", stack).train(), Ragged("encoder_decoder", "left")
    expected = gradients(model, model(**texts.batch, labels=texts.labels).loss)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    actual = gradients(model, model(**texts.batch, labels=texts.labels).loss)
    model.gradient_checkpointing_disable()
    model.eval()
    assert_equal_gradients(actual, expected, 1e-10)


@in_every_stack
def test_mixed_precision_trains_and_decodes(stack):
    """A recurrence meets inputs of another precision than its weights, in which it stays on a CPU."""
    model = tiny_model("encoder_decoder", **STACKS[stack], decoder=DECODERS[stack]).train()
    recurrences = [module.rnn for module in model.modules() if isinstance(module, TriptychRecurrence)]
    seen = []
    for recurrence in recurrences:
        recurrence.register_forward_hook(lambda module, args, output: seen.append(output[0].data.dtype))
    texts = Ragged("encoder_decoder", "left")
    expected = model(**texts.batch, labels=texts.labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**texts.batch, labels=texts.labels).loss
        assert len(model.eval().generate(texts.batch["input_ids"], max_new_tokens=4, num_beams=2)) == 3
    assert set(seen) == {torch.float32}
    assert_equal(loss, expected, 0.05)
    assert all(gradient.isfinite().all() for gradient in gradients(model, loss).values())


def test_lora_adapts_what_reads_the_encoder():
    """peft knows no recurrences; the projections of cross-attention have the names of all others."""
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(tiny_model("encoder_decoder", **STACKS["search"]), settings)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained and all(".cross_attn." in name for name in trained)


def test_a_compiled_graph_breaks_at_a_recurrence():
    """torch traces none, so `fullgraph` is refused; in pieces, outputs are the same."""
    layer, x = layer_of("lstm", "decoder"), torch.randn(2, 5, 32, dtype=torch.float64)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    assert_equal(torch.compile(layer, backend="eager")(x)[0], layer(x)[0])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("topology", "inputs", "named"),
    [
        ("decoder", {"prefix_length": torch.tensor([2])}, "'gru'.*prefix_length"),
        ("decoder", {"attention_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}, "'gru'.*4D"),
        ("encoder", {"perm_mask": torch.zeros(1, 5, 5)}, "'gru'.*perm_mask"),
        ("decoder", {"is_causal": False}, "`is_causal` is False"),
    ],
)
def test_what_has_no_direction_is_refused(topology, inputs, named):
    with pytest.raises(ValueError, match=named):
        model_of(topology, "search")(random_tokens(1, 5), **inputs)


def test_windows_refuse_a_mask_of_pairs():
    decoder = model_of("encoder_decoder", "deep").model.decoder
    pairs = torch.ones(1, 1, 4, 3, dtype=torch.bool)
    embedded, memory = torch.randn(1, 4, 32).double(), torch.randn(1, 3, 32).double()
    with pytest.raises(ValueError, match=r"cross_attention_window.*4D"):
        decoder(inputs_embeds=embedded, encoder_hidden_states=memory, encoder_attention_mask=pairs)


def test_flash_attention_is_refused():
    """It adds no scores of another's making."""
    with pytest.raises(ValueError, match="cannot add the scores of `cross_attention_score` = 'additive'"):
        model_of("encoder_decoder", "search").set_attn_implementation("flash_attention_2")


def test_a_cache_made_for_another_model_is_refused():
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model_of("decoder", "deep")(random_tokens(1, 6), cache=DynamicCache())
