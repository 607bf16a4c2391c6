"""Permutation language modelling (Yang et al. 2019, section 2): who sees whom, against the paper's equations by hand.

Shapes: B batch, T tokens, P predicted places, D width, V vocabulary.
"""

import itertools

import pytest
import tokenizers
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import strategies as st
from tiny import (
    LAYERS,
    MIXED,
    POSITIONS,
    QUICK_BACKENDS,
    VOCAB,
    assert_equal,
    assert_equal_gradients,
    gradients,
    needs_compiler,
    pad_rows,
    random_tokens,
    tiny_model,
)
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from triptych import TriptychDecoderModel, TriptychEncoderModel, TriptychForMaskedLM
from triptych.positions import alibi_bias, apply_rotary

MASK = 3
STACKS = {
    "post": {},
    "pre, grouped heads": dict(norm_position="pre", num_key_value_heads=2, qk_norm=True),
    "sandwich, mixed layers": dict(norm_position="sandwich", **MIXED),
    "factorised": dict(embedding_size=16, embedding_norm=True, type_vocab_size=2),
}
in_every_position = pytest.mark.parametrize("position", POSITIONS)
on_both_backends = pytest.mark.parametrize("backend", QUICK_BACKENDS)


def build(model_class=TriptychForMaskedLM, backend="sdpa", **options):
    return tiny_model(model_class, backend, mask_token_id=MASK, **options)


class Order:
    """A text of T tokens in a random order of prediction: the first `context` of it are given, the others predicted.

    The given tokens see each other and no predicted one; a predicted one sees those before it in the order.
    """

    def __init__(self, length: int, context: int):
        self.ids = random_tokens(length)
        rank = torch.randperm(length)  # the place of each token in the order
        self.targets = (rank >= context).nonzero()[:, 0]
        rank = rank.clamp(min=context - 1)
        self.before = (rank[None] < rank[:, None]) | (rank < context)[None]  # [T, T] z_<t: whom a query sees
        self.inputs = self.batch([self])

    @property
    def labels(self) -> torch.Tensor:
        return self.ids[self.targets]

    @staticmethod
    def batch(orders: list["Order"], side: str = "right", extra: int = 0) -> dict[str, torch.Tensor]:
        """Ragged texts and their ragged predictions as one batch; what pads see, and who sees them, is random."""
        ids, mask = pad_rows([order.ids for order in orders], side, extra)
        size, length = ids.shape
        predicted = max(len(order.targets) for order in orders)
        perm_mask = torch.randint(0, 2, (size, length, length))
        target_mapping, labels = torch.zeros(size, predicted, length), torch.full((size, predicted), -100)
        for row, order in enumerate(orders):
            slots, count = mask[row].nonzero()[:, 0], len(order.targets)
            perm_mask[row, slots[:, None], slots] = (~order.before).long()
            target_mapping[row, torch.arange(count), slots[order.targets]] = 1
            labels[row, :count] = order.labels
        inputs = dict(input_ids=ids, attention_mask=mask, perm_mask=perm_mask, target_mapping=target_mapping)
        return {**inputs, "labels": labels}


# ---------------------------------------------------------------------------------------------------------------------
# The equations


def attend(attention, x, memory, visible, bias, angles, places):
    """Attention [P, D] of `x` [P, D] over `memory` [T, D], one query and one head at a time; places are [P] and [T]."""
    query, key, value = (
        attention.heads(projection(states[None]))
        for projection, states in ((attention.q_proj, x), (attention.k_proj, memory), (attention.v_proj, memory))
    )
    if attention.config.qk_norm:
        query, key = attention.q_norm(query), attention.k_norm(key)
    if angles is not None:
        query, key = (
            apply_rotary(states, *angles(states, at[None])) for states, at in zip((query, key), places, strict=True)
        )
    output = torch.zeros(len(x), query.shape[1], query.shape[-1])
    for place, head in itertools.product(range(len(x)), range(query.shape[1])):
        seen = visible[place].nonzero()[:, 0]
        shared = head // attention.num_key_value_groups
        scores = key[0, shared, seen] @ query[0, head, place] * attention.scaling + bias[head, place, seen]
        output[place, head] = scores.softmax(0) @ value[0, shared, seen]
    return attention.o_proj(output.flatten(1))


