"""Loss without the table of logits: equal to the loss with it, in value and gradients, on every language model.

Shapes: N labelled tokens, E width, V vocabulary.
"""

import peft
import pytest
import torch
from tiny import LANGUAGE_MODELS, VOCAB, assert_equal, assert_equal_gradients, gradients, random_tokens, tiny_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import triptych
from triptych import losses
from triptych.losses import cross_entropy, projected_cross_entropy

OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "both": {"label_smoothing": 0.2, "z_loss": 0.1},
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Five rows at a time, so that there are several and the last one is shorter."""
    monkeypatch.setattr(losses, "TABLE_SIZE", 1)
    monkeypatch.setattr(losses, "FEWEST_ROWS", 5)


def leaves(dtype, has_bias):
    torch.manual_seed(0)
    shapes = [(23, 8), (37, 8), *([(37,)] if has_bias else [])]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def result(loss, tensors):
    (3 * loss).backward()  # as a scaler of gradients, or accumulation, would have it
    return [loss.detach(), *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_loss_and_its_gradients_are_those_of_the_table(small_chunks, options, has_bias):
    labels = torch.randint(0, 37, (23,))
    states, weight, *bias = plain = leaves(torch.float64, has_bias)
    expected = result(cross_entropy(0.7 * F.linear(states, weight, *bias), labels, 30, **options), plain)
    states, weight, *bias = tensors = leaves(torch.float64, has_bias)
    actual = result(projected_cross_entropy(states, labels, weight, *bias or [None], 0.7, 30, **options), tensors)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_backward_may_be_called_again(small_chunks):
    """Gradients that are handed out as they were kept are not those that the next call adds to."""
    labels = torch.randint(0, 37, (23,))
    states, weight, bias = tensors = leaves(torch.float64, True)
    loss = projected_cross_entropy(states, labels, weight, bias)
    once = torch.autograd.grad(loss, tensors, retain_graph=True)
    for factor in (1, 2, 1):
        (factor * loss).backward(retain_graph=True)
    loss.backward()
    for tensor, gradient in zip(tensors, once, strict=True):
        torch.testing.assert_close(tensor.grad, 5 * gradient)


def test_the_gradient_of_the_weight_is_not_copied():
    """It can be the largest tensor of a training step."""
    states, weight, _ = leaves(torch.float32, True)
    loss = projected_cross_entropy(states, torch.randint(0, 37, (23,)), weight)
    kept = loss.grad_fn.saved_tensors[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_half_precision(small_chunks, dtype, is_autocast):
    """Sums are in single precision; gradients are as good as those of the table."""
    labels = torch.randint(0, 37, (23,))
    runs = []
    for is_projected in (False, True):
        tensors = leaves(torch.float32, True)
        with torch.autocast("cpu", dtype, enabled=is_autocast):
            states, weight, bias = tensors if is_autocast else [tensor.to(dtype) for tensor in tensors]
            if is_projected:
                loss = projected_cross_entropy(states, labels, weight, bias)
            else:
                loss = cross_entropy(F.linear(states, weight, bias), labels)
        assert loss.dtype == torch.float32
        runs.append(result(loss, tensors))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.01)


VARIANTS = {
    "encoder": ("encoder", {}),
    "decoder": ("decoder", {}),
    "pair": ("encoder_decoder", {}),
    "tied": ("decoder", {"tie_word_embeddings": True}),
    "scaled": ("encoder_decoder", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "factorised": ("decoder", {"embedding_size": 16}),
    "biased": ("decoder", {"lm_head_bias": True}),
    "untied encoder": ("encoder", {"tie_word_embeddings": False, "embedding_size": 16}),
}


def batch_for(topology):
    ids = random_tokens(3, 9)
    labels = random_tokens(3, 9)
    labels[0, :4] = labels[2, 5:] = -100
    mask = torch.ones_like(ids)
    mask[2, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "num_items_in_batch": 50}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_language_model_trains_the_same_without_logits(small_chunks, variant, options):
    topology, changes = VARIANTS[variant]
    batch, runs = batch_for(topology), []
    for output_logits in (True, None):
        model = tiny_model(topology, **changes).double().train()
        output = model(**batch, **options, output_logits=output_logits)
        assert (output.logits is None) == (output_logits is None)
        runs.append((output.loss.item(), gradients(model, output.loss)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-10)
    assert_equal_gradients(runs[1][1], runs[0][1])


def test_two_tasks_at_once(small_chunks):
    batch = batch_for("encoder") | {"next_sentence_label": torch.tensor([0, 1, 1])}
    runs = []
    for output_logits in (True, False):
        model = tiny_model(triptych.TriptychEncoderForPreTraining, type_vocab_size=2).train()
        output = model(**batch, output_logits=output_logits)
        assert output.seq_relationship_logits.shape == (3, 2)
        runs.append((output.loss.item(), gradients(model, output.loss)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    assert_equal_gradients(runs[1][1], runs[0][1])


@pytest.mark.parametrize("topology", LANGUAGE_MODELS)
def test_who_asks_for_logits_gets_them(topology):
    """In eval mode, and wherever there are no labels, they are there unasked."""
    model, batch = tiny_model(topology), batch_for(topology)
    shape = (3, 9, VOCAB)
    assert model(**batch).logits.shape == shape
    assert model(**batch, output_logits=False).logits is None
    model.train()
    assert model(**batch).logits is None
    assert model(**batch, output_logits=True).logits.shape == shape
    del batch["labels"]
    batch |= {"decoder_input_ids": random_tokens(3, 9)} if topology == "encoder_decoder" else {}
    assert model(**batch, output_logits=False).logits.shape == shape


@pytest.mark.parametrize("inputs", [{}, {"is_causal": False}, {"prefix_length": torch.tensor([9, 9, 9])}], ids=str)
def test_what_stands_behind_the_last_label_counts_where_it_is_seen(inputs):
    """A decoder that reads both ways, or a prefix, sees it: the loss in training is that with all logits."""
    model, batch = tiny_model("encoder_decoder").train(), batch_for("encoder_decoder")
    del batch["attention_mask"]
    assert_equal(model(**batch, **inputs).loss, model(**batch, **inputs, output_logits=True).loss)


class LargestTensor(TorchDispatchMode):
    """Remembers how many entries the largest new tensor had."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **kwargs or {})
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return output


