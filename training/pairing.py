"""What of a teacher's layers is compared with what of a student's, and whether the two fit at all.

What models give is found out by asking them, as configurations of transformers have no common names for it. A stack is
called `encoder`, `decoder` or, of a decoder's attention to an encoder, `cross`; a model's only one `stack`.

Shapes: B batch, T tokens, H heads, d width of a head.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from triptych import TriptychPreTrainedModel
from triptych.training.errors import UserError, unknown_name
from triptych.training.recipe import Pairs
from triptych.training.training_loss import Inputs

# How transformers names what the layers of a stack write.
TABLES = {"stack": "{}", "encoder": "encoder_{}", "decoder": "decoder_{}", "cross": "cross_{}"}
PROJECTION = re.compile(r"(?:(encoder|decoder)\.)?layers\.\d+\.self_attn\.([qkv])_proj$")
NAMES = {"q": "query", "k": "key", "v": "value"}

Projected = dict[str, Tensor]  # query, key and value of a layer, each [B, T, H, d]
Layers = dict[str, dict[str, Sequence]]  # of each signal, by stack, what its layers give


class LayerReader:
    """Reads what the layers of `model` write in a forward between `start` and `stop`, as far as `signals` compare it.

    Raises:
        UserError: relations are asked for, and there are no layers called q_proj, k_proj and v_proj.
    """

    def __init__(self, model: PreTrainedModel, signals: dict[str, Any]):
        self.signals = signals
        self.projected: dict[str, dict[str, list[Tensor]]] | None = None
        self.hooks = []
        for name, module in model.named_modules() if "relations" in signals else ():
            if found := PROJECTION.search(name):
                stack = found[1] if model.config.is_encoder_decoder else "stack"
                head_dim = model.get_submodule(name.rpartition(".")[0]).head_dim
                self.hooks.append(module.register_forward_hook(partial(self._note, stack, NAMES[found[2]], head_dim)))
        if "relations" in signals and not self.hooks:
            raise UserError(
                f"recipe key 'distillation.relations.weight' must be 0, as {type(model).__name__} has no layers called "
                "q_proj, k_proj and v_proj: bring it in with triptych convert"
            )

    def start(self) -> dict[str, bool]:
        """Begin to read; return what the forward is to be asked for."""
        self.projected = defaultdict(lambda: defaultdict(list))
        # Hidden states that are asked for stand where their tokens were given; so then do projected ones.
        has_states = bool(self.signals.keys() & {"hidden_states", "relations"})
        asked = {"output_hidden_states": has_states, "output_attentions": "attentions" in self.signals}
        return {name: True for name, is_asked in asked.items() if is_asked}

    def stop(self, output: Any) -> Layers:
        """Return what was read, `output` of the model included."""
        layers: Layers = {}
        for what in ("hidden_states", "attentions"):
            if what in self.signals:
                tables = {stack: output.get(name.format(what)) for stack, name in TABLES.items()}
                layers[what] = {stack: table for stack, table in tables.items() if table}
        if "relations" in self.signals:
            layers["relations"] = {
                stack: [dict(zip(parts, layer, strict=True)) for layer in zip(*parts.values(), strict=True)]
                for stack, parts in self.projected.items()
            }
        self.projected = None
        return layers

    def _note(self, stack: str, name: str, head_dim: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        if self.projected is not None:
            self.projected[stack][name].append(output.unflatten(-1, (-1, head_dim)))


@torch.no_grad()
def probe(model: PreTrainedModel, reader: LayerReader) -> tuple[Any, Layers]:
    """Return what `model` gives for two texts of two tokens, whose second tokens differ, and what `reader` reads."""
    ids = torch.tensor([[0, 0], [0, 1]], device=model.device)
    ids = ids[None] if type(model).__name__.endswith("MultipleChoice") else ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    was_training = model.training
    output = model.eval()(**inputs, **reader.start() | {"output_hidden_states": True})
    model.train(was_training)
    return output, reader.stop(output)


def teacher_inputs(teacher: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Return what of a batch the teacher reads: all but what is to be answered and how that is scored.

    Raises:
        UserError: a teacher of transformers has no input of a name that the batch has.
    """
    read = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name not in ANSWERS}
    if not isinstance(teacher, TriptychPreTrainedModel):
        known = inspect.signature(teacher.forward).parameters
        if unknown := [name for name in read if name not in known]:
            raise UserError(f"the teacher ({type(teacher).__name__}) cannot read '{unknown[0]}' of this objective")
    if teacher.config.is_encoder_decoder and "decoder_input_ids" not in read:
        read["decoder_input_ids"] = teacher.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
    return read


