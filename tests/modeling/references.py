"""Tiny random models of transformers, and what they are in our terms: configurations, and names of parameters.

Each has odd sizes, weights of deviation 0.2, and biases and norms that are random too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import triptych
from triptych import TriptychConfig

VOCAB, WIDTH, INNER, LAYERS, LENGTH = 101, 36, 53, 3, 40
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=3,
    max_position_embeddings=LENGTH,
    **SPECIAL,
)
Tensors = dict[str, torch.Tensor]


@dataclass
class Reference:
    """How to build a model of transformers, what it is in our terms, and how its parameters are called here."""

    build: Callable[[], PreTrainedModel]
    model_class: type
    config: dict
    names: list[tuple[str, str]]  # regular expressions and what to put in their place, one after the other
    reshape: Callable[[Tensors], Tensors] = lambda tensors: tensors  # before the names are changed
    absent: str = "$^"  # our parameters that the reference does not have; they are zero
    positions_follow_mask: bool = True
    extra_labels: dict = field(default_factory=dict)

    def translate(self, theirs: Tensors) -> Tensors:
        """Their parameters, or the gradients of these, under our names."""
        ours = {}
        for name, tensor in self.reshape(theirs).items():
            for pattern, replacement in self.names:
                name = re.sub(pattern, replacement, name)
            ours[name] = tensor
        return ours

    def models(self, backend: str = "sdpa") -> tuple[PreTrainedModel, PreTrainedModel]:
        """Theirs, and ours of equal weights; both in eval mode."""
        torch.manual_seed(0)
        theirs = self.build().eval()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                is_norm = parameter.ndim == 1 and name.endswith("weight")
                parameter.copy_(torch.randn_like(parameter) * 0.2 + is_norm)
        config = TriptychConfig(**{**COMMON, **self.config})
        ours = self.model_class._from_config(config, attn_implementation=backend).eval()
        missing, unexpected = ours.load_state_dict(self.translate(theirs.state_dict()), strict=False)
        assert not unexpected, unexpected
        assert all(re.search(self.absent, name) for name in missing), missing
        with torch.no_grad():
            for name in missing:
                ours.get_parameter(name).zero_()
        return theirs, ours


COMMON = dict(**SIZES, hidden_dropout=0.0, scale_embedding=False)


# ---------------------------------------------------------------------------------------------------------------------
# Encoders


def bert(model_class: type, head_names: list, ours: type, **options) -> Reference:
    return Reference(
        build=lambda: model_class(
            transformers.BertConfig(
                **SIZES, type_vocab_size=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
        ),
        model_class=ours,
        config=dict(
            topology="encoder",
            position_embedding_type="learned",
            type_vocab_size=3,
            embedding_norm=True,
            attention_bias=True,
            hidden_act="gelu",
            norm_eps=1e-12,
        ),
        names=[
            *head_names,
            (r"^bert\.embeddings\.word_embeddings", "model.embed_tokens"),
            (r"^bert\.embeddings\.position_embeddings", "model.embed_positions"),
            (r"^bert\.embeddings\.token_type_embeddings", "model.embed_token_types"),
            (r"^bert\.embeddings\.LayerNorm", "model.embed_norm"),
            (r"^bert\.encoder\.layer\.", "model.layers."),
            (r"attention\.self\.(q|k|v)\w+", r"self_attn.\1_proj"),
            (r"attention\.output\.dense", "self_attn.o_proj"),
            (r"attention\.output\.LayerNorm", "self_attn_norm"),
            (r"intermediate\.dense", "mlp.up_proj"),
            (r"output\.dense", "mlp.down_proj"),
            (r"output\.LayerNorm", "mlp_norm"),
        ],
        **options,
    )


BERT_HEAD = [
    (r"^cls\.predictions\.transform\.dense", "prediction_head.dense"),
    (r"^cls\.predictions\.transform\.LayerNorm", "prediction_head.norm"),
    (r"^cls\.predictions\.decoder", "lm_head"),
    (r"^cls\.predictions\.bias", "lm_head.bias"),
]
BERT_SENTENCE = [(r"^cls\.seq_relationship", "seq_relationship"), (r"^bert\.pooler", "model.pooler")]


def modernbert() -> Reference:
    """ModernBERT, but for one norm: its first layer has none before attention, which no field of ours expresses."""
    layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }

    def build():
        model = transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(
                **SIZES,
                local_attention=6,
                layer_types=layer_types,
                rope_parameters=rope_parameters,
                cls_token_id=1,
                sep_token_id=2,
            )
        )
        model.model.layers[0].attn_norm = nn.LayerNorm(WIDTH, eps=1e-5, bias=False)
        return model

    def reshape(tensors):
        split = {}
        for name, tensor in tensors.items():
            if "Wqkv" in name:
                parts = zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True)
                split |= {name.replace("Wqkv", part): piece for part, piece in parts}
            elif "mlp.Wi" in name:
                parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
                split |= {name.replace("Wi", part): piece for part, piece in parts}
            else:
                split[name] = tensor
        return split

    return Reference(
        build=build,
        model_class=triptych.TriptychForMaskedLM,
        config=dict(
            topology="encoder",
            position_embedding_type="rotary",
            rope_parameters=rope_parameters,
            layer_types=layer_types,
            sliding_window=6,
            embedding_norm=True,
            norm_position="pre",
            mlp_type="gated",
            mlp_bias=False,
            hidden_act="gelu",
        ),
        names=[
            (r"^model\.embeddings\.tok_embeddings", "model.embed_tokens"),
            (r"^model\.embeddings\.norm", "model.embed_norm"),
            (r"^model\.final_norm", "model.norm"),
            (r"^head\.", "prediction_head."),
            (r"^decoder\.", "lm_head."),
            (r"attn\.Wo", "self_attn.o_proj"),
            (r"\.attn\.", ".self_attn."),
            (r"\.attn_norm", ".self_attn_norm"),
            (r"mlp\.Wo", "mlp.down_proj"),
        ],
        reshape=reshape,
        absent=r"norm\.bias$|prediction_head\.dense\.bias$",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Decoders


def gpt2(inner: int) -> Reference:
    def reshape(tensors):
        """GPT-2 keeps projections transposed, and those of queries, keys and values in one."""
        split = {}
        for name, tensor in tensors.items():
            if re.search(r"\.c_\w+\.weight$", name):
                tensor = tensor.T
            if "c_attn" in name:
                parts = zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True)
                split |= {name.replace("attn.c_attn", f"self_attn.{part}"): piece for part, piece in parts}
            else:
                split[name] = tensor
        return split

    return Reference(
        build=lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=WIDTH,
                n_inner=inner,
                n_layer=LAYERS,
                n_head=3,
                n_positions=LENGTH,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **SPECIAL,
            )
        ),
        model_class=triptych.TriptychForCausalLM,
        config=dict(
            topology="decoder",
            intermediate_size=inner,
            position_embedding_type="learned",
            norm_position="pre",
            attention_bias=True,
            hidden_act="gelu_new",
        ),
        names=[
            (r"^transformer\.wte", "model.embed_tokens"),
            (r"^transformer\.wpe", "model.embed_positions"),
            (r"^transformer\.ln_f", "model.norm"),
            (r"^transformer\.h\.", "model.layers."),
            (r"attn\.c_proj", "self_attn.o_proj"),
            (r"mlp\.c_fc", "mlp.up_proj"),
            (r"mlp\.c_proj", "mlp.down_proj"),
            (r"ln_1", "self_attn_norm"),
            (r"ln_2", "mlp_norm"),
        ],
        reshape=reshape,
    )


def llama_like(model_type: str, theirs: dict, ours: dict) -> Reference:
    shared = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return Reference(
        build=lambda: getattr(transformers, f"{model_type}ForCausalLM")(
            getattr(transformers, f"{model_type}Config")(**shared, **theirs, rms_norm_eps=1e-6)
        ),
        model_class=triptych.TriptychForCausalLM,
        config=dict(
            topology="decoder",
            position_embedding_type="rotary",
            norm_type="rmsnorm",
            norm_position="pre",
            norm_eps=1e-6,
            hidden_act="silu",
            mlp_type="gated",
            **{"mlp_bias": False, **shared, **ours},
        ),
        names=[(r"input_layernorm", "self_attn_norm"), (r"post_attention_layernorm", "mlp_norm")],
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


# ---------------------------------------------------------------------------------------------------------------------
# Encoder-decoders


def t5(feed_forward: str, tied: bool, buckets: int = 32) -> Reference:
    is_gated = feed_forward.startswith("gated")

    def build():
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCAB,
                d_model=WIDTH,
                d_kv=10,
                d_ff=INNER,
                num_layers=LAYERS,
                num_decoder_layers=LAYERS - 1,
                num_heads=3,
                relative_attention_num_buckets=buckets,
                relative_attention_max_distance=20,
                dropout_rate=0.0,
                feed_forward_proj=feed_forward,
                tie_word_embeddings=tied,
                pad_token_id=0,
                eos_token_id=2,
                decoder_start_token_id=0,
            )
        )
        if not tied:  # transformers 5 ties T5 whatever it is told; published v1.1 weights have a table of their own
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        return model

    return Reference(
        build=build,
        model_class=triptych.TriptychForConditionalGeneration,
        config=dict(
            topology="encoder_decoder",
            head_dim=10,
            position_embedding_type="relative",
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=20,
            norm_type="rmsnorm",
            norm_position="pre",
            norm_eps=1e-6,
            attention_scale=1.0,
            mlp_bias=False,
            mlp_type="gated" if is_gated else "dense",
            hidden_act="gelu_new" if is_gated else "relu",
            tie_word_embeddings=tied,
            logit_scale=WIDTH**-0.5 if tied else 1.0,
            decoder={"num_hidden_layers": LAYERS - 1},
            decoder_start_token_id=0,
        ),
        names=[
            (r"^(shared|(en|de)coder\.embed_tokens)", "model.encoder.embed_tokens"),
            (r"^(encoder|decoder)\.", r"model.\1."),
            (r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias", "relative_bias.relative_attention_bias"),
            (r"block\.", "layers."),
            (r"layer\.0\.SelfAttention\.(\w)\.", r"self_attn.\1_proj."),
            (r"layer\.1\.EncDecAttention\.(\w)\.", r"cross_attn.\1_proj."),
            (r"layer\.\d\.DenseReluDense\.wi_0", "mlp.gate_proj"),
            (r"layer\.\d\.DenseReluDense\.wi(_1)?", "mlp.up_proj"),
            (r"layer\.\d\.DenseReluDense\.wo", "mlp.down_proj"),
            (r"layer\.0\.layer_norm", "self_attn_norm"),
            (r"(decoder.*)layer\.1\.layer_norm", r"\1cross_attn_norm"),
            (r"layer\.\d\.layer_norm", "mlp_norm"),
            (r"final_layer_norm", "norm"),
        ],
    )


def bart(scale_embedding: bool) -> Reference:
    def reshape(tensors):
        """BART's positions begin at row 2, and its bias on the logits is a buffer of zeros."""
        return {
            name: tensor[2:] if "embed_positions" in name else tensor
            for name, tensor in tensors.items()
            if name != "final_logits_bias"
        }

    return Reference(
        build=lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(
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
                scale_embedding=scale_embedding,
                decoder_start_token_id=2,
                **SPECIAL,
            )
        ),
        model_class=triptych.TriptychForConditionalGeneration,
        config=dict(
            topology="encoder_decoder",
            position_embedding_type="learned",
            embedding_norm=True,
            attention_bias=True,
            hidden_act="gelu",
            scale_embedding=scale_embedding,
            decoder={"num_hidden_layers": LAYERS - 1, "num_attention_heads": 6, "intermediate_size": INNER + 2},
            decoder_start_token_id=2,
        ),
        names=[
            (r"^model\.(shared|(en|de)coder\.embed_tokens)", "model.encoder.embed_tokens"),
            (r"layernorm_embedding", "embed_norm"),
            (r"encoder_attn\.", "cross_attn."),
            (r"encoder_attn_layer_norm", "cross_attn_norm"),
            (r"self_attn_layer_norm", "self_attn_norm"),
            (r"final_layer_norm", "mlp_norm"),
            (r"out_proj", "o_proj"),
            (r"fc1", "mlp.up_proj"),
            (r"fc2", "mlp.down_proj"),
        ],
        reshape=reshape,
        positions_follow_mask=False,
    )


