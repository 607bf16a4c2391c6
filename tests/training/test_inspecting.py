"""The command `inspect`: its counts against torch's own, its maps against the model's, and a page that stands alone."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from triptych import TriptychConfig, TriptychForCausalLM, TriptychForConditionalGeneration, TriptychForMaskedLM
from triptych.configs import preset_names
from triptych.training.accounting import account, seen_keys
from triptych.training.attention_maps import read_attention
from triptych.training.decoding_bench import cache_size
from triptych.training.describing import inspect_model
from triptych.training.inspecting import build_preset, choose_length, show_inspection
from triptych.training.position_views import view_positions
from triptych.training.tokenization import train_tokenizer

MODELS = {
    "encoder": TriptychForMaskedLM,
    "decoder": TriptychForCausalLM,
    "encoder_decoder": TriptychForConditionalGeneration,
}
TINY = dict(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    initializer_range=0.2, hidden_dropout=0.0,
)  # fmt: skip
LENGTH = 64  # a whole chunk of linear attention
SHAPES = {
    "plain": {},
    "grouped": dict(num_key_value_heads=2, mlp_type="gated", tie_word_embeddings=False),
    "wide heads": dict(head_dim=16, position_embedding_type="relative"),
    "shared layers": dict(share_layers=True, num_hidden_layers=3),
    "factorised": dict(embedding_size=16, position_embedding_type="learned"),
    "linear": dict(layer_types=["linear_attention", "full_attention"]),
    "hedgehog": dict(layer_types=["linear_attention"] * 2, linear_feature_map="hedgehog"),
    "delta rule": dict(
        layer_types=["linear_attention"] * 2,
        linear_feature_map="unit",
        linear_decay="gated",
        linear_update="delta",
        linear_conv_kernel=3,
        linear_output_gate=True,
    ),
}
LAYERS = {
    "full": {},
    "sliding": {"sliding_window": 4},
    "chunked": {"attention_chunk_size": 5},
    "global": {"sliding_window": 4, "num_global_tokens": 2},
    "sparse": {"sliding_window": 2, "num_random_blocks": 1, "random_block_size": 2},
    "dilated": {"sliding_window": 3, "attention_dilation": [2, 3]},
}
WORDS = "the cat sat on a mat $a_$ <b> </script><script>alert(1)</script> {{data}}"


def tiny_model(topology: str, **changes) -> PreTrainedModel:
    """A random language model, with the backend that gives attention weights."""
    config = TriptychConfig(topology=topology, **{**TINY, **changes})
    return MODELS[topology]._from_config(config, attn_implementation="eager").eval()


def batch_of(topology: str, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (1, length))
    return dict(input_ids=ids) | (dict(decoder_input_ids=ids) if topology == "encoder_decoder" else {})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("topology", MODELS)
def test_flops_are_those_that_torch_counts(topology, shape):
    model = tiny_model(topology, **SHAPES[shape])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch_of(topology), use_cache=False)
    assert sum(account(model, LENGTH).flops.values()) * LENGTH == counter.get_total_flops()


@pytest.mark.parametrize("topology", MODELS)
def test_a_backward_pass_takes_two_products_for_each(topology):
    model = tiny_model(topology, num_key_value_heads=2).train()
    with FlopCounterMode(display=False) as counter:
        model(**batch_of(topology), use_cache=False).logits.sum().backward()
    assert 3 * sum(account(model, LENGTH).flops.values()) * LENGTH == counter.get_total_flops()


def test_a_recurrence_costs_its_projections_and_keeps_a_state():
    """torch's counter does not look into its recurrences: an LSTM has four gates, a GRU three, each of width 32."""
    changes = dict(layer_types=["lstm", "gru"], norm_position="none", mlp_type="none", position_embedding_type="none")
    model = tiny_model("decoder", **changes)
    counted = account(model, LENGTH)
    assert counted.flops == {"decoder": 2 * ((4 + 3) * (32 * 32 + 32 * 32) + 97 * 32)}
    assert {part.name for part in counted.parts} == {"embeddings", "recurrence"}
    assert counted.cache.state == cache_size(model(torch.ones(1, 5, dtype=torch.long), use_cache=True).cache)


