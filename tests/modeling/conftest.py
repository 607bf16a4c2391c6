"""What the tests of models share."""

import pytest

from triptych import banded, linear_attention


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiny texts are of several blocks and chunks, with a part of one at the end."""
    monkeypatch.setattr(banded, "BLOCK_SIZE", 3)
    monkeypatch.setattr(linear_attention, "CHUNK_SIZE", 4)
