"""generate(): every strategy and cache, on left-padded batches, equals the uncached run of each prompt by itself."""

import psutil
import pytest
import torch
import transformers
from tiny import tiny_model
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

NEW_TOKENS = 10
PROMPT_LENGTHS = (9, 5, 3)
LOCAL = {"sliding_window": 4, "attention_chunk_size": 5}
MIXED = {**LOCAL, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "chunked_attention"]}
DECODERS = {
    "sinusoidal": {},
    "learned": {"position_embedding_type": "learned"},
    "none": {"position_embedding_type": "none"},
    "relative": {"position_embedding_type": "relative"},
    "alibi_sliding": {"position_embedding_type": "alibi", "sliding_window": 4},
    "rotary_grouped_mixed": {"position_embedding_type": "rotary", "num_key_value_heads": 2, **MIXED},
    "shared_layers": {"position_embedding_type": "rotary", "share_layers": True, "norm_position": "pre"},
}
PAIRS = {
    "sinusoidal": {},
    "relative_pre": {"position_embedding_type": "relative", "norm_position": "pre"},
    "rotary_mixed": {"position_embedding_type": "rotary", **MIXED},
    "alibi": {"position_embedding_type": "alibi"},
}
STRATEGIES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static-beam": {"cache_implementation": "static", "disable_compile": True, "num_beams": 3},
}
MODELS = [pytest.param("decoder", mix, id=f"decoder-{name}") for name, mix in DECODERS.items()]
MODELS += [pytest.param("encoder_decoder", mix, id=f"pair-{name}") for name, mix in PAIRS.items()]


def build(topology, changes):
    """A tiny model whose next tokens vary, and which never stops early."""
    model = tiny_model(topology, tie_word_embeddings=False, **changes)
    model.generation_config.eos_token_id = None
    return model


def prompts():
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 97, (length,), generator=generator) for length in PROMPT_LENGTHS]
    input_ids = torch.zeros(len(rows), max(PROMPT_LENGTHS), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        input_ids[index, -len(row) :] = row
        attention_mask[index, -len(row) :] = 1
    return rows, {"input_ids": input_ids, "attention_mask": attention_mask}


def new_tokens(model, input_ids, attention_mask=None, **kwargs):
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    # Random models soon repeat themselves, which would hide most faults.
    kwargs = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.5, **kwargs}
    return model.generate(input_ids, attention_mask=attention_mask, **kwargs)[:, -NEW_TOKENS:].tolist()


def one_by_one(model, rows, **kwargs):
    return [new_tokens(model, row[None], **kwargs)[0] for row in rows]


@pytest.fixture(scope="module")
def plain_runs():
    """Greedy and beam references by model, computed once."""
    known = {}

    def get(topology, changes, num_beams):
        key = (topology, str(changes), num_beams)
        if key not in known:
            known[key] = one_by_one(build(topology, changes), prompts()[0], use_cache=False, num_beams=num_beams)
        return known[key]

    return get


@pytest.mark.parametrize("topology, changes", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_padded_batch_equals_plain_runs(plain_runs, topology, changes, strategy):
    """Left padding shifts positions."""
    expected = plain_runs(topology, changes, strategy.get("num_beams", 1))
    assert len({token for row in expected for token in row}) > 4, "a reference that repeats itself tests nothing"
    _, batch = prompts()
    assert new_tokens(build(topology, changes), **batch, **strategy) == expected


@pytest.mark.parametrize("changes", DECODERS.values(), ids=DECODERS)
def test_chunked_prefill_equals_plain_runs(plain_runs, changes):
    """A chunk of queries against longer keys is misaligned."""
    _, batch = prompts()
    assert new_tokens(build("decoder", changes), **batch, prefill_chunk_size=4) == plain_runs("decoder", changes, 1)


@pytest.mark.parametrize("topology, changes", MODELS)
def test_assisted_and_prompt_lookup_equal_plain_runs(plain_runs, topology, changes):
    model, assistant = build(topology, changes), build(topology, changes)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    expected = plain_runs(topology, changes, 1)
    rows, _ = prompts()
    assert one_by_one(model, rows, assistant_model=assistant) == expected
    assert one_by_one(model, rows, prompt_lookup_num_tokens=3) == expected


@pytest.mark.parametrize("topology, changes", MODELS)
def test_sampling_draws_alike_with_and_without_cache(topology, changes):
    model = build(topology, changes)
    _, batch = prompts()
    draws = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        draws.append(new_tokens(model, **batch, do_sample=True, top_k=20, temperature=0.8, use_cache=use_cache))
    assert draws[0] == draws[1]


@pytest.mark.parametrize("use", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}])
@pytest.mark.parametrize("changes", [DECODERS["sinusoidal"], DECODERS["relative"], DECODERS["rotary_grouped_mixed"]])
def test_prefix_is_read_both_ways_in_generation(changes, use):
    model = build("decoder", changes)
    rows, batch = prompts()
    lengths = [4, 5, 2]
    num_beams = use.get("num_beams", 1)
    expected = [
        new_tokens(model, row[None], prefix_length=torch.tensor([length]), use_cache=False, num_beams=num_beams)[0]
        for row, length in zip(rows, lengths, strict=True)
    ]
    assert new_tokens(model, **batch, prefix_length=torch.tensor(lengths), **use) == expected
    assert expected != one_by_one(model, rows, use_cache=False, num_beams=num_beams)


