"""From examples to rows of token ids: one function for each kind of example."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.errors import UserError
from triptych.training.padding import text_bounds, token_id

Columns = dict[str, list[Any]]
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Encoder:
    """What turns examples into token ids.

    Attributes:
        topology: of the model.
        max_length: longest row, or None.
        pack: fill rows of running text with whole documents.
        parts: what the collator wants to know of running text: `word_ids` or `sentence_ids`.
        labels: names of the classes, in the order of their numbers.
        processor: what prepares images or recordings.
    """

    tokenizer: PreTrainedTokenizerBase | None
    topology: str
    max_length: int | None = None
    pack: bool = False
    parts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    processor: Any = None

    def __call__(self, *texts: list[str], **options: Any):
        if options.get("add_special_tokens", True):  # a tokenizer that has no room for them cuts nothing
            self.check_room(self.tokenizer.num_special_tokens_to_add(pair=len(texts) == 2) + 1)
        return self.tokenizer(*texts, truncation=self.max_length is not None, max_length=self.max_length, **options)

    def check_room(self, least: int) -> None:
        """Raise a `UserError` where rows cannot have `least` tokens."""
        if self.max_length and self.max_length < least:
            raise UserError(f"recipe key 'data.max_length' must be at least {least}, not {self.max_length}")

    @property
    def end(self) -> int:
        """The id that a text ends with."""
        end = text_bounds(self.tokenizer)[1]
        return token_id(self.tokenizer, "eos_token") if end is None else end

    def number(self, label: Any) -> int:
        """Return the number of a class, -100 where training has not seen it, or where it is empty."""
        return self.labels.index(str(label)) if str(label) in self.labels else IGNORE


def encode_texts(examples: Columns, encoder: Encoder) -> Columns:
    """Cut running text into rows of at most `max_length` tokens, with the special tokens of the topology.

    A decoder's row begins with the last token of the row before, so that every token is predicted once. Where there is
    a `text_pair`, a row is both texts.
    """
    if "text_pair" in examples:
        return _texts(examples, encoder)
    tokenizer = encoder.tokenizer
    encoded = tokenizer(examples["text"], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    rows: list[dict[str, list[int]]] = []
    for index, ids in enumerate(encoded["input_ids"]):
        values = {"input_ids": ids}
        if "word_ids" in encoder.parts:
            values["word_ids"] = encoded.word_ids(index)
        if "sentence_ids" in encoder.parts:
            starts = [0] + [match.end() for match in SENTENCE_END.finditer(examples["text"][index])]
            firsts = [first for first, _ in encoded["offset_mapping"][index]]
            values["sentence_ids"] = (np.searchsorted(starts, firsts, side="right") - 1).tolist()
        rows += _cut(values, encoder)
    if encoder.pack:
        rows = _pack(rows, encoder)
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {"input_ids": []}


def _cut(values: dict[str, list[int]], encoder: Encoder) -> list[dict[str, list[int]]]:
    """Cut a text's tokens into rows; word and sentence numbers of special tokens are -1."""
    begin = text_bounds(encoder.tokenizer)[0]
    first = [] if encoder.topology == "encoder_decoder" or begin is None else [begin]
    last, overlap = [encoder.end], 0
    if encoder.topology == "decoder":  # the text as a whole begins and ends, not each row
        values = {name: _surround(name, ids, first, last) for name, ids in values.items()}
        first, last, overlap = [], [], 1
    encoder.check_room(len(first + last) + overlap + 1)
    length = len(values["input_ids"])
    room = encoder.max_length - len(first + last) if encoder.max_length else max(length, 1) + overlap
    starts = range(0, max(length - overlap, 1), room - overlap)
    return [
        {name: _surround(name, ids[start : start + room], first, last) for name, ids in values.items()}
        for start in starts
    ]


def _surround(name: str, ids: list[int], first: list[int], last: list[int]) -> list[int]:
    return first + ids + last if name == "input_ids" else [-1] * len(first) + ids + [-1] * len(last)


def _pack(rows: list[dict[str, list[int]]], encoder: Encoder) -> list[dict[str, list[int]]]:
    """Fill rows with texts, in their order; `seq_idx` numbers the texts of a row."""
    packed: list[dict[str, list[int]]] = []
    for row in rows:
        ids = row["input_ids"]
        if not packed or len(packed[-1]["input_ids"]) + len(ids) > encoder.max_length:
            packed.append({"input_ids": [], "seq_idx": []})
        into = packed[-1]
        number = into["seq_idx"][-1] + 1 if into["seq_idx"] else 0
        into["seq_idx"] += [number] * len(ids)
        into["input_ids"] += ids
    return packed


