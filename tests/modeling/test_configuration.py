"""Every field survives saving, every impossible combination is refused in a sentence, every preset loads and builds."""

import json
from dataclasses import fields
from importlib import resources
from typing import Literal, get_args, get_origin

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tiny import TINY, TOPOLOGIES, tiny_config
from transformers import AutoConfig, AutoModel, PreTrainedConfig

import triptych
from triptych import TriptychConfig
from triptych.auto_map import AUTO_CLASSES
from triptych.configuration_triptych import TOPOLOGIES as CLASSES

PRESETS = sorted(file.name.removesuffix(".json") for file in (resources.files("triptych.configs") / "models").iterdir())

# A value that is not the default, for every field; what else a field needs stands in NEEDS.
ODD = {
    "architectures": ["SomeModel"],
    "output_hidden_states": True,
    "return_dict": False,
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 3,
    "is_encoder_decoder": None,  # the topology decides
    "id2label": {0: "no", 1: "yes", 2: "so"},
    "label2id": {"no": 0, "yes": 1},
    "problem_type": "regression",
    "topology": None,  # decides the class
    "transformers_version": None,  # written by transformers
    "vocab_size": 101,
    "pad_token_id": None,
    "bos_token_id": 5,
    "eos_token_id": [6, 7],
    "mask_token_id": 8,
    "decoder_start_token_id": 9,
    "tie_word_embeddings": False,
    "initializer_range": 0.013,
    "logit_scale": 0.25,
    "classifier_dropout": 0.3,
    "use_cache": False,
    "hidden_size": 36,
    "intermediate_size": 65,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "gelu_new",
    "mlp_type": "gated",
    "norm_type": "rmsnorm",
    "norm_position": "sandwich",
    "norm_eps": 1e-12,
    "residual": False,
    "residual_scale": 1.7,
    "position_embedding_type": "alibi",
    "max_position_embeddings": 77,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 123.0, "factor": 3.0},
    "relative_attention_num_buckets": 14,
    "relative_attention_max_distance": 99,
    "attention_bias": True,
    "mlp_bias": False,
    "qk_norm": True,
    "attention_scale": 0.9,
    "layer_types": ["chunked_attention", "full_attention"],
    "sliding_window": 7,
    "attention_chunk_size": 5,
    "num_global_tokens": 3,
    "attention_dilation": [2, 1],
    "num_random_blocks": 2,
    "random_block_size": 7,
    "linear_feature_map": "unit",
    "linear_decay": "gated",
    "linear_update": "delta",
    "linear_conv_kernel": 4,
    "linear_output_gate": True,
    "linear_cross_attention": True,
    "cross_attention_layers": [1],
    "cross_attention_score": "additive",
    "cross_attention_window": 3,
    "cross_attention_alignment": "predictive",
    "hidden_dropout": 0.2,
    "attention_dropout": 0.3,
    "activation_dropout": 0.4,
    "embedding_size": 10,
    "scale_embedding": False,
    "embedding_norm": True,
    "type_vocab_size": 3,
    "share_layers": True,
    "pooling": "mean",
    "lm_head_bias": True,
    "norm_bias": False,
    "parallel_residual": True,
    "skip_first_norm": True,
    "sinusoidal_layout": "concatenated",
    "position_offset": 2,
    "add_pooling_layer": True,
    "pooler_act": "relu",
    "classifier_head": "prediction",
    "prediction_bias": False,
    "classifier_bias": False,
    "input_type": "image",
    "image_size": [32, 48],
    "patch_size": 8,
    "patch_stride": 8,
    "num_channels": 1,
    "num_frames": 8,
    "tubelet_size": 4,
    "num_mel_bins": 40,
    "conv_stride": [2, 2, 1],
    "class_token": False,
    "is_causal": False,
    "add_cross_attention": True,
    "cross_attention_hidden_size": 20,
    "share_embeddings": False,
    "encoder": {"num_hidden_layers": 3, "head_dim": 10},
    "decoder": {"num_hidden_layers": 1, "intermediate_size": 9},
}
NEEDS = {
    "id2label": {"label2id": {"no": 0, "yes": 1, "so": 2}},  # transformers fills in one only if both are missing
    "label2id": {"id2label": {0: "no", 1: "yes"}},
    "rope_parameters": {"position_embedding_type": "rotary"},
    "parallel_residual": {"norm_position": "pre"},
    "skip_first_norm": {"norm_position": "pre"},
    "layer_types": {"attention_chunk_size": 5},
    "cross_attention_hidden_size": {"add_cross_attention": True},
    "num_global_tokens": {"sliding_window": 7},
    "attention_dilation": {"sliding_window": 7},
    "num_random_blocks": {"sliding_window": 7},
    "linear_update": {"linear_feature_map": "unit"},
    "residual": {"norm_position": "none"},
    "cross_attention_alignment": {"cross_attention_window": 3},
}
NOT_TO_GIVE = {name for name, value in ODD.items() if value is None and name != "pad_token_id"}


