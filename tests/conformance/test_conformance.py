"""The common tests of transformers on every panel and on the main mixtures.

The suite is fetched, never copied: see `suite.py`. Where it cannot be had, these tests are skipped.
"""

import functools
import unittest
from unittest.mock import patch

import pytest
import torch
import transformers
from suite import SuiteUnavailable, suite_folder
from transformers import PreTrainedModel

import triptych
from triptych.auto_map import AUTO_CLASSES

try:
    suite_folder()
except SuiteUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

from common_tests import test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin
from common_tests.test_configuration_common import ConfigTester
from common_tests.test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor, random_attention_mask
from common_tests.test_training_mixin import TrainingTesterMixin

# The distributed tests of the suite run for the model types in these lists, or for all.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None

TINY = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=37,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    hidden_dropout=0.0,  # the suite compares runs in training mode
    hidden_act="gelu",  # at a kink, as relu has one, a rounding decides, and runs over several updates part
    initializer_range=0.2,  # large, so that a wrong mask or cache shows in the outputs
)


# Tests of the suite that are not run, beside those that it skips by itself: when, and why.
SKIPPED = {
    "test_model_rope": (
        lambda case: case.fields.get("position_embedding_type") != "rotary",
        "The suite takes any configuration with a field `rope_parameters` for a rotary one; here it is None.",
    ),
    "test_generation_tester_mixin_inheritance": (
        lambda case: True,
        "The source distribution has no `tests/generation`, so there is nothing to inherit.",
    ),
    **dict.fromkeys(
        ("test_inputs_embeds", "test_model_get_set_embeddings", "test_resize_tokens_embeddings", "test_tp_"),
        (
            lambda case: case.model_tester.input_type != "text",
            "The suite takes any input for ids of tokens in a table.",
        ),
    ),
    "test_eager_matches_sdpa_inference": (
        lambda case: case.model_tester.input_type == "audio" and "pad_left" in case._testMethodName,
        "Recordings are padded at their ends, and masks that say otherwise are refused.",
    ),
    "test_tp_generation": (lambda case: case.topology == "encoder", "A masked language model does not generate."),
}


class Copier(triptych.TriptychForConditionalGeneration):
    """What the suite runs on two ranks is given `input_ids` only; an encoder-decoder then takes them as its target."""

    @functools.wraps(triptych.TriptychForConditionalGeneration.forward)
    def forward(self, input_ids=None, **kwargs):
        kwargs.setdefault("decoder_input_ids", input_ids)
        return super().forward(input_ids, **kwargs)


class ModelTester:
    """A small model of one topology and its inputs, under the names that the suite reads."""

    is_training = True
    batch_size = 5
    seq_length = encoder_seq_length = 7
    decoder_seq_length = 7
    image_size, patch_size, num_masks, mask_length = 6, 2, 4, 9
    num_choices = 4
    hidden_size = TINY["hidden_size"]
    num_hidden_layers = TINY["num_hidden_layers"]
    num_attention_heads = TINY["num_attention_heads"]

    def __init__(self, topology: str, fields: dict):
        self.topology = topology
        self.fields = fields
        self.input_type = fields.get("input_type", "text")
        if self.input_type in ("image", "video"):  # a video of one tubelet in time has as many tokens
            self.seq_length = self.encoder_seq_length = self.mask_length + 1
        # What the suite trains and runs on two ranks. But for `generate()`, nothing there asks that it be causal.
        self.causal_lm_class = {
            "encoder": triptych.TriptychForMaskedLM,
            "decoder": triptych.TriptychForCausalLM,
            "encoder_decoder": Copier,
        }[topology]

    def get_config(self) -> triptych.TriptychConfig:
        return triptych.TriptychConfig(topology=self.topology, **{**TINY, **self.fields})

    def prepare_config_and_inputs_for_common(self) -> tuple[triptych.TriptychConfig, dict[str, torch.Tensor]]:
        """The configuration, and token ids and masks with pads anywhere; or what else the encoder reads."""
        inputs, config = {}, self.get_config()
        if self.input_type == "audio":
            frames = 2 * self.seq_length - 2  # two become one token, behind the class token
            inputs["input_features"] = floats_tensor([self.batch_size, config.num_mel_bins, frames])
        elif self.input_type in ("image", "video"):
            frames = [config.num_frames] if self.input_type == "video" else []
            sides = [config.num_channels, self.image_size, self.image_size]
            inputs["pixel_values"] = floats_tensor([self.batch_size, *frames, *sides])
        if inputs:
            return config, inputs
        for side in ("", "decoder_") if self.topology == "encoder_decoder" else ("",):
            shape = [self.batch_size, self.decoder_seq_length if side else self.seq_length]
            inputs[f"{side}input_ids"] = ids_tensor(shape, TINY["vocab_size"])
            inputs[f"{side}attention_mask"] = random_attention_mask(shape)
        return config, inputs


