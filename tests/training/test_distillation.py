"""Distillation: each signal against a formula written out, what may not change it, and pairs that are refused.

Shapes: B batch, T tokens, V vocabulary.
"""

from functools import partial

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import triptych
from triptych import TriptychConfig, losses
from triptych.training.consistency import Consistency
from triptych.training.distillation import PROJECTIONS, Distillation, divergence_of_rows, soft_labels
from triptych.training.errors import UserError
from triptych.training.recipe import DistillationRecipe, LayersRecipe, OutputsRecipe, RelationsRecipe

VOCAB = 31
CLASSES = {
    "encoder": triptych.TriptychForMaskedLM,
    "decoder": triptych.TriptychForCausalLM,
    "encoder_decoder": triptych.TriptychForConditionalGeneration,
}
SIZES = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4)
SMALL = dict(hidden_size=8, num_hidden_layers=2)
SIGNALS = {
    "outputs": dict(outputs=OutputsRecipe(1.0, temperature=2.0)),
    "top 5 outputs": dict(outputs=OutputsRecipe(1.0, temperature=2.0, top_k=5)),
    "hidden_states": dict(hidden_states=LayersRecipe(1.0)),
    "attentions": dict(attentions=LayersRecipe(1.0)),
    "relations": dict(relations=RelationsRecipe(1.0, heads=2)),
}
EVERY_SIGNAL = SIGNALS["outputs"] | SIGNALS["hidden_states"] | SIGNALS["attentions"] | SIGNALS["relations"]


def build(kind, seed=0, **changes):
    """A model in double precision, of a topology's language model or of a class, that gives attention maps."""
    model_class = CLASSES.get(kind, kind)
    topology = model_class.config_class.__dataclass_fields__["topology"].default
    fields = SIZES | dict(initializer_range=0.3, hidden_dropout=0.0) | changes
    torch.manual_seed(seed)
    config = TriptychConfig(topology=topology, **fields)
    return model_class._from_config(config, attn_implementation="eager").double().eval()


def recipe_of(labels=0.0, **signals):
    return DistillationRecipe(teacher="a folder", labels=labels, **signals)


def texts_for(topology, lengths=(7, 4, 5)):
    """Texts that each are a batch of one, without pads; some of an encoder's tokens have labels."""
    texts = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (1, length))
        if topology == "encoder_decoder":
            texts.append({"input_ids": ids, "labels": torch.randint(3, VOCAB, (1, length - 1))})
        else:
            hidden = torch.arange(length) % 2 == (topology == "decoder")
            texts.append({"input_ids": ids, "labels": torch.where(hidden, ids, -100)})
    return texts


def batch_of(texts, side="right", extra=0):
    """The texts as one batch, padded on a side with tokens that show if they are looked at; targets on the right."""
    columns = {name: [text[name][0] for text in texts] for name in texts[0]}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    batch = {}
    for name, rows in columns.items():
        at_right = side == "right" or (name == "labels" and len(rows[0]) != len(columns["input_ids"][0]))
        length = max(map(len, rows)) + extra
        value = {"input_ids": 5, "labels": -100, "attention_mask": 0}[name]
        pads = [(0, length - len(row)) if at_right else (length - len(row), 0) for row in rows]
        batch[name] = torch.stack(
            [torch.nn.functional.pad(row, pad, value=value) for row, pad in zip(rows, pads, strict=True)]
        )
    return batch


def learn(student, teacher, recipe, batch):
    """The loss of a batch in training, and the gradients of all that learns."""
    Distillation(student, teacher, recipe)
    output = student.train()(**batch)
    (2 * output.loss).backward()
    return [output.loss.detach(), *(parameter.grad for parameter in student.parameters())]


def assert_all_close(runs, **tolerances):
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


def kl(p, log_p, log_q):
    return (p * (log_p - log_q))[p > 0].sum()


