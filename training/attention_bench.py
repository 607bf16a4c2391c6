"""What attention costs as the text grows: time and memory of every backend, on this machine.

Each measurement runs in a process of its own, so that its peak of memory is its own. What would take too long or too
much memory, going by the lengths before, is left out.

Shapes: B batch, T tokens, H heads, d head width.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from transformers import AutoModel, LongformerConfig, LongformerModel, ModernBertConfig, ModernBertModel

from triptych import TriptychConfig
from triptych.attention import ALL_ATTENTION_FUNCTIONS, eager_attention_forward
from triptych.layout import Layout
from triptych.linear_attention import linear_attention
from triptych.masks import self_attention_mask
from triptych.training.measuring import device, peak_memory, run_apart, seconds_of, used_memory
from triptych.training.memory import keep_freed_memory
from triptych.training.plots import check_picture, plot_costs
from triptych.training.reporting import follow

# What there is to measure: a backend of softmax attention with its layer type, or a form of linear attention.
SOFTMAX = {
    "eager": ("eager", "full_attention"),
    "sdpa": ("sdpa", "full_attention"),
    "sdpa, window": ("sdpa", "sliding_attention"),
    "banded, window": ("banded", "sliding_attention"),
}
LINEAR = ("linear, sum", "linear, delta")
CONTESTANTS = (*SOFTMAX, *LINEAR)
# Whole layers with windows, which see both ways.
LAYERS = ("layer: banded", "layer: Longformer", "layer: ModernBERT, sdpa")


@dataclass
class Shape:
    """What is measured: forward and backward of one attention, without its projections."""

    is_causal: bool = True
    window: int = 256
    batch_size: int = 1
    heads: int = 8
    head_dim: int = 64
    rounds: int = 3
    threads: int = 0  # 0 is torch's own choice


@dataclass
class Cost:
    """Of one contestant at one length: median seconds, and bytes at the peak beyond what was there before."""

    contestant: str
    length: int
    seconds: float
    peak_bytes: int


def run_attention_benchmark(
    lengths: Iterable[int], shape: Shape, contestants: Iterable[str] = CONTESTANTS, max_seconds: float = 30.0
) -> Iterator[Cost]:
    """Measure each contestant at growing lengths, as far as it comes.

    Args:
        lengths: T.
        max_seconds: a round that may take longer is left out, with all longer texts, and so is what may take half of
            the memory; both are expected to grow as they last did, at first with the square of the length.
    """
    for contestant in contestants:
        done: list[Cost] = []
        for length in sorted(lengths):
            if done and not is_affordable(done[-2:], length, max_seconds):
                break
            done.append(run_apart(measure, contestant, length, shape))
            yield done[-1]


def is_affordable(last: list[Cost], length: int, max_seconds: float) -> bool:
    """Whether a round at `length` may be expected to take at most `max_seconds` and half of the memory.

    Args:
        last: one or two costs of the same contestant, of rising lengths.
    """

    def expected(values: list[float]) -> float:
        power = 2.0
        if len(last) > 1:
            growth, ratio = (math.log(after / before) for before, after in (values, [cost.length for cost in last]))
            power = min(max(growth / ratio, 1.0), 2.0)
        return values[-1] * (length / last[-1].length) ** power

    seconds = expected([cost.seconds for cost in last])
    return seconds <= max_seconds and expected([max(cost.peak_bytes, 1) for cost in last]) <= memory_size() / 2


def memory_size() -> int:
    """Bytes of memory of the device that is measured."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().total


def measure(contestant: str, length: int, shape: Shape) -> Cost:
    """Time one contestant at one length, in a process that has done nothing before.

    As in training, freed memory is kept: the kernel's clearing of new pages would cost more than some contestants do.
    """
    keep_freed_memory()
    if shape.threads:
        torch.set_num_threads(shape.threads)
    size = shape.batch_size, length, shape.heads, shape.head_dim
    states = [torch.randn(size, device=device()).transpose(1, 2).requires_grad_() for _ in range(3)]
    kinds = {**dict.fromkeys(LINEAR, linear_work), **dict.fromkeys(LAYERS, layer_work)}
    work = kinds.get(contestant, softmax_work)(contestant, shape)
    before, times = used_memory(), []
    for _ in range(1 + shape.rounds):  # the first one warms up
        times.append(seconds_of(lambda: work(*states).sum().backward()))
        for tensor in states:
            tensor.grad = None
    return Cost(contestant, length, statistics.median(times[1:]), peak_memory() - before)


