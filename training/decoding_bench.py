"""What the next token costs behind a long text: time and cache of trained models against the length of the context.

A cache of all keys grows with the text, one of a window or of a state does not.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from rich.table import Column, Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from triptych import TriptychForCausalLM
from triptych.training.errors import BROKEN_FILES, UserError, as_user_error
from triptych.training.reporting import follow

CHUNK = 1024  # tokens of a context that are read in one forward
STEPS = 16  # tokens that are written behind each context


@dataclass
class Decoding:
    """Of one model behind one context: seconds to read it, median seconds for a token more, bytes of the cache."""

    model: str
    context: int
    reading_seconds: float
    token_seconds: float
    cache_bytes: int


def run_decoding_benchmark(
    models: dict[str, PreTrainedModel], contexts: Iterable[int], seed: int = 0
) -> Iterator[Decoding]:
    """Let every model read random tokens and write behind each of the `contexts`, in one text that goes on growing.

    Raises:
        UserError: a context is longer than a model can read.
    """
    contexts = sorted(contexts)
    for name, model in models.items():
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(model.config.vocab_size, (1, contexts[-1]), generator=generator).to(model.device)
        cache, done, reading = None, 0, 0.0
        for context in contexts:
            with as_user_error(f"'{name}' cannot read {context:,} tokens"):
                while done < context - STEPS:
                    chunk = tokens[:, done : min(done + CHUNK, context - STEPS)]
                    cache, seconds = step(model, chunk, cache)
                    reading += seconds
                    done += chunk.shape[1]
                times = []
                for done in range(context - STEPS, context):
                    cache, seconds = step(model, tokens[:, done : done + 1], cache)
                    times.append(seconds)
            done = context
            yield Decoding(name, context, reading, statistics.median(times), cache_size(cache))


def load_decoder(name: str) -> PreTrainedModel:
    """Load a language model from a folder or the Hub, onto the device of this process.

    Raises:
        UserError: there is no such model, or it is no decoder of the family.
    """
    with as_user_error(f"'{name}' cannot be loaded as a decoder", *BROKEN_FILES):
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
    if not isinstance(model, TriptychForCausalLM):
        raise UserError(f"'{name}' is {type(model).__name__}, not a decoder of this family: use triptych convert first")
    return model.to(PartialState().device).eval()


@torch.no_grad()
def step(model: PreTrainedModel, tokens: torch.Tensor, cache: Any) -> tuple[Any, float]:
    """The cache after `tokens` [1, T] more, and the seconds that they took."""
    started = time.perf_counter()
    cache = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).cache
    if tokens.device.type == "cuda":
        torch.cuda.synchronize()
    return cache, time.perf_counter() - started


def cache_size(cache: Any) -> int:
    """Bytes of keys and values, or of what stands in their place; layers without cross-attention keep none of it."""
    kept = (states for layer in cache.layers for states in (layer.keys, layer.values))
    return sum(states.nbytes for states in kept if states is not None)


def show_decoding_benchmark(costs: Iterable[Decoding], json_lines: bool) -> None:
    """Print a table with a row for each context and model; or a JSON line each, as they come."""
    table = Table(
        "context",
        Column("model", overflow="fold"),
        *("reading it", "a token more", "cache"),
        title=f"{torch.get_num_threads()} threads",
    )
    for cost in follow(costs, "reading", lambda done: f"{done.model}: {done.context:,} tokens", json_lines):
        table.add_row(
            f"{cost.context:,}",
            cost.model,
            f"{cost.reading_seconds:.2f} s",
            f"{1000 * cost.token_seconds:.2f} ms",
            f"{cost.cache_bytes / 2**20:,.2f} MiB",
        )
    if not json_lines:
        Console().print(table)
