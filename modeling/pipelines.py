"""Texts in, texts out: `transformers.pipeline` for encoder-decoders, under the names of three tasks.

transformers 5 has pipelines for everything but the models that translate and summarise. This one serves them, of the
family and of transformers alike:

| task | what the text is called |
|---|---|
| translation | translation_text |
| summarization | summary_text |
| text2text-generation | generated_text |

A folder that carries the family's code names this class in its configuration, so the module imports nothing beside it.
"""

from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY, REMOVED_TASKS
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER, BatchEncoding

RESULT_NAMES = {"translation": "translation", "summarization": "summary", "text2text-generation": "generated"}


class TriptychTextToTextPipeline(Pipeline):
    """What an encoder-decoder writes for each text.

    `pipe(text)` is a list of one dictionary for each of the `num_return_sequences`. `pipe(texts)` is a list with one
    dictionary for each text, or one such list where several sequences are asked for. What `generate()` takes is taken
    here too, at construction for all calls, or at a call.
    """

    _pipeline_calls_generate = True
    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def _sanitize_parameters(
        self,
        truncation: bool | str | None = None,
        return_tensors: bool | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generation: Any,
    ) -> tuple[dict, dict, dict]:
        """Splits arguments, of the constructor or of a call, by who reads them.

        Args:
            truncation: cut a text that is too long to be read, as tokenizers do; otherwise it is refused.
            return_tensors: give token ids [T], as `..._token_ids`, in the place of a text; those of a batch are padded.
            clean_up_tokenization_spaces: of the tokenizer's `decode`.
            **generation: of `generate()`.
        """
        encoding = {} if truncation is None else {"truncation": truncation}
        decoding = {"return_tensors": return_tensors, "clean_up_tokenization_spaces": clean_up_tokenization_spaces}
        return encoding, generation, {name: value for name, value in decoding.items() if value is not None}

    def __call__(self, texts, **options) -> list[dict[str, Any]] | list[list[dict[str, Any]]]:
        texts = list(texts) if isinstance(texts, tuple) else texts
        if texts == []:
            return []
        results = super().__call__(texts, **options)
        is_single = isinstance(texts, list) and all(len(result) == 1 for result in results)
        return [result[0] for result in results] if is_single else results

    def longest_text(self) -> tuple[int, str] | None:
        """How many tokens the model reads at most, and which setting says so; None is any number."""
        encoder = getattr(self.model.config, "encoder", self.model.config)
        limits = [(self.tokenizer.model_max_length, "tokenizer.model_max_length")]
        if getattr(encoder, "position_embedding_type", None) == "learned":
            limits.append((encoder.max_position_embeddings, "config.encoder.max_position_embeddings"))
        limit = min(limits)
        return limit if limit[0] < VERY_LARGE_INTEGER else None

    def preprocess(self, text: str, truncation: bool | str = False) -> BatchEncoding:
        """Token ids and mask [1, T] of one text, behind `config.prefix` if there is one.

        Raises:
            ValueError: not a text, no token, or more of them than the model reads.
        """
        if not isinstance(text, str):
            raise ValueError(f"The input is {text!r}, but must be a text or a list of texts.")
        limit = self.longest_text()
        options = {"truncation": truncation, "max_length": limit[0]} if limit and truncation else {}
        inputs = self.tokenizer((self.prefix or "") + text, return_tensors="pt", **options)
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise ValueError(f"The text {text!r} has no token, but must have at least one.")
        if limit and length > limit[0]:
            raise ValueError(
                f"The text has {length} tokens, but the model reads at most `{limit[1]}` = {limit[0]}; "
                "`truncation=True` cuts it."
            )
        return inputs

    def _forward(self, inputs: dict[str, torch.Tensor], **generation: Any) -> dict[str, torch.Tensor]:
        """What the model writes for B texts, N sequences [B, N, T] for each."""
        beside = {name: getattr(self, name) for name in ("tokenizer", "assistant_model", "assistant_tokenizer")}
        written = self.model.generate(**inputs, **beside, **self._prepare_generate_kwargs(generation))
        written = written if torch.is_tensor(written) else written.sequences
        return {"sequences": written.unflatten(0, (len(inputs["input_ids"]), -1))}

    def postprocess(
        self,
        outputs: dict[str, torch.Tensor],
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[dict[str, Any]]:
        """The sequences [1, N, T] of one text, each as a text or as tokens."""
        name, sequences = RESULT_NAMES.get(self.task, "generated"), outputs["sequences"][0]
        if return_tensors:
            return [{f"{name}_token_ids": tokens} for tokens in sequences]
        texts = self.tokenizer.batch_decode(
            sequences, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
        )
        return [{f"{name}_text": text} for text in texts]


def custom_pipelines() -> dict[str, dict[str, Any]]:
    """The `custom_pipelines` of a saved configuration, by which `trust_remote_code=True` finds the class."""
    entry = {"impl": f"pipelines.{TriptychTextToTextPipeline.__name__}", "pt": [AutoModelForSeq2SeqLM.__name__]}
    return {task: dict(entry) for task in RESULT_NAMES}


def register_pipelines():
    """Makes `transformers.pipeline` know the tasks, unless something else has."""
    for task in RESULT_NAMES.keys() - PIPELINE_REGISTRY.supported_tasks.keys():
        REMOVED_TASKS.pop(task, None)  # looked up first, to say that the task is gone
        entry = {"impl": TriptychTextToTextPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
        # `register_pipeline` would also make each saved pipeline carry code for the task that was registered last.
        PIPELINE_REGISTRY.supported_tasks[task] = entry
