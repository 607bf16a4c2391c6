"""Run by test_resume.py: trains in sittings, each of which is a process (or several) that a signal ends, or that ends.

It imports everything once and forks the sittings, as starting Python takes longer than they do. The processes of a
sitting find each other through the environment variables that torchrun sets.

Its argument is a JSON list of runs: `changes` of the dates recipe (or of `recipe`), and `sittings`, each with the
number of `processes` and, where it is to be ended, `signal`, `rank`, and either `before` (an update) or `within` (a
function of the checkpoints module, and how many of its calls come to an end before).
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from tiny_dates import TINY

from triptych.training import checkpoints
from triptych.training.dates import generate_dates
from triptych.training.errors import UserError
from triptych.training.loop import StopRequest, TrainingLoop
from triptych.training.recipe import load_recipe
from triptych.training.run import train


def plan_end(sitting: dict) -> None:
    """Let this process signal itself at the moment that `sitting` names."""

    def end():
        for _ in range(sitting.get("times", 1)):
            os.kill(os.getpid(), getattr(signal, sitting["signal"]))
            time.sleep(0.01)

    if "before" in sitting:
        update = TrainingLoop._update

        def ending_update(loop, batches):
            if loop.state.step == sitting["before"] - 1:
                end()
            return update(loop, batches)

        TrainingLoop._update = ending_update
    else:
        name, calls = sitting["within"]
        original = getattr(checkpoints, name)
        left = [calls]

        def ending(*arguments):
            left[0] -= 1
            if left[0] < 0:
                end()
            return original(*arguments)

        setattr(checkpoints, name, ending)


def sit(run: dict, sitting: dict, rank: int, port: int, log: Path) -> None:
    """Be one process of a sitting; never returns."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if sitting["processes"] > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": sitting["processes"], "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    if sitting.get("times", 1) > 1:
        StopRequest.SAME_REQUEST_SECONDS = 0
    if "signal" in sitting and rank == sitting.get("rank", 0):
        plan_end(sitting)
    code = 1
    try:
        tiny = TINY if "recipe" not in run else ()
        train(load_recipe(run.get("recipe", "dates"), [*tiny, *run["changes"], *sitting.get("changes", ())]))
        code = 0
    except SystemExit as stop:
        code = stop.code
    except UserError as error:
        print(f"triptych: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # not back into the parent's code


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generate_dates("train", 1, 1)  # reads the locales, once for all sittings
    results = []
    for run in json.loads(sys.argv[1]):
        for number, sitting in enumerate(run["sittings"]):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            log = Path(f"{run['log']}.{number}")
            children = []
            for rank in range(sitting["processes"]):
                child = os.fork()
                if child == 0:
                    sit(run, sitting, rank, port, log)
                children.append(child)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            results.append({"codes": codes, "said": log.read_text()})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
