"""Optimisers against torch's own, and schedules against values worked out by hand."""

import copy

import pytest
import torch

from triptych import TriptychConfig, TriptychForConditionalGeneration
from triptych.training.optimization import MuonWithAdamW, build_optimizer, build_schedule, orthogonalize
from triptych.training.recipe import Recipe

MUON = Recipe(optimizer="muon", learning_rate=0.01, weight_decay=0.1)


@pytest.fixture
def model():
    """A tiny T5: tied tables, tables of relative positions, and gated layers."""
    return TriptychForConditionalGeneration(TriptychConfig.from_preset("tiny_t5", hidden_dropout=0.0))


def backward(model):
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(3, 97, (4, 6), generator=generator) for _ in range(2))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return float(loss.detach())


def names_of(optimizer, model):
    """The parameters of each group, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(model, optimizer):
    optimizer = build_optimizer(model, Recipe(optimizer=optimizer, weight_decay=0.1))
    groups = names_of(optimizer, model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(set.union(*groups))
    assert set.union(*groups) == {name for name, _ in model.named_parameters()}
    for group in optimizer.param_groups:
        assert all((parameter.ndim > 1) == (group["weight_decay"] == 0.1) for parameter in group["params"])


def test_muon_takes_the_matrices_of_the_layers_only(model):
    muon, tables, vectors = names_of(build_optimizer(model, MUON), model)
    assert {name.split(".")[-2] for name in muon} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    assert tables == {
        "model.encoder.embed_tokens.weight",
        "model.encoder.relative_bias.relative_attention_bias.weight",
        "model.decoder.relative_bias.relative_attention_bias.weight",
    }
    assert all("norm" in name for name in vectors)


def test_muon_with_adamw_is_the_two_of_them(model, monkeypatch):
    """Three updates with a schedule equal those of torch.optim.Muon and torch.optim.AdamW, each on its own part."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's Muon, in float32 too
    other = copy.deepcopy(model)
    recipe = Recipe(optimizer="muon", learning_rate=0.01, weight_decay=0.1, warmup_steps=2)
    optimizer = build_optimizer(model, recipe)
    schedule = build_schedule(optimizer, recipe)
    parts = {name: ".layers." in name and parameter.ndim == 2 for name, parameter in other.named_parameters()}
    parameters = dict(other.named_parameters())
    matrices, rest = ([parameters[name] for name in parts if parts[name] == is_matrix] for is_matrix in (True, False))
    alone = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], weight_decay=0.1, betas=(0.9, 0.98), eps=1e-9),
        torch.optim.AdamW([p for p in rest if p.ndim <= 1], weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9),
    ]
    for learning_rate in (0.0, 0.005, 0.01):
        assert backward(model) == backward(other)
        for part in alone:
            part.param_groups[0]["lr"] = learning_rate
            part.step()
            part.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(12, 12), (9, 30), (30, 9)])
def test_muon_evens_singular_values_out(shape):
    """The same singular vectors, with the values that the polynomial, iterated in double precision, makes of theirs."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    a, b, c = 3.4445, -4.7750, 2.0315
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values /= values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    even = orthogonalize(matrix, (a, b, c), 5, 1e-7)
    torch.testing.assert_close(even.double(), left @ values.diag() @ right, rtol=0, atol=1e-4)


def test_muon_does_without_bfloat16_on_a_cpu(model, monkeypatch):
    """Its products are in float32: most CPUs have none in bfloat16."""
    backward(model)
    used = []
    addmm = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: used.append(args[0].dtype) or addmm(*args, **options))
    build_optimizer(model, MUON).step()
    assert set(used) == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimiser_that_is_saved_and_loaded_goes_on_alike(model, name):
    recipe = Recipe(optimizer=name, learning_rate=0.01)
    optimizer = build_optimizer(model, recipe)
    backward(model)
    optimizer.step()
    other = copy.deepcopy(model)
    loaded = build_optimizer(other, recipe)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((model, optimizer), (other, loaded)):
        its_optimizer.zero_grad()
        backward(one)
        its_optimizer.step()
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_muon_learns(model):
    optimizer = build_optimizer(model, MUON)
    losses = []
    for _ in range(30):
        losses.append(backward(model))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


def test_a_closure_is_called_once_with_gradients(model):
    optimizer = build_optimizer(model, MUON)
    assert isinstance(optimizer, MuonWithAdamW)
    before = model.model.encoder.embed_tokens.weight.clone()
    assert optimizer.step(lambda: backward(model)) > 0
    assert not torch.equal(before, model.model.encoder.embed_tokens.weight)


# Ten updates at most 1.0, the first four of them warm-up, the last so many cooldown: the rate of each update.
WARMUP = [0.0, 0.25, 0.5, 0.75, 1.0]
SCHEDULES = {
    ("inverse_sqrt", 0): [*WARMUP, (4 / 5) ** 0.5, (4 / 6) ** 0.5, (4 / 7) ** 0.5, (4 / 8) ** 0.5, (4 / 9) ** 0.5],
    ("inverse_sqrt", 2): [*WARMUP, (4 / 5) ** 0.5, (4 / 6) ** 0.5, (4 / 7) ** 0.5, (4 / 8) ** 0.5, (4 / 9) ** 0.5 / 2],
    ("linear", 0): [*WARMUP, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6],
    ("cosine", 0): [*WARMUP, 0.9330127, 0.75, 0.5, 0.25, 0.0669873],
    ("trapezoidal", 3): [*WARMUP, 1.0, 1.0, 1.0, 2 / 3, 1 / 3],
    ("trapezoidal", 0): [*WARMUP, 1.0, 1.0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize(("name", "cooldown"), SCHEDULES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("done", [0, 3, 8])
def test_schedules(model, name, cooldown, optimizer, done):
    """The learning rate of every update, from the first one or from where a run goes on; some end at zero."""
    options = {"learning_rate": 2.0, "max_steps": 10, "warmup_steps": 4, "cooldown_steps": cooldown}
    recipe = Recipe(schedule=name, optimizer=optimizer, **options)
    optimizer = build_optimizer(model, recipe)
    schedule = build_schedule(optimizer, recipe, done)
    rates = []
    for _ in range(done, 10):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        rates.append(rate)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([2.0 * rate for rate in SCHEDULES[name, cooldown][done:]])
    if cooldown or name in ("linear", "cosine"):
        assert optimizer.param_groups[-1]["lr"] == pytest.approx(0)
