"""The configuration of the family: every choice the Transformer literature made is one field.

`TriptychConfig(topology=...)` dispatches to one class per panel; all share one `model_type`. The defaults are the base
model of "Attention Is All You Need" (Vaswani et al. 2017, section 3 and table 3).
"""

import copy
import json
import math
from dataclasses import fields
from importlib import resources
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_senses import SensesConfig

RECURRENT_TYPES = ("lstm", "gru")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", *RECURRENT_TYPES)
STATE_TYPES = ("linear_attention", *RECURRENT_TYPES)  # layers that keep a state in the place of all keys
STATE_LAYER_TYPE = "triptych_state"  # what a layer that keeps a state is called where caches are made
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# A file can claim anything, and costs memory and time before its weights contradict it: more layers than were ever
# trained (Wang et al. 2022 have 1,000), more classes than languages have words, sizes that no tensor has.
MOST_LAYERS, MOST_LABELS, LARGEST = 1_000, 1_000_000, 2**31 - 1
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id", "decoder_start_token_id")

STACK_TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",  # each rank sees its own heads only
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.cross_attn.q_proj": "colwise",
    "layers.*.cross_attn.k_proj": "colwise",
    "layers.*.cross_attn.v_proj": "colwise",
    "layers.*.cross_attn.o_proj": "rowwise",
    "layers.*.cross_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.cross_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


@strict
class TriptychConfig(PreTrainedConfig):
    """Fields that every panel has. Calling this class returns the configuration of the given `topology`.

    Args:
        topology: "encoder" (reads both ways), "decoder" (reads left to right) or "encoder_decoder".
        vocab_size: number of token ids.
        pad_token_id, bos_token_id, eos_token_id: special token ids; each below `vocab_size`, or None.
        tie_word_embeddings: the output projection is the input embedding (Vaswani et al. 2017, section 3.4).
        initializer_range: standard deviation of normal initial weights; None is Glorot-uniform projections with
            embeddings of deviation `embedding_size ** -0.5`, as the 2017 code has it.
        lm_head_bias: a bias on the output logits; None is one for masked tokens and none for generation.
        logit_scale: factor on the output logits; T5 v1.0 ties them to unscaled inputs and has `hidden_size ** -0.5`.
        classifier_dropout: dropout before a classification layer; None is `hidden_dropout`.
        use_cache: keep keys and values between calls when not training.
    """

    model_type = "triptych"

    topology: Literal["encoder", "decoder", "encoder_decoder"] = "encoder_decoder"
    vocab_size: int = 37000
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    initializer_range: float | int | None = None
    lm_head_bias: bool | None = None
    logit_scale: float | int = 1.0
    classifier_dropout: float | int | None = None
    use_cache: bool = True

    def __new__(cls, *args, topology: str | None = None, **kwargs):
        if cls is TriptychConfig:
            topology = topology or "encoder_decoder"
            if topology not in TOPOLOGIES:
                raise ValueError(f"`topology` is {topology!r}, but must be one of {', '.join(TOPOLOGIES)}.")
            cls = TOPOLOGIES[topology]
        return super().__new__(cls)

    def __post_init__(self, **kwargs):
        for name in kwargs:
            if callable(getattr(type(self), name, None)):
                raise ValueError(f"`{name}` is no field of a configuration, but one of its methods.")
        num_labels = kwargs.get("num_labels")
        if num_labels is not None and (not isinstance(num_labels, int) or num_labels > MOST_LABELS):
            raise ValueError(f"`num_labels` is {num_labels!r}, but must be a whole number of at most {MOST_LABELS}.")
        for dtype in (self.dtype, kwargs.get("torch_dtype")):
            if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(f"`dtype` is {dtype!r}, but must be the name of a torch type such as 'float32'.")
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **changes) -> "TriptychConfig":
        """Builds a shipped configuration, `configs/models/{name}.json`, with the given fields changed."""
        folder = resources.files("triptych.configs") / "models"
        presets = sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))
        if name not in presets:
            raise ValueError(f"There is no preset {name!r}; there are {', '.join(presets)}.")
        preset = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for panel in ("encoder", "decoder"):
            if isinstance(changes.get(panel), dict):
                changes[panel] = {**preset.get(panel, {}), **changes[panel]}
        return TriptychConfig(**{**preset, **changes})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "TriptychConfig":
        """As in transformers; what is changed of a pair is changed in each of its panels that has it."""
        if config_dict.get("topology") == "encoder_decoder":
            changes = TriptychEncoderDecoderConfig.take_panels(kwargs)
            config_dict = config_dict | {name: (config_dict.get(name) or {}) | changes[name] for name in changes}
        return super().from_dict(config_dict, **kwargs)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The stack that reads or writes text; of the decoder, transformers makes caches."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and isinstance(config, TriptychStackConfig) and config.cache_layer_types() != config.layer_types:
            return CacheConfig(config)
        return config

    def validate_topology(self):
        """A class holds one topology: `TriptychEncoderConfig(topology="decoder")` is a contradiction."""
        own = type(self).__dataclass_fields__["topology"].default
        if type(self) is not TriptychConfig and self.topology != own:
            raise ValueError(f"`topology` is {self.topology!r}, but {type(self).__name__} is always {own!r}.")

    def validate_numbers(self):
        """Numbers are numbers, and sizes can be those of tensors."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
                raise ValueError(f"`{field.name}` is {value}, but must be a number of at most {LARGEST}.")

    def validate_files(self):
        """Weights lie where they are looked for; a name of their own could be that of a pickle."""
        if (name := getattr(self, "transformers_weights", None)) is not None:
            raise ValueError(f"`transformers_weights` is {name!r}, but must be None: weights are in model.safetensors.")

    def validate_training(self):
        """What heads and initial weights read."""
        if self.classifier_dropout is not None and not 0 <= self.classifier_dropout < 1:
            raise ValueError(
                f"`classifier_dropout` is {self.classifier_dropout}, but must be None, or at least 0 and below 1."
            )
        if self.initializer_range is not None and self.initializer_range < 0:
            raise ValueError(f"`initializer_range` is {self.initializer_range}, but must be None or at least 0.")
        if self.problem_type not in (None, *PROBLEM_TYPES):
            raise ValueError(
                f"`problem_type` is {self.problem_type!r}, but must be None or one of {', '.join(PROBLEM_TYPES)}."
            )

    def validate_token_ids(self):
        """Special tokens must be rows of the embedding."""
        for name in SPECIAL_TOKENS:
            value = getattr(self, name, None)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"`{name}` is {token}, but must be None or from 0 to vocab_size - 1 = {self.vocab_size - 1}."
                    )


class CacheConfig:
    """A stack's configuration, to read and to change, whose layer types are those that transformers has caches for."""

    def __init__(self, config: "TriptychStackConfig"):
        self.__dict__["_config"] = config

    @property
    def layer_types(self) -> list[str]:
        return self._config.cache_layer_types()

    def __getattr__(self, name: str):
        if name == "_config":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value):
        setattr(self._config, name, value)


