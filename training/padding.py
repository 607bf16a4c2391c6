"""Rows of unequal lengths as tables, and what collators ask of a tokenizer.

A collator works on right-padded tables, in which a token's column is its place in its text, and pads on the tokenizer's
side only in the end.

Shapes: B rows, T columns.
"""

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from triptych.training.errors import UserError

Batch = dict[str, torch.Tensor]


def pad_rows(rows: list[list[int]], value: int, side: str = "right") -> np.ndarray:
    """Return `rows` as one table [B, T], filled with `value` on the given side."""
    rows = [np.asarray(row, np.int64) for row in rows]
    return _fill(np.concatenate(rows), np.array([len(row) for row in rows]), value, side)


def compact(table: np.ndarray, keep: np.ndarray, value: int, side: str) -> np.ndarray:
    """Return what `keep` marks in `table` [B, T], moved together row by row and filled with `value` on one side."""
    return _fill(table[keep], keep.sum(1), value, side)


def _fill(flat: np.ndarray, lengths: np.ndarray, value: int, side: str) -> np.ndarray:
    width = max(1, lengths.max())  # a table without columns is no model input
    first = width - lengths if side == "left" else np.zeros_like(lengths)
    slots = np.arange(width) - first[:, None]
    table = np.full(slots.shape, value, flat.dtype)
    table[(slots >= 0) & (slots < lengths[:, None])] = flat
    return table


def read_texts(features: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Return the features' `input_ids` as a right-padded table [B, T], and where it holds tokens.

    Pads are known by their place: their id may be that of a real token, such as an end of text. Those that a feature
    has already, by its `attention_mask`, are left out.
    """
    rows = [without_pads(feature, "input_ids") for feature in features]
    lengths = np.array([len(row) for row in rows])
    ids = pad_rows(rows, 0)
    return ids, np.arange(ids.shape[1]) < lengths[:, None]


def read_column(features: list[dict], name: str, value: int, side: str = "right") -> np.ndarray:
    """Return the features' column `name`, one integer for each token, as a table [B, T] filled with `value`.

    Raises:
        UserError: a feature lacks the column, or has not one entry for each token of its `input_ids`.
    """
    for number, feature in enumerate(features, 1):
        if feature.get(name) is None:
            raise UserError(f"example {number} of the batch has no '{name}', but must have one for each token")
        if len(feature[name]) != len(feature["input_ids"]):
            raise UserError(
                f"'{name}' of example {number} of the batch has {len(feature[name])} entries, "
                f"but must have one for each of the {len(feature['input_ids'])} tokens of 'input_ids'"
            )
    return pad_rows([without_pads(feature, name) for feature in features], value, side)


def without_pads(feature: dict, name: str) -> np.ndarray:
    """Return a column that has one integer for each token, save where the feature's own `attention_mask` is 0."""
    values, mask = np.asarray(feature[name], np.int64), feature.get("attention_mask")
    return values if mask is None else values[np.asarray(mask) == 1]


def read_groups(features: list[dict], name: str) -> np.ndarray:
    """Return a column that says which word, sentence or the like each token belongs to: [B, T], -1 for none."""
    rows = [dict(row) for row in features]
    for row in rows:
        if row.get(name) is not None:
            row[name] = [-1 if group is None else group for group in row[name]]
    return read_column(rows, name, -1)


def run_numbers(groups: np.ndarray) -> np.ndarray:
    """Number the runs of equal entries of each row from 0 on: [B, T]."""
    changes = np.zeros(groups.shape, np.int64)
    changes[:, 1:] = groups[:, 1:] != groups[:, :-1]
    return changes.cumsum(1)


def text_inputs(ids: np.ndarray, keep: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """Return `input_ids` and `attention_mask` of the tokens that `keep` marks in `ids` [B, T]."""
    pad, side = token_id(tokenizer, "pad_token"), tokenizer.padding_side
    return {"input_ids": compact(ids, keep, pad, side), "attention_mask": compact(keep.astype(np.int64), keep, 0, side)}


def type_inputs(features: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    """Return `token_type_ids`, where the features have them."""
    if "token_type_ids" not in features[0]:
        return {}
    types = read_column(features, "token_type_ids", tokenizer.pad_token_type_id, tokenizer.padding_side)
    return {"token_type_ids": types}


def tensors(arrays: dict[str, np.ndarray]) -> Batch:
    """Return the arrays as tensors, without a copy."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the id of a special token such as "mask_token".

    Raises:
        UserError: the tokenizer has none.
    """
    found = getattr(tokenizer, f"{name}_id")
    if found is None:
        raise UserError(f"the tokenizer has no {name}, but must have one: give it to `tokenizer.add_special_tokens`")
    return found


def text_bounds(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """Return the ids that a text begins and ends with, as far as there are any: `<s>` and `</s>`, or BERT's `[CLS]` and
    `[SEP]`, which take their places."""
    places = ("bos_token_id", "cls_token_id"), ("eos_token_id", "sep_token_id")
    found = ([getattr(tokenizer, name) for name in names] for names in places)
    return tuple(next((id for id in ids if id is not None), None) for ids in found)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the ids of all special tokens, sorted."""
    return np.unique(np.array(tokenizer.all_special_ids, np.int64))


def ordinary_tokens(ids: np.ndarray, real: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return where `ids` [B, T] holds a token that is neither special nor a pad: what objectives may corrupt."""
    return real & ~np.isin(ids, special_ids(tokenizer))


def check_share(name: str, value: float) -> None:
    """Refuse a probability or share outside [0, 1]."""
    if not 0 <= value <= 1:
        raise UserError(f"{name} is {value}, but must be from 0 to 1")