def field_names(topology: str) -> list[str]:
    return [field.name for field in fields(CLASSES[topology]) if field.name not in NOT_TO_GIVE]


def base(**changes) -> dict:
    """The tiny configuration, without what `changes` say anew."""
    return {**{name: value for name, value in TINY.items() if name not in changes}, **changes}


def default_of(topology: str, name: str):
    """What a field is if it is not given, in the tiny configuration."""
    return getattr(TriptychConfig(topology=topology, **{key: TINY[key] for key in TINY if key != name}), name)


EVERY_FIELD = [(topology, name) for topology in TOPOLOGIES for name in field_names(topology)]
STACK_FIELDS = sorted(
    {*field_names("encoder")} & {*field_names("decoder")} - {f.name for f in fields(PreTrainedConfig)}
)


def reloaded(config: TriptychConfig, folder) -> TriptychConfig:
    config.save_pretrained(folder)
    return AutoConfig.from_pretrained(folder)


def assert_round_trips(config: TriptychConfig, folder):
    """Through a dictionary, a copy, and a file."""
    again = reloaded(config, folder)
    assert type(again) is type(config)
    expected = config.to_dict()
    for copy in (again, type(config).from_dict(expected), TriptychConfig(**expected)):
        actual = copy.to_dict()
        for name in ("_name_or_path", "transformers_version"):
            actual[name] = expected.get(name)
        assert actual == expected


# ---------------------------------------------------------------------------------------------------------------------
# Round trips


def test_every_field_has_an_odd_value():
    """A new field needs an entry in the table above."""
    names = {field.name for topology in TOPOLOGIES for field in fields(CLASSES[topology])}
    assert names == ODD.keys()


@pytest.mark.parametrize(("topology", "name"), EVERY_FIELD)
def test_a_field_at_an_odd_value(topology, name, tmp_path):
    """Config values equal to a default vanish and are derived anew: here, values that differ from it."""
    config = TriptychConfig(topology=topology, **base(**{name: ODD[name]}, **NEEDS.get(name, {})))
    value = getattr(config, name)
    if name in ("encoder", "decoder"):
        for key, wanted in ODD[name].items():
            assert getattr(value, key) == wanted
            assert getattr(getattr(reloaded(config, tmp_path), name), key) == wanted
    elif name == "dtype":
        assert value in (torch.bfloat16, "bfloat16")
    else:
        assert value == ODD[name]
        assert getattr(reloaded(config, tmp_path), name) == ODD[name]
    assert_round_trips(config, tmp_path)


@pytest.mark.parametrize(("topology", "name"), EVERY_FIELD)
def test_a_field_at_its_default(topology, name, tmp_path):
    """Config values equal to a default vanish and are derived anew: the default said aloud is the default kept."""
    others = {key: default_of(topology, key) for key in NEEDS.get(name, {}) if key in ("id2label", "label2id")}
    default = default_of(topology, name)
    config = TriptychConfig(topology=topology, **base(**{name: default}, **others))
    if name not in ("rope_parameters", "encoder", "decoder"):  # these are derived in part
        assert getattr(config, name) == default
    assert_round_trips(config, tmp_path)


