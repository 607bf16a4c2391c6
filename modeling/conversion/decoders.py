"""Decoders: GPT and what came after it."""

from transformers import PreTrainedConfig

from ..configuration_triptych import TriptychConfig
from .tables import Architecture, Head, Stacked, StackedByHead, Transposed, Weight, within

QKV = ("layers.*.self_attn.q_proj", "layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj")
QKV_STACK = ("q_proj", "k_proj", "v_proj")
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "initializer_range": "initializer_range",
}


def generative_heads(
    name: str,
    lm: str = "ForCausalLM",
    texts: str = "score",
    tokens: str | None = "classifier",
    spans: str | None = "qa_outputs",
    projection: str = "lm_head",
) -> dict[str, Head]:
    """The heads that decoders have in common; those of texts have no bias.

    Args:
        name: which their classes begin with.
        lm: which the class of the language model ends with.
        texts, tokens, spans: the last layers of their heads; None where there is no such head.
        projection: the language model's.
    """
    heads = {
        f"{name}Model": Head("TriptychDecoderModel"),
        f"{name}{lm}": Head("TriptychForCausalLM", [Weight(projection, "lm_head")]),
        f"{name}ForSequenceClassification": Head(
            "TriptychDecoderForSequenceClassification", [Weight(texts, "classifier")], fixed={"classifier_bias": False}
        ),
    }
    if tokens:
        heads[f"{name}ForTokenClassification"] = Head(
            "TriptychDecoderForTokenClassification", [Weight(tokens, "classifier")]
        )
    if spans:
        heads[f"{name}ForQuestionAnswering"] = Head(
            "TriptychDecoderForQuestionAnswering", [Weight(spans, "qa_outputs")]
        )
    return heads


# ---------------------------------------------------------------------------------------------------------------------
# GPT (Radford et al. 2018) and GPT-2 (Radford et al. 2019)

GPT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
GPT_LAYERS = [
    Weight("h.*.attn.c_attn", QKV, Stacked(*QKV_STACK, transposed=True)),
    Weight("h.*.attn.c_proj", "layers.*.self_attn.o_proj", Transposed()),
    Weight("h.*.mlp.c_fc", "layers.*.mlp.up_proj", Transposed()),
    Weight("h.*.mlp.c_proj", "layers.*.mlp.down_proj", Transposed()),
    Weight("h.*.ln_1", "layers.*.self_attn_norm"),
    Weight("h.*.ln_2", "layers.*.mlp_norm"),
]
GPT_INERT = [
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
]
OPENAI_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
OPENAI_GPT = Architecture(
    "openai-gpt",
    "decoder",
    heads=generative_heads("OpenAIGPT", "LMHeadModel", tokens=None, spans=None),
    weights=[Weight("tokens_embed", "embed_tokens"), Weight("positions_embed", "embed_positions"), *GPT_LAYERS],
    fields=GPT_FIELDS,
    fixed={"position_embedding_type": "learned", "scale_embedding": False, "attention_bias": True},
    read=lambda theirs: {
        "hidden_act": OPENAI_ACTIVATIONS[theirs.afn],
        "intermediate_size": 4 * theirs.n_embd,
    },
    write=lambda ours: {
        "afn": next((name for name, act in OPENAI_ACTIVATIONS.items() if act == ours.hidden_act), ours.hidden_act)
    },
    training_only=["embd_pdrop"],
    inert=GPT_INERT,
)
GPT2 = Architecture(
    "gpt2",
    "decoder",
    heads=generative_heads("GPT2", "LMHeadModel"),
    weights=[
        Weight("wte", "embed_tokens"),
        Weight("wpe", "embed_positions"),
        *GPT_LAYERS,
        Weight("ln_f", "norm"),
    ],
    fields={**GPT_FIELDS, "hidden_act": "activation_function"},
    fixed={
        "norm_position": "pre",
        "position_embedding_type": "learned",
        "scale_embedding": False,
        "attention_bias": True,
    },
    read=lambda theirs: {"intermediate_size": theirs.n_inner or 4 * theirs.n_embd},
    write=lambda ours: {"n_inner": ours.intermediate_size},
    training_only=["embd_pdrop"],
    inert=["n_inner", "reorder_and_upcast_attn", *GPT_INERT],  # n_inner may be None for what we name
)