@strict
class TriptychStackConfig(TriptychConfig):
    """Fields of one stack of layers; encoder and decoder have the same ones.

    Args:
        hidden_size, intermediate_size: width of the residual stream and of the feed-forward layer.
        num_hidden_layers, num_attention_heads: depth, and heads of each attention.
        num_key_value_heads: key/value heads, each shared by a group of query heads (Ainslie et al. 2023);
            None is one per query head.
        head_dim: width of one head; None is `hidden_size / num_attention_heads`.
        hidden_act: activation of the feed-forward layer, a name known to transformers.
        mlp_type: "dense" is `down(act(up(x)))`, "gated" is `down(act(gate(x)) * up(x))` (Shazeer 2020), and
            "none" is no such layer.
        norm_type, norm_eps: "layernorm", "rmsnorm" (Zhang & Sennrich 2019) or "zero_centered_rmsnorm", whose gain is
            one plus its weight (Gemma Team 2024); and its epsilon.
        norm_bias: layer norms have a bias.
        norm_position: with f a sublayer, "post" is `norm(x + f(x))`, "pre" is `x + f(norm(x))` (Xiong et al. 2020),
            "sandwich" is `x + norm(f(norm(x)))` (Ding et al. 2021), "none" is `x + f(x)` (Wu et al. 2016, section 3.1).
        residual: False leaves the residual stream out: a sublayer's output takes the place of its input, and what
            cross-attention reads is joined with it as `tanh(W [f(x); x])` (Luong et al. 2015, equation 5); for
            norm_position "none".
        parallel_residual: all sublayers read the same stream, `x + f(norm(x)) + g(norm'(x))` (Wang & Komatsuzaki 2021);
            for norm_position "pre".
        skip_first_norm: the first layer's attention reads the embeddings as they are, which `embedding_norm` has
            normalised (Warner et al. 2024); for norm_position "pre".
        residual_scale: the factor s that keeps deep stacks stable; "post" is `norm(s * x + f(x))`, DeepNorm's alpha
            (Wang et al. 2022), with initial weights scaled to match; "pre" and "sandwich" scale the branch, s * f.
        position_embedding_type: "sinusoidal" (2017), "learned", "rotary" (Su et al. 2021), "relative" (Raffel et al.
            2020, bucketed biases shared by the layers), "alibi" (Press et al. 2022) or "none".
        sinusoidal_layout: "interleaved" sines and cosines (2017, section 3.5), or all sines before all cosines,
            "concatenated", as the authors' code has them.
        position_offset: rows of the learned table before that of the first position (Ott et al. 2019 keep them for
            pads).
        max_position_embeddings: positions of the learned table, and the pre-training length that rope scaling starts
            from.
        rope_parameters: rotary settings as transformers spells them, flat or one dictionary per layer type.
        relative_attention_num_buckets, relative_attention_max_distance: of the relative biases.
        attention_bias, mlp_bias: biases in the projections; "qkv" or other letters of "qkvo" name those of the
            attention that have one.
        qk_norm: normalise each query and key head before the dot product (Henry et al. 2020).
        attention_scale: factor on the dot products; None is `head_dim ** -0.5`.
        layer_types: per layer "full_attention", "sliding_attention", "chunked_attention", "linear_attention", or in the
            place of attention a recurrence, "lstm" or "gru", see `recurrence.py`; None is all sliding if
            `sliding_window` is given, all chunked if `attention_chunk_size` is, else all full.
        sliding_window: W. A causal layer sees the last W tokens, itself included; a bidirectional one sees W // 2
            tokens to each side.
        attention_chunk_size: tokens of a chunk; a chunked layer sees its own chunk only.
        num_global_tokens: so many tokens at the beginning of a text see all others and are seen by all, as far as the
            topology lets them, in sliding and chunked layers (Beltagy et al. 2020, Zaheer et al. 2020; in a decoder,
            Xiao et al. 2024).
        attention_dilation: a window counts every so many-th token (Beltagy et al. 2020); one number for all sliding
            layers, or one per layer. Local and dilated layers in turns are the strided pattern of Child et al. (2019).
        num_random_blocks, random_block_size: in sliding layers, blocks of so many tokens that each block of tokens sees
            beside its window, chosen at random once and for all (Zaheer et al. 2020).
        linear_feature_map, linear_decay, linear_update: what layers of linear attention are, see `linear_attention.py`.
        linear_conv_kernel: tokens that a convolution of each channel of queries, keys and values reads in such a layer;
            1 is none.
        linear_output_gate: their outputs are multiplied by `silu(W x)` (Sun et al. 2023, section 2.3).
        hidden_dropout: after each sublayer and the embedding (the paper's P_drop).
        attention_dropout, activation_dropout: on attention weights, and inside the feed-forward layer.
        embedding_size: width of the token table if it is factorised (Lan et al. 2020); None is `hidden_size`.
        scale_embedding: multiply token embeddings by the square root of their width (2017, section 3.4).
        embedding_norm: normalise the summed embeddings.
        type_vocab_size: number of token types (BERT's segments); 0 is none.
        share_layers: one layer's parameters at every depth (Lan et al. 2020).
        pooling: which real token stands for the sequence: "first", "last", or their "mean".
        add_pooling_layer: an encoder's `pooler_output` is `act(W x)` of that vector, as heads for whole texts have it
            (Devlin et al. 2019).
        pooler_act: the activation of that layer.
        classifier_head: what an encoder's head reads: "pooler" is the pooling layer, for whole texts only;
            "prediction" is `norm(act(W x))`, as in masked language modelling, for texts and tokens alike (Warner et al.
            2024); "linear" is nothing between.
        prediction_bias, classifier_bias: biases in that layer W, and in the last layer of a classifier.
    """

    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "relu"
    mlp_type: Literal["dense", "gated", "none"] = "dense"
    norm_type: Literal["layernorm", "rmsnorm", "zero_centered_rmsnorm"] = "layernorm"
    norm_bias: bool = True
    norm_position: Literal["post", "pre", "sandwich", "none"] = "post"
    residual: bool = True
    norm_eps: float | int = 1e-5
    parallel_residual: bool = False
    skip_first_norm: bool = False
    residual_scale: float | int = 1.0
    position_embedding_type: Literal["sinusoidal", "learned", "rotary", "relative", "alibi", "none"] = "sinusoidal"
    sinusoidal_layout: Literal["interleaved", "concatenated"] = "interleaved"
    position_offset: int = 0
    max_position_embeddings: int = 1024
    rope_parameters: dict[str, Any] | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    attention_bias: bool | str = False
    mlp_bias: bool = True
    qk_norm: bool = False
    attention_scale: float | int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_global_tokens: int = 0
    attention_dilation: int | list[int] = 1
    num_random_blocks: int = 0
    random_block_size: int = 64
    linear_feature_map: Literal["elu", "hedgehog", "unit"] = "elu"
    linear_decay: Literal["none", "fixed", "gated"] = "none"
    linear_update: Literal["sum", "delta"] = "sum"
    linear_conv_kernel: int = 1
    linear_output_gate: bool = False
    hidden_dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    embedding_size: int | None = None
    scale_embedding: bool = True
    embedding_norm: bool = False
    type_vocab_size: int = 0
    share_layers: bool = False
    pooling: Literal["first", "last", "mean"] = "first"
    add_pooling_layer: bool = False
    pooler_act: str = "tanh"
    classifier_head: Literal["pooler", "prediction", "linear"] = "pooler"
    prediction_bias: bool = True
    classifier_bias: bool = True

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`hidden_size` is {self.hidden_size}, but must be a multiple of `num_attention_heads` = "
                    f"{self.num_attention_heads} when `head_dim` is not given."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"`num_hidden_layers` is {self.num_hidden_layers}, but must be at most {MOST_LAYERS}.")
        if self.layer_types is None:
            local = "sliding_attention" if self.sliding_window else "chunked_attention"
            is_local = self.sliding_window or self.attention_chunk_size
            self.layer_types = [local if is_local else "full_attention"] * self.num_hidden_layers

        is_rotary = self.position_embedding_type == "rotary"
        if self.rope_parameters and not is_rotary:
            raise ValueError(
                f"`rope_parameters` is given, but `position_embedding_type` is {self.position_embedding_type!r}, "
                "not 'rotary'."
            )
        self.rope_parameters = copy.deepcopy(self.rope_parameters)  # transformers fills it in place
        super().__post_init__(**kwargs)
        if not is_rotary:
            self.rope_parameters = None
        self.base_model_tp_plan = self.tensor_parallel_plan()

    @property
    def position_axes(self) -> int:
        """How many numbers say where a token stands."""
        return 1

    def biased_projections(self) -> str:
        """Letters of the attention's projections that have a bias."""
        return {True: "qkvo", False: ""}.get(self.attention_bias, self.attention_bias)

    def layer_kind(self, layer_idx: int) -> tuple[str, int]:
        """Type of a layer and dilation of its window; layers of one kind see alike."""
        layer_type, dilation = self.layer_types[layer_idx], self.attention_dilation
        if layer_type != "sliding_attention":
            return layer_type, 1
        return layer_type, dilation if isinstance(dilation, int) else dilation[layer_idx]

    def cache_layer_types(self) -> list[str]:
        """What each layer is for transformers' caches. One that reaches beyond a window must keep all keys."""
        names = []
        for kind in map(self.layer_kind, range(len(self.layer_types))):
            name = STATE_LAYER_TYPE if kind[0] in STATE_TYPES else kind[0]
            is_global = self.num_global_tokens and name in ("sliding_attention", "chunked_attention")
            names.append("full_attention" if is_global or self.is_sparse(kind) else name)
        return names

    def is_sparse(self, kind: tuple[str, int]) -> bool:
        """Whether a kind of layer has a pattern that its type and the size of its window do not say."""
        return kind[0] == "sliding_attention" and (kind[1] > 1 or self.num_random_blocks > 0)

    def tensor_parallel_plan(self) -> dict[str, str]:
        """How each projection that the stack has is split over devices."""
        absent = {"dense": ["gate_proj"], "gated": [], "none": ["mlp."]}[self.mlp_type]
        absent += [] if self.qk_norm else ["q_norm", "k_norm"]
        # Gates and decays of linear attention belong to heads too; recurrences stay whole.
        if "linear_attention" in self.layer_types or set(self.layer_types) <= set(RECURRENT_TYPES):
            absent += ["self_attn."]
        if getattr(self, "linear_cross_attention", False) or getattr(self, "is_aligned", False):
            absent += ["cross_attn."]
        absent += [] if getattr(self, "add_cross_attention", False) else ["cross_attn"]
        if self.position_embedding_type in ("relative", "alibi"):
            absent += ["_attn."]  # their biases belong to heads, which must then stay together
        plan = {name: how for name, how in STACK_TP_PLAN.items() if not any(part in name for part in absent)}
        # The token table is split in any case, as the head that it may be; transformers sees to it in other plans.
        return plan or {"embed_tokens": "embedding_rowwise"}

    def validate_sizes(self):
        """Sizes are positive, probabilities are probabilities, and each key/value head serves a whole group."""
        positive = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim max_position_embeddings embedding_size norm_eps residual_scale random_block_size "
            "linear_conv_kernel"
        )
        for name in positive.split():
            if getattr(self, name) is None or getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be greater than 0.")
        for name in ("hidden_dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 0 and below 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` is {self.num_key_value_heads}, but must divide `num_attention_heads` = "
                f"{self.num_attention_heads}."
            )
        for name in ("type_vocab_size", "position_offset", "num_global_tokens", "num_random_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 0.")

    def validate_attention_bias(self):
        """Letters name projections."""
        if not set(self.biased_projections()) <= set("qkvo"):
            raise ValueError(
                f"`attention_bias` is {self.attention_bias!r}, but must be True, False, or letters of 'qkvo'."
            )

    def validate_norms(self):
        """What leaves norms out, or places them side by side, is said of norms that come first."""
        for name in ("parallel_residual", "skip_first_norm"):
            if getattr(self, name) and self.norm_position != "pre":
                raise ValueError(f"`{name}` is True, but `norm_position` is {self.norm_position!r}, not 'pre'.")
        if not self.residual and self.norm_position != "none":
            raise ValueError(f"`residual` is False, but `norm_position` is {self.norm_position!r}, not 'none'.")
        if not self.residual and self.residual_scale != 1:
            raise ValueError(f"`residual` is False, but `residual_scale` is {self.residual_scale}, not 1.")
        if self.skip_first_norm and self.share_layers:
            raise ValueError("`skip_first_norm` is True, but `share_layers` gives all layers the norms of the first.")

    def validate_activation(self):
        """The activations are ones that transformers knows."""
        for name in ("hidden_act", "pooler_act"):
            if getattr(self, name) not in ACT2FN:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)!r}, but must be one of {', '.join(sorted(ACT2FN))}."
                )

    def validate_layer_type(self):
        """One layer type per layer, and the size that a local type needs."""
        for layer_type in self.layer_types:
            if layer_type not in LAYER_TYPES:
                raise ValueError(f"`layer_types` has {layer_type!r}, but must be of {', '.join(LAYER_TYPES)}.")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries, but must have `num_hidden_layers` = "
                f"{self.num_hidden_layers}."
            )
        for layer_type, name in (
            ("sliding_attention", "sliding_window"),
            ("chunked_attention", "attention_chunk_size"),
        ):
            size = getattr(self, name)
            least = 2 if self.topology == "decoder" else 1  # a decoder's cache holds all but one token of a window
            if size is not None and size < least:
                raise ValueError(f"`{name}` is {size}, but must be None or at least {least}.")
            if size is None and layer_type in self.layer_types:
                raise ValueError(
                    f"`layer_types` has {layer_type!r}, but `{name}` is None; it must be at least {least}."
                )
        if self.num_global_tokens > 0 and not {"sliding_attention", "chunked_attention"} & set(self.layer_types):
            raise ValueError(
                f"`num_global_tokens` is {self.num_global_tokens}, but `layer_types` has no layer with a window or "
                "chunks, which they would reach beyond."
            )
        if self.share_layers and len(set(self.layer_types)) > 1:
            raise ValueError(f"`share_layers` is True, but `layer_types` differ: {self.layer_types}.")

    def validate_sparse_patterns(self):
        """Dilation and random blocks are of windows."""
        dilation = self.attention_dilation
        dilations = [dilation] * self.num_hidden_layers if isinstance(dilation, int) else dilation
        if len(dilations) != self.num_hidden_layers or min(dilations) < 1:
            raise ValueError(
                f"`attention_dilation` is {dilation}, but must be at least 1, one number or `num_hidden_layers` = "
                f"{self.num_hidden_layers} of them."
            )
        is_dilated = max(dilations) > 1
        for name, is_given in (("attention_dilation", is_dilated), ("num_random_blocks", self.num_random_blocks > 0)):
            if is_given and "sliding_attention" not in self.layer_types:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, but `layer_types` has no 'sliding_attention', which it is of."
                )
        if is_dilated and self.num_random_blocks:
            raise ValueError(
                f"`attention_dilation` is {dilation}, but must be 1 where `num_random_blocks` is "
                f"{self.num_random_blocks}."
            )
        if self.share_layers and len(set(dilations)) > 1:
            raise ValueError(f"`share_layers` is True, but the `attention_dilation` of layers differs: {dilation}.")

    def validate_linear_attention(self):
        """There are no scores to add a bias to, and the delta rule is stable for keys of length one."""
        kind = self.position_embedding_type
        if "linear_attention" in self.layer_types and kind in ("relative", "alibi"):
            raise ValueError(
                f"`layer_types` has 'linear_attention', which cannot add the biases of `position_embedding_type` = "
                f"{kind!r}; it must be sinusoidal, learned, rotary or none."
            )
        if self.linear_update == "delta" and self.linear_feature_map != "unit":
            raise ValueError(
                f"`linear_update` is 'delta', which is stable with the `linear_feature_map` 'unit' only, but that is "
                f"{self.linear_feature_map!r}."
            )

    def validate_recurrence(self):
        """A recurrence has a direction, or two of half the width, and no scores that a position could enter."""
        recurrent = [name for name in RECURRENT_TYPES if name in self.layer_types]
        if not recurrent:
            return
        if self.topology == "encoder" and self.hidden_size % 2:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, but must be even where `layer_types` has {recurrent[0]!r}: each "
                "direction writes one half."
            )
        if not getattr(self, "is_causal", True):
            raise ValueError(
                f"`is_causal` is False, but `layer_types` has {recurrent[0]!r}, which reads left to right."
            )
        kind = self.position_embedding_type
        if set(self.layer_types) == set(recurrent) and kind in ("rotary", "relative", "alibi"):
            raise ValueError(
                f"`position_embedding_type` is {kind!r}, which is of attention, but `layer_types` has none; it must be "
                "sinusoidal, learned or none."
            )

    def validate_positions(self):
        """Sine and cosine come in pairs, for each axis; buckets on each side need room."""
        axes = self.position_axes
        pairs = "even" if axes == 1 else f"even and at least {2 * axes}, for pairs of each of {axes} axes"
        if self.position_embedding_type == "sinusoidal" and (
            self.embedding_size % 2 or 0 < self.embedding_size < 2 * axes
        ):
            raise ValueError(
                f"`embedding_size` is {self.embedding_size}, but for sinusoidal positions must be {pairs}."
            )
        if self.position_embedding_type == "rotary":
            for parameters in rope_by_layer_type(self).values():
                allowed = ("default", *ROPE_INIT_FUNCTIONS) if axes == 1 else ("default",)
                for name, value in parameters.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        raise ValueError(f"`rope_parameters` has {value} as `{name}`, but it must be a finite number.")
                if parameters["rope_type"] not in allowed:
                    raise ValueError(
                        f"`rope_parameters` has the `rope_type` {parameters['rope_type']!r}, but it must be one of "
                        f"{', '.join(allowed)}."
                    )
                rotated = int(self.head_dim * parameters.get("partial_rotary_factor", 1.0))
                if rotated % 2 or rotated < 2 * axes:
                    raise ValueError(f"Rotary positions turn {rotated} dimensions of a head, but it must be {pairs}.")
        if self.position_embedding_type == "relative":
            if self.relative_attention_num_buckets < 4 or self.relative_attention_num_buckets % 2:
                raise ValueError(
                    f"`relative_attention_num_buckets` is {self.relative_attention_num_buckets}, but must be even and "
                    "at least 4."
                )
            if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
                raise ValueError(
                    f"`relative_attention_max_distance` is {self.relative_attention_max_distance}, but must exceed "
                    f"half of `relative_attention_num_buckets` = {self.relative_attention_num_buckets}."
                )


