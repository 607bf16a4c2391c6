import pytest
import torch
from test_collators import BOS, CASES, EOS, PAD, make_tokenizer

from triptych.training.errors import UserError
from triptych.training.labelling import (
    MultipleChoiceCollator,
    SequenceClassificationCollator,
    SpanExtractionCollator,
    TokenClassificationCollator,
)

NO = -100  # what the loss ignores
A, B, C, D, E = range(20, 25)  # tokens
TEXTS = [{"input_ids": [BOS, A, B, EOS]}, {"input_ids": [BOS, EOS]}]
LEFT = {"input_ids": [[BOS, A, B, EOS], [PAD, PAD, BOS, EOS]], "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]]}
RIGHT = {"input_ids": [[BOS, A, B, EOS], [BOS, EOS, PAD, PAD]], "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]]}
on_each_side = pytest.mark.parametrize("side, texts", [("left", LEFT), ("right", RIGHT)])


def with_columns(**columns):
    return [{**row, **{name: values[i] for name, values in columns.items()}} for i, row in enumerate(TEXTS)]


def assert_batch(batch, expected):
    assert {name: table.tolist() for name, table in batch.items()} == expected


@on_each_side
def test_classes_by_hand(side, texts):
    batch = SequenceClassificationCollator(make_tokenizer(side))(with_columns(labels=[2, 0]))
    assert_batch(batch, texts | {"labels": [2, 0]})
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("labels", [[0.5, 2.0], [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]]])
def test_numbers_stay_numbers(labels):
    batch = SequenceClassificationCollator(make_tokenizer())(with_columns(labels=labels))
    assert_batch(batch, RIGHT | {"labels": labels})
    assert batch["labels"].dtype == torch.float32


@on_each_side
def test_types_are_passed_on(side, texts):
    types = [[0, 0, 1, 1], [1, 1]]
    batch = SequenceClassificationCollator(make_tokenizer(side))(with_columns(labels=[1, 1], token_type_ids=types))
    padded = [[0, 0, 1, 1], [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]]
    assert_batch(batch, texts | {"token_type_ids": padded, "labels": [1, 1]})


@on_each_side
def test_tags_by_hand(side, texts):
    batch = TokenClassificationCollator(make_tokenizer(side))(with_columns(labels=[[NO, 3, NO, NO], [NO, 4]]))
    padded = [[NO, 3, NO, NO], [NO, NO, NO, 4] if side == "left" else [NO, 4, NO, NO]]
    assert_batch(batch, texts | {"labels": padded})


@on_each_side
def test_spans_by_hand(side, texts):
    """Left padding shifts positions."""
    rows = with_columns(start_positions=[1, 0], end_positions=[2, 1])
    shift = 2 if side == "left" else 0
    expected = {"start_positions": [1, shift], "end_positions": [2, 1 + shift]}
    assert_batch(SpanExtractionCollator(make_tokenizer(side))(rows), texts | expected)


@on_each_side
@pytest.mark.parametrize("outside", [-100, -1, 2, 3, 99])
def test_answers_outside_the_text_stay_outside(side, texts, outside):
    rows = with_columns(start_positions=[1, outside], end_positions=[2, outside])
    expected = {"start_positions": [1, NO], "end_positions": [2, NO]}
    assert_batch(SpanExtractionCollator(make_tokenizer(side))(rows), texts | expected)


def test_span_loss_is_that_of_each_text_alone():
    case = CASES["span extraction"]
    model = case.model().eval()
    rows = [case.example(length) for length in (9, 4, 12)]
    alone = torch.stack([model(**case.make()([row])).loss for row in rows]).mean()
    for side in ("left", "right"):
        assert torch.allclose(model(**case.make(side)(rows)).loss, alone, atol=1e-5)


def test_choices_by_hand():
    rows = [
        {"input_ids": [[A, EOS], [B, C, EOS]], "token_type_ids": [[0, 1], [0, 0, 1]], "labels": 1},
        {"input_ids": [[D, EOS], [E, EOS]], "token_type_ids": [[0, 1], [1, 1]], "labels": 0},
    ]
    expected = {
        "input_ids": [[[A, EOS, PAD], [B, C, EOS]], [[D, EOS, PAD], [E, EOS, PAD]]],
        "attention_mask": [[[1, 1, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0]]],
        "token_type_ids": [[[0, 1, 0], [0, 0, 1]], [[0, 1, 0], [1, 1, 0]]],
        "labels": [1, 0],
    }
    assert_batch(MultipleChoiceCollator(make_tokenizer())(rows), expected)
    for row in rows:
        del row["token_type_ids"]
    del expected["token_type_ids"]
    assert_batch(MultipleChoiceCollator(make_tokenizer())(rows), expected)


def test_unequal_numbers_of_choices_are_refused():
    rows = [{"input_ids": [[A], [B]], "labels": 0}, {"input_ids": [[A]], "labels": 0}]
    with pytest.raises(UserError, match=r"examples of one batch have \[1, 2\] choices, but must all have equally many"):
        MultipleChoiceCollator(make_tokenizer())(rows)
