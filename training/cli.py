"""The command `triptych`: train, distill, generate, evaluate, convert, push, inspect, demo, bench."""

import json
import math
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated

import datasets
import typer
import yaml
from transformers.utils import logging as transformers_logging

import triptych
from triptych.configs import RECIPES, recipe_names
from triptych.training.errors import UserError
from triptych.training.memory import keep_freed_memory
from triptych.training.recipe import Recipe, load_recipe

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Start with: triptych demo (dates in many languages, some minutes on two CPU cores, no data needed).",
)


def _recipes(incomplete: str) -> list[str]:
    return [name for name in recipe_names() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a YAML file.", autocompletion=_recipes)
]
ChangesArgument = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, sections with a dot.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's folder, or a model's name on the Hugging Face Hub.")
]
BeamsOption = Annotated[int | None, typer.Option(min=1, help="Beam width; by default what the model was saved with.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Texts at a time.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Timed rounds; the medians are shown.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="Of torch; 0 is its own choice.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON line per measurement, not a table.")]


def _recipe_help() -> str:
    keys = {field.name: getattr(Recipe(), field.name) for field in fields(Recipe)}
    plain = {key: value for key, value in keys.items() if not is_dataclass(value) and not isinstance(value, dict)}
    defaults = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf).strip().strip("{}")
    return (
        f"Shipped recipes: {', '.join(recipe_names())}. A recipe is one YAML file: copy one from {RECIPES} and change "
        f"it. Keys and defaults: {defaults}. Sections: {', '.join(key for key in keys if key not in plain)}."
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triptych {triptych.__version__}")
        raise typer.Exit


@app.callback()
def triptych_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Train, run, score and share Transformer models that load through the Hugging Face Auto classes.

    Exit codes: 0, it is done; 1, the work broke off (a lost connection, a full disk, a loss that diverged); 2, the
    input cannot be used. The reason is one sentence on stderr.
    """


@app.command(name="train", epilog=_recipe_help())
def train_command(recipe: RecipeArgument, changes: ChangesArgument = None) -> None:
    """Train a model and leave it, with tokenizer, metrics and loss curve, in the folder that `output` names.

    Whatever ends a training before its time, the same command continues it from its last checkpoint, as if nothing had
    happened. SIGTERM and Ctrl-C save first (exit codes 143 and 130).

    **Examples**

    triptych train dates

    triptych train multi30k_en_de max_steps=300 warmup_steps=100 output=runs/short

    triptych train my_recipe.yaml data.splits.train=pairs.tsv model.hidden_size=256 learning_rate=5e-4

    **Several processes**

    torchrun --nproc_per_node 2 -m triptych.training.cli train dates

    **On busy CPU cores**, several times faster with

    GOMP_SPINCOUNT=1000 triptych train dates
    """
    _train(load_recipe(recipe, changes or []))


@app.command(name="distill")
def distill_command(recipe: RecipeArgument, changes: ChangesArgument = None) -> None:
    """Train a student on its labels and on what a trained teacher says of them, as the recipe's `distillation` has it.

    It is `triptych train` of a recipe that names a teacher: it leaves the same folder, and goes on after a kill.

    **Examples**

    triptych distill multi30k_student_half

    triptych distill sst2_student_half seed=2 output=runs/second

    triptych distill my_recipe.yaml distillation.teacher=runs/mine distillation.outputs.weight=1
    """
    loaded = load_recipe(recipe, changes or [])
    if loaded.distillation.teacher is None:
        raise UserError("recipe key 'distillation.teacher' must be a trained model's folder, not null")
    _train(loaded)


def _train(recipe: Recipe) -> None:
    # Each command imports what it needs, so that help does not wait for it.
    from accelerate import PartialState

    from triptych.training.run import train

    run = train(recipe)
    if PartialState().is_main_process:
        typer.echo(f"{run.folder}: validation loss {run.best_loss:.4f} after update {run.best_step:,}")


@app.command(name="generate")
def generate_command(
    model: ModelArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to feed the model.")] = None,
    input: Annotated[Path | None, typer.Option(help="A UTF-8 file with a text a line (also .gz).")] = None,
    num_beams: BeamsOption = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest output, in tokens.")] = None,
    batch_size: BatchOption = 64,
    json_lines: Annotated[bool, typer.Option("--json", help="A JSON line per text, with both.")] = False,
) -> None:
    """Print what a model writes for each text, a line each, in order.

    **Examples**

    triptych generate runs/dates "de: Freitag, 5. März 2021" "en-US: 3/5/2021"

    triptych generate runs/multi30k_en_de --input sentences.en --num-beams 5
    """
    from triptych.training.data import find_file, read_lines
    from triptych.training.evaluation import generate_texts, load_model

    if bool(texts) == bool(input):
        raise UserError("triptych generate needs texts or --input FILE, one of the two")
    sources = texts or read_lines(find_file(str(input)))
    loaded, tokenizer = load_model(model)
    options = _given(num_beams=num_beams, max_new_tokens=max_new_tokens)
    for source, text in zip(sources, generate_texts(loaded, tokenizer, sources, batch_size, **options), strict=True):
        typer.echo(json.dumps({"source": source, "text": text}, ensure_ascii=False) if json_lines else text)


@app.command(name="evaluate")
def evaluate_command(
    model: ModelArgument,
    data: Annotated[
        list[str] | None, typer.Option(help="A file of examples; repeated: files that hold a column each.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="A split of the recipe that the model was trained with; repeatable.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest example in tokens, in place of the recipe's.")
    ] = None,
    num_beams: BeamsOption = None,
    batch_size: BatchOption = 64,
) -> None:
    """Score a model with the measures of its objective, as one JSON line per split.

    Texts that it writes: exact match, BLEU, chrF and ROUGE with their signatures; of speech, words wrong. Labels:
    accuracy, F1, Matthews or Pearson correlation. Language models: perplexity, and bits per byte. All in percent where
    that is customary. Without options it scores every test split of the recipe that the model was trained with. Scores
    of the recipe's splits are kept in the run's folder, in evaluation.json and in the card, README.md.

    **Examples**

    triptych evaluate runs/dates

    triptych evaluate runs/multi30k_en_de --split validation --num-beams 5

    triptych evaluate runs/dates --data pairs.tsv
    """
    from triptych.training.evaluation import evaluate_examples, examples_to_score, load_model
    from triptych.training.objectives import read_task
    from triptych.training.sharing import keep_evaluation

    splits, recipe = examples_to_score(Path(model), data, split, max_length)
    loaded, tokenizer = load_model(model, read_task(recipe).head)
    options = _given(num_beams=num_beams)
    for name, examples in splits.items():
        scores = evaluate_examples(loaded, tokenizer, examples, recipe, batch_size, **options)
        typer.echo(json.dumps({"split": name, **scores}))
        if not data and Path(model).is_dir():
            keep_evaluation(Path(model), name, {**options, **_given(max_length=max_length), **scores})


@app.command(name="convert")
def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, or a model's name on the Hub.")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="The folder to write.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to what is imported.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="An architecture of transformers; by default our own.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DEST if it is there.")] = False,
) -> None:
    """Turn a known checkpoint into a model of the family with equal weights, or one of the family into a known one.

    Configuration, weights, head, tokenizer and settings of generation come along. Weights are read from safetensors
    alone. What would be lost is refused by name, before anything is written.

    **Examples**

    triptych convert google-bert/bert-base-uncased bert

    triptych convert bert longer-bert max_position_embeddings=2048 sliding_window=256

    triptych convert runs/mine llama --to llama
    """
    from triptych.training.converting import convert

    typer.echo(convert(source, destination, to, changes or [], overwrite))


@app.command(name="push")
def push_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or one that save_pretrained wrote.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="NAME, or OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch, made if it is not there.")] = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Also the family's code: it loads with trust_remote_code=True.")
    ] = False,
) -> None:
    """Share a trained model on the Hugging Face Hub.

    Weights, configuration, tokenizer, recipe, metrics, loss curve and a card with what the model scores go there in one
    commit: it is seen whole or not at all. After a broken connection the same command goes on where it stopped; where
    nothing has changed, it makes no commit. The token is that of `hf auth login`, or HF_TOKEN. A README.md in RUN, or
    there, that a person wrote is kept.

    **Examples**

    triptych evaluate runs/sst2     # the scores of the card

    triptych push runs/sst2 my-name/sentiment --private

    triptych push runs/multi30k_en_de my-name/en-de --with-code --revision v2
    """
    from triptych.training.sharing import push

    typer.echo(push(run, repository, private, revision, with_code))


@app.command(name="inspect")
def inspect_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A run's folder, a saved model's, a name on the Hub, or a preset's name."),
    ],
    text: Annotated[str | None, typer.Option(help="Show where each head looks while the model reads this.")] = None,
    target: Annotated[
        str | None, typer.Option(help="What an encoder-decoder writes to it; by default what it wants to.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text, for FLOPs and drawings of layers.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The folder for the page and the pictures.")] = Path("inspection"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not tables.")] = False,
) -> None:
    """Show what a model is made of, what a token costs, what its layers see, and where its heads look.

    Parameters by part, FLOPs and cache of a token, and each layer's attention are printed. The folder gets a page,
    index.html, that has all of it, with positions, the curves of a training, and maps of attention to point at; and
    those maps as pictures.

    **Examples**

    triptych inspect bert_base

    triptych inspect runs/demo --text "fr: 14 juillet 1989"

    triptych inspect runs/multi30k_en_de --text "A man is sleeping." --target "Ein Mann schläft." --output seen
    """
    from triptych.training.inspecting import run_inspection

    run_inspection(model, text, target, length, output, as_json)


@app.command(name="demo")
def demo_command(
    output: Annotated[str, typer.Option(help="The run's folder; what is there is replaced.")] = "runs/demo",
) -> None:
    """Train on dates in many languages, score held-out dates and formats, and show what the model learned."""
    from triptych.training.demo import run_demo

    run_demo(output)


bench_app = typer.Typer(rich_markup_mode="markdown")
app.add_typer(bench_app, name="bench")


@bench_app.callback(invoke_without_command=True)
def bench_command(
    context: typer.Context,
    only: Annotated[
        list[str] | None, typer.Option(help="What is done: a part of its name, such as BERT or decoding; repeatable.")
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(help="'tuned' keeps freed memory, as this command does; 'default' is the C library's; 'both'."),
    ] = "tuned",
    rounds: RoundsOption = 5,
    threads: ThreadsOption = 0,
    picture: Annotated[Path, typer.Option(help="Where to draw the ratios.")] = Path("bench.png"),
    json_lines: JsonOption = False,
) -> None:
    """Time the family beside the models of other libraries with equal weights, on this machine, in one run.

    Training steps, forwards and decoding, beside transformers (BERT, ModernBERT, GPT-2, Llama, T5, BART, Marian),
    x-transformers (where it is installed) and torch.nn: ratios, tokens a second, the share of the machine's speed of
    matrix products, memory, and how far the outputs differ.

    **Examples**

    triptych bench

    triptych bench --only GPT-2 --only Llama

    triptych bench --only "training step" --allocator both --rounds 11 --json > bench.jsonl
    """
    if context.invoked_subcommand is not None:
        return
    from triptych.training.bench import choose_allocators, choose_contests, run_benchmarks, show_benchmarks

    measurements = run_benchmarks(choose_contests(only or []), rounds, choose_allocators(allocator), threads)
    show_benchmarks(measurements, picture, json_lines)


@bench_app.command(name="attention")
def bench_attention_command(
    max_length: Annotated[int, typer.Option(min=16, help="Longest text, in tokens; each is half of the next.")] = 65536,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    batch_size: BatchOption = 1,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    causal: Annotated[bool, typer.Option("--causal/--both-ways", help="Whether tokens see those after them.")] = True,
    layers: Annotated[
        bool, typer.Option("--layers", help="Whole layers instead, with windows and both ways, beside transformers'.")
    ] = False,
    rounds: RoundsOption = 3,
    max_seconds: Annotated[float, typer.Option(min=0, help="Leave out what may take longer for one round.")] = 30.0,
    picture: Annotated[Path, typer.Option(help="Where to draw the curves.")] = Path("attention.png"),
    json_lines: JsonOption = False,
) -> None:
    """Time and memory of each kind of attention against the length of the text, with fitted exponents, on this machine.

    **Examples**

    triptych bench attention

    triptych bench attention --max-length 8192 --window 512 --both-ways --picture both_ways.png
    """
    from triptych.training.attention_bench import (
        CONTESTANTS,
        LAYERS,
        Shape,
        run_attention_benchmark,
        show_attention_benchmark,
    )

    lengths = _halves(max_length, at_least=16)
    shape = Shape(causal and not layers, window, batch_size, heads, head_dim, rounds)
    contestants = LAYERS if layers else CONTESTANTS
    costs = run_attention_benchmark(lengths, shape, contestants, max_seconds)
    show_attention_benchmark(costs, shape, picture, json_lines)


@bench_app.command(name="decoding")
def bench_decoding_command(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders of decoders.")],
    max_context: Annotated[int, typer.Option(min=64, help="Longest context, in tokens; each is half of the next.")] = (
        16384
    ),
    json_lines: JsonOption = False,
) -> None:
    """Time and memory of one token more behind growing contexts, for trained models side by side, on this machine.

    **Examples**

    triptych bench decoding runs/tinyshakespeare runs/tinyshakespeare_linear

    triptych bench decoding runs/mine --max-context 65536 --json
    """
    from triptych.training.decoding_bench import load_decoder, run_decoding_benchmark, show_decoding_benchmark

    loaded = {name: load_decoder(name) for name in models}
    contexts = _halves(max_context, at_least=64)
    show_decoding_benchmark(run_decoding_benchmark(loaded, contexts), json_lines)


@bench_app.command(name="growth")
def bench_growth_command(
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 0,
    picture: Annotated[Path, typer.Option(help="Where to draw the curves.")] = Path("growth.png"),
    json_lines: JsonOption = False,
) -> None:
    """What a token of a training step costs as texts, their length, layers or the vocabulary grow, on this machine.

    **Examples**

    triptych bench growth

    triptych bench growth --rounds 5 --json > growth.jsonl
    """
    from triptych.training.growth_bench import run_growth_benchmark, show_growth_benchmark

    show_growth_benchmark(run_growth_benchmark(rounds, threads), picture, json_lines)


@bench_app.command(name="recurrence")
def bench_recurrence_command(
    max_length: Annotated[int, typer.Option(min=16, help="Longest text, in tokens; each is half of the next.")] = 1024,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = 0,
    picture: Annotated[Path, typer.Option(help="Where to draw the curves.")] = Path("recurrence.png"),
    json_lines: JsonOption = False,
) -> None:
    """A Transformer beside what it replaced: tokens a second in training and in writing against the length of texts.

    **Examples**

    triptych bench recurrence

    triptych bench recurrence --max-length 256 --rounds 5 --json > recurrence.jsonl
    """
    from triptych.training.recurrence_bench import run_recurrence_benchmark, show_recurrence_benchmark

    paces = run_recurrence_benchmark(_halves(max_length, at_least=16), rounds, threads)
    show_recurrence_benchmark(paces, picture, json_lines)


def _halves(longest: int, at_least: int) -> list[int]:
    """Seven lengths, each half of the one before, as far as they are long enough."""
    return [length for length in (longest >> power for power in range(7)) if length >= at_least]


def _given(**options: int | None) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


def main() -> None:
    """Run the command line: where something is wrong, one sentence on stderr, and exit code 2 if the input cannot be
    used, or 1 if the work broke off."""
    keep_freed_memory()
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        app()
    except UserError as error:
        print(f"triptych: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
