"""ONNX Runtime runs graphs that transformers' exporter made of the family, of any size, with and without a cache."""

import pytest
import torch
from exporting import batch_of, real_tokens, write_greedily
from tiny import assert_equal, tiny_model
from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter

MODELS = [
    pytest.param("encoder", {"position_embedding_type": "relative", "sliding_window": 4}, id="encoder"),
    pytest.param("decoder", {"position_embedding_type": "alibi"}, id="decoder"),
    pytest.param("encoder_decoder", {"position_embedding_type": "rotary"}, id="pair"),
]
STEPS = 5


@pytest.fixture
def export(tmp_path, neighbour):
    """Exports a model, or the graphs that generate() needs, saves them and loads what is saved."""
    for package in ("onnxscript", "onnxruntime"):
        neighbour(package)

    def export(model, inputs, name="export"):
        exported = getattr(OnnxExporter(), name)(model, inputs, OnnxConfig(dynamic=True))
        exported.save_pretrained(tmp_path / type(model).__name__)
        return ExportedModel.from_pretrained(tmp_path / type(model).__name__)

    return export


@pytest.mark.parametrize("topology, changes", MODELS)
def test_logits(export, topology, changes):
    model = tiny_model(topology, use_cache=False, **changes)
    exported = export(model, batch_of(topology, "right", 2, 7))
    batch = batch_of(topology, "left", 5, 11)
    with torch.no_grad():
        expected = model(**batch).logits[real_tokens(batch)]
    assert_equal(exported(**batch).logits[real_tokens(batch)], expected)


@pytest.mark.parametrize("changes", [{"position_embedding_type": "rotary"}, {"sliding_window": 8}])
def test_a_decoder_generates(export, changes):
    """Beyond its window, too, if the example is shorter: the cache of a longer one has lost its beginning."""
    model, prompt = tiny_model("decoder", **changes), batch_of("decoder", "left", 3, 9)
    exported = export(model, batch_of("decoder", "left", 2, 5), "export_for_generation")
    expected = model.generate(**prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    assert torch.equal(write_greedily(exported, model, prompt, STEPS), expected)


def test_an_encoder_decoder_generates(export):
    """Three graphs: the encoder, and the decoder without and with a past. The example's target has two tokens, as the
    exporter takes a size of one for fixed."""
    model = tiny_model("encoder_decoder", position_embedding_type="rotary")
    example, prompt = (batch_of("encoder_decoder", "right", *sizes) for sizes in ((2, 7), (3, 9)))
    del example["decoder_attention_mask"], prompt["decoder_attention_mask"]
    prompt["decoder_input_ids"] = torch.ones(3, 2, dtype=torch.long)
    source = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    encoder = export(model.get_encoder(), {name: example[name] for name in source})
    decoder = export(model, example, "export_for_generation")
    expected = model.generate(**prompt, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    targets = {name: prompt[name] for name in ("attention_mask", "decoder_input_ids")}
    texts = write_greedily(decoder, model, {**targets, "encoder_outputs": encoder(**source)}, STEPS)
    assert torch.equal(texts, expected)
