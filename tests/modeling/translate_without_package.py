"""Run by test_pipelines.py in a process that cannot import the package: a folder with code, and texts to translate."""

import json
import sys

import without_package  # noqa: F401
from transformers import pipeline

folder, *texts = sys.argv[1:]
pipe = pipeline("translation", model=folder, trust_remote_code=True, max_new_tokens=6)
for part in (pipe, pipe.model):
    assert type(part).__module__.startswith("transformers_modules."), type(part)
print(json.dumps([result["translation_text"] for result in pipe(texts)]))
