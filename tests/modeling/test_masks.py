"""Who sees whom: windows, chunks, packed documents, prefixes, and rows that see nothing, on every backend.

Shapes: B batch, T tokens, S source tokens, V vocabulary.
"""

import pytest
import torch
from tiny import (
    BACKENDS,
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
    needs_compiler,
    pad_rows,
    ragged_rows,
    random_tokens,
    tiny_model,
)
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, DynamicCache

import triptych

BASE_MODELS = {"encoder": triptych.TriptychEncoderModel, "decoder": triptych.TriptychDecoderModel}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------------------------------
# Windows and chunks


def one_layer(topology: str, backend: str, **changes):
    return tiny_model(BASE_MODELS[topology], backend, num_hidden_layers=1, position_embedding_type="none", **changes)


@torch.no_grad()
def influence(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **inputs) -> torch.Tensor:
    """Whether token j of `ids` [1, T] changes output i: [T, T]. Each row of one batch edits one token."""
    length = ids.shape[1]
    slots = torch.arange(length)
    batch = ids.expand(length + 1, -1).clone()
    batch[slots + 1, slots] = (batch[slots + 1, slots] + VOCAB // 2) % VOCAB
    if mask is not None:
        inputs["attention_mask"] = mask.expand(length + 1, -1)
    states = model(batch, **inputs).last_hidden_state
    return ((states[1:] - states[:1]).abs().amax(-1) > 1e-5).T


def check_influence(model, rule, side: str | None, **inputs):
    """Token j reaches output i exactly where rule(i, j) says so of their ranks, with 12 real tokens."""
    ids, mask = random_tokens(1, 12), None
    if side is not None:
        ids, mask = pad_rows([ids[0]], side, extra=5)
    seen = influence(model, ids, mask, **inputs)
    if mask is not None:
        real = mask[0].bool()
        seen = seen[real][:, real]
    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    expected = rule(i, j).expand(12, 12) | (i == j)
    assert torch.equal(seen, expected), f"seen\n{seen.int()}\nexpected\n{expected.int()}"


in_every_padding = pytest.mark.parametrize("side", [None, *SIDES])

# Topology, the field that sets the size, and whether token j reaches output i.
REACH = {
    "causal window": ("decoder", "sliding_window", lambda i, j, size: (j <= i) & (i - j < size)),
    "bidirectional window": ("encoder", "sliding_window", lambda i, j, size: (i - j).abs() <= size // 2),
    "causal chunk": ("decoder", "attention_chunk_size", lambda i, j, size: (j <= i) & (i // size == j // size)),
    "bidirectional chunk": ("encoder", "attention_chunk_size", lambda i, j, size: i // size == j // size),
}


def check_reach(name: str, backend: str, size: int, side: str | None):
    topology, field, rule = REACH[name]
    check_influence(one_layer(topology, backend, **{field: size}), lambda i, j: rule(i, j, size), side)


# A decoder's windows and chunks are of two tokens or more.
SIZES = [(name, size) for name in REACH for size in (1, 2, 3, 4, 5, 40) if size > 1 or "bidirectional" in name]


@in_every_padding
@pytest.mark.parametrize(("name", "size"), SIZES)
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
def test_reach(name, backend, size, side):
    """Window wider or narrower by one in some backends: token j reaches output i iff 0 <= i - j < W (causal),
    abs(i - j) <= W // 2 (bidirectional), and within a chunk iff i // C == j // C."""
    check_reach(name, backend, size, side)


@needs_compiler
@pytest.mark.slow
@in_every_padding
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", REACH)
def test_reach_with_flex(name, size, side):
    check_reach(name, "flex_attention", size, side)


@in_every_padding
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_full_layers(backend, side):
    check_influence(one_layer("encoder", backend), lambda i, j: torch.tensor(True), side)
    check_influence(one_layer("decoder", backend), lambda i, j: j <= i, side)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("position", ["sinusoidal", "relative"])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_decoder_without_its_causal_mask_is_an_encoder(layers, position, backend):
    """By the configuration or by the call; the weights of both panels have the same names."""
    options = dict(position_embedding_type=position, **LAYERS[layers])
    encoder, decoder = (tiny_model(BASE_MODELS[name], backend, **options) for name in BASE_MODELS)
    switched = tiny_model(BASE_MODELS["decoder"], backend, is_causal=False, **options)
    ids, mask = pad_rows(ragged_rows(9, 6), "left")
    with torch.no_grad():
        expected = encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        assert_equal(switched(ids, attention_mask=mask).last_hidden_state[mask.bool()], expected)
        assert_equal(decoder(ids, attention_mask=mask, is_causal=False).last_hidden_state[mask.bool()], expected)


# ---------------------------------------------------------------------------------------------------------------------
# Packed documents


FORMS = ("position_ids", "seq_idx", "both")


class Packed:
    """Documents side by side in one row, and how to say so: by positions that restart, by `seq_idx`, or by both."""

    def __init__(self, topology: str, form: str, lengths=(5, 7, 4), target_lengths=(4, 3, 6)):
        self.is_pair = topology == "encoder_decoder"
        self.documents = ragged_rows(*lengths)
        self.inputs = self.pack(self.documents, form, "")
        if self.is_pair:
            self.targets = ragged_rows(*target_lengths)
            self.inputs |= self.pack(self.targets, form, "decoder_")

    @staticmethod
    def pack(documents: list[torch.Tensor], form: str, prefix: str) -> dict[str, torch.Tensor]:
        inputs = {f"{prefix}input_ids": torch.cat(documents)[None]}
        if form in ("position_ids", "both"):
            inputs[f"{prefix}position_ids"] = torch.cat([torch.arange(len(row)) for row in documents])[None]
        if form in ("seq_idx", "both"):
            numbers = [torch.full((len(row),), number) for number, row in enumerate(documents)]
            inputs[f"{prefix}seq_idx"] = torch.cat(numbers)[None].int()
        return inputs

    def alone(self, model) -> torch.Tensor:
        """Logits of each document run by itself, side by side: [T, V]."""
        logits = []
        for index, document in enumerate(self.documents):
            inputs = dict(input_ids=document[None])
            if self.is_pair:
                inputs["decoder_input_ids"] = self.targets[index][None]
            logits.append(model(**inputs).logits[0])
        return torch.cat(logits)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_packed_documents_do_not_see_each_other(topology, backend, position, layers):
    """Resetting positions alone does not isolate packed documents: pack A+B: outputs of B = B alone."""
    check_packing(topology, backend, FORMS, position_embedding_type=position, **LAYERS[layers])


@needs_compiler
@pytest.mark.parametrize(
    ("topology", "form"),
    [
        ("decoder", "position_ids"),
        pytest.param("encoder", "seq_idx", marks=pytest.mark.slow),
        pytest.param("encoder_decoder", "both", marks=pytest.mark.slow),
    ],
)
def test_packed_documents_with_flex(topology, form):
    check_packing(topology, "flex_attention", [form], position_embedding_type="learned", num_hidden_layers=1)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_packed_documents_with_flex_grid(topology, position):
    check_packing(topology, "flex_attention", ["position_ids"], position_embedding_type=position, **MIXED)


@torch.no_grad()
def check_packing(topology, backend, forms, **options):
    """Packed in each form, with and without a cache flag, documents give what each gives alone."""
    eager, model = tiny_model(topology, "eager", **options), tiny_model(topology, backend, **options)
    for form in forms:
        packed = Packed(topology, form)
        expected = packed.alone(eager)
        for flag in [{}] if topology == "encoder" else [{"use_cache": False}, {"use_cache": True}]:
            assert_equal(model(**packed.inputs, **flag).logits[0], expected, what=f"{form}, {flag}")


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@torch.no_grad()
def test_packed_rows_of_a_padded_batch(topology, form, backend):
    """Two packed rows of unequal lengths, the shorter one padded on the right."""
    model = tiny_model(topology, backend, position_embedding_type="relative", **MIXED)
    rows = [Packed(topology, form, lengths=(5, 4)), Packed(topology, form, lengths=(3, 2), target_lengths=(2, 3))]
    batch = {}
    for name in rows[0].inputs:
        tensors = [row.inputs[name][0] for row in rows]
        batch[name] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    for name, ids in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        if ids in batch:
            tensors = [torch.ones_like(row.inputs[ids][0]) for row in rows]
            batch[name] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    logits = model(**batch).logits
    for row, actual in zip(rows, logits, strict=True):
        expected = row.alone(model)
        assert_equal(actual[: len(expected)], expected)


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", BASE_MODELS)
def test_editing_one_document_leaves_the_others(topology, backend):
    """Resetting positions alone does not isolate packed documents: editing A leaves B alone."""
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    seen = influence(tiny_model(BASE_MODELS[topology], backend), random_tokens(1, 9), position_ids=positions)
    same = documents[:, None] == documents
    assert torch.equal(seen, same.tril() if topology == "decoder" else same)


@torch.no_grad()
def test_packing_needs_pairs():
    """Documents packed on one side of an encoder-decoder only would meet nobody, or everybody."""
    packed = Packed("encoder_decoder", "seq_idx")
    for name in ("seq_idx", "decoder_seq_idx"):
        inputs = {key: value for key, value in packed.inputs.items() if key != name}
        with pytest.raises(ValueError, match="packed"):
            tiny_model("encoder_decoder")(**inputs)


@pytest.mark.parametrize("options", [{}, {"return_seq_idx": True}, {"return_flash_attn_kwargs": True}])
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
@torch.no_grad()
def test_data_collator_with_flattening(topology, options):
    """transformers' collator is an input: logits, and a loss in which A's last token does not score B's first."""
    documents = ragged_rows(6, 3, 8)
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(
        [dict(input_ids=row.tolist(), labels=row.tolist()) for row in documents]
    )
    model = tiny_model(topology, position_embedding_type="learned")
    output = model(**batch)
    alone = [model(row[None]).logits[0] for row in documents]
    assert_equal(output.logits[0], torch.cat(alone))
    # The collator ignores each first label, so an encoder's labels lose it too.
    skipped = slice(None, -1) if topology == "decoder" else slice(1, None)
    total = sum(
        F.cross_entropy(logits[skipped], row[1:], reduction="sum") for logits, row in zip(alone, documents, strict=True)
    )
    assert_equal(output.loss, total / sum(len(row) - 1 for row in documents))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_last_packed_document_goes_on_or_is_refused(form):
    """Packed documents and a cache: what comes next belongs to the last document, and never sees the others."""
    model, packed = tiny_model("decoder", position_embedding_type="rotary"), Packed("decoder", form)
    cache = model(**packed.inputs, use_cache=True).cache
    more, last = random_tokens(1, 3), packed.documents[-1][None]
    expected = model(torch.cat((last, more), dim=1)).logits[:, last.shape[1] :]
    try:
        actual = model(more, cache=cache, position_ids=torch.arange(3)[None] + last.shape[1]).logits
    except ValueError as error:
        assert "packed" in str(error)
    else:
        assert_equal(actual, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Prefix


def check_prefix(backend: str, length: int, side: str | None):
    rows = (12 if side is None else 17) + 1
    check_influence(
        one_layer("decoder", backend),
        lambda i, j: (j <= i) | ((i < length) & (j < length)),
        side,
        prefix_length=torch.full((rows,), length),
    )


@in_every_padding
@pytest.mark.parametrize("length", [0, 1, 5, 12])
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
def test_prefix(backend, length, side):
    """The leading real tokens see each other both ways, the others only what came before."""
    check_prefix(backend, length, side)


@needs_compiler
@pytest.mark.parametrize("side", [None, *(pytest.param(side, marks=pytest.mark.slow) for side in SIDES)])
def test_prefix_with_flex(side):
    check_prefix("flex_attention", 5, side)


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("layers", ["sliding", "chunked"])
def test_prefix_in_a_local_layer(layers, backend):
    """Windows and chunks hold in a prefix too, to both sides."""

    def rule(i, j):
        near = (i - j).abs() < 4 if layers == "sliding" else i // 4 == j // 4
        return ((j <= i) | ((i < 7) & (j < 7))) & near

    check_influence(one_layer("decoder", backend, **LAYERS[layers]), rule, None, prefix_length=torch.full((13,), 7))


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_prefixes_of_a_padded_batch(position, side, backend):
    """Each row has a prefix of its own; the whole text as prefix is an encoder's view."""
    model = tiny_model("decoder", backend, position_embedding_type=position)
    texts, prefixes = Ragged("decoder", side), torch.tensor([4, 5, 0])
    rows = zip(texts.rows, prefixes, strict=True)
    alone = [model(row[None], prefix_length=prefix[None]).logits[0] for row, prefix in rows]
    assert_equal(texts.together(model, prefix_length=prefixes), torch.cat(alone))
    if position != "relative":  # a decoder's buckets give all keys on the right one bias, an encoder's do not
        assert_equal(alone[1], model(texts.rows[1][None], is_causal=False).logits[0])


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("position", ["rotary", "relative"])
@torch.no_grad()
def test_generate_with_a_prefix(position, backend):
    """Greedy tokens of a left-padded batch = each row alone, run anew at every step without a cache."""
    model = tiny_model("decoder", backend, position_embedding_type=position, eos_token_id=None)
    ids, mask = pad_rows(ragged_rows(7, 4), "left")
    prefixes = torch.tensor([5, 4])
    generated = model.generate(
        ids, attention_mask=mask, prefix_length=prefixes, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    model.set_attn_implementation("eager")
    for row, padding, prefix, actual in zip(ids, mask.bool(), prefixes, generated, strict=True):
        text = row[padding][None]
        for _ in range(6):
            logits = model(text, prefix_length=prefix[None], use_cache=False).logits
            text = torch.cat((text, logits[:, -1:].argmax(-1)), dim=1)
        assert actual[-6:].tolist() == text[0, -6:].tolist()


@torch.no_grad()
def test_a_prefix_of_the_target_may_be_longer_than_the_source():
    """It says nothing of the source, which is read both ways: in forward, and in generate() with a cache as without."""
    model = tiny_model("encoder_decoder", eos_token_id=None)
    source, target, prefix = random_tokens(2, 3), random_tokens(2, 6), torch.tensor([5, 4])
    inputs = dict(input_ids=source, decoder_input_ids=target)
    memory = model.model.encoder(source).last_hidden_state
    states = model.model.encoder.look_up(target)  # the one table of both
    read = dict(inputs_embeds=states, encoder_hidden_states=memory, prefix_length=prefix)
    expected = model.lm_head(model.model.decoder(**read).last_hidden_state)
    assert_equal(model(**inputs, prefix_length=prefix).logits, expected)
    settings = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, prefix_length=prefix)
    with_cache, without = (model.generate(**inputs, **settings, use_cache=use_cache) for use_cache in (True, False))
    assert with_cache.tolist() == without.tolist()


@torch.no_grad()
def test_a_split_prefix_is_refused():
    """Tokens of a prefix cannot wait for a later call, in the first call or in the next ones."""
    model, ids = tiny_model("decoder"), random_tokens(1, 8)
    with pytest.raises(ValueError, match=r"`prefix_length` is \[6\].*\[4\]"):
        model(ids[:, :4], prefix_length=torch.tensor([6]))
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], cache=cache, prefix_length=torch.tensor([3]))
    model(ids[:, 4:6], cache=cache, prefix_length=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"`prefix_length` is \[7\]"):
        model(ids[:, 6:], cache=cache, prefix_length=torch.tensor([7]))


def test_prefix_of_packed_documents_is_refused():
    with pytest.raises(ValueError, match="`prefix_length` cannot be combined with packed documents"):
        tiny_model("decoder")(**Packed("decoder", "seq_idx").inputs, prefix_length=torch.tensor([3]))


# ---------------------------------------------------------------------------------------------------------------------
# Rows that see nothing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_row_that_sees_nothing_is_finite(topology, backend, position, dtype):
    """A row with no visible key gives NaN, sometimes only in backward."""
    model = tiny_model(topology, backend, position_embedding_type=position, **MIXED).to(dtype)
    texts = Ragged(topology, "left", lengths=(9, 5, 7))
    texts.batch["attention_mask"][1] = 0
    if topology == "encoder_decoder":
        texts.batch["decoder_attention_mask"][1] = 0
    logits = model(**texts.batch).logits
    assert logits.dtype == dtype and logits.isfinite().all()
    logits.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@needs_compiler
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])], ids=str
)
@torch.no_grad()
def test_a_row_that_sees_nothing_is_finite_with_flex(dtype):
    texts = Ragged("decoder", "left")
    texts.batch["attention_mask"][1] = 0
    model = tiny_model("decoder", "flex_attention", position_embedding_type="relative", num_hidden_layers=1).to(dtype)
    assert model(**texts.batch).logits.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "lowest", "minus infinity"])
@pytest.mark.parametrize("position", ["none", "alibi"])
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
def test_a_4d_row_that_sees_nothing_is_finite(backend, position, kind, dtype):
    """A row with no visible key gives NaN: in a 4D mask too, and under biases that reach far below zero."""
    length = 200  # ALiBi's steepest head subtracts a quarter per token: enough to leave half precision's range
    visible = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    visible[..., 3:6, :] = False
    lowest = torch.finfo(dtype).min if kind == "lowest" else -torch.inf
    mask = visible if kind == "boolean" else torch.where(visible, 0.0, lowest).to(dtype)
    model = tiny_model("decoder", backend, position_embedding_type=position, num_hidden_layers=1).to(dtype)
    logits = model(random_tokens(1, length), attention_mask=mask).logits
    assert logits.isfinite().all()
    logits.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["left"])
@torch.no_grad()
def test_batch_mates_do_not_mind_a_row_that_sees_nothing(side, backend):
    texts = Ragged("decoder", side)
    model = tiny_model("decoder", backend, num_hidden_layers=1)
    expected = texts.together(model)
    texts.batch["attention_mask"][1] = 0
    texts.mask[1] = False
    kept = torch.cat((expected[:9], expected[14:]))
    assert_equal(texts.together(model), kept)