def outputs_by_hand(student, teacher, text, top_k=None):
    """t^2 KL(p, q) summed over labels, at t = 2."""
    labels = text["labels"][0]
    ours, theirs = (model(**text).logits[0] / 2 for model in (student, teacher))
    if isinstance(student, triptych.TriptychForCausalLM):
        labels, ours, theirs = labels[1:], ours[:-1], theirs[:-1]
    total = 0.0
    for label, q, p in zip(labels, ours, theirs, strict=True):
        if label == -100:
            continue
        if top_k is not None:
            p = torch.where(p >= p.sort().values[-top_k], p, -torch.inf)
        total += 4 * kl(p.softmax(-1), p.log_softmax(-1), q.log_softmax(-1))
    return total


def tables(model, text, what):
    output = model(**text, output_hidden_states=True, output_attentions=True)
    names = (what, f"encoder_{what}", f"decoder_{what}", f"cross_{what}")
    return {name: output[name] for name in names if name in output}


def states_by_hand(student, teacher, text):
    projections, means = getattr(student, PROJECTIONS), []
    ours, theirs = (tables(model, text, "hidden_states") for model in (student, teacher))
    for name in ours:
        weight = next(
            iter([projections[name.split("_")[0]].weight] if len(projections) > 1 else projections.parameters())
        )
        for mine, other in ((0, 0), (1, 2), (2, 4)):
            means.append((ours[name][mine][0] @ weight.T - theirs[name][other][0]).square().mean())
    return sum(means) / len(means) * (text["labels"] != -100).sum()


def maps_by_hand(student, teacher, text):
    means = []
    ours, theirs = (tables(model, text, "attentions") for model in (student, teacher))
    for name in ours:
        for mine, other in ((0, 1), (1, 3)):
            q, p = ours[name][mine][0], theirs[name][other][0]  # [H, T, S]
            means.append(kl(p, p.log(), q.log()) / (p.shape[0] * p.shape[1]))
    return sum(means) / len(means) * (text["labels"] != -100).sum()


def relations_by_hand(student, teacher, text):
    """Of two relation heads in the last layers of post-norm stacks, whose attention reads their input as it is."""
    means = []
    for name in tables(student, text, "hidden_states"):
        logs = {}
        for model in (student, teacher):
            stack = model.model if name == "hidden_states" else getattr(model.model, name.split("_")[0])
            states, attention = tables(model, text, "hidden_states")[name][-2][0], stack.layers[-1].self_attn
            for kind in ("qk", "vv"):
                left, right = (getattr(attention, f"{letter}_proj")(states).chunk(2, -1) for letter in kind)
                scores = torch.stack([a @ b.T / a.shape[-1] ** 0.5 for a, b in zip(left, right, strict=True)])
                if name == "decoder_hidden_states" or isinstance(model, triptych.TriptychForCausalLM):
                    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) == 1, -torch.inf)
                logs.setdefault(kind, []).append(scores.log_softmax(-1))
        for q, p in logs.values():
            means.append(kl(p.exp(), p, q) / (2 * p.shape[1]) / 2)
    return sum(means) / len(means) * 2 * (text["labels"] != -100).sum()


BY_HAND = {
    "outputs": outputs_by_hand,
    "top 5 outputs": partial(outputs_by_hand, top_k=5),
    "hidden_states": states_by_hand,
    "attentions": maps_by_hand,
    "relations": relations_by_hand,
}


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("topology", CLASSES)
def test_each_signal_is_its_formula(topology, signal):
    """The formula is of each text alone, without pads; the loss of a padded batch, one row of which comes twice."""
    teacher, student = build(topology), build(topology, seed=1, **SMALL)
    texts = texts_for(topology)
    Distillation(student, teacher, recipe_of(**SIGNALS[signal]))
    with torch.no_grad():
        expected = sum(BY_HAND[signal](student, teacher, text) for text in [*texts, texts[1]]) / 9
    for side in ("right", "left"):
        loss = student.train()(**batch_of([*texts, texts[1]], side, extra=2), num_items_in_batch=9).loss
        assert expected > 1e-3 and loss.item() == pytest.approx(expected.item(), abs=1e-9)


