"""What the tests of exported graphs share: example batches, and a decoder's greedy loop over its two graphs."""

import torch
from tiny import Ragged
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.exporters import ExportedModel


def batch_of(topology: str, side: str, rows: int, longest: int) -> dict[str, torch.Tensor]:
    """A batch with pads whose sizes are those given; of the decoder's side too, if there is one."""
    lengths = [longest - index % 3 for index in range(rows)]
    return Ragged(topology, side, lengths, [length - 2 for length in lengths]).batch


def real_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where the logits are of tokens, not of pads: [B, T]."""
    return batch.get("decoder_attention_mask", batch["attention_mask"]).bool()


def write_greedily(exported: ExportedModel, model: nn.Module, prompt: dict[str, torch.Tensor], steps: int):
    """What `generate()` does: the prompt through the graph `prefill`, then each token through `decode`: [B, T + steps].

    The cache goes from one graph to the next. `prompt` of an encoder-decoder names its `encoder_outputs`.
    """
    is_pair = model.config.topology == "encoder_decoder"
    ids = "decoder_input_ids" if is_pair else "input_ids"
    cache = DynamicCache(config=model.config.get_text_config())
    inputs = {**prompt, "cache": EncoderDecoderCache(cache, DynamicCache()) if is_pair else cache}
    texts, graph = prompt[ids], "prefill"
    for _ in range(steps):
        if not is_pair:
            positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -inputs[ids].shape[1] :]
        output = exported.runners[graph](**inputs)
        inputs |= {ids: output.logits[:, -1:].argmax(-1), "cache": output.cache}
        if not is_pair:
            inputs["attention_mask"] = nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        texts, graph = torch.cat((texts, inputs[ids]), dim=1), "decode"
    return texts
