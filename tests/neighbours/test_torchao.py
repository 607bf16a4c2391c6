"""torchao: weights in eight bits, through transformers' own quantisation."""

import pytest
import torch
from tiny import TOPOLOGIES, Ragged, assert_equal, tiny_model
from transformers import TorchAoConfig

# As wide as the layers for which a CPU decodes by another way, which reads plain weights.
WIDE = {"hidden_size": 512, "intermediate_size": 512, "initializer_range": 0.02}


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@torch.no_grad()
def test_eight_bits_are_near_and_reload_bitwise(tmp_path, neighbour, topology, kind):
    settings = TorchAoConfig(getattr(neighbour("torchao.quantization"), kind)())
    model, ragged = tiny_model(topology, **WIDE), Ragged(topology, "left")
    expected = ragged.together(model)
    model.save_pretrained(tmp_path / "exact")
    quantised = type(model).from_pretrained(tmp_path / "exact", quantization_config=settings).eval()
    layers = [module for name, module in quantised.named_modules() if name.endswith("_proj")]
    assert layers and all(type(layer.weight).__name__ == "Int8Tensor" for layer in layers)
    logits = ragged.together(quantised)
    assert_equal(logits, expected, tolerance=0.02 * expected.abs().max().item())
    quantised.save_pretrained(tmp_path / "quantised")
    reloaded = type(model).from_pretrained(tmp_path / "quantised").eval()
    assert torch.equal(ragged.together(reloaded), logits)
    if topology != "encoder":
        prompt = {name: ragged.batch[name] for name in ("input_ids", "attention_mask")}
        settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}
        assert torch.equal(quantised.generate(**prompt, **settings), reloaded.generate(**prompt, **settings))
