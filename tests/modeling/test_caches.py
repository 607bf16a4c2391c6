"""Caches with room for new tokens hold what transformers' do, whatever is done; beams are those of its models."""

import copy

import pytest
import torch
import transformers
from tiny import tiny_model
from transformers.cache_utils import DynamicCache, DynamicLayer

from triptych import caches, import_model
from triptych.caches import ROOM, reorder, update

SIZES = dict(vocab_size=97, decoder_start_token_id=1, pad_token_id=0, eos_token_id=2)
PAIRS = {
    "T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **SIZES)
    ),
    "Marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(
            **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
               (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))},
            d_model=32, max_position_embeddings=64, forced_eos_token_id=None, **SIZES,
        )
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Caches as small as these would not be written on."""
    monkeypatch.setattr(caches, "FEWEST_ENTRIES", 1)


def states(length, rows=3):
    """Keys or values as attention gives them: the heads of a token side by side."""
    return torch.randn(rows, length, 2, 4).transpose(1, 2)


def new_cache():
    """A cache of one layer."""
    return DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=1))


def step(cache, what, inputs, is_ours):
    """Does one thing to a cache, our way or transformers', and gives what it then holds."""
    if what in ("token", "tokens"):
        update(cache, *inputs[what], 0) if is_ours else cache.update(*inputs[what], 0)
    elif what == "crop":
        cache.crop(-2)
    elif what == "beams":
        beams = torch.tensor([2, 0, 0])
        reorder(cache, beams) if is_ours else cache.reorder_cache(beams)
    elif what == "rows":
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
    elif what == "offload":
        cache.layers[0].offload()
        cache.layers[0].prefetch()
    elif what == "reset":
        cache.reset()
    return cache.layers[0].keys, cache.layers[0].values


ORDERS = {
    "out of room": ["tokens"] + ["token"] * (ROOM + 2),
    "written over": ["tokens", "token", "token", "crop", "token", "token"],
    "beams": ["tokens", "token", "beams", "token", "beams", "beams", "token", "token"],
    "rows": ["tokens", "rows", "token", "rows", "token"],
    "elsewhere": ["tokens", "token", "offload", "token", "reset", "tokens", "token", "crop", "tokens"],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_cache_holds_what_that_of_transformers_does(order, mode):
    ours, theirs = new_cache(), new_cache()
    with mode():
        for what in order:
            inputs = {"token": (states(1), states(1)), "tokens": (states(5), states(5))}
            held = zip(step(ours, what, inputs, True), step(theirs, what, inputs, False), strict=True)
            assert ours.get_seq_length() == theirs.get_seq_length()
            for mine, other in held:
                assert (mine is None and other is None) or torch.equal(mine, other)
    assert type(ours.layers[0]) is DynamicLayer and vars(ours.layers[0]).keys() == vars(theirs.layers[0]).keys()


def test_a_token_is_written_behind_the_others():
    """Nothing is copied while there is room, nor for the token after a change of beams."""
    cache = new_cache()
    with torch.no_grad():
        update(cache, states(5), states(5), 0)
        update(cache, states(1), states(1), 0)
        places = {update(cache, states(1), states(1), 0)[0].data_ptr() for _ in range(ROOM)}
        assert len(places) == 1
        reorder(cache, torch.tensor([1, 0, 2]))
        place = cache.layers[0].keys.data_ptr()
        assert update(cache, states(1), states(1), 0)[0].data_ptr() == place


def test_caches_do_not_write_on_each_other():
    """Of a cache that is copied, or whose tensors are put into another, each goes on by itself."""
    first, given = new_cache(), new_cache()
    with torch.no_grad():
        update(first, states(4), states(4), 0)
        update(first, states(1), states(1), 0)
        second = copy.deepcopy(first)
        given.layers[0].lazy_initialization(*(first.layers[0].keys,) * 2)
        given.layers[0].keys, given.layers[0].values = first.layers[0].keys, first.layers[0].values
        tokens = [states(1) for _ in range(3)]
        kept = [update(cache, token, token, 0)[0] for cache, token in zip((first, second, given), tokens, strict=True)]
    for keys, token in zip(kept, tokens, strict=True):
        assert torch.equal(keys[:, :, 5:], token)


def test_what_was_taken_out_of_a_cache_stays_as_it_was():
    """A cache that is cropped and goes on writes over the tokens that somebody kept."""
    cache = new_cache()
    with torch.no_grad():
        update(cache, states(4), states(4), 0)
        kept = update(cache, states(3), states(3), 0)[0]
        expected = kept.clone()
        cache.crop(-3)
        update(cache, states(1), states(1), 0)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("first, second", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.enable_grad)])
def test_a_cache_goes_on_in_another_mode(first, second):
    """Tensors of inference mode must not be written on outside it, nor any that a gradient goes through."""
    model = tiny_model("decoder")
    ids = torch.arange(3, 12)[None]
    with first():
        cache = model(ids[:, :4], use_cache=True).cache
    with second():
        logits = [model(ids[:, index : index + 1], cache=cache).logits for index in range(4, 9)]
        expected = model(ids).logits[:, 4:]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected)
    if second is torch.enable_grad:
        logits[-1].sum().backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("build", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize(
    "settings",
    [{}, dict(num_return_sequences=3, length_penalty=0.2), dict(do_sample=True)],
    ids=["beams", "several", "sampled"],
)
def test_beams_are_those_of_transformers(build, settings):
    """Keys and values of the encoder stay where they are when beams move; the beams must not notice."""
    torch.manual_seed(0)
    theirs = build().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:  # not the sinusoids
                parameter.normal_(std=0.3)
    ids, mask = torch.randint(3, 97, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    settings = dict(num_beams=4, max_new_tokens=24, repetition_penalty=2.0) | settings  # or a token repeats itself
    written = []
    for model in (import_model(theirs), theirs):
        torch.manual_seed(1)
        written.append(model.generate(ids, attention_mask=mask, **settings))
    assert torch.equal(*written)
    assert len(set(map(tuple, written[0].tolist()))) == len(written[0])
