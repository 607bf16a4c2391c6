import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_collators import BOS, CASES, EOS, FIRST_WORD, SEP, UNK, VOCAB, make_tokenizer, text, words
from transformers import DataCollatorForPermutationLanguageModeling

from triptych.training.draws import uniforms
from triptych.training.errors import UserError
from triptych.training.permutation import PermutationLMCollator, hidden_pairs

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


def draws_of(seed, width, stream):
    return uniforms(np.array([seed], np.uint64), width, stream)[0].tolist()


def permuted_slowly(ids, seed, longest=5, share=1 / 6):
    """transformers' walk over the text and the paper's rule of visibility, token by token."""
    count = len(ids)
    span_draws, start_draws, order = (draws_of(seed, count, stream) for stream in range(3))
    predicted, place = set(), 0
    for span_draw, start_draw in zip(span_draws, start_draws, strict=True):
        span = 1 + int(span_draw * longest)
        stretch = int(span / share)
        start = place + int(start_draw * (stretch - span + 1))
        predicted |= {token for token in range(start, start + span) if token < count and ids[token] >= FIRST_WORD}
        place += stretch
    hidden = [
        [float(j in predicted and (i not in predicted or order[j] >= order[i])) for j in range(count)]
        for i in range(count)
    ]
    return sorted(predicted), hidden


@pytest.mark.parametrize("options", [{}, {"longest": 2, "share": 0.4}, {"longest": 1, "share": 1}])
def test_by_hand_token_by_token(options):
    features = [text(length) for length in (1, 2, 11, 24, 50)]
    names = {"longest": "max_span_length", "share": "plm_probability"}
    collator = PermutationLMCollator(make_tokenizer(), **{names[name]: value for name, value in options.items()})
    batch = collator(features)
    for row, feature in enumerate(features):
        ids = feature["input_ids"]
        predicted, hidden = permuted_slowly(ids, feature["seed"], **options)
        assert batch["input_ids"][row, : len(ids)].tolist() == ids  # the content stream reads what it may see
        assert batch["perm_mask"][row, : len(ids), : len(ids)].tolist() == hidden
        assert (batch["perm_mask"][row, :, len(ids) :] == 1).all()
        assert batch["target_mapping"][row].nonzero().tolist() == [list(pair) for pair in enumerate(predicted)]
        assert (batch["target_mapping"][row].sum(1) <= 1).all()
        assert [label for label in batch["labels"][row].tolist() if label != -100] == [ids[t] for t in predicted]


@given(lengths, seeds, st.sampled_from(["left", "right"]))
def test_visibility_among_predicted_tokens_is_a_permuted_causal_mask(lengths, seed, side):
    """P M P^-1, with P the factorisation order and M the strictly lower triangular matrix."""
    np.random.seed(seed)
    batch = PermutationLMCollator(make_tokenizer(side), plm_probability=0.5)([text(length) for length in lengths])
    for row in range(len(lengths)):
        visible = 1 - batch["perm_mask"][row]
        real = batch["attention_mask"][row].bool()
        predicted = batch["target_mapping"][row].sum(0).bool()
        others = real & ~predicted
        assert (visible[:, ~real] == 0).all()
        assert (visible[:, others] == 1).all()
        assert (visible[others][:, predicted] == 0).all()
        among = visible[predicted][:, predicted]
        causal = torch.ones_like(among).tril(-1)
        permutation = torch.eye(len(among))[among.sum(1).long()]  # row i is one-hot at i's place in the order
        assert torch.equal(permutation @ causal @ permutation.T, among)


def test_equals_transformers_for_the_same_order():
    """On ordinary tokens; special ones see predicted tokens there, and so tell what they should not."""
    torch.manual_seed(0)
    examples = [{"input_ids": words(40)} for _ in range(50)]
    reference = DataCollatorForPermutationLanguageModeling(make_tokenizer())(examples)
    predicted = reference["labels"] != -100
    order = ((1 - reference["perm_mask"]) * predicted[:, None]).sum(2).masked_fill(~predicted, -1).double()
    real = np.ones(order.shape, bool)
    assert predicted.sum() > 100
    assert torch.equal(torch.from_numpy(hidden_pairs(order.numpy(), real)), reference["perm_mask"])


def test_spans_are_as_many_and_as_long_as_in_transformers():
    torch.manual_seed(0)
    examples = [{"input_ids": words(60), "seed": seed} for seed in range(3000)]
    reference = DataCollatorForPermutationLanguageModeling(make_tokenizer())(examples[:1000])["labels"] != -100
    ours = PermutationLMCollator(make_tokenizer())(examples)["target_mapping"].sum(1) > 0
    for columns in (slice(0, 60), slice(0, 20), slice(40, 60)):
        assert abs(reference[:, columns].float().mean() - ours[:, columns].float().mean()) < 0.01

    def spans(predicted):
        return (predicted[:, 1:] & ~predicted[:, :-1]).sum(1).float().mean()

    assert abs(spans(reference) - spans(ours)) < 0.1


def test_specials_and_pads_are_never_predicted():
    row = [BOS, *words(5), SEP, *words(5), UNK, *words(3), EOS]
    features = [{"input_ids": row[: 8 + seed % 10], "seed": seed} for seed in range(10_000)]
    batch = PermutationLMCollator(make_tokenizer("left", pad="</s>"), plm_probability=0.5)(features)
    labels = batch["labels"]
    assert (labels[labels != -100] >= FIRST_WORD).all()
    assert (labels != -100).sum() > 10_000
    assert (batch["target_mapping"].sum(1)[batch["attention_mask"] == 0] == 0).all()


def test_a_batch_without_predictions_still_has_a_row_for_them():
    batch = PermutationLMCollator(make_tokenizer())([{"input_ids": [BOS, EOS], "seed": 0}])
    assert batch["labels"].tolist() == [[-100]]
    assert batch["target_mapping"].tolist() == [[[0, 0]]]


def test_a_prediction_depends_on_what_comes_before_it_in_the_order_alone():
    case = CASES["permutation"]
    model = case.model().eval()
    batch = case.make()([text(30) | {"seed": 4}])
    labels = batch.pop("labels")[0]
    places = batch["target_mapping"][0].argmax(1)
    visible = 1 - batch["perm_mask"][0][places][:, places]  # [P, P]
    assert len(labels) > 3
    with torch.no_grad():
        before = model(**batch).logits[0]
        for number, place in enumerate(places):
            changed = batch["input_ids"].clone()
            changed[0, place] = FIRST_WORD + (changed[0, place] - FIRST_WORD + 1) % (VOCAB - FIRST_WORD)
            after = model(**{**batch, "input_ids": changed}).logits[0]
            is_moved = (after - before).abs().amax(1) > 1e-6
            assert is_moved.tolist() == visible[:, number].bool().tolist()


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="plm_probability is 0, but must be above 0 and at most 1"):
        PermutationLMCollator(make_tokenizer(), plm_probability=0)
    with pytest.raises(UserError, match="max_span_length is 0, but must be at least 1"):
        PermutationLMCollator(make_tokenizer(), max_span_length=0)
