"""Tiny random models of transformers, of every architecture that is imported and every head that it has.

Sizes are odd, weights have deviation 0.2, and biases, norms and bias buffers are random too.
"""

import torch
import transformers
from transformers import PreTrainedModel

from triptych.conversion.registry import ARCHITECTURES

VOCAB, WIDTH, INNER, LAYERS, HEADS, LENGTH, LABELS = 101, 36, 53, 3, 6, 40, 4
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
COMMON = dict(vocab_size=VOCAB, initializer_range=0.2, **SPECIAL)
SIZES = dict(
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    max_position_embeddings=LENGTH,
    **COMMON,
)
BERT = dict(**SIZES, type_vocab_size=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
NOT_OF_IMAGES = ("vocab_size", "type_vocab_size", "max_position_embeddings")
GPT = dict(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=LENGTH, **COMMON)
GPT |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA = dict(**SIZES, num_key_value_heads=2)
T5 = dict(vocab_size=VOCAB, d_model=WIDTH, d_kv=10, d_ff=INNER, num_layers=LAYERS, num_decoder_layers=LAYERS - 1)
T5 |= dict(num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0)
T5 |= dict(pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
BART = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    encoder_layers=LAYERS,
    decoder_layers=LAYERS - 1,
    encoder_attention_heads=3,
    decoder_attention_heads=6,
    encoder_ffn_dim=INNER,
    decoder_ffn_dim=INNER + 2,
    max_position_embeddings=LENGTH,
    dropout=0.0,
    init_std=0.2,
    decoder_start_token_id=2,
    **SPECIAL,
)


def rope(theta: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": theta, **more}


LLAMA3_ROPE = {
    **rope(5000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "rope_type": "llama3",
}
MODERN_TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
MODERN_ROPE = {"full_attention": rope(160000.0), "sliding_attention": rope(10000.0)}

# Per architecture, configurations with a word that tells them apart.
SOURCES = {
    "bert": {"": BERT},
    "roberta": {"": {**BERT, "pad_token_id": 1, "bos_token_id": 0}},
    "xlm-roberta": {"": {**BERT, "pad_token_id": 1, "bos_token_id": 0}},
    "camembert": {"": {**BERT, "pad_token_id": 1, "bos_token_id": 0}},
    "roberta-prelayernorm": {"": {**BERT, "pad_token_id": 1, "bos_token_id": 0}},
    "distilbert": {
        "": dict(
            dim=WIDTH,
            hidden_dim=INNER,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_position_embeddings=LENGTH,
            dropout=0.0,
            attention_dropout=0.0,
            qa_dropout=0.0,
            seq_classif_dropout=0.0,
            **COMMON,
        )
    },
    "albert": {"": {**BERT, "embedding_size": 14, "classifier_dropout_prob": 0.0}},
    "electra": {"": {**BERT, "embedding_size": 14}, "one width": {**BERT, "embedding_size": WIDTH}},
    "modernbert": {
        "": {**SIZES, "local_attention": 6, "layer_types": MODERN_TYPES, "rope_parameters": MODERN_ROPE},
        "mean": {**SIZES, "local_attention": 8, "classifier_pooling": "mean", "attention_bias": True, "mlp_bias": True}
        | {"norm_bias": True, "classifier_bias": True, "decoder_bias": False},
    },
    "vit": {
        "": {
            **{name: value for name, value in BERT.items() if name not in (*SPECIAL, *NOT_OF_IMAGES)},
            **dict(image_size=[12, 20], patch_size=4, num_channels=2, qkv_bias=True),
        },
    },
    "openai-gpt": {"": GPT},
    "gpt2": {"": {**GPT, "n_inner": INNER}, "square": {**GPT, "n_inner": WIDTH}, "default inner": GPT},
    "gpt_bigcode": {"": {**GPT, "n_inner": INNER}},
    "gpt_neo": {
        "": dict(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_layers=4,
            num_heads=HEADS,
            attention_types=[[["global", "local"], 2]],
            window_size=5,
            max_position_embeddings=LENGTH,
            classifier_dropout=0.0,
            **COMMON,
        )
    },
    "opt": {
        "": {
            **{name: value for name, value in SIZES.items() if name not in ("intermediate_size", "initializer_range")},
            **dict(ffn_dim=INNER, dropout=0.0, init_std=0.2),
        },
    },
    "biogpt": {"": {**BERT}},
    "gpt_neox": {
        "": {**SIZES, "classifier_dropout": 0.0, "rope_parameters": rope(10000.0, partial_rotary_factor=0.67)},
        "one after the other": {**SIZES, "classifier_dropout": 0.0, "use_parallel_residual": False}
        | {"rope_parameters": rope(10000.0, partial_rotary_factor=1.0), "attention_bias": False},
    },
    "bloom": {"": dict(hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **COMMON)},
    "llama": {
        "": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
        "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    },
    "mistral": {"": {**LLAMA, "sliding_window": 5, "head_dim": 10}, "no window": {**LLAMA, "sliding_window": None}},
    "qwen2": {
        "": LLAMA,
        "windows": {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
    "qwen3": {"": {**LLAMA, "head_dim": 10}, "biases": {**LLAMA, "head_dim": 8, "attention_bias": True}},
    "gemma": {"": {**LLAMA, "head_dim": 10}},
    "phi3": {
        "": {**LLAMA, "rope_parameters": rope(10000.0, partial_rotary_factor=0.67)},
        "window": {**LLAMA, "sliding_window": 5},
    },
    "starcoder2": {"": LLAMA, "window": {**LLAMA, "sliding_window": 5, "use_bias": False}},
    "stablelm": {
        "": {**LLAMA, "rope_parameters": rope(10000.0, partial_rotary_factor=0.67)},
        "biases": {**LLAMA, "use_qkv_bias": True, "rope_parameters": rope(10000.0, partial_rotary_factor=1.0)},
    },
    "t5": {"": {**T5, "feed_forward_proj": "relu"}, "1.1": {**T5, "feed_forward_proj": "gated-gelu"}},
    "mt5": {"": {**T5, "feed_forward_proj": "gated-gelu"}},
    "bart": {"": BART, "scaled": {**BART, "scale_embedding": True}},
    "plbart": {"": BART},
    "mbart": {"": {**BART, "scale_embedding": True}},
    "blenderbot": {"": BART},
    "pegasus": {"": {**BART, "scale_embedding": True}},
    "marian": {"": {**BART, "scale_embedding": True, "activation_function": "swish"}},
}
CASES = [
    (model_type, variant, name)
    for model_type, variants in SOURCES.items()
    for variant in variants
    for entry in ARCHITECTURES
    if entry.model_type == model_type
    for name in entry.heads
]


def build_source(model_type: str, variant: str, name: str, **changes) -> PreTrainedModel:
    """A model of a class of theirs, in eval mode; `changes` are settings that differ from the variant's."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    settings = SOURCES[model_type][variant] | changes
    if (model_type, variant) == ("t5", "1.1"):
        settings["tie_word_embeddings"] = False  # to T5's configuration this means unscaled logits
    if name == "ViTForMaskedImageModeling":
        settings |= dict(image_size=12, encoder_stride=4)  # theirs are squares
    labels = 2 if name.endswith(("ForQuestionAnswering", "ForPreTraining")) else LABELS
    config = model_class.config_class(**settings, num_labels=labels)
    model = model_class(config).eval()
    if (model_type, variant) == ("t5", "1.1") and hasattr(model, "lm_head"):
        # transformers 5 ties T5 whatever it is told; published weights of this version have a table of their own.
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        del model.all_tied_weights_keys["lm_head.weight"]
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_norm = tensor.ndim == 1 and key.endswith("weight") and model_type != "gemma"
            if tensor.requires_grad or key == "final_logits_bias":
                tensor.copy_(torch.randn_like(tensor) * 0.2 + is_norm)
    return model
