"""Tokenizers trained on the data.

Three types, all from the `tokenizers` library and wrapped so that `AutoTokenizer` loads them:

| type | a token is | unknown text |
|---|---|---|
| `bpe` | a byte pair (Sennrich et al. 2016, arXiv 1508.07909, on bytes: Radford et al. 2019) | cannot occur |
| `char` | a character: BPE without merges | `<unk>` |
| `word` | what stands between spaces | `<unk>` |

A text that holds a special token's spelling is text for the first two; for `word` it is that token. Around a text stand

| topology | one text | two |
|---|---|---|
| encoder | `<s> A </s>` | `<s> A </s> B </s>`, B with token type 1 |
| decoder | `<s> A`, and `</s>` where it ends | |
| encoder_decoder | `A </s>`; what is generated starts from `<s>` | |
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from triptych.training.errors import BROKEN_FILES, as_user_error
from triptych.training.recipe import TokenizerRecipe

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>"]
MASK, SEP = "<mask>", "<sep>"
SENTINELS = [f"<extra_id_{number}>" for number in range(100)]  # as many as T5 has
TEMPLATES = {
    "encoder": {"single": f"{BOS} $A {EOS}", "pair": f"{BOS} $A {EOS} $B:1 {EOS}:1"},
    "decoder": {"single": f"{BOS} $A"},
    "encoder_decoder": {"single": f"$A {EOS}"},
}


def build_tokenizer(
    recipe: TokenizerRecipe, texts: Iterable[str], topology: str, extra_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `recipe.path` names, or train one on `texts`.

    Raises:
        UserError: `recipe.path` holds no tokenizer.
    """
    if recipe.path:
        with as_user_error(f"tokenizer '{recipe.path}' cannot be loaded", *BROKEN_FILES):
            return AutoTokenizer.from_pretrained(recipe.path, trust_remote_code=False)
    return train_tokenizer(texts, recipe.type, recipe.vocab_size, topology, extra_tokens)


def train_tokenizer(
    texts: Iterable[str],
    type: str,
    vocab_size: int,
    topology: str = "encoder_decoder",
    extra_tokens: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `type` (see the table above) with at most `vocab_size` tokens on `texts`.

    Characters are never left out, so a `char` vocabulary is as large as the texts' alphabet.

    Args:
        topology: what stands around a text, see the second table.
        extra_tokens: special tokens of an objective: `MASK`, `SEP` or `SENTINELS`.
    """
    special_tokens = [*SPECIAL_TOKENS, *extra_tokens]
    train = {"bpe": _train_byte_pairs, "char": _train_characters, "word": _train_words}[type]
    tokenizer = train(texts, vocab_size, special_tokens)
    ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(**TEMPLATES[topology], special_tokens=ids)
    roles = {"mask_token": MASK, "sep_token": SEP}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        **{role: token for role, token in roles.items() if token in extra_tokens},
        model_input_names=["input_ids", *["token_type_ids"] * (topology == "encoder"), "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return a hash of all that decides which ids a text becomes; nothing where there are no texts."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend else {}
    # Set by whoever called the tokenizer last.
    content = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    content = [content, sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _train_byte_pairs(texts: Iterable[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_characters(texts: Iterable[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=special_tokens, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_words(texts: Iterable[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    # Counted here: the library's own trainer leaves holes in the ids where a special token occurs as a word.
    counts = Counter(word for text in texts for word in text.split() if word not in special_tokens)
    words = special_tokens + [word for word, _ in counts.most_common(max(0, vocab_size - len(special_tokens)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # This decoder puts a space before each token that lacks its prefix. No word between spaces holds a line break, so
    # with that as the prefix every token gets its space.
    tokenizer.decoder = decoders.WordPiece(prefix="\n", cleanup=False)
    return tokenizer
