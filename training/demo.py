"""The demonstration: dates in many languages, learned, scored, loaded anew and shown."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from triptych.training.evaluation import evaluate_examples, examples_to_score, generate_texts, load_model
from triptych.training.plots import plot_cross_attention

HEADINGS = {"test_dates": "dates held out of training", "test_formats": "date formats held out of training"}
ATTENTION_FILE = "cross_attention.png"


def run_demo(output: str) -> None:
    """Train the `dates` recipe into `output`, then score and show what was saved, each in a new process."""
    started = time.perf_counter()
    _python("triptych.training.cli", "train", "dates", f"output={output}", "overwrite=true")
    _python("triptych.training.demo", output)
    minutes, seconds = divmod(round(time.perf_counter() - started), 60)
    # `make` calls it by a path that the shell does not search.
    command = "triptych" if shutil.which("triptych") else sys.argv[0]
    print(
        f"Done in {minutes}:{seconds:02d}. The model, its tokenizer, metrics.jsonl, loss.png and {ATTENTION_FILE} are "
        f'in {Path(output).resolve()}; try: {command} generate {output} "fr: 14 juillet 1989"'
    )


def _python(module: str, *arguments: str) -> None:
    # OpenMP's threads wait by spinning. Where something else wants the cores, the default spin, hundreds of times
    # longer than this, makes a training several times slower; where nothing does, this costs a few percent.
    environment = {"GOMP_SPINCOUNT": "1000", **os.environ}
    code = subprocess.run([sys.executable, "-m", module, *arguments], env=environment).returncode
    if code:
        sys.exit(code)


def show(folder: Path) -> None:
    """Score the model in `folder`, print ten dates with its answers, and draw the cross-attention of one."""
    console = Console()
    pairs, recipe = examples_to_score(folder)
    model, tokenizer = load_model(str(folder))
    for split, dataset in pairs.items():
        scores = evaluate_examples(model, tokenizer, dataset, recipe)
        console.print(f"{HEADINGS[split]}: {scores['exact_match']:.1f} % of {scores['examples']:,} right")

    dates = pairs["test_dates"]
    table = Table("source", "prediction", "truth", title="Ten dates held out of training")
    ten = dates[:10]
    predictions = generate_texts(model, tokenizer, ten["source"])
    for row in zip(ten["source"], predictions, ten["target"], strict=True):
        table.add_row(*row)
    console.print(table)

    german = max((source for source in dates["source"] if source.startswith("de:")), key=len)
    model.set_attn_implementation("eager")
    plot_cross_attention(model, tokenizer, german, folder / ATTENTION_FILE)


if __name__ == "__main__":
    disable_progress_bar()
    show(Path(sys.argv[1]))
