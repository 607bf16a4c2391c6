"""Tokenizers trained on the data, and text pairs turned into token ids.

Three types, all from the `tokenizers` library and wrapped so that `AutoTokenizer` loads them:

| type | a token is | unknown text |
|---|---|---|
| `bpe` | a byte pair (Sennrich et al. 2016, arXiv 1508.07909, on bytes: Radford et al. 2019) | cannot occur |
| `char` | a character: BPE without merges | `<unk>` |
| `word` | what stands between spaces | `<unk>` |

A text that holds a special token's spelling is text for the first two; for `word` it is that token.

Every text ends in `</s>`. Generation starts from `<s>`.
"""

import re
from collections import Counter
from collections.abc import Iterable

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from triptych.training.errors import as_user_error
from triptych.training.recipe import TokenizerRecipe

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]


def build_tokenizer(recipe: TokenizerRecipe, dataset: Dataset, joiner: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `recipe.path` names, or train one on both columns of `dataset`.

    Args:
        recipe: which type to train and how large, or where to load it from.
        dataset: text pairs with the columns `source` and `target`.
        joiner: the mark at the end of a subword that goes on in the next one (`@@`), for `word` tokenizers.

    Raises:
        UserError: `recipe.path` holds no tokenizer.
    """
    if recipe.path:
        with as_user_error(f"tokenizer '{recipe.path}' cannot be loaded"):
            return AutoTokenizer.from_pretrained(recipe.path)
    texts = (text for column in ("source", "target") for text in dataset[column])
    return train_tokenizer(texts, recipe.type, recipe.vocab_size, joiner)


def train_tokenizer(
    texts: Iterable[str], type: str, vocab_size: int, joiner: str | None = None
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `type` (see the table above) with at most `vocab_size` tokens on `texts`.

    Characters are never left out, so a `char` vocabulary is as large as the texts' alphabet.
    """
    if type == "word":
        tokenizer = _train_words(texts, vocab_size, joiner)
    elif type == "char":
        tokenizer = _train_characters(texts)
    else:
        tokenizer = _train_byte_pairs(texts, vocab_size)
    end = (EOS, tokenizer.token_to_id(EOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _train_byte_pairs(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_characters(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_words(texts: Iterable[str], vocab_size: int, joiner: str | None) -> Tokenizer:
    # Counted here: the library's own trainer leaves holes in the ids where a special token occurs as a word.
    counts = Counter(word for text in texts for word in text.split() if word not in SPECIAL_TOKENS)
    words = SPECIAL_TOKENS + [word for word, _ in counts.most_common(vocab_size - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = _word_decoder(joiner)
    return tokenizer


def _word_decoder(joiner: str | None) -> decoders.Decoder:
    # The WordPiece decoder puts a space before each token that lacks its prefix. No word between spaces holds
    # a line break, so with that as the prefix every token gets its space.
    steps = [decoders.WordPiece(prefix="\n", cleanup=False), decoders.Fuse()]
    if joiner:
        steps.append(decoders.Replace(Regex(_joint(joiner)), ""))
    return decoders.Sequence(steps)


def join_subwords(text: str, joiner: str | None) -> str:
    """Undo a subword split: `pul@@ ley` becomes `pulley` where `joiner` is `@@`."""
    return re.sub(_joint(joiner), "", text) if joiner else text


def _joint(joiner: str) -> str:
    return re.escape(joiner) + "( |$)"


def tokenize_pairs(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Turn the columns `source` and `target` into the columns `input_ids` and `labels`, lists of token ids."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {
            "input_ids": tokenizer(batch["source"])["input_ids"],
            "labels": tokenizer(text_target=batch["target"])["input_ids"],
        }

    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