def test_linear_cross_attention_costs_the_source_more_and_the_target_less():
    model = tiny_model("encoder_decoder", decoder=dict(linear_cross_attention=True))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**batch_of("encoder_decoder"), use_cache=False)
    assert sum(account(model, LENGTH).flops.values()) * LENGTH == counter.get_total_flops()


def test_a_token_behind_a_window_costs_what_a_step_of_decoding_does():
    """In a window, the counter sees all pairs of a whole text; but in a step only the keys that the cache holds."""
    model = tiny_model("decoder", sliding_window=6)
    tokens = torch.randint(3, 97, (1, LENGTH))
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :-1]).cache
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens[:, -1:], cache=cache)
    assert account(model, LENGTH).flops["decoder"] == counter.get_total_flops()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
def test_a_layer_sees_the_keys_that_its_weights_are_of(topology, layers):
    model = tiny_model(topology, **LAYERS[layers])
    weights = model(**batch_of(topology), output_attentions=True).attentions
    query = LENGTH - 1 if topology == "decoder" else LENGTH // 2
    for layer_idx, layer in enumerate(weights):
        assert seen_keys(model.config, layer_idx, LENGTH) == int((layer[0, 0, query] > 0).sum())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
        LAYERS["chunked"],
        LAYERS["global"],
        SHAPES["hedgehog"],
        SHAPES["delta rule"],
    ],
)
def test_the_cache_is_as_large_as_it_gets(changes):
    model = tiny_model("decoder", **changes)
    with torch.no_grad():
        cache = model(**batch_of("decoder")).cache
    counted = account(model, LENGTH).cache
    assert counted.token * LENGTH + counted.window + counted.state == cache_size(cache)


@pytest.mark.parametrize("decoder", [{}, {"cross_attention_layers": [1]}])
def test_the_cache_of_a_source(decoder):
    model = tiny_model("encoder_decoder", num_key_value_heads=2, decoder=decoder)
    with torch.no_grad():
        cache = model(**batch_of("encoder_decoder")).cache
    assert account(model, LENGTH).cache.source_token * LENGTH == cache_size(cache.cross_attention_cache)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("topology", MODELS)
def test_every_parameter_is_counted_once_in_its_part(topology, shape):
    model = tiny_model(topology, **SHAPES[shape])
    counted = account(model, LENGTH)
    assert sum(part.parameters for part in counted.parts) == counted.parameters
    assert counted.parameters == sum(parameter.numel() for parameter in model.parameters())
    for part, fragment in (("self-attention", "self_attn."), ("cross-attention", "cross_attn."), ("norms", "norm.")):
        named = {
            name: parameter.numel()
            for name, parameter in model.named_parameters()
            if fragment in name and ("norm." in name) == (part == "norms") and "prediction_head" not in name
        }
        assert sum(named.values()) == sum(one.parameters for one in counted.parts if one.name == part), part
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied == any(sentence.startswith("lm_head.weight is") for sentence in counted.tied)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary", "relative", "alibi", "none"])
def test_positions_are_drawn_as_the_model_has_them(kind):
    """Cosines of position vectors by hand; of distances, what is added to a score or left of one."""
    model = tiny_model("decoder", position_embedding_type=kind)
    views = view_positions(model)
    if kind == "none":
        assert not views
        return
    (view,) = views
    if kind in ("sinusoidal", "learned"):
        angles = np.arange(128)[:, None] / 10000 ** (np.arange(0, 32, 2) / 32)
        vectors = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)
        if kind == "learned":
            vectors = model.model.embed_positions.weight.detach().numpy()[:128]
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(view.similarity, vectors @ vectors.T, atol=1e-5)
        return
    for head, (name, values) in enumerate(view.curves.items()):
        if kind == "rotary":
            angles = np.arange(257)[:, None] / 10000 ** (np.arange(0, 8, 2) / 8)
            expected = np.cos(angles).mean(1)
        elif kind == "alibi":
            expected = 2.0 ** (-2 * (head + 1)) * view.distances.numpy()
        else:
            buckets = [min(-distance, 15) for distance in view.distances.tolist() if distance > -16]
            expected = model.model.relative_bias.relative_attention_bias.weight[buckets, head].detach().numpy()
            values = values[-len(buckets) :]
        np.testing.assert_allclose(values, expected, atol=1e-5, err_msg=name)


