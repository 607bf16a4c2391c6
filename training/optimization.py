"""What turns gradients into updates: the optimiser that a recipe names, and the schedule of its learning rate."""

from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, get_scheduler

from triptych.training.recipe import Recipe


class Muon(torch.optim.Muon):
    """torch's Muon, which makes singular values equal in bfloat16, doing so in float32 on a CPU.

    Most CPUs have no instructions for bfloat16: there an update of a small model took longer than all the rest of its
    step. The momentum is Nesterov's, and entries are as large as those of AdamW's steps (Liu et al. 2025, arXiv
    2502.16982, section 2.2).
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float):
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self) -> None:
        """Make one update of all parameters that have a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight_MN in group["params"]:
                if weight_MN.grad is None:
                    continue
                state = self.state[weight_MN]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight_MN.grad)
                mean_MN = state["momentum_buffer"].lerp_(weight_MN.grad, 1 - momentum)
                ahead_MN = weight_MN.grad.lerp(mean_MN, momentum)
                step_MN = orthogonalize(ahead_MN, group["ns_coefficients"], group["ns_steps"], group["eps"])
                weight_MN.mul_(1 - rate * group["weight_decay"])
                weight_MN.add_(step_MN, alpha=-0.2 * rate * max(weight_MN.shape) ** 0.5)


def orthogonalize(
    matrix_MN: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return the matrix with the singular vectors of `matrix_MN` and singular values near one, [M, N].

    Each of `steps` Newton-Schulz iterations puts a polynomial a s + b s^3 + c s^5 in place of every singular value s
    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), in float32 on a CPU and in bfloat16 elsewhere.
    """
    a, b, c = coefficients
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]  # the product of a matrix with itself is taken on its short side
    dtype = torch.float32 if matrix_MN.device.type == "cpu" else torch.bfloat16
    x_SL = (matrix_MN.mT if is_tall else matrix_MN).to(dtype)
    x_SL = x_SL / x_SL.norm().clamp(min=eps)  # no singular value is above one now
    for _ in range(steps):
        gram_SS = x_SL @ x_SL.mT
        x_SL = torch.addmm(x_SL, torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c), x_SL, beta=a)
    return (x_SL.mT if is_tall else x_SL).to(matrix_MN.dtype)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers and AdamW for everything else, as one optimiser.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps by the momentum with its singular values
    made equal. Its steps are as large as AdamW's, so that both share one learning rate and one weight decay.

    The two optimisers hold nothing of their own: groups and state are lent to them for each step, so that saving,
    sharding and scheduling see one plain optimiser.

    Args:
        muon, adamw: built on the parameters that each is to update.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW):
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
    matrices = [parameter for name, parameter in parameters.items() if is_muon[name]]
    muon = Muon(matrices, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    return MuonWithAdamW(muon, adamw)


def _is_layer_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    return ".layers." in name and _dimensions(parameter) == 2


def _dimensions(parameter: torch.nn.Parameter) -> int:
    # DeepSpeed's stage 3 leaves a flat shard, and remembers what it was.
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, done: int = 0) -> LambdaLR:
    """Set the learning rate of `optimizer` to its value after `done` updates and return what moves it on.

    `trapezoidal` is the schedule of Zhai et al. 2022 (arXiv 2106.04560, section 3.5): constant, then linear to zero in
    the last `cooldown_steps`, in which the rate of any other schedule falls alike.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = recipe.learning_rate
    name = "constant_with_warmup" if recipe.schedule == "trapezoidal" else recipe.schedule
    known = get_scheduler(name, optimizer, recipe.warmup_steps, recipe.max_steps)

    def share_of_peak(step: int) -> float:
        return known.lr_lambdas[0](step) * min(1.0, (recipe.max_steps - step) / max(1, recipe.cooldown_steps))

    return LambdaLR(optimizer, share_of_peak if recipe.cooldown_steps else known.lr_lambdas, done - 1)
