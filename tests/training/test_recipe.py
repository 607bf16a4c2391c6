import pytest

from triptych.configs import recipe_names
from triptych.training.errors import UserError
from triptych.training.recipe import Recipe, load_recipe, save_recipe


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_read(name):
    recipe = load_recipe(name)
    assert recipe.output == f"runs/{name}"
    assert recipe.model


def test_changes_reach_every_level_with_their_types():
    recipe = load_recipe(
        "dates",
        [
            "max_steps=7",
            "learning_rate=1e-4",
            "model.hidden_size=64",
            "model.encoder.num_hidden_layers=3",
            "data.dates.train=50",
            "max_grad_norm=",
            "overwrite=true",
            "mixed_precision=bf16",
            "adam_betas=[0.9, 0.999]",
        ],
    )
    assert (recipe.max_steps, recipe.learning_rate, recipe.max_grad_norm) == (7, 1e-4, None)
    assert recipe.model["hidden_size"] == 64
    assert recipe.model["encoder"] == {"num_hidden_layers": 3}
    assert recipe.data.dates["train"] == 50
    assert recipe.overwrite is True
    assert recipe.mixed_precision == "bf16"
    assert recipe.adam_betas == [0.9, 0.999]


def test_a_section_without_keys_takes_changes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model:\ndata: {dates: {train: 5, validation: 5}}\n")
    assert load_recipe(str(path), ["model.hidden_size=64"]).model == {"hidden_size": 64}


def test_a_saved_recipe_reads_back_equal(tmp_path):
    recipe = load_recipe("multi30k_en_de", ["learning_rate=1e-7", "max_grad_norm=null"])
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe


def test_a_recipe_is_found_by_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data: {splits: {train: a.tsv, validation: [b.en, b.de]}}\nmax_steps: 3\n")
    recipe = load_recipe(str(path))
    assert recipe.data.splits == {"train": "a.tsv", "validation": ["b.en", "b.de"]}
    assert recipe.max_steps == 3
    assert recipe.seed == Recipe().seed
    assert recipe.output == "runs/mine"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("max_step=3", "recipe key 'max_step' is unknown: did you mean 'max_steps'?"),
        ("data.dats.train=3", "recipe key 'data.dats' is unknown: did you mean 'data.dates'?"),
        ("tokenizer.typ=bpe", "did you mean 'tokenizer.type'?"),
        ("max_steps=many", "recipe key 'max_steps' must be a whole number, not 'many'"),
        ("max_steps=true", "recipe key 'max_steps' must be a whole number, not true"),
        ("max_steps=1.5", "recipe key 'max_steps' must be a whole number, not 1.5"),
        ("max_steps=0", "recipe key 'max_steps' must be at least 1, not 0"),
        ("learning_rate=fast", "recipe key 'learning_rate' must be a number, not 'fast'"),
        ("learning_rate=-1", "recipe key 'learning_rate' must be above 0, not -1.0"),
        ("max_grad_norm=-1", "recipe key 'max_grad_norm' must be above 0 or null, not -1.0"),
        ("max_grad_norm=0", "recipe key 'max_grad_norm' must be above 0 or null, not 0.0"),
        ("adam_epsilon=-1", "recipe key 'adam_epsilon' must be at least 0, not -1.0"),
        ("seed=-1", "recipe key 'seed' must be from 0 to 2^31 - 1, not -1"),
        ("seed=4294967296", "recipe key 'seed' must be from 0 to 2^31 - 1, not 4294967296"),
        ("generation.length_penalty=0.6", "length_penalty' must be 1.0, as generation.num_beams is 1, not 0.6"),
        ("generation={num_beams: 2, length_penalty: .nan}", "length_penalty' must be a number, not nan"),
        ("bleu.tokenize=13b", "recipe key 'bleu.tokenize' must be one of 13a, intl, zh, char, none, not '13b'"),
        ("objective.type=[seq2seq]", "recipe key 'objective.type' must be text or null, not ['seq2seq']"),
        ("model.topology=[encoder]", "recipe key 'model.topology' must be text or null, not ['encoder']"),
        ("model.path=5", "recipe key 'model.path' must be text or null, not 5"),
        ("model.attn_implementation=5", "recipe key 'model.attn_implementation' must be text or null, not 5"),
        ("model.encoder=5", "recipe key 'model.encoder' must be a section of keys, not 5"),
        ("label_smoothing=1", "recipe key 'label_smoothing' must be in [0, 1), not 1.0"),
        ("overwrite=yes please", "recipe key 'overwrite' must be true or false, not 'yes please'"),
        ("schedule=cosin", "must be one of inverse_sqrt, cosine, linear, trapezoidal, not 'cosin'"),
        ("mixed_precision=no", "recipe key 'mixed_precision' must be one of bf16, fp16 or null, not false"),
        ("tokenizer=char", "recipe key 'tokenizer' must be a section of keys, not 'char'"),
        ("data.dates.train=few", "recipe key 'data.dates.train' must be a whole number"),
        ("keep_checkpoints=0", "recipe key 'keep_checkpoints' must be at least 1, not 0"),
        ("data.max_length=0", "recipe key 'data.max_length' must be at least 1, not 0"),
        ("average_checkpoints=-1", "recipe key 'average_checkpoints' must be at least 0, not -1"),
        ("tokenizer.dropout=1.5", "recipe key 'tokenizer.dropout' must be in [0, 1], not 1.5"),
        ("data.splits={train: [{fil: a}], validation: b}", "recipe key 'data.splits.train"),
        ("adam_betas=[0.9]", "recipe key 'adam_betas' must be two numbers in [0, 1)"),
        ("data.splits={train: a, validation: b}", "exactly one of splits, dates, recall"),
        ("seed.more=1", "'seed.more=1' holds one value, not a section"),
        ("max_steps", "'max_steps' is no change of a recipe: write key=value"),
        ("max_steps=[1", "is not YAML"),
    ],
)
def test_a_bad_change_is_refused_by_name(change, sentence):
    with pytest.raises(UserError) as error:
        load_recipe("dates", ["seed=1", change])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", ["trapezoidal", "inverse_sqrt"])
def test_warm_up_and_cooldown_must_fit_into_the_updates(schedule):
    changes = [f"schedule={schedule}", "max_steps=100", "warmup_steps=20"]
    assert load_recipe("dates", [*changes, "cooldown_steps=80"]).cooldown_steps == 80
    with pytest.raises(UserError, match="'cooldown_steps' must be at most max_steps - warmup_steps, 80, not 81"):
        load_recipe("dates", [*changes, "cooldown_steps=81"])


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(UserError, match="recipe 'multi30k_en_dee' is unknown: did you mean 'multi30k_en_de'"):
        load_recipe("multi30k_en_dee")
    with pytest.raises(UserError, match="allowed are babi, cola, dates, "):
        load_recipe("zzz")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", "must hold keys with values"),
        ("a: [1\n", "is not YAML"),
        ("data: {dates: {train: 5}}\n", "recipe key 'data.dates' must be train, validation and any tests"),
        ("seed: 1\n", "exactly one of splits, dates, recall"),
    ],
)
def test_a_bad_recipe_file_is_refused(tmp_path, text, sentence):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_recipe(str(path))


def test_a_missing_recipe_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"recipe file '.*none.yaml' cannot be read: No such file"):
        load_recipe(str(tmp_path / "none.yaml"))