@pytest.mark.parametrize("name", STACK_FIELDS)
def test_a_panel_keeps_its_default_beside_an_odd_top(name, tmp_path):
    """A stack field given at the top applies to both panels, and what a panel says wins, even the default."""
    default = default_of("encoder", name)
    top = base(**{name: ODD[name]}, **NEEDS.get(name, {}), share_embeddings=False)
    config = TriptychConfig(topology="encoder_decoder", **top, encoder={name: default})
    again = reloaded(config, tmp_path)
    for panel in (config.decoder, again.decoder):
        assert getattr(panel, name) == ODD[name]
    if name != "rope_parameters":
        assert getattr(config.encoder, name) == default
    assert again.encoder.to_dict() == config.encoder.to_dict()
    assert_round_trips(config, tmp_path)


def test_a_field_of_one_panel_finds_it(tmp_path):
    """A field that one panel has, said beside both, was kept as an attribute of the pair and changed nothing."""
    config = tiny_config("encoder_decoder", cross_attention_score="additive", is_causal=False)
    assert config.decoder.cross_attention_score == "additive" and not config.decoder.is_causal
    assert tiny_config("encoder_decoder", share_embeddings=False, input_type="image").encoder.input_type == "image"
    assert not hasattr(config, "cross_attention_score")
    assert_round_trips(config, tmp_path)


def test_panels_may_be_configurations(tmp_path):
    """A panel that is given whole keeps what it says, though the top says otherwise."""
    panels = dict(encoder=tiny_config("encoder"), decoder=tiny_config("decoder", num_hidden_layers=1))
    top = dict(vocab_size=50, hidden_size=64, num_hidden_layers=5, norm_type="rmsnorm", qk_norm=True, norm_eps=0.5)
    config = TriptychConfig(topology="encoder_decoder", **top, **panels)
    own = set(STACK_FIELDS)
    for name, panel in panels.items():
        actual = getattr(config, name).to_dict()
        assert {key: actual[key] for key in own} == {key: panel.to_dict()[key] for key in own}
    assert_round_trips(config, tmp_path)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_unknown_keys_are_kept(topology, tmp_path):
    """A key of someone else's, at the top and in a panel."""
    note = {"a": [1, None, {"b": 2.5}]}
    config = tiny_config(topology, someone_elses=note)
    assert reloaded(config, tmp_path).someone_elses == note
    if topology == "encoder_decoder":
        config = tiny_config(topology, encoder={"someone_elses": note})
        assert reloaded(config, tmp_path).encoder.someone_elses == note
    assert_round_trips(config, tmp_path)


def test_dispatch():
    """`TriptychConfig` is one class per topology, the encoder-decoder if none is named."""
    for topology, config_class in CLASSES.items():
        assert type(TriptychConfig(topology=topology)) is config_class
        assert config_class().topology == topology and config_class.model_type == "triptych"
    assert type(TriptychConfig()) is triptych.TriptychEncoderDecoderConfig


def test_defaults_are_the_base_model_of_2017():
    """Vaswani et al. 2017, table 3, line "base"."""
    config = TriptychConfig()
    for stack in (config.encoder, config.decoder):
        assert (stack.num_hidden_layers, stack.hidden_size, stack.intermediate_size) == (6, 512, 2048)
        assert (stack.num_attention_heads, stack.head_dim, stack.hidden_dropout) == (8, 64, 0.1)
        assert (stack.norm_position, stack.position_embedding_type, stack.hidden_act) == ("post", "sinusoidal", "relu")
        assert stack.scale_embedding and stack.tie_word_embeddings
    assert config.share_embeddings


