"""Objectives: which head learns what, from which columns, through which collator.

| type | columns | source |
|---|---|---|
| `masked_lm`, `next_sentence` | text (`masked_lm`: perhaps a text_pair) | Devlin et al. 2019, arXiv 1810.04805 |
| `permutation_lm` | text | Yang et al. 2019, arXiv 1906.08237 |
| `causal_lm` | text | Radford et al. 2018 |
| `prefix_lm` | text | Raffel et al. 2020, arXiv 1910.10683, section 3.2 |
| `span_corruption` | text | the same, section 3.1.4 |
| `denoising` | text | Lewis et al. 2020, arXiv 1910.13461 |
| `seq2seq` | source, target | Vaswani et al. 2017; as a decoder alone: Khandelwal et al. 2019, arXiv 1905.08836 |
| `sequence_classification`, `regression` | text, label, and a text_pair where there is one | |
| `token_classification` | tokens, labels | |
| `question_answering` | question, context, answer, answer_start | Rajpurkar et al. 2016, arXiv 1606.05250 |
| `multiple_choice` | text, choices, label | |
| `image_classification` | image, label | Dosovitskiy et al. 2021, arXiv 2010.11929 |
| `video_classification` | video, label | Arnab et al. 2021, arXiv 2103.15691 |
| `audio_classification` | audio, label | Radford et al. 2023, arXiv 2212.04356 |
| `speech_to_text` | audio, target | the same |
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    AutoModelForVideoClassification,
    PreTrainedTokenizerBase,
)

from triptych.configuration_senses import INPUTS
from triptych.training.batching import Examples, side_lengths
from triptych.training.corruption import DenoisingCollator, SpanCorruptionCollator
from triptych.training.data import digest_of
from triptych.training.encoding import (
    Encoder,
    encode_choices,
    encode_classes,
    encode_pairs,
    encode_sentences,
    encode_spans,
    encode_texts,
    encode_values,
    encode_words,
)
from triptych.training.errors import UserError, as_user_error, unknown_name
from triptych.training.labelling import (
    MultipleChoiceCollator,
    SequenceClassificationCollator,
    SpanExtractionCollator,
    TokenClassificationCollator,
)
from triptych.training.language_modeling import (
    CausalLMCollator,
    CausalSeq2SeqCollator,
    PrefixLMCollator,
    Seq2SeqCollator,
)
from triptych.training.masking import MaskedLMCollator, NextSentencePairs
from triptych.training.permutation import PermutationLMCollator
from triptych.training.recipe import Recipe, convert_fields
from triptych.training.senses import (
    SenseClassificationCollator,
    SpeechToTextCollator,
    build_processor,
    encode_images,
    encode_recordings,
    encode_transcripts,
    encode_videos,
    input_size,
    processor_digest,
    read_whole,
)
from triptych.training.tokenization import MASK, SENTINELS, SEP, tokenizer_digest


@dataclass(frozen=True)
class Objective:
    """What a model learns.

    Attributes:
        heads: topology to the Auto class of its head; the first topology is the default.
        collator: of all topologies, or topology to its collator.
        columns, optional: what an example has.
        encode: from columns of examples to columns of token ids, or of other inputs.
        sense: what the model reads where that is not text, an `input_type`.
    """

    heads: dict[str, type]
    collator: type | dict[str, type]
    columns: tuple[str, ...]
    encode: Callable
    optional: tuple[str, ...] = ()
    sense: str | None = None

    def collator_class(self, topology: str) -> type:
        """Return the class of the collator for a model of `topology`."""
        return self.collator[topology] if isinstance(self.collator, dict) else self.collator


# The special tokens that a collator needs.
EXTRA_TOKENS = {
    MaskedLMCollator: [MASK],
    DenoisingCollator: [MASK],
    PermutationLMCollator: [MASK],
    SpanCorruptionCollator: SENTINELS,
    CausalSeq2SeqCollator: [SEP],
}
TEXT = ("text",)
CLASSIFIERS = {"encoder": AutoModelForSequenceClassification, "decoder": AutoModelForSequenceClassification}
OBJECTIVES = {
    "masked_lm": Objective({"encoder": AutoModelForMaskedLM}, MaskedLMCollator, TEXT, encode_texts, ("text_pair",)),
    "next_sentence": Objective({"encoder": AutoModelForPreTraining}, MaskedLMCollator, TEXT, encode_sentences),
    "permutation_lm": Objective({"encoder": AutoModelForMaskedLM}, PermutationLMCollator, TEXT, encode_texts),
    "causal_lm": Objective({"decoder": AutoModelForCausalLM}, CausalLMCollator, TEXT, encode_texts),
    "prefix_lm": Objective(
        {"decoder": AutoModelForCausalLM, "encoder_decoder": AutoModelForSeq2SeqLM},
        PrefixLMCollator,
        TEXT,
        encode_texts,
    ),
    "span_corruption": Objective(
        {"encoder_decoder": AutoModelForSeq2SeqLM}, SpanCorruptionCollator, TEXT, encode_texts
    ),
    "denoising": Objective({"encoder_decoder": AutoModelForSeq2SeqLM}, DenoisingCollator, TEXT, encode_texts),
    "seq2seq": Objective(
        {"encoder_decoder": AutoModelForSeq2SeqLM, "decoder": AutoModelForCausalLM},
        {"encoder_decoder": Seq2SeqCollator, "decoder": CausalSeq2SeqCollator},
        ("source", "target"),
        encode_pairs,
    ),
    "sequence_classification": Objective(
        CLASSIFIERS, SequenceClassificationCollator, ("text", "label"), encode_classes, ("text_pair",)
    ),
    "regression": Objective(
        CLASSIFIERS, SequenceClassificationCollator, ("text", "label"), encode_values, ("text_pair",)
    ),
    "token_classification": Objective(
        {"encoder": AutoModelForTokenClassification, "decoder": AutoModelForTokenClassification},
        TokenClassificationCollator,
        ("tokens", "labels"),
        encode_words,
    ),
    "question_answering": Objective(
        {"encoder": AutoModelForQuestionAnswering},
        SpanExtractionCollator,
        ("question", "context", "answer", "answer_start"),
        encode_spans,
    ),
    "multiple_choice": Objective(
        {"encoder": AutoModelForMultipleChoice}, MultipleChoiceCollator, ("text", "choices", "label"), encode_choices
    ),
    "image_classification": Objective(
        {"encoder": AutoModelForImageClassification},
        SenseClassificationCollator,
        ("image", "label"),
        encode_images,
        sense="image",
    ),
    "video_classification": Objective(
        {"encoder": AutoModelForVideoClassification},
        SenseClassificationCollator,
        ("video", "label"),
        encode_videos,
        sense="video",
    ),
    "audio_classification": Objective(
        {"encoder": AutoModelForAudioClassification},
        SenseClassificationCollator,
        ("audio", "label"),
        encode_recordings,
        sense="audio",
    ),
    "speech_to_text": Objective(
        {"encoder_decoder": AutoModelForSpeechSeq2Seq},
        SpeechToTextCollator,
        ("audio", "target"),
        encode_transcripts,
        sense="audio",
    ),
}
WRITING = ("seq2seq", "speech_to_text")  # measured by what they write


@dataclass(frozen=True)
class Task:
    """A recipe's objective, with its topology and the options of its collator."""

    name: str
    objective: Objective
    topology: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def extra_tokens(self) -> list[str]:
        """Special tokens that the tokenizer needs."""
        return EXTRA_TOKENS.get(self.objective.collator_class(self.topology), [])

    @property
    def has_texts(self) -> bool:
        """Whether the model reads or writes texts."""
        return self.objective.sense is None or self.name in WRITING

    @property
    def head(self) -> type:
        """The Auto class of the model."""
        return self.objective.heads[self.topology]

    def collator(self, tokenizer: PreTrainedTokenizerBase | None) -> Callable:
        """Return the objective's collator, which pads with the tokenizer, if there is one."""
        arguments = [] if tokenizer is None else [tokenizer]
        return self.objective.collator_class(self.topology)(*arguments, **self.options)