def test_presets_have_the_sizes_of_their_papers():
    """BERT has 110 million parameters (Devlin et al. 2019), the base and big models of 2017 65 and 213 million."""
    sizes = {"bert_base": 110e6, "transformer_base": 65e6, "transformer_big": 213e6, "gpt2_small": 124e6}
    for name, size in sizes.items():
        assert account(build_preset(name), LENGTH).parameters == pytest.approx(size, rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# The command


class Page(HTMLParser):
    """Whether a page's elements close in order, what they are, and the data that it carries."""

    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.data, self.text = [], [], [], [], "", ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        self.is_data = attributes.get("type") == "application/json"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"] and self.is_data:
            self.data += data
        elif self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def unpacked(maps: dict, layer_idx: int) -> np.ndarray:
    """Weights [H, T, S] as the page's script reads them."""
    units = np.frombuffer(zlib.decompress(base64.b64decode(maps["layers"][layer_idx])), "<u2")
    return units.reshape(-1, len(maps["queries"]), len(maps["keys"])) / 65535


@pytest.fixture
def saved(tmp_path):
    """Saves a tiny model and a tokenizer of words, and returns where."""

    def save(topology: str, **changes):
        tokenizer = train_tokenizer([WORDS], "word", 50, topology)
        model = tiny_model(topology, vocab_size=len(tokenizer), **changes)
        model.save_pretrained(tmp_path / topology)
        tokenizer.save_pretrained(tmp_path / topology)
        return tmp_path / topology

    return save


def test_the_page_holds_every_head_and_needs_nothing_else(command, saved, tmp_path):
    folder = saved("encoder_decoder", position_embedding_type="relative")
    rows = [{"step": step, "loss": 4.0 / step, "validation_loss": 4.0 / step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = command("inspect", folder, "--text", WORDS, "--target", "the mat")
    assert code == 0, err
    assert "inspection/index.html" in out and "cross-attention" in out

    text = (tmp_path / "inspection/index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {"layers", "attention", "parameters", "costs", "positions", "training"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert page.tags.count("script") == 2

    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(WORDS, return_tensors="pt")
    target = tokenizer("the mat", return_tensors="pt")["input_ids"]
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    decoder_input_ids = torch.cat((start, target[:, :-1]), dim=1)
    outputs = model(**inputs, decoder_input_ids=decoder_input_ids, output_attentions=True)
    kinds = json.loads(page.data)
    assert [maps["kind"] for maps in kinds] == ["encoder", "decoder", "cross-attention"]
    attentions = outputs.encoder_attentions, outputs.decoder_attentions, outputs.cross_attentions
    for maps, expected in zip(kinds, attentions, strict=True):
        for layer_idx, weights in enumerate(expected):
            drawn = unpacked(maps, layer_idx)
            np.testing.assert_allclose(drawn, weights[0].detach(), atol=1e-5)
            np.testing.assert_allclose(drawn.sum(-1), 1, atol=1e-3)
            assert (tmp_path / f"inspection/maps/{maps['kind']}_{layer_idx + 1}.png").is_file()
    assert kinds[2]["keys"][-1] == kinds[2]["queries"][-1] == "</s>"
    assert kinds[2]["queries"][:2] == kinds[1]["queries"][1:] == ["the", "mat"]


def test_tokens_and_names_cannot_write_into_the_page(command, saved, tmp_path):
    folder = saved("encoder").rename(tmp_path / "<script>alert(2)<")
    code, _, err = command("inspect", folder, "--text", WORDS)
    assert code == 0, err
    page = Page((tmp_path / "inspection/index.html").read_text(encoding="utf-8"))
    assert page.tags.count("script") == 2
    assert "<script>alert(2)<" in page.text
    assert "</script><script>alert(1)</script>" in json.loads(page.data)[0]["keys"]
    assert "{{data}}" in json.loads(page.data)[0]["keys"]


def test_what_a_model_writes_stands_in_the_place_of_a_target(saved):
    folder = saved("encoder_decoder")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.generation_config.max_new_tokens = 4
    written = model.generate(**tokenizer("the cat", return_tensors="pt"))[0, 1:]
    *_, maps = read_attention(model, tokenizer, "the cat")
    assert maps.queries == [tokenizer.decode([token]).strip() for token in written]


def test_any_head_can_be_looked_at(saved):
    """A head for several choices reads texts in another shape, and answers of a base model are no logits."""
    folder = saved("encoder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for head in (AutoModelForMultipleChoice, AutoModelForTokenClassification, AutoModel):
        model = head.from_pretrained(folder, attn_implementation="eager")
        (maps,) = read_attention(model, tokenizer, "the cat sat")
        assert maps.queries == maps.keys == ["<s>", "the", "cat", "sat", "</s>"]
        assert sum(account(model, LENGTH).flops.values()) > 0


def test_a_layer_of_linear_attention_has_no_map(command, saved, tmp_path):
    folder = saved("decoder", layer_types=["linear_attention", "full_attention"])
    code, _, err = command("inspect", folder, "--text", "the cat sat", "--output", "seen")
    assert code == 0, err
    (maps,) = json.loads(Page((tmp_path / "seen/index.html").read_text(encoding="utf-8")).data)
    assert [layer is None for layer in maps["layers"]] == [True, False]
    assert np.triu(unpacked(maps, 1), 1).max() == 0
    assert [path.name for path in (tmp_path / "seen/maps").iterdir()] == ["self-attention_2.png"]


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_can_be_looked_at(preset, capsys):
    model = build_preset(preset)
    show_inspection(inspect_model(preset, model, choose_length(model.config, None)), as_json=False)
    said = capsys.readouterr().out
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" in said
    assert "without weights" in said


def test_json_is_one_object(command, tmp_path):
    code, out, err = command("inspect", "tiny_hybrid", "--json", "--length", 16)
    assert code == 0, err
    told = json.loads(out)
    assert told["account"]["parameters"] == sum(part["parameters"] for part in told["account"]["parts"])
    assert len(told["stacks"][0]["layers"]) == build_preset("tiny_hybrid").config.num_hidden_layers


@pytest.mark.parametrize(
    ("topology", "arguments", "sentence"),
    [
        (None, ["bert_bse"], "model 'bert_bse' is unknown: did you mean 'bert_base'?"),
        (None, ["nobody/nowhere"], "model 'nobody/nowhere' cannot be loaded"),
        (None, ["bert_base", "--text", "the cat"], "'bert_base' is a preset: give a trained model"),
        (None, ["bert_base", "--target", "the cat"], "give --text too"),
        (None, ["bert_base", "--length", "513"], "--length is 513, but the encoder has 512 positions"),
        ("decoder", ["--text", "the cat", "--target", "the mat"], "the model is of topology 'decoder'"),
        ("encoder", ["--text", "the cat " * 9], "the model cannot read this text: `position_ids` has"),
        ("encoder", ["--text", "the " * 300], "--text has 302 tokens, but maps are drawn of 1 to 256"),
        ("encoder", ["--output", "encoder/config.json"], "cannot be written"),
        ("encoder_decoder", ["--text", "the " * 9, "--target", "the " * 20], "the model cannot read this text"),
    ],
)
def test_bad_arguments_are_one_sentence(command, saved, tmp_path, topology, arguments, sentence):
    table = dict(position_embedding_type="learned", max_position_embeddings=12)
    model = [] if topology is None else [saved(topology, **table)]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("inspect", *model, *arguments)
    *_, last = err.splitlines()
    assert code == 2
    assert last.startswith("triptych: ") and sentence in last
    assert "Traceback" not in err and out == ""
    assert sorted(tmp_path.rglob("*")) == before
