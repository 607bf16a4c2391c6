"""What holds for all collators, and the texts and the tokenizer that the tests of single ones share.

Shapes: B batch, C choices, T tokens, P predicted tokens.
"""

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import triptych
from triptych.training.corruption import DenoisingCollator, SpanCorruptionCollator
from triptych.training.errors import UserError
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
from triptych.training.masking import MaskedLMCollator
from triptych.training.permutation import PermutationLMCollator

SENTINELS = [f"<extra_id_{number}>" for number in range(12)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", *SENTINELS]
PAD, BOS, EOS, UNK, MASK, SEP = range(6)
VOCAB = 97
FIRST_WORD = len(SPECIAL)


def make_tokenizer(side: str = "right", pad: str = "<pad>", **special) -> PreTrainedTokenizerFast:
    """A tokenizer of 97 tokens, the first 18 of them special."""
    names = SPECIAL + [f"w{number}" for number in range(FIRST_WORD, VOCAB)]
    tokens = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>", sep_token="<sep>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")),
        pad_token=pad,
        padding_side=side,
        **{"extra_special_tokens": ["<pad>", *SENTINELS], **tokens, **special},
    )


def words(count: int) -> list[int]:
    """Random ids of ordinary tokens."""
    return np.random.randint(FIRST_WORD, VOCAB, count).tolist()


def text(length: int) -> dict:
    """`<s> ... </s>` with so many ordinary tokens."""
    return {"input_ids": [BOS, *words(length), EOS], "seed": int(np.random.randint(2**62))}


def text_in_words(length: int) -> dict:
    return text(length) | {"word_ids": [None, *sorted(np.random.randint(0, length, length).tolist()), None]}


def text_in_sentences(length: int) -> dict:
    return text(length) | {"sentence_ids": [-1, *sorted(np.random.randint(0, 4, length).tolist()), -1]}


def pair(length: int) -> dict:
    first = np.random.randint(length + 1)
    types = [0] * (first + 2) + [1] * (length - first + 1)
    ids = [BOS, *words(first), EOS, *words(length - first), EOS]
    return text(0) | {"input_ids": ids, "token_type_ids": types, "next_sentence_label": int(np.random.randint(2))}


def packed(length: int) -> dict:
    row = text(length)
    return row | {"seq_idx": sorted(np.random.randint(0, 4, len(row["input_ids"])).tolist())}


def source_and_target(length: int) -> dict:
    return text(length) | {"labels": [*words(np.random.randint(0, 12)), EOS]}


def labelled(length: int) -> dict:
    return text(length) | {"labels": int(np.random.randint(3))}


def valued(length: int) -> dict:
    return text(length) | {"labels": float(np.random.rand())}


def tagged(length: int) -> dict:
    return text(length) | {"labels": [-100, *np.random.randint(0, 3, length).tolist(), -100]}


def with_answer(length: int) -> dict:
    start, end = sorted(np.random.randint(0, length + 2, 2).tolist())
    return text(length) | {"start_positions": start, "end_positions": end}


def choices(length: int) -> dict:
    rows = [pair(length), pair(2), pair(7)]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "token_type_ids")}
    return text(0) | columns | {"labels": int(np.random.randint(3))}


@dataclass
class Case:
    """A collator with options, examples for it by their length, and the head that learns from them."""

    collator: type
    example: Callable[[int], dict]
    head: type
    options: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    labels_at_tokens: bool = False

    def make(self, side: str = "right", **tokenizer):
        return self.collator(make_tokenizer(side, **tokenizer), **self.options)

    def model(self):
        torch.manual_seed(0)
        config = self.head.config_class(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.2,
            hidden_dropout=0.0,
            classifier_dropout=0.0,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            mask_token_id=MASK,
            decoder_start_token_id=BOS,
            **self.config,
        )
        return self.head(config)


