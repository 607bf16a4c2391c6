"""Recipes: a training as one YAML file, with `key=value` changes on top.

A recipe is found by its name (those that ship with the package) or by its path. Every key is a field below; a key
inside a section is written with a dot: `model.hidden_size=256`, `data.splits.train=pairs.tsv`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from triptych.configs import RECIPES, recipe_names
from triptych.training.errors import UserError, unknown_name

RECIPE_FILE = "recipe.yaml"  # its name in a run's folder
# What the section `model` says beside the fields of the configuration.
NOT_FIELDS = ("preset", "path", "topology", "attn_implementation")
UNIONS = (types.UnionType, typing.Union)  # a | b, which has the second origin where a is a Literal


@dataclass
class SourceRecipe:
    """One file of examples, or files read side by side.

    Attributes:
        file: a path, or one per column of the objective, line N of each making an example. `$TRIPTYCH_DATA` stands
            for the data folder, `$FASHION_MNIST` for that of Fashion-MNIST.
        format: how to read it, see `triptych.training.data`; null goes by the file's ending.
        columns: the objective's column to the file's, where the names differ.
        pattern: of `lines`: a regular expression whose named groups are the columns.
        part: from which to which share of the file, such as [0, 0.9].
    """

    file: str | list[str]
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    pattern: str | None = None
    part: list[float] | None = None


@dataclass
class RecallRecipe:
    """Associative recall, generated.

    Attributes:
        sizes: split name to number of texts.
        length: tokens of a text.
        queries: keys that are asked for, at its beginning.
        pairs: keys and values in it.
        keys, values, noise: how many of each there are.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    length: int = 4096
    queries: int = 32
    pairs: int = 64
    keys: int = 128
    values: int = 32
    noise: int = 32


@dataclass
class DataRecipe:
    """Where the examples come from: files (`splits`), or one of the sections of data that need none.

    Attributes:
        splits: split name to a file, to several (side by side where the objective reads several columns, else one
            after the other), or to a list of sources. `train` and `validation` are what training reads, every other
            name is a test split.
        format, columns, pattern: of every source that does not say otherwise.
        joiner: the mark that ends a subword which goes on in the next one, in text that is split already (`@@`); it is
            taken out.
        lowercase: whether text is lower-cased.
        max_length: longest example in tokens; a labelled text is cut there, running text goes on in the next example.
        pack: fill examples of running text up to `max_length` with whole documents that do not see each other.
        num_proc: processes that tokenise.
        cache: folder for token ids, so that the next training on the same texts starts at once; null keeps none.
        window: training examples to hold in memory at a time; null reads all of them at the start. A window takes an
            epoch's place: batches are shuffled within it, and the tokenizer is trained on the first one.
        token_dropout: probability with which a token is hidden in training, see `triptych.training.token_dropout`.
        interchangeable, keep_beside: groups of words that change places in training, and words beside which they do
            not, see `triptych.training.renaming`.
        dates: split name to number of examples, see `triptych.training.dates`.
        recall: another generated task, see `triptych.training.recall`.
        digits, moving_digits, spoken_digits, spoken_sequences: split name to a share, a number of videos, a range of
            recordings or a number of sequences, see `triptych.training.digits`.
        held_out_speaker: of `spoken_digits`, 0 to 5: whose recordings the tests are, and no other split's; null mixes
            the speakers.
    """

    splits: dict[str, str | list[str] | list[SourceRecipe]] = field(default_factory=dict)
    format: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    pattern: str | None = None
    joiner: str | None = None
    lowercase: bool = False
    max_length: int | None = None
    pack: bool = False
    num_proc: int | None = None
    cache: str | None = None
    window: int | None = None
    token_dropout: float = 0.0
    interchangeable: list[list[str]] = field(default_factory=list)
    keep_beside: list[str] = field(default_factory=list)
    dates: dict[str, int] = field(default_factory=dict)
    recall: RecallRecipe = field(default_factory=RecallRecipe)
    digits: dict[str, list[float]] = field(default_factory=dict)
    moving_digits: dict[str, int] = field(default_factory=dict)
    spoken_digits: dict[str, list[int]] = field(default_factory=dict)
    spoken_sequences: dict[str, int] = field(default_factory=dict)
    held_out_speaker: int | None = None

    def named_splits(self) -> dict[str, Any]:
        """Return what each split is: so many generated examples, a part of them, or files."""
        made = self.dates, self.recall.sizes, self.digits, self.moving_digits, self.spoken_digits, self.spoken_sequences
        return next((splits for splits in made if splits), self.splits)


