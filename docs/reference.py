"""Writes `reference.md` from the docstrings and tables of the code: `make reference`."""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import typer

import triptych
from triptych import modeling_triptych
from triptych.auto_map import AUTO_CLASSES
from triptych.configs import RECIPES
from triptych.configuration_senses import SensesConfig
from triptych.configuration_triptych import TOPOLOGIES, TriptychStackConfig
from triptych.conversion import surgery
from triptych.heads import TriptychHead
from triptych.training import recipe
from triptych.training.cli import app
from triptych.training.objectives import OBJECTIVES

CONFIGURATIONS = (triptych.TriptychConfig, TriptychStackConfig, *TOPOLOGIES.values(), SensesConfig)
SECTIONS = [cls for cls in vars(recipe).values() if is_dataclass(cls) and cls is not recipe.Recipe]
MODEL = triptych.TriptychPreTrainedModel
FUNCTIONS = (triptych.import_model, triptych.export_model, MODEL.save_pretrained, MODEL.push_to_hub)
BEGIN = """# Reference

Made from the code by `make reference`. [The tutorial](tutorial.md) explains what the fields mean, and
[how to](how-to.md) what they are good for."""


def paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def summary(thing) -> str:
    """A docstring up to its first section, such as "Args:"."""
    return re.split(r"\n+(?=[A-Z][a-z]+:\n    )", inspect.getdoc(thing))[0].strip()


def section(thing, title: str) -> str:
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)*)", inspect.getdoc(thing), re.MULTILINE)
    return found[1].strip("\n") if found else ""


def entries(thing, title: str) -> list[tuple[list[str], str]]:
    """What a section of a docstring says of each name, or of several at once."""
    parts = [part.strip().split(": ", 1) for part in re.split(r"\n(?=    \S)", section(thing, title)) if part]
    return [(names.split(", "), " ".join(text.split())) for names, text in parts]


def code(values: Iterable) -> str:
    return ", ".join(f"`{value}`" for value in dict.fromkeys(values))


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    rows = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def field_table(cls: type, title: str, write=repr) -> str:
    """The fields that a dataclass explains, with their defaults."""
    defaults = {}
    for field in fields(cls):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        defaults[field.name] = "" if default is MISSING or is_dataclass(default) else f"`{write(default)}`"
    rows = [
        (code(names), ", ".join(filter(None, map(defaults.get, names))), text) for names, text in entries(cls, title)
    ]
    return table(("field", "default", "meaning"), *rows)


def call(function, name: str) -> str:
    """What a function takes and gives."""
    arguments = "\n".join(f"- {code(names)}: {text}" for names, text in entries(function, "Args"))
    returns = " ".join(section(function, "Returns").split())
    return paragraphs(f"### {name}", summary(function), arguments, f"Returns: {returns}" if returns else "")


def configuration() -> str:
    parts = [paragraphs(f"### {cls.__name__}", summary(cls), field_table(cls, "Args")) for cls in CONFIGURATIONS]
    presets = code(sorted(path.stem for path in RECIPES.with_name("models").glob("*.json")))
    preset = call(triptych.TriptychConfig.from_preset, "TriptychConfig.from_preset")
    return paragraphs("## Configuration", *parts, preset, f"Presets: {presets}.")


def models() -> str:
    rows, forwards = [("class", "Auto class", "what it is")], {"TriptychHead.forward": TriptychHead.forward}
    for auto_class, name in [pair for classes in AUTO_CLASSES.values() for pair in classes.items()]:
        cls = getattr(modeling_triptych, name)
        rows.append((code([name]), code([auto_class]), summary(cls).split("\n\n")[0].replace("\n", " ")))
        forwards[cls.forward.__qualname__] = cls.forward
    return paragraphs("## Models and heads", table(*rows), *(call(forward, name) for name, forward in forwards.items()))


def checkpoints() -> str:
    parts = [call(function, function.__name__) for function in FUNCTIONS]
    changes = inspect.getdoc(surgery).split("\n\n", 1)[1]
    return paragraphs("## Checkpoints", *parts, "### Changes to an imported model", changes)


def objectives() -> str:
    rows, parts = [("objective", "heads", "columns", "collator")], {}
    for name, objective in OBJECTIVES.items():
        collators = [objective.collator_class(topology) for topology in objective.heads]
        heads = code(head.__name__ for head in objective.heads.values())
        perhaps = "".join(f", perhaps `{column}`" for column in objective.optional)
        rows.append((code([name]), heads, code(objective.columns) + perhaps, code(cls.__name__ for cls in collators)))
        for cls in collators:
            origin, returns = f"`from {cls.__module__} import {cls.__name__}`", inspect.getdoc(cls.__call__)
            parts[cls] = paragraphs(f"### {cls.__name__}", origin, summary(cls), returns, field_table(cls, "Args"))
    return paragraphs("## Objectives", table(*rows), *parts.values())


def recipes() -> str:
    parts = [
        paragraphs(f"### {cls.__name__}", summary(cls), field_table(cls, "Attributes", json.dumps))
        for cls in (recipe.Recipe, *SECTIONS)
    ]
    return paragraphs("## Recipes", *parts)


def commands(group, name: str) -> str:
    parts = []
    for child, command in group.commands.items():
        usage = " ".join([name, child, *(argument.metavar for argument in command.params if argument.metavar)])
        rows = [
            (code([one.metavar or one.opts[0]]), "" if one.default is None else code([one.default]), one.help)
            for one in command.params
        ]
        says = command.help.split("**")[0].strip()
        parts.append(paragraphs(f"### {usage}", says, table(("argument", "default", "meaning"), *rows)))
        if hasattr(command, "commands"):
            parts.append(commands(command, f"{name} {child}"))
    return paragraphs(*parts)


def render() -> str:
    """The whole page."""
    line = "## The command line\n\n`triptych COMMAND --help` gives examples."
    command = commands(typer.main.get_command(app), "triptych")
    return paragraphs(BEGIN, configuration(), models(), checkpoints(), objectives(), recipes(), line, command) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
