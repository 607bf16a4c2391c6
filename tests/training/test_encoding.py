"""From text to rows of token ids, checked token by token with a tokenizer of words or characters."""

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer, GPT2Tokenizer, T5Tokenizer

from triptych.training.building import text_fields
from triptych.training.encoding import Encoder, encode_texts
from triptych.training.errors import UserError
from triptych.training.masking import NextSentencePairs
from triptych.training.objectives import OBJECTIVES, build_examples, encode, label_names, read_task
from triptych.training.recipe import Recipe
from triptych.training.tokenization import MASK, SENTINELS, SEP, train_tokenizer

WORDS = "a b c d e f g. h. i ."
TOKENIZERS = {
    topology: train_tokenizer([WORDS], "word", 200, topology, [MASK, SEP, *SENTINELS])
    for topology in ("encoder", "decoder", "encoder_decoder")
}


def rows_of(type, examples, tokenizer=None, **options):
    """The rows of an objective, with tokens written out."""
    recipe = Recipe(objective={"type": type} | options.pop("objective", {}), model=options.pop("model", {}))
    for name, value in options.items():
        setattr(recipe.data, name, value)
    task = read_task(recipe)
    tokenizer = tokenizer or TOKENIZERS[task.topology]
    examples = Dataset.from_dict(examples)
    rows = encode(task, examples, tokenizer, recipe, label_names(task, examples))
    build_examples(task, rows, tokenizer, recipe)
    return [
        {name: written(tokenizer, value) if name == "input_ids" else value for name, value in row.items()}
        for row in rows
    ]


def written(tokenizer, ids):
    if ids and isinstance(ids[0], list):
        return [written(tokenizer, row) for row in ids]
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


def test_running_text_is_cut_and_goes_on():
    text = {"text": ["a b c d e", "f"]}
    assert [row["input_ids"] for row in rows_of("masked_lm", text, max_length=4)] == [
        "<s> a b </s>",
        "<s> c d </s>",
        "<s> e </s>",
        "<s> f </s>",
    ]
    assert [row["input_ids"] for row in rows_of("span_corruption", text, max_length=4)] == [
        "a b c </s>",
        "d e </s>",
        "f </s>",
    ]
    # A decoder predicts each token once: rows share the one from which the next follows.
    assert [row["input_ids"] for row in rows_of("causal_lm", text, max_length=4)] == [
        "<s> a b c",
        "c d e </s>",
        "<s> f </s>",
    ]
    assert [row["input_ids"] for row in rows_of("causal_lm", text)] == ["<s> a b c d e </s>", "<s> f </s>"]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(3, 12))
def test_no_token_is_lost_or_predicted_twice(lengths, max_length):
    texts = [" ".join("abcdef"[place % 6] for place in range(length)) for length in lengths]
    for topology, tokenizer in TOKENIZERS.items():
        rows = encode_texts({"text": texts}, Encoder(tokenizer, topology, max_length))["input_ids"]
        assert all(len(row) <= max_length for row in rows)
        if topology == "decoder":
            predicted = sum(len(row) - 1 for row in rows)
            assert predicted == sum(lengths) + len(lengths)  # and the end of each text
        else:
            kept = [token for row in rows for token in row if token > 3]
            assert tokenizer.convert_ids_to_tokens(kept) == " ".join(texts).split()