@dataclass
class TokenizerRecipe:
    """A tokenizer to train on the data, or one to load.

    Attributes:
        type: what a token is, `bpe`, `char` or `word`, see `triptych.training.tokenization`.
        vocab_size: so many tokens at most.
        path: folder or name of a tokenizer to load instead.
        dropout: probability with which a merge of `bpe` is left out, anew in each epoch and in training only, so that
            a word is seen in many splits (Provilkov et al. 2020, arXiv 1910.13267).
    """

    type: Literal["bpe", "char", "word"] = "bpe"
    vocab_size: int = 8000
    path: str | None = None
    dropout: float = 0.0


@dataclass
class GenerationRecipe:
    """How the trained model writes; saved as its generation config.

    Attributes:
        num_beams: beam width.
        length_penalty: the power of their length by which scores of beams are divided.
        max_new_tokens: longest output, in tokens.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    max_new_tokens: int = 128


@dataclass
class BleuRecipe:
    """sacrebleu's own options.

    Attributes:
        tokenize: how words are found; `none` is for text that is tokenised already.
        smooth_method: what becomes of counts of zero, `exp`, `floor`, `add-k` or `none`.
    """

    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"
    smooth_method: Literal["exp", "floor", "add-k", "none"] = "exp"


@dataclass
class LowRankRecipe:
    """Fine-tuning of few directions beside some layers, and of nothing else; at the end they are added to the weights.

    Attributes:
        rank: number of directions; 0 trains the whole model.
        alpha: what is learnt counts times `alpha / rank`.
        modules: names of the layers.
    """

    rank: int = 0
    alpha: float = 16.0
    modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])


SIGNALS = ("outputs", "hidden_states", "attentions", "relations")
# Pairs of numbers [student's, teacher's]; of an encoder-decoder both of its stacks', or those of each by its name.
Pairs = list[list[int]] | dict[str, list[list[int]]] | None


@dataclass
class OutputsRecipe:
    """The teacher's distribution at each label.

    Attributes:
        weight: of this signal in the loss; 0 leaves it out.
        temperature: by which logits are divided.
        top_k: how many of the teacher's logits are looked at, the largest; null is all.
    """

    weight: float = 0.0
    temperature: float = 1.0
    top_k: int | None = None


@dataclass
class LayersRecipe:
    """What paired layers write: hidden states, or attention maps.

    Attributes:
        weight: of this signal in the loss; 0 leaves it out.
        layers: pairs, counted as in transformers' outputs, where the first of the hidden states is before all layers;
            null pairs all of the student's evenly with the teacher's.
    """

    weight: float = 0.0
    layers: Pairs = None


@dataclass
class RelationsRecipe(LayersRecipe):
    """Relations within what self-attention projects, of paired layers.

    Attributes:
        weight: of this signal in the loss; 0 leaves it out.
        layers: pairs; null pairs the last ones.
        kinds: what is related with what.
        heads: number of relation heads; null is the student's number of attention heads.
    """

    kinds: list[Literal["query_key", "query_query", "key_key", "value_value"]] = field(
        default_factory=lambda: ["query_key", "value_value"]
    )
    heads: int | None = None


@dataclass
class DistillationRecipe:
    """What is learnt from a trained model, see `triptych.training.distillation`.

    Attributes:
        teacher: its folder; null learns from the labels alone.
        labels: weight of the objective's own loss beside the signals.
        outputs, hidden_states, attentions, relations: the signals, each a section with a `weight` of its own.
        sequences: a file of the teacher's answers to the training sources, which become the targets; it is written
            where it is not there yet.
        start_from: layers of the teacher that the student begins as, such as [0, 3], or those of each stack by its
            name; null begins anew.
    """

    teacher: str | None = None
    labels: float = 1.0
    outputs: OutputsRecipe = field(default_factory=OutputsRecipe)
    hidden_states: LayersRecipe = field(default_factory=LayersRecipe)
    attentions: LayersRecipe = field(default_factory=LayersRecipe)
    relations: RelationsRecipe = field(default_factory=RelationsRecipe)
    sequences: str | None = None
    start_from: list[int] | dict[str, list[int]] | None = None

    def signals(self) -> dict[str, Any]:
        """Return the signals that the teacher gives of a batch, by name, as far as they have a weight."""
        return {name: getattr(self, name) for name in SIGNALS if getattr(self, name).weight}


@dataclass
class Recipe:
    """One training, from data to a folder that `from_pretrained` loads.

    Attributes:
        objective: `type`, one of `triptych.training.objectives`, and options of its collator.
        data, tokenizer, generation, bleu, low_rank, distillation: sections with keys of their own, such as those of
            `DataRecipe`.
        model: fields of the configuration; besides, `topology` where the objective has several, `preset: NAME` to
            change that one, or `path: FOLDER` to start from the weights of a trained model; and the backend,
            `attn_implementation`.
        attention_transfer: a trained model's folder; layers that are linear attention instead of its softmax learn to
            give its outputs, see `triptych.training.attention_transfer`.
        processor: fields of what prepares images (transformers' `ViTImageProcessor`), videos
            (`VideoMAEImageProcessor`) or recordings (`WhisperFeatureExtractor`); its sizes are the model's.
        output: the run's folder; null is `runs/NAME`.
        overwrite: replace a run that is there.
        seed: of first weights, the order of the data, what objectives draw, and dropout.
        max_steps: optimiser updates.
        max_tokens: a batch's padded size, in tokens, on either side; times `gradient_accumulation_steps` and
            processes it is what an update sees. Images count as pixels, and recordings as frames.
        gradient_accumulation_steps: batches of an update.
        length_noise: batches hold examples of like length; above 0 they mix, see `TokenBatchSampler`.
        optimizer: `adamw` (Loshchilov and Hutter 2019), or `muon` (Jordan et al. 2024) for the matrices of the layers
            with AdamW for everything else.
        learning_rate: the peak of its schedule.
        schedule: of the learning rate after the warm-up, `inverse_sqrt`, `cosine`, `linear`, or `trapezoidal`, which
            stays at the peak.
        warmup_steps: first updates, in which the learning rate rises to its peak.
        cooldown_steps: last updates, in which it falls to zero on top of its schedule.
        adam_betas, adam_epsilon: of AdamW.
        weight_decay: of matrices, not of gains and biases.
        max_grad_norm: gradients are clipped to this norm; null leaves them.
        label_smoothing: probability that is spread evenly over all labels.
        r_drop: weight with which two passes of a batch, each with its own dropout, are made to agree; see
            `triptych.training.consistency`.
        mixed_precision: `bf16` or `fp16`; null takes what the launcher says, or float32. A CPU without products in
            bfloat16 trains in float32 where this says `bf16`.
        log_every, validate_every: updates between lines of the metrics file, and between validations.
        save_every: updates between checkpoints; null saves one after each validation.
        keep_checkpoints: how many of them are kept.
        best_metric: of validation, chooses the model that is kept: `loss`, or a metric of the objective.
        patience: validations without a better `best_metric` after which training stops early; null never does.
        average_checkpoints: the final model is the mean of the last so many checkpoints (Vaswani et al. 2017, section
            6.1) in place of the best one; 0 does not average.
        report_to: trackers of accelerate besides the metrics file, such as tensorboard.
    """

    objective: dict[str, Any] = field(default_factory=lambda: {"type": "seq2seq"})
    data: DataRecipe = field(default_factory=DataRecipe)
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    model: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    generation: GenerationRecipe = field(default_factory=GenerationRecipe)
    bleu: BleuRecipe = field(default_factory=BleuRecipe)
    attention_transfer: str | None = None
    low_rank: LowRankRecipe = field(default_factory=LowRankRecipe)
    distillation: DistillationRecipe = field(default_factory=DistillationRecipe)
    output: str | None = None
    overwrite: bool = False
    seed: int = 1
    max_steps: int = 1000
    max_tokens: int = 4096
    length_noise: float = 0.0
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["inverse_sqrt", "cosine", "linear", "trapezoidal"] = "inverse_sqrt"
    warmup_steps: int = 100
    cooldown_steps: int = 0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    adam_epsilon: float = 1e-9
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    r_drop: float = 0.0
    mixed_precision: Literal["bf16", "fp16"] | None = None
    log_every: int = 10
    validate_every: int = 100
    save_every: int | None = None
    keep_checkpoints: int = 2
    best_metric: str = "loss"
    patience: int | None = None
    average_checkpoints: int = 0
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])


def load_recipe(source: str, changes: Sequence[str] = ()) -> Recipe:
    """Read the recipe that `source` names, apply `changes`, and check every key and type.

    Args:
        source: the name of a shipped recipe, or the path of a YAML file.
        changes: `key=value` texts; a value is read as YAML, an empty one is null.

    Raises:
        UserError: an unknown recipe or key (the nearest is suggested), or a value of the wrong type.
    """
    tree = _read_yaml(source)
    for change in changes:
        _apply_change(tree, change)
    recipe = _build(Recipe, tree)
    recipe.output = recipe.output or f"runs/{Path(source).stem}"
    _check_ranges(recipe)
    return recipe


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write `recipe`, with all its values, as YAML that `load_recipe` reads back."""
    text = yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def _read_yaml(source: str) -> dict[str, Any]:
    is_path = source.endswith((".yaml", ".yml")) or Path(source).is_file()
    if not is_path and source not in recipe_names():
        raise unknown_name("recipe", source, recipe_names())
    path = Path(source) if is_path else RECIPES / f"{source}.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe file '{path}' cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe file '{path}' is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"recipe file '{path}' must hold keys with values, not {_show(tree)}")
    return tree


def _apply_change(tree: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals:
        raise UserError(f"'{change}' is no change of a recipe: write key=value, such as max_steps=100")
    value = read_value(change, text)
    *sections, last = key.split(".")
    for section in sections:
        if tree.get(section) is None:  # left out, or without any key
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise UserError(f"recipe key '{section}' in '{change}' holds one value, not a section of keys")
    tree[last] = value


def read_value(change: str, text: str) -> Any:
    """Return what the `text` behind the equals sign of a change means, as YAML.

    Raises:
        UserError: it is none.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value of '{change}' is not YAML: {' '.join(str(error).split())}") from error


def convert_fields(cls: type, tree: dict[str, Any], prefix: str = "", leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of `tree` as the types that the dataclass `cls` gives its fields of the same names.

    Args:
        prefix: the section's name and a dot, for errors.
        leave_out: fields that `tree` may not hold.

    Raises:
        UserError: an unknown key (the nearest is suggested), or a value of the wrong type.
    """
    kinds = {name: kind for name, kind in typing.get_type_hints(cls).items() if name not in leave_out}
    for key in tree:
        if key not in kinds:
            raise unknown_name("recipe key", f"{prefix}{key}", [prefix + name for name in kinds])
    return {key: _convert(prefix + key, value, kinds[key]) for key, value in tree.items()}


def _build(cls: type, tree: dict[str, Any], prefix: str = "") -> Any:
    return cls(**convert_fields(cls, tree, prefix))


def _convert(key: str, value: Any, kind: Any) -> Any:
    """Return `value` as `kind` (a type annotation of a recipe field), or raise an error that names `key`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and types.NoneType in args):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _build(kind, value, f"{key}.")
    if origin in UNIONS:
        for option in args:
            with suppress(UserError):
                return _convert(key, value, option)
    elif origin is list and isinstance(value, list):
        return [_convert(f"{key}[{index}]", item, args[0]) for index, item in enumerate(value)]
    elif origin is dict and isinstance(value, dict | None):
        return {str(name): _convert(f"{key}.{name}", item, args[1]) for name, item in (value or {}).items()}
    elif origin is Literal and isinstance(value, str) and value in args:
        return value
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 as text, since it has no dot.
        with suppress(ValueError):
            return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    raise UserError(f"recipe key '{key}' must be {_describe(kind)}, not {_show(value)}")


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(_describe(option) for option in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is list:
        return f"a list, each item {_describe(args[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return names.get(kind, "a section of keys")


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _check_ranges(recipe: Recipe) -> None:
    counts = {
        key: getattr(recipe, key)
        for key in (
            *("max_steps", "max_tokens", "gradient_accumulation_steps", "log_every", "validate_every"),
            *("save_every", "keep_checkpoints", "patience"),
        )
    }
    counts |= {f"generation.{key}": getattr(recipe.generation, key) for key in ("num_beams", "max_new_tokens")}
    counts |= {f"data.dates.{key}": value for key, value in recipe.data.dates.items()}
    counts |= {f"data.recall.sizes.{key}": value for key, value in recipe.data.recall.sizes.items()}
    for name in ("moving_digits", "spoken_sequences"):
        counts |= {f"data.{name}.{key}": value for key, value in getattr(recipe.data, name).items()}
    counts["tokenizer.vocab_size"] = recipe.tokenizer.vocab_size
    counts |= {f"data.{key}": getattr(recipe.data, key) for key in ("max_length", "num_proc", "window")}
    for key, value in counts.items():
        _require(value is None or value > 0, key, "at least 1", value)
    for key in (
        *("warmup_steps", "cooldown_steps", "average_checkpoints"),
        *("adam_epsilon", "weight_decay", "length_noise", "r_drop"),
    ):
        _require(getattr(recipe, key) >= 0, key, "at least 0", getattr(recipe, key))
    _require(0 <= recipe.seed < 2**31, "seed", "from 0 to 2^31 - 1", recipe.seed)
    norm = recipe.max_grad_norm
    _require(norm is None or norm > 0, "max_grad_norm", "above 0 or null", norm)
    dropout = recipe.tokenizer.dropout
    _require(0 <= dropout <= 1, "tokenizer.dropout", "in [0, 1]", dropout)
    if recipe.cooldown_steps:
        room = max(0, recipe.max_steps - recipe.warmup_steps)
        allowed = f"at most max_steps - warmup_steps, {room}"
        _require(recipe.cooldown_steps <= room, "cooldown_steps", allowed, recipe.cooldown_steps)
    _require(recipe.low_rank.rank >= 0, "low_rank.rank", "at least 0", recipe.low_rank.rank)
    _require(recipe.learning_rate > 0, "learning_rate", "above 0", recipe.learning_rate)
    _require(0 <= recipe.label_smoothing < 1, "label_smoothing", "in [0, 1)", recipe.label_smoothing)
    betas = recipe.adam_betas
    _require(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "adam_betas", "two numbers in [0, 1)", betas)
    penalty, beams = recipe.generation.length_penalty, recipe.generation.num_beams
    allowed = "1.0, as generation.num_beams is 1" if beams == 1 else "a number"
    _require(penalty == 1 if beams == 1 else math.isfinite(penalty), "generation.length_penalty", allowed, penalty)
    _check_names(recipe)
    _check_data(recipe.data)
    _check_distillation(recipe.distillation, recipe.model)


def _check_names(recipe: Recipe) -> None:
    """Of sections whose other keys depend on the objective, check those that are known here."""
    names = {"objective.type": recipe.objective.get("type")}
    names |= {f"model.{key}": recipe.model.get(key) for key in NOT_FIELDS}
    for key, value in names.items():
        _require(value is None or isinstance(value, str), key, "text or null", value)
    for key in ("encoder", "decoder"):
        value = recipe.model.get(key)
        _require(value is None or isinstance(value, dict), f"model.{key}", "a section of keys", value)


def _check_data(data: DataRecipe) -> None:
    given = {"splits": data.splits, "dates": data.dates, "recall.sizes": data.recall.sizes}
    digits = ("digits", "moving_digits", "spoken_digits", "spoken_sequences")
    given |= {name: getattr(data, name) for name in digits}
    sections = [name for name, splits in given.items() if splits]
    _require(len(sections) == 1, "data", f"given by exactly one of {', '.join(given)}", sections)
    names = list(data.named_splits())
    _require({"train", "validation"} <= set(names), f"data.{sections[0]}", "train, validation and any tests", names)
    _require(0 <= data.token_dropout < 1, "data.token_dropout", "at least 0 and below 1", data.token_dropout)


def _check_distillation(recipe: DistillationRecipe, model: dict[str, Any]) -> None:
    given = [key for key in ("sequences", "start_from") if getattr(recipe, key) is not None] + list(recipe.signals())
    allowed = f"a trained model's folder, as distillation.{given[0]} is given" if given else ""
    _require(recipe.teacher is not None or not given, "distillation.teacher", allowed, recipe.teacher)
    for key in ("path", "preset"):
        allowed = "left out, as distillation.start_from is given"
        _require(recipe.start_from is None or key not in model, f"model.{key}", allowed, model.get(key))
    weights = {"labels": recipe.labels} | {f"{name}.weight": getattr(recipe, name).weight for name in SIGNALS}
    for key, weight in weights.items():
        _require(0 <= weight < math.inf, f"distillation.{key}", "at least 0 and finite", weight)
    _require(recipe.labels > 0 or recipe.signals(), "distillation.labels", "above 0 without any signal", recipe.labels)
    temperature = recipe.outputs.temperature
    _require(0 < temperature < math.inf, "distillation.outputs.temperature", "above 0 and finite", temperature)
    counts = {"outputs.top_k": recipe.outputs.top_k, "relations.heads": recipe.relations.heads}
    for key, count in counts.items():
        _require(count is None or count > 0, f"distillation.{key}", "at least 1", count)
    kinds = recipe.relations.kinds
    _require(len(kinds) > 0, "distillation.relations.kinds", "at least one kind", kinds)
    _require(recipe.teacher is None or given, "distillation.teacher", "null, as nothing is asked of it", recipe.teacher)


def _require(holds: bool, key: str, allowed: str, value: Any) -> None:
    if not holds:
        raise UserError(f"recipe key '{key}' must be {allowed}, not {_show(value)}")
