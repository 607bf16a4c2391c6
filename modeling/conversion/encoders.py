"""Encoders: BERT and what came after it."""

from .tables import Architecture, Head, Idle, Pointwise, Row, Stacked, Weight

# ---------------------------------------------------------------------------------------------------------------------
# BERT (Devlin et al. 2019, arXiv 1810.04805)

BERT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_act": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "type_vocab_size": "type_vocab_size",
    "initializer_range": "initializer_range",
    "norm_eps": "layer_norm_eps",
}
BERT_FIXED = {
    "position_embedding_type": "learned",
    "embedding_norm": True,
    "scale_embedding": False,
    "attention_bias": True,
}
BERT_EMBEDDINGS = [
    Weight("embeddings.word_embeddings", "embed_tokens"),
    Weight("embeddings.position_embeddings", "embed_positions"),
    Weight("embeddings.token_type_embeddings", "embed_token_types"),
    Weight("embeddings.LayerNorm", "embed_norm"),
]
BERT_PROJECTIONS = [
    Weight("encoder.layer.*.attention.self.query", "layers.*.self_attn.q_proj"),
    Weight("encoder.layer.*.attention.self.key", "layers.*.self_attn.k_proj"),
    Weight("encoder.layer.*.attention.self.value", "layers.*.self_attn.v_proj"),
    Weight("encoder.layer.*.attention.output.dense", "layers.*.self_attn.o_proj"),
    Weight("encoder.layer.*.intermediate.dense", "layers.*.mlp.up_proj"),
    Weight("encoder.layer.*.output.dense", "layers.*.mlp.down_proj"),
]
BERT_LAYERS = [
    *BERT_PROJECTIONS,
    Weight("encoder.layer.*.attention.output.LayerNorm", "layers.*.self_attn_norm"),
    Weight("encoder.layer.*.output.LayerNorm", "layers.*.mlp_norm"),
]


def projection(name: str) -> list[Weight]:
    """To the vocabulary: the bias stands beside it while the tables are tied; else it has its own, and that is idle."""
    return [
        Weight(f"{name}.bias", "lm_head.bias", where=lambda ours: ours.tie_word_embeddings),
        Weight(f"{name}.bias", (), Idle(), where=lambda ours: not ours.tie_word_embeddings),
        Weight(f"{name}.decoder", "lm_head"),
    ]


BERT_PREDICTIONS = [
    Weight("cls.predictions.transform.dense", "prediction_head.dense"),
    Weight("cls.predictions.transform.LayerNorm", "prediction_head.norm"),
    *projection("cls.predictions"),
]
POOLER = Weight("pooler.dense", "pooler.dense")
CLASSIFIER = Weight("classifier", "classifier")
QA_OUTPUTS = Weight("qa_outputs", "qa_outputs")
BERT_SENTENCE = Weight("cls.seq_relationship", "seq_relationship")


def base_with_pooler() -> Head:
    """A base model that may have been built without its pooling layer."""
    return Head(
        "TriptychEncoderModel",
        fields={"add_pooling_layer": lambda model: model.pooler is not None},
        options=lambda config: {"add_pooling_layer": config.add_pooling_layer},
    )


BERT = Architecture(
    "bert",
    "encoder",
    heads={
        "BertModel": base_with_pooler(),
        "BertForMaskedLM": Head("TriptychForMaskedLM", BERT_PREDICTIONS),
        "BertForPreTraining": Head("TriptychEncoderForPreTraining", [*BERT_PREDICTIONS, BERT_SENTENCE]),
        "BertForNextSentencePrediction": Head("TriptychEncoderForNextSentencePrediction", [BERT_SENTENCE]),
        "BertForSequenceClassification": Head("TriptychEncoderForSequenceClassification", [CLASSIFIER]),
        "BertForTokenClassification": Head("TriptychEncoderForTokenClassification", [CLASSIFIER]),
        "BertForMultipleChoice": Head("TriptychEncoderForMultipleChoice", [CLASSIFIER]),
        "BertForQuestionAnswering": Head("TriptychEncoderForQuestionAnswering", [QA_OUTPUTS]),
    },
    weights=[*BERT_EMBEDDINGS, *BERT_LAYERS, POOLER],
    fields={
        **BERT_FIELDS,
        "max_position_embeddings": "max_position_embeddings",
        "classifier_dropout": "classifier_dropout",
    },
    fixed=BERT_FIXED,
)

# ---------------------------------------------------------------------------------------------------------------------
# RoBERTa (Liu et al. 2019, arXiv 1907.11692): positions begin behind the row of the pad

ROBERTA_PREDICTIONS = [
    Weight("lm_head.dense", "prediction_head.dense"),
    Weight("lm_head.layer_norm", "prediction_head.norm"),
    *projection("lm_head"),
]
OWN_POOLER = [Weight("classifier.dense", "model.pooler.dense"), Weight("classifier.out_proj", "classifier")]