# One head of keys and values for all queries (Ben Allal et al. 2023, arXiv 2301.03988)
GPT_BIGCODE = Architecture(
    "gpt_bigcode",
    "decoder",
    heads=generative_heads("GPTBigCode", spans=None),
    weights=[
        Weight("wte", "embed_tokens"),
        Weight("wpe", "embed_positions"),
        Weight("h.*.attn.c_attn", QKV, Stacked(*QKV_STACK)),
        Weight("h.*.attn.c_proj", "layers.*.self_attn.o_proj"),
        Weight("h.*.mlp.c_fc", "layers.*.mlp.up_proj"),
        Weight("h.*.mlp.c_proj", "layers.*.mlp.down_proj"),
        Weight("h.*.ln_1", "layers.*.self_attn_norm"),
        Weight("h.*.ln_2", "layers.*.mlp_norm"),
        Weight("ln_f", "norm"),
    ],
    fields=GPT2.fields,
    fixed={**GPT2.fixed, "num_key_value_heads": 1},
    read=GPT2.read,
    write=GPT2.write,
    training_only=["embd_pdrop"],
    inert=["n_inner", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"],
)

# Every other layer looks back over a window (Black et al. 2021)
GPT_NEO_TYPES = {"global": "full_attention", "local": "sliding_attention"}
GPT_NEO = Architecture(
    "gpt_neo",
    "decoder",
    heads=generative_heads("GPTNeo"),
    weights=[
        Weight("wte", "embed_tokens"),
        Weight("wpe", "embed_positions"),
        Weight("h.*.attn.attention.q_proj", "layers.*.self_attn.q_proj"),
        Weight("h.*.attn.attention.k_proj", "layers.*.self_attn.k_proj"),
        Weight("h.*.attn.attention.v_proj", "layers.*.self_attn.v_proj"),
        Weight("h.*.attn.attention.out_proj", "layers.*.self_attn.o_proj"),
        Weight("h.*.mlp.c_fc", "layers.*.mlp.up_proj"),
        Weight("h.*.mlp.c_proj", "layers.*.mlp.down_proj"),
        Weight("h.*.ln_1", "layers.*.self_attn_norm"),
        Weight("h.*.ln_2", "layers.*.mlp_norm"),
        Weight("ln_f", "norm"),
    ],
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "activation_function",
        "hidden_dropout": "resid_dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "classifier_dropout",
        "norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
        "sliding_window": "window_size",
    },
    fixed={
        "norm_position": "pre",
        "position_embedding_type": "learned",
        "scale_embedding": False,
        "attention_bias": "o",
        "attention_scale": 1.0,
    },
    read=lambda theirs: {
        "intermediate_size": theirs.intermediate_size or 4 * theirs.hidden_size,
        "layer_types": [GPT_NEO_TYPES[name] for name in theirs.attention_layers],
    },
    write=lambda ours: {
        "intermediate_size": ours.intermediate_size,
        "attention_types": [
            [[name for name, ours_name in GPT_NEO_TYPES.items() if ours_name == layer_type], 1]
            for layer_type in ours.layer_types
        ],
    },
    training_only=["embed_dropout"],
    inert=["intermediate_size", "attention_types"],  # both have more than one spelling
)

# ---------------------------------------------------------------------------------------------------------------------
# OPT (Zhang et al. 2022, arXiv 2205.01068)

OPT_LAYER = [
    Weight("layers.*.self_attn.q_proj", "layers.*.self_attn.q_proj"),
    Weight("layers.*.self_attn.k_proj", "layers.*.self_attn.k_proj"),
    Weight("layers.*.self_attn.v_proj", "layers.*.self_attn.v_proj"),
    Weight("layers.*.self_attn.out_proj", "layers.*.self_attn.o_proj"),
    Weight("layers.*.self_attn_layer_norm", "layers.*.self_attn_norm"),
    Weight("layers.*.fc1", "layers.*.mlp.up_proj"),
    Weight("layers.*.fc2", "layers.*.mlp.down_proj"),
    Weight("layers.*.final_layer_norm", "layers.*.mlp_norm"),
]
OPT = Architecture(
    "opt",
    "decoder",
    heads=generative_heads("OPT", tokens=None),
    weights=[
        Weight("decoder.embed_tokens", "embed_tokens"),
        Weight("decoder.embed_positions", "embed_positions"),
        *within("decoder.", "", OPT_LAYER),
        Weight("decoder.final_layer_norm", "norm"),
    ],
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_dim",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "activation_function",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "attention_bias": "enable_bias",
        "mlp_bias": "enable_bias",
        "initializer_range": "init_std",
    },
    fixed={"position_embedding_type": "learned", "position_offset": 2, "scale_embedding": False},
    read=lambda theirs: {"norm_position": "pre" if theirs.do_layer_norm_before else "post"},
    write=lambda ours: {"do_layer_norm_before": ours.norm_position == "pre"},
    training_only=["layerdrop"],
)

