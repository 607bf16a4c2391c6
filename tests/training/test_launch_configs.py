"""The launch configurations: accelerate's own command takes each of them, as the engine and the processes it says."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
# File to machines, processes, precision, and the launcher's engine.
EXPECTED = {
    "cpu.yaml": (1, 1, "no", None),
    "ddp.yaml": (1, 2, "no", "multi_gpu"),
    "multi_node.yaml": (2, 16, "no", "multi_gpu"),
    "fsdp2.yaml": (1, 2, "bf16", "use_fsdp"),
    "deepspeed_zero2.yaml": (1, 2, "bf16", "use_deepspeed"),
    "deepspeed_zero3.yaml": (1, 2, "bf16", "use_deepspeed"),
}
ENGINES = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu")


def launch_arguments(name: str):
    """What `accelerate launch --config_file NAME` runs with, and what it would have run with otherwise."""
    parse = launch_command_parser().parse_args
    with_file, without = parse(["--config_file", str(CONFIGS / name), "script.py"]), parse(["script.py"])
    return _validate_launch_command(with_file)[0], without


def test_every_file_is_expected():
    assert {path.name for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_launches_what_the_file_says(name, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` silently runs one process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments, _ = launch_arguments(name)
    machines, processes, precision, engine = EXPECTED[name]
    assert (arguments.num_machines, arguments.num_processes) == (machines, processes)
    assert arguments.mixed_precision == precision
    assert [key for key in ENGINES if getattr(arguments, key)] == ([engine] if engine else [])
    assert processes % machines == 0
    assert bool(arguments.use_cpu) == (name == "cpu.yaml")
    if machines > 1:
        assert arguments.main_process_ip and arguments.main_process_port


@pytest.mark.parametrize("name", EXPECTED)
def test_every_option_has_an_effect(name):
    """A typo in a section is ignored, and so are some keys outside one, such as same_network."""
    arguments, without = launch_arguments(name)
    values = yaml.safe_load((CONFIGS / name).read_text())
    for key in ("compute_environment", "distributed_type"):
        del values[key]
    for section in [key for key, value in values.items() if isinstance(value, dict)]:
        assert values[section].keys() <= vars(without).keys()
        values |= values.pop(section)
    assert {key: getattr(arguments, key) for key in values} == values
