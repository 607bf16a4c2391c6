"""Whole trainings with a teacher: by recipe, on what the teacher writes, and in transformers' Trainer."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from small_files import make_recipe, metrics_of, write_files
from test_distillation import EVERY_SIGNAL, SIGNALS, SMALL, batch_of, build, recipe_of, texts_for
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainingArguments

from triptych.training import run as run_module
from triptych.training import sequence_distillation
from triptych.training.building import build_parts
from triptych.training.distillation import PROJECTIONS
from triptych.training.distillation_trainer import DistillationTrainer
from triptych.training.errors import UserError
from triptych.training.evaluation import generate_texts, load_model
from triptych.training.recipe import load_recipe
from triptych.training.run import train
from triptych.training.sequence_distillation import answer_line, read_answers

PAIR = ("seq2seq", "encoder_decoder")
WEIGHTS = [f"distillation.{name}.weight=1" for name in ("outputs", "hidden_states", "attentions", "relations")]
NARROW = ["model.hidden_size=8", "model.attn_implementation=eager"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def teacher(files, tmp_path_factory):
    """The folder of a model of two layers that has learnt little."""
    place = tmp_path_factory.mktemp("teacher")
    return train(make_recipe(files, place, *PAIR, "model.num_hidden_layers=2", "generation.num_beams=2")).folder


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take longer than the training."""
    monkeypatch.setattr(run_module, "plot_losses", lambda *_: None)


@pytest.fixture
def recipe_with(files, teacher, tmp_path):
    """Recipes of a student of one layer that has this teacher."""
    return lambda *changes: make_recipe(files, tmp_path, *PAIR, f"distillation.teacher={teacher}", *changes)