def roberta(model_type: str, name: str, **differences) -> Architecture:
    entry = {
        "heads": {
            f"{name}Model": base_with_pooler(),
            f"{name}ForMaskedLM": Head("TriptychForMaskedLM", ROBERTA_PREDICTIONS, fixed={"hidden_act": "gelu"}),
            f"{name}ForSequenceClassification": Head("TriptychEncoderForSequenceClassification", OWN_POOLER),
            f"{name}ForTokenClassification": Head("TriptychEncoderForTokenClassification", [CLASSIFIER]),
            f"{name}ForMultipleChoice": Head("TriptychEncoderForMultipleChoice", [CLASSIFIER]),
            f"{name}ForQuestionAnswering": Head("TriptychEncoderForQuestionAnswering", [QA_OUTPUTS]),
        },
        "weights": [*BERT_EMBEDDINGS, *BERT_LAYERS, POOLER],
        "fixed": BERT_FIXED,
        **differences,
    }
    return Architecture(
        model_type,
        "encoder",
        fields={**BERT_FIELDS, "classifier_dropout": "classifier_dropout"},
        read=lambda theirs: {
            "position_offset": theirs.pad_token_id + 1,
            "max_position_embeddings": theirs.max_position_embeddings - theirs.pad_token_id - 1,
        },
        write=lambda ours: {"max_position_embeddings": ours.max_position_embeddings + ours.position_offset},
        **entry,
    )


ROBERTA = roberta("roberta", "Roberta")
XLM_ROBERTA = roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = roberta("camembert", "Camembert")
# Norms first (Ott et al. 2019, arXiv 1904.01038)
ROBERTA_PRELAYERNORM = roberta(
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    weights=[
        *BERT_EMBEDDINGS,
        *BERT_PROJECTIONS,
        Weight("encoder.layer.*.attention.LayerNorm", "layers.*.self_attn_norm"),
        Weight("encoder.layer.*.intermediate.LayerNorm", "layers.*.mlp_norm"),
        Weight("LayerNorm", "norm"),
        POOLER,
    ],
    fixed={**BERT_FIXED, "norm_position": "pre"},
)

# ---------------------------------------------------------------------------------------------------------------------
# DistilBERT (Sanh et al. 2019, arXiv 1910.01108)

PRE_CLASSIFIER = [Weight("pre_classifier", "model.pooler.dense"), CLASSIFIER]
DISTILBERT = Architecture(
    "distilbert",
    "encoder",
    heads={
        "DistilBertModel": Head("TriptychEncoderModel"),
        "DistilBertForMaskedLM": Head(
            "TriptychForMaskedLM",
            [
                Weight("vocab_transform", "prediction_head.dense"),
                Weight("vocab_layer_norm", "prediction_head.norm"),
                Weight("vocab_projector", "lm_head"),
            ],
        ),
        "DistilBertForSequenceClassification": Head("TriptychEncoderForSequenceClassification", PRE_CLASSIFIER),
        "DistilBertForTokenClassification": Head("TriptychEncoderForTokenClassification", [CLASSIFIER]),
        "DistilBertForMultipleChoice": Head("TriptychEncoderForMultipleChoice", PRE_CLASSIFIER),
        "DistilBertForQuestionAnswering": Head("TriptychEncoderForQuestionAnswering", [QA_OUTPUTS]),
    },
    weights=[
        *BERT_EMBEDDINGS,
        Weight("transformer.layer.*.attention.q_lin", "layers.*.self_attn.q_proj"),
        Weight("transformer.layer.*.attention.k_lin", "layers.*.self_attn.k_proj"),
        Weight("transformer.layer.*.attention.v_lin", "layers.*.self_attn.v_proj"),
        Weight("transformer.layer.*.attention.out_lin", "layers.*.self_attn.o_proj"),
        Weight("transformer.layer.*.sa_layer_norm", "layers.*.self_attn_norm"),
        Weight("transformer.layer.*.ffn.lin1", "layers.*.mlp.up_proj"),
        Weight("transformer.layer.*.ffn.lin2", "layers.*.mlp.down_proj"),
        Weight("transformer.layer.*.output_layer_norm", "layers.*.mlp_norm"),
    ],
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
    },
    fixed={**BERT_FIXED, "norm_eps": 1e-12, "pooler_act": "relu"},
    training_only=["qa_dropout"],
    inert=["sinusoidal_pos_embds"],
)