def test_weights_and_the_labels_loss_add_up():
    teacher, batch, losses_of = build("decoder"), batch_of(texts_for("decoder")), []
    weighted = [
        recipe_of(labels=1.0),
        recipe_of(**SIGNALS["outputs"]),
        recipe_of(**SIGNALS["attentions"]),
        recipe_of(labels=0.5, outputs=OutputsRecipe(2.0, temperature=2.0), attentions=LayersRecipe(3.0)),
    ]
    for recipe in weighted:
        student = build("decoder", seed=1, **SMALL)
        Distillation(student, teacher, recipe)
        losses_of.append(student.train()(**batch).loss.item())
    labels, outputs, maps, together = losses_of
    assert labels == pytest.approx(build("decoder", seed=1, **SMALL)(**batch).loss.item(), abs=1e-12)
    assert together == pytest.approx(0.5 * labels + 2 * outputs + 3 * maps, abs=1e-9)


@pytest.mark.parametrize("topology", CLASSES)
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(topology):
    teacher, student = build(topology), build(topology)
    loss, *gradients = learn(student, teacher, recipe_of(**EVERY_SIGNAL), batch_of(texts_for(topology)))
    assert abs(loss.item()) < 1e-12
    assert max(gradient.abs().max() for gradient in gradients) < 1e-9


@given(
    topology=st.sampled_from(list(CLASSES)),
    lengths=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    side=st.sampled_from(["left", "right"]),
    extra=st.integers(0, 4),
    times=st.integers(1, 2),
)
def test_pads_and_rows_that_come_twice_change_nothing(topology, lengths, side, extra, times):
    student, texts = build(topology, seed=1, **SMALL), texts_for(topology, lengths)
    Distillation(student, build(topology), recipe_of(labels=1.0, **EVERY_SIGNAL))
    student.train()
    expected = student(**batch_of(texts)).loss
    assert student(**batch_of(texts * times, side, extra)).loss.item() == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize("topology", CLASSES)
def test_accumulated_batches_are_one(topology):
    student, texts = build(topology, seed=1, **SMALL), texts_for(topology)
    Distillation(student, build(topology), recipe_of(labels=1.0, **EVERY_SIGNAL))
    student.train()
    whole = batch_of(texts)
    items = (whole["labels"] != -100).sum()
    parts = sum(student(**batch_of([text], extra=1), num_items_in_batch=items).loss for text in texts)
    assert parts.item() == pytest.approx(student(**whole, num_items_in_batch=items).loss.item(), abs=1e-9)


@pytest.mark.parametrize("top_k", [None, 20])
@pytest.mark.parametrize("topology", CLASSES)
def test_what_a_teacher_holds_impossible_has_finite_gradients(topology, top_k):
    teacher, student = build(topology), build(topology, seed=1, **SMALL)

    def forbid(module, args, output):
        output.logits[..., 8:] = -torch.inf
        return output

    teacher.register_forward_hook(forbid)
    text = texts_for(topology, [6])[0]
    with torch.no_grad():
        expected = outputs_by_hand(student, teacher, text) / (text["labels"] != -100).sum()
    Distillation(student, teacher, recipe_of(outputs=OutputsRecipe(1.0, temperature=2.0, top_k=top_k)))
    for output_logits in (None, True):
        student.zero_grad()
        loss = student.train()(**text, output_logits=output_logits).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
        assert all(parameter.grad.isfinite().all() for parameter in student.parameters())


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("topology", CLASSES)
def test_no_table_of_the_students_logits_is_needed(monkeypatch, topology, top_k):
    """Three rows of it at a time give the same loss and gradients."""
    monkeypatch.setattr(losses, "TABLE_SIZE", 1)
    monkeypatch.setattr(losses, "FEWEST_ROWS", 3)
    batch, runs = batch_of(texts_for(topology)), []
    for output_logits in (None, True):
        student = build(topology, seed=1, **SMALL, logit_scale=0.7)
        recipe = recipe_of(1.0, outputs=OutputsRecipe(1.0, 3.0, top_k))
        runs.append(learn(student, build(topology), recipe, batch | {"output_logits": output_logits}))
    assert student(**batch).logits is None
    assert_all_close(runs, rtol=1e-9, atol=1e-12)


def test_all_logits_are_as_many_as_there_are():
    logits, theirs = torch.randn(4, 9), soft_labels(torch.randn(4, 9), 100)
    dense = torch.empty(4, 9).scatter(1, theirs.indices, theirs.logits)
    some, every = (divergence_of_rows(soft, 1.5, logits)[0].item() for soft in (theirs, soft_labels(dense)))
    assert some == pytest.approx(every, rel=1e-5)


