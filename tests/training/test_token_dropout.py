"""Tokens hidden in training: which, how many, by whose draws; and what a recipe makes of it."""

import json

import numpy as np
import pytest
import torch
from test_collators import BOS, EOS, FIRST_WORD, SEP, make_tokenizer, text, words

from triptych.training.draws import uniforms
from triptych.training.errors import UserError
from triptych.training.labelling import SequenceClassificationCollator
from triptych.training.language_modeling import Seq2SeqCollator
from triptych.training.token_dropout import TokenDropout

TOKENIZER = make_tokenizer()
MASK, UNK = TOKENIZER.mask_token_id, TOKENIZER.unk_token_id


def dropping(probability, tokenizer=TOKENIZER, collator=SequenceClassificationCollator):
    return TokenDropout(collator(tokenizer), tokenizer, probability)


@pytest.mark.parametrize(("tokenizer", "hidden"), [(TOKENIZER, MASK), (make_tokenizer(mask_token=None), UNK)])
def test_by_hand(tokenizer, hidden):
    rows = [text(length) | {"labels": length} for length in (5, 40, 20)]
    rows[1]["input_ids"][3] = SEP
    batch = dropping(0.3, tokenizer)(rows)
    for row, feature in enumerate(rows):
        ids = feature["input_ids"]
        draws = uniforms(np.array([feature["seed"]], np.uint64), len(ids), stream=2)[0]
        expected = [hidden if t >= FIRST_WORD and draw < 0.3 else t for t, draw in zip(ids, draws, strict=True)]
        assert batch["input_ids"][row, : len(ids)].tolist() == expected
        assert batch["attention_mask"][row].sum() == len(ids)
    assert batch["labels"].tolist() == [5, 40, 20]


def test_specials_and_pads_stay_and_the_share_is_kept():
    row = {"input_ids": [BOS, *words(9), EOS, *words(9), EOS], "labels": [EOS]}
    rows = [{"input_ids": words(30), "labels": [EOS]}, *(row | {"seed": seed} for seed in range(10_000))]
    batch = dropping(0.2, make_tokenizer("left", pad="</s>"), Seq2SeqCollator)(rows)
    hidden = (batch["input_ids"] == MASK)[1:]
    is_special = torch.tensor(row["input_ids"]) < FIRST_WORD
    assert not hidden[:, -len(is_special) :][:, is_special].any()
    assert not hidden[batch["attention_mask"][1:] == 0].any()
    assert abs(hidden.sum() / 180_000 - 0.2) < 4 * (0.2 * 0.8 / 180_000) ** 0.5


def test_bad_input():
    with pytest.raises(UserError, match="token_dropout is -1"):
        dropping(-1)
    with pytest.raises(UserError, match="no unk_token"):
        dropping(0.1, make_tokenizer(unk_token=None, mask_token=None))


def test_a_recipe_hides_tokens_of_training_texts_alone(command, tmp_path):
    """Training losses are of texts with holes."""
    (tmp_path / "pairs.tsv").write_text("".join(f"a {number}\tb {number}\n" for number in range(20)))
    (tmp_path / "mine.yaml").write_text(
        "data: {splits: {train: pairs.tsv, validation: pairs.tsv}}\n"
        "tokenizer: {type: char}\n"
        "model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
        "max_steps: 3\nlog_every: 1\n"
    )
    losses = {}
    for share in (0.0, 0.9):
        code, _, err = command("train", "mine.yaml", f"data.token_dropout={share}", f"output=run{share}")
        assert code == 0, err
        rows = [json.loads(line) for line in (tmp_path / f"run{share}" / "metrics.jsonl").read_text().splitlines()]
        losses[share] = [row["loss"] for row in rows if "loss" in row]
    assert losses[0.0] != losses[0.9]
    code, _, err = command("train", "mine.yaml", "data.token_dropout=1", "output=third")
    assert code == 2 and "recipe key 'data.token_dropout' must be at least 0 and below 1, not 1" in err
