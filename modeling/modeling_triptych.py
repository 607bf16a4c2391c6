"""The heads: what each panel can be asked. This is the file through which saved code is loaded.

Shapes: B batch, T tokens, S encoder tokens, C choices, D hidden_size, E embedding_size, V vocabulary, L labels.
"""

import copy
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from .attention import NORMS
from .configuration_triptych import (
    TriptychConfig,
    TriptychDecoderConfig,
    TriptychEncoderConfig,
    TriptychEncoderDecoderConfig,
    TriptychStackConfig,
)
from .losses import (
    IGNORE,
    at_least_float32,
    check_labels,
    classification_loss,
    cross_entropy,
    next_token_labels,
    per_item,
    span_loss,
)
from .masks import find_documents
from .stacks import (
    TriptychDecoderModel,
    TriptychEncoderDecoderModel,
    TriptychEncoderModel,
    TriptychPreTrainedModel,
    pool,
    renamed_cache,
)

BASE_MODELS = {
    "encoder": TriptychEncoderModel,
    "decoder": TriptychDecoderModel,
    "encoder_decoder": TriptychEncoderDecoderModel,
}


class HeadKwargs(TransformersKwargs, total=False):
    """What heads take by keyword, and do not name: of every named argument with "label" in it, transformers' Trainer
    thinks that it holds labels, without which there is no loss to evaluate."""

    label_smoothing: float
    shift_labels: torch.LongTensor


@dataclass
class TriptychForPreTrainingOutput(ModelOutput):
    """Both answers of `TriptychEncoderForPreTraining`: token logits [B, T, V] and sentence logits [B, 2]."""

    loss: torch.FloatTensor | None = None
    prediction_logits: torch.FloatTensor | None = None
    seq_relationship_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


def classifier_dropout(config: TriptychStackConfig) -> nn.Dropout:
    """The dropout before a classification layer."""
    return nn.Dropout(config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout)


class TriptychPooler(nn.Module):
    """tanh(W x) of the pooled vector, what a sentence-level answer is read from (Devlin et al. 2019)."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(pooled))


class TriptychPredictionHead(nn.Module):
    """norm(act(W x)), from hidden states [B, T, D] to what the token table is compared with, [B, T, E]."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = NORMS[config.norm_type](config.embedding_size, eps=config.norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.dense(hidden_states)))


