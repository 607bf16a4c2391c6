"""The heads that choose: classes of texts and tokens, spans, the next sentence, one of several texts.

Shapes: B batch, T tokens, C choices, D hidden_size, L labels.
"""

from typing import Unpack

import torch
from torch import nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import TransformersKwargs, can_return_tuple

from .configuration_triptych import TriptychDecoderConfig, TriptychEncoderConfig, TriptychStackConfig
from .heads import HeadKwargs, TriptychHead, TriptychPredictionHead, classifier_dropout, take_loss_options
from .losses import classification_loss, cross_entropy, span_loss
from .stacks import pool


class Classifier(TriptychHead):
    """A head whose last layer, a linear one, reads pooled texts or single tokens, through the layer that
    `classifier_head` names."""

    reads_texts = False

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        if config.classifier_head == "prediction":
            self.prediction_head = TriptychPredictionHead(config, config.hidden_size)
        self.dropout = classifier_dropout(config)

    @classmethod
    def has_pooler(cls, config: TriptychStackConfig) -> bool:
        return cls.reads_texts and config.classifier_head == "pooler"

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """What the last layer reads, [..., D]."""
        return self.dropout(self.prediction_head(states) if hasattr(self, "prediction_head") else states)


class SequenceClassification(Classifier):
    """One answer per text, `logits` [B, L].

    `labels` are classes [B], or floats [B] or [B, L] to regress or to hold several; see `config.problem_type`.
    """

    output_class = SequenceClassifierOutput
    reads_texts = True

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels, bias=config.classifier_bias)
        self.post_init()

    def answer(self, outputs, attention_mask):
        pooled = outputs.get("pooler_output")
        if pooled is None:  # a decoder has none
            pooled = pool(outputs.last_hidden_state, attention_mask, self.config.pooling)
        return self.classifier(self.features(pooled))

    def loss(self, logits, labels, **kwargs):
        return classification_loss(logits, labels, self.config.problem_type, **kwargs)


class TokenClassification(Classifier):
    """One answer per token: `labels` [B, T], `logits` [B, T, L]."""

    output_class = TokenClassifierOutput

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels, bias=config.classifier_bias)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.classifier(self.features(outputs.last_hidden_state))


class QuestionAnswering(Classifier):
    """Where in the text the answer begins and ends."""

    def __init__(self, config: TriptychStackConfig):
        super().__init__(config)
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
        **kwargs: Unpack[TransformersKwargs],
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
        logits = self.qa_outputs(self.features(outputs.last_hidden_state))
        padding = None
        if attention_mask is not None and attention_mask.ndim == 2:  # a pad is no answer
            padding = attention_mask[:, -logits.shape[1] :].to(logits.device, torch.bool)
            logits = logits.masked_fill(~padding[..., None], torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            answers = start_logits, end_logits, start_positions, end_positions
            loss = span_loss(*answers, num_items_in_batch, padding)
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
    reads_pooler = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.dropout = classifier_dropout(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.seq_relationship(self.dropout(outputs.pooler_output))

    def loss(self, logits, labels, **kwargs):
        return cross_entropy(logits, labels.view(-1), **kwargs)


class TriptychEncoderForMultipleChoice(Classifier):
    """Which of C texts is the right one."""

    config: TriptychEncoderConfig
    output_class = MultipleChoiceModelOutput
    reads_texts = True

    def __init__(self, config: TriptychEncoderConfig):
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, 1, bias=config.classifier_bias)
        self.post_init()

    def answer(self, outputs, attention_mask):
        return self.classifier(self.features(outputs.pooler_output))

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
        options = take_loss_options(kwargs)
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
        logits = output.logits.view(-1, choices)
        # Not set in the output that is there: as a tuple, it would have the loss last.
        return MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy(logits, labels, num_items_in_batch, **options),
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )
