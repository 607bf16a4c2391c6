"""Speed beside what people use today: equal weights, equal inputs, equal outputs, the same work in turns.

A time is the median over the rounds; a ratio is the median of the rounds' ratios, so that a machine whose speed drifts
slows both sides alike. Above 1 the family is faster. Every contest runs in a process of its own, and so does each side
whose peak of memory is asked for.

Shapes: B texts, T tokens, D width.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from triptych import TriptychConfig, TriptychForCausalLM, TriptychForMaskedLM, import_model
from triptych.training.errors import UserError
from triptych.training.measuring import device, peak_memory, run_apart, seconds_of
from triptych.training.memory import keep_freed_memory
from triptych.training.plots import check_picture, plot_ratios
from triptych.training.precision import has_bfloat16_products
from triptych.training.reporting import follow

Batch = dict[str, torch.Tensor]
Pair = tuple[nn.Module, nn.Module]  # the family's and the peer's, of equal weights
Work = Callable[[], object]
ALLOCATORS = ("tuned", "default")
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Contest:
    """One kind of work for one pair of models.

    Args:
        task: a key of `TASKS`.
        peer: whose model the other side is.
        pair: makes both models.
        batch: makes what they read.
        dtype: "float32", or "bfloat16" for autocast to it.
        new_tokens: to be written, where that is the task.
    """

    name: str
    task: str
    peer: str
    pair: Callable[[], Pair]
    batch: Callable[[], Batch]
    dtype: str = "float32"
    new_tokens: int = 32

    @property
    def label(self) -> str:
        return f"{self.name}: {self.task}" + ("" if self.dtype == "float32" else f", {self.dtype}")


@dataclass
class Measurement:
    """Of one contest with one setting of the allocator.

    `tokens` are the real ones of a batch (of its targets, where there are sources), or those written in all texts.
    `share_of_peak` is what part of the machine's measured speed of matrix products the family reaches with those that
    its work asks for. Memory is the peak of a process that does the one side's work and nothing else. `difference` is
    the largest between both sides' logits, or the share of written tokens that differ.
    """

    name: str
    task: str
    peer: str
    dtype: str
    allocator: str
    tokens: int
    family_seconds: float
    peer_seconds: float
    ratio: float
    share_of_peak: float
    difference: float
    family_bytes: int | None = None
    peer_bytes: int | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Models: each peer with random weights, and the family with the same


def imported(model_class: type, config: transformers.PreTrainedConfig) -> Callable[[], Pair]:
    """A model of transformers, and itself imported."""

    def pair() -> Pair:
        peer = spread(model_class(config))
        return import_model(peer), peer

    return pair


def spread(model: nn.Module) -> nn.Module:
    """Weights so far apart that the most likely token is never a matter of rounding."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                parameter.normal_(std=0.05)
    return model


BERT = transformers.BertConfig()
MODERNBERT = transformers.ModernBertConfig(
    vocab_size=30522, num_hidden_layers=12, pad_token_id=0, embedding_dropout=0.1, mlp_dropout=0.1,
    attention_dropout=0.1, bos_token_id=None, eos_token_id=None, cls_token_id=1, sep_token_id=2,
)  # fmt: skip
GPT2 = transformers.GPT2Config(eos_token_id=None, bos_token_id=None, pad_token_id=0)
LLAMA = transformers.LlamaConfig(
    hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=3, intermediate_size=2048,
    eos_token_id=None, bos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
T5 = transformers.T5Config(eos_token_id=None, decoder_start_token_id=0)
BART = transformers.BartConfig(
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
       (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))},
    d_model=768, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=2,
)  # fmt: skip
MARIAN = transformers.MarianConfig(  # at the size of Transformer-Tiny (Wu et al. 2021)
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
       (("layers", 4), ("attention_heads", 4), ("ffn_dim", 256))},
    vocab_size=9712, d_model=128, dropout=0.3, activation_function="relu", scale_embedding=True,
    pad_token_id=0, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=1,
)  # fmt: skip