def test_it_is_of_training_alone_and_can_be_taken_away():
    student, batch = build("encoder", seed=1, **SMALL), batch_of(texts_for("encoder"))
    names, alone = set(student.state_dict()), student(**batch)
    teacher = build("encoder").train()
    distillation = Distillation(student, teacher, recipe_of(**EVERY_SIGNAL))
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
    assert torch.equal(student(**batch).loss, alone.loss)
    assert set(student.state_dict()) - names == {f"{PROJECTIONS}.stack.weight"}
    distillation.remove()
    assert set(student.state_dict()) == names
    assert student.train()(**batch, output_logits=True).loss.item() == pytest.approx(alone.loss.item(), abs=1e-12)
    for module in (student, student.lm_head, *(model.model.layers[1].self_attn.q_proj for model in (student, teacher))):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_with_r_drop_both_passes_learn_from_the_teacher():
    batch, runs = batch_of(texts_for("decoder")), []
    for weight in (None, 5.0):
        student = build("decoder", seed=1, **SMALL)
        if weight:
            Consistency(student, weight)
        Distillation(student, build("decoder"), recipe_of(1.0, **EVERY_SIGNAL))
        runs.append(student.train()(**batch).loss.item())
    assert runs[0] == pytest.approx(runs[1], abs=1e-9)  # there is no dropout


def test_packed_documents_are_as_if_alone():
    student, texts = build("decoder", seed=1, **SMALL), texts_for("decoder", [5, 5])
    signals = SIGNALS["outputs"] | SIGNALS["hidden_states"] | SIGNALS["relations"]
    Distillation(student, build("decoder"), recipe_of(**signals))
    student.train()
    packed = {name: torch.cat([text[name] for text in texts], 1) for name in texts[0]}
    packed |= {"position_ids": torch.arange(5).repeat(2)[None], "seq_idx": torch.arange(2).repeat_interleave(5)[None]}
    assert student(**packed).loss.item() == pytest.approx(student(**batch_of(texts)).loss.item(), abs=1e-9)


def test_of_labels_that_are_all_the_tokens_the_first_is_nothing_to_predict():
    """As transformers' own collators have them."""
    teacher, student = build("decoder"), build("decoder", seed=1, **SMALL)
    ids = torch.randint(3, VOCAB, (1, 6))
    text = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        states = teacher(**text, output_hidden_states=True).hidden_states[4]
        expected = outputs_by_hand(student, teacher, text) / 5 + states.square().mean()
    Distillation(student, teacher, recipe_of(**SIGNALS["outputs"], hidden_states=LayersRecipe(1.0, [[2, 4]])))
    getattr(student, PROJECTIONS).stack.weight.data.fill_(0.0)  # so that the error is the teacher's square
    assert student.train()(**text).loss.item() == pytest.approx(expected.item(), abs=1e-9)


def test_a_student_that_checkpoints_its_activations_learns_the_same():
    batch, runs = batch_of(texts_for("encoder_decoder")), []
    for is_checkpointing in (False, True):
        student = build("encoder_decoder", seed=1, **SMALL)
        if is_checkpointing:
            student.activation_checkpointing_enable()
        runs.append(learn(student, build("encoder_decoder"), recipe_of(1.0, **EVERY_SIGNAL), batch))
    assert_all_close(runs, rtol=1e-9, atol=1e-12)


def test_a_windowed_student_learns_the_attention_of_a_teacher_that_sees_all():
    student = build("encoder", seed=1, **SMALL, sliding_window=2)
    Distillation(student, build("encoder"), recipe_of(**SIGNALS["attentions"]))
    loss = student.train()(**batch_of(texts_for("encoder"))).loss
    loss.backward()
    assert loss.isfinite() and loss > 0
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in student.parameters())