ANSWERS = {"labels", "shift_labels", "start_positions", "end_positions", "next_sentence_label", "num_items_in_batch"}


def check_student(student: nn.Module, signals: dict[str, Any]) -> None:
    """Raise a `UserError` where `student` cannot learn by `signals`, whoever the teacher is."""
    if not isinstance(student, TriptychPreTrainedModel):
        raise UserError(
            f"the student is {type(student).__name__}, but must be of this family: bring it in with triptych convert"
        )
    config = student.config
    stacks = (config.encoder, config.decoder) if config.is_encoder_decoder else (config,)
    dropout = max(stack.attention_dropout for stack in stacks)
    if "attentions" in signals and dropout:
        raise UserError(
            f"recipe key 'model.attention_dropout' must be 0 where attention maps are learnt, not {dropout}"
        )


def check_pair(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    signals: dict[str, Any],
    ours: tuple[Any, Layers],
    theirs: tuple[Any, Layers],
) -> None:
    """Raise a `UserError` where the two differ in what they are about: kind of stack, outputs, heads.

    Args:
        ours, theirs: what `probe` returned of each.
    """
    names = f"the teacher ({type(teacher).__name__})", f"the student ({type(student).__name__})"
    kinds = [describe_stacks(model, output) for model, (output, _) in ((teacher, theirs), (student, ours))]
    if kinds[0] != kinds[1]:
        raise UserError(f"{names[0]} {kinds[0]}, but {names[1]} {kinds[1]}: both must do the same")
    if "outputs" in signals:
        check_outputs(student, teacher, names, ours[0].get("logits"), theirs[0].get("logits"))
    if "attentions" in signals:
        check_maps(names, ours[1]["attentions"], theirs[1]["attentions"])
    if "relations" in signals:
        check_relations(signals["relations"].heads, names, ours[1]["relations"], theirs[1]["relations"])


def describe_stacks(model: PreTrainedModel, output: Any) -> str:
    """Return how `model` reads, from the hidden states of two texts that differ in their second tokens."""
    if model.config.is_encoder_decoder:
        return "reads with an encoder and writes with a decoder"
    first, second = output.hidden_states[-1][:, 0]
    return "reads left to right" if torch.allclose(first, second, rtol=1e-5, atol=1e-7) else "reads both ways"


def check_outputs(
    student: PreTrainedModel, teacher: PreTrainedModel, names: Sequence[str], ours: Tensor | None, theirs: Tensor | None
) -> None:
    """Raise a `UserError` where logits are not of equally many tokens, or classes of the same names."""
    is_choice = ours is not None and ours.shape[-1] > 1
    if not is_choice or getattr(student.config, "problem_type", None) == "multi_label_classification":
        raise UserError(
            f"recipe key 'distillation.outputs.weight' must be 0, as {names[1]} does not choose among labels alone"
        )
    if theirs is None or theirs.shape != ours.shape:
        had = "none" if theirs is None else list(theirs.shape[1:])
        raise UserError(
            f"{names[0]} has logits of shape {had} for a text of two tokens, and {names[1]} {list(ours.shape[1:])}: "
            "their vocabularies or classes must be the same"
        )
    classes = [model.config.id2label for model in (teacher, student)]
    if student.num_labels == ours.shape[-1] and classes[0] != classes[1]:
        raise UserError(f"{names[0]} has the classes {classes[0]}, and {names[1]} {classes[1]}: they must be the same")


