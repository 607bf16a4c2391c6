"""Training, evaluation and the command line of the model family.

| chapter | holds |
|---|---|
| `recipe` | what a training is: one YAML file, with key=value changes |
| `objectives` | what a model learns: head, columns, collator |
| `data`, `streaming` | where examples come from: files, read whole or a window at a time |
| `dates`, `recall`, `digits` | examples that are generated or come along |
| `tokenization`, `encoding`, `subwords` | from text to token ids, and tokenizers trained on the data |
| `senses` | images, videos and recordings as model inputs |
| `renaming`, `token_dropout` | other words, or none, in their places in each epoch |
| `masking`, `corruption`, `permutation`, `language_modeling`, `labelling` | collators: from rows to model inputs |
| `draws`, `padding` | what collators share: random numbers of an example, and tables of rows |
| `batching` | length-bucketed batches within a token budget |
| `building` | from a recipe to data, tokenizer, model and loaders |
| `optimization`, `loop` | the optimisation, on `accelerate.Accelerator` |
| `training_loss` | how a model gives another loss while it trains |
| `consistency`, `attention_transfer`, `low_rank` | other losses and fewer parameters: R-Drop, softmax to linear, LoRA |
| `distillation`, `pairing` | what a student learns from a teacher, and which of their layers are compared |
| `sequence_distillation`, `distillation_trainer` | what a teacher writes as targets; in transformers' Trainer |
| `checkpoints` | what a run continues from |
| `memory` | what the C library does with freed memory |
| `reporting`, `plots` | progress, metrics and pictures |
| `run` | from a recipe to a folder that `from_pretrained` loads |
| `evaluation`, `metrics` | what a model writes or predicts, and how well |
| `sharing` | a run's card, and how it goes to the Hub |
| `inspecting`, `inspection_page` | what is shown of a model, in the terminal and on a page |
| `accounting`, `describing`, `attention_maps`, `position_views` | that in numbers, words and pictures |
| `measuring`, `bench` | time and memory, beside other libraries |
| `attention_bench`, `decoding_bench`, `growth_bench`, `recurrence_bench` | the same against lengths and sizes |
| `demo`, `converting`, `errors`, `cli` | the commands, and what they say where something is wrong |
"""
