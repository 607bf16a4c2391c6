"""The documentation does what it says: its code runs, its commands parse, its links and quotes hold.

The blocks of a page are taken in their order, in an empty folder:

| block | what becomes of it |
|---|---|
| any but `python`, behind a line that ends in "`NAME`:" | it is the file of that name |
| `python` | it runs, all of a page in one namespace |
| `bash`, or without a language | each command is parsed; what the package has to do for it is done with tiny models |
| `yaml` | it is read as a recipe, or as sections of one |
| `math`, or `text`, as of an output | nothing |

Trainings of recipes that a page brings along make two updates. Those of shipped recipes and behind launchers are read
only, as are benchmarks.
"""

import ast
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
import typer
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import PreTrainedConfig

from triptych import TriptychConfig, TriptychForConditionalGeneration
from triptych.configs import recipe_names
from triptych.training.building import _check_model_fields as check_model_fields
from triptych.training.cli import app
from triptych.training.objectives import read_task
from triptych.training.recipe import NOT_FIELDS, Recipe, load_recipe
from triptych.training.run import train
from triptych.training.tokenization import train_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Run beside a Hub, by test_hub.py, and beside the tools that it is about, by tests/neighbours.
ELSEWHERE = ("first-steps.md", "neighbours.md")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"`([^`\s]+)`:\n+$")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)(?::\s+`(?P<quote>[^`]+)`)?")
SMALL = {"hidden_size": 48, "intermediate_size": 48}
QUICK = [f"model.{name}={size}" for name, size in SMALL.items()]
QUICK += ["max_steps=2", "warmup_steps=0", "cooldown_steps=0", "validate_every=2", "generation.max_new_tokens=4"]
QUICK += ["report_to=[]"]
REFERENCE = ROOT / "docs" / "reference.py"


def read_only(recipe, changes=None):
    """In the place of the command `train`: refuses what it would refuse before it reads data."""
    loaded = load_recipe(recipe, changes or [])
    given = {name: value for name, value in loaded.model.items() if name not in NOT_FIELDS}
    check_model_fields(given, read_task(loaded).topology)


def train_quickly(recipe, changes=None):
    read_only(recipe, changes)
    if recipe not in recipe_names():
        train(load_recipe(recipe, [*(changes or []), *QUICK]))


def silence(command):
    command.callback = lambda **arguments: None
    for child in getattr(command, "commands", {}).values():
        silence(child)


def run_triptych(words, train_command=train_quickly):
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        if name not in ("generate", "evaluate", "convert"):
            silence(command)
    root.commands["train"].callback = train_command
    root.main(words, standalone_mode=False)


def run_line(line):
    """Does what a line of a shell says, as far as it is ours."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words:
        case []:
            pass
        case ["triptych", *arguments]:
            run_triptych(arguments)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        case ["torchrun", *arguments]:
            run_triptych(torchrun_parser().parse_args(arguments).training_script_args, read_only)
        case ["accelerate", "launch", *arguments]:
            launch = launch_command_parser().parse_args(arguments)
            assert (ROOT / launch.config_file).is_file(), line
            run_triptych(launch.training_script_args, read_only)
        case _:
            pytest.fail(f"no test knows how to run: {line}")


def run_block(language, code, before, page, line, namespace):
    """Does with a block what the table at the head of this file says."""
    if language == "python":
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    elif name := FILE_NAME.search(before):
        Path(name[1]).write_text(code, encoding="utf-8")
    elif language in ("bash", ""):
        for command in code.replace("\\\n", " ").splitlines():
            run_line(command)
    elif language == "yaml":
        Path("block.yaml").write_text(code, encoding="utf-8")
        data = [f"data.splits.{split}=none.tsv" for split in ("train", "validation")]
        read_only("block.yaml", data if "data:" not in code else [])
    else:
        assert language in ("math", "text"), f"{page}, line {line}: no test knows a block of '{language}'"


def stand_in(text):
    """Makes what the blocks of a page take for granted, in small: the model of `make demo`, and one from the Hub."""
    if "runs/demo" in text:
        sizes = [f"data.dates.{name}=40" for name in ("train", "validation", "test_dates", "test_formats")]
        train(load_recipe("dates", [*sizes, *QUICK, "output=runs/demo"]))
    if "google-bert/bert-base-uncased" in text:
        config = transformers.BertConfig(vocab_size=99, num_hidden_layers=2, num_attention_heads=4, **SMALL)
        transformers.BertForMaskedLM(config).save_pretrained("google-bert/bert-base-uncased")
        train_tokenizer(["abc"], "char", 99, "encoder").save_pretrained("google-bert/bert-base-uncased")
    if "my_recipe.yaml" in text:
        Path("pairs.tsv").write_text("".join(f"source {number}\ttarget {number}\n" for number in range(9)))
        Path("my_recipe.yaml").write_text("data: {splits: {train: none.tsv, validation: pairs.tsv}}\n")


@pytest.fixture
def small_presets(monkeypatch):
    """Presets as they are, but narrow; and a class that a page registers is as before in the end."""
    monkeypatch.setattr(TriptychForConditionalGeneration, "_auto_class", None)
    build = TriptychConfig.from_preset
    monkeypatch.setattr(TriptychConfig, "from_preset", lambda name, **changes: build(name, **{**SMALL, **changes}))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name)
def test_blocks(page, tmp_path, monkeypatch, small_presets):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    stand_in("".join(block[2] for block in blocks))
    namespace = {"__name__": "__main__"}
    for block in blocks:
        before = text[: block.start()]
        run_block(block[1], block[2], before, page, before.count("\n") + 1, namespace)


def defined(file, name):
    """The source of `Class.method` or `function` in a Python file, or None."""
    source = file.read_text(encoding="utf-8")
    node = ast.parse(source)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        if node is None:
            return None
    return ast.get_source_segment(source, node)


def anchors(page):
    """What GitHub calls the headings of a page."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links(page):
    """A link leads to a file, a heading or a symbol that is there; code behind a colon is quoted from that symbol."""
    for link in LINK.finditer(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), link[0]
        assert not anchor or anchor in anchors(file), link[0]
        if file.suffix == ".py" and (name := re.fullmatch(r"`([\w.]+)(?<!\.py)`", link["text"])):
            source = defined(file, name[1])
            assert source is not None, f"{link[0]}: there is no such symbol"
            assert not link["quote"] or link["quote"] in source, f"{link[0]}: the code is another"


@pytest.fixture(scope="module")
def reference():
    return runpy.run_path(str(REFERENCE))


def test_the_reference_is_that_of_the_code(reference):
    """`make reference` writes it anew."""
    assert REFERENCE.with_suffix(".md").read_text(encoding="utf-8") == reference["render"]()


def explained(reference, cls, section):
    return {name for names, _ in reference["entries"](cls, section) for name in names}


def test_docstrings_explain_every_key_of_a_recipe(reference):
    for cls in (Recipe, *reference["SECTIONS"]):
        assert explained(reference, cls, "Attributes") == {field.name for field in fields(cls)}, cls.__name__


def test_docstrings_explain_every_field_of_a_configuration(reference):
    ours = set().union(*(explained(reference, cls, "Args") for cls in reference["CONFIGURATIONS"]))
    theirs = {field.name for field in fields(PreTrainedConfig)}
    for cls in reference["CONFIGURATIONS"]:
        assert {field.name for field in fields(cls)} - theirs <= ours, cls.__name__
