"""Run by test_sharded.py under `accelerate launch` with configs/accelerate/fsdp2.yaml: trains each saved model, sharded
over the processes, resumes it from a checkpoint, and leaves losses and weights in its folder.

FSDP2 on CPUs needs one thing that accelerate does not offer: a process group of gloo that does not count as "CPU only".
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoConfig

import triptych

STEPS, SAVED_AFTER = 3, 2


def prepare(folder: Path, accelerator: Accelerator):
    model_class = getattr(triptych, AutoConfig.from_pretrained(folder).architectures[0])
    model = model_class.from_pretrained(folder).train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    is_sharded = [hasattr(parameter, "placements") for parameter in model.parameters()]
    assert all(is_sharded), f"{folder}: {is_sharded.count(False)} parameters are whole"
    return model, optimizer


def update(model, optimizer, batches: list[dict], accelerator: Accelerator) -> float:
    """One optimiser step on this process' batch of the update, and the loss of all of them together."""
    batch = batches[accelerator.process_index]
    count = sum((other["labels"] != -100).sum() for other in batches)
    loss = model(**batch, num_items_in_batch=count).loss
    accelerator.backward(loss * accelerator.num_processes)  # sharded gradients are averaged over the processes
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "sum"))


def run(folder: Path, accelerator: Accelerator):
    updates = torch.load(folder / "updates.bin")
    model, optimizer = prepare(folder, accelerator)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AFTER:
            accelerator.save_state(folder / "checkpoint")
        losses.append(update(model, optimizer, updates[step], accelerator))
    state_dict = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder / "trained", state_dict=state_dict)

    accelerator.free_memory(model, optimizer)
    model, optimizer = prepare(folder, accelerator)
    accelerator.load_state(folder / "checkpoint")
    resumed = [update(model, optimizer, updates[step], accelerator) for step in range(SAVED_AFTER, STEPS)]
    if accelerator.is_main_process:
        torch.save((losses, resumed), folder / "losses.bin")
    accelerator.free_memory(model, optimizer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    accelerator = Accelerator()
    assert accelerator.is_fsdp2 and accelerator.num_processes == 2, accelerator.state
    for name in sys.argv[1:]:
        run(Path(name), accelerator)
        if accelerator.is_main_process:
            print(f"{name}:{accelerator.num_processes}", flush=True)
    accelerator.end_training()