def encode_sentences(examples: Columns, indices: list[int], encoder: Encoder) -> Columns:
    """Split texts into sentences without special tokens; `document` tells which belong together."""
    rows = [
        (document, sentence)
        for document, text in zip(indices, examples["text"], strict=True)
        for sentence in SENTENCE_END.split(text)
        if sentence
    ]
    documents, sentences = map(list, zip(*rows, strict=True))
    return {"input_ids": encoder(sentences, add_special_tokens=False)["input_ids"], "document": documents}


def encode_pairs(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `source` into the encoder's input, or the beginning of a decoder's, and `target` into `labels`."""
    return {"input_ids": encoder(examples["source"])["input_ids"], "labels": encode_targets(examples, encoder)}


def encode_targets(examples: Columns, encoder: Encoder) -> list[list[int]]:
    """Return the tokens of `target`, with the end of the text."""
    targets = encoder(examples["target"], add_special_tokens=False)["input_ids"]
    if encoder.max_length:
        targets = [ids[: encoder.max_length - 1] for ids in targets]
    return [[*ids, encoder.end] for ids in targets]


def encode_classes(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `text`, or `text` and `text_pair`, into tokens, and `label` into its class's number."""
    return _texts(examples, encoder) | {"labels": [encoder.number(label) for label in examples["label"]]}


def encode_values(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `text`, or `text` and `text_pair`, into tokens, and `label` into a number to regress."""
    try:
        return _texts(examples, encoder) | {"labels": [float(label) for label in examples["label"]]}
    except ValueError as error:
        raise UserError(f"a label to regress must be a number: {error}") from error


def _texts(examples: Columns, encoder: Encoder) -> Columns:
    if None in examples.get("text_pair", ()):
        raise UserError("some examples have a text_pair and others have none: all must have it, or none")
    return _inputs(encoder(*(examples[name] for name in ("text", "text_pair") if name in examples)))


def _inputs(encoded: Mapping[str, list]) -> Columns:
    return {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}


def encode_words(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `tokens` into subwords, the first of which carries the word's label: the others have -100, as have words
    without a label."""
    # Written as in running text, where all words but the first follow a space.
    words = [[" " * (place > 0) + word for place, word in enumerate(tokens)] for tokens in examples["tokens"]]
    encoded = encoder(words, is_split_into_words=True)
    labels = []
    for row, names in enumerate(examples["labels"]):
        ids = encoded.word_ids(row)
        is_first = [word is not None and word != before for word, before in zip(ids, [None, *ids], strict=False)]
        labels.append(
            [encoder.number(names[word]) if first else IGNORE for word, first in zip(ids, is_first, strict=True)]
        )
    return {"input_ids": encoded["input_ids"], "labels": labels}


def encode_spans(examples: Columns, encoder: Encoder) -> Columns:
    """Turn `question` and `context` into tokens, and the answer into its first and last; 0 where it was cut off."""
    longest = max(map(len, encoder.tokenizer(examples["question"])["input_ids"]))
    if encoder.max_length and longest + 2 > encoder.max_length:
        raise UserError(
            f"recipe key 'data.max_length' must be above {longest + 1}, as long as a question with one token"
        )
    encoded = encoder.tokenizer(
        examples["question"],
        examples["context"],
        truncation="only_second" if encoder.max_length else False,
        max_length=encoder.max_length,
    )
    ends = {"start_positions": [], "end_positions": []}
    for row, (answer, start) in enumerate(zip(examples["answer"], examples["answer_start"], strict=True)):
        places = [encoded.char_to_token(row, at, 1) for at in (int(start), int(start) + len(answer) - 1)]
        for column, place in zip(ends.values(), places if None not in places else (0, 0), strict=True):
            column.append(place)
    return _inputs(encoded) | ends


def encode_choices(examples: Columns, encoder: Encoder) -> Columns:
    """Pair `text` with each of `choices`; `label` is the number of the right one."""
    rows = [
        _inputs(encoder([text] * len(choices), choices))
        for text, choices in zip(examples["text"], examples["choices"], strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return columns | {"labels": [int(label) for label in examples["label"]]}