class Conformance(ModelTesterMixin, test_tensor_parallel_mixin.TensorParallelTesterMixin):
    """What the suite must know about the family; a test class adds its topology and the fields of its mixture."""

    topology: str
    fields: dict = {}
    test_can_init_all_missing_weights_before_2023 = True  # or that test skips files without a year in a copyright line

    tensor_parallel_atol = 1e-4  # float32 rounding with our `initializer_range`; the suite's 1e-5 is for one of 0.02

    @classmethod
    def setUpClass(cls):
        """Enters the classes of the topology in transformers' tables, by which the suite knows heads and labels."""
        super().setUpClass()
        for auto_class, name in AUTO_CLASSES[cls.topology].items():
            names = getattr(transformers, auto_class)._model_mapping._model_mapping
            cls.enterClassContext(patch.dict(names, triptych=name))

    def setUp(self):
        test_modeling_common.global_rng.seed(0)  # the suite draws its inputs from here
        for prefix, (applies, reason) in SKIPPED.items():
            if self._testMethodName.startswith(prefix) and applies(self):
                self.skipTest(reason)
        self.is_encoder_decoder = self._is_composite = self.topology == "encoder_decoder"
        config_class = type(self.model_tester.get_config())
        sizes = {} if self._is_composite else {"hidden_size": 64}
        self.config_tester = ConfigTester(self, config_class, **sizes)

    @property
    def model_tester(self) -> ModelTester:
        return ModelTester(self.topology, self.fields)

    @property
    def all_model_classes(self) -> tuple[type, ...]:
        """Every registered class of the topology that reads what the mixture does; base models read anything."""
        names = dict.fromkeys(AUTO_CLASSES[self.topology].values())
        classes = [getattr(triptych, name) for name in names]
        reads = self.model_tester.input_type
        return tuple(
            model_class
            for model_class in classes
            if model_class.__name__.endswith("Model") or getattr(model_class, "input_type", "text") == reads
        )

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        """The suite knows no labels for BERT's two tasks."""
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            shape = (self.model_tester.batch_size, self.model_tester.seq_length)
            inputs["labels"] = torch.zeros(shape, dtype=torch.long)
            inputs["next_sentence_label"] = torch.zeros(shape[0], dtype=torch.long)
        return inputs

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_every_head_has_labels(self):
        """Without an entry in the tables the suite prepares no labels, and tests of training pass without training."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        base_class, *heads = self.all_model_classes
        self.assertEqual(base_class.__name__, AUTO_CLASSES[self.topology]["AutoModel"])
        for model_class in heads:
            with self.subTest(model_class.__name__):
                labelled = self._prepare_for_class(inputs, model_class, return_labels=True)
                self.assertGreater(len(labelled), len(inputs))
                self.assertTrue(model_class(config)(**labelled).loss.requires_grad)


class EncoderTest(Conformance, TrainingTesterMixin, unittest.TestCase):
    topology = "encoder"


class ImageTest(Conformance, unittest.TestCase):
    """ViT and its kind."""

    topology = "encoder"
    fields = dict(
        input_type="image",
        image_size=ModelTester.image_size,
        patch_size=ModelTester.patch_size,
        num_channels=2,
        position_embedding_type="learned",
        norm_position="pre",
        classifier_head="linear",
    )


class VideoTest(Conformance, unittest.TestCase):
    """ViViT and its kind."""

    topology = "encoder"
    fields = ImageTest.fields | dict(input_type="video", num_frames=2, tubelet_size=2)


class AudioTest(Conformance, unittest.TestCase):
    """The encoder of Whisper and its kind."""

    topology = "encoder"
    fields = dict(input_type="audio", num_mel_bins=5, norm_position="pre", hidden_act="gelu", pooling="mean")


class DecoderTest(Conformance, TrainingTesterMixin, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase):
    topology = "decoder"


class EncoderDecoderTest(Conformance, unittest.TestCase):
    topology = "encoder_decoder"


class DecoderRotaryTest(Conformance, TrainingTesterMixin, unittest.TestCase):
    """Llama and its kind: rotary positions, grouped heads, a window on every other layer."""

    topology = "decoder"
    fields = dict(
        position_embedding_type="rotary",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=3,
        norm_type="rmsnorm",
        norm_position="pre",
        mlp_type="gated",
        hidden_act="silu",
        scale_embedding=False,
    )


class EncoderDecoderRelativeTest(Conformance, unittest.TestCase):
    """T5: relative biases, RMSNorm first, gated feed-forward."""

    topology = "encoder_decoder"
    fields = dict(
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        norm_type="rmsnorm",
        norm_position="pre",
        mlp_type="gated",
        hidden_act="gelu_new",
        mlp_bias=False,
        attention_scale=1.0,
        scale_embedding=False,
    )


class DecoderAlibiTest(Conformance, TrainingTesterMixin, unittest.TestCase):
    """BLOOM and its kind: ALiBi."""

    topology = "decoder"
    fields = dict(position_embedding_type="alibi", norm_position="pre", hidden_act="gelu", attention_bias=True)


class EncoderSharedTest(Conformance, TrainingTesterMixin, unittest.TestCase):
    """ALBERT and its kind: learned positions, token types, a factorised table, one layer at every depth; in chunks."""

    topology = "encoder"
    fields = dict(
        position_embedding_type="learned",
        type_vocab_size=2,
        embedding_norm=True,
        embedding_size=16,
        share_layers=True,
        attention_chunk_size=3,
        hidden_act="gelu",
        pooling="mean",
        scale_embedding=False,
    )


class DecoderMixedTest(Conformance, TrainingTesterMixin, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase):
    """What is left: no positions, sandwiched norms, normalised queries and keys, wide heads, chunks and windows."""

    topology = "decoder"
    fields = dict(
        position_embedding_type="none",
        qk_norm=True,
        norm_type="rmsnorm",
        norm_position="sandwich",
        residual_scale=0.7,
        head_dim=12,
        layer_types=["chunked_attention", "sliding_attention"],
        attention_chunk_size=3,
        sliding_window=4,
        embedding_size=16,
        initializer_range=None,
    )


class Banded:
    """The backend of long texts as the default one, in blocks of two tokens. Like sdpa it gives no weights."""

    has_attentions = False

    def setUp(self):
        super().setUp()
        self.enterContext(patch.object(triptych.banded, "BLOCK_SIZE", 2))
        choose = PreTrainedModel._check_and_adjust_attn_implementation
        self.enterContext(
            patch.object(
                PreTrainedModel,
                "_check_and_adjust_attn_implementation",
                lambda model, name, *args, **kwargs: choose(model, name or "banded", *args, **kwargs),
            )
        )


class EncoderBandedTest(Banded, Conformance, TrainingTesterMixin, unittest.TestCase):
    """Longformer and its kind: windows and global tokens, relative positions."""

    topology = "encoder"
    fields = dict(position_embedding_type="relative", sliding_window=2, num_global_tokens=1, num_key_value_heads=2)


class DecoderBandedTest(Banded, Conformance, TrainingTesterMixin, unittest.TestCase):
    """Windows in every layer, dilated in the second."""

    topology = "decoder"
    fields = dict(
        position_embedding_type="rotary",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        sliding_window=2,
        attention_dilation=[1, 2],
        norm_position="pre",
    )


class EncoderDecoderLinearTest(Conformance, unittest.TestCase):
    """Linear attention of the plain kind wherever there is attention."""

    topology = "encoder_decoder"
    has_attentions = False
    fields = dict(layer_types=["linear_attention"] * 2, decoder=dict(linear_cross_attention=True))


class DecoderHybridTest(Conformance, TrainingTesterMixin, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase):
    """Qwen3-Next and its kind: a gated delta rule with a convolution, then full attention."""

    topology = "decoder"
    has_attentions = False  # half of the layers have none
    fields = dict(
        layer_types=["linear_attention", "full_attention"],
        linear_update="delta",
        linear_feature_map="unit",
        linear_decay="gated",
        linear_conv_kernel=4,
        linear_output_gate=True,
        position_embedding_type="rotary",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
        norm_type="rmsnorm",
        norm_position="pre",
        mlp_type="gated",
        hidden_act="silu",
    )


class DecoderRecurrentTest(Conformance, TrainingTesterMixin, test_fsdp_mixin.FSDPTesterMixin, unittest.TestCase):
    """A language model of two kinds of recurrent layers, with norms and feed-forward layers."""

    topology = "decoder"
    has_attentions = False
    fields = dict(layer_types=["lstm", "gru"], position_embedding_type="none", norm_position="pre")


class EncoderDecoderRecurrentTest(Conformance, unittest.TestCase):
    """The translators of 2014 to 2016: deep recurrences without norms, additive scores."""

    topology = "encoder_decoder"
    has_attentions = False  # but for cross-attention
    fields = dict(
        layer_types=["lstm"] * 2,
        position_embedding_type="none",
        norm_position="none",
        residual=False,
        mlp_type="none",
        decoder=dict(cross_attention_score="additive"),
    )