def test_fewer_key_heads_are_related_as_those_they_serve():
    teacher, student = (build("decoder", seed, num_key_value_heads=2) for seed in (0, 1))
    Distillation(student, teacher, recipe_of(relations=RelationsRecipe(1.0, kinds=["query_key"], heads=4)))
    text = texts_for("decoder", [6])[0]
    # With as many relation heads as attention heads, in a model without rotation, they are the attention maps.
    expected = Distillation(
        other := build("decoder", 1, num_key_value_heads=2), teacher, recipe_of(attentions=LayersRecipe(1.0, [[3, 3]]))
    )
    assert expected.pairs == {"attentions": {"stack": [[3, 3]]}}
    assert student.train()(**text).loss.item() == pytest.approx(other.train()(**text).loss.item(), abs=1e-9)


TINY_BERT = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4)
TINY_MARIAN = dict(
    vocab_size=VOCAB, d_model=16, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, pad_token_id=0,
    decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=0, eos_token_id=2,
)  # fmt: skip
TEACHERS = {
    "encoder": (transformers.BertForMaskedLM, transformers.BertConfig(**TINY_BERT)),
    "decoder": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=4, n_head=4, n_inner=24, bos_token_id=1, eos_token_id=2
        ),
    ),
    "encoder_decoder": (transformers.MarianMTModel, transformers.MarianConfig(**TINY_MARIAN)),
}


@pytest.mark.parametrize("topology", CLASSES)
def test_a_teacher_of_transformers_teaches_what_its_copy_in_this_family_does(topology):
    model_class, config = TEACHERS[topology]
    config.initializer_range = config.init_std = 0.3
    theirs = model_class._from_config(config, attn_implementation="eager").double()
    ours = triptych.import_model(theirs, attn_implementation="eager")
    signals = SIGNALS["outputs"] | SIGNALS["hidden_states"] | SIGNALS["attentions"]
    batch = batch_of(texts_for(topology))
    runs = [learn(build(topology, seed=1, **SMALL), teacher, recipe_of(**signals), batch) for teacher in (theirs, ours)]
    assert_all_close(runs, rtol=1e-5, atol=1e-7)


def test_a_classifier_learns_its_teachers_distribution_over_classes():
    kind = triptych.TriptychEncoderForSequenceClassification
    teacher, student = build(kind, num_labels=3), build(kind, seed=1, num_labels=3, **SMALL)
    Distillation(student, teacher, recipe_of(**SIGNALS["outputs"] | SIGNALS["relations"]))
    Distillation(alone := build(kind, seed=1, num_labels=3, **SMALL), teacher, recipe_of(**SIGNALS["relations"]))
    batch = batch_of([{**text, "labels": torch.tensor([[1]])} for text in texts_for("encoder")])
    batch["labels"] = torch.tensor([1, -100, 2])
    p, q = ((model.eval()(**batch).logits / 2)[[0, 2]] for model in (teacher, student))
    expected = 4 * kl(p.softmax(-1), p.log_softmax(-1), q.log_softmax(-1)) / 2
    loss = student.train()(**batch).loss - alone.train()(**batch).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)


ANSWERS = {
    triptych.TriptychEncoderForQuestionAnswering: {"start_positions": [0, 1], "end_positions": [2, 3]},
    triptych.TriptychEncoderForMultipleChoice: {"labels": [0, 1]},
    triptych.TriptychEncoderForTokenClassification: {"labels": [[0, 1, -100, 1], [-100, 1, 0, 0]]},
}


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
def test_other_heads_learn_states(kind):
    """Twice the rows, or choices of them, is the same loss."""
    student, ids = build(kind, seed=1, **SMALL), torch.randint(3, VOCAB, (2, 4))
    Distillation(student, build(kind), recipe_of(labels=1.0, hidden_states=LayersRecipe(1.0, [[2, 4]])))
    ids = ids[:, None].repeat(1, 2, 1) if kind is triptych.TriptychEncoderForMultipleChoice else ids
    batch = {"input_ids": ids} | {name: torch.tensor(values) for name, values in ANSWERS[kind].items()}
    loss = student.train()(**batch).loss
    twice = student(**{name: torch.cat([value, value]) for name, value in batch.items()}).loss
    assert loss.item() == pytest.approx(twice.item(), abs=1e-9)


