import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from triptych.training.errors import UserError
from triptych.training.recipe import TokenizerRecipe
from triptych.training.tokenization import SPECIAL_TOKENS, build_tokenizer, join_subwords, train_tokenizer

TEXTS = ["ein Haus am See , 2021年", "de: Freitag, 5. März 2021", "tab\tand  two spaces", "5 < 6 </s> <pad>"]
WORDS = ["a giant pul@@ ley system", "@@@ is no sub@@ word"]


def round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("type", ["bpe", "char"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_exactly_also_after_saving(tmp_path, type, text):
    tokenizer = train_tokenizer(TEXTS, type, 500)
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert round_trip(tokenizer, text) == round_trip(saved, text) == text
    assert tokenizer(text) == saved(text)


@settings(max_examples=60)
@given(st.text())
def test_byte_pairs_can_write_any_text(text):
    assert round_trip(BYTE_PAIRS, text) == text


BYTE_PAIRS = train_tokenizer(TEXTS, "bpe", 300)


@pytest.mark.parametrize("type", ["bpe", "char", "word"])
def test_special_tokens(type):
    tokenizer = train_tokenizer(TEXTS, type, 500)
    assert tokenizer.convert_ids_to_tokens(range(4)) == SPECIAL_TOKENS
    ids = tokenizer("ein Haus")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]


@pytest.mark.parametrize("type", ["bpe", "char"])
def test_text_that_spells_a_special_token_is_text(type):
    tokenizer = train_tokenizer(TEXTS, type, 500)
    ids = tokenizer("5 </s> <pad>")["input_ids"]
    assert tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.pad_token_id not in ids


def test_words_join_their_subwords_in_decoding():
    tokenizer = train_tokenizer(WORDS, "word", 500, joiner="@@")
    ids = tokenizer(WORDS[0])["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "giant", "pul@@", "ley", "system", "</s>"]
    assert round_trip(tokenizer, WORDS[0]) == "a giant pulley system"
    assert round_trip(tokenizer, "a pul@@") == "a pul"
    assert tokenizer("unseen")["input_ids"] == [tokenizer.unk_token_id, tokenizer.eos_token_id]
    plain = train_tokenizer(WORDS, "word", 500)
    assert round_trip(plain, WORDS[0]) == WORDS[0]


@pytest.mark.parametrize("text", WORDS)
def test_references_are_joined_as_the_decoder_joins(text):
    tokenizer = train_tokenizer(WORDS, "word", 500, joiner="@@")
    assert join_subwords(text, "@@") == round_trip(tokenizer, text)
    assert join_subwords(text, None) == text


def test_vocabulary_sizes():
    assert len(train_tokenizer(WORDS, "word", 7)) == 7
    assert len(train_tokenizer(["aabb aabb"] * 5, "bpe", 262)) == 262
    assert len(train_tokenizer(["aab"], "char", 3)) == 4 + 2


def test_training_is_deterministic():
    texts = [f"{number} {number * 7919 % 1000}" for number in range(2000)]
    for type in ("bpe", "word"):
        first, second = (train_tokenizer(texts, type, 400).backend_tokenizer.to_str() for _ in range(2))
        assert first == second


def test_a_given_tokenizer_is_loaded(tmp_path):
    train_tokenizer(WORDS, "word", 500).save_pretrained(tmp_path)
    empty = Dataset.from_dict({"source": [], "target": []})
    loaded = build_tokenizer(TokenizerRecipe(path=str(tmp_path)), empty, None)
    assert loaded.convert_tokens_to_ids("giant") > 3
    with pytest.raises(UserError, match=r"tokenizer '.*nowhere' cannot be loaded"):
        build_tokenizer(TokenizerRecipe(path=str(tmp_path / "nowhere")), empty, None)
