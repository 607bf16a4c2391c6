"""Run by test_saving.py in a process that cannot import the package: `AutoClass:folder ...` of the current folder.

Each folder is loaded by its own code, compared with the outputs that lie in it, saved again, and loaded again.
"""

import sys
from pathlib import Path

import torch
import transformers
import without_package  # noqa: F401

for line in sys.argv[1:]:
    auto_class, folder = line.split(":")
    inputs, expected = torch.load(Path(folder) / "example.bin")
    for source, copy in ((folder, f"{folder}-2"), (f"{folder}-2", f"{folder}-3")):
        model = getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            output = model(**inputs)
        for name, value in expected.items():
            assert torch.equal(output[name], value), (folder, name, (output[name] - value).abs().max())
        model.save_pretrained(copy)
    print(folder)
