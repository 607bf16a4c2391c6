"""lm-evaluation-harness: a task of one's own, read from a file, on a decoder."""

import json

import pytest
import torch

TASK = """\
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: " "
metric_list: [{metric: acc}]
"""
ROWS = [
    {"context": "one two", "choices": ["three", "six seven"], "label": 0},
    {"context": "ten nine", "choices": ["ten", "eight"], "label": 1},
    {"context": "two four six", "choices": ["eight", "four", "one two three"], "label": 0},
]


@torch.no_grad()
def log_likelihood(model, tokenizer, context, text):
    """log p(text | context), token by token, as the chain rule has it."""
    start = len(tokenizer(context)["input_ids"])
    ids = tokenizer(context + text, return_tensors="pt")["input_ids"]
    shares = model(ids).logits[0].log_softmax(-1)
    return sum(shares[place - 1, ids[0, place]].item() for place in range(start, ids.shape[1]))


def test_likelihoods_and_accuracy(tmp_path, neighbour, small_model):
    lm_eval, huggingface = neighbour("lm_eval"), neighbour("lm_eval.models.huggingface")
    tasks = neighbour("lm_eval.tasks")
    _, model, tokenizer = small_model("decoder")
    data = tmp_path / "counting.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "counting.yaml").write_text(TASK.replace("FILE", str(data)))
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(harness, tasks=["counting"], task_manager=manager)
    hits = 0
    for row, sample in zip(ROWS, results["samples"]["counting"], strict=True):
        expected = [log_likelihood(model, tokenizer, row["context"], f" {choice}") for choice in row["choices"]]
        found = [response[0][0] for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=1e-4)
        hits += expected.index(max(expected)) == row["label"]
    assert results["results"]["counting"]["acc,none"] == pytest.approx(hits / len(ROWS))
