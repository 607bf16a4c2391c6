"""What the heads minimise: hand formulas, ignored labels, counts, shifts.

Shapes: B batch, T tokens, V vocabulary, L labels, C choices.
"""

import pytest
import torch
from tiny import (
    SIDES,
    Ragged,
    assert_equal,
    assert_equal_gradients,
    gradients,
    pad_rows,
    ragged_rows,
    random_tokens,
    tiny_model,
)
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

import triptych
from triptych.losses import classification_loss, cross_entropy, span_loss

LABELS = 5


def hand_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """The sum over labelled items of -(1 - e) log p(label) - e / L sum(log p), in double precision."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits.double().flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label != -100:
            log_p = row - row.exp().sum().log()
            total = total - (1 - smoothing) * log_p[label] - smoothing * log_p.mean()
    return total


# ---------------------------------------------------------------------------------------------------------------------
# The functions


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_hand(smoothing, num_items):
    logits, labels = torch.randn(3, 4, 11), torch.randint(0, 11, (3, 4))
    labels[0, 1:3] = labels[2, 0] = -100
    actual = cross_entropy(logits, labels, num_items, smoothing)
    assert_equal(actual.double(), hand_cross_entropy(logits, labels, smoothing) / (9 if num_items is None else 7))
    if num_items is None:
        torchs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
        assert_equal(actual, torchs, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_half_precision_logits(dtype):
    """A sum of many items in half precision would lose most of them."""
    logits, labels = torch.randn(50, 97).to(dtype), torch.randint(0, 97, (50,))
    loss = cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert_equal(loss.double(), hand_cross_entropy(logits, labels) / 50)


def test_regression_by_hand():
    """Squared error, per number."""
    logits, labels = torch.randn(6, 1), torch.randn(6)
    expected = (logits[:, 0].double() - labels.double()).square().mean()
    assert_equal(classification_loss(logits, labels, None).double(), expected)
    logits, labels = torch.randn(6, 3), torch.randn(6, 3)
    expected = (logits.double() - labels.double()).square().mean()
    assert_equal(classification_loss(logits, labels, "regression").double(), expected)


def test_multi_label_by_hand():
    """-y log s(x) - (1 - y) log(1 - s(x)), per label."""
    logits, labels = torch.randn(6, 3), torch.randint(0, 2, (6, 3)).float()
    p, y = logits.double().sigmoid(), labels.double()
    expected = (-y * p.log() - (1 - y) * (1 - p).log()).mean()
    assert_equal(classification_loss(logits, labels, None).double(), expected)


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_ignored_numbers(problem_type):
    """-100 is ignored among numbers too, which a trainer does not count either."""
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.randint(0, 2, (4, 3)).float()
    labels[1, 2] = labels[3] = -100
    kept = labels != -100
    expected = classification_loss(logits[kept][:, None], labels[kept][:, None], problem_type)
    assert_equal(classification_loss(logits, labels, problem_type), expected)
    assert_equal(classification_loss(logits, labels, problem_type, num_items_in_batch=kept.sum()), expected)
    (gradient,) = torch.autograd.grad(classification_loss(logits, labels, problem_type), logits)
    assert (gradient[~kept] == 0).all()


def test_span_by_hand():
    """The mean over both ends of the cross-entropy over places; an answer outside the text counts nowhere."""
    start_logits, end_logits = torch.randn(2, 4, 9)
    starts, ends = torch.tensor([0, 3, 9, -1]), torch.tensor([2, 8, 20, 3])
    expected = hand_cross_entropy(start_logits, torch.tensor([0, 3, -100, -100])) / 2
    expected = (expected + hand_cross_entropy(end_logits, torch.tensor([2, 8, -100, 3])) / 3) / 2
    assert_equal(span_loss(start_logits, end_logits, starts, ends).double(), expected)
    assert_equal(span_loss(start_logits, end_logits, starts[:, None], ends[:, None]).double(), expected)


@pytest.mark.parametrize("side", SIDES)
def test_a_pad_is_no_answer(side):
    """An answer at a pad counts as one outside the text: it would have a loss of 1e38."""
    model = tiny_model(triptych.TriptychEncoderForQuestionAnswering)
    ids, mask = pad_rows(ragged_rows(6, 4), side, extra=1)
    pads = (1 - mask).argmax(-1)
    first = model(ids[:1], attention_mask=mask[:1], start_positions=ids.new_tensor([5]), end_positions=pads[:1] * 0 + 5)
    inside = torch.stack((ids.new_tensor(5), pads[1]))
    output = model(ids, attention_mask=mask, start_positions=inside, end_positions=inside)
    assert_equal(output.loss, first.loss)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)])
def test_span_with_a_count_by_hand(num_items):
    """Both ends divide by the texts of the whole update, whatever the number of answers in this batch."""
    start_logits, end_logits = torch.randn(2, 4, 9)
    starts, ends = torch.tensor([0, 3, 9, -1]), torch.tensor([2, 8, 20, 3])
    expected = hand_cross_entropy(start_logits, torch.tensor([0, 3, -100, -100]))
    expected = (expected + hand_cross_entropy(end_logits, torch.tensor([2, 8, -100, 3]))) / 7 / 2
    assert_equal(span_loss(start_logits, end_logits, starts, ends, num_items).double(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Every head


class Head:
    """A head, and how examples of its task look: their text has `length` tokens."""

    def __init__(self, model_class: type, task: str, **options):
        self.model_class, self.task, self.options = model_class, task, options

    def model(self, **changes):
        return tiny_model(self.model_class, **{**self.options, **changes})

    @property
    def shifts(self) -> bool:
        return self.model_class is triptych.TriptychForCausalLM

    def example(self, length: int) -> dict[str, torch.Tensor]:
        """Inputs and labels of one text, without a batch axis."""
        ids = random_tokens(length)
        masked = torch.where(torch.rand(length) < 0.5, ids, -100)
        masked[0] = ids[0]
        number = torch.randint(0, LABELS, ())
        return {
            "causal": lambda: dict(input_ids=ids, labels=ids),
            "masked": lambda: dict(input_ids=random_tokens(length), labels=masked),
            "seq2seq": lambda: dict(input_ids=random_tokens(length), labels=random_tokens(length // 2 + 1)),
            "class": lambda: dict(input_ids=ids, labels=number),
            "numbers": lambda: dict(input_ids=ids, labels=torch.randint(0, 2, (LABELS,)).float()),
            "regression": lambda: dict(input_ids=ids, labels=torch.randn(())),
            "tokens": lambda: dict(input_ids=ids, labels=torch.randint(0, LABELS, (length,))),
            "span": lambda: dict(
                input_ids=ids, start_positions=torch.tensor(length // 3), end_positions=torch.tensor(length // 2)
            ),
            "choice": lambda: dict(input_ids=random_tokens(3, length), labels=number % 3),
            "sentence": lambda: dict(input_ids=ids, labels=number % 2),
            "pretraining": lambda: dict(input_ids=random_tokens(length), labels=masked, next_sentence_label=number % 2),
        }[self.task]()

    def collate(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        """One batch, padded on the right; pads have a mask of 0 and a label of -100."""
        batch = {}
        masks = [dict(attention_mask=torch.ones_like(example["input_ids"])) for example in examples]
        examples = [{**example, **mask} for example, mask in zip(examples, masks, strict=True)]
        for name in examples[0]:
            tensors = [example[name] for example in examples]
            if tensors[0].ndim == 0 or (name == "labels" and self.task == "numbers"):
                batch[name] = torch.stack(tensors)
                continue
            padding = -100 if name == "labels" else 0
            # The last axis is the ragged one; `pad_sequence` wants it first.
            padded = pad_sequence([tensor.movedim(-1, 0) for tensor in tensors], True, padding)
            batch[name] = padded.movedim(1, -1)
        return batch

    def count(self, batches: list[dict]) -> torch.Tensor | int:
        """The labels of all batches, as transformers' Trainer counts them; the texts, where spans are the labels."""
        if self.task == "span":
            return sum(len(batch["input_ids"]) for batch in batches)
        start = 1 if self.shifts else 0
        return sum((batch["labels"][..., start:] != -100).sum() for batch in batches)