Work = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_work(contestant: str, shape: Shape) -> Work:
    """Attention of queries, keys and values [B, H, T, d] through a backend, with the making of its mask."""
    backend, layer_type = SOFTMAX[contestant]
    config = TriptychConfig(
        topology="decoder" if shape.is_causal else "encoder",
        hidden_size=shape.heads * shape.head_dim,
        num_attention_heads=shape.heads,
        num_hidden_layers=1,
        layer_types=[layer_type],
        sliding_window=shape.window,
    )
    config._attn_implementation = backend
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
    module = SimpleNamespace(training=True, is_causal=shape.is_causal, num_key_value_groups=1)

    def work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(query.shape[2], device=query.device)
        layout = Layout(slots, slots[None], batch_size=len(query))
        mask, _ = self_attention_mask(config, layout, 0, shape.is_causal, None, query.dtype)
        scaling = shape.head_dim**-0.5
        return attention(module, query, key, value, mask, scaling=scaling, is_causal=shape.is_causal)[0]

    return work


def linear_work(contestant: str, shape: Shape) -> Work:
    """Linear attention with elu + 1 features, or the gated delta rule."""
    is_delta = contestant == "linear, delta"

    def one_way(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not is_delta:
            return linear_attention(F.elu(query) + 1, F.elu(key) + 1, value)[0]
        gate = value[..., 0]
        return linear_attention(query, F.normalize(key, dim=-1), value, F.logsigmoid(gate), gate.sigmoid())[0]

    def work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if shape.is_causal:
            return one_way(query, key, value)
        flipped = (states.flip(2) for states in (query, key, value))
        return one_way(query, key, value) + one_way(*flipped).flip(2)

    return work


def layer_work(contestant: str, shape: Shape) -> Work:
    """One layer as a model that reads embeddings: the queries. Feed-forwards have 8 D^2 weights, gated or not."""
    width = shape.heads * shape.head_dim
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": shape.heads, "vocab_size": 8, "pad_token_id": 0}
    if contestant == "layer: Longformer":
        config = LongformerConfig(
            **sizes,
            attention_window=[shape.window],
            max_position_embeddings=2**17 + 2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = LongformerModel(config, add_pooling_layer=False)
    elif contestant == "layer: ModernBERT, sdpa":
        tokens = {name: None for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
        config = ModernBertConfig(
            **sizes | tokens | {"intermediate_size": 8 * width // 3},
            layer_types=["sliding_attention"],
            local_attention=shape.window,
            attn_implementation="sdpa",
            max_position_embeddings=2**17,
        )
        model = ModernBertModel(config)
    else:
        config = TriptychConfig(
            **sizes, topology="encoder", sliding_window=shape.window, hidden_act="gelu", hidden_dropout=0.0
        )
        model = AutoModel.from_config(config, attn_implementation="banded")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    model.get_input_embeddings().requires_grad_(False)
    if contestant == "layer: Longformer":  # its table of positions, whose gradient is no part of the layer
        model.embeddings.requires_grad_(False)

    def work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        embeddings = query.transpose(1, 2).flatten(2)
        return model(inputs_embeds=embeddings).last_hidden_state

    return work


def fit_exponents(costs: list[Cost]) -> dict[str, tuple[float, float]]:
    """The powers of the length with which time and memory of each contestant grow, over the longer of its lengths."""
    exponents = {}
    for contestant in dict.fromkeys(cost.contestant for cost in costs):
        own = [cost for cost in costs if cost.contestant == contestant]
        longer = own[len(own) // 2 - 1 :] if len(own) > 3 else own
        if len(longer) > 1:
            lengths = [math.log(cost.length) for cost in longer]
            exponents[contestant] = tuple(
                statistics.linear_regression(lengths, [math.log(value) for value in values]).slope
                for values in ([cost.seconds for cost in longer], [max(cost.peak_bytes, 1) for cost in longer])
            )
    return exponents


def show_attention_benchmark(costs: Iterable[Cost], shape: Shape, picture: Path, json_lines: bool) -> None:
    """Print costs as they come, then a table with exponents, and draw them; or print a JSON line each."""
    check_picture(picture)
    done = follow(
        costs, "starting", lambda cost: f"{cost.contestant}: {cost.length:,} tokens in {cost.seconds:.2f} s", json_lines
    )
    exponents = fit_exponents(done)
    plot_costs(done, exponents, picture)
    if json_lines:
        return
    way = "causal" if shape.is_causal else "both ways"
    what = "layer" if exponents.keys() & set(LAYERS) else "attention"
    title = (
        f"Forward and backward of one {what}, {way}: batch {shape.batch_size}, {shape.heads} heads of "
        f"{shape.head_dim}, window {shape.window}, {shape.threads or torch.get_num_threads()} threads"
    )
    table = Table("tokens", *exponents, title=title)
    for length in sorted({cost.length for cost in done}):
        row = {cost.contestant: cost for cost in done if cost.length == length}
        table.add_row(
            f"{length:,}",
            *(
                f"{row[name].seconds:.3f} s {row[name].peak_bytes / 2**20:,.0f} MiB" if name in row else "-"
                for name in exponents
            ),
        )
    table.add_section()
    table.add_row("exponents", *(f"{seconds:.2f} / {memory:.2f}" for seconds, memory in exponents.values()))
    console = Console()
    console.print(table)
    console.print(f"picture: {picture}")
