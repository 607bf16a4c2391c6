"""R-Drop: its term against a formula written out, and trainings in which it must or must not count."""

import pytest
import torch
from safetensors.torch import load_file
from small_files import EVERY, make_recipe, metrics_of, write_files
from tiny_dates import TINY

from triptych import TriptychConfig, TriptychForCausalLM
from triptych.training.building import ONE_ANSWER
from triptych.training.consistency import Consistency, disagreement, twice
from triptych.training.errors import UserError
from triptych.training.recipe import load_recipe
from triptych.training.run import train


def test_disagreement_is_half_of_both_divergences_at_labels():
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 7, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 2], [3, 4, -100]])
    expected = 0.0
    for row, token in ((0, 0), (0, 2), (1, 0), (1, 1)):
        p, q = logits[row, token].softmax(-1), logits[row + 2, token].softmax(-1)
        expected += sum((p * (p / q).log() + q * (q / p).log()).tolist()) / 2
    assert disagreement(logits, twice({"labels": labels})["labels"]).item() == pytest.approx(expected, abs=1e-12)
    same = torch.cat([logits[:2], logits[:2]]).requires_grad_()
    term = disagreement(same, labels.repeat(2, 1))
    term.backward()
    assert term == 0 and same.grad.isfinite().all()


def test_a_decoder_agrees_where_it_predicts_a_label():
    """Its logits at one token are about the next."""
    config = TriptychConfig.from_preset("tiny_decoder", initializer_range=0.2, hidden_dropout=0.3)
    model = TriptychForCausalLM(config).train()
    ids = torch.randint(3, config.vocab_size, (2, 6))
    batch = {"input_ids": ids, "labels": torch.where(torch.arange(6) < 3, -100, ids)}
    torch.manual_seed(1)
    logits = model(input_ids=ids.repeat(2, 1)).logits
    Consistency(model, weight=4.0)
    torch.manual_seed(1)
    loss = model(**batch, num_items_in_batch=torch.tensor(6)).loss
    first, second = logits[:, 2:5].log_softmax(-1).chunk(2)  # tokens 3, 4 and 5 are predicted
    entropies = -sum(half.gather(-1, ids[:, 3:, None]).sum() for half in (first, second)) / 2
    divergences = ((first.exp() - second.exp()) * (first - second)).sum() / 2
    assert loss.item() == pytest.approx(((entropies + 2 * divergences) / 6).item(), rel=1e-5)


def losses_and_weights(recipe):
    run = train(recipe)
    return metrics_of(run, "loss"), load_file(run.folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "topology"), [pair for pair in EVERY if pair[0] not in ONE_ANSWER], ids=lambda value: str(value)
)
def test_without_dropout_both_passes_agree(tmp_path, name, topology):
    """Every objective trains as if there were one pass, as the halves are equal; with dropout they are not."""
    folder = write_files(tmp_path)
    options = (folder, tmp_path, name, topology, "overwrite=true")
    still = (*options, "model.hidden_dropout=0.0")
    losses, weights = losses_and_weights(make_recipe(*still))
    again, same = losses_and_weights(make_recipe(*still, "r_drop=5"))
    assert again == pytest.approx(losses, rel=1e-5)
    # AdamW's first steps are of one size, whatever a gradient's: those near zero may differ.
    assert max((same[key] - weights[key]).abs().mean() for key in weights) < 1e-5
    plain, dropped = (losses_and_weights(make_recipe(*options, f"r_drop={weight}"))[0] for weight in (1e-9, 5))
    assert dropped[0] > plain[0] + 1e-3


@pytest.mark.parametrize("name", ONE_ANSWER)
def test_objectives_without_a_distribution_at_each_label_are_refused(tmp_path, name):
    topology = next(topology for known, topology in EVERY if known == name)
    recipe = make_recipe(write_files(tmp_path), tmp_path, name, topology, "r_drop=1")
    with pytest.raises(UserError, match=rf"'r_drop' must be 0, as {name}"):
        train(recipe)


def test_a_negative_weight_is_refused():
    with pytest.raises(UserError, match=r"'r_drop' must be at least 0, not -1.0"):
        load_recipe("dates", [*TINY, "r_drop=-1"])
