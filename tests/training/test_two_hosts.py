"""Two hosts that train one model: network namespaces with addresses of their own, joined by a virtual cable."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_dates import TINY

from triptych.training.reporting import FINISHED, read_metrics
from triptych.training.run import read_record

CONFIG = Path(__file__).parents[2] / "configs" / "accelerate" / "multi_node.yaml"
ADDRESS, PORT, NETWORK = "10.77.0.1", "29500", "eth0"
UPDATES, SAVE_EVERY = 150, 10
CHANGES = [*TINY, f"max_steps={UPDATES}", f"validate_every={UPDATES}", f"save_every={SAVE_EVERY}"]
CHANGES += ["model.hidden_dropout=0.1"]


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def kill(host: str) -> None:
    """End all processes of a host at once."""
    for process in ip("netns", "pids", host).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


@pytest.fixture
def hosts():
    """Names of two hosts; afterwards they and their processes are gone."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces: there is no `ip` (Debian's iproute2)")
    names = [f"triptych-{os.getpid()}-{number}" for number in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        cable = ["type", "veth", "peer", "name", NETWORK, "netns", names[1]]
        ip("link", "add", NETWORK, "netns", names[0], *cable)
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", NETWORK)
            for device in ("lo", NETWORK):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        remove(made)
        pytest.skip(f"no network namespaces: {error.stderr.strip()}")
    yield names
    remove(names)


def remove(hosts: list[str]) -> None:
    for host in hosts:
        kill(host)
        ip("netns", "delete", host)


class Launch:
    """A command on each of some hosts; None is this one."""

    def __init__(self, folder: Path, commands: dict[str | None, list[str]]):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        self.processes, self.logs = {}, {}
        for number, (host, command) in enumerate(commands.items()):
            place = ["ip", "netns", "exec", host] if host else []
            own = environment | ({"GLOO_SOCKET_IFNAME": NETWORK} if host else {})
            self.logs[host] = folder / f"host{number}.log"
            with self.logs[host].open("w") as log:
                self.processes[host] = subprocess.Popen(
                    [*place, sys.executable, "-m", *command], cwd=folder, env=own, stdout=log, stderr=log
                )

    def codes(self, seconds: float) -> list[int]:
        """Return the exit codes, once all commands have ended."""
        until = time.monotonic() + seconds
        return [process.wait(max(0, until - time.monotonic())) for process in self.processes.values()]

    def said(self) -> str:
        return "\n".join(log.read_text() for log in self.logs.values())


def train_arguments(output: Path) -> list[str]:
    return ["-m", "triptych.training.cli", "train", "dates", *CHANGES, f"output={output}"]


def accelerate_launch(hosts: list[str], output: Path) -> dict[str, list[str]]:
    common = ["accelerate.commands.launch", "--config_file", str(CONFIG), "--main_process_ip", ADDRESS]
    common += ["--num_processes", "2", "--machine_rank"]
    return {host: [*common, str(rank), *train_arguments(output)] for rank, host in enumerate(hosts)}


def torchrun(hosts: list[str], output: Path) -> dict[str, list[str]]:
    common = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    common += ["--master_addr", ADDRESS, "--master_port", PORT, "--node_rank"]
    return {host: [*common, str(rank), *train_arguments(output)] for rank, host in enumerate(hosts)}


def one_host(output: Path) -> dict[None, list[str]]:
    return {None: ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", *train_arguments(output)]}


def last_checkpoint(output: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in output.glob("checkpoints/step-*")), default=0)


def kill_after_a_checkpoint(launch: Launch, victim: str, output: Path) -> int:
    """Kill a host soon after the next checkpoint; return its update, once the other host has noticed."""
    before, until = last_checkpoint(output), time.monotonic() + 180
    while last_checkpoint(output) <= before:
        assert time.monotonic() < until, launch.said()
        time.sleep(0.01)
    kill(victim)
    assert 0 not in launch.codes(60), launch.said()
    assert not (output / "model.safetensors").exists()
    return last_checkpoint(output)


def assert_same_run(folder: Path, expected: Path) -> None:
    assert [read_record(path)["processes"] for path in (folder, expected)] == [2, 2]
    assert read_record(folder)["status"] == FINISHED
    rows, others = (read_metrics(path / "metrics.jsonl") for path in (folder, expected))
    assert len(rows) == UPDATES + 1
    for row, other in zip(rows, others, strict=True):
        assert row | {"tokens_per_second": 0} == other | {"tokens_per_second": 0}
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_hosts_are_one_with_two_processes_whichever_dies(hosts, tmp_path):
    """They leave what two processes of one host leave, bitwise; also when first the second host and then the first one
    is killed, the other one ends, and the same commands are given again."""
    expected = tmp_path / "expected"
    launch = Launch(tmp_path, one_host(expected))
    assert launch.codes(180) == [0], launch.said()
    launch = Launch(tmp_path, accelerate_launch(hosts, tmp_path / "undisturbed"))
    assert launch.codes(180) == [0, 0], launch.said()
    assert_same_run(tmp_path / "undisturbed", expected)

    output = tmp_path / "killed"
    launch = Launch(tmp_path, torchrun(hosts, output))
    for victim in reversed(hosts):
        step = kill_after_a_checkpoint(launch, victim, output)
        launch = Launch(tmp_path, torchrun(hosts, output))
    assert launch.codes(180) == [0, 0], launch.said()
    assert f"from update {step} " in launch.said()
    assert "2 process(es)" in launch.said()
    assert_same_run(output, expected)
