"""Training, evaluation and the command line of the model family.

| chapter | holds |
|---|---|
| `recipe` | what a training is: one YAML file, with key=value changes |
| `data`, `dates` | where text pairs come from: files, or generated dates |
| `tokenization` | from text to token ids, and tokenizers trained on the data |
| `batching` | length-bucketed batches within a token budget |
| `loop` | the optimisation, on `accelerate.Accelerator` |
| `reporting`, `plots` | progress, metrics and pictures |
| `run` | from a recipe to a folder that `from_pretrained` loads |
| `evaluation` | batched generation, exact match, BLEU and chrF |
| `demo`, `cli` | the commands |
"""