def near(config, layer_type, queries, keys):
    """What a local layer lets through: [P, T]."""
    distance = queries[:, None] - keys
    return {
        "full_attention": distance < 999,
        "sliding_attention": distance.abs() <= (config.sliding_window or 0) // 2,
        "chunked_attention": queries[:, None] // (config.attention_chunk_size or 1)
        == keys // (config.attention_chunk_size or 1),
    }[layer_type]


def by_hand(head, order: Order, types: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [P, V]: h = Attention(Q = h, KV = h of z_<=t), g = Attention(Q = g, KV = h of z_<t); g starts as masks."""
    stack, config = head.model, head.config
    tokens = torch.arange(len(order.ids))
    places = {"h": tokens, "g": order.targets}
    sees = {"h": order.before | torch.eye(len(tokens), dtype=torch.bool), "g": order.before[order.targets]}
    ids = {"h": order.ids, "g": torch.full_like(order.targets, MASK)}
    streams = {
        name: stack.add_positions(
            stack.embed(ids[name][None], None), at[None], None if types is None else types[at][None]
        )[0]
        for name, at in places.items()
    }
    for index, layer_type in enumerate(config.layer_types):
        layer, memory = stack.layers[index], streams["h"]
        if config.norm_position != "post":
            memory = layer.self_attn_norm(memory)
        angles = stack.rotary_emb[layer_type] if config.position_embedding_type == "rotary" else None
        after = {}
        for name, x in streams.items():
            bias = torch.zeros(config.num_attention_heads, len(x), len(tokens))
            if config.position_embedding_type == "relative":
                bias = stack.relative_bias(places[name][None], tokens[None], bidirectional=True)[0]
            elif config.position_embedding_type == "alibi":
                bias = alibi_bias(places[name][None], tokens[None], config.num_attention_heads)[0]
            given = (
                memory,
                sees[name] & near(config, layer_type, places[name], tokens),
                bias,
                angles,
                (places[name], tokens),
            )
            x = layer.join("self_attn", x, lambda x, layer=layer, given=given: attend(layer.self_attn, x, *given))
            after[name] = layer.join("mlp", x, layer.mlp)
        streams = after
    return head.project(head.prediction_head(stack.norm(streams["g"])))


@pytest.mark.parametrize("options", STACKS.values(), ids=STACKS)
@in_every_position
@on_both_backends
def test_equations(backend, position, options):
    """Both streams as the paper writes them, logits and gradients."""
    model, order = build(backend=backend, position_embedding_type=position, **options), Order(9, 4)
    types = torch.randint(0, 2, (9,)) if "type_vocab_size" in options else None
    if "layer_types" in options:  # a query sees somebody in every layer
        order = next(order for order in iter(lambda: Order(9, 4), None) if sees_somebody(model.config, order))
    expected = by_hand(model, order, types)
    more = {} if types is None else dict(token_type_ids=types[None])
    output = model(**order.inputs, **more)
    assert_equal(output.logits[0], expected)
    expected = F.cross_entropy(expected, order.labels)
    assert_equal(output.loss, expected)
    assert_equal_gradients(gradients(model, output.loss), gradients(model, expected))


def sees_somebody(config, order: Order) -> bool:
    tokens = torch.arange(len(order.ids))
    return all(
        (order.before[order.targets] & near(config, layer_type, order.targets, tokens)).any(-1).all()
        for layer_type in config.layer_types
    )


@in_every_position
@on_both_backends
def test_the_first_of_an_order_sees_itself_only(backend, position):
    """With nobody to see, backends would answer NaN, zero, or the mean of all that is hidden: nothing but the place of
    the token may matter, as in a text of one mask token there."""
    model, order = build(backend=backend, position_embedding_type=position), Order(7, 0)
    first = int((~order.before[order.targets]).all(-1).nonzero()[0])
    logits = model(**order.inputs).logits[0, first]
    alone = model(torch.tensor([[MASK]]), position_ids=order.targets[first].view(1, 1)).logits[0, 0]
    assert_equal(logits, alone)


# ---------------------------------------------------------------------------------------------------------------------
# Leaks


def influence(logits: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Whether token j of `embeddings` [1, T, D] has a gradient in row i of `logits` [1, P, V]: [P, T]."""
    rows = [torch.autograd.grad(row.square().sum(), embeddings, retain_graph=True)[0] for row in logits[0]]
    return torch.cat(rows).abs().amax(-1) > 0


@in_every_position
@on_both_backends
@pytest.mark.parametrize("context", [0, 1, 4])
def test_no_leak(backend, position, context):
    """A prediction depends on the tokens before it in the order, on each of them, and on nothing else: neither on its
    own token nor on later ones."""
    model, order = build(backend=backend, position_embedding_type=position), Order(8, context)
    embeddings = torch.randn(1, 8, 32, requires_grad=True)
    inputs = dict(perm_mask=order.inputs["perm_mask"], target_mapping=order.inputs["target_mapping"])
    logits = model(inputs_embeds=embeddings, **inputs).logits
    assert torch.equal(influence(logits, embeddings), order.before[order.targets])


@on_both_backends
def test_a_query_never_sees_its_own_token(backend):
    """Even where `perm_mask` forgets to hide it; through the other tokens it would still be seen, in a second layer."""
    model = build(backend=backend, num_hidden_layers=1)
    embeddings = torch.randn(1, 5, 32, requires_grad=True)
    targets = torch.eye(5)[None]
    for inputs in ({}, {"perm_mask": torch.zeros(1, 5, 5)}):
        logits = model(inputs_embeds=embeddings, target_mapping=targets, **inputs).logits
        assert torch.equal(influence(logits, embeddings), ~torch.eye(5, dtype=torch.bool))


def xlnet():
    config = transformers.XLNetConfig(
        vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0, initializer_range=0.2
    )
    return transformers.XLNetLMHeadModel(config).eval()


@pytest.mark.parametrize("padding", [0, 3])
def test_who_sees_whom_is_xlnets(padding):
    """transformers' collator makes the masks, its XLNet is the measure: the same tokens matter to each prediction."""
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<mask>", "<unk>"])}
    words |= {f"w{index}": index for index in range(len(words), VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>")),
        **dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>", unk_token="<unk>"),
    )
    collator = transformers.DataCollatorForPermutationLanguageModeling(tokenizer, plm_probability=0.4)
    batch = collator([random_tokens(14).clamp(min=5).tolist()])
    labelled = batch["labels"][0] != -100
    mask = torch.ones(1, 14)
    mask[:, :padding] = 0
    seen = []
    for model in (xlnet(), build(position_embedding_type="rotary")):
        embeddings = torch.randn(1, 14, 32, requires_grad=True)
        permutation = {name: batch[name] for name in ("perm_mask", "target_mapping")}
        logits = model(inputs_embeds=embeddings, attention_mask=mask, **permutation).logits
        seen.append(influence(logits, embeddings)[labelled])
    assert 1 < labelled.sum() < 14
    assert torch.equal(*seen)


# ---------------------------------------------------------------------------------------------------------------------
# Relations


@in_every_position
@pytest.mark.parametrize("layers", [*LAYERS, "mixed"])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=4),
    side=st.sampled_from(("left", "right", "inside")),
    extra=st.integers(2, 4),
    backend=st.sampled_from(QUICK_BACKENDS),
    seed=st.integers(0, 999),
)
@torch.no_grad()
def test_pads_and_batch_mates_are_inert(layers, position, lengths, side, extra, backend, seed):
    """Ragged texts with ragged predictions give in one batch what each gives alone."""
    torch.manual_seed(seed)
    options = MIXED if layers == "mixed" else LAYERS[layers]
    model = build(backend=backend, position_embedding_type=position, **options)
    orders = [Order(length, min(context, length - 1)) for length, context in lengths]
    if side == "inside":  # those keep both ends
        orders = [order for order in orders if len(order.ids) > 1] or [Order(4, 1)]
    together = model(**Order.batch(orders, side, extra)).logits
    for row, order in enumerate(orders):
        alone = model(input_ids=order.ids[None], **permutation_of(order)).logits[0]
        assert_equal(together[row, : len(order.targets)], alone)


