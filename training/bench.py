"""Speed beside transformers' own models of equal weights: the same work in one run, taken in turns.

A time is the median over the rounds; a ratio is the median of the rounds' ratios, so that a machine whose speed drifts
slows both sides alike. Above 1 the family is faster.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from triptych import import_model
from triptych.training.reporting import follow


@dataclass
class Measurement:
    """Median seconds of one task for both sides, and the median ratio peer / family."""

    shape: str
    task: str
    family: float
    peer: float
    ratio: float


def bert_base() -> PreTrainedModel:
    return transformers.BertForMaskedLM(transformers.BertConfig())


def gpt2_small() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(eos_token_id=None, pad_token_id=0))


def llama() -> PreTrainedModel:
    """Llama's layers at the size of GPT-2 small, four query heads to a key/value head."""
    config = transformers.LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=3, intermediate_size=2048,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5_small() -> PreTrainedModel:
    config = transformers.T5Config(eos_token_id=None, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def marian_tiny() -> PreTrainedModel:
    """Marian at the size of Transformer-Tiny (Wu et al. 2021)."""
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
             (("layers", 4), ("attention_heads", 4), ("ffn_dim", 256))}  # fmt: skip
    config = transformers.MarianConfig(
        **sides, vocab_size=10000, d_model=128, dropout=0.3, activation_function="relu", scale_embedding=True,
        pad_token_id=0, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


# Models of transformers; the family's side is each of them imported, so that weights are equal, too.
SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "BERT-base": bert_base,
    "GPT-2 small": gpt2_small,
    "Llama, 12 layers of 768": llama,
    "T5-small": t5_small,
    "Marian, 4 + 4 layers of 128": marian_tiny,
}


def run_benchmarks(
    rounds: int, batch_size: int = 8, length: int = 128, shapes: Iterable[str] = tuple(SHAPES)
) -> Iterator[Measurement]:
    """Measure forward, training step and greedy decoding of every shape, one result after another.

    Args:
        rounds: timed rounds, after one that warms up.
        batch_size, length: of the batches, in texts and tokens; a quarter as many tokens are decoded.
        shapes: names of `SHAPES`.
    """
    for shape in shapes:
        peer = SHAPES[shape]()
        pair = import_model(peer), peer
        tokens = torch.randint(3, peer.config.vocab_size, (batch_size, length))
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
        with torch.no_grad():
            ours, theirs = (model.eval()(**batch).logits for model in pair)
        assert (ours - theirs).abs().max() < 1e-3, f"{shape}: the models are not the same"
        tasks = {"forward": forward, "training step": training_step}
        if peer.can_generate():
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
    new_tokens = batch["input_ids"].shape[1] // 4
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
    for measured in follow(measurements, "warming up", lambda done: f"after {done.shape}, {done.task}", json_lines):
        times = [f"{1000 * seconds:,.0f} ms" for seconds in (measured.family, measured.peer)]
        table.add_row(measured.shape, measured.task, *times, f"{measured.ratio:.2f}")
    if not json_lines:
        Console().print(table)