def rope_by_layer_type(config: TriptychStackConfig) -> dict[str, dict[str, Any]]:
    """The rotary settings of each type of attention that the stack has; flat settings serve them all."""
    layer_types = sorted(set(config.layer_types) - set(RECURRENT_TYPES))
    nested = config.nested_rope_parameter_keys(config.rope_parameters)
    return {name: config.rope_parameters[name] if nested else config.rope_parameters for name in layer_types}


@strict
class TriptychEncoderConfig(SensesConfig, TriptychStackConfig):
    """A stack that reads both ways: BERT and its kind. What it reads beside texts is said by the fields of
    `SensesConfig`.

    Args:
        mask_token_id: the token that stands where another is to be predicted. Its embedding is where the query stream
            of permutation language modelling starts, the learned vector w of Yang et al. (2019, section 2.3).
    """

    base_config_key = "encoder"

    topology: Literal["encoder", "decoder", "encoder_decoder"] = "encoder"
    mask_token_id: int | None = None


@strict
class TriptychDecoderConfig(TriptychStackConfig):
    """A stack that reads left to right: GPT and its kind, or the right panel of an encoder-decoder.

    Args:
        is_causal: False runs the stack without its causal mask.
        add_cross_attention: each layer also reads `encoder_hidden_states`.
        cross_attention_hidden_size: their width; None is `hidden_size`.
        linear_cross_attention: they are read by linear attention.
        cross_attention_layers: which layers do, counted from 0; None is all. In Luong et al. (2015) the last one does.
        cross_attention_score: "dot" is the product of query and key times `attention_scale`, "additive" is
            `v . tanh(query + key)` with a learnt v (Bahdanau et al. 2015); see `alignment.py`.
        cross_attention_window: only so many source tokens to each side of an aligned one are read.
        cross_attention_alignment: "monotonic" aligns the target's token t with the source's, "predictive" with one that
            the state of t tells (Luong et al. 2015, section 3.2).
    """

    base_config_key = "decoder"

    topology: Literal["encoder", "decoder", "encoder_decoder"] = "decoder"
    pooling: Literal["first", "last", "mean"] = "last"
    is_causal: bool = True
    add_cross_attention: bool = False
    cross_attention_hidden_size: int | None = None
    linear_cross_attention: bool = False
    cross_attention_layers: list[int] | None = None
    cross_attention_score: Literal["dot", "additive"] = "dot"
    cross_attention_window: int | None = None
    cross_attention_alignment: Literal["monotonic", "predictive"] = "monotonic"

    def __post_init__(self, **kwargs):
        if self.add_cross_attention and self.cross_attention_hidden_size is None:
            self.cross_attention_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    def reads_encoder(self, layer_idx: int) -> bool:
        """Whether a layer has cross-attention, if the stack has."""
        return self.cross_attention_layers is None or layer_idx in self.cross_attention_layers

    @property
    def is_aligned(self) -> bool:
        """Whether cross-attention has scores or windows of its own; see `alignment.py`."""
        return self.cross_attention_score != "dot" or self.cross_attention_window is not None

    def validate_cross_attention(self):
        """Layers that there are, a window with a middle, and one kind of score."""
        layers = self.cross_attention_layers
        if layers is not None and not (layers and set(layers) <= set(range(self.num_hidden_layers))):
            raise ValueError(
                f"`cross_attention_layers` is {layers}, but must be None, or name layers from 0 to num_hidden_layers - "
                f"1 = {self.num_hidden_layers - 1}."
            )
        if layers is not None and self.share_layers:
            raise ValueError(f"`cross_attention_layers` is {layers}, but `share_layers` makes all layers alike.")
        if self.cross_attention_window is not None and self.cross_attention_window < 1:
            raise ValueError(
                f"`cross_attention_window` is {self.cross_attention_window}, but must be None or at least 1."
            )
        if self.cross_attention_window is None and self.cross_attention_alignment != "monotonic":
            raise ValueError(
                f"`cross_attention_alignment` is {self.cross_attention_alignment!r}, but `cross_attention_window` is "
                "None; it must be at least 1."
            )
        if self.linear_cross_attention and self.is_aligned:
            raise ValueError(
                "`linear_cross_attention` is True, which has no scores, but `cross_attention_score` is "
                f"{self.cross_attention_score!r} and `cross_attention_window` is {self.cross_attention_window}."
            )