def test_no_table_of_logits_is_made(monkeypatch):
    monkeypatch.setattr(losses, "TABLE_SIZE", 0)
    monkeypatch.setattr(losses, "FEWEST_ROWS", 4)
    model = tiny_model("decoder", vocab_size=2000).train()
    ids = torch.randint(3, 2000, (4, 50))
    sizes = []
    for output_logits in (True, False):
        with LargestTensor() as largest:
            model(ids, labels=ids, output_logits=output_logits).loss.backward()
        sizes.append(largest.entries)
    assert sizes == [4 * 50 * 2000, 2000 * 32]  # all logits; or, at most, the table of tokens


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_frozen_projection_costs_no_gradient(small_chunks, has_bias):
    """Its gradient is not made on the way forward, and that of the states is what it was."""
    states, weight, bias = (*leaves(torch.float32, has_bias), None)[:3]
    labels, gradients_of_states = torch.arange(len(states)), []
    for is_frozen in (False, True):
        states.grad = weight.grad = None
        weight.requires_grad_(not is_frozen)
        loss = projected_cross_entropy(states, labels, weight, bias)
        assert (loss.grad_fn.saved_tensors[1] is None) == is_frozen
        loss.backward()
        gradients_of_states.append(states.grad)
    assert torch.equal(*gradients_of_states)


@pytest.mark.parametrize("topology", LANGUAGE_MODELS)
def test_nothing_to_learn_is_a_loss_of_zero(topology):
    model, batch = tiny_model(topology).train(), batch_for(topology)
    decoder = {"decoder_input_ids": random_tokens(3, 9)} if topology == "encoder_decoder" else {}
    output = model(**batch | {"labels": torch.full((3, 9), -100)}, **decoder)
    output.loss.backward()
    assert output.loss == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("topology", LANGUAGE_MODELS)
def test_bad_labels_are_named(topology):
    model, batch = tiny_model(topology).train(), batch_for(topology)
    decoder = {"decoder_input_ids": random_tokens(3, 9)} if topology == "encoder_decoder" else {}
    wrong = batch["labels"].clone()
    wrong[1, 3] = VOCAB
    with pytest.raises(ValueError, match=rf"`labels` has {VOCAB}, but labels must be -100 or from 0 to {VOCAB - 1}"):
        model(**batch | {"labels": wrong}, **decoder)
    with pytest.raises(ValueError, match=r"`labels` has shape \[3, 8\], but must be \[3, 9\]"):
        model(**batch | {"labels": wrong[:, :8]}, **decoder)


def test_an_adapted_projection_is_used_as_a_whole():
    """What lies beside the weight of the projection, such as low-rank directions, is part of the loss."""
    model = tiny_model("decoder", tie_word_embeddings=False).train()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), model)
    batch = batch_for("decoder")
    output = model(**batch)
    assert output.logits is not None
    assert output.loss.item() == pytest.approx(model(**batch, output_logits=True).loss.item())


@pytest.mark.parametrize("tie", [True, False])
def test_a_resized_vocabulary_still_trains_without_logits(tie):
    model = tiny_model("decoder", tie_word_embeddings=tie).train()
    model.resize_token_embeddings(VOCAB + 7)
    batch = batch_for("decoder")
    output, expected = model(**batch), model(**batch, output_logits=True)
    assert output.logits is None and expected.logits.shape == (3, 9, VOCAB + 7)
    assert output.loss.item() == pytest.approx(expected.loss.item())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
