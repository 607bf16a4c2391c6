"""What all heads share: a base model under `model`, a projection onto the vocabulary, the layer before an answer.

Shapes: B batch, T tokens, D hidden_size, E embedding_size, V vocabulary.
"""

import functools
from typing import Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .caches import reorder
from .configuration_triptych import LARGEST, TriptychConfig, TriptychStackConfig
from .dropout import TriptychDropout
from .layers import activation
from .losses import IGNORE, cross_entropy, projected_cross_entropy
from .norms import build_norm
from .pretrained import TriptychPreTrainedModel
from .projections import TriptychLinear
from .stacks import TriptychDecoderModel, TriptychEncoderDecoderModel, TriptychEncoderModel
from .tracing import is_tracing

BASE_MODELS = {
    "encoder": TriptychEncoderModel,
    "decoder": TriptychDecoderModel,
    "encoder_decoder": TriptychEncoderDecoderModel,
}

# Settings of generation that are counts; and those of so many texts that begin differently, as a vocabulary allows.
COUNTS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens", "top_k")
WIDTHS = ("num_beams", "num_return_sequences")


class HeadKwargs(TransformersKwargs, total=False):
    """What heads take by keyword, and do not name: of every named argument with "label" in it, transformers' Trainer
    thinks that it holds labels, without which there is no loss to evaluate."""

    label_smoothing: float
    z_loss: float
    output_logits: bool | None
    shift_labels: torch.LongTensor


def take_loss_options(kwargs: dict) -> dict:
    """Those of a head's keyword arguments that its loss takes, out of them."""
    return {name: kwargs.pop(name) for name in ("label_smoothing", "z_loss", "output_logits") if name in kwargs}


def classifier_dropout(config: TriptychStackConfig) -> TriptychDropout:
    """The dropout before a classification layer."""
    return TriptychDropout(config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout)


class TriptychPredictionHead(nn.Module):
    """norm(act(W x)), from hidden states [..., D] to what the token table, or a class, is compared with."""

    def __init__(self, config: TriptychStackConfig, size: int):
        super().__init__()
        self.dense = TriptychLinear(config.hidden_size, size, bias=config.prediction_bias)
        self.act = activation(config.hidden_act)
        self.norm = build_norm(config, size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.dense(hidden_states)))


class TriptychTokenProjection(TriptychLinear):
    """Logits of every token of the vocabulary; or, given labels, their loss at once.

    The loss belongs into the module, since engines that shard weights make them whole for its forward alone.
    """

    def forward(self, states: torch.Tensor, labels: torch.LongTensor | None = None, **options) -> torch.Tensor:
        """Logits [..., V] of `states` [..., E]; or `losses.projected_cross_entropy` of `states` [N, E] and `labels`."""
        if labels is None:
            return super().forward(states)
        return projected_cross_entropy(states, labels, self.weight, self.bias, **options)

    @classmethod
    def of(cls, linear: nn.Linear) -> "TriptychTokenProjection":
        """One with all that `linear` has: weight and bias, hooks, and marks such as that it is initialised."""
        projection = cls.__new__(cls)
        projection.__dict__.update(vars(linear))
        return projection


