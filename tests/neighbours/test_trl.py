"""TRL: fine-tuning on examples and on preferences."""

import torch
from tiny import assert_equal
from transformers import AutoModelForCausalLM

SETTINGS = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "bf16": False}


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_begins_with_the_loss_of_the_model(tmp_path, neighbour, small_model):
    trl, datasets = neighbour("trl"), neighbour("datasets")
    _, model, tokenizer = small_model("decoder")
    texts = ["one two three", "ten nine eight seven six five", "two four"]
    rows = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**rows).logits
    targets = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(tmp_path / "sft", per_device_train_batch_size=3, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = losses_of(trainer)
    assert_equal(torch.tensor(losses[0]), expected, tolerance=1e-4)
    assert losses[0] > losses[1] > losses[2]


def test_dpo_moves_towards_what_is_preferred(tmp_path, neighbour, small_model):
    trl, datasets = neighbour("trl"), neighbour("datasets")
    folder, _, tokenizer = small_model("decoder")
    model = AutoModelForCausalLM.from_pretrained(folder)  # from where TRL loads the reference, too
    before = {name: value.clone() for name, value in model.named_parameters()}
    pairs = {"prompt": ["one two", "ten nine"], "chosen": [" three", " eight"], "rejected": [" two", " ten nine"]}
    trainer = trl.DPOTrainer(
        model,
        args=trl.DPOConfig(tmp_path / "dpo", per_device_train_batch_size=2, **SETTINGS),
        train_dataset=datasets.Dataset.from_dict(pairs),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = losses_of(trainer)
    # Model and reference are one at first: the loss is -log sigmoid(0) (Rafailov et al. 2023, equation 7).
    assert_equal(torch.tensor(losses[0]), torch.tensor(2.0).log(), tolerance=1e-4)
    assert losses[0] > losses[1] > losses[2]
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