HEADS = {
    "causal": Head(triptych.TriptychForCausalLM, "causal"),
    "masked": Head(triptych.TriptychForMaskedLM, "masked"),
    "seq2seq": Head(triptych.TriptychForConditionalGeneration, "seq2seq"),
    "pretraining": Head(triptych.TriptychEncoderForPreTraining, "pretraining"),
    "sentence": Head(triptych.TriptychEncoderForNextSentencePrediction, "sentence"),
    "choice": Head(triptych.TriptychEncoderForMultipleChoice, "choice"),
}
for panel in ("Encoder", "Decoder"):
    for task, head, options in (
        ("class", "SequenceClassification", {"num_labels": LABELS}),
        ("regression", "SequenceClassification", {"num_labels": 1}),
        ("numbers", "SequenceClassification", {"num_labels": LABELS, "problem_type": "multi_label_classification"}),
        ("tokens", "TokenClassification", {"num_labels": LABELS}),
        ("span", "QuestionAnswering", {}),
    ):
        HEADS[f"{panel.lower()} {task}"] = Head(getattr(triptych, f"Triptych{panel}For{head}"), task, **options)
SENSES = ("ImageClassification", "VideoClassification", "AudioClassification", "MaskedImageModeling")

each_head = pytest.mark.parametrize("name", HEADS)