def test_a_copy_does_not_share_what_can_change():
    """Two configurations of one dictionary of rotary settings stay apart."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    config = tiny_config("decoder", position_embedding_type="rotary", rope_parameters=rope)
    config.rope_parameters["factor"] = 8.0
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


# ---------------------------------------------------------------------------------------------------------------------
# Refusals

REFUSED = [
    ("encoder", dict(vocab_size=0), ["`vocab_size` is 0", "greater than 0"]),
    ("encoder", dict(hidden_size=-4), ["`hidden_size` is -4", "greater than 0"]),
    ("encoder", dict(intermediate_size=0), ["`intermediate_size` is 0", "greater than 0"]),
    ("encoder", dict(num_hidden_layers=0), ["`num_hidden_layers` is 0", "greater than 0"]),
    ("encoder", dict(num_attention_heads=0), ["`num_attention_heads` is 0", "greater than 0"]),
    ("encoder", dict(num_key_value_heads=0), ["`num_key_value_heads` is 0", "greater than 0"]),
    ("encoder", dict(head_dim=0), ["`head_dim` is 0", "greater than 0"]),
    ("encoder", dict(embedding_size=0), ["`embedding_size` is 0", "greater than 0"]),
    ("encoder", dict(max_position_embeddings=0), ["`max_position_embeddings` is 0", "greater than 0"]),
    ("encoder", dict(norm_eps=0.0), ["`norm_eps` is 0.0", "greater than 0"]),
    ("encoder", dict(residual_scale=-1.0), ["`residual_scale` is -1.0", "greater than 0"]),
    ("encoder", dict(hidden_dropout=1.0), ["`hidden_dropout` is 1.0", "at least 0 and below 1"]),
    ("encoder", dict(attention_dropout=-0.1), ["`attention_dropout` is -0.1", "at least 0 and below 1"]),
    ("encoder", dict(activation_dropout=2), ["`activation_dropout` is 2", "at least 0 and below 1"]),
    ("encoder", dict(classifier_dropout=1.5), ["`classifier_dropout` is 1.5", "at least 0 and below 1"]),
    ("encoder", dict(initializer_range=-0.02), ["`initializer_range` is -0.02"]),
    ("encoder", dict(type_vocab_size=-1), ["`type_vocab_size` is -1", "at least 0"]),
    ("encoder", dict(num_attention_heads=5), ["`hidden_size` is 32", "multiple of `num_attention_heads` = 5"]),
    ("encoder", dict(num_key_value_heads=3), ["`num_key_value_heads` is 3", "divide `num_attention_heads` = 4"]),
    ("encoder", dict(hidden_act="relo"), ["`hidden_act` is 'relo'", "relu", "gelu_new"]),
    ("encoder", dict(problem_type="regresion"), ["problem_type", "regresion", "single_label_classification"]),
    ("encoder", dict(layer_types=["full_attention"]), ["`layer_types` has 1", "`num_hidden_layers` = 2"]),
    ("encoder", dict(layer_types=["full", "full"]), ["`layer_types` has 'full'", "full_attention, sliding_attention"]),
    ("encoder", dict(layer_types=["sliding_attention"] * 2), ["'sliding_attention'", "`sliding_window` is None"]),
    ("encoder", dict(layer_types=["chunked_attention"] * 2), ["'chunked_attention'", "`attention_chunk_size` is None"]),
    ("encoder", dict(sliding_window=0), ["`sliding_window` is 0", "None or at least 1"]),
    ("decoder", dict(sliding_window=1), ["`sliding_window` is 1", "None or at least 2"]),
    ("decoder", dict(attention_chunk_size=1), ["`attention_chunk_size` is 1", "None or at least 2"]),
    (
        "encoder",
        dict(share_layers=True, layer_types=["full_attention", "sliding_attention"], sliding_window=4),
        ["`share_layers` is True", "sliding_attention"],
    ),
    ("encoder", dict(num_global_tokens=-1), ["`num_global_tokens` is -1", "at least 0"]),
    ("encoder", dict(num_global_tokens=2), ["`num_global_tokens` is 2", "no layer with a window or chunks"]),
    ("encoder", dict(random_block_size=0), ["`random_block_size` is 0", "greater than 0"]),
    ("encoder", dict(num_random_blocks=-1), ["`num_random_blocks` is -1", "at least 0"]),
    ("encoder", dict(num_random_blocks=2), ["`num_random_blocks` is 2", "no 'sliding_attention'"]),
    ("encoder", dict(attention_dilation=0, sliding_window=4), ["`attention_dilation` is 0", "at least 1"]),
    ("encoder", dict(attention_dilation=[2], sliding_window=4), ["`attention_dilation` is [2]", "= 2 of them"]),
    ("encoder", dict(attention_dilation=2), ["`attention_dilation` is 2", "no 'sliding_attention'"]),
    (
        "encoder",
        dict(attention_dilation=2, num_random_blocks=1, sliding_window=4),
        ["`attention_dilation` is 2", "must be 1 where `num_random_blocks` is 1"],
    ),
    (
        "encoder",
        dict(attention_dilation=[2, 1], share_layers=True, sliding_window=4),
        ["`share_layers` is True", "[2, 1]"],
    ),
    ("encoder", dict(linear_conv_kernel=0), ["`linear_conv_kernel` is 0", "greater than 0"]),
    ("encoder", dict(linear_update="delta"), ["`linear_update` is 'delta'", "'unit' only, but that is 'elu'"]),
    *(
        (
            "encoder",
            dict(layer_types=["linear_attention"] * 2, position_embedding_type=position),
            [f"'linear_attention', which cannot add the biases of `position_embedding_type` = '{position}'", "rotary"],
        )
        for position in ("relative", "alibi")
    ),
    (
        "encoder",
        dict(layer_types=["lstm"] * 2, hidden_size=33, head_dim=8, position_embedding_type="none"),
        ["33", "even", "'lstm'"],
    ),
    ("decoder", dict(layer_types=["gru", "full_attention"], is_causal=False), ["`is_causal` is False", "'gru'"]),
    *(
        (
            "decoder",
            dict(layer_types=["gru", "lstm"], position_embedding_type=position),
            [f"`position_embedding_type` is '{position}'", "sinusoidal, learned or none"],
        )
        for position in ("rotary", "relative", "alibi")
    ),
    ("encoder", dict(residual=False), ["`residual` is False", "'post', not 'none'"]),
    ("encoder", dict(residual=False, norm_position="none", residual_scale=2.0), ["`residual` is False", "2.0, not 1"]),
    ("decoder", dict(cross_attention_layers=[0, 2]), ["`cross_attention_layers` is [0, 2]", "- 1 = 1"]),
    ("decoder", dict(cross_attention_layers=[]), ["`cross_attention_layers` is []", "None"]),
    ("decoder", dict(cross_attention_layers=[0], share_layers=True), ["`cross_attention_layers`", "`share_layers`"]),
    ("decoder", dict(cross_attention_window=0), ["`cross_attention_window` is 0", "at least 1"]),
    ("decoder", dict(cross_attention_alignment="predictive"), ["`cross_attention_alignment` is 'predictive'", "None"]),
    (
        "decoder",
        dict(linear_cross_attention=True, cross_attention_score="additive"),
        ["`linear_cross_attention` is True", "'additive'"],
    ),
    ("encoder", dict(embedding_size=7), ["`embedding_size` is 7", "even"]),
    ("encoder", dict(position_embedding_type="rotary", head_dim=7), ["Rotary", "even", "7"]),
    (
        "encoder",
        dict(
            position_embedding_type="rotary",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.1},
        ),
        ["Rotary", "even", "0"],
    ),
    (
        "encoder",
        dict(position_embedding_type="rotary", rope_parameters={"rope_type": "yarrn", "rope_theta": 1e4}),
        ["rope_type", "yarrn", "yarn", "default", "llama3"],
    ),
    ("encoder", dict(rope_parameters={"rope_type": "default"}), ["`rope_parameters` is given", "sinusoidal", "rotary"]),
    (
        "encoder",
        dict(position_embedding_type="relative", relative_attention_num_buckets=5),
        ["`relative_attention_num_buckets` is 5", "even and at least 4"],
    ),
    (
        "encoder",
        dict(position_embedding_type="relative", relative_attention_max_distance=16),
        ["`relative_attention_max_distance` is 16", "half of `relative_attention_num_buckets` = 32"],
    ),
    ("encoder", dict(pad_token_id=97), ["`pad_token_id` is 97", "from 0 to vocab_size - 1 = 96"]),
    ("encoder", dict(eos_token_id=[2, -1]), ["`eos_token_id` is -1", "from 0 to vocab_size - 1 = 96"]),
    ("encoder_decoder", dict(decoder_start_token_id=97), ["`decoder_start_token_id` is 97", "vocab_size - 1 = 96"]),
    (
        "encoder_decoder",
        dict(encoder={"vocab_size": 50}),
        ["`share_embeddings` is True", "`encoder.vocab_size` is 50", "`decoder.vocab_size` is 97"],
    ),
    (
        "encoder_decoder",
        dict(decoder={"embedding_size": 16}),
        ["`share_embeddings` is True", "`encoder.embedding_size` is 32", "`decoder.embedding_size` is 16"],
    ),
    ("encoder", dict(attention_bias="qkw"), ["`attention_bias` is 'qkw'", "letters of 'qkvo'"]),
    ("encoder", dict(position_offset=-1), ["`position_offset` is -1", "at least 0"]),
    ("encoder", dict(pooler_act="tanhh"), ["`pooler_act` is 'tanhh'", "tanh"]),
    ("encoder", dict(parallel_residual=True), ["`parallel_residual` is True", "'post', not 'pre'"]),
    ("encoder", dict(skip_first_norm=True), ["`skip_first_norm` is True", "'post', not 'pre'"]),
    (
        "encoder",
        dict(skip_first_norm=True, norm_position="pre", share_layers=True),
        ["`skip_first_norm` is True", "`share_layers`"],
    ),
    ("encoder", dict(image_size=30), ["`image_size` is 30", "multiple of `patch_size` = 16"]),
    ("encoder", dict(attention_scale=float("nan")), ["`attention_scale` is nan", "at most 2147483647"]),
    ("encoder", dict(sliding_window=2**31), ["`sliding_window` is 2147483648", "at most 2147483647"]),
    ("encoder", dict(num_hidden_layers=1001), ["`num_hidden_layers` is 1001", "at most 1000"]),
    ("encoder", dict(num_labels=10**7), ["`num_labels` is 10000000", "at most 1000000"]),
    ("encoder", dict(dtype="load"), ["`dtype` is 'load'", "float32"]),
    ("encoder", dict(transformers_weights="a.bin"), ["`transformers_weights` is 'a.bin'", "must be None"]),
    (
        "encoder",
        dict(position_embedding_type="rotary", rope_parameters={"rope_type": "default", "rope_theta": float("inf")}),
        ["`rope_parameters` has inf as `rope_theta`", "finite"],
    ),
    ("encoder_decoder", dict(encoder={"norm_type": "layrnorm"}), ["norm_type", "layrnorm", "rmsnorm"]),
]


@pytest.mark.parametrize(("topology", "changes", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_field_value_and_what_is_allowed(topology, changes, said):
    with pytest.raises((ValueError, StrictDataclassError)) as error:
        tiny_config(topology, **changes)
    for words in said:
        assert words in str(error.value)


ENUMS = {
    field.name: get_args(field.type)
    for topology in TOPOLOGIES
    for field in fields(CLASSES[topology])
    if get_origin(field.type) is Literal and field.name != "topology"
}


@pytest.mark.parametrize(
    ("topology", "name"),
    [(topology, name) for topology in ("encoder", "decoder") for name in ENUMS if name in field_names(topology)],
)
def test_a_typo_in_an_enum(topology, name):
    """The message names the field, the value, and every value that is allowed; so does a later assignment's."""
    for wrong in (
        lambda: tiny_config(topology, **{name: "tpyo"}),
        lambda: setattr(tiny_config(topology), name, "tpyo"),
    ):
        with pytest.raises((ValueError, StrictDataclassError)) as error:
            wrong()
        for word in (name, "tpyo", *ENUMS[name]):
            assert word in str(error.value)


