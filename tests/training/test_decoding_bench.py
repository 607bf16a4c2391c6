"""The command that measures decoding: a row for each model and context, and the cache's true size."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from triptych import TriptychConfig, TriptychForCausalLM, TriptychForMaskedLM
from triptych.training.decoding_bench import STEPS, run_decoding_benchmark

FIELDS = dict(
    topology="decoder", vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, position_embedding_type="rotary", initializer_range=0.2,
)  # fmt: skip
KINDS = {
    "full": {},
    "window": {"sliding_window": 8},
    "linear": {"layer_types": ["linear_attention"] * 2, "linear_feature_map": "hedgehog"},
}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return {name: TriptychForCausalLM(TriptychConfig(**FIELDS, **fields)).eval() for name, fields in KINDS.items()}


def test_caches_grow_with_the_context_only_where_they_keep_all(models):
    rows = list(run_decoding_benchmark(models, [128, 64]))
    assert [(row.model, row.context) for row in rows] == [(name, length) for name in KINDS for length in (64, 128)]
    size = {(row.model, row.context): row.cache_bytes for row in rows}
    width, layers, both, bytes_each = 16, 2, 2, 4
    for length in (64, 128):
        assert size["full", length] == length * width * layers * both * bytes_each
        assert size["window", length] == 7 * width * layers * both * bytes_each  # the last of 8 is the one that asks
        assert size["linear", length] == 2 * layers * (16 * 9) * bytes_each  # heads of 16 features, 8 values and a sum
    assert all(row.token_seconds > 0 and row.reading_seconds > 0 for row in rows)


def test_the_whole_context_is_read_once(models, monkeypatch):
    lengths = []
    model = models["full"]
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda **inputs: lengths.append(inputs["input_ids"].shape[1]) or forward(**inputs)
    )
    list(run_decoding_benchmark({"full": model}, [64, 128]))
    assert lengths == [64 - STEPS, *[1] * STEPS] * 2


def test_the_command_prints_a_line_for_each(command, models, tmp_path):
    for name in ("full", "linear"):
        models[name].save_pretrained(tmp_path / name)
    code, out, err = command("bench", "decoding", "full", "linear", "--max-context", "128", "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["model"], row["context"]) for row in rows] == [
        (name, length) for name in ("full", "linear") for length in (64, 128)
    ]
    code, out, err = command("bench", "decoding", "linear", "--max-context", "64")
    assert code == 0 and "a token more" in out and "linear" in out, err


def test_what_is_no_decoder_is_refused(command, tmp_path):
    TriptychForMaskedLM(TriptychConfig(**FIELDS | {"topology": "encoder"})).save_pretrained(tmp_path / "encoder")
    for name in ("encoder", "nowhere"):
        code, _, err = command("bench", "decoding", name)
        assert code == 2 and err.startswith(f"triptych: '{name}' cannot be loaded as a decoder"), err


def test_a_decoder_of_another_library_is_refused(command, tmp_path):
    """It would ignore the family's cache, and its tokens would seem to cost nothing."""
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    code, _, err = command("bench", "decoding", "gpt2")
    assert code == 2 and "'gpt2' is GPT2LMHeadModel, not a decoder of this family: use triptych convert first" in err


def test_a_context_beyond_a_table_of_positions_is_refused(command, tmp_path):
    fields = FIELDS | {"position_embedding_type": "learned", "max_position_embeddings": 64}
    TriptychForCausalLM(TriptychConfig(**fields)).save_pretrained(tmp_path / "short")
    code, _, err = command("bench", "decoding", "short", "--max-context", "128")
    assert code == 2 and "triptych: 'short' cannot read 128 tokens: `position_ids` has 111" in err, err
