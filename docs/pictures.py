"""Makes the pictures of `triptych inspect` in this folder anew, for `make pictures`, which trains runs/demo before."""

import io
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from triptych.training.describing import inspect_model
from triptych.training.inspecting import choose_length, load_subject, run_inspection, show_inspection

DOCS = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PRESET, DEMO, TEXT = "linear_hybrid", "runs/demo", "fr: 14 juillet 1989"
WIDTH, HEIGHT = 1120, 1740  # of the page as far as it is shown: to the end of the attention


def draw_terminal() -> None:
    """What the terminal shows of a preset, as terminal.svg."""
    console = Console(record=True, width=104, file=io.StringIO())
    model = load_subject(PRESET)
    show_inspection(inspect_model(PRESET, model, choose_length(model.config, None)), as_json=False, console=console)
    picture = console.export_svg(title=f"triptych inspect {PRESET}")
    # A picture that asks another server for its letters would not be shown everywhere.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (DOCS / "terminal.svg").write_text(picture, encoding="utf-8")


def draw_page() -> None:
    """The page of the demonstration's model, as inspect.png, where there is a browser that can do it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"inspect.png stays as it is: none of {', '.join(BROWSERS)} is installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        run_inspection(DEMO, TEXT, None, None, Path(folder), as_json=False)
        options = [f"--user-data-dir={folder}/browser", f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=5000"]
        options += ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={DOCS / 'inspect.png'}"]
        subprocess.run([browser, *options, f"file://{folder}/index.html"], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    draw_terminal()
    draw_page()
