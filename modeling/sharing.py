"""A model as a repository: the code that loads it, the card that says what it is, and the commit that carries both.

A push is one commit: visitors see the old repository or the new one, whatever breaks on the way. Files that the Hub has
already are not sent again, so a push that broke off goes on where it stopped, and one that changes nothing makes no
commit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
)

from .auto_map import AUTO_CLASSES, auto_map
from .configuration_triptych import TriptychConfig
from .pipelines import custom_pipelines

CARD = "README.md"
CARD_MARK = "<!-- Made by triptych, which makes it anew at the next push. Without this line it is left as it is. -->"
# The Hub's word for what a head does, by which models are found and tried out.
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForMaskedImageModeling": "image-feature-extraction",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-to-text",
}
# What prepares an input other than text, and which of the Auto classes of one head is meant for it.
PROCESSORS = {"image": "AutoImageProcessor", "video": "AutoImageProcessor", "audio": "AutoFeatureExtractor"}
READERS = {"image": "AutoModelForImageTextToText", "audio": "AutoModelForSpeechSeq2Seq"}
SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "feed-forward width",
    "vocab_size": "vocabulary",
    "position_embedding_type": "positions",
    "norm_position": "norm",
}


def code_files() -> dict[str, Path]:
    """Return the files, by name, with which a repository loads every head where the package is not installed."""
    return {file.name: file for file in Path(__file__).parent.glob("*.py") if file.name != "__init__.py"}


def code_fields(topology: str) -> dict[str, Any]:
    """Return the fields of a saved configuration by which that code is found."""
    pipelines = {"custom_pipelines": custom_pipelines()} if topology == "encoder_decoder" else {}
    return {"auto_map": auto_map(topology), **pipelines}


def model_card(
    config: TriptychConfig, name: str, parameters: int, with_code: bool, more: str = "", **metadata
) -> ModelCard:
    """Return the card of a model: what it is, how it is loaded, and what else there is to say.

    Args:
        name: of the repository.
        parameters: how many it has, tied ones once.
        with_code: whether the repository carries the family's code.
        more: sections in Markdown.
        **metadata: of `ModelCardData`, on top of what follows from the configuration.
    """
    auto_class = find_auto_class(config)
    tags = ["triptych", config.topology, *(metadata.pop("tags", None) or ())]
    metadata = {"pipeline_tag": PIPELINES.get(auto_class), **metadata}
    data = ModelCardData(library_name="transformers", tags=tags, **metadata)
    kind = {"encoder": "an encoder", "decoder": "a decoder", "encoder_decoder": "an encoder-decoder"}[config.topology]
    sections = [
        f"---\n{data.to_yaml()}\n---\n{CARD_MARK}",
        f"# {name}",
        f"A Transformer of the Triptych family: {kind} with {parameters:,} parameters.",
        _shape_table(config),
        _how_to_load(config, auto_class, name, with_code),
        more,
    ]
    return ModelCard("\n\n".join(filter(None, sections)) + "\n")


def find_auto_class(config: TriptychConfig) -> str:
    """Return the Auto class that loads the head which `config` was saved with; AutoModel if it does not say."""
    heads = config.architectures or ()
    classes = [auto_class for auto_class, name in AUTO_CLASSES[config.topology].items() if name in heads]
    reader = READERS.get(input_type(config))
    return reader if reader in classes else next(iter(classes), "AutoModel")


def input_type(config: TriptychConfig) -> str:
    """Return what a model reads: text, image, video or audio."""
    return getattr(getattr(config, "encoder", config), "input_type", "text")


def make_repository(
    repo_id: str, private: bool | None = None, revision: str | None = None, token: bool | str | None = None
) -> str:
    """Make the repository and its branch `revision`, where they are missing, and return its name with the owner's.

    Args:
        private: whether a new repository is private. One that is there and public is refused if it should be.

    Raises:
        ValueError: the repository is public, but should be private.
        OSError, httpx2.HTTPError: the client's own, for refusals and broken connections.
    """
    api = HfApi(library_name="triptych", token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo_id).private:
        raise ValueError(f"`private` is True, but the repository '{repo_id}' is there already, and public.")
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return repo_id


def push_files(
    files: Mapping[str, Path | bytes],
    repo_id: str,
    revision: str | None = None,
    token: bool | str | None = None,
    commit_message: str = "Upload model",
    **commit,
) -> CommitInfo:
    """Put `files` into a repository in one commit.

    Weights that a former push left and this one does not bring go with the same commit. A card that a person wrote
    stays.

    Args:
        files: path in the repository to a file or its content.
        **commit: `commit_description` and `create_pr` of `HfApi.create_commit`.

    Raises:
        OSError, httpx2.HTTPError: the client's own, for refusals and broken connections.
    """
    api = HfApi(library_name="triptych", token=token)
    present = api.list_repo_files(repo_id, revision=revision)
    if CARD in present and not is_made_here(Path(api.hf_hub_download(repo_id, CARD, revision=revision))):
        files = {path: content for path, content in files.items() if path != CARD}
    operations = [CommitOperationAdd(path, content) for path, content in sorted(files.items())]
    operations += [CommitOperationDelete(path) for path in present if _is_weights(path) and path not in files]
    return api.create_commit(repo_id, operations, revision=revision, commit_message=commit_message, **commit)


def is_made_here(card: Path) -> bool:
    """Whether a card has the mark of those made here: a person's is never replaced."""
    return CARD_MARK in card.read_text("utf-8")


def _is_weights(path: str) -> bool:
    return path.startswith("model") and path.endswith((".safetensors", ".safetensors.index.json"))


def _shape_table(config: TriptychConfig) -> str:
    """A column for each stack, a row for each field of its shape."""
    stacks = {"": config}
    if config.topology == "encoder_decoder":
        stacks = {"encoder": config.encoder, "decoder": config.decoder}
    rows = [("", *stacks), ("---",) * (1 + len(stacks))]
    rows += [(word, *(_say(stack, field) for stack in stacks.values())) for field, word in SHAPE.items()]
    rows.append(("attention", *(", ".join(dict.fromkeys(stack.layer_types)) for stack in stacks.values())))
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _say(stack: TriptychConfig, field: str) -> Any:
    return input_type(stack) if field == "vocab_size" and input_type(stack) != "text" else getattr(stack, field)


def _how_to_load(config: TriptychConfig, auto_class: str, name: str, with_code: bool) -> str:
    classes = {"model": auto_class}
    if (processor := PROCESSORS.get(input_type(config))) is not None:
        classes["processor"] = processor
    if processor is None or config.topology == "encoder_decoder":
        classes["tokenizer"] = "AutoTokenizer"
    trust = ", trust_remote_code=True" if with_code else ""
    register = "" if with_code else "import triptych  # registers the family\n"
    needs = (
        "The repository carries the code that it needs. Where the package `triptych` is installed and imported, that "
        "one is used, and `trust_remote_code` is not needed."
        if with_code
        else "This needs the package `triptych`."
    )
    lines = "\n".join(
        f'{word} = {loader}.from_pretrained("{name}"{trust if word == "model" else ""})'
        for word, loader in classes.items()
    )
    return f"""## How to load it

```python
{register}from transformers import {", ".join(classes.values())}

{lines}
```

{needs}"""
