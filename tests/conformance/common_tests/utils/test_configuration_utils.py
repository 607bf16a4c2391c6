"""Not in the source distribution: a value other than the default for each field that every configuration has."""

config_common_kwargs = {
    "architectures": ["TriptychModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "label"},
    "is_encoder_decoder": True,
    "label2id": {"label": 0},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