def permutation_of(order: Order) -> dict[str, torch.Tensor]:
    return {name: order.inputs[name] for name in ("perm_mask", "target_mapping")}


@in_every_position
@on_both_backends
@torch.no_grad()
def test_packed_orders(position, backend):
    """Orders of packed documents, whatever `perm_mask` says between documents."""
    model = build(backend=backend, position_embedding_type=position)
    orders = [Order(5, 2), Order(6, 1), Order(3, 0)]
    length = sum(len(order.ids) for order in orders)
    perm_mask, start = torch.zeros(1, length, length), 0
    for order in orders:
        end = start + len(order.ids)
        perm_mask[0, start:end, start:end], start = (~order.before).float(), end
    mapping = torch.block_diag(*(order.inputs["target_mapping"][0] for order in orders))[None]
    positions = torch.cat([torch.arange(len(order.ids)) for order in orders])[None]
    ids = torch.cat([order.ids for order in orders])[None]
    packed = model(ids, position_ids=positions, perm_mask=perm_mask, target_mapping=mapping).logits[0]
    alone = [model(order.ids[None], **permutation_of(order)).logits[0] for order in orders]
    assert_equal(packed, torch.cat(alone))


@in_every_position
@on_both_backends
@torch.no_grad()
def test_an_order_that_hides_nothing(position, backend):
    """`perm_mask` alone only restricts the encoder: zeros change nothing, and a token sees itself whatever it says."""
    model, ids = build(TriptychEncoderModel, backend, position_embedding_type=position), random_tokens(2, 6)
    expected, actual = model(ids), model(ids, perm_mask=torch.eye(6).expand(2, -1, -1))
    assert_equal(actual.last_hidden_state, expected.last_hidden_state)
    assert_equal(actual.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "relative"])  # its buckets tell the panels
