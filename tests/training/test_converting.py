"""The command `convert`: known checkpoints in folders, with all that belongs to them."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from triptych.training.tokenization import train_tokenizer

SIZES = dict(vocab_size=60, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20)


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama and a tokenizer."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.2))
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(tmp_path / "llama")
    train_tokenizer(["some words to be known"], "word", 60, "decoder").save_pretrained(tmp_path / "llama")
    return model.eval()


def test_there_and_back(command, llama, tmp_path):
    code, out, err = command("convert", "llama", "ours")
    assert code == 0, err
    assert out.startswith("ours: TriptychForCausalLM, ") and "without a tokenizer" not in out
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = AutoTokenizer.from_pretrained(tmp_path / "ours")(["words to know"], return_tensors="pt")["input_ids"]
    assert torch.allclose(ours(ids).logits, llama(ids).logits, atol=1e-5)
    assert ours.generation_config.repetition_penalty == 1.5

    code, out, err = command("convert", "ours", "back", "--to", "llama")
    assert code == 0, err
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(tensor, llama.state_dict()[name]) for name, tensor in back.state_dict().items())
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_changes_are_said(command, llama, tmp_path, caplog):
    code, _, err = command("convert", "llama", "ours", "sliding_window=8", "num_key_value_heads=1")
    assert code == 0, err
    assert "keys and values of every 2 heads are their mean now: needs training." in caplog.text
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["sliding_window"] == 8 and config["num_key_value_heads"] == 1


def test_a_head_and_its_labels(command, tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, id2label={0: "no", 1: "yes"}))
    model.save_pretrained(tmp_path / "bert")
    code, out, err = command("convert", "bert", "ours")
    assert code == 0, err
    assert "without a tokenizer, as there is none" in out
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert ours.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama", "llama"], "'llama' is there already: choose another folder or add --overwrite"),
        (["nowhere", "ours"], "'nowhere' cannot be converted: 'nowhere' has no configuration that can be read"),
        (["llama", "ours", "--to", "bert"], "TriptychForCausalLM has no counterpart in bert"),
        (["llama", "ours", "--to", "lama"], "The architecture 'lama' is not supported; supported are albert, "),
        (["llama", "ours", "hidden_size=8"], "`hidden_size` cannot be changed"),
        (["llama", "ours", "window"], "'window' is no change: write KEY=VALUE"),
        (["llama", "ours", "layer_types=[1"], "the value of 'layer_types=[1' is not YAML: while parsing"),
    ],
)
def test_bad_input_writes_nothing(command, llama, tmp_path, arguments, sentence):
    before = sorted(tmp_path.rglob("*"))
    code, _, err = command("convert", *arguments)
    assert code == 2
    assert sentence in err and "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before
