import math
import re
from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collators import (
    BOS,
    EOS,
    FIRST_WORD,
    MASK,
    SENTINELS,
    SEP,
    SPECIAL,
    UNK,
    make_tokenizer,
    text,
    text_in_sentences,
    words,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from triptych.training.corruption import DenoisingCollator, SpanCorruptionCollator, random_segments
from triptych.training.draws import mix, uniforms
from triptych.training.errors import UserError

FIRST_SENTINEL = SPECIAL.index(SENTINELS[0])
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


def draws_of(seed, width, stream):
    return uniforms(np.array([seed], np.uint64), width, stream)[0].tolist()


def is_sentinel(token):
    return FIRST_SENTINEL <= token < FIRST_SENTINEL + len(SENTINELS)


def tokens_of(row, pad=0):
    return [token for token in row.tolist() if token not in (pad, -100)]


def segments_slowly(items, count, draws):
    """Cut after the items with the lowest draws: the lengths of the pieces."""
    cuts = sorted(sorted(range(items - 1), key=draws.__getitem__)[: count - 1])
    ends = [cut + 1 for cut in cuts] + [items]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def corrupted_slowly(ids, seed, density=0.15, mean=3.0):
    """T5's random_spans_noise_mask and its two replacements by sentinels, span by span; `ids` begin and end special."""
    inner = ids[1:-1]
    length = max(len(inner), 2)
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / mean), 1)
    noise_lengths = segments_slowly(noise, spans, draws_of(seed, length, 0))
    kept_lengths = segments_slowly(length - noise, spans, draws_of(seed, length, 1))
    inputs, target, place = [ids[0]], [], 0
    for number, (kept, hidden) in enumerate(zip(kept_lengths, noise_lengths, strict=True)):
        inputs += inner[place : place + kept]
        place += kept
        if place < len(inner):
            inputs.append(FIRST_SENTINEL + number)
            target += [FIRST_SENTINEL + number, *inner[place : place + hidden]]
            place += hidden
    found = sum(map(is_sentinel, target))
    return [*inputs, ids[-1]], [*target, FIRST_SENTINEL + found, EOS]


@pytest.mark.parametrize("options", [{}, {"density": 0.5}, {"density": 0.4, "mean": 1.5}])
def test_span_corruption_by_hand(options):
    features = [text(length) for length in (1, 2, 3, 7, 12, 20, 33)]
    names = {"density": "noise_density", "mean": "mean_span_length"}
    collator = SpanCorruptionCollator(make_tokenizer(), **{names[name]: value for name, value in options.items()})
    batch = collator(features)
    for row, feature in enumerate(features):
        inputs, target = corrupted_slowly(feature["input_ids"], feature["seed"], **options)
        assert tokens_of(batch["input_ids"][row]) == inputs
        assert tokens_of(batch["labels"][row]) == target


def spelled_out(inputs, target):
    """The text, with each sentinel of `inputs` replaced by what `target` says of it."""
    spans, current = {}, None
    for token in target:
        if is_sentinel(token):
            assert token not in spans
            current = spans[token] = []
        else:
            current.append(token)
    used = [token for token in inputs if is_sentinel(token)]
    *named, final = spans
    assert used == named == list(range(FIRST_SENTINEL, FIRST_SENTINEL + len(used)))
    assert final == FIRST_SENTINEL + len(used) and spans[final] == [EOS]
    assert all(spans[token] for token in used)
    return [piece for token in inputs for piece in (spans[token] if is_sentinel(token) else [token])]


