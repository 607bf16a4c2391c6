import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collators import (
    BOS,
    CASES,
    EOS,
    LENGTHS,
    PAD,
    SEP,
    make_tokenizer,
    source_and_target,
    text,
    words,
)
from transformers import DataCollatorForSeq2Seq

from triptych.losses import next_token_labels
from triptych.training.errors import UserError
from triptych.training.language_modeling import (
    CausalLMCollator,
    CausalSeq2SeqCollator,
    PrefixLMCollator,
    Seq2SeqCollator,
)

NO = -100  # what the loss ignores
A, B, C, D, E = range(20, 25)  # tokens
sides = st.sampled_from(["left", "right"])


def assert_batch(batch, **expected):
    assert {name: table.tolist() for name, table in batch.items()} == expected


def test_causal_by_hand():
    rows = [{"input_ids": [BOS, A, B, EOS]}, {"input_ids": [C, EOS]}]
    assert_batch(
        CausalLMCollator(make_tokenizer())(rows),
        input_ids=[[BOS, A, B, EOS], [C, EOS, PAD, PAD]],
        attention_mask=[[1, 1, 1, 1], [1, 1, 0, 0]],
        labels=[[NO, A, B, EOS], [NO, EOS, NO, NO]],
    )
    assert_batch(
        CausalLMCollator(make_tokenizer("left"))(rows),
        input_ids=[[BOS, A, B, EOS], [PAD, PAD, C, EOS]],
        attention_mask=[[1, 1, 1, 1], [0, 0, 1, 1]],
        labels=[[NO, A, B, EOS], [NO, NO, NO, EOS]],
    )


def test_packed_documents_by_hand():
    """Resetting positions alone does not isolate packed documents: A's last token does not score B's first."""
    rows = [
        {"input_ids": [A, B, EOS, C, EOS, D, EOS], "seq_idx": [0, 0, 0, 1, 1, 2, 2]},
        {"input_ids": [A, EOS, B, C, EOS], "seq_idx": [5, 5, 6, 6, 6]},
    ]
    assert_batch(
        CausalLMCollator(make_tokenizer("left"))(rows),
        input_ids=[[A, B, EOS, C, EOS, D, EOS], [PAD, PAD, A, EOS, B, C, EOS]],
        attention_mask=[[1] * 7, [0, 0, 1, 1, 1, 1, 1]],
        position_ids=[[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 0, 1, 2]],
        seq_idx=[[0, 0, 0, 1, 1, 2, 2], [-1, -1, 5, 5, 6, 6, 6]],
        labels=[[NO, B, EOS, NO, EOS, NO, EOS], [NO, NO, NO, EOS, NO, C, EOS]],
    )


def test_packed_documents_cost_what_they_cost_alone():
    case = CASES["packed"]
    model = case.model().eval()
    documents = [words(length) for length in (4, 7, 2)]
    row = {
        "input_ids": [token for ids in documents for token in ids],
        "seq_idx": [number for number, ids in enumerate(documents) for _ in ids],
    }
    together = model(**CausalLMCollator(make_tokenizer())([row])).loss
    alone = model(**CausalLMCollator(make_tokenizer("left"))([{"input_ids": ids} for ids in documents])).loss
    assert torch.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("name", ["causal", "packed", "prefix", "causal seq2seq", "prefix seq2seq"])
@settings(max_examples=20)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), sides)
def test_labels_are_exactly_those_that_the_head_scores(name, lengths, side):
    batch = CASES[name].make(side)([CASES[name].example(length) for length in lengths])
    scored = next_token_labels(batch["labels"], batch["attention_mask"], batch.get("seq_idx"))
    assert (scored != NO).sum() == (batch["labels"] != NO).sum()
    assert sorted(scored[scored != NO].tolist()) == sorted(batch["labels"][batch["labels"] != NO].tolist())


def test_prefix_by_hand():
    rows = [{"input_ids": [A, B, C, D, EOS], "prefix_length": 2}, {"input_ids": [E, D, EOS], "prefix_length": 1}]
    assert_batch(
        PrefixLMCollator(make_tokenizer("left"))(rows),
        input_ids=[[A, B, C, D, EOS], [PAD, PAD, E, D, EOS]],
        attention_mask=[[1] * 5, [0, 0, 1, 1, 1]],
        prefix_length=[2, 1],
        labels=[[NO, NO, C, D, EOS], [NO, NO, NO, D, EOS]],
    )
    assert_batch(
        PrefixLMCollator(make_tokenizer("left"), encoder_decoder=True)(rows),
        input_ids=[[A, B], [PAD, E]],
        attention_mask=[[1, 1], [0, 1]],
        labels=[[C, D, EOS], [D, EOS, NO]],
    )


def test_an_empty_prefix_predicts_all_but_the_first_token():
    rows = [{"input_ids": [A, B, EOS], "prefix_length": 0}]
    assert_batch(
        PrefixLMCollator(make_tokenizer())(rows),
        input_ids=[[A, B, EOS]],
        attention_mask=[[1, 1, 1]],
        prefix_length=[0],
        labels=[[NO, B, EOS]],
    )


