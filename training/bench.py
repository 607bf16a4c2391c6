"""Speed beside transformers' own models of the same shape: the same work in one run, taken in turns.

A time is the median over the rounds; a ratio is the median of the rounds' ratios, so that a machine whose speed drifts
slows both sides alike. Above 1 the family is faster.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from triptych import TriptychConfig

WIDTH = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
VOCABULARY = 8000


@dataclass
class Measurement:
    """Median seconds of one task for both sides, and the median ratio peer / family."""

    shape: str
    task: str
    family: float
    peer: float
    ratio: float


def encoder_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """BERT's shape with a masked language model's head."""
    ours = TriptychConfig.from_preset("bert_base", vocab_size=VOCABULARY, intermediate_size=1024, **WIDTH)
    peer = transformers.BertConfig(vocab_size=VOCABULARY, intermediate_size=1024, **WIDTH)
    return tuple(transformers.AutoModelForMaskedLM.from_config(config) for config in (ours, peer))


def decoder_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Llama's shape, two key/value heads."""
    shape = {**WIDTH, "vocab_size": VOCABULARY, "intermediate_size": 704, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    ours = TriptychConfig.from_preset("llama_1b", **shape, **special, head_dim=None, rope_parameters=rope)
    peer = transformers.LlamaConfig(**shape, **special, rope_parameters=rope, tie_word_embeddings=True)
    return tuple(transformers.AutoModelForCausalLM.from_config(config) for config in (ours, peer))


def encoder_decoder_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Marian at the size of Transformer-Tiny (Wu et al. 2021)."""
    ours = TriptychConfig.from_preset("transformer_tiny", eos_token_id=None, attention_bias=True)
    peer = transformers.MarianConfig(
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
           (("layers", 4), ("attention_heads", 4), ("ffn_dim", 256))},
        vocab_size=10000, d_model=128, dropout=0.3, activation_function="relu", scale_embedding=True,
        pad_token_id=0, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    return tuple(transformers.AutoModelForSeq2SeqLM.from_config(config) for config in (ours, peer))


SHAPES: dict[str, Callable[[], tuple[PreTrainedModel, PreTrainedModel]]] = {
    "BERT, 4 layers of 256": encoder_pair,
    "Llama, 4 layers of 256": decoder_pair,
    "Marian, 4 + 4 layers of 128": encoder_decoder_pair,
}


def run_benchmarks(rounds: int, batch_size: int = 16, length: int = 64) -> Iterator[Measurement]:
    """Measure forward, training step and greedy decoding of every shape, one result after another.

    Args:
        rounds: timed rounds, after one that warms up.
        batch_size, length: of the batches, in texts and tokens; so many tokens are decoded, too.
    """
    for shape, build in SHAPES.items():
        pair = build()
        sizes = [model.num_parameters(only_trainable=True) for model in pair]
        assert abs(sizes[0] / sizes[1] - 1) < 0.01, f"{shape}: {sizes} parameters are unequal work"
        tokens = torch.randint(3, pair[0].config.vocab_size, (batch_size, length))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        tasks = {"forward": forward, "training step": training_step}
        if pair[0].can_generate():
            tasks["greedy decoding"] = greedy_decoding
        for task, work in tasks.items():
            yield compare(shape, task, [work(model, batch) for model in pair], rounds)


def forward(model: nn.Module, batch: dict) -> Callable[[], None]:
    def work():
        with torch.no_grad():
            model.eval()(**batch)

    return work


def training_step(model: nn.Module, batch: dict) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def work():
        model.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def greedy_decoding(model: PreTrainedModel, batch: dict) -> Callable[[], None]:
    new_tokens = batch["input_ids"].shape[1]
    prompt = {name: batch[name][:, :8] for name in ("input_ids", "attention_mask")}

    def work():
        model.eval().generate(**prompt, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)

    return work


def compare(shape: str, task: str, works: list[Callable[[], None]], rounds: int) -> Measurement:
    """Run the family's and the peer's work in turns, first one side first, then the other."""
    times = [[], []]
    for round_number in range(rounds + 1):
        for side in (0, 1) if round_number % 2 else (1, 0):
            started = time.perf_counter()
            works[side]()
            times[side].append(time.perf_counter() - started)
    family, peer = (side[1:] for side in times)  # the first round warmed up
    ratio = statistics.median(theirs / ours for ours, theirs in zip(family, peer, strict=True))
    return Measurement(shape, task, statistics.median(family), statistics.median(peer), ratio)


def show_benchmarks(measurements: Iterable[Measurement], json_lines: bool):
    """Print measurements as they come: a table that grows, or a JSON line each."""
    table = Table(
        "shape", "task", "family", "transformers", "ratio", title=f"{torch.get_num_threads()} threads, float32"
    )
    console = Console()
    with console.status("warming up") as status:
        for measured in measurements:
            if json_lines:
                print(json.dumps(asdict(measured)), flush=True)
                continue
            status.update(f"after {measured.shape}, {measured.task}")
            times = [f"{1000 * seconds:,.0f} ms" for seconds in (measured.family, measured.peer)]
            table.add_row(measured.shape, measured.task, *times, f"{measured.ratio:.2f}")
    if not json_lines:
        console.print(table)
