import numpy as np
import pytest
from datasets import Dataset

from triptych.training.errors import UserError
from triptych.training.renaming import RenamedExamples
from triptych.training.tokenization import train_tokenizer

GROUPS = [["mary", "sandra", "julie"], ["kitchen", "garden"]]
TEXT = "mary went to the kitchen . where is mary ? who ?"
LABELS = ["Garden", "Julie", "Mary", "Sandra", "kitchen", "mary,sandra", "yes"]
TOKENIZER = train_tokenizer([TEXT, "sandra julie garden"], "word", 100, "decoder")


def make_examples(labels, groups=GROUPS, rows=50, **options):
    ids = TOKENIZER(TEXT)["input_ids"]
    numbers = [-100] * len(ids)
    numbers[10], numbers[12] = (LABELS.index(label) for label in labels)
    data = Dataset.from_dict({"input_ids": [ids] * rows, "labels": [numbers] * rows})
    return RenamedExamples(data, np.full((1, rows), len(ids)), 1, groups, TOKENIZER, LABELS, **options)


def test_text_and_labels_are_renamed_alike():
    examples = make_examples(["kitchen", "Mary"])
    seen = set()
    for row in examples.__getitems__(list(range(50))):
        words = TOKENIZER.convert_ids_to_tokens(row["input_ids"])
        who, where = words[1], words[5]
        assert words == f"<s> {TEXT}".replace("mary", who).replace("kitchen", where).split()
        assert [LABELS[label].lower() for label in row["labels"] if label != -100] == [where, who]
        seen.add((who, where))
    assert len(seen) == 6  # every way


def test_lists_of_words_are_renamed_word_by_word():
    for row in make_examples(["yes", "mary,sandra"]).__getitems__(list(range(50))):
        renamed = make_examples(["yes", "yes"]).draw(row["seed"])
        name = f"{renamed['mary']},{renamed['sandra']}"
        first, second = (row["labels"][place] for place in (10, 12))
        assert LABELS[first] == "yes"
        assert second == (LABELS.index(name) if name in LABELS else -100)


def test_another_epoch_renames_anew_and_the_same_one_alike():
    examples = make_examples(["kitchen", "Mary"])
    first = examples.__getitems__(list(range(50)))
    examples.set_epoch(1)
    second = examples.__getitems__(list(range(50)))
    examples.set_epoch(0)
    assert examples.__getitems__(list(range(50))) == first != second
    assert examples[7] == first[7]


def test_beside_some_words_names_stay():
    rows = make_examples(["kitchen", "Mary"], keep_beside=["where", "unheard"]).__getitems__(list(range(50)))
    assert all(row["input_ids"] == TOKENIZER(TEXT)["input_ids"] for row in rows)
    free = make_examples(["kitchen", "Mary"], keep_beside=["unheard"]).__getitems__(list(range(50)))
    assert any(row["input_ids"] != TOKENIZER(TEXT)["input_ids"] for row in free)


def test_a_word_that_is_no_token_is_refused():
    with pytest.raises(
        UserError, match=r"'data\.interchangeable' has 'john', which is no token of the tokenizer, in lower case"
    ):
        make_examples(["yes", "yes"], [["mary", "john"]])