# BioGPT (Luo et al. 2022, arXiv 2210.10341)
BIOGPT = Architecture(
    "biogpt",
    "decoder",
    heads=generative_heads("BioGpt", spans=None, projection="output_projection"),
    weights=[
        Weight("embed_tokens", "embed_tokens"),
        Weight("embed_positions", "embed_positions"),
        *OPT_LAYER,
        Weight("layer_norm", "norm"),
    ],
    fields={
        **SIZES,
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "hidden_act",
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "activation_dropout": "activation_dropout",
        "scale_embedding": "scale_embedding",
    },
    fixed={
        "norm_position": "pre",
        "position_embedding_type": "learned",
        "position_offset": 2,
        "attention_bias": True,
    },
    training_only=["layerdrop"],
    inert=["layer_norm_eps"],  # its norms never read it
)

# ---------------------------------------------------------------------------------------------------------------------
# GPT-NeoX (Black et al. 2022, arXiv 2204.06745), and Pythia

GPT_NEOX = Architecture(
    "gpt_neox",
    "decoder",
    heads=generative_heads("GPTNeoX"),
    weights=[
        Weight("embed_in", "embed_tokens"),
        Weight("layers.*.attention.query_key_value", QKV, StackedByHead()),
        Weight("layers.*.attention.dense", "layers.*.self_attn.o_proj"),
        Weight("layers.*.mlp.dense_h_to_4h", "layers.*.mlp.up_proj"),
        Weight("layers.*.mlp.dense_4h_to_h", "layers.*.mlp.down_proj"),
        Weight("layers.*.input_layernorm", "layers.*.self_attn_norm"),
        Weight("layers.*.post_attention_layernorm", "layers.*.mlp_norm"),
        Weight("final_layer_norm", "norm"),
    ],
    fields={
        **SIZES,
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "hidden_act",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "classifier_dropout",
        "norm_eps": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
        "attention_bias": "attention_bias",
        "rope_parameters": "rope_parameters",
    },
    fixed={"norm_position": "pre", "position_embedding_type": "rotary", "scale_embedding": False},
)

# BLOOM (BigScience 2022, arXiv 2211.05100)
BLOOM = Architecture(
    "bloom",
    "decoder",
    heads=generative_heads("Bloom"),
    weights=[
        Weight("word_embeddings", "embed_tokens"),
        Weight("word_embeddings_layernorm", "embed_norm"),
        Weight("h.*.self_attention.query_key_value", QKV, StackedByHead()),
        Weight("h.*.self_attention.dense", "layers.*.self_attn.o_proj"),
        Weight("h.*.mlp.dense_h_to_4h", "layers.*.mlp.up_proj"),
        Weight("h.*.mlp.dense_4h_to_h", "layers.*.mlp.down_proj"),
        Weight("h.*.input_layernorm", "layers.*.self_attn_norm"),
        Weight("h.*.post_attention_layernorm", "layers.*.mlp_norm"),
        Weight("ln_f", "norm"),
    ],
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "norm_eps": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
    },
    fixed={
        "norm_position": "pre",
        "position_embedding_type": "alibi",
        "embedding_norm": True,
        "scale_embedding": False,
        "attention_bias": True,
        "hidden_act": "gelu_new",
    },
    read=lambda theirs: {"intermediate_size": 4 * theirs.hidden_size},
    inert=["pretraining_tp", "slow_but_exact"],
)

# ---------------------------------------------------------------------------------------------------------------------
# Llama (Touvron et al. 2023, arXiv 2302.13971) and its kind

LLAMA_FIELDS = {
    **SIZES,
    "intermediate_size": "intermediate_size",
    "num_key_value_heads": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_act": "hidden_act",
    "attention_dropout": "attention_dropout",
    "norm_eps": "rms_norm_eps",
    "rope_parameters": "rope_parameters",
}
LLAMA_FIXED = {
    "norm_type": "rmsnorm",
    "norm_position": "pre",
    "position_embedding_type": "rotary",
    "scale_embedding": False,
    "mlp_type": "gated",
    "mlp_bias": False,
    "hidden_dropout": 0.0,
}
LLAMA_ATTENTION = [Weight(name, name) for name in (*QKV, "layers.*.self_attn.o_proj")]
LLAMA_NORMS = [
    Weight("layers.*.input_layernorm", "layers.*.self_attn_norm"),
    Weight("layers.*.post_attention_layernorm", "layers.*.mlp_norm"),
    Weight("norm", "norm"),
]
LLAMA_MLP = [Weight(f"layers.*.mlp.{name}", f"layers.*.mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")]
TOKENS = Weight("embed_tokens", "embed_tokens")
LLAMA_WEIGHTS = [TOKENS, *LLAMA_ATTENTION, *LLAMA_NORMS, *LLAMA_MLP]
QK_NORMS = [Weight(f"layers.*.self_attn.{name}", f"layers.*.self_attn.{name}") for name in ("q_norm", "k_norm")]


