"""What turns gradients into updates: the optimiser that a recipe names, and the schedule of its learning rate."""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, get_scheduler

from triptych.training.recipe import Recipe


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers and AdamW for everything else, as one optimiser.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps by the momentum with its singular values
    made equal. Steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that both
    share one learning rate and one weight decay.

    The two optimisers hold nothing of their own: groups and state are lent to them for each step, so that saving,
    sharding and scheduling see one plain optimiser.

    Args:
        muon, adamw: built on the parameters that each is to update.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        self.parts = {"muon": muon, "adamw": adamw}
        groups = [group | {"part": name} for name, part in self.parts.items() for group in part.param_groups]
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of all parameters; `closure`, where given, computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.state = self.state
            part.step()
        return loss


def build_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the recipe's optimiser over the parameters of `model` that learn.

    AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) decays matrices, not gains and biases. With `muon` it is left
    with embeddings, heads, gains and biases.
    """
    # A table that two modules share comes once.
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    is_muon = {name: recipe.optimizer == "muon" and _is_layer_matrix(name, p) for name, p in parameters.items()}
    rest = [parameter for name, parameter in parameters.items() if not is_muon[name]]
    groups = [
        {"params": [p for p in rest if _dimensions(p) > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    # One may be empty: with directions of low rank, Muon has all that learns.
    groups = [group for group in groups if group["params"]] or groups[:1]
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=tuple(recipe.adam_betas), eps=recipe.adam_epsilon)
    if recipe.optimizer == "adamw":
        return adamw
    muon = torch.optim.Muon(
        [parameter for name, parameter in parameters.items() if is_muon[name]],
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, adamw)


def _is_layer_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return ".layers." in name and _dimensions(parameter) == 2


def _dimensions(parameter: torch.nn.Parameter) -> int:
    # DeepSpeed's stage 3 leaves a flat shard, and remembers what it was.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, done: int = 0) -> LambdaLR:
    """Set the learning rate of `optimizer` to its value after `done` updates and return what moves it on.

    `trapezoidal` is the schedule of Zhai et al. 2022 (arXiv 2106.04560, section 3.5): constant, then linear to zero.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = recipe.learning_rate
    options = {"last_epoch": done - 1}
    name = recipe.schedule
    if name == "trapezoidal":
        name = "warmup_stable_decay"
        options |= {"num_decay_steps": recipe.cooldown_steps, "decay_type": "linear"}
    return get_scheduler(name, optimizer, recipe.warmup_steps, recipe.max_steps, options)
