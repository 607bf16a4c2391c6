"""Sharded training (FSDP2) with tied and shared embeddings: two processes do what one does with accumulation."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triptych
from triptych import TriptychConfig

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("sharded_worker.py")
STEPS = 3
MODELS = {
    "decoder": (triptych.TriptychForCausalLM, {}),
    "encoder": (triptych.TriptychForMaskedLM, {}),
    "encoder_decoder": (triptych.TriptychForConditionalGeneration, {"share_embeddings": True}),
    "encoder_decoder-untied": (triptych.TriptychForConditionalGeneration, {"tie_word_embeddings": False}),
}


def batch(topology: str, length: int) -> dict[str, torch.Tensor]:
    """Two texts, the second one shorter; -100 where nothing is learnt, as the collators give it."""
    ids, mask = torch.randint(3, 97, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, length - 2 :] = 0
    labels = torch.randint(3, 97, (2, length)) if topology != "decoder" else ids
    labels = labels.masked_fill(mask == 0, -100)
    if topology == "decoder":
        labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train_alone(folder: Path, model_class: type) -> tuple[list[float], torch.nn.Module]:
    """One process that accumulates the batches of each update."""
    model = model_class.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batches in torch.load(folder / "updates.bin"):
        count = sum((one["labels"] != -100).sum() for one in batches)
        parts = [model(**one, num_items_in_batch=count).loss for one in batches]
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(parts).detach()))
    return losses, model


def launch(*folders: Path, cwd: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ROOT / "configs" / "accelerate" / "fsdp2.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--mixed_precision", "no", "--main_process_port", str(port), str(WORKER), *map(str, folders)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    result = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_two_sharded_processes_are_one_that_accumulates(tmp_path):
    """A tied table lies in two groups of a sharded model: losses and weights of three updates, what is saved, and the
    loss after a resume are those of one process."""
    folders = {}
    for name, (model_class, changes) in MODELS.items():
        topology = name.partition("-")[0]
        config = TriptychConfig.from_preset(f"tiny_{topology}", **changes)
        folders[name] = tmp_path / name
        model_class(config).save_pretrained(folders[name])
        updates = [[batch(topology, 5 + 2 * part + step) for part in range(2)] for step in range(STEPS)]
        torch.save(updates, folders[name] / "updates.bin")
    printed = launch(*folders.values(), cwd=tmp_path)
    assert printed.split() == [f"{folder}:2" for folder in folders.values()]
    for name, folder in folders.items():
        check(folder, MODELS[name][0])


def check(folder: Path, model_class: type):
    expected, alone = train_alone(folder, model_class)
    losses, resumed = torch.load(folder / "losses.bin")
    assert losses == pytest.approx(expected, abs=1e-5), folder
    assert resumed == losses[-len(resumed) :], folder
    loaded, info = model_class.from_pretrained(folder / "trained", output_loading_info=True)
    assert not any(info.values()), info
    weights = dict(loaded.named_parameters())
    assert weights.keys() == dict(alone.named_parameters()).keys()
    for name, parameter in alone.named_parameters():
        assert (weights[name] - parameter).abs().max() <= 1e-5, f"{folder}: {name}"