@given(st.integers(2, 50), st.floats(0, 1), st.floats(0, 1))
def test_prefixes_stay_within_their_bounds(length, first, second):
    least, most = sorted((first, second))
    collator = PrefixLMCollator(make_tokenizer(), min_prefix_share=least, max_prefix_share=most)
    rows = [{"input_ids": words(length), "seed": seed} for seed in range(50)]
    found = collator(rows)["prefix_length"]
    assert (found >= 1).all() and (found <= length - 1).all()
    # Where no whole number lies between the bounds, the one below them is taken.
    assert (found <= max(1, int(most * length))).all()
    assert (found >= min(int(least * length), length - 1)).all()


def test_all_prefix_lengths_are_equally_likely():
    rows = [{"input_ids": [A, B, C, D, E, EOS], "seed": seed} for seed in range(5000)]
    counts = PrefixLMCollator(make_tokenizer())(rows)["prefix_length"].bincount(minlength=7).tolist()
    assert counts[0] == counts[6] == 0
    assert all(abs(count - 1000) < 4 * (5000 * 0.2 * 0.8) ** 0.5 for count in counts[1:6])
    # The same draw decides for both kinds of model.
    pair = PrefixLMCollator(make_tokenizer(), encoder_decoder=True)(rows)
    assert torch.equal(pair["attention_mask"].sum(1), PrefixLMCollator(make_tokenizer())(rows)["prefix_length"])


def test_prefixes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="'prefix_length' of example 2 of the batch is 9, but must be from 0 to its 5"):
        PrefixLMCollator(make_tokenizer())([text(3), text(3) | {"prefix_length": 9}])
    with pytest.raises(UserError, match=r"min_prefix_share is 0\.5, but must be at most max_prefix_share, 0\.2"):
        PrefixLMCollator(make_tokenizer(), min_prefix_share=0.5, max_prefix_share=0.2)
    with pytest.raises(UserError, match="max_prefix_share is 2"):
        PrefixLMCollator(make_tokenizer(), max_prefix_share=2)


def test_seq2seq_by_hand():
    rows = [{"input_ids": [A, EOS], "labels": [B, C, EOS]}, {"input_ids": [C, D, EOS], "labels": [E, EOS]}]
    assert_batch(
        Seq2SeqCollator(make_tokenizer("left"))(rows),
        input_ids=[[PAD, A, EOS], [C, D, EOS]],
        attention_mask=[[0, 1, 1], [1, 1, 1]],
        labels=[[B, C, EOS], [E, EOS, NO]],
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("has_types", [True, False])
def test_seq2seq_equals_transformers(side, has_types):
    """Except that labels are padded on the right: decoder inputs made of others would begin with pads."""
    rows = [source_and_target(length) for length in LENGTHS]
    for row in rows:
        del row["seed"]
        row |= {"token_type_ids": [0, *[1] * (len(row["input_ids"]) - 1)]} if has_types else {}
    tokenizer = make_tokenizer(side)
    ours = Seq2SeqCollator(tokenizer)(rows)
    theirs = DataCollatorForSeq2Seq(tokenizer)(rows)
    tokenizer.padding_side = "right"
    theirs["labels"] = DataCollatorForSeq2Seq(tokenizer)(rows)["labels"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_pair_costs_what_it_costs_alone(side):
    """Padding is inert: with labels padded on the left, decoder inputs would hold pads before tokens."""
    case = CASES["seq2seq"]
    model = case.model().eval()
    rows = [source_and_target(length) for length in LENGTHS]
    collator = case.make(side)
    total = sum(model(**collator([row]), num_items_in_batch=1).loss for row in rows)
    together = model(**collator(rows), num_items_in_batch=1).loss
    assert torch.allclose(total, together, rtol=1e-5)


def test_sources_without_targets_are_a_batch_too():
    batch = Seq2SeqCollator(make_tokenizer())([{"input_ids": [A, EOS]}])
    assert_batch(batch, input_ids=[[A, EOS]], attention_mask=[[1, 1]])


@pytest.mark.parametrize("prefix_attention", [False, True])
def test_source_separator_target_by_hand(prefix_attention):
    rows = [
        {"input_ids": [BOS, A, B, EOS], "labels": [C, EOS]},
        {"input_ids": [D], "labels": [E, EOS]},  # a source without an end
    ]
    expected = dict(
        input_ids=[[BOS, A, B, SEP, C, EOS], [PAD, PAD, D, SEP, E, EOS]],
        attention_mask=[[1] * 6, [0, 0, 1, 1, 1, 1]],
        labels=[[NO, NO, NO, NO, C, EOS], [NO, NO, NO, NO, E, EOS]],
    )
    if prefix_attention:
        expected["prefix_length"] = [4, 2]
    assert_batch(CausalSeq2SeqCollator(make_tokenizer("left"), prefix_attention)(rows), **expected)


def test_a_separator_is_needed():
    with pytest.raises(UserError, match="the tokenizer has no sep_token"):
        CausalSeq2SeqCollator(make_tokenizer(sep_token=None))