# ---------------------------------------------------------------------------------------------------------------------
# ALBERT (Lan et al. 2020, arXiv 1909.11942): a small token table, and one layer at every depth

ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
ALBERT_PREDICTIONS = [
    Weight("predictions.dense", "prediction_head.dense"),
    Weight("predictions.LayerNorm", "prediction_head.norm"),
    *projection("predictions"),
]
ALBERT = Architecture(
    "albert",
    "encoder",
    heads={
        "AlbertModel": base_with_pooler(),
        "AlbertForMaskedLM": Head("TriptychForMaskedLM", ALBERT_PREDICTIONS),
        "AlbertForPreTraining": Head(
            "TriptychEncoderForPreTraining",
            [*ALBERT_PREDICTIONS, Weight("sop_classifier.classifier", "seq_relationship")],
        ),
        "AlbertForSequenceClassification": Head("TriptychEncoderForSequenceClassification", [CLASSIFIER]),
        "AlbertForTokenClassification": Head("TriptychEncoderForTokenClassification", [CLASSIFIER]),
        "AlbertForMultipleChoice": Head("TriptychEncoderForMultipleChoice", [CLASSIFIER]),
        "AlbertForQuestionAnswering": Head("TriptychEncoderForQuestionAnswering", [QA_OUTPUTS]),
    },
    weights=[
        *BERT_EMBEDDINGS,
        Weight("encoder.embedding_hidden_mapping_in", "embed_proj"),
        Weight(f"{ALBERT_LAYER}.attention.query", "layers.0.self_attn.q_proj"),
        Weight(f"{ALBERT_LAYER}.attention.key", "layers.0.self_attn.k_proj"),
        Weight(f"{ALBERT_LAYER}.attention.value", "layers.0.self_attn.v_proj"),
        Weight(f"{ALBERT_LAYER}.attention.dense", "layers.0.self_attn.o_proj"),
        Weight(f"{ALBERT_LAYER}.attention.LayerNorm", "layers.0.self_attn_norm"),
        Weight(f"{ALBERT_LAYER}.ffn", "layers.0.mlp.up_proj"),
        Weight(f"{ALBERT_LAYER}.ffn_output", "layers.0.mlp.down_proj"),
        Weight(f"{ALBERT_LAYER}.full_layer_layer_norm", "layers.0.mlp_norm"),
        Weight("pooler", "pooler.dense"),
    ],
    fields={
        **BERT_FIELDS,
        "embedding_size": "embedding_size",
        "max_position_embeddings": "max_position_embeddings",
        "classifier_dropout": "classifier_dropout_prob",
    },
    fixed={**BERT_FIXED, "share_layers": True},
)

# ---------------------------------------------------------------------------------------------------------------------
# ELECTRA (Clark et al. 2020, arXiv 2003.10555)

ELECTRA = Architecture(
    "electra",
    "encoder",
    heads={
        "ElectraModel": Head("TriptychEncoderModel"),
        "ElectraForMaskedLM": Head(
            "TriptychForMaskedLM",
            [
                Weight("generator_predictions.dense", "prediction_head.dense"),
                Weight("generator_predictions.LayerNorm", "prediction_head.norm"),
                Weight("generator_lm_head", "lm_head"),
            ],
            fixed={"hidden_act": "gelu"},
        ),
        "ElectraForSequenceClassification": Head("TriptychEncoderForSequenceClassification", OWN_POOLER),
        "ElectraForTokenClassification": Head("TriptychEncoderForTokenClassification", [CLASSIFIER]),
        "ElectraForMultipleChoice": Head(
            "TriptychEncoderForMultipleChoice", [Weight("sequence_summary.summary", "model.pooler.dense"), CLASSIFIER]
        ),
        "ElectraForQuestionAnswering": Head("TriptychEncoderForQuestionAnswering", [QA_OUTPUTS]),
    },
    weights=[*BERT_EMBEDDINGS, Weight("embeddings_project", "embed_proj"), *BERT_LAYERS],
    fields={
        **BERT_FIELDS,
        "embedding_size": "embedding_size",
        "max_position_embeddings": "max_position_embeddings",
        "classifier_dropout": "classifier_dropout",
    },
    fixed={**BERT_FIXED, "pooler_act": "gelu"},
    training_only=["summary_last_dropout"],
)

# ---------------------------------------------------------------------------------------------------------------------
# ModernBERT (Warner et al. 2024, arXiv 2412.13663)

