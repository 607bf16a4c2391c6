"""Relations that hold for any text: causality, padding, batches, packing, permutation, caches.

Shapes: B batch, T tokens, V vocabulary.
"""

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny import (
    LAYERS,
    MIXED,
    POSITIONS,
    QUICK_BACKENDS,
    TOPOLOGIES,
    assert_equal,
    random_tokens,
    tiny_model,
)
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from triptych import TriptychEncoderModel

STACKS = {**LAYERS, "mixed": MIXED}
BACKENDS = st.sampled_from(QUICK_BACKENDS)
SEEDS = st.integers(0, 999)
LENGTHS = st.integers(1, 12)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)  # of the pieces in which a text is fed

in_every_stack = pytest.mark.parametrize("layers", ["full", "mixed"])
in_every_layer_type = pytest.mark.parametrize("layers", STACKS)
in_every_position = pytest.mark.parametrize("position", POSITIONS)


@functools.cache
def model_of(topology: str, position: str, layers: str, backend: str):
    return tiny_model(topology, backend, position_embedding_type=position, **STACKS[layers])


def inputs_of(topology: str, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict:
    """`ids` as what the logits belong to; an encoder-decoder reads a source of its own beside them."""
    if topology != "encoder_decoder":
        return dict(input_ids=ids, attention_mask=mask)
    source = random_tokens(1, 5).expand(len(ids), -1)
    return dict(input_ids=source, decoder_input_ids=ids, decoder_attention_mask=mask)


def scattered(ids: torch.Tensor, pads: int, is_left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids` [1, T] among so many pads at random places: ids and mask, [1, T + pads]."""
    length = ids.shape[1] + pads
    slots = torch.arange(pads, length) if is_left else torch.randperm(length)[: ids.shape[1]].sort().values
    padded, mask = random_tokens(1, length), torch.zeros(1, length, dtype=torch.long)
    padded[0, slots], mask[0, slots] = ids[0], 1
    return padded, mask


@in_every_position
@in_every_stack
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
@given(length=LENGTHS, place=st.integers(0, 11), backend=BACKENDS, seed=SEEDS)
@torch.no_grad()
def test_causality(topology, layers, position, length, place, backend, seed):
    """A token changes no output before it."""
    torch.manual_seed(seed)
    model, ids = model_of(topology, position, layers, backend), random_tokens(1, length)
    place %= length
    inputs = inputs_of(topology, torch.cat((ids, ids)))
    edited = inputs["decoder_input_ids" if topology == "encoder_decoder" else "input_ids"]
    edited[1, place:] = random_tokens(length - place)
    before, after = model(**inputs).logits
    assert_equal(after[:place], before[:place])


@in_every_position
@in_every_stack
@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(length=LENGTHS, pads=st.integers(0, 7), is_left=st.booleans(), backend=BACKENDS, seed=SEEDS)
@torch.no_grad()
def test_padding_is_inert(topology, layers, position, length, pads, is_left, backend, seed):
    """Pads change nothing, wherever they are and whatever stands in them; left padding is as good as none."""
    torch.manual_seed(seed)
    model, ids = model_of(topology, position, layers, backend), random_tokens(1, length)
    padded, mask = scattered(ids, pads, is_left)
    torch.manual_seed(seed)
    expected = model(**inputs_of(topology, ids)).logits[0]
    torch.manual_seed(seed)
    assert_equal(model(**inputs_of(topology, padded, mask)).logits[mask.bool()], expected)


@in_every_position
@in_every_stack
@given(length=LENGTHS, pads=st.integers(1, 7), backend=BACKENDS, seed=SEEDS)
@torch.no_grad()
def test_source_padding_is_inert(layers, position, length, pads, backend, seed):
    """Pads in the source change nothing in the target."""
    torch.manual_seed(seed)
    model, source, target = model_of("encoder_decoder", position, layers, backend), *random_tokens(2, 1, length)
    padded, mask = scattered(source, pads)
    expected = model(input_ids=source, decoder_input_ids=target).logits
    assert_equal(model(input_ids=padded, attention_mask=mask, decoder_input_ids=target).logits, expected)


@in_every_position
@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(length=LENGTHS, mates=st.integers(1, 4), place=st.integers(0, 4), backend=BACKENDS, seed=SEEDS)
@torch.no_grad()
def test_batch_independence(topology, position, length, mates, place, backend, seed):
    """A text's outputs do not depend on who else is in the batch."""
    torch.manual_seed(seed)
    model, ids = model_of(topology, position, "mixed", backend), random_tokens(mates + 1, length)
    place %= mates + 1
    torch.manual_seed(seed)
    together = model(**inputs_of(topology, ids)).logits[place]
    torch.manual_seed(seed)
    assert_equal(together, model(**inputs_of(topology, ids[place : place + 1])).logits[0])


@in_every_position
@in_every_stack
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), by_seq_idx=st.booleans(), backend=BACKENDS, seed=SEEDS)
@example(lengths=[1, 1, 1], by_seq_idx=False, backend="sdpa", seed=0)
@torch.no_grad()
def test_packing_is_running_apart(topology, layers, position, lengths, by_seq_idx, backend, seed):
    """Documents side by side in one row give what each gives alone."""
    torch.manual_seed(seed)
    model = model_of(topology, position, layers, backend)
    documents = [random_tokens(1, length) for length in lengths]
    if by_seq_idx:
        packed = dict(seq_idx=torch.cat([torch.full((n,), index) for index, n in enumerate(lengths)])[None])
    else:
        packed = dict(position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    expected = torch.cat([model(document).logits for document in documents], dim=1)
    assert_equal(model(torch.cat(documents, dim=1), **packed).logits, expected)


@given(length=LENGTHS, backend=BACKENDS, seed=SEEDS)
@torch.no_grad()
def test_permutation_equivariance(length, backend, seed):
    """Without positions, an encoder of full layers sees a set: permuted tokens give permuted outputs."""
    torch.manual_seed(seed)
    model = tiny_model(TriptychEncoderModel, backend, position_embedding_type="none")
    ids, order = random_tokens(1, length), torch.randperm(length)
    assert_equal(model(ids[:, order]).last_hidden_state, model(ids).last_hidden_state[:, order])


# ---------------------------------------------------------------------------------------------------------------------
# Caches


def new_cache(kind: str, model, length: int):
    """A cache for `length` tokens; None lets the model make its own, a dynamic one."""
    if kind == "dynamic":
        return None
    cache = StaticCache(model.config.get_text_config(decoder=True), max_cache_len=length + 3)
    return cache if model.config.topology == "decoder" else EncoderDecoderCache(cache, DynamicCache())


def in_pieces(model, sizes: list[int], cache=None, **inputs):
    """Logits [B, T, V] of a text fed in pieces of the given sizes to one cache, and the cache."""
    prefix = "decoder_" if model.config.topology == "encoder_decoder" else ""
    ids, mask = inputs.pop(f"{prefix}input_ids"), inputs.pop(f"{prefix}attention_mask", None)
    logits, end = [], 0
    for size in sizes:
        start, end = end, end + size
        piece = {f"{prefix}input_ids": ids[:, start:end]}
        if mask is not None:
            piece[f"{prefix}attention_mask"] = mask[:, :end]
        output = model(**piece, **inputs, cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def assert_cache_is_no_cache(model, kind: str, sizes: list[int], pads: int | None):
    """Two texts in pieces through a cache of that kind give what they give in one go.

    Args:
        pads: on the left of the second text, which keeps a token; None is no mask at all.
    """
    length, mask = sum(sizes), None
    ids = random_tokens(2, length)
    if pads is not None:
        mask = torch.ones_like(ids)
        mask[1, : min(pads, length - 1)] = 0
    inputs = inputs_of(model.config.topology, ids, mask)
    expected = model(**inputs, use_cache=False).logits
    actual, _ = in_pieces(model, sizes, new_cache(kind, model, length), **inputs)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert_equal(actual[real], expected[real])


def assert_cache_takes_pads(model, sizes: list[int], pads: int):
    """A decoder's text may have pads in its middle, and a piece of nothing else."""
    ids, mask = scattered(random_tokens(1, sum(sizes)), pads)
    real = mask.bool()
    actual, _ = in_pieces(model, [*sizes, pads] if pads else sizes, input_ids=ids, attention_mask=mask)
    assert_equal(actual[real], model(ids, attention_mask=mask, use_cache=False).logits[real])


def assert_cache_forgets(model, sizes: list[int], removed: int):
    """After `crop`, a decoder's text goes on as if the last tokens of the last call had never been."""
    ids, cache = random_tokens(1, sum(sizes)), DynamicCache(config=model.config)
    cache.activate_past_recording()
    _, cache = in_pieces(model, sizes, cache, input_ids=ids)
    removed = min(removed, sizes[-1])
    cache.crop(-removed)
    kept = ids.shape[1] - removed
    assert cache.get_seq_length() == kept
    more = random_tokens(1, 4)
    expected = model(torch.cat((ids[:, :kept], more), dim=1), use_cache=False).logits[:, kept:]
    assert_equal(model(more, cache=cache).logits, expected)


@in_every_position
@in_every_layer_type
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("topology", ["decoder", "encoder_decoder"])
@given(sizes=SIZES, pads=st.integers(0, 6), is_masked=st.booleans(), backend=BACKENDS, seed=SEEDS)
@example(sizes=[1] * 11, pads=3, is_masked=True, backend="sdpa", seed=0)
@torch.no_grad()
def test_cache_is_no_cache(topology, kind, layers, position, sizes, pads, is_masked, backend, seed):
    """A chunk of queries against longer keys is misaligned: a sequence in pieces through every cache = one shot."""
    torch.manual_seed(seed)
    model = model_of(topology, position, layers, backend)
    assert_cache_is_no_cache(model, kind, sizes, pads if is_masked else None)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
@given(sizes=SIZES, seed=SEEDS)
@torch.no_grad()
def test_cache_of_a_narrow_window(name, kind, size, sizes, seed):
    """Windows and chunks of two or three tokens are the edge of what a window cache holds."""
    torch.manual_seed(seed)
    model = tiny_model("decoder", position_embedding_type="rotary", **{name: size})
    ids = random_tokens(1, sum(sizes))
    actual, _ = in_pieces(model, sizes, new_cache(kind, model, ids.shape[1]), input_ids=ids)
    assert_equal(actual, model(ids, use_cache=False).logits)


@in_every_position
@given(sizes=SIZES, pads=st.integers(0, 6), seed=SEEDS)
@torch.no_grad()
def test_cache_with_pads_anywhere(position, sizes, pads, seed):
    """Full layers keep every token, so pads may come in the middle of a cached text, as after a right-padded prompt."""
    torch.manual_seed(seed)
    assert_cache_takes_pads(model_of("decoder", position, "full", "sdpa"), sizes, pads)


@in_every_position
@in_every_stack
@given(sizes=SIZES, length=st.integers(1, 8), seed=SEEDS)
@torch.no_grad()
def test_cache_with_a_prefix(layers, position, sizes, length, seed):
    """A prefix given whole in the first piece, and as long as it was ever after."""
    torch.manual_seed(seed)
    model, sizes = model_of("decoder", position, layers, "sdpa"), [length, *sizes]
    inputs = dict(input_ids=random_tokens(2, sum(sizes)), prefix_length=torch.tensor([length, length // 2]))
    actual, _ = in_pieces(model, sizes, **inputs)
    assert_equal(actual, model(**inputs, use_cache=False).logits)


@in_every_position
@in_every_stack
@given(sizes=SIZES, order=st.permutations(range(3)), seed=SEEDS)
@torch.no_grad()
def test_reordered_cache(layers, position, sizes, order, seed):
    """Beam search moves rows between steps: reordered caches go on as the reordered texts do."""
    torch.manual_seed(seed)
    model, ids = model_of("decoder", position, layers, "sdpa"), random_tokens(3, sum(sizes))
    order, more = torch.tensor(order), random_tokens(3, 4)
    _, cache = in_pieces(model, sizes, input_ids=ids)
    cache.reorder_cache(order)
    expected = model(torch.cat((ids[order], more), dim=1), use_cache=False).logits[:, -4:]
    assert_equal(model(more, cache=cache).logits, expected)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_cache(name):
    model, ids = model_of("decoder", "rotary", "full", "sdpa"), random_tokens(1, 6)
    cache = model(ids[:, :4]).cache
    assert_equal(model(ids[:, 4:], **{name: cache}).logits, model(ids).logits[:, 4:])


@torch.no_grad()
def test_no_cache_in_training():
    """A cache in training would keep every layer's keys and values alive for nothing."""
    model, ids = tiny_model("decoder"), random_tokens(1, 4)
    assert model(ids).cache is not None and model(ids, use_cache=False).cache is None
    assert model.train()(ids).cache is None


@torch.no_grad()
def test_shared_layers_have_a_cache_each():
    """One layer's parameters at every depth still see the keys of their own depth."""
    model = tiny_model("decoder", share_layers=True, num_hidden_layers=3, position_embedding_type="relative")
    assert len(model.model.layers) == 1
    ids = random_tokens(2, 9)
    actual, _ = in_pieces(model, [4, 1, 1, 3], input_ids=ids)
    assert_equal(actual, model(ids, use_cache=False).logits)
