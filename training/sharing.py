"""The command `push`, and what a run says of itself: the card that lies in its folder and goes with it to the Hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from safetensors import SafetensorError
from transformers import AutoConfig

from triptych.sharing import CARD, code_fields, code_files, is_made_here, make_repository, model_card, push_files
from triptych.training.errors import BROKEN_FILES, Failure, UserError, as_user_error
from triptych.training.recipe import RECIPE_FILE
from triptych.training.reporting import CURVE_FILE, FINISHED, METRICS_FILE, RECORD_FILE, write_whole
from triptych.weight_files import count_numbers

CONFIG_FILE, EVALUATION_FILE = "config.json", "evaluation.json"
# What of a folder is its model, and what of a run says how it came about. Nothing else in it is anyone's business.
SHARED = (
    *(CONFIG_FILE, "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
    *(RECIPE_FILE, RECORD_FILE, METRICS_FILE, CURVE_FILE, EVALUATION_FILE),
)
# The Hub's words for measures that are called otherwise here.
HUB_METRICS = {
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "span_f1": "f1",
    "word_error_rate": "wer",
}


def push(folder: Path, repo_id: str, private: bool, revision: str | None, with_code: bool) -> str:
    """Push the model in `folder`, with its tokenizer, card and training record, and return the commit's address.

    Raises:
        UserError: there is no whole model in `folder`, or the Hub refuses what is asked.
        Failure: the connection broke; the same call goes on where it stopped.
    """
    files = collect_files(folder, with_code)
    with hub_errors(repo_id):
        repo_id = make_repository(repo_id, private or None, revision)
        if not is_written_by_hand(folder / CARD):
            files[CARD] = make_card(folder, repo_id, with_code).encode()
        return push_files(files, repo_id, revision).commit_url


def collect_files(folder: Path, with_code: bool) -> dict[str, Path | bytes]:
    """Return what of `folder` is shared: path in the repository to a file or its content."""
    check_model(folder)
    files: dict[str, Path | bytes] = {
        path.name: path for pattern in (*SHARED, CARD) for path in sorted(folder.glob(pattern)) if path.is_file()
    }
    if RECIPE_FILE in files:  # without the place of the run on this machine
        recipe = yaml.safe_load((folder / RECIPE_FILE).read_text("utf-8"))
        recipe["output"] = None
        files[RECIPE_FILE] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()
    if with_code:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        config |= code_fields(config["topology"])
        files[CONFIG_FILE] = json.dumps(config, indent=2, sort_keys=True).encode()
        files |= code_files()
    return files


def check_model(folder: Path) -> None:
    """Raise a `UserError` unless `folder` holds a model of the family with all its weights."""
    if not folder.is_dir():
        raise UserError(f"'{folder}' is no folder: give a run's folder, or one that save_pretrained wrote")
    record = _read_json(folder / RECORD_FILE)
    if record and record.get("status") != FINISHED:
        raise UserError(f"'{folder}' holds no model yet: its training has made {record.get('step', 0):,} updates")
    if not (folder / CONFIG_FILE).is_file() or not any(folder.glob("model*.safetensors")):
        raise UserError(f"'{folder}' holds no model: {CONFIG_FILE} and model.safetensors must be in it")
    with as_user_error(f"'{folder}' holds no model of the family", *BROKEN_FILES):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type != "triptych":
            raise ValueError(
                f"its model_type is '{config.model_type}', not 'triptych': `triptych convert` makes it one"
            )
    index = _read_json(folder / "model.safetensors.index.json")
    for name in sorted(set(index.get("weight_map", {}).values())):
        if not (folder / name).is_file():
            raise UserError(f"'{folder}' lacks {name}, which its index of weights names")
    count_parameters(folder)


def count_parameters(folder: Path) -> int:
    """Return how many numbers the weights in `folder` hold, from the files' headers.

    Raises:
        UserError: a file is cut short, or no safetensors file.
    """
    count = 0
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            count += count_numbers(path)
        except SafetensorError as error:
            raise UserError(f"'{path}' is no whole safetensors file: {error}") from error
    return count


def write_card(folder: Path) -> None:
    """Write the card of the model in `folder`, anew unless a person wrote the one that is there."""
    if not is_written_by_hand(folder / CARD):
        write_whole(folder / CARD, make_card(folder, folder.name, with_code=False))


def is_written_by_hand(card: Path) -> bool:
    """Whether a card is there that was not made here."""
    return card.is_file() and not is_made_here(card)


def make_card(folder: Path, name: str, with_code: bool) -> str:
    """Return the card of the model in `folder`, with how it was trained and what it scores, where that is known."""
    record, scores = _read_json(folder / RECORD_FILE), _read_json(folder / EVALUATION_FILE)
    sections = [_training_section(folder, record)] if record else []
    metadata: dict[str, Any] = {}
    if scores:
        sections.append(_evaluation_section(scores))
        metadata = {"model_name": name.split("/")[-1], "eval_results": list(_eval_results(folder.name, scores))}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return str(model_card(config, name, count_parameters(folder), with_code, "\n\n".join(sections), **metadata))


def keep_evaluation(folder: Path, split: str, scores: dict[str, Any]) -> None:
    """Add what the model in `folder` scores on a split of its recipe to its record and its card."""
    path = folder / EVALUATION_FILE
    write_whole(path, json.dumps({**_read_json(path), split: scores}, indent=1))
    write_card(folder)


def _training_section(folder: Path, record: dict[str, Any]) -> str:
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text("utf-8"))
    hours, seconds = divmod(round(record["seconds"]), 3600)
    facts = {
        "objective": recipe["objective"]["type"],
        "training examples": f"{record['examples']:,}",
        "hash of the data": f"`{record['data'][:16]}`",
        "updates": f"{record['step']:,}",
        "input tokens seen": f"{record['tokens']:,}",
        "optimiser": f"{recipe['optimizer']}, peak learning rate {recipe['learning_rate']:g}, {recipe['schedule']}",
        "precision": recipe["mixed_precision"] or "float32",
        "seed": record["seed"],
        "processes": f"{record['processes']} on {record['device']}",
        "time": f"{hours}:{seconds // 60:02d}:{seconds % 60:02d}",
        "versions": ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    final = ", ".join(f"{name} {value:.4f}" for name, value in record["final"].items() if name != "step")
    curve = f"\n\n![Loss over updates]({CURVE_FILE})" if (folder / CURVE_FILE).is_file() else ""
    return (
        f"## How it was trained\n\nBy `triptych train {RECIPE_FILE}`, with the recipe in this repository. On the "
        f"validation split this model has {final}.\n\n| | |\n|---|---|\n{rows}{curve}"
    )


def _evaluation_section(scores: dict[str, dict[str, Any]]) -> str:
    """A row for each measure; those of other models on the same text are comparable where the signature is the same."""
    rows = ["| split | examples | measure | value |", "|---|---|---|---|"]
    for split, values in scores.items():
        options = {name: value for name, value in values.items() if type(value) is int and name != "examples"}
        label = ", ".join([split, *(f"{name} {value}" for name, value in options.items())])
        for name, value in _measures(values):
            rows.append(f"| {label} | {values['examples']:,} | {name} | {value:.2f} |")
    signatures = dict.fromkeys(
        f"`{value}`" for values in scores.values() for name, value in values.items() if name.endswith("_signature")
    )
    said = f"\n\nSignatures: {', '.join(signatures)}." if signatures else ""
    unit = "All but perplexity and bits per byte are in percent."
    return "## What it scores\n\n" + "\n".join(rows) + f"\n\n{unit}{said}"


def _eval_results(name: str, scores: dict[str, dict[str, Any]]) -> Iterator[EvalResult]:
    for split, values in scores.items():
        for measure, value in _measures(values):
            yield EvalResult(
                task_type="text-generation" if measure in ("perplexity", "bits_per_byte") else "other",
                dataset_type=name,
                dataset_name=name,
                dataset_split=split,
                metric_type=HUB_METRICS.get(measure, measure),
                metric_name=measure,
                metric_value=round(value, 4),
            )


def _measures(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in values.items() if isinstance(value, float))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Say in one sentence what the Hub refused, or where the way to it broke."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, HTTPError) as error:
        # An upload's own error stands behind one that says which file it was.
        raise _explain(repo_id, (isinstance(error, RuntimeError) and error.__cause__) or error) from error


def _explain(repo_id: str, error: BaseException) -> UserError:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status == 401:
        return UserError(
            f"the Hub does not let you write to '{repo_id}': log in with `hf auth login`, or set HF_TOKEN to a token "
            "that it knows"
        )
    if status in (403, 404):
        return UserError(
            f"the Hub does not let you write to '{repo_id}': your token must have the right to write, and the name "
            "must begin with your own or your organisation's"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(f"'{repo_id}' cannot be pushed to while HF_HUB_OFFLINE is set")
    if isinstance(error, ValueError) and status is None:
        return UserError(f"'{repo_id}' cannot be pushed to: {str(error).strip().splitlines()[0]}")
    reason = f"the Hub answered {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Failure(
        f"the push to '{repo_id}' broke off ({reason}); nothing of it is visible there, and the same command goes on "
        "where it stopped"
    )