def llama(model_type: str, name: str, fields=None, fixed=None, heads=None, **differences) -> Architecture:
    return Architecture(
        model_type,
        "decoder",
        heads=heads or generative_heads(name, tokens="score"),
        **{"weights": LLAMA_WEIGHTS, **differences},
        fields={**LLAMA_FIELDS, **(fields or {})},
        fixed={name: value for name, value in LLAMA_FIXED.items() if name not in (fields or {})} | (fixed or {}),
    )


LLAMA = llama(
    "llama",
    "Llama",
    fields={"head_dim": "head_dim", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    inert=["pretraining_tp"],
)
# Jiang et al. 2023, arXiv 2310.06825
MISTRAL = llama("mistral", "Mistral", fields={"head_dim": "head_dim", "sliding_window": "sliding_window"})


def qwen_windows(theirs: PreTrainedConfig) -> dict:
    return {"sliding_window": theirs.sliding_window if theirs.use_sliding_window else None}


def write_qwen_windows(ours: TriptychConfig) -> dict:
    return {"sliding_window": ours.sliding_window, "use_sliding_window": ours.sliding_window is not None}


QWEN = {"read": qwen_windows, "write": write_qwen_windows, "inert": ["max_window_layers"]}  # layer types say it all
# Yang et al. 2024, arXiv 2407.10671
QWEN2 = llama("qwen2", "Qwen2", fields={"layer_types": "layer_types"}, fixed={"attention_bias": "qkv"}, **QWEN)
# Yang et al. 2025, arXiv 2505.09388
QWEN3 = llama(
    "qwen3",
    "Qwen3",
    fields={"head_dim": "head_dim", "layer_types": "layer_types", "attention_bias": "attention_bias"},
    fixed={"qk_norm": True},
    weights=[*LLAMA_WEIGHTS, *QK_NORMS],
    **QWEN,
)
# Gemma Team 2024, arXiv 2403.08295
GEMMA = llama(
    "gemma",
    "Gemma",
    fields={"head_dim": "head_dim", "attention_bias": "attention_bias"},
    fixed={"norm_type": "zero_centered_rmsnorm", "scale_embedding": True},
    heads=generative_heads("Gemma", tokens="score", spans=None),
)
# Abdin et al. 2024, arXiv 2404.14219
PHI3 = llama(
    "phi3",
    "Phi3",
    fields={"hidden_dropout": "resid_pdrop", "sliding_window": "sliding_window"},
    heads=generative_heads("Phi3", tokens="score", spans=None),
    weights=[
        TOKENS,
        Weight("layers.*.self_attn.qkv_proj", QKV, Stacked(*QKV_STACK)),
        Weight("layers.*.self_attn.o_proj", "layers.*.self_attn.o_proj"),
        Weight(
            "layers.*.mlp.gate_up_proj",
            ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
            Stacked("gate_proj", "up_proj"),
        ),
        Weight("layers.*.mlp.down_proj", "layers.*.mlp.down_proj"),
        *LLAMA_NORMS,
    ],
    training_only=["embd_pdrop"],
    inert=["original_max_position_embeddings"],
)
# Lozhkov et al. 2024, arXiv 2402.19173
STARCODER2 = llama(
    "starcoder2",
    "Starcoder2",
    fields={
        "norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
        "hidden_dropout": "residual_dropout",
        "sliding_window": "sliding_window",
    },
    fixed={"norm_type": "layernorm", "mlp_type": "dense"},
    heads=generative_heads("Starcoder2", tokens="score", spans=None),
    weights=[
        TOKENS,
        *LLAMA_ATTENTION,
        Weight("layers.*.mlp.c_fc", "layers.*.mlp.up_proj"),
        Weight("layers.*.mlp.c_proj", "layers.*.mlp.down_proj"),
        *LLAMA_NORMS,
    ],
    training_only=["embedding_dropout"],
)
# Bellagente et al. 2024, arXiv 2402.17834
STABLELM = llama(
    "stablelm",
    "StableLm",
    fields={"norm_eps": "layer_norm_eps", "hidden_dropout": "hidden_dropout"},
    fixed={"norm_type": "layernorm"},
    heads=generative_heads("StableLm", tokens="score", spans=None),
    read=lambda theirs: {"attention_bias": "qkv" if theirs.use_qkv_bias else False},
    write=lambda ours: {"use_qkv_bias": ours.attention_bias == "qkv"},
)

DECODERS = [
    OPENAI_GPT,
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    OPT,
    BIOGPT,
    GPT_NEOX,
    BLOOM,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    PHI3,
    STARCODER2,
    STABLELM,
]