def check_maps(names: Sequence[str], ours: dict[str, Sequence], theirs: dict[str, Sequence]) -> None:
    """Raise a `UserError` where there are no attention maps, or not of equally many heads."""
    for name, layers in zip(names, (theirs, ours), strict=True):
        if not layers or layers.keys() != ours.keys() | theirs.keys():
            raise UserError(
                f"{name} gives no attention maps: its attn_implementation must be eager, and its attention not linear"
            )
    for stack in ours:
        heads = [layers[stack][0].shape[1] for layers in (theirs, ours)]
        if heads[0] != heads[1]:
            raise UserError(
                f"{names[0]} has {heads[0]} attention heads and {names[1]} {heads[1]}, but attention maps need equally "
                "many: use distillation.relations"
            )


def check_relations(heads: int | None, names: Sequence[str], ours: dict, theirs: dict) -> None:
    """Raise a `UserError` where projected states cannot be cut into so many relation heads."""
    for stack in ours:
        count = heads or ours[stack][0]["query"].shape[2]
        for name, layers in zip(names, (theirs, ours), strict=True):
            width = layers[stack][0]["query"].flatten(2).shape[-1]
            if width % count:
                raise UserError(
                    f"recipe key 'distillation.relations.heads' is {count}, but must divide the {width} of {name}"
                )


def pair_layers(
    signals: dict[str, Any], ours: tuple[Any, Layers], theirs: tuple[Any, Layers]
) -> dict[str, dict[str, list[list[int]]]]:
    """Return, of each signal of layers and each stack, pairs of numbers [student's, teacher's].

    Without a choice, hidden states and maps are paired evenly, the last with the last (Jiao et al. 2020, section 3),
    and relations are of the last layers.

    Raises:
        UserError: a chosen pair or stack is not there.
    """
    pairs = {}
    for name, layers in ours[1].items():
        depths = {stack: (len(layers[stack]), len(theirs[1][name][stack])) for stack in layers}
        pairs[name] = choose_pairs(f"distillation.{name}.layers", signals[name].layers, depths, EVENLY[name])
    return pairs


def _even_states(ours: int, theirs: int) -> list[list[int]]:
    return [[number, round(number * (theirs - 1) / (ours - 1))] for number in range(ours)]


def _even_maps(ours: int, theirs: int) -> list[list[int]]:
    return [[ours_after - 1, theirs_after - 1] for ours_after, theirs_after in _even_states(ours + 1, theirs + 1)[1:]]


def _last(ours: int, theirs: int) -> list[list[int]]:
    return [[ours - 1, theirs - 1]]


EVENLY = {"hidden_states": _even_states, "attentions": _even_maps, "relations": _last}


def choose_pairs(key: str, chosen: Pairs, depths: dict[str, tuple[int, int]], default) -> dict[str, list[list[int]]]:
    """Return the pairs of each stack: those `chosen`, checked, or the `default` ones.

    Args:
        key: of the recipe, for errors.
        depths: of each stack, how many the student and the teacher have.
    """
    if chosen is None:
        return {stack: default(*both) for stack, both in depths.items()}
    by_stack = chosen if isinstance(chosen, dict) else dict.fromkeys(depths, chosen)
    for stack, pairs in by_stack.items():
        if stack not in depths:
            raise unknown_name("recipe key", f"{key}.{stack}", [f"{key}.{known}" for known in depths])
        for pair in pairs:
            if len(pair) != 2 or not all(
                0 <= number < depth for number, depth in zip(pair, depths[stack], strict=True)
            ):
                ours, theirs = depths[stack]
                raise UserError(
                    f"recipe key '{key}' has {pair}, but a pair must be a number from 0 to {ours - 1} of the student's "
                    f"and one from 0 to {theirs - 1} of the teacher's"
                )
    if not any(by_stack.values()):
        raise UserError(f"recipe key '{key}' must have a pair of layers, or be null")
    return by_stack