def test_every_head_is_here():
    """A new head joins the table above, but for those of other senses, whose inputs are no tokens."""
    public = {name for name in triptych.__all__ if "For" in name} - {f"TriptychEncoderFor{task}" for task in SENSES}
    assert {head.model_class.__name__ for head in HEADS.values()} == public


@each_head
@torch.no_grad()
def test_a_tuple_begins_with_the_loss(name):
    """As transformers has it: `return_dict=False` gives the fields in their order."""
    head = HEADS[name]
    model, batch = head.model(), head.collate([head.example(length) for length in (5, 3)])
    output, fields = model(**batch), model(**batch, return_dict=False)
    assert torch.equal(fields[0], output.loss)
    assert len(fields) == len(output)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@each_head
def test_accumulated_gradients_are_those_of_one_batch(name, smoothing):
    """Gradients grow with gradient accumulation because the item count is dropped: 8 x 1 against 1 x 8."""
    head = HEADS[name]
    model = head.model()
    examples = [head.example(length) for length in (3, 9, 4, 12, 5, 7, 3, 10)]
    more = {"label_smoothing": smoothing} if head.task != "span" else {}

    def accumulated(batches):
        more["num_items_in_batch"] = head.count(batches)
        return gradients(model, sum(model(**batch, **more).loss for batch in batches))

    together = accumulated([head.collate(examples)])
    assert any(gradient.abs().max() > 1e-3 for gradient in together.values())
    assert_equal_gradients(accumulated([head.collate([one]) for one in examples]), together, tolerance=1e-5)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
@each_head
def test_nothing_to_learn(name, count):
    """All labels are ignored: a finite loss and no gradient, whether a trainer counted them or not."""
    head = HEADS[name]
    model, batch = head.model(), head.collate([head.example(6), head.example(4)])
    if head.task in ("regression", "numbers"):
        batch["labels"] = batch["labels"].float()
    for key in ("labels", "next_sentence_label", "start_positions", "end_positions"):
        if key in batch:
            batch[key] = torch.full_like(batch[key], -100)
    if head.task == "seq2seq":
        batch["decoder_input_ids"] = random_tokens(2, batch["labels"].shape[1])
    more = {} if count is None else {"num_items_in_batch": count}
    loss = model(**batch, **more).loss
    assert loss.item() == 0
    for key, gradient in gradients(model, loss).items():
        assert (gradient == 0).all(), key