WORD_PIECES = {name: id for id, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh."])}
OTHERS = {
    "encoder": BertTokenizer(vocab=WORD_PIECES),
    "decoder": GPT2Tokenizer(vocab={name: id for id, name in enumerate(["<|endoftext|>", *"abc\u0120"])}, merges=[]),
    "encoder_decoder": T5Tokenizer(
        vocab=[(name, -float(id)) for id, name in enumerate(["<pad>", "</s>", "<unk>", "\u2581", *"abcdefgh."])]
    ),
}


@pytest.mark.parametrize(
    ("type", "topology", "text"),
    [
        ("masked_lm", "encoder", "[CLS] a b [SEP]"),
        ("causal_lm", "decoder", "<|endoftext|> a \u0120 b <|endoftext|>"),
        ("span_corruption", "encoder_decoder", "\u2581 a \u2581 b </s>"),
        ("seq2seq", "encoder_decoder", "\u2581 a \u2581 b </s>"),
    ],
)
def test_texts_begin_and_end_as_other_tokenizers_have_it(type, topology, text):
    """BERT's tokenizer has neither <s> nor </s>, and T5's no <s>: its models start to write with a pad."""
    tokenizer = OTHERS[topology]
    examples = {"source": ["a b"], "target": ["a b"]} if type == "seq2seq" else {"text": ["a b"]}
    (row,) = rows_of(type, examples, tokenizer)
    assert row["input_ids"] == text
    if type == "seq2seq":
        assert written(tokenizer, row["labels"]) == text
    fields = text_fields(tokenizer, topology)
    assert fields["eos_token_id"] == tokenizer.convert_tokens_to_ids(text.split()[-1])
    if topology == "encoder_decoder":
        assert fields["decoder_start_token_id"] == tokenizer.pad_token_id


def test_the_pairs_of_next_sentences_are_berts():
    rows = Dataset.from_dict({"input_ids": [[5], [6], [7], [8]], "document": [0, 0, 1, 1]})
    tokenizer = OTHERS["encoder"]
    ids = NextSentencePairs(rows, tokenizer)[0]["input_ids"]
    first, second = (tokenizer.decode([ids[place]]) for place in (1, 3))
    assert ids == tokenizer(first, second)["input_ids"]


@pytest.mark.parametrize(
    ("type", "least"),
    [("masked_lm", 3), ("causal_lm", 2), ("span_corruption", 2), ("sequence_classification", 3), ("seq2seq", 2)],
)
def test_rows_need_room_for_a_token(type, least):
    """A tokenizer that has no room for its special tokens cuts nothing at all."""
    columns = {"text": ["a b"], "label": ["x"], "source": ["a b"], "target": ["c"]}
    examples = {name: columns[name] for name in OBJECTIVES[type].columns}
    rows = rows_of(type, examples, max_length=least)
    assert all(len(row["input_ids"].split()) == least for row in rows[:1])
    with pytest.raises(UserError, match=f"'data.max_length' must be at least {least}, not {least - 1}"):
        rows_of(type, examples, max_length=least - 1)


def test_two_texts_in_one_row():
    (row,) = rows_of("masked_lm", {"text": ["a b"], "text_pair": ["c"]})
    assert row == {"input_ids": "<s> a b </s> c </s>", "token_type_ids": [0, 0, 0, 0, 1, 1]}
    with pytest.raises(UserError, match="some examples have a text_pair and others have none"):
        rows_of("masked_lm", {"text": ["a b", "a"], "text_pair": ["c", None]})


def test_packed_rows_hold_whole_texts():
    rows = rows_of("causal_lm", {"text": ["a b", "c", "d e f", "a"]}, max_length=7, pack=True)
    assert [(row["input_ids"], row["seq_idx"]) for row in rows] == [
        ("<s> a b </s> <s> c </s>", [0, 0, 0, 0, 1, 1, 1]),
        ("<s> d e f </s>", [0, 0, 0, 0, 0]),
        ("<s> a </s>", [0, 0, 0]),
    ]
    for settings_ in ({"max_length": None}, {"type": "masked_lm"}):
        with pytest.raises(UserError, match=r"'data.pack' must be false"):
            rows_of(settings_.pop("type", "causal_lm"), {"text": ["a"]}, pack=True, **{"max_length": 7} | settings_)


def test_words_and_sentences_are_numbered_for_the_collators_that_ask():
    characters = train_tokenizer([""], "bpe", 261, "encoder", [MASK])
    (row,) = rows_of("masked_lm", {"text": ["ab cd"]}, characters, objective={"whole_word": True})
    assert row["word_ids"] == [-1, 0, 0, 1, 1, 1, -1]  # as <s> a b Ġ c d </s>
    rows = rows_of("denoising", {"text": ["a b g. c h. d"]}, objective={"permute_sentences": True})
    assert rows == [{"input_ids": "a b g. c h. d </s>", "sentence_ids": [0, 0, 0, 1, 1, 2, -1]}]


def test_sentences_of_documents():
    rows = rows_of("next_sentence", {"text": ["a b g. c h.", "d. e."]}, max_length=12)
    assert [(row["input_ids"], row["document"]) for row in rows] == [
        ("a b g.", 0),
        ("c h.", 0),
        ("<unk>", 1),
        ("<unk>", 1),
    ]


def test_pairs_for_both_topologies():
    pairs = {"source": ["a b c"], "target": ["d e"]}
    for topology, source in (("encoder_decoder", "a b c </s>"), ("decoder", "<s> a b c")):
        (row,) = rows_of("seq2seq", pairs, model={"topology": topology})
        assert row["input_ids"] == source
        assert written(TOKENIZERS[topology], row["labels"]) == "d e </s>"
    (row,) = rows_of("seq2seq", pairs, max_length=2)
    assert (row["input_ids"], written(TOKENIZERS["encoder_decoder"], row["labels"])) == ("a </s>", "d </s>")


def test_classes_are_numbered_by_name():
    examples = {"text": ["a", "b", "c"], "label": ["no", "yes", "no"]}
    rows = rows_of("sequence_classification", examples)
    assert [(row["input_ids"], row["labels"]) for row in rows] == [
        ("<s> a </s>", 0),
        ("<s> b </s>", 1),
        ("<s> c </s>", 0),
    ]
    (row,) = rows_of("sequence_classification", {"text": ["a"], "text_pair": ["b c"], "label": ["x"]})
    assert row == {"input_ids": "<s> a </s> b c </s>", "token_type_ids": [0, 0, 0, 1, 1, 1], "labels": 0}


def test_a_class_that_training_has_not_seen_has_no_number():
    assert Encoder(None, "encoder", labels=("no", "yes")).number("maybe") == -100


def test_numbers_to_regress():
    rows = rows_of("regression", {"text": ["a", "b"], "text_pair": ["b", "a"], "label": ["4.5", "1"]})
    assert [row["labels"] for row in rows] == [4.5, 1.0]
    with pytest.raises(UserError, match=r"a label to regress must be a number: .*'much'"):
        rows_of("regression", {"text": ["a"], "label": ["much"]})


def test_the_first_subword_carries_the_label():
    characters = train_tokenizer(["ab cd"], "bpe", 264, "encoder")
    (row,) = rows_of("token_classification", {"tokens": [["ab", "c"]], "labels": [["X", "Y"]]}, characters)
    # As in running text, words but the first follow a space (which byte-level tokenizers write as Ġ).
    assert row == {"input_ids": "<s> ab Ġ c </s>", "labels": [-100, 0, 1, -100, -100]}


def test_a_word_without_a_label_is_not_learnt():
    tokens = {"tokens": [["a", "b", "c"]], "labels": [["", "Y", ""]]}
    (row,) = rows_of("token_classification", tokens)
    assert row == {"input_ids": "<s> a b c </s>", "labels": [-100, -100, 0, -100, -100]}


def test_an_answer_becomes_its_first_and_last_token():
    examples = {
        "question": ["a b", "a"],
        "context": ["c d e f", "c d e f"],
        "answer": ["d e", "f"],
        "answer_start": [2, 6],
    }
    first, second = rows_of("question_answering", examples)
    assert first["input_ids"] == "<s> a b </s> c d e f </s>"
    assert (first["start_positions"], first["end_positions"]) == (5, 6)
    assert (second["start_positions"], second["end_positions"]) == (6, 6)
    _, cut = rows_of("question_answering", examples, max_length=6)
    assert cut["input_ids"] == "<s> a </s> c d </s>"
    assert (cut["start_positions"], cut["end_positions"]) == (0, 0)
    with pytest.raises(UserError, match=r"'data.max_length' must be above 5"):
        rows_of("question_answering", examples, max_length=5)


def test_choices():
    examples = {"text": ["a", "b"], "choices": [["c", "d"], ["e", "f"]], "label": ["1", "0"]}
    rows = rows_of("multiple_choice", examples)
    assert [row["labels"] for row in rows] == [1, 0]
    assert rows[0]["input_ids"] == ["<s> a </s> c </s>", "<s> a </s> d </s>"]


def test_unknown_objectives_options_and_topologies_are_refused():
    def task(type, topology=None, **options):
        return read_task(Recipe(objective={"type": type} | options, model={"topology": topology} if topology else {}))

    with pytest.raises(UserError, match="objective 'masked_ml' is unknown: did you mean 'masked_lm'"):
        task("masked_ml")
    with pytest.raises(UserError, match=r"'objective.masking_probabilty' is unknown: did you mean '.*probability'"):
        task("masked_lm", masking_probabilty=0.3)
    with pytest.raises(UserError, match=r"'objective.masking_probability' must be a number, not 'all'"):
        task("masked_lm", masking_probability="all")
    with pytest.raises(UserError, match=r"'objective.tokenizer' is unknown"):
        task("masked_lm", tokenizer="mine")
    with pytest.raises(UserError, match="objective 'masked_lm' has the topology encoder, not 'decoder'"):
        task("masked_lm", "decoder")
    assert task("seq2seq").topology == "encoder_decoder"
    assert task("prefix_lm", "encoder_decoder").options["encoder_decoder"] is True
    assert set(OBJECTIVES) >= {"denoising", "permutation_lm", "causal_lm"}