def read_task(recipe: Recipe) -> Task:
    """Return what `recipe` says of its objective.

    Raises:
        UserError: an unknown objective or option, or a topology that the objective does not have.
    """
    options = dict(recipe.objective)
    name = options.pop("type", None)
    if name not in OBJECTIVES:
        raise unknown_name("objective", str(name), OBJECTIVES)
    objective = OBJECTIVES[name]
    topology = recipe.model.get("topology", next(iter(objective.heads)))
    if topology not in objective.heads:
        raise UserError(f"objective '{name}' has the topology {' or '.join(objective.heads)}, not '{topology}'")
    collator = objective.collator_class(topology)
    implied = {"encoder_decoder": topology == "encoder_decoder"} if name == "prefix_lm" else {}
    options = convert_fields(collator, options, "objective.", leave_out=("tokenizer", *implied))
    return Task(name, objective, topology, options | implied)


def encode(
    task: Task, examples: Dataset, tokenizer: PreTrainedTokenizerBase | None, recipe: Recipe, labels: Sequence[str]
):
    """Return the rows of token ids, or of other inputs, that the task's collator reads.

    Args:
        labels: names of the classes, in the order of their numbers; empty where the objective has none.
    """
    data = recipe.data
    if data.pack and (task.name != "causal_lm" or not data.max_length):
        raise UserError(
            "recipe key 'data.pack' must be false, unless the objective is causal_lm with a data.max_length"
        )
    parts = tuple(
        part
        for part, option in (("word_ids", "whole_word"), ("sentence_ids", "permute_sentences"))
        if task.options.get(option)
    )
    processor = build_processor(recipe, task.objective.sense) if task.objective.sense else None
    encoder = Encoder(tokenizer, task.topology, data.max_length, data.pack, parts, tuple(labels), processor)
    return examples.map(
        task.objective.encode,
        batched=True,
        with_indices=task.objective.encode is encode_sentences,
        fn_kwargs={"encoder": encoder},
        remove_columns=examples.column_names,
        num_proc=data.num_proc,
        **(_cache(data.cache, examples, encoder, task.name) if data.cache else {}),
    )


