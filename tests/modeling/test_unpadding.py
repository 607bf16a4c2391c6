"""Layers see real tokens only, and nobody can tell by what comes out.

Shapes: B batch, T tokens, N real tokens of a batch, D width.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    DELTA,
    LAYERS,
    POSITIONS,
    QUICK_BACKENDS,
    SIDES,
    TOPOLOGIES,
    Ragged,
    assert_equal,
    assert_equal_gradients,
    gradients,
    random_tokens,
    tiny_model,
)
from torch.nn import functional as F

from triptych.layers import TriptychLayer, TriptychMLP
from triptych.unpadding import Places, Put, Take, find_places, find_rows, share_rows

LINEAR = {"layer_types": ["linear_attention"] * 2}
STACKS = {
    f"{layers}-{position}": {"position_embedding_type": position, **LAYERS[layers]}
    for layers in LAYERS
    for position in POSITIONS
} | {"linear": LINEAR, "delta": LINEAR | DELTA}


def shapes_of(model, kind, work):
    """What the modules of a kind are given while `work` runs."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
        for module in model.modules()
        if isinstance(module, kind)
    ]
    work()
    for hook in hooks:
        hook.remove()
    return seen


def answers(model, texts: Ragged, **more) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [N, V] of the real tokens, and gradients of their loss."""
    logits = model(**texts.batch, use_cache=False, **more).logits[texts.mask]
    loss = F.cross_entropy(logits, texts.labels[texts.mask])
    return logits.detach(), gradients(model, loss)


@pytest.mark.parametrize("layers", [{}, LINEAR], ids=["softmax", "linear"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_layers_see_real_tokens_only(topology, side, layers):
    texts = Ragged(topology, side)
    model = tiny_model(topology, **layers)
    real = [(1, int(mask.sum()), 32) for name, mask in texts.batch.items() if name.endswith("attention_mask")]
    seen = shapes_of(model, TriptychLayer, lambda: model(**texts.batch, use_cache=False))
    assert seen == [shape for shape in real for _ in range(2)]
    inner = shapes_of(model, torch.nn.Linear, lambda: model.base_model(**texts.batch, use_cache=False))
    assert {shape[:2] for shape in inner} == {shape[:2] for shape in real}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_pads_that_stay_change_nothing(topology, stack, side):
    """Asked for hidden states, a stack computes them for pads too: logits and gradients are the same."""
    texts = Ragged(topology, side)
    for backend in QUICK_BACKENDS:
        model = tiny_model(topology, backend, **STACKS[stack])
        expected, expected_gradients = answers(model, texts, output_hidden_states=True)
        actual, actual_gradients = answers(model, texts)
        assert_equal(actual, expected, what=backend)
        assert_equal_gradients(actual_gradients, expected_gradients)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_recorded_states_have_the_shape_of_the_batch(topology):
    texts = Ragged(topology, "left")
    outputs = tiny_model(topology, "eager")(
        **texts.batch, use_cache=False, output_hidden_states=True, output_attentions=True
    )
    prefix = "decoder_" if topology == "encoder_decoder" else ""
    assert all(states.shape[:2] == texts.mask.shape for states in outputs[f"{prefix}hidden_states"])
    assert all(weights.shape[-1] == texts.mask.shape[1] for weights in outputs[f"{prefix}attentions"])


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
def test_packed_documents_and_pads(topology, position):
    """Rows that are packed and padded, with positions and types of their own."""
    model = tiny_model(topology, position_embedding_type=position, type_vocab_size=2)
    ids = random_tokens(2, 8)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]])
    inputs = dict(
        seq_idx=torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1]]),
        position_ids=torch.tensor([[0, 3, 4, 4, 1, 2, 0, 1], [5, 6, 2, 3, 4, 4, 4, 4]]),
        token_type_ids=torch.randint(2, (2, 8)),
    )
    outputs = [
        model(ids, attention_mask=mask, use_cache=False, output_hidden_states=asks, **inputs).logits[mask.bool()]
        for asks in (False, True)
    ]
    assert_equal(*outputs)


def test_packed_pairs_and_pads():
    model = tiny_model("encoder_decoder")
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    inputs = dict(
        input_ids=random_tokens(2, 6),
        attention_mask=mask,
        seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]),
        decoder_input_ids=random_tokens(2, 5),
        decoder_attention_mask=mask[:, 1:],
        decoder_seq_idx=torch.tensor([[0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]),
    )
    outputs = [model(**inputs, use_cache=False, output_hidden_states=asks).logits for asks in (False, True)]
    assert_equal(*(logits[mask[:, 1:].bool()] for logits in outputs))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_gradient_checkpointing(topology, position, use_reentrant):
    texts = Ragged(topology, "right")
    model = tiny_model(topology, position_embedding_type=position)
    expected, expected_gradients = answers(model, texts)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    actual, actual_gradients = answers(model.train(), texts)
    assert_equal(actual, expected)
    assert_equal_gradients(actual_gradients, expected_gradients)


@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_row_of_pads_alone(topology, backend):
    """Such a row changes no other, and leaves gradients finite."""
    texts = Ragged(topology, "right")
    model = tiny_model(topology, backend)
    expected, expected_gradients = answers(model, texts)
    for name, table in texts.batch.items():
        texts.batch[name] = F.pad(table, (0, 0, 1, 0), value=0)
    texts.mask = F.pad(texts.mask, (0, 0, 1, 0), value=False)
    actual, actual_gradients = answers(model, texts)
    assert_equal(actual, expected)
    assert_equal_gradients(actual_gradients, expected_gradients)
    texts.batch["attention_mask"] = torch.zeros_like(texts.batch["attention_mask"])
    assert model(**texts.batch, use_cache=False).logits.shape[:2] == texts.mask.shape


def test_targets_end_with_their_labels():
    """In training, a decoder need not go behind the last label; between labels it must."""
    model = tiny_model("encoder_decoder").train()
    labels = random_tokens(3, 7)
    labels[0, 3:], labels[1, [1, 2, 6]] = -100, -100
    batch = dict(input_ids=random_tokens(3, 4), labels=labels)
    seen = shapes_of(model.model.decoder, TriptychMLP, lambda: model(**batch))
    assert seen == [(1, 3 + 6 + 7, 32)] * 2
    expected = model(**batch, output_logits=True)
    actual = model(**batch)
    assert expected.logits.shape[:2] == labels.shape
    assert_equal(actual.loss, expected.loss)
    assert_equal_gradients(gradients(model, actual.loss), gradients(model, expected.loss))


@given(data=st.data())
def test_rows_hold_texts_in_their_order(data):
    """Tokens come back to where they stood, and stand side by side with those of their document, in order."""
    cells = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5)
    padding = torch.tensor(data.draw(cells.filter(lambda rows: any(map(any, rows)))))
    documents = None
    if data.draw(st.booleans()):
        documents = torch.tensor(
            data.draw(st.lists(st.integers(-1, 2), min_size=padding.numel(), max_size=padding.numel()))
        )
        documents = documents.view_as(padding)
    places = find_places(padding)
    table = torch.arange(1.0, padding.numel() + 1).view_as(padding)
    stream = places.take(table)
    assert torch.equal(places.put(stream), table * padding)
    rows, text = find_rows(places, documents)
    texts = {}
    for row, (values, real) in enumerate(zip(table, padding, strict=True)):
        for slot in real.nonzero()[:, 0]:
            number = 0 if documents is None else documents[row, slot].item()
            texts.setdefault((row, number), []).append(values[slot].item())
    found = [[value for value in row if value] for row in rows.put(stream).tolist()]
    assert sorted(filter(None, found)) == sorted(texts.values())
    assert torch.equal(rows.take(rows.put(stream)), stream)

    shared = share_rows(rows, text)
    assert shared is rows or (shared.shape[0] * 2 <= rows.shape[0] and shared.shape[1] == rows.shape[1])
    assert torch.equal(shared.take(shared.put(stream)), stream)
    numbers, moved = shared.put(text + 1).tolist(), shared.put(stream).tolist()
    for of_text, row in enumerate(found):
        if row:
            ((place, values),) = [
                (place, values) for place, values in enumerate(moved) if of_text + 1 in numbers[place]
            ]
            mine = [slot for slot, number in enumerate(numbers[place]) if number == of_text + 1]
            assert mine == list(range(mine[0], mine[-1] + 1)) and [values[slot] for slot in mine] == row


def test_short_texts_share_rows():
    """One of ten and nine of at most five: five rows in place of ten; four of seven share nothing."""
    for lengths, expected in (
        ((10, 5, 5, 5, 5, 5, 5, 5, 5, 4), (6, 10)),
        ((10, 2, 3, 4, 1), (2, 10)),
        ((7,) * 4, (4, 7)),
    ):
        padding = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        rows = share_rows(*find_rows(find_places(padding)))
        assert rows.shape == (expected if expected[0] * 2 <= len(lengths) else (len(lengths), max(lengths)))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_texts_that_share_rows_change_nothing(topology, stack, side):
    lengths = dict(lengths=(12, 3, 4, 5, 2, 3), target_lengths=(9, 2, 3, 2, 3, 4))
    texts = Ragged(topology, side, **lengths)
    assert share_rows(*find_rows(find_places(texts.mask))).shape[0] <= 3
    for backend in QUICK_BACKENDS:
        model = tiny_model(topology, backend, **STACKS[stack]).double()  # the delta rule sums up in another order
        expected, expected_gradients = answers(model, texts, output_hidden_states=True)
        actual, actual_gradients = answers(model, texts)
        assert_equal(actual, expected, 1e-10, what=backend)
        assert_equal_gradients(actual_gradients, expected_gradients, 1e-9)


def test_gradients_of_moving():
    index = torch.tensor([4, 0, 3])
    table, stream = (torch.randn(size, 2, dtype=torch.double, requires_grad=True) for size in (5, 3))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda states: Take.apply(states, index), table)
        assert check(lambda states: Put.apply(states, index, 5), stream)
    assert Places(index, (1, 5)).take(table[None]).shape == (1, 3, 2)
