"""The blocks of docs/neighbours.md run, in their order and in one namespace, with small models in the place of trained
ones."""

import json
import re
import shlex
from pathlib import Path

import pytest

from triptych.training.recipe import load_recipe

PAGE = Path(__file__).parents[2] / "docs/neighbours.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROW = {"context": "one two", "choices": ["three", "six"], "label": 0}
PACKAGES = ("trl", "sentence_transformers", "torchao", "onnxscript", "onnxruntime", "openai", "lm_eval", "trackio")


def test_blocks(tmp_path, monkeypatch, neighbour, small_model, serve):
    for package in PACKAGES:
        neighbour(package)
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name, topology in {"reader": "encoder", "writer": "decoder", "translator": "encoder_decoder"}.items():
        small_model(topology)[0].rename(f"runs/{name}")
    text = PAGE.read_text(encoding="utf-8")
    Path("tasks").mkdir()
    Path("tasks/counting.yaml").write_text(next(code for kind, code in BLOCK.findall(text) if kind == "yaml"))
    Path("tasks/counting.jsonl").write_text(json.dumps(ROW) + "\n")
    namespace, address = {}, ""
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        line = text[: block.start()].count("\n") + 1
        if kind == "python":
            code = code.replace("http://localhost:8000", address)
            exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)
        elif kind == "bash":
            match shlex.split(code):
                case ["python", "-c", program, "serve", folder, "--port", "8000"]:
                    address = serve(program, folder)
                case ["triptych", "train", recipe, *changes]:
                    load_recipe(recipe, changes)
                case words:
                    pytest.fail(f"no test knows how to run: {words}")