class LanguageModelOfParts(nn.Module):
    """A token table around layers of another library, called as the models of transformers are."""

    def __init__(self, layers: nn.Module, vocab_size: int, width: int, is_causal: bool):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = layers
        self.is_causal = is_causal

    def forward(self, input_ids, attention_mask=None, labels=None, output_logits=None):
        states = self.run(self.embed(input_ids), attention_mask)
        logits = F.linear(states, self.embed.weight)
        loss = None
        if labels is not None:
            given = (logits[:, :-1], labels[:, 1:]) if self.is_causal else (logits, labels)
            loss = F.cross_entropy(given[0].flatten(0, 1), given[1].flatten())
        return SimpleNamespace(loss=loss, logits=logits)

    def run(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.layers(states)


class TorchEncoder(LanguageModelOfParts):
    def run(self, states, attention_mask):
        return self.layers(states, src_key_padding_mask=attention_mask == 0)


SHARED = dict(
    vocab_size=10000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048,
    tie_word_embeddings=True, embedding_norm=False, scale_embedding=False, hidden_dropout=0.0,
)  # fmt: skip


def torch_encoder() -> Pair:
    """torch.nn.TransformerEncoder, post-norm, without positions."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    peer = spread(TorchEncoder(nn.TransformerEncoder(layer, 6), 10000, 512, is_causal=False))
    config = TriptychConfig(
        topology="encoder", **SHARED | {"hidden_dropout": 0.1}, attention_dropout=0.1, activation_dropout=0.1,
        position_embedding_type="none", norm_position="post", hidden_act="relu", norm_eps=1e-5, type_vocab_size=0,
        lm_head_bias=False, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = WithoutHead(TriptychForMaskedLM(config))
    own = model.model.model
    load(own.embed_tokens, weight=peer.embed.weight)
    for mine, theirs in zip(own.layers, peer.layers.layers, strict=True):
        weights, biases = (whole.chunk(3) for whole in (theirs.self_attn.in_proj_weight, theirs.self_attn.in_proj_bias))
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            load(getattr(mine.self_attn, f"{name}_proj"), weight=weight, bias=bias)
        for module, other in (
            (mine.self_attn.o_proj, theirs.self_attn.out_proj),
            (mine.self_attn_norm, theirs.norm1),
            (mine.mlp.up_proj, theirs.linear1),
            (mine.mlp.down_proj, theirs.linear2),
            (mine.mlp_norm, theirs.norm2),
        ):
            load(module, weight=other.weight, bias=other.bias)
    return model, peer


class WithoutHead(nn.Module):
    """A masked language model that compares its hidden states with the token table at once."""

    def __init__(self, model: TriptychForMaskedLM):
        super().__init__()
        model.prediction_head = nn.Identity()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)


def x_transformers_decoder() -> Pair:
    """x-transformers' decoder: pre-norm, rotary positions, no biases."""
    import x_transformers

    layers = x_transformers.Decoder(
        dim=512, depth=6, heads=8, attn_dim_head=64, ff_mult=4, rotary_pos_emb=True, rotary_emb_dim=64,
        attn_flash=True, ff_no_bias=True, verbose=False,
    )  # fmt: skip
    peer = spread(LanguageModelOfParts(layers, 10000, 512, is_causal=True))
    config = TriptychConfig(
        topology="decoder", **SHARED, position_embedding_type="rotary", norm_position="pre", norm_eps=1e-5,
        hidden_act="gelu", attention_bias=False, mlp_bias=False, norm_bias=False,
    )  # fmt: skip
    model = TriptychForCausalLM(config)
    own = model.model

    def gain(norm: nn.Module) -> torch.Tensor:
        return norm.gamma + float(norm.unit_offset)

    load(own.embed_tokens, weight=peer.embed.weight)
    load(own.norm, weight=gain(layers.final_norm))
    # Theirs rotates neighbouring dimensions, ours those that are half a head apart.
    order = torch.arange(512).view(8, 32, 2).transpose(1, 2).flatten()
    for mine, attention, feed_forward in zip(own.layers, layers.layers[::2], layers.layers[1::2], strict=True):
        load(mine.self_attn_norm, weight=gain(attention[0][0]))
        load(mine.mlp_norm, weight=gain(feed_forward[0][0]))
        load(mine.self_attn.q_proj, weight=attention[1].to_q.weight[order])
        load(mine.self_attn.k_proj, weight=attention[1].to_k.weight[order])
        load(mine.self_attn.v_proj, weight=attention[1].to_v.weight)
        load(mine.self_attn.o_proj, weight=attention[1].to_out.weight)
        load(mine.mlp.up_proj, weight=feed_forward[1].ff[0][0].weight)
        load(mine.mlp.down_proj, weight=feed_forward[1].ff[2].weight)
    return model, peer


def compiled_decoder() -> Pair:
    """A decoder under torch.compile, beside itself."""
    config = TriptychConfig(topology="decoder", **SHARED, position_embedding_type="rotary", norm_position="pre")
    model = spread(TriptychForCausalLM(config))
    return torch.compile(copy.deepcopy(model)), model


def load(module: nn.Module, **tensors: torch.Tensor) -> None:
    module.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()})


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def masked(vocab_size: int, texts: int, length: int, fill: float, share: float = 0.15) -> Callable[[], Batch]:
    """Texts [B, T] whose real tokens fill that part of the batch, with labels at a share of them."""

    def batch() -> Batch:
        lengths = torch.full((texts,), length)
        if fill < 1:  # one text is as long as the batch, and the others make up for it
            lengths[1:] = torch.linspace(0.4, 1.6, texts - 1).mul((fill * texts - 1) / (texts - 1) * length).round()
        mask = (torch.arange(length) < lengths[:, None]).long()
        tokens = torch.randint(3, vocab_size, (texts, length)) * mask
        labels = tokens.masked_fill((torch.rand(texts, length) >= share) | (mask == 0), -100)
        return dict(input_ids=tokens, attention_mask=mask, labels=labels)

    return batch