@strict
class TriptychEncoderDecoderConfig(TriptychConfig):
    """Two stacks: the decoder reads what the encoder wrote.

    Args:
        encoder, decoder: fields of each stack. A stack field given beside them applies to each that has it; what a
            stack says itself wins.
        share_embeddings: source and target tokens have one table (2017, section 3.4); None is True if both are texts.
        decoder_start_token_id: first decoder input; None is `bos_token_id`.
    """

    sub_configs_defaults: ClassVar = {"encoder": TriptychEncoderConfig, "decoder": TriptychDecoderConfig}

    topology: Literal["encoder", "decoder", "encoder_decoder"] = "encoder_decoder"
    encoder: TriptychEncoderConfig | dict[str, Any] | None = None
    decoder: TriptychDecoderConfig | dict[str, Any] | None = None
    share_embeddings: bool | None = None
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs):
        panels = self.take_panels(kwargs)
        shared = self.take_panels({field.name: getattr(self, field.name) for field in fields(TriptychConfig)})
        for name in panels:
            own = getattr(self, name) or {}
            # A configuration loaded elsewhere (remote code has its own copy of these classes) is read as its fields.
            panels[name] = {**shared[name], **panels[name], **(own if isinstance(own, dict) else own.to_dict())}
        width = panels["encoder"].get("hidden_size", TriptychStackConfig.hidden_size)
        self.encoder = panels["encoder"]
        self.decoder = panels["decoder"] | {"add_cross_attention": True, "cross_attention_hidden_size": width}
        if self.decoder_start_token_id is None:
            self.decoder_start_token_id = self.bos_token_id
        super().__post_init__(**kwargs)
        self.vocab_size = self.decoder.vocab_size
        if self.share_embeddings is None:
            self.share_embeddings = self.encoder.input_type == "text"

    @classmethod
    def take_panels(cls, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns what of `given` are fields of each panel, and takes out what is no field of the pair itself."""
        shared = {"topology", *(field.name for field in fields(PreTrainedConfig))}
        panels = {}
        for panel, spec in cls.sub_configs_defaults.items():
            known = {field.name for field in fields(spec.config_class)} - shared
            panels[panel] = {name: value for name, value in given.items() if name in known}
        for name in {name for panel in panels.values() for name in panel} - {field.name for field in fields(cls)}:
            del given[name]
        return panels

    @property
    def hidden_size(self) -> int:
        """Width of the decoder, which is what the heads and training engines ask for."""
        return self.decoder.hidden_size

    def validate_share_embeddings(self):
        """One table needs two texts and one shape."""
        if self.share_embeddings and self.encoder.input_type != "text":
            raise ValueError(
                f"`share_embeddings` is True, but must be False where `encoder.input_type` is "
                f"{self.encoder.input_type!r}, as there are no source tokens."
            )
        for name in ("vocab_size", "embedding_size"):
            source, target = getattr(self.encoder, name), getattr(self.decoder, name)
            if self.share_embeddings and source != target:
                raise ValueError(
                    f"`share_embeddings` is True, but `encoder.{name}` is {source} and `decoder.{name}` is {target}."
                )

    def validate_decoder(self):
        """The right panel reads the left one."""
        if self.decoder.cross_attention_hidden_size != self.encoder.hidden_size:
            raise ValueError(
                f"`decoder.cross_attention_hidden_size` is {self.decoder.cross_attention_hidden_size}, but must be "
                f"`encoder.hidden_size` = {self.encoder.hidden_size}."
            )


TOPOLOGIES = {
    "encoder": TriptychEncoderConfig,
    "decoder": TriptychDecoderConfig,
    "encoder_decoder": TriptychEncoderDecoderConfig,
}
