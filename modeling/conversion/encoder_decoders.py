"""Encoder-decoders: T5, BART, Marian and their kind."""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from ..configuration_triptych import TriptychConfig
from ..positions import sinusoidal_embedding
from .tables import Architecture, Head, Operation, Row, Weight

SIZES = {"vocab_size": "vocab_size", "hidden_size": "d_model"}

# ---------------------------------------------------------------------------------------------------------------------
# T5 (Raffel et al. 2020, arXiv 1910.10683), its version 1.1 (Shazeer 2020, arXiv 2002.05202) and mT5 (Xue et al. 2021,
# arXiv 2010.11934)


def is_gated(config: TriptychConfig) -> bool:
    return config.get_text_config().mlp_type == "gated"


def is_dense(config: TriptychConfig) -> bool:
    return not is_gated(config)


def t5_stack(theirs: str, ours: str, feed_forward: int) -> list[Weight]:
    """The weights of one stack, in which the feed-forward layer is sublayer number `feed_forward`."""
    block, layer = f"{theirs}block.*.layer", f"{ours}layers.*"
    mlp = f"{block}.{feed_forward}.DenseReluDense"
    return [
        Weight(
            f"{theirs}block.0.layer.0.SelfAttention.relative_attention_bias",
            f"{ours}relative_bias.relative_attention_bias",
        ),
        *[Weight(f"{block}.0.SelfAttention.{x}", f"{layer}.self_attn.{x}_proj") for x in "qkvo"],
        Weight(f"{block}.0.layer_norm", f"{layer}.self_attn_norm"),
        Weight(f"{mlp}.wi", f"{layer}.mlp.up_proj", where=is_dense),
        Weight(f"{mlp}.wi_0", f"{layer}.mlp.gate_proj", where=is_gated),
        Weight(f"{mlp}.wi_1", f"{layer}.mlp.up_proj", where=is_gated),
        Weight(f"{mlp}.wo", f"{layer}.mlp.down_proj"),
        Weight(f"{block}.{feed_forward}.layer_norm", f"{layer}.mlp_norm"),
        Weight(f"{theirs}final_layer_norm", f"{ours}norm"),
    ]


T5_CROSS_ATTENTION = [
    *[Weight(f"decoder.block.*.layer.1.EncDecAttention.{x}", f"decoder.layers.*.cross_attn.{x}_proj") for x in "qkvo"],
    Weight("decoder.block.*.layer.1.layer_norm", "decoder.layers.*.cross_attn_norm"),
]


def read_t5(theirs: PreTrainedConfig) -> dict:
    return {"mlp_type": "gated" if theirs.is_gated_act else "dense", "hidden_act": theirs.dense_act_fn}


def write_t5(ours: TriptychConfig) -> dict:
    stack = ours.get_text_config()
    activation = "gelu" if (stack.mlp_type, stack.hidden_act) == ("gated", "gelu_new") else stack.hidden_act
    return {"feed_forward_proj": f"gated-{activation}" if stack.mlp_type == "gated" else activation}


def t5(model_type: str, name: str, read: Callable, write: Callable) -> list[Architecture]:
    """An entry for both stacks, and one for the encoder alone.

    Args:
        read, write: what this version says of the scale of its logits.
    """
    fields = {
        **SIZES,
        "intermediate_size": "d_ff",
        "head_dim": "d_kv",
        "num_attention_heads": "num_heads",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "hidden_dropout": "dropout_rate",
        "attention_dropout": "dropout_rate",
        "activation_dropout": "dropout_rate",
        "norm_eps": "layer_norm_epsilon",
    }
    fixed = {
        "norm_type": "rmsnorm",
        "norm_position": "pre",
        "position_embedding_type": "relative",
        "attention_scale": 1.0,
        "scale_embedding": False,
        "mlp_bias": False,
    }
    training = {"training_only": ["initializer_factor", "classifier_dropout"]}
    pair = Architecture(
        model_type,
        "encoder_decoder",
        heads={
            f"{name}Model": Head("TriptychEncoderDecoderModel"),
            f"{name}ForConditionalGeneration": Head("TriptychForConditionalGeneration", [Weight("lm_head", "lm_head")]),
        },
        weights=[
            Weight("shared", "encoder.embed_tokens"),
            *t5_stack("encoder.", "encoder.", 1),
            *t5_stack("decoder.", "decoder.", 2),
            *T5_CROSS_ATTENTION,
        ],
        fields={
            **fields,
            "encoder.num_hidden_layers": "num_layers",
            "decoder.num_hidden_layers": "num_decoder_layers",
        },
        fixed=fixed,
        read=lambda theirs: read_t5(theirs) | read(theirs),
        write=lambda ours: write_t5(ours) | write(ours),
        **training,
    )
    encoder = Architecture(
        model_type,
        "encoder",
        heads={f"{name}EncoderModel": Head("TriptychEncoderModel")},
        weights=[Weight("shared", "embed_tokens"), *t5_stack("encoder.", "", 1)],
        fields={**fields, "num_hidden_layers": "num_layers"},
        fixed=fixed,
        read=read_t5,
        write=write_t5,
        inert=["num_decoder_layers"],
        **training,
    )
    return [pair, encoder]


# The first version scales what it compares with the token table. Its configuration says so by not saying that the
# table and the projection differ.
T5 = t5(
    "t5",
    "T5",
    read=lambda theirs: {"logit_scale": theirs.d_model**-0.5 if theirs.scale_decoder_outputs else 1.0},
    write=lambda ours: {"tie_word_embeddings": None if ours.logit_scale != 1.0 else False},
)
MT5 = t5("mt5", "MT5", read=lambda theirs: {}, write=lambda ours: {})

