"""Softmax to linear: what linear layers learn from a teacher's attention, and few directions learn afterwards.

Shapes: B batch, T tokens, D width.
"""

import pytest
import torch
from safetensors.torch import load_file
from small_files import make_recipe, metrics_of, write_files
from tiny_dates import TINY
from transformers import AutoModelForCausalLM

import triptych
from triptych import TriptychConfig, TriptychForCausalLM, TriptychForConditionalGeneration
from triptych.states import Text
from triptych.training.attention_transfer import AttentionTransfer
from triptych.training.errors import UserError
from triptych.training.low_rank import add_low_rank, merge_low_rank
from triptych.training.recipe import LowRankRecipe, load_recipe
from triptych.training.run import train

FIELDS = {"linear_feature_map": "hedgehog", "linear_decay": "gated"}


def build_teacher():
    torch.manual_seed(0)
    config = TriptychConfig(
        topology="decoder", vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, norm_position="pre", hidden_dropout=0.1, initializer_range=0.2,
    )  # fmt: skip
    return TriptychForCausalLM._from_config(config, attn_implementation="eager").eval()


def build_student(teacher, types):
    return triptych.import_model(teacher, layer_types=types, **FIELDS).train()


TYPES = ["linear_attention", "full_attention", "linear_attention"]


def batch_of_two(padding=0):
    torch.manual_seed(1)
    ids = torch.randint(3, 50, (2, 7))
    ids = torch.nn.functional.pad(ids, (0, padding))
    mask = torch.ones(2, 7 + padding, dtype=torch.long)
    mask[:, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@torch.no_grad()
def expected_errors(student, teacher, ids):
    """Each converted layer asked alone, with the teacher's stream before it."""
    length = ids.shape[1]
    streams = teacher(ids, output_hidden_states=True).hidden_states
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    total = 0.0
    for index, (ours, theirs) in enumerate(zip(student.model.layers, teacher.model.layers, strict=True)):
        if student.config.layer_types[index] == "linear_attention":
            states = theirs.self_attn_norm(streams[index])
            output, wanted = (
                layer.self_attn(states, attention_mask=given)[0] for layer, given in ((ours, Text()), (theirs, mask))
            )
            total += (output - wanted).square().mean(-1).sum()
    return total


def test_the_loss_is_that_of_each_layer_at_the_teachers_inputs():
    teacher = build_teacher()
    student = build_student(teacher, TYPES)
    batch = batch_of_two()
    expected = expected_errors(student, teacher, batch["input_ids"])
    AttentionTransfer(student, teacher)
    loss = student(**batch, num_items_in_batch=torch.tensor(5)).loss
    assert expected > 0.1 and loss.item() == pytest.approx(expected.item() / 5, rel=1e-4)
    padded = student(**batch_of_two(padding=4), num_items_in_batch=torch.tensor(5)).loss
    assert padded.item() == pytest.approx(loss.item(), rel=1e-5)


def test_only_what_the_teacher_lacks_learns_and_evaluation_is_of_the_student_alone():
    teacher = build_teacher()
    student = build_student(teacher, TYPES)
    batch = batch_of_two()
    alone = student.eval()(**batch)
    AttentionTransfer(student, teacher)
    hooked = student(**batch)
    assert torch.equal(hooked.logits, alone.logits) and torch.equal(hooked.loss, alone.loss)
    student.train()(**batch, num_items_in_batch=torch.tensor(5)).loss.backward()
    learning = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    known = {name for name, _ in teacher.named_parameters()}
    assert learning == {name for name, _ in student.named_parameters()} - known
    assert {name.split(".")[4] for name in learning} == {
        *("q_features", "k_features", "decay_proj", "decay_rate", "decay_bias"),
    }
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())


def test_models_that_do_not_fit_are_refused():
    teacher = build_teacher()
    with pytest.raises(UserError, match=r"'attention_transfer' needs 'linear_attention' in model.layer_types"):
        AttentionTransfer(triptych.import_model(teacher), teacher)
    other = TriptychConfig(
        topology="decoder", vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, layer_types=TYPES, **FIELDS,
    )  # fmt: skip
    said = r"teacher's model.embed_tokens.weight is \[50, 32\], but the student's \[60, 32\]"
    with pytest.raises(UserError, match=said):
        AttentionTransfer(TriptychForCausalLM(other), teacher)


