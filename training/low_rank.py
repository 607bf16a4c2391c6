"""Low-rank fine-tuning (LoRA; Hu et al. 2022, arXiv 2106.09685): W + (alpha / r) B A, of which A and B alone learn."""

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from triptych.training.errors import UserError, as_user_error
from triptych.training.recipe import LowRankRecipe


def add_low_rank(model: PreTrainedModel, recipe: LowRankRecipe) -> None:
    """Put `recipe.rank` directions beside the layers that it names, in place; the rest of `model` learns no more.

    Raises:
        UserError: no name, one that no layer has, or one of layers that are no matrices.
    """
    if not recipe.modules:
        raise UserError("recipe key 'low_rank.modules' must name a layer, or low_rank.rank be 0")
    names = {name.rpartition(".")[-1] for name, _ in model.named_modules()}
    for name in recipe.modules:
        if name not in names:
            raise UserError(f"recipe key 'low_rank.modules' names '{name}', but the model has no layer of that name")
    with as_user_error("recipe key 'low_rank.modules'"):
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=recipe.modules), model
        )


def merge_low_rank(model: PreTrainedModel) -> None:
    """Add the learnt directions to the layers that they lie beside, in place, and take them away."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
