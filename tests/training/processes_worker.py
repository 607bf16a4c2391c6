"""Run by test_processes.py under `accelerate launch`: trains one recipe after another, in the same processes.

Its arguments are the engine and the recipes' files. FSDP2 on CPUs needs one thing that accelerate does not offer: a
process group of gloo that does not count as "CPU only".
"""

import sys

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from triptych.training import run
from triptych.training.recipe import load_recipe


def main(engine: str, *recipes: str) -> None:
    torch.set_num_threads(1)
    if engine == "FSDP":
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    # A training ends the process group; the next one would not find the other process by the same port.
    PartialState.destroy_process_group = lambda self, group=None: None
    run.plot_losses = lambda *_: None  # takes longer than the training
    for recipe in recipes:
        run.train(load_recipe(recipe))
        AcceleratorState._reset_state(reset_partial_state=True)  # or the next accelerator would take it over
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
