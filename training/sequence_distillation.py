"""Sequence-level distillation (Kim & Rush 2016, arXiv 1606.07947, section 3.2): a student's targets are what its
teacher writes for the training sources, with the beams of its generation config.

Only texts pass from one to the other, so their tokenizers may differ.
"""

import json
import os
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from rich.progress import track

from triptych.training.errors import UserError, as_user_error
from triptych.training.evaluation import generate_texts, load_model

BLOCK = 512  # sources that are answered at a time, and what a kill can cost


def teach_targets(examples: Dataset, teacher: str, file: Path) -> Dataset:
    """Return `examples` of `source` and `target` with the teacher's answers as targets.

    They are read from `file`, a JSON line each. What is missing there is written first, from where an earlier sitting
    was interrupted, by the main process, for which the others wait.

    Raises:
        UserError: the file is of other sources, or cannot be read or written; or there is no such teacher.
    """
    sources = list(examples["source"])
    with PartialState().main_process_first(), as_user_error(f"recipe key 'distillation.sequences': '{file}'"):
        targets = read_answers(file, sources) if file.exists() else []
        if len(targets) < len(sources):
            file.parent.mkdir(parents=True, exist_ok=True)
            targets += write_answers(file, sources[len(targets) :], teacher)
    return examples.remove_columns("target").add_column("target", targets)


def read_answers(file: Path, sources: list[str]) -> list[str]:
    """Return the answers in `file`, to the first of `sources`; a line that was cut short is cut off.

    Raises:
        UserError: a line is no answer to its source. The file stays as it is.
    """
    content = file.read_bytes()
    *lines, rest = content.split(b"\n")
    rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        match row:
            case {"source": str(source), "target": str()} if sources[number : number + 1] == [source]:
                continue
        raise _foreign_line(file, number)
    if rest:
        begins = [answer_line(source, "").encode()[:-3] for source in sources[len(rows) : len(rows) + 1]]
        if not any(rest[: len(begin)] == begin[: len(rest)] for begin in begins):
            raise _foreign_line(file, len(rows))
        os.truncate(file, len(content) - len(rest))
    return [row["target"] for row in rows]


def answer_line(source: str, target: str) -> str:
    return json.dumps({"source": source, "target": target}, ensure_ascii=False) + "\n"


def _foreign_line(file: Path, number: int) -> UserError:
    return UserError(
        f"recipe key 'distillation.sequences': line {number + 1} of '{file}' is no answer to text {number + 1} of the "
        "training data: choose another file"
    )


def write_answers(file: Path, sources: list[str], teacher: str) -> list[str]:
    """Append the teacher's answers to `sources` to `file`, and return them."""
    model, tokenizer = load_model(teacher)
    targets: list[str] = []
    starts = range(0, len(sources), BLOCK)
    with file.open("a", encoding="utf-8") as lines:
        for start in track(starts, "the teacher writes", console=Console(stderr=True)):
            asked = sources[start : start + BLOCK]
            answers = generate_texts(model, tokenizer, asked)
            for source, target in zip(asked, answers, strict=True):
                lines.write(answer_line(source, target))
            lines.flush()
            targets += answers
    return targets