@pytest.mark.parametrize(
    "changes", [DECODERS["sinusoidal"], DECODERS["rotary_grouped_mixed"], DECODERS["shared_layers"]]
)
def test_continuous_batching_equals_plain_runs(changes):
    if "chunked_attention" in changes.get("layer_types", ()):
        # transformers' paged cache has allocators for full and sliding layers only.
        changes = {**changes, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    model = build("decoder", changes)
    rows, _ = prompts()
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    # Left to itself the paged cache takes most of the machine's free memory.
    memory = ContinuousBatchingConfig(num_blocks=16, block_size=32, max_batch_tokens=64)
    answers = model.generate_batch(
        inputs=[row.tolist() for row in rows], generation_config=settings, continuous_batching_config=memory
    )
    expected = one_by_one(model, rows, use_cache=False, repetition_penalty=1.0)
    assert [answer.generated_tokens for answer in answers.values()] == expected


@pytest.mark.slow
@pytest.mark.parametrize("topology, changes", MODELS)
def test_compiled_static_cache_equals_plain_runs(plain_runs, topology, changes):
    """Masks break compiled graphs; static-cache compiled greedy = dynamic."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = CompileConfig(fullgraph=True)
    settings._compile_all_devices = True  # transformers compiles on accelerators only, unless told otherwise
    _, batch = prompts()
    model = build(topology, changes)
    tokens = new_tokens(model, **batch, cache_implementation="static", compile_config=settings)
    assert tokens == plain_runs(topology, changes, 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_window_caches_never_exceed_their_window():
    model = build("decoder", DECODERS["rotary_grouped_mixed"])
    cache = transformers.DynamicCache(config=model.config)
    model.generate(torch.arange(3, 33)[None], cache=cache, max_new_tokens=10, do_sample=False)
    lengths = [layer.keys.shape[-2] for layer in cache.layers]
    assert lengths[0] == LOCAL["sliding_window"] - 1 and lengths[2] == LOCAL["attention_chunk_size"] - 1
    assert lengths[1] == 39


@pytest.mark.slow
def test_a_hybrid_decoder_writes_20_000_tokens_in_bounded_memory():
    """Its caches are as large at the end as at the beginning, and its last token is that of one pass over all."""
    length, window = 20_000, 32
    types = ["linear_attention", "sliding_attention"] * 2
    fields = {"linear_feature_map": "unit", "linear_decay": "gated", "linear_update": "delta", "linear_conv_kernel": 4}
    model = build(
        "decoder",
        {
            "num_hidden_layers": 4,
            "layer_types": types,
            "sliding_window": window,
            "position_embedding_type": "rotary",
            "norm_position": "pre",
            **fields,
        },
    )
    cache = transformers.DynamicCache(config=model.config)
    process, sizes, memory = psutil.Process(), set(), []

    def watch(input_ids, scores):
        watch.last = scores
        if input_ids.shape[1] > window:
            sizes.add(tuple(layer.keys.shape + layer.values.shape for layer in cache.layers))
        if input_ids.shape[1] % 2_000 == 0:
            memory.append(process.memory_info().rss)
        return scores

    prompt = torch.arange(3, 11)[None]
    tokens = model.generate(prompt, cache=cache, do_sample=False, max_new_tokens=length, logits_processor=[watch])
    assert tokens.shape[1] == len(prompt[0]) + length
    assert len(sizes) == 1
    for layer, kind in zip(cache.layers, types, strict=True):
        if kind == "sliding_attention":
            assert layer.keys.shape[2] == window - 1
    assert memory[-1] - memory[1] < 64 * 2**20
    model.set_attn_implementation("banded")
    with torch.no_grad():
        expected = model(tokens[:, :-1], logits_to_keep=1).logits[:, -1]
    torch.testing.assert_close(watch.last, expected, rtol=1e-3, atol=1e-3)


def test_encoder_keys_are_projected_once():
    model = build("encoder_decoder", PAIRS["rotary_mixed"])
    calls = []
    model.model.decoder.layers[0].cross_attn.k_proj.register_forward_hook(lambda *args: calls.append(1))
    _, batch = prompts()
    new_tokens(model, **batch)
    assert len(calls) == 1