@on_both_backends
@torch.no_grad()
def test_reading_order_makes_a_decoder(position, backend):
    """In the order of reading, the content stream is a causal decoder of equal weights."""
    options = dict(position_embedding_type=position, norm_position="pre")
    encoder = build(TriptychEncoderModel, backend, **options)
    decoder = tiny_model(TriptychDecoderModel, backend, **options)
    ids = random_tokens(2, 7)
    later = torch.ones(7, 7).triu(1).expand(2, -1, -1)
    assert_equal(encoder(ids, perm_mask=later).last_hidden_state, decoder(ids).last_hidden_state)


@torch.no_grad()
def test_each_prediction_by_itself():
    """The P predictions do not see each other: together, alone, twice or in another order, each is the same."""
    model, order = build(position_embedding_type="rotary"), Order(9, 3)
    perm_mask, mapping = order.inputs["perm_mask"], order.inputs["target_mapping"]
    together = model(order.ids[None], perm_mask=perm_mask, target_mapping=mapping).logits[0]
    picks = torch.tensor([5, 0, 3, 3])
    picked = model(order.ids[None], perm_mask=perm_mask, target_mapping=mapping[:, picks]).logits[0]
    assert_equal(picked, together[picks])
    for index in range(len(order.targets)):
        alone = model(order.ids[None], perm_mask=perm_mask, target_mapping=mapping[:, index : index + 1]).logits[0]
        assert_equal(alone, together[index : index + 1])


@torch.no_grad()
def test_pooling_is_of_the_tokens():
    """The query stream leaves the tokens, and the vector that stands for the text, as they are."""
    model, order = build(TriptychEncoderModel, pooling="mean"), Order(9, 3)
    inputs = {name: value for name, value in Order.batch([order], "left", 2).items() if name != "labels"}
    both = model(**inputs, output_hidden_states=True)
    assert both.last_hidden_state.shape == (1, 6, 32)
    inputs.pop("target_mapping")
    content = model(**inputs, output_hidden_states=True)
    assert_equal(both.pooler_output, content.pooler_output)
    assert torch.equal(both.hidden_states[-1], both.last_hidden_state)
    for with_queries, without in zip(both.hidden_states[:-1], content.hidden_states[:-1], strict=True):
        assert with_queries.shape[1] == without.shape[1] + 6
        assert_equal(with_queries[:, : without.shape[1]], without)