def test_a_typo_in_the_topology():
    with pytest.raises(
        ValueError, match="`topology` is 'encodr', but must be one of encoder, decoder, encoder_decoder"
    ):
        TriptychConfig(topology="encodr")


def test_a_topology_against_its_class():
    for topology, config_class in CLASSES.items():
        other = next(name for name in TOPOLOGIES if name != topology)
        with pytest.raises((ValueError, StrictDataclassError), match=f"`topology` is '{other}'"):
            config_class(topology=other)


@pytest.mark.parametrize(("name", "value"), [("hidden_size", "32"), ("norm_eps", None), ("qk_norm", 1.5)])
def test_a_value_of_the_wrong_type(name, value):
    with pytest.raises(StrictDataclassError, match=name):
        tiny_config("encoder", **{name: value})


def test_every_refusal_of_the_source_is_tested():
    """Each `validate_*` method of the family appears among the refusals above, by a case that only it refuses."""
    own = {
        name
        for config_class in CLASSES.values()
        for owner in config_class.__mro__
        if owner.__module__.startswith("triptych.")
        for name in vars(owner)
        if name.startswith("validate_")
    }
    seen = set()
    for topology, changes, _ in REFUSED:
        try:
            tiny_config(topology, **changes)
        except StrictDataclassError as error:
            seen |= {name for name in own if f"'{name}'" in str(error)}
        except ValueError:
            pass
    # A contradiction between class and topology has a test of its own; the last one cannot be written down, as the
    # width of the encoder is filled in.
    assert own - seen <= {"validate_topology", "validate_decoder"}