MODERN_HEAD = [Weight("head.dense", "prediction_head.dense"), Weight("head.norm", "prediction_head.norm")]
POOLINGS = {"cls": "first", "mean": "mean"}
MODERNBERT = Architecture(
    "modernbert",
    "encoder",
    heads={
        "ModernBertModel": Head("TriptychEncoderModel"),
        "ModernBertForMaskedLM": Head("TriptychForMaskedLM", [*MODERN_HEAD, Weight("decoder", "lm_head")]),
        "ModernBertForSequenceClassification": Head(
            "TriptychEncoderForSequenceClassification", [*MODERN_HEAD, CLASSIFIER]
        ),
        "ModernBertForTokenClassification": Head("TriptychEncoderForTokenClassification", [*MODERN_HEAD, CLASSIFIER]),
        "ModernBertForMultipleChoice": Head("TriptychEncoderForMultipleChoice", [*MODERN_HEAD, CLASSIFIER]),
        "ModernBertForQuestionAnswering": Head(
            "TriptychEncoderForQuestionAnswering", [*MODERN_HEAD, Weight("classifier", "qa_outputs")]
        ),
    },
    weights=[
        Weight("embeddings.tok_embeddings", "embed_tokens"),
        Weight("embeddings.norm", "embed_norm"),
        Weight(
            "layers.*.attn.Wqkv",
            ("layers.*.self_attn.q_proj", "layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj"),
            Stacked("q_proj", "k_proj", "v_proj"),
        ),
        Weight("layers.*.attn.Wo", "layers.*.self_attn.o_proj"),
        Weight("layers.*.attn_norm", "layers.*.self_attn_norm"),
        Weight("layers.*.mlp.Wi", ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"), Stacked("gate_proj", "up_proj")),
        Weight("layers.*.mlp.Wo", "layers.*.mlp.down_proj"),
        Weight("layers.*.mlp_norm", "layers.*.mlp_norm"),
        Weight("final_norm", "norm"),
    ],
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_act": "hidden_activation",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "lm_head_bias": "decoder_bias",
        "prediction_bias": "classifier_bias",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "mlp_dropout",
        "hidden_dropout": "embedding_dropout",
        "classifier_dropout": "classifier_dropout",
        "initializer_range": "initializer_range",
        "max_position_embeddings": "max_position_embeddings",
        "layer_types": "layer_types",
        "sliding_window": "local_attention",
        "rope_parameters": "rope_parameters",
    },
    fixed={
        "norm_position": "pre",
        "skip_first_norm": True,
        "embedding_norm": True,
        "scale_embedding": False,
        "mlp_type": "gated",
        "position_embedding_type": "rotary",
        "classifier_head": "prediction",
    },
    read=lambda theirs: {"pooling": POOLINGS[theirs.classifier_pooling]},
    write=lambda ours: {
        "classifier_pooling": next((name for name, ours_name in POOLINGS.items() if ours_name == ours.pooling), None),
        "classifier_activation": ours.hidden_act,
    },
    training_only=["initializer_cutoff_factor"],
    inert=["cls_token_id", "sep_token_id", "deterministic_flash_attn", "sparse_pred_ignore_index"],
)

# ---------------------------------------------------------------------------------------------------------------------
# ViT (Dosovitskiy et al. 2021, arXiv 2010.11929)

VIT = Architecture(
    "vit",
    "encoder",
    heads={
        "ViTModel": base_with_pooler(),
        "ViTForImageClassification": Head("TriptychEncoderForImageClassification", [CLASSIFIER]),
        "ViTForMaskedImageModeling": Head(
            "TriptychEncoderForMaskedImageModeling",
            [Weight("vit.embeddings.mask_token", "mask_token"), Weight("decoder.0", "decoder", Pointwise())],
        ),
    },
    weights=[
        Weight("embeddings.cls_token", "embed_patches.class_token"),
        Weight("embeddings.patch_embeddings.projection", "embed_patches.projection"),
        Weight("embeddings.position_embeddings", "embed_positions.weight", Row()),
        *[Weight(f"layers.*.attention.{x}_proj", f"layers.*.self_attn.{x}_proj") for x in "qkvo"],
        Weight("layers.*.mlp.fc1", "layers.*.mlp.up_proj"),
        Weight("layers.*.mlp.fc2", "layers.*.mlp.down_proj"),
        Weight("layers.*.layernorm_before", "layers.*.self_attn_norm"),
        Weight("layers.*.layernorm_after", "layers.*.mlp_norm"),
        Weight("layernorm", "norm"),
        POOLER,
    ],
    fields={
        **{name: name for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        **{name: name for name in ("hidden_act", "initializer_range", "image_size", "patch_size", "num_channels")},
        "hidden_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
        "norm_eps": "layer_norm_eps",
        "pooler_act": "pooler_act",
    },
    fixed={
        "input_type": "image",
        "norm_position": "pre",
        "position_embedding_type": "learned",
        "scale_embedding": False,
        "classifier_head": "linear",
    },
    read=lambda theirs: {"attention_bias": True if theirs.qkv_bias else "o"},
    write=lambda ours: {"qkv_bias": ours.attention_bias is True, "encoder_stride": ours.patch[0]},
    inert=["encoder_stride", "pooler_output_size"],
)

ENCODERS = [
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    ROBERTA_PRELAYERNORM,
    DISTILBERT,
    ALBERT,
    ELECTRA,
    MODERNBERT,
    VIT,
]
