"""Sharing on the Hub: the real client against a server in memory, with users, faults and broken connections."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hub_client import ClientError, HubClient
from hub_server import HubServer

import triptych
from triptych.auto_map import AUTO_CLASSES

ANN, ANN_READS, BOB = "hf_ann_may_write", "hf_ann_may_read", "hf_bob_may_write"
USERS = {ANN: ("ann", "write"), ANN_READS: ("ann", "read"), BOB: ("bob", "write")}
IMAGES = dict(input_type="image", image_size=8, patch_size=4)
VIDEOS = dict(input_type="video", image_size=8, patch_size=4, num_frames=2)
RECORDINGS = dict(input_type="audio", num_mel_bins=6)
READS = {
    "AutoModelForImageClassification": IMAGES,
    "AutoModelForMaskedImageModeling": IMAGES,
    "AutoModelForVideoClassification": VIDEOS,
    "AutoModelForAudioClassification": RECORDINGS,
    "AutoModelForImageTextToText": {"encoder": IMAGES},
    "AutoModelForSpeechSeq2Seq": {"encoder": RECORDINGS},
}
HEADS = [(topology, auto_class) for topology, classes in AUTO_CLASSES.items() for auto_class in classes]


@pytest.fixture(scope="module")
def server():
    with HubServer(USERS) as server:
        yield server


@pytest.fixture
def hub(server):
    server.reset()
    return server


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    with HubClient(server.url, tmp_path_factory.mktemp("client")) as client:
        yield client


@pytest.fixture
def run_folder(tmp_path):
    """A folder as a training leaves it."""
    torch.manual_seed(0)
    config = triptych.TriptychConfig(
        topology="encoder",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
    )
    folder = tmp_path / "run"
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    record = {
        "status": "finished", "step": 12, "tokens": 3456, "seconds": 78.0, "examples": 90, "seed": 1, "processes": 1,
        "device": "cpu", "data": "ab" * 32, "versions": {"triptych": "0.1.0"}, "final": {"step": 12, "loss": 0.5},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "recipe.yaml").write_text(
        "objective: {type: sequence_classification}\noptimizer: adamw\nlearning_rate: 0.001\nschedule: linear\n"
        "mixed_precision: null\noutput: /home/ann/secret/run\n"
    )
    (folder / "evaluation.json").write_text(json.dumps({"test": {"examples": 40, "accuracy": 82.5}}))
    (folder / "notes.txt").write_text("not for anyone else")
    return folder


@pytest.mark.parametrize("topology, auto_class", HEADS)
def test_each_head_is_pushed_and_loaded(hub, client, topology, auto_class):
    pushed = client.run(f"result = push({auto_class!r}, {topology!r}, **{READS.get(auto_class, {})})", ANN)
    assert client.run(f"result = load({auto_class!r})") == pushed
    is_writer = "ForCausalLM" in auto_class or (topology == "encoder_decoder" and auto_class != "AutoModel")
    names = ["README.md", "config.json", *["generation_config.json"] * is_writer, "model.safetensors"]
    assert sorted(hub.files("ann/model")) == names
    card = hub.files("ann/model")["README.md"].decode()
    assert f'{auto_class}.from_pretrained("ann/model")' in card and "import triptych" in card


def test_pushed_code_needs_no_package(hub, client, server, tmp_path):
    """Without the package, from the Hub; then without the Hub, from the cache."""
    heads = {
        "encoder": "AutoModelForMaskedLM",
        "decoder": "AutoModelForCausalLM",
        "encoder_decoder": "AutoModelForSeq2SeqLM",
    }
    pushed = [
        client.run(f"result = push({auto_class!r}, {topology!r}, {{'with_code': True}}, name={topology!r})", ANN)
        for topology, auto_class in heads.items()
    ]
    loads = ", ".join(
        f"load({auto_class!r}, 'ann/{topology}', trust_remote_code=True)" for topology, auto_class in heads.items()
    )
    with HubClient(server.url, tmp_path, blocked=True) as stranger:
        assert stranger.run(f"result = [{loads}]") == pushed
        with pytest.raises(ClientError, match="trust_remote_code"):
            stranger.run(
                "import transformers; transformers.AutoModel.from_pretrained('ann/encoder', trust_remote_code=False)"
            )
    requests = len(hub.requests)
    with HubClient(server.url, tmp_path, blocked=True, HF_HUB_OFFLINE="1") as stranger:
        assert stranger.run(f"result = [{loads}]") == pushed
    assert len(hub.requests) == requests


def test_private_is_seen_by_its_owner_only(hub, client, tmp_path):
    pushed = client.run("result = push('AutoModel', options={'private': True})", ANN)
    assert hub.repositories["ann/model"].private
    assert client.run("result = load('AutoModel')", ANN_READS) == pushed
    for token in (None, BOB, "hf_unknown"):
        with pytest.raises(ClientError, match="ann/model") as error:
            client.run(f"load('AutoModel', cache_dir={str(tmp_path)!r})", token)
        assert error.value.kind == "OSError"


def test_public_repository_does_not_take_what_should_be_private(hub, client):
    client.run("push('AutoModel')", ANN)
    with pytest.raises(ClientError, match="`private` is True, but the repository 'ann/model' is there already"):
        client.run("push('AutoModel', options={'private': True}, vocab_size=60)", ANN)
    assert hub.messages("ann/model") == ["Upload model", "initial commit"]


def test_revision_is_a_branch_of_its_own(hub, client):
    first = client.run("result = push('AutoModel')", ANN)
    second = client.run("result = push('AutoModel', options={'revision': 'wide'}, hidden_size=32)", ANN)
    assert client.run("result = load('AutoModel')") == first
    assert client.run("result = load('AutoModel', revision='wide')") == second
    with pytest.raises(ClientError, match="not a valid git identifier"):
        client.run("load('AutoModel', revision='narrow')")


def test_shards_come_and_go_with_their_commit(hub, client):
    """Weights of a former push that stay behind would be loaded in place of the new ones, or beside them."""
    pushed = client.run("result = push('AutoModelForMaskedLM', options={'max_shard_size': '2KB'})", ANN)
    assert client.run("result = load('AutoModelForMaskedLM')") == pushed
    assert "model.safetensors.index.json" in hub.files("ann/model")
    pushed = client.run("result = push('AutoModelForMaskedLM', vocab_size=60)", ANN)
    assert client.run("result = load('AutoModelForMaskedLM')") == pushed
    assert [name for name in hub.files("ann/model") if "safetensors" in name] == ["model.safetensors"]


def test_push_of_the_same_makes_no_commit(hub, client):
    for _ in range(2):
        client.run("push('AutoModelForCausalLM', 'decoder')", ANN)
        assert hub.messages("ann/model") == ["Upload model", "initial commit"]
    assert hub.count("PUT", "/lfs/") == 1


def test_card_of_a_person_is_kept(hub, client):
    client.run("push('AutoModel')", ANN)
    mine = b"---\nlicense: mit\n---\nMy own words."
    client.run(
        "from huggingface_hub import HfApi\n"
        f"HfApi().upload_file(path_or_fileobj={mine!r}, path_in_repo='README.md', repo_id='ann/model')",
        ANN,
    )
    client.run("push('AutoModel', vocab_size=60)", ANN)
    assert hub.files("ann/model")["README.md"] == mine
    assert len(hub.messages("ann/model")) == 4


TRAIN_AND_PUSH = """
from transformers import Trainer, TrainingArguments
model = build('AutoModelForSequenceClassification')
rows = [{'input_ids': [3, 4, 5 + i], 'labels': i % 2} for i in range(4)]
hub = dict(push_to_hub=True, hub_model_id='model', hub_strategy='every_save')
arguments = TrainingArguments('trained', max_steps=2, save_steps=1, report_to=[], use_cpu=True, **hub)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
trainer.push_to_hub()
result = sum(value.double().abs().sum().item() for value in trainer.model.state_dict().values())
"""


def test_trainer_pushes(hub, client):
    trained = client.run(TRAIN_AND_PUSH, ANN)
    assert client.run("result = load('AutoModelForSequenceClassification')") == trained
    assert not any(name.endswith((".bin", ".pt")) for name in hub.files("ann/model") if name != "training_args.bin")


def test_run_is_pushed_whole(hub, client, run_folder):
    """Model, card, curve and record, and nothing else that lies in the folder."""
    code, out, err = client.command("push", run_folder, "model", "--private", token=ANN)
    newest = hub.repositories["ann/model"].branches["main"]
    assert (code, out.strip()) == (0, f"{hub.url}/ann/model/commit/{newest}"), err
    files = hub.files("ann/model")
    assert sorted(files) == sorted({path.name for path in run_folder.iterdir()} - {"notes.txt"} | {"README.md"})
    assert b"secret" not in b"".join(files.values())
    card = huggingface_hub.ModelCard(files["README.md"].decode())
    result = card.data.eval_results[0]
    assert (result.dataset_split, result.metric_type, result.metric_value) == ("test", "accuracy", 82.5)
    assert "| test | 40 | accuracy | 82.50 |" in card.text and "linear" in card.text and "0:01:18" in card.text


def test_run_is_pushed_with_code(hub, client, run_folder, server, tmp_path):
    code, _, err = client.command("push", run_folder, "ann/model", "--with-code", "--revision", "coded", token=ANN)
    assert code == 0, err
    assert "auto_map" not in json.loads((run_folder / "config.json").read_text())
    load = "result = load('AutoModelForSequenceClassification', revision='coded', {})"
    with HubClient(server.url, tmp_path / "stranger", blocked=True) as stranger:
        assert stranger.run(load.format("trust_remote_code=True")) == client.run(load.format(""))
    assert list(hub.files("ann/model")) == []  # of the main branch


@pytest.mark.parametrize(
    "token, repository, said",
    [
        (None, "ann/model", "log in with `hf auth login`"),
        ("hf_unknown", "ann/model", "log in with `hf auth login`"),
        (ANN_READS, "ann/model", "your token must have the right to write"),
        (BOB, "ann/model", "your token must have the right to write"),
        (ANN, "ann/a/model", "'ann/a/model' cannot be pushed to"),
        (ANN, "ann/-model-", "'ann/-model-' cannot be pushed to"),
    ],
)
def test_refusals_are_one_sentence(hub, client, run_folder, token, repository, said):
    code, out, err = client.command("push", run_folder, repository, token=token)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("triptych: ") and said in err
    assert not hub.repositories
    assert not token or token not in err


@pytest.mark.parametrize(
    "method, path, fault, times",
    [
        ("POST", "/repos/create", {"cut": True}, 1),
        ("POST", "/preupload/", {"cut": True}, 9),
        ("PUT", "/lfs/", {"cut": True}, 9),
        ("PUT", "/lfs/", {"status": 400}, 1),
        ("POST", "/verify", {"status": 500}, 9),
        ("POST", "/commit/", {"cut": True}, 1),
        ("POST", "/commit/", {"status": 500}, 1),
        ("POST", "/commit/", {"status": 429, "headers": {"Retry-After": "1"}}, 1),
    ],
)
def test_broken_push_shows_nothing_and_goes_on(hub, client, run_folder, method, path, fault, times):
    """Half of a model on the Hub would be loaded by whoever comes by."""
    assert client.command("push", run_folder, "model", token=ANN)[0] == 0
    before = hub.files("ann/model")
    (run_folder / "evaluation.json").write_text(json.dumps({"test": {"examples": 40, "accuracy": 83.0}}))
    client.run(f"build('AutoModelForSequenceClassification', vocab_size=60).save_pretrained({str(run_folder)!r})")
    hub.fail(method, path, times=times, **fault)
    code, _, err = client.command("push", run_folder, "model", token=ANN)
    assert code == 1 and err.count("\n") == 1 and "the same command goes on where it stopped" in err, err
    assert hub.files("ann/model") == before
    hub.faults.clear()
    uploads = hub.count("PUT", "/lfs/")
    assert client.command("push", run_folder, "model", token=ANN)[0] == 0
    assert hub.files("ann/model")["model.safetensors"] == (run_folder / "model.safetensors").read_bytes()
    assert len(hub.messages("ann/model")) == 3
    if "/commit/" in path:  # what had arrived is not sent again
        assert hub.count("PUT", "/lfs/") == uploads


@pytest.mark.parametrize("fault", [{"cut": True}, {"status": 429, "headers": {"Retry-After": "1"}}, {"status": 500}])
def test_passing_fault_is_not_noticed(hub, client, run_folder, fault):
    hub.fail("PUT", "/lfs/", **fault)
    code, _, err = client.command("push", run_folder, "model", token=ANN)
    assert code == 0, err
    assert hub.files("ann/model")["model.safetensors"] == (run_folder / "model.safetensors").read_bytes()


def test_broken_download_goes_on(hub, client, tmp_path):
    pushed = client.run("result = push('AutoModel')", ANN)
    hub.fail("GET", "model.safetensors", cut=True)
    assert client.run(f"result = load('AutoModel', cache_dir={str(tmp_path)!r})") == pushed


def test_file_of_another_size_is_not_loaded(hub, client, tmp_path):
    client.run("push('AutoModel')", ANN)
    hub.fail("GET", "model.safetensors", damage=lambda data: data[:-100], times=9)
    with pytest.raises(ClientError, match="Consistency check failed"):
        client.run(f"load('AutoModel', cache_dir={str(tmp_path)!r})")


def test_offline_push_is_refused(run_folder, command):
    code, _, err = command("push", run_folder, "ann/model")
    assert code == 2 and "HF_HUB_OFFLINE" in err and err.count("\n") == 1


def test_folders_without_a_whole_model_are_refused(run_folder, command, tmp_path):
    weights = (run_folder / "model.safetensors").read_bytes()
    record = (run_folder / "run.json").read_text()
    for change, said in (
        (lambda: (run_folder / "model.safetensors").write_bytes(weights[:-10]), "is no whole safetensors file"),
        (lambda: (run_folder / "model.safetensors").unlink(), "holds no model: config.json and model.safetensors"),
        (lambda: (run_folder / "run.json").write_text('{"status": "running", "step": 7}'), "has made 7 updates"),
    ):
        change()
        code, _, err = command("push", run_folder, "ann/model")
        assert code == 2 and said in err and err.count("\n") == 1
        (run_folder / "model.safetensors").write_bytes(weights)
        (run_folder / "run.json").write_text(record)
    code, _, err = command("push", tmp_path / "nothing", "ann/model")
    assert code == 2 and "is no folder" in err
    transformers.BertConfig().save_pretrained(run_folder)
    code, _, err = command("push", run_folder, "ann/model")
    assert code == 2 and "its model_type is 'bert'" in err


def test_first_steps_of_a_newcomer(hub, client, server, tmp_path):
    """The page's code, with the last block in a place where the package is not installed."""
    page = (Path(__file__).parents[2] / "docs/first-steps.md").read_text("utf-8").replace("your-name", "ann")
    *blocks, elsewhere = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert client.run("\n".join([*blocks, "result = float(accuracy)"]), ANN) == 1.0
    with HubClient(server.url, tmp_path, blocked=True) as stranger:
        judged = stranger.run(f"{elsewhere}\nresult = judge(['what a brilliant play this was', 'what a dull song'])")
    assert [one["label"] for one in judged] == ["praise", "blame"]