# ---------------------------------------------------------------------------------------------------------------------
# Presets

# Parameters of published models, without pooler, output projection or anything tied, as their papers' code counts them.
PUBLISHED = {
    "bert_base": 108_891_648,
    "gpt2_small": 124_439_808,
    "t5_small": 60_506_624,
    "vit_base": 85_798_656,
    "bart_base": 139_420_416 - 2 * 2 * 768,  # BART keeps two unused rows in each position table
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_build(name, tmp_path):
    """Every preset round-trips, and builds under each of its Auto classes without taking memory."""
    config = TriptychConfig.from_preset(name)
    assert_round_trips(config, tmp_path)
    input_type = getattr(config, "input_type", "text")
    for auto_class, class_name in AUTO_CLASSES[config.topology].items():
        is_base = class_name.endswith("Model")
        if not is_base and getattr(getattr(triptych, class_name), "input_type", "text") != input_type:
            continue  # heads of images for images, and of texts for texts
        with torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(config)
        assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_size_of_what_they_are_named_after(name):
    with torch.device("meta"):
        model = AutoModel.from_config(TriptychConfig.from_preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_known_fields_only(name):
    """A misspelt field of a file would be kept as an unknown key and do nothing."""
    text = (resources.files("triptych.configs") / "models" / f"{name}.json").read_text(encoding="utf-8")
    preset = json.loads(text)
    known = {field.name for topology in TOPOLOGIES for field in fields(CLASSES[topology])}
    for panel in (preset, preset.get("encoder", {}), preset.get("decoder", {})):
        assert panel.keys() <= known


def test_preset_with_changes():
    """Changes apply on top, and a change of a panel keeps the panel's other fields."""
    config = TriptychConfig.from_preset("tiny_encoder_decoder", vocab_size=50, decoder={"num_hidden_layers": 1})
    plain = TriptychConfig.from_preset("tiny_encoder_decoder")
    assert config.encoder.vocab_size == config.decoder.vocab_size == config.vocab_size == 50
    assert config.decoder.num_hidden_layers == 1
    assert config.decoder.hidden_size == plain.decoder.hidden_size
    assert config.encoder.num_hidden_layers == plain.encoder.num_hidden_layers


def test_unknown_preset():
    with pytest.raises(ValueError) as error:
        TriptychConfig.from_preset("bert_bse")
    for word in ("bert_bse", *PRESETS):
        assert word in str(error.value)