REFUSED = {
    "vocabulary": (lambda: build("decoder", vocab_size=40), SIGNALS["outputs"], r"shape \[2, 40\] .* \[2, 31\]: their"),
    "topology": (
        lambda: build("encoder"),
        SIGNALS["outputs"],
        r"\(TriptychForMaskedLM\) reads both ways, but the student \(TriptychForCausalLM\) reads left to right",
    ),
    "pair": (lambda: build("encoder_decoder"), SIGNALS["outputs"], "reads with an encoder and writes with a decoder"),
    "layer": (
        partial(build, "decoder"),
        dict(hidden_states=LayersRecipe(1.0, [[3, 4]])),
        r"'distillation.hidden_states.layers' has \[3, 4\], but .* from 0 to 2 of the student's and one from 0 to 4",
    ),
    "triple": (
        partial(build, "decoder"),
        dict(attentions=LayersRecipe(1.0, [[0, 1, 2]])),
        r"has \[0, 1, 2\], but a pair",
    ),
    "no layer": (partial(build, "decoder"), dict(attentions=LayersRecipe(1.0, [])), "must have a pair of layers"),
    "stack": (
        partial(build, "decoder"),
        dict(relations=RelationsRecipe(1.0, {"decoder": [[0, 0]]})),
        "'distillation.relations.layers.decoder' is unknown",
    ),
    "heads": (
        lambda: build("decoder", num_attention_heads=2),
        SIGNALS["attentions"],
        r"has 2 attention heads and the student \(TriptychForCausalLM\) 4, .*: use distillation.relations",
    ),
    "relation heads": (
        partial(build, "decoder"),
        dict(relations=RelationsRecipe(1.0, heads=16)),
        "'distillation.relations.heads' is 16, but must divide the 8 of the student",
    ),
    "names": (
        lambda: transformers.GPT2LMHeadModel(TEACHERS["decoder"][1]),
        SIGNALS["relations"],
        "as GPT2LMHeadModel has no layers called q_proj",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_paired_are_refused(case):
    make_teacher, signals, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence) as error:
        Distillation(build("decoder", seed=1, **SMALL), make_teacher(), recipe_of(**signals))
    assert "\n" not in str(error.value)


def test_students_that_cannot_learn_are_refused():
    teacher = build("encoder")
    with pytest.raises(UserError, match="the student is BertForMaskedLM, but must be of this family"):
        Distillation(transformers.BertForMaskedLM(TEACHERS["encoder"][1]), teacher, recipe_of(**SIGNALS["outputs"]))
    with pytest.raises(UserError, match=r"'model.attention_dropout' must be 0 .*, not 0.1"):
        Distillation(build("encoder", attention_dropout=0.1), teacher, recipe_of(**SIGNALS["attentions"]))
    quick = build("encoder")
    quick.set_attn_implementation("sdpa")
    with pytest.raises(
        UserError, match=r"the student \(.*\) gives no attention maps: its attn_implementation must be eager"
    ):
        Distillation(quick, teacher, recipe_of(**SIGNALS["attentions"]))
    kind = triptych.TriptychEncoderForQuestionAnswering
    with pytest.raises(
        UserError, match=r"'distillation.outputs.weight' must be 0, as the student \(TriptychEncoderForQ"
    ):
        Distillation(build(kind), build(kind), recipe_of(**SIGNALS["outputs"]))
    kind = triptych.TriptychEncoderForSequenceClassification
    names = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    with pytest.raises(UserError, match=r"has the classes \{0: 'LABEL_0', .* 'yes'\}: they must be the same"):
        Distillation(build(kind, **names), build(kind), recipe_of(**SIGNALS["outputs"]))


def test_a_teacher_that_lacks_an_input_is_refused():
    theirs = transformers.GPT2LMHeadModel(TEACHERS["decoder"][1]).double()
    student = build("decoder", seed=1, **SMALL)
    Distillation(student, theirs, recipe_of(**SIGNALS["outputs"]))
    batch = batch_of(texts_for("decoder")) | {"prefix_length": torch.ones(3, dtype=torch.long)}
    with pytest.raises(
        UserError, match=r"the teacher \(GPT2LMHeadModel\) cannot read 'prefix_length' of this objective"
    ):
        student.train()(**batch)