@settings(max_examples=60)
@given(lengths, seeds, st.sampled_from(["left", "right"]), st.floats(0, 0.3), st.booleans())
def test_inputs_and_targets_together_are_the_text(lengths, seed, side, density, is_special):
    np.random.seed(seed)
    features = [text(length) for length in lengths]
    if is_special:  # in the midst of a text
        for feature in features:
            feature["input_ids"][len(feature["input_ids"]) // 2] = SEP
    batch = SpanCorruptionCollator(make_tokenizer(side), density, 3.0)(features)
    for row, feature in enumerate(features):
        inputs, target = tokens_of(batch["input_ids"][row]), tokens_of(batch["labels"][row])
        assert spelled_out(inputs, target) == feature["input_ids"]


@settings(max_examples=60)
@given(st.integers(2, 200), st.floats(0.01, 0.9), st.floats(1, 6), seeds)
def test_counts_are_rounded_as_in_t5(length, density, mean, seed):
    collator = SpanCorruptionCollator(make_tokenizer(), density, mean)
    ordinary = np.ones((1, length), bool)
    mask = collator.noise_mask(ordinary, np.array([seed], np.uint64))[0]
    noise = min(max(round(length * density), 1), length - 1)
    assert mask.sum() == noise
    assert not mask[0] and mask[-1]  # kept first, and every span of noise behind one that is kept
    spans = (np.diff(mask.astype(int)) == 1).sum()
    assert spans == min(max(round(noise / mean), 1), length - noise)


def test_all_ways_to_cut_are_equally_likely():
    count = 9000
    draws = uniforms(np.arange(count, dtype=np.uint64), 6)
    found = Counter(map(tuple, random_segments(np.full(count, 6), np.full(count, 3), draws).tolist()))
    ways = [(a, b - a, 6 - b) for a, b in combinations(range(1, 6), 2)]
    assert sorted(found) == sorted(ways)
    assert all(abs(number - count / 10) < 4 * (count * 0.1 * 0.9) ** 0.5 for number in found.values())


def test_noise_that_leaves_few_kept_tokens_is_cut_evenly_too():
    collator = SpanCorruptionCollator(make_tokenizer(), 0.8, 1.0)  # 8 of 10 tokens, but only 2 spans
    masks = collator.noise_mask(np.ones((7000, 10), bool), np.arange(7000, dtype=np.uint64))
    first_lengths = Counter((~masks[:, 1:]).argmax(1).tolist())
    assert sorted(first_lengths) == list(range(1, 8))
    assert all(abs(number - 1000) < 4 * (7000 / 7 * 6 / 7) ** 0.5 for number in first_lengths.values())


def test_spans_never_cover_specials_or_pads():
    """Pads get masked; and so do special tokens, the end of the text among them."""
    row = [BOS, *words(6), SEP, *words(5), UNK, *words(3), EOS]
    features = [{"input_ids": row, "seed": seed} for seed in range(10_000)]
    batch = SpanCorruptionCollator(make_tokenizer(pad="</s>"), 0.4, 2.0)(features)
    target = batch["labels"]
    sentinels = (target >= FIRST_SENTINEL) & (target < FIRST_WORD)
    assert ((target == -100) | sentinels | (target >= FIRST_WORD) | (target == EOS)).all()
    assert (target == EOS).sum() == len(features)
    ids, real = batch["input_ids"], batch["attention_mask"] == 1
    kept = torch.where(real & (ids < FIRST_SENTINEL), ids, -1)
    assert all([token for token in line if token >= 0] == [BOS, SEP, UNK, EOS] for line in kept.tolist())


def test_a_span_around_a_special_token_becomes_two():
    ids = [BOS, FIRST_WORD, FIRST_WORD + 1, SEP, FIRST_WORD + 2, EOS]
    batch = SpanCorruptionCollator(make_tokenizer(), 0.67, 2.0)([{"input_ids": ids, "seed": 0}])
    first, second, third = range(FIRST_SENTINEL, FIRST_SENTINEL + 3)
    assert batch["input_ids"][0].tolist() == [BOS, FIRST_WORD, first, SEP, second, EOS]
    assert batch["labels"][0].tolist() == [first, FIRST_WORD + 1, second, FIRST_WORD + 2, third, EOS]


def test_span_corruption_refuses_what_cannot_be():
    collator = SpanCorruptionCollator(make_tokenizer(), 0.5, 1.0)
    with pytest.raises(UserError, match="needs 16 sentinels, but the tokenizer has only 12 of them: add <extra_id_0>"):
        collator([text(30)])
    with pytest.raises(UserError, match="only 0 of them"):
        bare = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
        bare = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
        SpanCorruptionCollator(bare)([text(30)])
    with pytest.raises(UserError, match="mean_span_length is 0"):
        SpanCorruptionCollator(make_tokenizer(), mean_span_length=0)
    with pytest.raises(UserError, match="noise_density is -1"):
        SpanCorruptionCollator(make_tokenizer(), noise_density=-1)


def poisson_slowly(mean, draw):
    """The least k up to which the probabilities sum to more than `draw`."""
    k, term = 0, math.exp(-mean)
    total = term
    while total <= draw:
        k += 1
        term *= mean / k
        total += term
    return k


def denoised_slowly(feature, probability, mean, deletion, permute):
    """Lewis et al.'s corruptions, one token after another."""
    ids, seed = feature["input_ids"], feature["seed"]
    slots = [place for place, token in enumerate(ids) if token >= FIRST_WORD]
    tokens = [ids[slot] for slot in slots]
    count = len(tokens)
    if permute:
        sentences = []
        for slot, token in zip(slots, tokens, strict=True):
            name = feature["sentence_ids"][slot]
            if not sentences or sentences[-1][0] != name:
                sentences.append((name, []))
            sentences[-1][1].append(token)
        order = draws_of(seed, count, 3)
        numbers = sorted(range(len(sentences)), key=order.__getitem__)
        tokens = [token for number in numbers for token in sentences[number][1]]
    left, spans = round(count * probability), []
    for draw in draws_of(seed, count, 0):
        if not left:
            break
        spans.append(min(poisson_slowly(mean, draw), left))
        left -= spans[-1]
    items = count - sum(spans) + len(spans)
    places = draws_of(seed, items, 1)
    with_span = sorted(sorted(range(items), key=places.__getitem__)[: len(spans)])
    deletions = draws_of(seed, count, 2)
    before, at = {}, {}  # what stands before, and at, each slot
    start, spans = 0, iter(spans)
    for item in range(items):
        if item in with_span:
            before.setdefault(slots[start] if start < count else slots[-1] + 1, []).append(MASK)
            start += next(spans)
        else:
            if deletions[start] >= deletion:
                at[slots[start]] = tokens[start]
            start += 1
    result = []
    for slot, token in enumerate(ids):
        result += before.get(slot, [])
        if slot in at or token < FIRST_WORD:
            result.append(at.get(slot, token))
    return result


@pytest.mark.parametrize(
    "probability, mean, deletion, permute",
    [(0.3, 3.0, 0.0, False), (0.5, 0.5, 0.0, False), (0.0, 3.0, 0.3, False), (0.3, 2.0, 0.2, True)],
)
def test_denoising_by_hand(probability, mean, deletion, permute):
    features = [text_in_sentences(length) for length in (1, 2, 12, 20, 40, *[5] * 40)]
    features[4]["input_ids"][7] = UNK
    batch = DenoisingCollator(make_tokenizer(), probability, mean, deletion, permute)(features)
    for row, feature in enumerate(features):
        expected = denoised_slowly(feature, probability, mean, deletion, permute)
        assert tokens_of(batch["input_ids"][row]) == expected
        assert tokens_of(batch["labels"][row]) == feature["input_ids"]


@settings(max_examples=60)
@given(lengths, seeds, st.floats(0, 1), st.floats(0.2, 6), st.sampled_from(["left", "right"]))
def test_a_mask_stands_for_any_piece_of_the_text(lengths, seed, probability, mean, side):
    np.random.seed(seed)
    features = [text(length) for length in lengths]
    batch = DenoisingCollator(make_tokenizer(side), probability, mean)(features)
    for row, feature in enumerate(features):
        inputs = tokens_of(batch["input_ids"][row])
        pattern = "".join(".*?" if token == MASK else re.escape(chr(token)) for token in inputs)
        assert re.fullmatch(pattern, "".join(map(chr, feature["input_ids"])), re.DOTALL)
        assert tokens_of(batch["labels"][row]) == feature["input_ids"]
        hidden = len(feature["input_ids"]) - sum(token != MASK for token in inputs)
        assert hidden <= round(lengths[row] * probability)
        if mean >= 2 and lengths[row] > 20:  # where draws cannot run out
            assert hidden == round(lengths[row] * probability)


@settings(max_examples=30)
@given(lengths, seeds)
def test_permuted_sentences_stay_whole(lengths, seed):
    np.random.seed(seed)
    features = [text_in_sentences(length) for length in lengths]
    batch = DenoisingCollator(make_tokenizer(), masking_probability=0, permute_sentences=True)(features)
    for row, feature in enumerate(features):
        names = feature["sentence_ids"]
        sentences = {name: [] for name in names[1:-1]}
        for token, name in zip(feature["input_ids"][1:-1], names[1:-1], strict=True):
            sentences[name].append(token)
        first, *inner, last = tokens_of(batch["input_ids"][row])
        assert [first, last] == [BOS, EOS]
        orders = [[token for name in order for token in sentences[name]] for order in permutations(sentences)]
        assert inner in orders
        assert tokens_of(batch["labels"][row]) == feature["input_ids"]


def test_all_orders_of_sentences_occur():
    ids, names = [*words(6), EOS], [0, 0, 1, 1, 2, 2, None]
    features = [{"input_ids": ids, "sentence_ids": names, "seed": seed} for seed in range(3000)]
    batch = DenoisingCollator(make_tokenizer(), masking_probability=0, permute_sentences=True)(features)
    found = Counter(map(tuple, batch["input_ids"].tolist()))
    assert len(found) == 6
    assert all(abs(number - 500) < 4 * (3000 / 6 * 5 / 6) ** 0.5 for number in found.values())


def test_denoising_never_touches_specials():
    row = [BOS, *words(6), SEP, *words(5), UNK, *words(3), EOS]
    features = [{"input_ids": row, "sentence_ids": [0] * 10 + [1] * 8, "seed": seed} for seed in range(10_000)]
    collator = DenoisingCollator(make_tokenizer("left", pad="</s>"), 0.5, 2.0, 0.2, permute_sentences=True)
    batch = collator(features)
    is_special = (batch["attention_mask"] == 1) & (batch["input_ids"] < FIRST_WORD) & (batch["input_ids"] != MASK)
    assert batch["input_ids"][is_special].tolist() == [BOS, SEP, UNK, EOS] * len(features)
    assert (batch["labels"] == torch.tensor(row)).all()


def test_span_lengths_are_poisson_and_deletions_are_as_many_as_asked():
    collator = DenoisingCollator(make_tokenizer(), masking_probability=1, poisson_lambda=3)
    drawn = collator.span_lengths(np.full(400, 400), uniforms(np.arange(400, dtype=np.uint64), 400))
    lengths = np.concatenate([row[row >= 0][:-1] for row in drawn])  # the last is cut short
    for k in range(9):
        share = math.exp(-3) * 3**k / math.factorial(k)
        assert abs((lengths == k).mean() - share) < 5 * (share / len(lengths)) ** 0.5 + 0.002  # the cut favours short
    assert (np.maximum(drawn, 0).sum(1) == 400).all()
    features = [{"input_ids": words(50), "seed": mix(seed)} for seed in range(400)]
    batch = DenoisingCollator(make_tokenizer(), 0, deletion_probability=0.2)(features)
    kept = batch["attention_mask"].sum().item() / (50 * 400)
    assert abs(kept - 0.8) < 4 * (0.8 * 0.2 / 20_000) ** 0.5


def test_spans_lie_anywhere():
    """No place of the text is spared, or masked more often than others, but for its ends' fewer neighbours."""
    features = [{"input_ids": words(12), "seed": seed} for seed in range(6000)]
    ids = torch.tensor([feature["input_ids"] for feature in features])
    batch = DenoisingCollator(make_tokenizer(), 0.25, 1.5)(features)
    inserted = batch["input_ids"] == MASK
    assert inserted[:, 0].float().mean() > 0.1  # a mask may come first
    last = torch.stack([row[row != 0][-1] for row in batch["input_ids"]])
    assert abs((last == MASK).float().mean() - inserted[:, 0].float().mean()) < 0.03  # and last, as often
    assert (batch["labels"] == ids).all()


def test_denoising_refuses_what_cannot_be():
    with pytest.raises(UserError, match="poisson_lambda is 0, but must be above 0"):
        DenoisingCollator(make_tokenizer(), poisson_lambda=0)
    with pytest.raises(UserError, match="deletion_probability is 2"):
        DenoisingCollator(make_tokenizer(), deletion_probability=2)
    with pytest.raises(UserError, match="the tokenizer has no mask_token"):
        DenoisingCollator(make_tokenizer(mask_token=None))
    with pytest.raises(UserError, match="example 1 of the batch has no 'sentence_ids'"):
        DenoisingCollator(make_tokenizer(), permute_sentences=True)([text(3)])