def plain(vocab_size: int, texts: int, length: int) -> Callable[[], Batch]:
    """Texts [B, T] without pads, each token a label."""

    def batch() -> Batch:
        tokens = torch.randint(3, vocab_size, (texts, length))
        return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)

    return batch


def pairs(vocab_size: int, texts: int, length: int) -> Callable[[], Batch]:
    """Sources and targets as a batch of texts of like length has them: up to a tenth is pads."""

    def batch() -> Batch:
        lengths = torch.linspace(0.8, 1, texts).mul(length).round()
        mask = (torch.arange(length) < lengths[:, None]).long()
        tokens, labels = (torch.randint(3, vocab_size, (texts, length)) for _ in range(2))
        labels = labels.masked_fill(mask.flip(0) == 0, -100)
        return dict(input_ids=tokens * mask, attention_mask=mask, labels=labels)

    return batch


CONTESTS = (
    *(
        Contest("Marian, 4 + 4 layers of 128", task, "transformers", imported(transformers.MarianMTModel, MARIAN),
                pairs(9712, 160, 25), dtype)
        for task, dtype in (("training step", "float32"), ("training step", "bfloat16"), ("forward", "float32"))
    ),
    *(
        Contest("Marian, 4 + 4 layers of 128, 1 text", task, "transformers",
                imported(transformers.MarianMTModel, MARIAN), pairs(9712, 1, 24))
        for task in ("greedy decoding", "compiled greedy decoding")
    ),
    Contest("BERT-base, 42 % full", "training step", "transformers", imported(transformers.BertForMaskedLM, BERT),
            masked(30522, 16, 115, 0.42)),
    Contest("BERT-base, full", "training step", "transformers", imported(transformers.BertForMaskedLM, BERT),
            masked(30522, 16, 115, 1.0)),
    Contest("ModernBERT, 12 layers of 768, 42 % full", "training step", "transformers",
            imported(transformers.ModernBertForMaskedLM, MODERNBERT), masked(30522, 16, 115, 0.42)),
    Contest("GPT-2 small, 2 texts of 512", "training step", "transformers",
            imported(transformers.GPT2LMHeadModel, GPT2), plain(50257, 2, 512)),
    *(
        Contest(f"GPT-2 small, {texts} text{'s' * (texts > 1)}", task, "transformers",
                imported(transformers.GPT2LMHeadModel, GPT2), plain(50257, texts, 8))
        for texts, task in ((1, "greedy decoding"), (1, "compiled greedy decoding"), (16, "greedy decoding"))
    ),
    Contest("Llama, 12 layers of 768, 1 text", "greedy decoding", "transformers",
            imported(transformers.LlamaForCausalLM, LLAMA), plain(32000, 1, 8)),
    Contest("Llama, 12 layers of 768", "training step", "transformers",
            imported(transformers.LlamaForCausalLM, LLAMA), plain(32000, 4, 128)),
    *(
        Contest("T5-small, 8 texts", task, "transformers",
                imported(transformers.T5ForConditionalGeneration, T5), pairs(32128, 8, 24))
        for task in ("greedy decoding", "decoding with 5 beams")
    ),
    Contest("T5-small", "training step", "transformers", imported(transformers.T5ForConditionalGeneration, T5),
            pairs(32128, 8, 64)),
    Contest("BART-base", "training step", "transformers",
            imported(transformers.BartForConditionalGeneration, BART), pairs(50265, 8, 64)),
    *(
        Contest("decoder, 6 layers of 512", task, "x-transformers", x_transformers_decoder, plain(10000, 8, 128))
        for task in ("training step", "forward")
    ),
    *(
        Contest("encoder, 6 layers of 512, half full", task, "torch.nn.TransformerEncoder", torch_encoder,
                masked(10000, 16, 128, 0.5))
        for task in ("training step", "forward")
    ),
    *(
        Contest("decoder, 6 layers of 512, compiled", task, "itself, not compiled", compiled_decoder,
                plain(10000, 8, 128))
        for task in ("training step", "forward")
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


def forward(model: nn.Module, batch: Batch, contest: Contest) -> Work:
    inputs = {name: table for name, table in batch.items() if name != "labels"}
    if contest.batch.__qualname__.startswith("pairs"):
        inputs["decoder_input_ids"] = batch["labels"].clamp(min=0)

    @torch.no_grad()
    def work():
        with torch.autocast(device().type, torch.bfloat16, enabled=contest.dtype == "bfloat16"):
            return model.eval()(**inputs).logits

    return work


def training_step(model: nn.Module, batch: Batch, contest: Contest) -> Work:
    """Forward, backward and AdamW, torch's fused one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def work():
        with torch.autocast(device().type, torch.bfloat16, enabled=contest.dtype == "bfloat16"):
            loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work


def decoding(model: nn.Module, batch: Batch, contest: Contest, **settings) -> Work:
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
    settings |= dict(min_new_tokens=contest.new_tokens, max_new_tokens=contest.new_tokens, do_sample=False)

    def work():
        return model.eval().generate(**prompt, **settings)[:, -contest.new_tokens :]

    return work


def beam_decoding(model: nn.Module, batch: Batch, contest: Contest) -> Work:
    return decoding(model, batch, contest, num_beams=5)


def compiled_decoding(model: nn.Module, batch: Batch, contest: Contest) -> Work:
    """With a cache of fixed size, for which generate() compiles the step; on a GPU it becomes a graph there."""
    compile_config = transformers.CompileConfig()
    compile_config._compile_all_devices = True  # on a CPU generate() does not by itself
    return decoding(model, batch, contest, cache_implementation="static", compile_config=compile_config)


TASKS: dict[str, Callable[[nn.Module, Batch, Contest], Work]] = {
    "forward": forward,
    "training step": training_step,
    "greedy decoding": decoding,
    "decoding with 5 beams": beam_decoding,
    "compiled greedy decoding": compiled_decoding,
}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def choose_contests(parts: list[str]) -> list[Contest]:
    """Those whose label has one of the parts of names in it, or all, as far as this machine and its packages go.

    A peer may not be installed, and bfloat16 without products in it would take minutes a step.

    Raises:
        UserError: there is none.
    """
    chosen = [
        contest
        for contest in CONTESTS
        if not parts or any(part.lower() in contest.label.lower() + contest.peer for part in parts)
    ]
    if not chosen:
        raise UserError(f"--only {parts[0]!r} names nothing; there is: {'; '.join(one.label for one in CONTESTS)}")
    chosen = [one for one in chosen if one.peer != "x-transformers" or find_spec("x_transformers")]
    return [one for one in chosen if one.dtype != "bfloat16" or has_bfloat16_products()]


def choose_allocators(name: str) -> tuple[str, ...]:
    if name not in (*ALLOCATORS, "both"):
        raise UserError(f"--allocator is {name!r}, but must be one of {', '.join(ALLOCATORS)}, both")
    return ALLOCATORS if name == "both" else (name,)


def run_benchmarks(
    contests: Iterable[Contest], rounds: int, allocators: Iterable[str] = ALLOCATORS[:1], threads: int = 0
) -> Iterator[Measurement]:
    """Hold each contest with each setting of the allocator, one result after another.

    Args:
        rounds: timed rounds, after one that warms up.
        allocators: of `ALLOCATORS`; "tuned" keeps freed memory, as the command line does.
        threads: of torch; 0 is its own choice.
    """
    for contest in contests:
        for allocator in allocators:
            setting = CONTESTS.index(contest), allocator, threads
            measured = run_apart(hold, *setting, rounds)
            if "decoding" not in contest.task:
                measured.family_bytes, measured.peer_bytes = (
                    run_apart(peak_of_one_side, *setting, side) for side in (0, 1)
                )
            yield measured


def hold(index: int, allocator: str, threads: int, rounds: int) -> Measurement:
    """One contest, in a process that has done nothing before."""
    contest = CONTESTS[index]
    models, batch = prepare(contest, allocator, threads)
    difference = compare_outputs(contest, models, batch)
    works = [TASKS[contest.task](model, batch, contest) for model in models]
    times: list[list[float]] = [[], []]
    for round_number in range(rounds + 1):
        for side in (0, 1) if round_number % 2 else (1, 0):
            times[side].append(seconds_of(works[side]))
    family, peer = (side[1:] for side in times)  # the first round warmed up
    # Products inside a compiled step cannot be counted.
    counted = decoding(models[0], batch, contest) if contest.task.startswith("compiled") else works[0]
    with FlopCounterMode(display=False) as counter:
        counted()
    seconds = statistics.median(family)
    return Measurement(
        name=contest.name,
        task=contest.task,
        peer=contest.peer,
        dtype=contest.dtype,
        allocator=allocator,
        tokens=count_tokens(contest, batch),
        family_seconds=seconds,
        peer_seconds=statistics.median(peer),
        ratio=statistics.median(theirs / ours for ours, theirs in zip(family, peer, strict=True)),
        share_of_peak=counter.get_total_flops() / seconds / peak_speed(getattr(torch, contest.dtype)),
        difference=difference,
    )


def prepare(contest: Contest, allocator: str, threads: int) -> tuple[Pair, Batch]:
    if allocator == "tuned":
        keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    models = tuple(model.to(device()) for model in contest.pair())
    return models, {name: table.to(device()) for name, table in contest.batch().items()}


def peak_of_one_side(index: int, allocator: str, threads: int, side: int) -> int:
    """Bytes at the peak of a process that works twice for one side, after it has built the model."""
    contest = CONTESTS[index]
    models, batch = prepare(contest, allocator, threads)
    model = models[side]
    del models
    work = TASKS[contest.task](model, batch, contest)
    for _ in range(2):
        work()
    return peak_memory()


def compare_outputs(contest: Contest, models: Pair, batch: Batch) -> float:
    """The largest difference of logits at tokens that have labels; of texts that are written, the share that differ."""
    if "decoding" in contest.task:
        ours, theirs = (TASKS[contest.task](model, batch, contest)() for model in models)
        return (ours != theirs).float().mean().item()
    single = replace(contest, dtype="float32")
    ours, theirs = (forward(model, batch, single)()[batch["labels"] != -100] for model in models)
    return (ours - theirs).abs().max().item()


def count_tokens(contest: Contest, batch: Batch) -> int:
    if "decoding" in contest.task:
        return len(batch["input_ids"]) * contest.new_tokens
    if contest.batch.__qualname__.startswith("pairs"):
        return int((batch["labels"] != -100).sum())
    return int(batch["attention_mask"].sum())


def peak_speed(dtype: torch.dtype, size: int = 2048) -> float:
    """Floating-point operations a second of the best of some large matrix products."""
    factors = [torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2)]
    best = min(seconds_of(lambda: factors[0] @ factors[1]) for _ in range(8))
    return 2 * size**3 / best


def show_benchmarks(measurements: Iterable[Measurement], picture: Path, json_lines: bool) -> None:
    """Print measurements, as a table or a JSON line each as they come, and draw the ratios."""
    check_picture(picture)
    done = follow(measurements, "warming up", lambda last: f"after {last.name}, {last.task}", json_lines)
    table = Table(
        "work", "beside", "ours", "theirs", "ratio", "tokens/s", "of peak", "memory", "differ",
        title=f"{torch.get_num_threads()} threads, ratios above 1: ours is faster",
    )  # fmt: skip
    for row in done:
        memory = (
            "" if row.family_bytes is None else f"{row.family_bytes / 2**30:.2f} / {row.peer_bytes / 2**30:.2f} GiB"
        )
        settings = [row.task, *([row.dtype] if row.dtype != "float32" else []), f"allocator {row.allocator}"]
        table.add_row(
            f"{row.name}\n[dim]{', '.join(settings)}[/dim]",
            row.peer,
            *(f"{1000 * seconds:,.0f} ms" for seconds in (row.family_seconds, row.peer_seconds)),
            f"[bold]{row.ratio:.2f}[/bold]",
            f"{row.tokens / row.family_seconds:,.0f}",
            f"{row.share_of_peak:.0%}",
            memory,
            f"{row.difference:.0e}",
        )
    if not json_lines:
        Console().print(table)
    plot_ratios(done, picture)
