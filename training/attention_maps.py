"""Where the heads of a model look while it reads a text: the weights of every softmax attention, with its tokens.

Shapes: H heads, T queries, S keys.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from triptych.configuration_triptych import STATE_TYPES, TriptychStackConfig
from triptych.training.errors import UserError, as_user_error

MOST_TOKENS = 256  # of a text; the page holds the weights of all pairs of tokens, layers and heads


@dataclass
class AttentionMaps:
    """The weights of one kind of attention.

    Attributes:
        kind: such as "cross-attention".
        queries, keys: the tokens that look, and those that are looked at. Where the decoder looks at the source, a
            query is named by the token that it writes, otherwise by the one that it reads.
        layers: weights [H, T, S] of each layer; None of linear attention, which compares no pairs.
    """

    kind: str
    queries: list[str]
    keys: list[str]
    layers: list[torch.Tensor | None]


@torch.no_grad()
def read_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, target: str | None = None
) -> list[AttentionMaps]:
    """The attention of each kind while the model reads `text`, and writes `target` or what comes to its own mind.

    Args:
        model: with the backend "eager", the one that returns weights.

    Raises:
        UserError: a text is too long, or empty, or there is a `target` and no decoder beside the encoder.
    """
    is_pair = model.config.is_encoder_decoder
    if target is not None and not is_pair:
        raise UserError(f"--target is for an encoder-decoder, but the model is of topology '{model.config.topology}'")
    model.eval()
    input_ids = tokenizer(text, return_tensors="pt")["input_ids"].to(model.device)
    check_length("--text", input_ids)
    source = token_labels(tokenizer, input_ids[0])
    options = dict(output_attentions=True, use_cache=False)
    with as_user_error("the model cannot read this text"):
        if not is_pair:
            layers = by_layer(with_states(model.config), model.base_model(input_ids, **options).attentions)
            return [AttentionMaps("self-attention", source, source, layers)]
        written = target_ids(model, tokenizer, input_ids, target)
        check_length("--target", written)
        outputs = model.base_model(input_ids, decoder_input_ids=written[:, :-1], **options)
    read, said = token_labels(tokenizer, written[0, :-1]), token_labels(tokenizer, written[0, 1:])
    encoder, decoder = model.config.encoder, model.config.decoder
    layers = range(decoder.num_hidden_layers)
    without = [decoder.linear_cross_attention or not decoder.reads_encoder(layer_idx) for layer_idx in layers]
    return [
        AttentionMaps("encoder", source, source, by_layer(with_states(encoder), outputs.encoder_attentions)),
        AttentionMaps("decoder", read, read, by_layer(with_states(decoder), outputs.decoder_attentions)),
        AttentionMaps("cross-attention", said, source, by_layer(without, outputs.cross_attentions)),
    ]


def target_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, input_ids: torch.Tensor, target: str | None
) -> torch.Tensor:
    """What the decoder is to read and write, [1, 1 + T]: its first input and then the target's tokens."""
    if target is None and not model.can_generate():
        raise UserError(f"--target is needed, as {type(model).__name__} has no head that writes")
    if target is None:
        return model.generate(input_ids, attention_mask=torch.ones_like(input_ids))[:1]
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    start = labels.new_full((1, 1), model.config.decoder_start_token_id)
    return torch.cat((start, labels), dim=1)


def check_length(option: str, ids: torch.Tensor) -> None:
    if not 1 <= ids.shape[1] <= MOST_TOKENS:
        raise UserError(f"{option} has {ids.shape[1]} tokens, but maps are drawn of 1 to {MOST_TOKENS}")


def with_states(config: TriptychStackConfig) -> list[bool]:
    """Of each layer, whether it keeps a state in the place of all keys."""
    return [layer_type in STATE_TYPES for layer_type in config.layer_types]


def by_layer(without: list[bool], attentions: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
    """Recorded weights [1, H, T, S] as those of each layer; those `without` any record none."""
    recorded = iter(attentions)
    return [None if has_none else next(recorded)[0].float().cpu() for has_none in without]


def token_labels(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> list[str]:
    return [token_label(tokenizer, id) for id in ids.tolist()]


def token_label(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    """A token as a person reads it; of bytes that are no whole character, the tokenizer's own name."""
    text = tokenizer.decode([id])
    if text.isspace():
        return "␣"
    return tokenizer.convert_ids_to_tokens(id) if "\ufffd" in text else text.strip()