def test_an_encoder_decoder_is_refused():
    config = TriptychConfig.from_preset("tiny_encoder_decoder")
    pair = TriptychForConditionalGeneration(config)
    with pytest.raises(UserError, match=r"'attention_transfer' needs an encoder or a decoder"):
        AttentionTransfer(pair, pair)


def test_low_rank_begins_as_nothing_and_is_merged_exactly():
    model = build_teacher()
    batch = batch_of_two()
    names, before = set(model.state_dict()), model(**batch).logits
    add_low_rank(model, LowRankRecipe(rank=2, modules=["q_proj", "down_proj"]))
    assert torch.equal(model(**batch).logits, before)
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(learning) == 2 * 2 * 3 and all("lora" in name for name in learning)
    assert all(min(parameter.shape) == 2 for parameter in learning.values())
    for parameter in learning.values():
        torch.nn.init.normal_(parameter)
    changed = model(**batch).logits
    assert (changed - before).abs().max() > 0.1
    merge_low_rank(model)
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(**batch).logits, changed, rtol=1e-4, atol=1e-4)


def test_low_rank_refuses_layers_that_are_not_there():
    with pytest.raises(UserError, match=r"'low_rank.modules' names 'gate_proj', but the model has no layer"):
        add_low_rank(build_teacher(), LowRankRecipe(rank=2, modules=["gate_proj"]))
    with pytest.raises(UserError, match=r"'low_rank.modules' must name a layer, or low_rank.rank be 0"):
        add_low_rank(build_teacher(), LowRankRecipe(rank=2, modules=[]))
    with pytest.raises(UserError, match=r"recipe key 'low_rank.modules': Target module LayerNorm"):
        add_low_rank(build_teacher(), LowRankRecipe(rank=2, modules=["norm"]))
    with pytest.raises(UserError, match=r"'low_rank.rank' must be at least 0, not -1"):
        load_recipe("dates", [*TINY, "low_rank.rank=-1"])


def test_low_rank_of_a_model_that_does_not_write_by_muon(tmp_path):
    """An encoder has no generation settings to hand on, and what learns are matrices of layers alone."""
    options = write_files(tmp_path), tmp_path, "masked_lm", "encoder"
    train(make_recipe(*options, f"output={tmp_path / 'base'}"))
    rank = ["low_rank.rank=2", "optimizer=muon", f"model.path={tmp_path / 'base'}"]
    train(make_recipe(*options, *rank, f"output={tmp_path / 'tuned'}"))
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "tuned"))
    assert old.keys() == new.keys()
    changed = {name.split(".")[-2] for name in new if not torch.equal(new[name], old[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_from_softmax_to_linear_in_three_recipes(tmp_path):
    """A model learns, its linear copy learns its attention, then few directions learn the objective again."""
    files = write_files(tmp_path)
    options = files, tmp_path, "causal_lm", "decoder", "max_steps=30", "validate_every=10", "learning_rate=1e-2"
    base, linear, tuned = (f"output={tmp_path / name}" for name in ("base", "linear", "tuned"))
    train(make_recipe(*options, base))
    fields = ["model.layer_types=[linear_attention]", "model.linear_feature_map=hedgehog", "model.linear_decay=gated"]
    transferred = train(
        make_recipe(
            *options, *fields, f"model.path={tmp_path / 'base'}", f"attention_transfer={tmp_path / 'base'}", linear
        )
    )
    losses = metrics_of(transferred, "loss")
    assert losses[-1] < 0.7 * losses[0]
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "linear"))
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())
    assert all(".self_attn." in name for name in new.keys() - old.keys())

    rank = ["low_rank.rank=2", "low_rank.modules=[q_proj,v_proj]"]
    run = train(make_recipe(*options, *rank, f"model.path={tmp_path / 'linear'}", tuned))
    last = load_file(run.folder / "model.safetensors")
    assert last.keys() == new.keys()
    changed = {name for name in last if not torch.equal(last[name], new[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}
    for name in changed:
        values = torch.linalg.svdvals((last[name] - new[name]).double())
        assert values[2] < 1e-5 * values[0]
    model = AutoModelForCausalLM.from_pretrained(run.folder)
    assert model.config.layer_types == ["linear_attention"]
    assert model.generation_config.max_new_tokens == 8
    assert run.best_loss < metrics_of(transferred, "validation_loss")[-1]