def _cache(folder: str, examples: Dataset, encoder: Encoder, name: str) -> dict[str, str]:
    """Return what makes `Dataset.map` keep its rows in a file that only the same examples and encoder find again."""
    settings = [name, encoder.topology, encoder.max_length, encoder.pack, encoder.parts, encoder.labels]
    readers = [tokenizer_digest(encoder.tokenizer), processor_digest(encoder.processor)]
    parts = [digest_of([examples]), *readers, repr(settings), version("triptych")]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32]
    with as_user_error(f"recipe key 'data.cache': folder '{folder}' cannot be made"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return {"cache_file_name": str(Path(folder) / f"{key}.arrow"), "new_fingerprint": key}


def has_classes(task: Task) -> bool:
    """Whether the objective's labels are names of classes."""
    return task.name.endswith("_classification")


def label_names(task: Task, examples: Dataset) -> list[str]:
    """Return the names of the classes that `examples` hold, sorted; none where the objective has no classes."""
    if not has_classes(task):
        return []
    if task.name == "token_classification":
        return sorted({label for labels in examples["labels"] for label in labels if label})
    return sorted({str(label) for label in examples["label"]})


def build_examples(
    task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> Examples | NextSentencePairs:
    """Return rows of model inputs with the seeds that they draw from and the lengths that batches are made by."""
    if task.name == "next_sentence":
        return NextSentencePairs(rows, tokenizer, recipe.data.max_length or 512, recipe.seed)
    lengths = row_lengths(task, rows)
    if not task.has_texts:
        rows = read_whole(rows, INPUTS[task.objective.sense][0])
    return Examples(rows.with_format("numpy") if task.objective.sense else rows, lengths, recipe.seed)


def row_lengths(task: Task, rows: Dataset) -> np.ndarray:
    """Return what each row costs in tokens, on each side that the model reads: [sides, rows]."""
    if task.name == "speech_to_text":
        return np.stack([np.array(rows["frames"]), *side_lengths(rows)])
    if task.objective.sense:
        values = np.array(rows[0][INPUTS[task.objective.sense][0]])
        return np.full((1, len(rows)), input_size(values))  # one size for all
    lengths = side_lengths(rows)
    if task.name == "seq2seq" and task.topology == "decoder":
        return lengths.sum(0, keepdims=True)  # the target follows its source
    return lengths
