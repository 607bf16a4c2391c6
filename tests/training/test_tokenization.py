import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from triptych.training.errors import UserError
from triptych.training.recipe import TokenizerRecipe
from triptych.training.tokenization import MASK, SENTINELS, SEP, SPECIAL_TOKENS, build_tokenizer, train_tokenizer

TEXTS = ["ein Haus am See , 2021年", "de: Freitag, 5. März 2021", "tab\tand  two spaces", "5 < 6 </s> <pad>"]
WORDS = ["a giant pulley system", "is no word"]


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


def test_words_stand_between_spaces():
    tokenizer = train_tokenizer(WORDS, "word", 500)
    ids = tokenizer(WORDS[0])["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "giant", "pulley", "system", "</s>"]
    assert tokenizer("unseen")["input_ids"] == [tokenizer.unk_token_id, tokenizer.eos_token_id]
    assert round_trip(tokenizer, WORDS[0]) == WORDS[0]


@pytest.mark.parametrize(
    ("topology", "single", "pair"),
    [
        ("encoder", ["<s>", "a", "</s>"], ["<s>", "a", "</s>", "giant", "</s>"]),
        ("decoder", ["<s>", "a"], None),
        ("encoder_decoder", ["a", "</s>"], None),
    ],
)
def test_what_stands_around_a_text(topology, single, pair, tmp_path):
    train_tokenizer(WORDS, "word", 500, topology).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a")["input_ids"]) == single
    assert ("token_type_ids" in tokenizer("a")) == (topology == "encoder")
    if pair:
        encoded = tokenizer("a", "giant")
        assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == pair
        assert encoded["token_type_ids"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("type", ["bpe", "char", "word"])
def test_extra_special_tokens_of_an_objective(type, tmp_path):
    train_tokenizer(TEXTS, type, 500, extra_tokens=[MASK, SEP, *SENTINELS]).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.mask_token, tokenizer.sep_token) == (MASK, SEP)
    ids = tokenizer.convert_tokens_to_ids([MASK, SEP, *SENTINELS])
    assert ids == list(range(4, 106))
    assert tokenizer.decode([*ids, *tokenizer("5")["input_ids"]], skip_special_tokens=True).strip() == "5"
    plain = train_tokenizer(TEXTS, type, 500)
    assert plain.mask_token is None
    assert plain.convert_tokens_to_ids(MASK) == plain.unk_token_id


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
    loaded = build_tokenizer(TokenizerRecipe(path=str(tmp_path)), [], "encoder_decoder")
    assert loaded.convert_tokens_to_ids("giant") > 3
    with pytest.raises(UserError, match=r"tokenizer '.*nowhere' cannot be loaded"):
        build_tokenizer(TokenizerRecipe(path=str(tmp_path / "nowhere")), [], "encoder_decoder")
