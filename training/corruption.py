"""Texts with holes, to be restored by an encoder-decoder: span corruption (T5) and denoising (BART).

Shapes: B batch, T tokens, N ordinary tokens (neither special nor pads), S spans, M items of an infilled text.
"""

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from triptych.losses import IGNORE
from triptych.training.draws import row_seeds, uniforms
from triptych.training.errors import UserError
from triptych.training.padding import (
    Batch,
    check_share,
    compact,
    ordinary_tokens,
    read_groups,
    read_texts,
    run_numbers,
    tensors,
    text_inputs,
    token_id,
)

NOISE, REST = range(2)  # streams of draws for span corruption
LENGTH, PLACE, DELETION, SENTENCE = range(4)  # and for denoising


@dataclass
class SpanCorruptionCollator:
    """Replaces spans by sentinels, each of which the target spells out (Raffel et al. 2020, arXiv 1910.10683, 3.1.4).

    `a b c d e </s>` becomes `a <extra_id_0> d <extra_id_1> </s>` with the target
    `<extra_id_0> b c <extra_id_1> e <extra_id_2> </s>`. Of a text's ordinary tokens, `noise_density` are noise, in
    spans of `mean_span_length` on average, both rounded as in T5's code, and all ways to cut noise and rest into spans
    are equally likely. A text begins with what is kept. Special tokens stay where they are, and part a span that they
    are in.

    Args:
        tokenizer: has the sentinels `<extra_id_0>`, `<extra_id_1>` and so on.
        noise_density: share of tokens that are noise.
        mean_span_length: of the spans of noise.

    Raises:
        UserError: an option is impossible, or a text has more spans than there are sentinels.
    """

    tokenizer: PreTrainedTokenizerBase
    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def __post_init__(self):
        check_share("noise_density", self.noise_density)
        if self.mean_span_length < 1:
            raise UserError(f"mean_span_length is {self.mean_span_length}, but must be at least 1")

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids` and `attention_mask` [B, T], and `labels`, padded on the right."""
        ids, real = read_texts(features)
        is_noise = self.noise_mask(ordinary_tokens(ids, real, self.tokenizer), row_seeds(features))
        starts = is_noise.copy()
        starts[:, 1:] &= ~is_noise[:, :-1]
        span_numbers = starts.cumsum(1)
        sentinels = sentinel_ids(self.tokenizer, span_numbers.max() + 1)
        own_sentinels = sentinels[np.maximum(span_numbers - 1, 0)]
        batch = text_inputs(np.where(starts, own_sentinels, ids), real & (starts | ~is_noise), self.tokenizer)
        # Before each token of noise a place for a sentinel; behind all of them, the final one and the end.
        target = np.stack([own_sentinels, ids], 2).reshape(len(ids), -1)
        keep = np.stack([starts, is_noise], 2).reshape(len(ids), -1)
        last = np.full(len(ids), token_id(self.tokenizer, "eos_token"))
        target = np.column_stack([target, sentinels[span_numbers[:, -1]], last])
        keep = np.pad(keep, ((0, 0), (0, 2)), constant_values=True)
        return tensors(batch | {"labels": compact(target, keep, IGNORE, "right")})

    def noise_mask(self, ordinary: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Return which of the `ordinary` tokens [B, T] are noise."""
        counts = ordinary.sum(1)
        lengths = np.maximum(counts, 2)
        noise = np.clip(np.rint(lengths * self.noise_density), 1, lengths - 1).astype(np.int64)
        spans = np.maximum(np.rint(noise / self.mean_span_length), 1).astype(np.int64)
        spans = np.minimum(spans, lengths - noise)  # as many spans are kept, none of them empty
        width = max(2, ordinary.shape[1])
        noise_lengths = random_segments(noise, spans, uniforms(seeds, width, NOISE))
        kept_lengths = random_segments(lengths - noise, spans, uniforms(seeds, width, REST))
        # Where noise begins and where it ends, counted in ordinary tokens: +1 and -1, whose running sum is the mask.
        ends = (noise_lengths + kept_lengths).cumsum(1)
        steps = np.zeros((len(ordinary), width + 1), np.int64)
        rows = np.arange(len(ordinary))[:, None]
        np.add.at(steps, (rows, ends - noise_lengths), 1)
        np.add.at(steps, (rows, ends), -1)
        mask = steps.cumsum(1) > 0
        return np.take_along_axis(mask, np.maximum(ordinary.cumsum(1) - 1, 0), 1) & ordinary


def random_segments(items: np.ndarray, segments: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Cut each row's `items` [B] into so many `segments` [B], none empty: their lengths [B, S], zero behind the last.

    A cut can follow each item but the last. Those with the lowest `draws` [B, T] are made.
    """
    places = np.arange(draws.shape[1])
    cut = ranks(draws, places < items[:, None] - 1) < segments[:, None] - 1
    numbers = np.pad(cut.cumsum(1)[:, :-1], ((0, 0), (1, 0)))  # of the segment that each item lies in
    rows, columns = (places < items[:, None]).nonzero()
    lengths = np.zeros((len(items), segments.max()), np.int64)
    np.add.at(lengths, (rows, numbers[rows, columns]), 1)
    return lengths


def ranks(draws: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Place of each draw [B, T] in its row's rising order; those that do not count come last."""
    return np.where(among, draws, 2.0).argsort(1).argsort(1)


def sentinel_ids(tokenizer: PreTrainedTokenizerBase, count: int) -> np.ndarray:
    """Return the ids of `<extra_id_0>` and so on, `count` of them.

    Raises:
        UserError: the tokenizer has fewer.
    """
    ids = tokenizer.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(count)])
    known = [number for number, found in enumerate(ids) if found not in (None, tokenizer.unk_token_id)]
    if len(known) < count:
        raise UserError(
            f"span corruption needs {count} sentinels, but the tokenizer has only {len(known)} of them: add "
            f"<extra_id_0> to <extra_id_{count - 1}> as special tokens, or shorten the texts"
        )
    return np.array(ids)


@dataclass
class DenoisingCollator:
    """Corrupts texts in BART's ways, and asks for the originals (Lewis et al. 2020, arXiv 1910.13461, section 2.2).

    Sentences are permuted first. Then spans whose lengths are drawn from a Poisson distribution become one `<mask>`
    each, until `masking_probability` of the ordinary tokens are gone; a span of no length is a `<mask>` more. Spans do
    not overlap, and all ways to place them are equally likely. Last, tokens are deleted without a trace. Special tokens
    are never touched; a span that one of them lies in leaves its `<mask>` before it.

    Args:
        tokenizer: has a mask token.
        masking_probability: share of tokens that lie in spans.
        poisson_lambda: mean length of spans.
        deletion_probability: of a token outside spans.
        permute_sentences: features then name each token's sentence in `sentence_ids`.

    Raises:
        UserError: an option is impossible, the tokenizer lacks `<mask>`, or `sentence_ids` are missing.
    """

    tokenizer: PreTrainedTokenizerBase
    masking_probability: float = 0.3
    poisson_lambda: float = 3.0
    deletion_probability: float = 0.0
    permute_sentences: bool = False

    def __post_init__(self):
        token_id(self.tokenizer, "mask_token")
        check_share("masking_probability", self.masking_probability)
        check_share("deletion_probability", self.deletion_probability)
        if self.poisson_lambda <= 0:
            raise UserError(f"poisson_lambda is {self.poisson_lambda}, but must be above 0")

    def __call__(self, features: list[dict]) -> Batch:
        """Return `input_ids` and `attention_mask` [B, T], and `labels`, padded on the right."""
        ids, real = read_texts(features)
        ordinary = ordinary_tokens(ids, real, self.tokenizer)
        seeds = row_seeds(features)
        counts = ordinary.sum(1)
        text = compact(ids, ordinary, 0, "right")
        if self.permute_sentences:
            text = np.take_along_axis(text, sentence_order(features, ordinary, seeds), 1)
        items, is_item, firsts = self.infill(text, counts, seeds)
        # An item goes where its first token stood, a mask at the end where the last one did; items at one place keep
        # their order.
        columns = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        firsts = np.minimum(firsts, np.maximum(counts - 1, 0)[:, None])
        slots = np.take_along_axis(compact(columns, ordinary, 0, "right"), firsts, 1)
        order = np.concatenate([slots, columns], 1).argsort(1, kind="stable")
        mixed = np.take_along_axis(np.concatenate([items, ids], 1), order, 1)
        keep = np.take_along_axis(np.concatenate([is_item, real & ~ordinary], 1), order, 1)
        batch = text_inputs(mixed, keep, self.tokenizer)
        return tensors(batch | {"labels": compact(ids, real, IGNORE, "right")})

    def infill(self, text: np.ndarray, counts: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Put spans in the place of tokens, and delete others.

        Args:
            text: [B, N] ordinary tokens.
            counts: [B], how many each row has.
            seeds: [B].

        Returns:
            Items [B, M], each a token or the `<mask>` of a span, where they are kept, and which token of the row each
            one begins with.
        """
        lengths = self.span_lengths(counts, uniforms(seeds, text.shape[1], LENGTH))
        spans, noise = (lengths >= 0).sum(1), np.maximum(lengths, 0).sum(1)
        item_counts = (counts - noise + spans)[:, None]
        columns = np.arange(item_counts.max())
        is_item = columns < item_counts
        # All orders of the spans and the other tokens are equally likely.
        is_span = ranks(uniforms(seeds, len(columns), PLACE), is_item) < spans[:, None]
        span_numbers = np.maximum(is_span.cumsum(1) - 1, 0)
        sizes = np.where(is_span, np.take_along_axis(lengths, span_numbers, 1), is_item)
        firsts = sizes.cumsum(1) - sizes
        own = np.minimum(firsts, text.shape[1] - 1)
        items = np.where(is_span, self.tokenizer.mask_token_id, np.take_along_axis(text, own, 1))
        draws = np.take_along_axis(uniforms(seeds, text.shape[1], DELETION), own, 1)
        return items, is_item & (is_span | (draws >= self.deletion_probability)), firsts

    def span_lengths(self, counts: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Lengths [B, N] of spans that together make up the share to be masked, -1 behind the last one.

        The last is cut short. There are never more spans than tokens, of which there are `counts` [B].
        """
        longest = int(self.poisson_lambda + 20 * math.sqrt(self.poisson_lambda) + 20)
        logs = [k * math.log(self.poisson_lambda) - self.poisson_lambda - math.lgamma(k + 1) for k in range(longest)]
        lengths = np.searchsorted(np.exp(logs).cumsum(), draws, side="right")
        budget = np.rint(counts * self.masking_probability).astype(np.int64)[:, None]
        left = budget - (lengths.cumsum(1) - lengths)
        is_span = (left > 0) & (np.arange(draws.shape[1]) < counts[:, None])
        return np.where(is_span, np.minimum(lengths, left), -1)


def sentence_order(features: list[dict], ordinary: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Order [B, N] in which each row's ordinary tokens follow each other once its sentences are permuted."""
    sentences = compact(read_groups(features, "sentence_ids"), ordinary, -1, "right")
    numbers = run_numbers(sentences)
    draws = np.take_along_axis(uniforms(seeds, sentences.shape[1], SENTENCE), numbers, 1)
    is_token = np.arange(sentences.shape[1]) < ordinary.sum(1)[:, None]
    return np.where(is_token, draws, 2.0).argsort(1, kind="stable")