FULL = dict(
    attention_bias=True,
    qk_norm=True,
    mlp_type="gated",
    norm_position="sandwich",
    position_embedding_type="relative",
    embedding_size=16,
    embedding_norm=True,
    type_vocab_size=2,
)
MIXTURES = {"plain": {}, "full": FULL, "learned": {"position_embedding_type": "learned", "norm_position": "pre"}}
MIXTURES["untied"] = {"tie_word_embeddings": False}
MIXTURES["shared layers"] = {"share_layers": True, "num_key_value_heads": 2}


@pytest.mark.parametrize("mixture", MIXTURES)
@each_head
def test_every_parameter_has_a_gradient(name, mixture):
    """Unused pooler breaks DDP: after backward each trainable parameter has a gradient."""
    head = HEADS[name]
    options = MIXTURES[mixture]
    if mixture == "untied" and head.task == "seq2seq":
        options = {**options, "share_embeddings": False}
    model = head.model(**options).train()
    batch = head.collate([head.example(6), head.example(4)])
    got = gradients(model, model(**batch).loss)
    missing = {key for key, parameter in model.named_parameters() if parameter.requires_grad} - got.keys()
    assert not missing
    # A bias on all keys, places or choices leaves the softmax over them as it is: a gradient of zero by mathematics.
    without_effect = "k_proj.bias", {"choice": "classifier.bias"}.get(head.task, "qa_outputs.bias")
    zero = {key for key, gradient in got.items() if (gradient == 0).all() and not key.endswith(without_effect)}
    assert not zero


# ---------------------------------------------------------------------------------------------------------------------
# Shifts, pads, documents