class TriptychHead(TriptychPreTrainedModel):
    """A base model under `model`, and the way most heads answer."""

    output_class: type[ModelOutput]
    reads_pooler = False

    def __init__(self, config: TriptychConfig):
        super().__init__(config)
        options = {"add_pooling_layer": self.has_pooler(config)} if config.topology == "encoder" else {}
        self.model = BASE_MODELS[config.topology](config, **options)
        self.num_labels = config.num_labels

    @classmethod
    def has_pooler(cls, config: TriptychConfig) -> bool:
        """Whether an encoder's head reads the base model's pooling layer."""
        return cls.reads_pooler

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.model.set_input_embeddings(value)

    def answer(self, outputs: ModelOutput, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits, from what the base model wrote."""
        raise NotImplementedError

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs) -> torch.Tensor:
        return cross_entropy(logits, labels, **kwargs)

    def predict(
        self, outputs: ModelOutput, attention_mask: torch.Tensor | None, labels: torch.Tensor | None, **options
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss, if there are labels, and logits, from what the base model wrote."""
        logits = self.answer(outputs, attention_mask)
        return None if labels is None else self.loss(logits, labels, **options), logits

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[HeadKwargs],
    ) -> ModelOutput:
        """The base model's arguments, and:

        Args:
            labels: what the class says; -100 is ignored.
            num_items_in_batch: labels in all the batches of one (accumulated) step; the loss is divided by it.
            label_smoothing: probability mass spread evenly over all labels.
            z_loss, output_logits: see `LanguageModelHead.predict_tokens`.

        Returns:
            `logits`, and the `loss` if there are labels.
        """
        options = take_loss_options(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        loss, logits = self.predict(outputs, attention_mask, labels, num_items_in_batch=num_items_in_batch, **options)
        return self.output_class(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LanguageModelHead(TriptychHead):
    """A projection onto the vocabulary, tied to the token table if the configuration says so."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    has_bias = False

    def __init__(self, config: TriptychConfig):
        if getattr(config, "input_type", "text") != "text":
            raise ValueError(
                f"`input_type` is {config.input_type!r}, but {type(self).__name__} predicts tokens of texts."
            )
        super().__init__(config)
        stack = config.get_text_config()
        has_bias = self.has_bias if config.lm_head_bias is None else config.lm_head_bias
        self.lm_head = TriptychTokenProjection(stack.embedding_size, stack.vocab_size, bias=has_bias)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module):
        self.lm_head = TriptychTokenProjection.of(value) if type(value) is nn.Linear else value

    def to_table(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] as what the token table is compared with, [..., E]."""
        return hidden_states

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states in the width of the token table [..., E]."""
        scale = self.config.logit_scale
        if scale == 1:
            return self.lm_head(hidden_states)
        if getattr(self.lm_head, "bias", hidden_states) is None:  # states are fewer than logits
            return self.lm_head(hidden_states * scale)
        return self.lm_head(hidden_states) * scale

    def gives_logits(self, output_logits: bool | None) -> bool:
        """Whether logits are made even where labels are given. A projection that is split, or that something was put
        around, can give nothing else."""
        is_whole = isinstance(self.lm_head, TriptychTokenProjection) and self.tp_size is None
        return not is_whole or (not self.training if output_logits is None else output_logits)

    def predict_tokens(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        output_logits: bool | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss, if there are labels, and logits [B, T, V], from hidden states [B, T, D].

        Args:
            labels: [B, T], what each hidden state predicts.
            z_loss: weight of what keeps logits small, see `losses.cross_entropy`.
            output_logits: False leaves logits out where there are labels: the loss then needs no table of them, and
                asks only states that have a label, in a graph that is not compiled. None does so in training.
        """
        options = {"num_items_in_batch": num_items_in_batch, "label_smoothing": label_smoothing, "z_loss": z_loss}
        if labels is None or self.gives_logits(output_logits) or is_tracing(hidden_states):
            logits = self.project(self.to_table(hidden_states))
            return None if labels is None else cross_entropy(logits, labels, **options), logits
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(f"`labels` has shape {list(labels.shape)}, but must be {list(hidden_states.shape[:-1])}.")
        labels = labels.to(hidden_states.device)
        is_given = labels != IGNORE
        states = self.to_table(hidden_states[is_given])
        return self.lm_head(states, labels[is_given], scale=self.config.logit_scale, **options), None


class GenerativeHead(LanguageModelHead, GenerationMixin):
    """A language model that `generate()` can drive; a factorised token table is reached through `embed_out`."""

    def __init__(self, config: TriptychConfig):
        super().__init__(config)
        stack = config.get_text_config()
        if stack.embedding_size != stack.hidden_size:
            self.embed_out = TriptychLinear(stack.hidden_size, stack.embedding_size, bias=False)

    def to_table(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.embed_out(hidden_states) if hasattr(self, "embed_out") else hidden_states

    def adjust_generation_fn(self, *args, **kwargs):
        """Takes settings of generation from a folder, as transformers does, but only such as can be run with."""
        try:
            super().adjust_generation_fn(*args, **kwargs)
        except (AttributeError, RecursionError, TypeError) as error:
            raise ValueError(f"'generation_config.json' cannot be read: {error}.") from error
        vocab_size = self.config.get_text_config(decoder=True).vocab_size
        for name in COUNTS + WIDTHS:
            value, most = getattr(self.generation_config, name), vocab_size if name in WIDTHS else LARGEST
            if value is not None and not (isinstance(value, int) and value <= most):
                raise ValueError(
                    f"`generation_config.{name}` is {value!r}, but must be a whole number of at most {most}."
                )

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate() reads the signature
    def prepare_inputs_for_generation(self, *args, **kwargs) -> dict:
        # peft 0.21 puts a method of its own around this one, which looks for the cache by its former name.
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if "prepare_inputs_for_generation" in vars(self) and "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def _reorder_cache(self, cache: Cache, beam_idx: torch.LongTensor) -> Cache:
        """Beams move among those of their own source, which all have its keys and values."""
        reorder(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache, beam_idx)
        return cache

    def create_masks_for_generate(self, attention_mask: torch.Tensor | None, cache: Cache, **kwargs):
        """With a static cache, masks are still composed by the forward, from a 2D mask of one fixed length."""
        if attention_mask is None:
            return None
        return F.pad(attention_mask, (0, max(0, cache.get_max_length() - attention_mask.shape[1])))
