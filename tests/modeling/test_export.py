"""Graphs of torch.export: traced once, for batches and texts of any size, with and without a cache."""

import pytest
import torch
from exporting import batch_of, real_tokens, write_greedily
from tiny import TOPOLOGIES, assert_equal, tiny_model
from torch.export import Dim
from transformers.exporters import DynamoConfig, DynamoExporter

MODELS = {
    "encoder": {"position_embedding_type": "learned"},
    "decoder": {"position_embedding_type": "rotary", "sliding_window": 4, "num_global_tokens": 1},
    "encoder_decoder": {"position_embedding_type": "relative"},
}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_graph_serves_every_size(topology, strict):
    """`len()` of a tensor would write the size of the example into the graph."""
    torch._dynamo.reset()
    model = tiny_model(topology, **MODELS[topology])
    example, batch = (batch_of(topology, "right", *sizes) for sizes in ((2, 7), (5, 11)))
    if topology != "encoder":
        example["use_cache"] = batch["use_cache"] = False
    size = {0: Dim("rows", max=64), 1: Dim("length", min=2, max=64)}
    target_size = {0: size[0], 1: Dim("target_length", min=2, max=64)}
    shapes = {name: target_size if name.startswith("decoder") else size for name in example if name != "use_cache"}
    exported = DynamoExporter().export(model, example, DynamoConfig(dynamic_shapes=shapes, strict=strict))
    with torch.no_grad():
        logits, expected = exported(**batch).logits, model(**batch).logits
    assert_equal(logits[real_tokens(batch)], expected[real_tokens(batch)])


def test_graphs_of_a_decoder_hand_on_their_cache():
    """The length of a dynamic cache is a symbol in a graph; and a graph cannot look at positions to say whether the
    cache can be continued."""
    model = tiny_model("decoder", position_embedding_type="rotary")
    example, prompt = (batch_of("decoder", "left", *sizes) for sizes in ((2, 7), (3, 9)))
    exported = DynamoExporter().export_for_generation(model, example, DynamoConfig(dynamic=True))
    expected = model.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(write_greedily(exported, model, prompt, 5), expected)


def test_a_compiled_decoder_continues_its_dynamic_cache():
    """Of positions that it could not look at, a compiled forward took it that they were the caller's own choice."""
    torch._dynamo.reset()
    model, prompt = tiny_model("decoder"), batch_of("decoder", "left", 3, 9)
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)
    expected = model.generate(**prompt, **settings)
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    assert torch.equal(model.generate(**prompt, **settings), expected)