masked_lm, pre_training = triptych.TriptychForMaskedLM, triptych.TriptychEncoderForPreTraining
causal_lm, seq2seq_lm = triptych.TriptychForCausalLM, triptych.TriptychForConditionalGeneration
classifier = triptych.TriptychEncoderForSequenceClassification
PAIRS = {"type_vocab_size": 2}
CASES = {
    "masked": Case(MaskedLMCollator, text, masked_lm, labels_at_tokens=True),
    "whole words": Case(MaskedLMCollator, text_in_words, masked_lm, {"whole_word": True}, labels_at_tokens=True),
    "next sentence": Case(MaskedLMCollator, pair, pre_training, config=PAIRS, labels_at_tokens=True),
    "permutation": Case(PermutationLMCollator, text, masked_lm),
    "causal": Case(CausalLMCollator, text, causal_lm, labels_at_tokens=True),
    "packed": Case(CausalLMCollator, packed, causal_lm, labels_at_tokens=True),
    "prefix": Case(PrefixLMCollator, text, causal_lm, labels_at_tokens=True),
    "prefix encoder-decoder": Case(PrefixLMCollator, text, seq2seq_lm, {"encoder_decoder": True}),
    "span corruption": Case(SpanCorruptionCollator, text, seq2seq_lm),
    "denoising": Case(
        DenoisingCollator, text_in_sentences, seq2seq_lm, {"deletion_probability": 0.1, "permute_sentences": True}
    ),
    "seq2seq": Case(Seq2SeqCollator, source_and_target, seq2seq_lm),
    "causal seq2seq": Case(CausalSeq2SeqCollator, source_and_target, causal_lm, labels_at_tokens=True),
    "prefix seq2seq": Case(
        CausalSeq2SeqCollator, source_and_target, causal_lm, {"prefix_attention": True}, labels_at_tokens=True
    ),
    "classification": Case(SequenceClassificationCollator, labelled, classifier, config={"num_labels": 3}),
    "regression": Case(SequenceClassificationCollator, valued, classifier, config={"num_labels": 1}),
    "tagging": Case(
        TokenClassificationCollator,
        tagged,
        triptych.TriptychEncoderForTokenClassification,
        config={"num_labels": 3},
        labels_at_tokens=True,
    ),
    "span extraction": Case(SpanExtractionCollator, with_answer, triptych.TriptychEncoderForQuestionAnswering),
    "multiple choice": Case(MultipleChoiceCollator, choices, triptych.TriptychEncoderForMultipleChoice, config=PAIRS),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
LENGTHS = (9, 5, 30, 1, 17, 12, 3, 21)


@pytest.fixture(scope="module", autouse=True)
def frozen_modules():
    """Trainer collects garbage whenever it starts, most of the time in what the imported libraries hold."""
    gc.freeze()
    yield
    gc.unfreeze()


def contents(case: Case, batch: dict, row: int) -> dict[str, list]:
    """One row of a batch without its pads."""
    real = batch["attention_mask"][row].bool()
    found = {}
    for name, table in batch.items():
        value = table[row]
        if name in ("input_ids", "attention_mask", "token_type_ids", "position_ids", "seq_idx"):
            value = value[real]
        elif name == "perm_mask":
            value = value[real][:, real]
        elif name == "target_mapping":
            value = value[value.any(1)][:, real]
        elif name.endswith("_positions"):
            value = value - real.int().argmax()
        elif name == "labels" and value.ndim:
            value = value[real] if case.labels_at_tokens else value[value != -100]
        found[name] = value.tolist()
    return found


@every_case
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_its_batch(case, lengths, seed):
    np.random.seed(seed)
    features = [case.example(length) for length in lengths]
    longer = case.example(40)
    right, left = case.make("right"), case.make("left")
    expected = [contents(case, right([feature]), 0) for feature in features]
    for batch in (right(features), left(features), right([*features, longer]), left([*features, longer])):
        assert [contents(case, batch, row) for row in range(len(features))] == expected
    backwards = left(features[::-1])
    assert [contents(case, backwards, row) for row in range(len(features))] == expected[::-1]


def padded(case: Case, row: dict, side: str) -> dict:
    """What a tokenizer makes of `row` with `padding="max_length"`: pads in every column that has an entry a token."""
    if isinstance(row["input_ids"][0], list):
        names = ("input_ids", "token_type_ids")
        rows = [padded(case, {name: row[name][number] for name in names}, side) for number in range(3)]
        return row | {name: [choice[name] for choice in rows] for name in rows[0]}
    by_token = {"input_ids", "token_type_ids", "word_ids", "sentence_ids", "seq_idx"} & row.keys()
    if case.collator is TokenClassificationCollator:
        by_token.add("labels")
    length, pads = len(row["input_ids"]), [0] * (50 - len(row["input_ids"]))
    columns = {name: row[name] for name in by_token} | {"attention_mask": [1] * length}
    return row | {name: pads + ids if side == "left" else ids + pads for name, ids in columns.items()}


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_features_may_have_pads_already(case, side):
    """Without their attention mask, pads are tokens to look at, and of causal language models to predict."""
    features = [case.example(length) for length in LENGTHS]
    expected = case.make(side)(features)
    batch = case.make(side)([padded(case, row, side) for row in features])
    assert batch.keys() == expected.keys()
    for name in expected:
        assert torch.equal(batch[name], expected[name]), name


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_lie_on_one_side_and_are_marked(case, side):
    batch = case.make(side)([case.example(length) for length in LENGTHS])
    mask = batch["attention_mask"].flatten(0, -2)
    assert set(mask.unique().tolist()) == {0, 1}
    steps = mask.diff(dim=1)
    assert (steps >= 0).all() if side == "left" else (steps <= 0).all()
    assert (batch["input_ids"].flatten(0, -2)[mask == 0] == PAD).all()
    assert (batch["input_ids"].flatten(0, -2)[mask == 1] != PAD).all()
    if case.labels_at_tokens:
        assert (batch["labels"][mask == 0] == -100).all()


@every_case
def test_batches_are_plain_inputs_of_the_head(case):
    batch = case.make()([case.example(length) for length in LENGTHS])
    assert set(batch) <= set(inspect.signature(case.head.forward).parameters)
    for name, tensor in batch.items():
        is_float = name in ("perm_mask", "target_mapping") or (case.example is valued and name == "labels")
        assert tensor.dtype == (torch.float32 if is_float else torch.int64), name
        assert len(tensor) == len(LENGTHS)


@every_case
def test_pickled_collators_give_the_same_batch_and_leave_examples_alone(case):
    features = [case.example(length) for length in LENGTHS]
    before = copy.deepcopy(features)
    collator = case.make("left")
    batch = collator(features)
    again = pickle.loads(pickle.dumps(collator))(features)
    assert features == before
    assert batch.keys() == again.keys() and all(torch.equal(batch[name], again[name]) for name in batch)


@every_case
def test_without_seeds_torch_draws_them(case):
    """Resuming changes masks: Trainer keeps torch's random state, so that is what unseeded examples draw from."""
    features = [case.example(length) for length in LENGTHS]
    for feature in features:
        del feature["seed"]
    collator = case.make()
    batches = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        np.random.seed(len(batches))
        batches.append(collator(features))
    first, second = batches
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_case
def test_nothing_to_learn_is_a_finite_loss_without_gradient(case):
    """Nothing masked gives NaN."""
    batch = case.make()([case.example(length) for length in LENGTHS])
    for name in {"labels", "next_sentence_label", "start_positions", "end_positions"} & batch.keys():
        batch[name].fill_(-100)
    model = case.model()
    loss = model(**batch).loss
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@every_case
def test_the_real_end_keeps_its_label_when_it_is_also_the_pad(case):
    """End-of-sequence labels vanish when pad = eos; and pads are still masked by their place."""
    features = [case.example(length) for length in LENGTHS]
    usual = case.make()(features)
    shared = case.make(pad="</s>", extra_special_tokens=SENTINELS)(features)  # where id 0 is an ordinary token
    assert usual.keys() == shared.keys()
    for name in usual.keys() - {"input_ids"}:
        assert torch.equal(usual[name], shared[name]), name
    if case.collator in (CausalLMCollator, PrefixLMCollator, Seq2SeqCollator, CausalSeq2SeqCollator, DenoisingCollator):
        ends = [row[row != -100][-1].item() for row in shared["labels"] if (row != -100).any()]
        assert ends and set(ends) == {EOS}


def test_a_tokenizer_without_a_pad_token_is_refused():
    collator = CausalLMCollator(make_tokenizer(pad=None))
    with pytest.raises(UserError, match="the tokenizer has no pad_token"):
        collator([text(3)])


def test_a_column_of_the_wrong_length_is_named():
    rows = [tagged(3), tagged(3) | {"labels": [1, 2]}]
    with pytest.raises(UserError, match="'labels' of example 2 of the batch has 2 entries, but must have one for each"):
        TokenClassificationCollator(make_tokenizer())(rows)
    with pytest.raises(UserError, match="example 2 of the batch has no 'labels'"):
        TokenClassificationCollator(make_tokenizer())([tagged(3), text(3)])


def train(case: Case, features: list[dict], folder, **arguments) -> list[dict]:
    """What Trainer logs of each step."""
    # Trainer drops what forward does not name: seeds are then drawn anew, but words and sentences are needed.
    is_complete = not {"word_ids", "sentence_ids"} & features[0].keys()
    settings = dict(remove_unused_columns=is_complete, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True)
    settings |= dict(disable_tqdm=True, max_grad_norm=1e9) | arguments
    trainer = Trainer(
        case.model(), TrainingArguments(folder, **settings), train_dataset=features, data_collator=case.make("left")
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


@every_case
def test_three_steps_in_plain_trainer(case, tmp_path):
    features = [case.example(length) for length in LENGTHS]
    steps = train(case, features, tmp_path, max_steps=3, per_device_train_batch_size=8)
    assert len(steps) == 3
    assert all(np.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)


@every_case
def test_accumulated_batches_have_the_gradient_of_one(case, tmp_path):
    """Gradients grow with gradient accumulation because the item count is dropped."""
    features = [case.example(length) for length in LENGTHS]
    norms = [
        train(
            case,
            features,
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            remove_unused_columns=False,
        )[0]["grad_norm"]
        for size in (8, 1)
    ]
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
