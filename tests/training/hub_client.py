"""A process with the real Hub client, which does as it is told: lines of JSON in, lines of JSON out.

Each line holds `code`, and the `token` to run it with. What the code leaves in `result` is the answer, or the error
that it raised. A process of its own, because the client reads `HF_ENDPOINT` when it is imported. The functions `build`,
`push`, `load` and `command_line` are at hand in the code.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self


class ClientError(Exception):
    """What the code raised: `kind` is the class's name."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class HubClient:
    """Runs code in a process whose Hub is `url` and whose cache and working folder are in `folder`.

    Args:
        blocked: whether the package cannot be imported there.
        **environment: more of its variables.
    """

    def __init__(self, url: str, folder: Path, blocked: bool = False, **environment: str):
        folder.mkdir(exist_ok=True)
        own = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *["blocked"] * blocked]
        self.process = subprocess.Popen(
            command, env={**os.environ, **own, **quiet, **environment}, cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def run(self, code: str, token: str | None = None) -> Any:
        print(json.dumps({"code": code, "token": token}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise ClientError(*answer["error"])
        return answer["result"]

    def command(self, *arguments: str, token: str | None = None) -> tuple[int, str, str]:
        """Run the command line; returns exit code, stdout and stderr."""
        return tuple(self.run(f"result = command_line({list(map(str, arguments))!r})", token))


def command_line(arguments: list[str]) -> tuple[int, str, str]:
    from triptych.training.cli import main

    sys.argv = ["triptych", *arguments]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def build(auto_class: str, topology: str = "encoder", **changes):
    """A tiny model, the same one for the same arguments."""
    import torch
    import transformers

    from triptych import TriptychConfig

    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    config = TriptychConfig(topology=topology, **{**shape, **changes})
    return getattr(transformers, auto_class).from_config(config)


def push(
    auto_class: str, topology: str = "encoder", options: dict[str, Any] | None = None, name: str = "model", **changes
) -> float:
    """Push a tiny model; returns the sum of its weights' sizes, by which it is known again."""
    model = build(auto_class, topology, **changes)
    model.push_to_hub(name, **options or {})
    return _total(model)


def load(auto_class: str, source: str = "ann/model", **options) -> float:
    """Load a model; returns the sum of its weights' sizes."""
    import transformers

    if not options.get("trust_remote_code"):
        import triptych  # noqa: F401
    return _total(getattr(transformers, auto_class).from_pretrained(source, **options))


def _total(model) -> float:
    return sum(value.double().abs().sum().item() for value in model.state_dict().values())


class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "triptych":
            raise ModuleNotFoundError(f"{name} is not installed")


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is not an answer
    if "blocked" in sys.argv:
        sys.meta_path.insert(0, Blocked)
    import huggingface_hub.utils._http as http
    import torch

    http.time.sleep = lambda seconds: None  # its pauses between attempts
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.pop("HF_TOKEN", None)
        if request["token"]:
            os.environ["HF_TOKEN"] = request["token"]
        scope = {"command_line": command_line, "build": build, "push": push, "load": load, "result": None}
        try:
            exec(request["code"], scope)
            answer = {"result": scope["result"]}
        except Exception as error:
            answer = {"error": (type(error).__name__, str(error))}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