# ---------------------------------------------------------------------------------------------------------------------
# Backends, training


@needs_compiler
@pytest.mark.slow
@torch.no_grad()
def test_flex():
    orders = [Order(9, 3), Order(6, 0)]
    options = dict(position_embedding_type="alibi", **MIXED)
    eager, flex = (build(backend=backend, **options) for backend in ("eager", "flex_attention"))
    batch = Order.batch(orders, "left")
    scored = batch["labels"] != -100
    assert_equal(flex(**batch).logits[scored], eager(**batch).logits[scored])


@on_both_backends
def test_gradient_checkpointing_changes_nothing(backend):
    model, batch = build(backend=backend, position_embedding_type="relative").train(), Order.batch([Order(9, 3)])
    expected = gradients(model, model(**batch).loss)
    model.gradient_checkpointing_enable()
    assert_equal_gradients(gradients(model, model(**batch).loss), expected, tolerance=1e-6)


def test_every_parameter_has_a_gradient():
    """Training in parallel waits for the gradient of each parameter."""
    model, batch = build(position_embedding_type="learned", embedding_size=16), Order.batch([Order(9, 3), Order(7, 2)])
    got = gradients(model, model(**batch).loss)
    assert {name for name, _ in model.named_parameters()} == got.keys()


def test_compiled_graph_has_no_break():
    torch._dynamo.reset()
    model, batch = build(position_embedding_type="relative"), Order.batch([Order(9, 3), Order(7, 2)], "left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal(compiled(**batch).loss, model(**batch).loss)


def test_trainer_learns_an_order(tmp_path):
    """transformers' Trainer, evaluation included: the loss is over the labels of the predicted places."""
    model = build(position_embedding_type="rotary")
    data = [Order(6 + index % 3, 2) for index in range(8)]
    trainer = Trainer(
        model,
        TrainingArguments(
            tmp_path,
            per_device_train_batch_size=4,
            num_train_epochs=6,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            remove_unused_columns=False,
            save_strategy="no",
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=Order.batch,
    )
    before = trainer.evaluate()["eval_loss"]
    batches = [Order.batch(data)]
    assert before == pytest.approx(model(**batches[0]).loss.item(), abs=1e-4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 1


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perm_mask": torch.zeros(1, 5, 6)}, r"`perm_mask` has shape \[1, 5, 6\], but must be \[1, 5, 5\]"),
        ({"target_mapping": torch.zeros(2, 2, 5)}, r"`target_mapping` has shape \[2, 2, 5\], but must be \[1, P, 5\]"),
        ({"target_mapping": torch.zeros(1, 0, 5)}, r"`target_mapping` has shape \[1, 0, 5\]"),
        ({"target_mapping": torch.ones(1, 2, 5)}, r"`target_mapping` has a row that names several tokens"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "cannot be combined with a 4D `attention_mask`"),
        ({"labels": torch.zeros(1, 5, dtype=torch.long)}, r"`labels` has shape \[1, 5\], but must be \[1, 2\]"),
    ],
)
def test_wrong_input(changes, message):
    inputs = dict(perm_mask=torch.zeros(1, 5, 5), target_mapping=torch.eye(5)[None, :2])
    with pytest.raises(ValueError, match=message):
        build()(random_tokens(1, 5), **{**inputs, **changes})


def test_no_mask_token():
    with pytest.raises(ValueError, match=r"`target_mapping` needs `config\.mask_token_id`"):
        tiny_model("encoder")(random_tokens(1, 5), target_mapping=torch.eye(5)[None])
    with pytest.raises(StrictDataclassError, match="`mask_token_id` is 97"):
        tiny_model("encoder", mask_token_id=97)


@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
def test_decoders_have_no_other_order(topology):
    ids = random_tokens(1, 5)
    inputs = dict(decoder_input_ids=ids) if topology == "encoder_decoder" else {}
    with pytest.raises(ValueError, match="inputs of an encoder"):
        tiny_model(topology)(input_ids=ids, perm_mask=torch.zeros(1, 5, 5), **inputs)
