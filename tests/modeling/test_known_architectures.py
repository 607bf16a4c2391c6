"""The README's table of known architectures is that of the tests: `python tests/modeling/test_known_architectures.py`
writes it anew."""

import re
from pathlib import Path

from sources import CASES, SOURCES

from triptych.conversion.registry import ARCHITECTURES

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- known architectures -->\n", "<!-- end -->\n"
PANELS = {"encoder": "encoders", "decoder": "decoders", "encoder_decoder": "encoder-decoders"}


def render() -> str:
    """Architectures by panel, and the heads that are compared with their sources in test_conversion.py."""
    rows = ["| | `model_type` | heads |", "|---|---|---|"]
    for topology, title in PANELS.items():
        for entry in ARCHITECTURES:
            if entry.topology != topology:
                continue
            names = [name for name in entry.heads if any(case[0::2] == (entry.model_type, name) for case in CASES)]
            prefix = next(re.sub("(Model|Encoder)+$", "", name) for name in names)
            heads = ", ".join(name.removeprefix(prefix) for name in names)
            rows.append(f"| {title} | {entry.model_type} | {heads} |")
            title = ""
    return "\n".join(rows) + "\n"


def test_the_table_is_that_of_the_tests():
    text = README.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == render()


def test_every_architecture_is_tested():
    assert {entry.model_type for entry in ARCHITECTURES} == SOURCES.keys()
    assert {name for entry in ARCHITECTURES for name in entry.heads} == {case[2] for case in CASES}
    assert len(SOURCES) >= 20


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:start] + render() + text[end:], encoding="utf-8")