# ---------------------------------------------------------------------------------------------------------------------
# BART (Lewis et al. 2020, arXiv 1910.13461) and others of fairseq's and Marian's school

STACKS = ("encoder", "decoder")
BART_FIELDS = {
    **SIZES,
    "encoder.num_hidden_layers": "encoder_layers",
    "decoder.num_hidden_layers": "decoder_layers",
    "encoder.intermediate_size": "encoder_ffn_dim",
    "decoder.intermediate_size": "decoder_ffn_dim",
    "encoder.num_attention_heads": "encoder_attention_heads",
    "decoder.num_attention_heads": "decoder_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_act": "activation_function",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "initializer_range": "init_std",
    "scale_embedding": "scale_embedding",
}
BART_ATTENTIONS = [("encoder", "self_attn", "self_attn"), ("decoder", "self_attn", "self_attn")]
BART_ATTENTIONS += [("decoder", "encoder_attn", "cross_attn")]
BART_LAYERS = [
    *[
        Weight(f"{stack}.layers.*.{theirs}.{projection}", f"{stack}.layers.*.{ours}.{projection}")
        for stack, theirs, ours in BART_ATTENTIONS
        for projection in ("q_proj", "k_proj", "v_proj")
    ],
    *[
        Weight(f"{stack}.layers.*.{theirs}{end}", f"{stack}.layers.*.{ours}{our_end}")
        for stack, theirs, ours in BART_ATTENTIONS
        for end, our_end in ((".out_proj", ".o_proj"), ("_layer_norm", "_norm"))
    ],
    *[
        Weight(f"{stack}.layers.*.{theirs}", f"{stack}.layers.*.{ours}")
        for stack in STACKS
        for theirs, ours in (("fc1", "mlp.up_proj"), ("fc2", "mlp.down_proj"), ("final_layer_norm", "mlp_norm"))
    ],
]
EMBEDDING_NORMS = [Weight(f"{stack}.layernorm_embedding", f"{stack}.embed_norm") for stack in STACKS]
FINAL_NORMS = [Weight(f"{stack}.layer_norm", f"{stack}.norm") for stack in STACKS]
LEARNED_POSITIONS = [Weight(f"{stack}.embed_positions", f"{stack}.embed_positions") for stack in STACKS]


class Sinusoids(Operation):
    """A table of what we compute: all sines, then all cosines."""

    def split(self, theirs, config):
        table = self.join([], config).to(theirs.dtype)
        if table.shape != theirs.shape or not torch.allclose(table, theirs, atol=1e-3):
            raise ValueError("A table of positions holds other values than sines and cosines, which is not supported.")
        return []

    def join(self, ours, config):
        stack = config.get_text_config()
        positions = torch.arange(stack.max_position_embeddings)[None]
        return sinusoidal_embedding(positions, stack.embedding_size, "concatenated")[0]


SINUSOIDAL_POSITIONS = [Weight(f"{stack}.embed_positions.weight", (), Sinusoids()) for stack in STACKS]


def bart(
    model_type: str, name: str, weights: list[Weight], fixed: dict, lm: str = "ForConditionalGeneration", **differences
) -> Architecture:
    inert = ["forced_eos_token_id", *differences.pop("inert", [])]  # a setting of generation
    return Architecture(
        model_type,
        "encoder_decoder",
        heads={
            f"{name}Model": Head("TriptychEncoderDecoderModel"),
            f"{name}{lm}": Head(
                "TriptychForConditionalGeneration",
                [Weight("final_logits_bias", "lm_head.bias", Row()), Weight("lm_head", "lm_head")],
                fixed={"lm_head_bias": True},
            ),
        },
        weights=[Weight("shared", "encoder.embed_tokens"), *BART_LAYERS, *weights],
        fields=BART_FIELDS,
        fixed={"attention_bias": True, **fixed},
        training_only=["encoder_layerdrop", "decoder_layerdrop", "classifier_dropout"],
        inert=inert,
        **differences,
    )


LEARNED = {"position_embedding_type": "learned"}
OFFSET = {**LEARNED, "position_offset": 2}
BART = bart("bart", "Bart", [*LEARNED_POSITIONS, *EMBEDDING_NORMS], {**OFFSET, "embedding_norm": True})
# Ahmad et al. 2021, arXiv 2103.06333
PLBART = bart("plbart", "PLBart", [*LEARNED_POSITIONS, *EMBEDDING_NORMS], {**OFFSET, "embedding_norm": True})
# Liu et al. 2020, arXiv 2001.08210
MBART = bart(
    "mbart",
    "MBart",
    [*LEARNED_POSITIONS, *EMBEDDING_NORMS, *FINAL_NORMS],
    {**OFFSET, "embedding_norm": True, "norm_position": "pre"},
)
# Roller et al. 2021, arXiv 2004.13637
BLENDERBOT = bart(
    "blenderbot",
    "Blenderbot",
    [*LEARNED_POSITIONS, *FINAL_NORMS],
    {**LEARNED, "norm_position": "pre"},
    inert=["encoder_no_repeat_ngram_size"],
)
CONCATENATED = {"position_embedding_type": "sinusoidal", "sinusoidal_layout": "concatenated"}
# Zhang et al. 2020, arXiv 1912.08777
PEGASUS = bart("pegasus", "Pegasus", [*SINUSOIDAL_POSITIONS, *FINAL_NORMS], {**CONCATENATED, "norm_position": "pre"})
# Junczys-Dowmunt et al. 2018, arXiv 1804.00344
MARIAN = bart("marian", "Marian", SINUSOIDAL_POSITIONS, CONCATENATED, lm="MTModel")

ENCODER_DECODERS = [*T5, *MT5, BART, PLBART, MBART, BLENDERBOT, PEGASUS, MARIAN]