def test_causal_labels_are_shifted_once():
    """Labels shifted twice, or not at all: causal loss = CE(logits[:, :-1], labels[:, 1:])."""
    model, ids = tiny_model("decoder"), random_tokens(3, 7)
    output = model(ids, labels=ids)
    assert_equal(output.loss, F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


@pytest.mark.parametrize("topology", ["encoder", "encoder_decoder"])
def test_other_labels_stay_in_place(topology):
    """Labels shifted twice, or not at all: masked and encoder-decoder loss = CE(logits, labels)."""
    model, ids, labels = tiny_model(topology), random_tokens(3, 7), random_tokens(3, 7)
    labels[0, 3:] = -100
    output = model(input_ids=ids, labels=labels)
    assert_equal(output.loss, F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


def test_shifted_labels_are_taken_as_they_are():
    """`shift_labels`, as sequence parallelism and padding-free collators give them."""
    model, ids, labels = tiny_model("decoder"), random_tokens(2, 6), random_tokens(2, 6)
    labels[1, :2] = -100
    output = model(ids, shift_labels=labels)
    assert_equal(output.loss, F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


def test_decoder_inputs_are_the_labels_one_later():
    """Teacher forcing starts with `decoder_start_token_id`, and an ignored label becomes a pad."""
    model = tiny_model("encoder_decoder", decoder_start_token_id=7)
    source, labels = random_tokens(2, 5), torch.tensor([[11, 12, 13], [14, -100, -100]])
    inputs = torch.tensor([[7, 11, 12], [7, 14, 0]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), inputs)
    assert_equal(
        model(input_ids=source, labels=labels).logits, model(input_ids=source, decoder_input_ids=inputs).logits, 0
    )


@pytest.mark.parametrize("side", SIDES)
def test_pads_predict_nothing(side):
    """The loss of a padded batch is that of the texts alone, even if pads carry labels."""
    model, texts = tiny_model("decoder"), Ragged("decoder", side)
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in texts.rows]
    expected = sum(alone) / sum(len(row) - 1 for row in texts.rows)
    for labels in (texts.labels, texts.batch["input_ids"]):
        assert_equal(model(**texts.batch, labels=labels, use_cache=False).loss, expected)


@pytest.mark.parametrize("form", ["position_ids", "seq_idx"])
def test_documents_predict_nothing_of_each_other(form):
    """Resetting positions alone does not isolate packed documents: A's last token does not score B's first."""
    model, documents = tiny_model("decoder"), ragged_rows(4, 6, 3)
    ids = torch.cat(documents)[None]
    where = {
        "position_ids": torch.cat([torch.arange(len(row)) for row in documents])[None],
        "seq_idx": torch.cat([torch.full((len(row),), index) for index, row in enumerate(documents)])[None],
    }
    alone = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in documents]
    loss = model(ids, labels=ids, **{form: where[form]}).loss
    assert_equal(loss, sum(alone) / sum(len(row) - 1 for row in documents))


def test_labels_of_a_single_token():
    """One token has nothing to predict: a loss of zero that can be differentiated."""
    model = tiny_model("decoder")
    loss = model(random_tokens(1, 1), labels=random_tokens(1, 1)).loss
    assert loss.item() == 0
    loss.backward()


def test_a_real_end_of_sequence_keeps_its_label():
    """End-of-sequence labels vanish when pad = eos: the loss asks the mask and -100, never the token id."""
    model = tiny_model("decoder", pad_token_id=2, eos_token_id=2)
    ids, mask = pad_rows([torch.tensor([5, 6, 7, 2]), torch.tensor([8, 2])], "right")
    ids = ids.masked_fill(mask == 0, 2)
    output = model(ids, attention_mask=mask, labels=ids)
    logits = torch.cat((output.logits[0, :3], output.logits[1, :1]))
    assert_equal(output.loss, F.cross_entropy(logits, torch.tensor([6, 7, 2, 2])))


# ---------------------------------------------------------------------------------------------------------------------
# Label smoothing


@pytest.mark.parametrize("name", ["causal", "masked", "seq2seq", "encoder tokens", "encoder class", "choice"])
def test_trainers_label_smoothing_is_ours(name, tmp_path):
    """`label_smoothing_factor` gives what `label_smoothing` gives, and a causal head's labels are shifted once."""
    head = HEADS[name]
    model, batch = head.model(), head.collate([head.example(6), head.example(4)])
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    trainer = Trainer(model, arguments)
    expected = model(**batch, label_smoothing=0.1).loss
    if head.task == "seq2seq":  # the trainer takes the labels away, so the collator makes the decoder's inputs
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert_equal(trainer.compute_loss(model, dict(batch)), expected)
    count = head.count([batch])
    actual = trainer.compute_loss(model, dict(batch), num_items_in_batch=2 * count)
    assert_equal(actual, model(**batch, label_smoothing=0.1, num_items_in_batch=2 * count).loss)
    assert_equal(actual, expected / 2)


def test_trainer_counts_what_the_loss_sums(tmp_path):
    """Trainer's own count of labels, for every head: a batch counted alone has its plain loss."""
    for name, head in HEADS.items():
        if head.task == "pretraining":  # counted, its sentences weigh as their tokens do; see the head
            continue
        model, batch = head.model(), head.collate([head.example(6), head.example(4)])
        trainer = Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to=[]))
        assert trainer.model_accepts_loss_kwargs
        count = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
        assert_equal(trainer.compute_loss(model, dict(batch), num_items_in_batch=count), model(**batch).loss, what=name)


@each_head
def test_trainer_evaluates(name, tmp_path):
    """An argument taken for labels: `evaluate()` finds that one missing, and reports no loss."""
    head = HEADS[name]
    model, examples = head.model(), [head.example(6), head.example(4)]
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    metrics = Trainer(model, arguments, data_collator=head.collate, eval_dataset=examples).evaluate()
    batch = head.collate(examples)
    expected = model(**batch, num_items_in_batch=head.count([batch])).loss.item()
    assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-5)
