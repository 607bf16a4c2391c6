"""Tests of this folder run by `make test-neighbours`, which installs what they need."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from tiny import tiny_model

from triptych.training.tokenization import train_tokenizer

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp()  # read when trackio is imported

TEXTS = ["one two three four five six seven", "two four six eight ten", "ten nine eight seven"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.neighbours)


@pytest.fixture
def neighbour():
    """Imports a package, or skips the test and says why."""
    return lambda name: pytest.importorskip(name, reason="it comes with `pip install .[neighbours]`")


@pytest.fixture
def small_model(tmp_path):
    """Saves a small model of a topology, with a tokenizer for numbers in words; returns its folder and both."""

    def save(topology):
        tokenizer = train_tokenizer(TEXTS, "bpe", 300, topology)
        tokenizer.chat_template = CHAT_TEMPLATE
        special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        model = tiny_model(topology, vocab_size=len(tokenizer), position_embedding_type="rotary", **special)
        if topology == "encoder_decoder":
            model.generation_config.decoder_start_token_id = tokenizer.bos_token_id
        folder = tmp_path / topology
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder, model, tokenizer

    return save


@pytest.fixture
def serve(tmp_path, neighbour):
    """Starts the server of a model by a program, on a free port, and returns its address; ends it after the test."""
    for package in ("fastapi", "openai", "uvicorn"):
        neighbour(package)
    servers = []

    def start(program, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-c", program, "serve", str(folder)]
        log = tmp_path / "server.log"
        with log.open("w") as output:
            environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
            options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
            servers.append(subprocess.Popen([*command, *options], stdout=output, stderr=output, env=environment))
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert servers[-1].poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                return address
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(log.read_text()[-3000:])

    yield start
    for server in servers:
        server.terminate()
        server.wait(timeout=60)
