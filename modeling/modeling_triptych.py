"""The language models of each panel, and all other heads by name: this is the file through which saved code is loaded.

Shapes: B batch, T tokens, S encoder tokens, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput, Seq2SeqLMOutput
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput, can_return_tuple

from .classifiers import (
    TriptychDecoderForQuestionAnswering,
    TriptychDecoderForSequenceClassification,
    TriptychDecoderForTokenClassification,
    TriptychEncoderForMultipleChoice,
    TriptychEncoderForNextSentencePrediction,
    TriptychEncoderForQuestionAnswering,
    TriptychEncoderForSequenceClassification,
    TriptychEncoderForTokenClassification,
)
from .configuration_triptych import TriptychDecoderConfig, TriptychEncoderConfig, TriptychEncoderDecoderConfig
from .heads import (
    GenerativeHead,
    HeadKwargs,
    LanguageModelHead,
    TriptychPredictionHead,
    classifier_dropout,
    take_loss_options,
)
from .layout import find_documents
from .losses import IGNORE, at_least_float32, check_labels, cross_entropy, next_token_labels, per_item
from .pretrained import TriptychPreTrainedModel
from .sense_heads import (
    TriptychEncoderForAudioClassification,
    TriptychEncoderForImageClassification,
    TriptychEncoderForMaskedImageModeling,
    TriptychEncoderForVideoClassification,
)
from .stacks import TriptychDecoderModel, TriptychEncoderDecoderModel, TriptychEncoderModel, renamed_cache

__all__ = [
    "TriptychDecoderForQuestionAnswering",
    "TriptychDecoderForSequenceClassification",
    "TriptychDecoderForTokenClassification",
    "TriptychDecoderModel",
    "TriptychEncoderDecoderModel",
    "TriptychEncoderForAudioClassification",
    "TriptychEncoderForImageClassification",
    "TriptychEncoderForMaskedImageModeling",
    "TriptychEncoderForMultipleChoice",
    "TriptychEncoderForNextSentencePrediction",
    "TriptychEncoderForPreTraining",
    "TriptychEncoderForQuestionAnswering",
    "TriptychEncoderForSequenceClassification",
    "TriptychEncoderForTokenClassification",
    "TriptychEncoderForVideoClassification",
    "TriptychEncoderModel",
    "TriptychForCausalLM",
    "TriptychForConditionalGeneration",
    "TriptychForMaskedLM",
    "TriptychPreTrainedModel",
]


@dataclass
class TriptychForPreTrainingOutput(ModelOutput):
    """Both answers of `TriptychEncoderForPreTraining`: token logits [B, T, V] and sentence logits [B, 2]."""

    loss: torch.FloatTensor | None = None
    prediction_logits: torch.FloatTensor | None = None
    seq_relationship_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class MaskedTokenHead(LanguageModelHead):
    """What predicts tokens of an encoder: a layer of its own before the token table."""

    config: TriptychEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    has_bias = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.prediction_head = TriptychPredictionHead(config, config.embedding_size)

    def to_table(self, hidden_states):
        return self.prediction_head(hidden_states)


class TriptychForMaskedLM(MaskedTokenHead):
    """Which token stood at a masked place (Devlin et al. 2019), or stands next in some order (Yang et al. 2019)."""

    output_class = MaskedLMOutput

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        perm_mask: torch.Tensor | None = None,
        target_mapping: torch.Tensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> MaskedLMOutput:
        """The arguments of `TriptychHead.forward` and of `TriptychEncoderModel.forward`; in two settings:

        - masked language modelling: `labels` [B, T], -100 but for the masked places; `logits` [B, T, V];
        - permutation language modelling, with `perm_mask` [B, T, T] and `target_mapping` [B, P, T]: `labels` [B, P] are
          the very tokens that `target_mapping` names, unshifted; `logits` [B, P, V] are of the query stream.
        """
        inputs = dict(token_type_ids=token_type_ids, position_ids=position_ids, inputs_embeds=inputs_embeds)
        permutation = dict(perm_mask=perm_mask, target_mapping=target_mapping)
        return super().forward(input_ids, attention_mask, labels=labels, **inputs, **permutation, **kwargs)

    def predict(self, outputs, attention_mask, labels, **options):
        return self.predict_tokens(outputs.last_hidden_state, labels, **options)


class TriptychEncoderForPreTraining(MaskedTokenHead):
    """BERT's two tasks at once: masked tokens, and whether the second text follows the first."""

    reads_pooler = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.dropout = classifier_dropout(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        next_sentence_label: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> TriptychForPreTrainingOutput:
        """`labels` [B, T] as for masked tokens; `next_sentence_label` [B] is 0 if the second text follows, else 1."""
        options = take_loss_options(kwargs)
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        loss, prediction_logits = self.predict_tokens(outputs.last_hidden_state, labels, num_items_in_batch, **options)
        seq_relationship_logits = self.seq_relationship(self.dropout(outputs.pooler_output))
        if next_sentence_label is not None:
            next_sentence_label = next_sentence_label.view(-1)
            loss = (0 if loss is None else loss) + self.sentence_loss(
                seq_relationship_logits, next_sentence_label, labels, num_items_in_batch
            )
        return TriptychForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def sentence_loss(self, logits, next_sentence_label, labels, num_items_in_batch) -> torch.Tensor:
        """Mean cross-entropy over texts. With `num_items_in_batch`, which counts token labels, each text weighs as many
        items as it has token labels: only so do accumulated steps equal one big batch."""
        if labels is None or num_items_in_batch is None:
            return cross_entropy(logits, next_sentence_label, num_items_in_batch)
        check_labels(next_sentence_label, 2)
        per_text = F.cross_entropy(at_least_float32(logits), next_sentence_label, ignore_index=IGNORE, reduction="none")
        weights = (labels != IGNORE).sum(-1)
        return per_item((per_text * weights).sum(), weights.sum(), num_items_in_batch)


class TriptychForCausalLM(GenerativeHead):
    """What comes next: `labels` [B, T] are the tokens themselves, and each is asked of the one before it."""

    config: TriptychDecoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TriptychDecoderConfig):
        super().__init__(config)
        self.post_init()

    @staticmethod
    def shift(
        labels: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        seq_idx: torch.Tensor | None = None,
    ) -> torch.LongTensor:
        """What each token predicts, [B, T]: of the `labels` [B, T] that of the next one, as `forward` has it."""
        is_padding = attention_mask is not None and attention_mask.shape == labels.shape
        padding = attention_mask.bool() if is_padding else None
        return next_token_labels(labels, padding, find_documents(position_ids, seq_idx, padding, 0, *labels.shape))

    @can_return_tuple
    @renamed_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        prefix_length: torch.LongTensor | None = None,
        seq_idx: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> CausalLMOutputWithPast:
        """The arguments of `TriptychDecoderModel.forward`, and:

        Args:
            labels: [B, T], -100 where nothing is to be learnt. Pads and the ends of packed documents predict nothing.
            shift_labels: [B, T] labels that are shifted already, in the place of `labels`.
            logits_to_keep: so many last positions, or those of an index tensor, get logits; 0 is all.

        Returns:
            `logits` [B, T, V], the `cache`, and the `loss` if there are labels.
        """
        options = take_loss_options(kwargs)
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            prefix_length=prefix_length,
            seq_idx=seq_idx,
            **kwargs,
        )
        if labels is not None and shift_labels is None:
            if labels.shape != outputs.last_hidden_state.shape[:2]:
                shape = list(outputs.last_hidden_state.shape[:2])
                raise ValueError(f"`labels` has shape {list(labels.shape)}, but must be {shape}.")
            shift_labels = self.shift(labels, attention_mask, position_ids, seq_idx)
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        loss, logits = self.predict_tokens(hidden_states, shift_labels, num_items_in_batch, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TriptychForConditionalGeneration(GenerativeHead):
    """The target, given the source, be it a text, an image, a video or a recording: `labels` [B, T] are the target's
    tokens."""

    config: TriptychEncoderDecoderConfig

    def __init__(self, config: TriptychEncoderDecoderConfig):
        super().__init__(config)
        self.main_input_name = self.model.main_input_name
        table = "encoder" if config.share_embeddings else "decoder"
        self._tied_weights_keys = {"lm_head.weight": f"model.{table}.embed_tokens.weight"}
        self.loss_type = "ForMaskedLM"  # tells Trainer that labels stand where their logits do
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.LongTensor) -> torch.LongTensor:
        """Teacher forcing: the labels, one to the right, behind `decoder_start_token_id`; -100 becomes a pad."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None:
            raise ValueError(
                "`decoder_start_token_id` is None, but must be a token id to make decoder inputs of labels."
            )
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORE, 0 if pad is None else pad)

    @can_return_tuple
    @renamed_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        prefix_length: torch.LongTensor | None = None,
        seq_idx: torch.Tensor | None = None,
        decoder_seq_idx: torch.Tensor | None = None,
        pixel_values: torch.FloatTensor | None = None,
        input_features: torch.FloatTensor | None = None,
        interpolate_pos_encoding: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> Seq2SeqLMOutput:
        """The arguments of `TriptychEncoderDecoderModel.forward`, and:

        Args:
            labels: [B, T] target tokens, -100 where nothing is to be learnt; decoder inputs are made of them if there
                are none.

        Returns:
            `logits` [B, T, V], the `cache`, the encoder's states, and the `loss` if there are labels.
        """
        options = take_loss_options(kwargs)
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            is_causal = self.config.decoder.is_causal and kwargs.get("is_causal") is not False and prefix_length is None
            may_stop = is_causal and decoder_attention_mask is None and cache is None
            if may_stop and not self.gives_logits(options.get("output_logits")):
                # Behind the last label nothing is asked, and nothing before it looks there.
                decoder_attention_mask = (labels != IGNORE).flip(1).cumsum(1).flip(1) > 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            prefix_length=prefix_length,
            seq_idx=seq_idx,
            decoder_seq_idx=decoder_seq_idx,
            pixel_values=pixel_values,
            input_features=input_features,
            interpolate_pos_encoding=interpolate_pos_encoding,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        loss, logits = self.predict_tokens(hidden_states, labels, num_items_in_batch, **options)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        """A text beside an image or a recording is how the target begins; beside an image, a mask is of that text."""
        if self.main_input_name != "input_ids" and "input_ids" in model_kwargs:
            model_kwargs["decoder_input_ids"] = model_kwargs.pop("input_ids")
            if self.main_input_name == "pixel_values" and "attention_mask" in model_kwargs:
                model_kwargs["decoder_attention_mask"] = model_kwargs.pop("attention_mask")
        return super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)

    def _prepare_attention_mask_for_generation(self, inputs_tensor, *args):
        """transformers takes the first two axes of any input for those of texts."""
        if self.main_input_name != "input_ids":
            return None
        return super()._prepare_attention_mask_for_generation(inputs_tensor, *args)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        """transformers would give cross-attention the decoder's windows; it always sees the whole encoder."""
        is_given = model_kwargs.get("cache") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get("cache")
        if is_given or cache is None:
            return
        cross_attention_cache = DynamicCache()
        is_static = isinstance(cache.cross_attention_cache, StaticCache)
        if is_static and not self.config.decoder.linear_cross_attention:  # of which a state is kept, and no tokens
            config = copy.copy(self.config.decoder)
            config.layer_types = ["full_attention"] * config.num_hidden_layers
            source_length = model_kwargs["encoder_outputs"][0].shape[1]
            cross_attention_cache = StaticCache(config, max_cache_len=source_length)
        model_kwargs["cache"] = EncoderDecoderCache(cache.self_attention_cache, cross_attention_cache)