ENCODERS = {
    "bert": bert(transformers.BertForMaskedLM, BERT_HEAD, triptych.TriptychForMaskedLM),
    "bert pretraining": bert(
        transformers.BertForPreTraining,
        BERT_HEAD + BERT_SENTENCE,
        triptych.TriptychEncoderForPreTraining,
        extra_labels={"next_sentence_label": torch.tensor([1, 0, 1])},
    ),
    "modernbert": modernbert(),
}
DECODERS = {
    "gpt2": gpt2(INNER),
    "gpt2, square projections": gpt2(WIDTH),
    "llama": llama_like("Llama", {"rope_parameters": LLAMA3_ROPE}, {"rope_parameters": LLAMA3_ROPE}),
    "llama, biases": llama_like(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
    ),
    "mistral": llama_like("Mistral", {"sliding_window": 5, "head_dim": 6}, {"sliding_window": 5}),
    "qwen3": llama_like("Qwen3", {"head_dim": 10}, {"head_dim": 10, "qk_norm": True}),
}
ENCODER_DECODERS = {
    "t5 v1.0": t5("relu", tied=True),
    "t5 v1.1": t5("gated-gelu", tied=False, buckets=8),
    "bart": bart(scale_embedding=False),
    "bart, scaled": bart(scale_embedding=True),
}
REFERENCES = ENCODERS | DECODERS | ENCODER_DECODERS