def test_a_recipe_leaves_a_student_without_its_projections(recipe_with, teacher):
    steps = ("max_steps=12", "validate_every=12", "warmup_steps=1", "learning_rate=3e-2")
    run = train(recipe_with(*WEIGHTS, *NARROW, *steps))
    losses = metrics_of(run, "loss")
    assert losses[-1] < 0.8 * losses[0]
    model, info = AutoModelForSeq2SeqLM.from_pretrained(run.folder, output_loading_info=True)
    assert not any(info.values()) and model.config.decoder.hidden_size == 8
    assert run.best_loss == pytest.approx(metrics_of(run, "validation_loss")[-1])
    assert (run.folder / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()
    assert load_recipe(str(run.folder / "recipe.yaml")).tokenizer.path == str(teacher)


def test_a_mean_of_checkpoints_has_no_projections_either(recipe_with):
    run = train(recipe_with(*WEIGHTS, *NARROW, "average_checkpoints=2", "validate_every=1"))
    assert not any(PROJECTIONS in name for name in load_file(run.folder / "model.safetensors"))
    assert run.best_loss > 0


def test_a_run_is_not_continued_with_another_teacher(recipe_with, teacher, tmp_path):
    mine = shutil.copytree(teacher, tmp_path / "teacher")
    changes = [f"distillation.teacher={mine}", *WEIGHTS[:1], "save_every=1"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_module, "write_model", interrupted)
        train(recipe_with(*changes))
    weights = load_file(mine / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"cannot be continued, as the teacher is another one: change that back"):
        train(recipe_with(*changes))


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_student_begins_as_layers_of_its_teacher(recipe_with, teacher):
    start = "distillation.start_from={encoder: [0, 1], decoder: [1]}"
    model = build_parts(recipe_with("model=", start, "distillation.outputs.weight=1"), processes=1).model
    weights, theirs = model.state_dict(), load_file(teacher / "model.safetensors")
    assert len(model.model.encoder.layers) == 2 and len(model.model.decoder.layers) == 1
    for name, tensor in weights.items():
        name = name.replace("decoder.layers.0", "decoder.layers.1")
        assert name == "lm_head.weight" or torch.equal(tensor, theirs[name])
    assert len(build_parts(recipe_with("model=", "distillation.start_from=[1]"), 1).model.model.encoder.layers) == 1


def test_targets_are_what_the_teacher_writes(recipe_with, teacher, tmp_path, monkeypatch):
    """Another tokenizer will do; the file is written once, and gone on with after a kill."""
    monkeypatch.setattr(sequence_distillation, "BLOCK", 16)
    file = tmp_path / "answers" / "beams.jsonl"
    recipe = recipe_with(f"distillation.sequences={file}", "tokenizer.type=word")
    parts = build_parts(recipe, processes=1)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    expected = generate_texts(*load_model(str(teacher)), [row["source"] for row in rows])
    assert [row["target"] for row in rows] == expected and len(set(expected)) > 1
    targets = [
        parts.tokenizer.decode(row["labels"], skip_special_tokens=True) for row in parts.train_loader.dataset.rows
    ]
    assert [text.split() for text in targets] == [text.split() for text in expected]
    assert recipe.tokenizer.path is None

    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    asked = []
    original = sequence_distillation.generate_texts
    monkeypatch.setattr(sequence_distillation, "generate_texts", lambda *a: asked.append(len(a[2])) or original(*a))
    assert build_parts(recipe, processes=1).fingerprint == parts.fingerprint
    assert asked == [1] and file.read_bytes() == whole
    build_parts(recipe, processes=1)
    assert asked == [1]

    file.write_text(json.dumps({"source": "another", "target": "b"}) + "\n")
    with pytest.raises(UserError, match=r"line 1 of '.*beams.jsonl' is no answer to text 1 of the training data"):
        build_parts(recipe, processes=1)
    file.write_text("no JSON\n")
    with pytest.raises(UserError, match=r"'distillation.sequences': '.*beams.jsonl'"):
        build_parts(recipe, processes=1)


ANSWER = '{"source": "a", "target": "b"}\n'


@pytest.mark.parametrize(
    "content",
    [
        "3\n",
        '["a"]\n',
        '{"source": "a"}\n',
        '{"source": "a", "target": 3}\n',
        "notes",
        '{"a": 1}',
        ANSWER * 2,
        ANSWER + "{",
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    """It used to lose what stands behind its last line break, before anyone looked whether it holds answers."""
    file = tmp_path / "notes.txt"
    file.write_text(content)
    with pytest.raises(UserError, match=r"line \d of '.*notes.txt' is no answer to text \d of the training data"):
        read_answers(file, ["a"])
    assert file.read_text() == content


def test_separators_of_lines_within_a_text_do_not_end_an_answer(tmp_path):
    sources = ["one\u2028two", "three\x85four"]
    file = tmp_path / "beams.jsonl"
    lines = "".join(answer_line(source, source[::-1]) for source in sources)
    file.write_text(lines + lines[:7], newline="")
    assert read_answers(file, [*sources, "five"]) == [source[::-1] for source in sources]
    assert file.read_text() == lines


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["distillation.outputs.weight=-1"], "'distillation.outputs.weight' must be at least 0 and finite, not -1.0"),
        (["distillation.outputs.temperature=0"], "'distillation.outputs.temperature' must be above 0 and finite"),
        (["distillation.outputs.temperature=.inf"], "'distillation.outputs.temperature' must be above 0 and finite"),
        (["distillation.outputs.weight=.inf"], "'distillation.outputs.weight' must be at least 0 and finite, not inf"),
        (["distillation.outputs.top_k=0"], "'distillation.outputs.top_k' must be at least 1, not 0"),
        (["distillation.labels=0"], "'distillation.labels' must be above 0 without any signal, not 0.0"),
        (["distillation.relations.kinds=[key_vale]"], "must be one of query_key, query_query"),
        (["distillation.relations.kinds=[]"], "'distillation.relations.kinds' must be at least one kind"),
        (
            ["distillation.teacher=", *WEIGHTS],
            "'distillation.teacher' must be a trained model's folder, as distillation.",
        ),
        (
            ["model.path=a", "distillation.start_from=[0]"],
            "'model.path' must be left out, as distillation.start_from is",
        ),
        (["distillation.teacher=runs/teacher"], "'distillation.teacher' must be null, as nothing is asked of it"),
        (["distillation.techer=a"], "did you mean 'distillation.teacher'?"),
    ],
)
def test_bad_recipes_are_refused(recipe_with, changes, sentence):
    with pytest.raises(UserError) as error:
        recipe_with(*changes)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["distillation.teacher=runs/sst2", WEIGHTS[0]],
            "'distillation.teacher': there is no 'runs/sst2' yet, make it",
        ),
        (["distillation.teacher=nowhere", WEIGHTS[0]], "'nowhere'"),
        ([WEIGHTS[2]], r"the student \(.*\) .* its attn_implementation must be eager"),
        (["model=", "distillation.start_from=[2]"], r"`layers` is \[2\], but must be rising numbers from 0 to 1"),
        (["distillation.start_from=[0]"], "`hidden_size` cannot be changed"),
    ],
)
def test_students_that_do_not_fit_are_refused(recipe_with, changes, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        build_parts(recipe_with(*changes), processes=1)
    assert "\n" not in str(error.value)


def test_only_pairs_have_targets_to_write(files, teacher, tmp_path):
    changes = [f"distillation.teacher={teacher}", "distillation.sequences=a"]
    with pytest.raises(UserError, match=r"'distillation.sequences' must be null, unless the objective is seq2seq"):
        build_parts(make_recipe(files, tmp_path, "masked_lm", "encoder", *changes), processes=1)


def test_another_tokenizer_is_refused_with_both_named(recipe_with, files, teacher, tmp_path):
    other = tmp_path / "other"
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    said = rf"'tokenizer.path' is '{other}' \(\d+ tokens\), but must be '{teacher}' \(\d+ tokens\) or null"
    with pytest.raises(UserError, match=said):
        build_parts(recipe_with(WEIGHTS[0], f"tokenizer.path={other}"), processes=1)


def test_the_command_needs_a_teacher(command, tmp_path):
    code, _, err = command("distill", "dates")
    assert code == 2 and "'distillation.teacher' must be a trained model's folder, not null" in err
    assert not list(tmp_path.iterdir())


def test_the_command_trains(command, recipe_with):
    recipe = recipe_with(WEIGHTS[0])
    code, out, err = command("distill", recipe.output.replace("run", "mine.yaml"), *NARROW, *WEIGHTS[:1], "max_steps=1",
                             f"distillation.teacher={recipe.distillation.teacher}")  # fmt: skip
    assert code == 0, err
    assert "validation loss" in out


def trained_by_trainer(folder, batch_size, accumulation):
    student, texts = build("decoder", seed=1, **SMALL), texts_for("decoder", [7, 4, 5, 6])
    whole = batch_of(texts)
    rows = Dataset.from_list([{name: value[row] for name, value in whole.items()} for row in range(4)])
    options = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, num_train_epochs=2,
        optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="epoch", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = DistillationTrainer(
        student, teacher=build("decoder"), distillation=recipe_of(1.0, **EVERY_SIGNAL), args=options, train_dataset=rows
    )
    expected = student.train()(**whole).loss.item()
    trainer.train()
    return trainer, expected


def test_trainer_has_the_same_loss_however_it_accumulates(tmp_path):
    """The loss is that of the loop: the model's own, in training."""
    (one, expected), (other, _) = (trained_by_trainer(tmp_path / str(size), size, 4 // size) for size in (4, 1))
    for trainer in (one, other):
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
        checkpoint = load_file(
            tmp_path / str(trainer.args.per_device_train_batch_size) / "checkpoint-1/model.safetensors"
        )
        assert f"{PROJECTIONS}.stack.weight" in checkpoint
        assert not any(PROJECTIONS in name for name in trainer.model.state_dict())
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(tensor, other.model.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_evaluation_in_trainer_is_of_the_labels_alone(tmp_path):
    student, batch = build("encoder", seed=1, **SMALL), batch_of(texts_for("encoder"))
    rows = Dataset.from_list([{name: value[row] for name, value in batch.items()} for row in range(3)])
    expected = student(**batch).loss.item()
    options = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = DistillationTrainer(
        student, teacher=build("encoder"), distillation=recipe_of(**SIGNALS["outputs"]), args=options, eval_dataset=rows
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