class TriptychHead(TriptychPreTrainedModel):
    """A base model under `model`, and the way most heads answer."""

    output_class: type[ModelOutput]

    def __init__(self, config: TriptychConfig):
        super().__init__(config)
        self.model = BASE_MODELS[config.topology](config)
        self.num_labels = config.num_labels

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.model.set_input_embeddings(value)

    def answer(self, outputs: ModelOutput, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits, from what the base model wrote."""
        raise NotImplementedError

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs) -> torch.Tensor:
        return cross_entropy(logits, labels, **kwargs)

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

        Returns:
            `logits`, and the `loss` if there are labels.
        """
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.answer(outputs, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss(logits, labels, num_items_in_batch=num_items_in_batch, label_smoothing=label_smoothing)
        return self.output_class(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LanguageModelHead(TriptychHead):
    """A projection onto the vocabulary, tied to the token table if the configuration says so."""

    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    has_bias = False

    def __init__(self, config: TriptychConfig):
        super().__init__(config)
        stack = config.get_text_config()
        self.lm_head = nn.Linear(stack.embedding_size, stack.vocab_size, bias=self.has_bias)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module):
        self.lm_head = value

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states in the width of the token table [..., E]."""
        logits = self.lm_head(hidden_states)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs) -> nn.Embedding:
        """As in transformers; source and target tables follow if they are one table."""
        config = self.config
        if config.topology == "encoder_decoder" and not config.share_embeddings:
            raise ValueError("`share_embeddings` is False, so source and target vocabularies cannot be resized as one.")
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        for part in (config, config.encoder, config.decoder) if config.topology == "encoder_decoder" else ():
            part.vocab_size = embeddings.num_embeddings
        return embeddings


class GenerativeHead(LanguageModelHead, GenerationMixin):
    """A language model that `generate()` can drive; a factorised token table is reached through `embed_out`."""

    def __init__(self, config: TriptychConfig):
        super().__init__(config)
        stack = config.get_text_config()
        if stack.embedding_size != stack.hidden_size:
            self.embed_out = nn.Linear(stack.hidden_size, stack.embedding_size, bias=False)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().project(self.embed_out(hidden_states) if hasattr(self, "embed_out") else hidden_states)

    def create_masks_for_generate(self, attention_mask: torch.Tensor | None, cache: Cache, **kwargs):
        """With a static cache, masks are still composed by the forward, from a 2D mask of one fixed length."""
        if attention_mask is None:
            return None
        return F.pad(attention_mask, (0, max(0, cache.get_max_length() - attention_mask.shape[1])))


class TriptychForMaskedLM(LanguageModelHead):
    """Which token stood at a masked place (Devlin et al. 2019), or stands next in some order (Yang et al. 2019)."""

    config: TriptychEncoderConfig
    output_class = MaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    has_bias = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.prediction_head = TriptychPredictionHead(config)
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

    def answer(self, outputs, attention_mask):
        return self.project(self.prediction_head(outputs.last_hidden_state))


class TriptychEncoderForPreTraining(LanguageModelHead):
    """BERT's two tasks at once: masked tokens, and whether the second text follows the first."""

    config: TriptychEncoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    has_bias = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.prediction_head = TriptychPredictionHead(config)
        self.pooler = TriptychPooler(config)
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
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs)
        prediction_logits = self.project(self.prediction_head(outputs.last_hidden_state))
        seq_relationship_logits = self.seq_relationship(self.dropout(self.pooler(outputs.pooler_output)))
        loss = None
        if labels is not None:
            loss = cross_entropy(prediction_logits, labels, num_items_in_batch, label_smoothing)
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


class SequenceClassification(TriptychHead):
    """One answer per text, `logits` [B, L]; an encoder's pooled vector goes through a pooler layer first.

    `labels` are classes [B], or floats [B] or [B, L] to regress or to hold several; see `config.problem_type`.
    """

    output_class = SequenceClassifierOutput

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        if config.topology == "encoder":
            self.pooler = TriptychPooler(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def answer(self, outputs, attention_mask):
        if hasattr(self, "pooler"):
            pooled = self.pooler(outputs.pooler_output)
        else:
            pooled = pool(outputs.last_hidden_state, attention_mask, self.config.pooling)
        return self.classifier(self.dropout(pooled))

    def loss(self, logits, labels, **kwargs):
        return classification_loss(logits, labels, self.config.problem_type, **kwargs)


class TokenClassification(TriptychHead):
    """One answer per token: `labels` [B, T], `logits` [B, T, L]."""

    output_class = TokenClassifierOutput

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.classifier(self.dropout(outputs.last_hidden_state))


class QuestionAnswering(TriptychHead):
    """Where in the text the answer begins and ends."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        self.dropout = classifier_dropout(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[HeadKwargs],
    ) -> QuestionAnsweringModelOutput:
        """`start_positions` and `end_positions` [B] are token indices, ignored outside the text; logits are [B, T].

        `num_items_in_batch` counts texts.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.qa_outputs(self.dropout(outputs.last_hidden_state))
        if attention_mask is not None and attention_mask.ndim == 2:  # a pad is no answer
            pads = ~attention_mask[:, -logits.shape[1] :].to(logits.device, torch.bool)
            logits = logits.masked_fill(pads[..., None], torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = span_loss(start_logits, end_logits, start_positions, end_positions, num_items_in_batch)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TriptychEncoderForSequenceClassification(SequenceClassification):
    config: TriptychEncoderConfig


class TriptychDecoderForSequenceClassification(SequenceClassification):
    config: TriptychDecoderConfig


class TriptychEncoderForTokenClassification(TokenClassification):
    config: TriptychEncoderConfig


class TriptychDecoderForTokenClassification(TokenClassification):
    config: TriptychDecoderConfig


class TriptychEncoderForQuestionAnswering(QuestionAnswering):
    config: TriptychEncoderConfig


class TriptychDecoderForQuestionAnswering(QuestionAnswering):
    config: TriptychDecoderConfig


class TriptychEncoderForNextSentencePrediction(TriptychHead):
    """Whether the second text follows the first: `labels` [B] is 0 if it does, else 1; `logits` [B, 2]."""

    config: TriptychEncoderConfig
    output_class = NextSentencePredictorOutput

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.pooler = TriptychPooler(config)
        self.dropout = classifier_dropout(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.seq_relationship(self.dropout(self.pooler(outputs.pooler_output)))

    def loss(self, logits, labels, **kwargs):
        return cross_entropy(logits, labels.view(-1), **kwargs)


class TriptychEncoderForMultipleChoice(TriptychHead):
    """Which of C texts is the right one."""

    config: TriptychEncoderConfig
    output_class = MultipleChoiceModelOutput

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.pooler = TriptychPooler(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.classifier(self.dropout(self.pooler(outputs.pooler_output)))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> MultipleChoiceModelOutput:
        """Every input has one more axis, [B, C, T]; `labels` [B] are the right choices; logits are [B, C]."""
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        texts = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        choices = (inputs_embeds if input_ids is None else input_ids).shape[1]
        texts = {name: value.flatten(0, 1) for name, value in texts.items() if value is not None}
        output = super().forward(**texts, **kwargs)
        output.logits = output.logits.view(-1, choices)
        if labels is not None:
            output.loss = cross_entropy(output.logits, labels, num_items_in_batch, label_smoothing)
        return output


class TriptychForCausalLM(GenerativeHead):
    """What comes next: `labels` [B, T] are the tokens themselves, and each is asked of the one before it."""

    config: TriptychDecoderConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TriptychDecoderConfig):
        super().__init__(config)
        self.post_init()

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
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
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
        logits = self.project(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        if labels is not None and shift_labels is None:
            if labels.shape != outputs.last_hidden_state.shape[:2]:
                shape = list(outputs.last_hidden_state.shape[:2])
                raise ValueError(f"`labels` has shape {list(labels.shape)}, but must be {shape}.")
            is_padding = attention_mask is not None and attention_mask.shape == labels.shape
            padding = attention_mask.bool() if is_padding else None
            documents = find_documents(position_ids, seq_idx, padding, 0, *labels.shape)
            shift_labels = next_token_labels(labels, padding, documents)
        loss = None
        if shift_labels is not None:
            loss = cross_entropy(logits, shift_labels, num_items_in_batch, label_smoothing)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TriptychForConditionalGeneration(GenerativeHead):
    """The target, given the source: `labels` [B, T] are the target's tokens."""

    config: TriptychEncoderDecoderConfig

    def __init__(self, config: TriptychEncoderDecoderConfig):
        super().__init__(config)
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
        seq_idx: torch.Tensor | None = None,
        decoder_seq_idx: torch.Tensor | None = None,
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
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
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
            seq_idx=seq_idx,
            decoder_seq_idx=decoder_seq_idx,
            **kwargs,
        )
        logits = self.project(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits, labels, num_items_in_batch, label_smoothing)
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

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        """transformers would give cross-attention the decoder's windows; it always sees the whole encoder."""
        is_given = model_kwargs.get("cache") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get("cache")
        if is_given or cache is None:
            return
        cross_attention_cache = DynamicCache()
        if isinstance(cache.cross_attention_cache, StaticCache):
            config = copy.copy(self.config.decoder)
            config.layer_types = ["full_attention"] * config.num_hidden_layers
            source_length = model_kwargs["encoder_outputs"][0].shape[1]
            cross_attention_cache = StaticCache(config, max_cache_len=source_length)
        model_kwargs["cache"] = EncoderDecoderCache(cache.self_attention_cache, cross_attention_cache)
