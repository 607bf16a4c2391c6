"""Run by test_ecosystem.py under torchrun: loads each folder sharded by `tp_size` or `fsdp_size`, compares logits, and
prints `folder:processes`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import triptych

mode, *folders = sys.argv[1:]
dist.init_process_group("gloo")
for folder in folders:
    batch, expected = torch.load(Path(folder) / "example.bin")
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(triptych, config.architectures[0])
    model = model_class.from_pretrained(folder, distributed_config=DistributedConfig(**{mode: 2})).eval()
    is_sharded = [hasattr(parameter, "placements") for parameter in model.parameters()]
    assert any(is_sharded), f"{folder}: nothing is sharded"
    with torch.no_grad():
        logits = model(**batch).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    assert torch.allclose(logits, expected, atol=1e-5), (folder, (logits - expected).abs().max())
    if dist.get_rank() == 0:
        print(f"{folder}:{dist.get_world_size()}", flush=True)
dist.destroy_process_group()
