"""Changes to imported models: exact where it is promised, and what the weights become where it is not."""

import pytest
import torch
import transformers
from sources import LENGTH, VOCAB, build_source
from test_conversion import batch_for
from tiny import assert_equal, randomised, tiny_model

import triptych


@pytest.fixture
def bert():
    return build_source("bert", "", "BertForMaskedLM")


@pytest.fixture
def gpt2():
    return build_source("gpt2", "", "GPT2LMHeadModel")


def said(caplog) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


def test_a_window_wider_than_the_text_changes_nothing(bert, caplog):
    batch = batch_for("BertForMaskedLM", bert.config)
    real = batch["attention_mask"].bool()
    expected = bert(**batch).logits
    for changes in ({"sliding_window": 2 * LENGTH}, {"attention_chunk_size": LENGTH}):
        ours = triptych.import_model(bert, **changes)
        assert "full_attention" not in ours.config.layer_types
        assert_equal(ours(**batch).logits[real], expected[real], tolerance=2e-5)
    assert "exact where windows or chunks hold the whole text" in said(caplog)
    narrow = triptych.import_model(bert, sliding_window=2)
    assert (narrow(**batch).logits[real] - expected[real]).abs().max() > 0.1


def test_windows_are_taken_away(caplog):
    ours = tiny_model("decoder", sliding_window=8)
    full = triptych.import_model(ours, layer_types=["full_attention"] * 2)
    assert "attention is full: exact where the source's windows or chunks hold the whole text" in said(caplog)
    ids = torch.randint(3, 97, (2, 12))
    difference = (full(ids).logits - ours(ids).logits).abs().amax((0, 2))
    assert difference[:8].max() < 1e-5 and difference[8:].min() > 1e-3


def test_some_layers_local(gpt2):
    types = ["full_attention", "sliding_attention", "full_attention"]
    ours = triptych.import_model(gpt2, layer_types=types, sliding_window=5)
    assert ours.config.layer_types == types
    ids = torch.randint(3, VOCAB, (2, 5))
    assert_equal(ours(ids).logits, gpt2(ids).logits)


def test_global_tokens_widen_a_window_until_it_sees_all(bert):
    """A window too narrow for the text, and as many global tokens as it has."""
    batch = batch_for("BertForMaskedLM", bert.config)
    real = batch["attention_mask"].bool()
    expected = bert(**batch).logits[real]
    wide = triptych.import_model(bert, sliding_window=2, num_global_tokens=LENGTH)
    assert_equal(wide(**batch).logits[real], expected, tolerance=2e-5)
    for pattern in ({"attention_dilation": 2}, {"num_random_blocks": 1, "random_block_size": 1}):
        sparse = triptych.import_model(bert, sliding_window=2, **pattern)
        assert (sparse(**batch).logits[real] - expected).abs().max() > 0.1


@pytest.mark.parametrize("decay", ["none", "fixed", "gated"])
@pytest.mark.parametrize("feature_map", ["elu", "hedgehog"])
def test_softmax_becomes_linear_with_its_weights(gpt2, tmp_path, feature_map, decay, caplog):
    """What both kinds of attention have is the source's, and the rest is what a new model begins with."""
    types = ["linear_attention", "full_attention", "linear_attention"]
    ours = triptych.import_model(gpt2, layer_types=types, linear_feature_map=feature_map, linear_decay=decay)
    assert "attention of 2 layers is linear: needs training" in said(caplog)
    plain = triptych.import_model(gpt2)
    old, new = plain.state_dict(), ours.state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())
    begun = new.keys() - old.keys()
    assert all(name.split(".")[2] in ("0", "2") and new[name].isfinite().all() for name in begun)
    assert bool(begun) == (feature_map == "hedgehog" or decay == "gated")
    if feature_map == "hedgehog":
        weight = new["model.layers.0.self_attn.q_features.weight"]
        assert torch.equal(weight, torch.eye(weight.shape[-1]).expand_as(weight))
    ids = torch.randint(3, VOCAB, (2, 9))
    assert (ours(ids).logits - plain(ids).logits).abs().max() > 0.1
    ours.save_pretrained(tmp_path)
    assert_equal(type(ours).from_pretrained(tmp_path)(ids).logits, ours(ids).logits)


def test_linear_kinds_that_read_weights_otherwise_are_refused(gpt2):
    types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="`linear_feature_map` is 'unit', but must be 'elu' or 'hedgehog'"):
        triptych.import_model(gpt2, layer_types=types, linear_feature_map="unit")
    for field, value in (("linear_update", "delta"), ("linear_conv_kernel", 4), ("linear_output_gate", True)):
        with pytest.raises(ValueError, match=f"`{field}` cannot be changed"):
            triptych.import_model(gpt2, layer_types=types, **{field: value})


def test_longer_learned_positions_are_interpolated_between_the_old_ones(caplog):
    theirs = build_source("roberta", "", "RobertaForMaskedLM")
    old = theirs.roberta.embeddings.position_embeddings.weight  # pads, then positions
    offset = theirs.config.pad_token_id + 1
    count = len(old) - offset
    ours = triptych.import_model(theirs, max_position_embeddings=2 * count - 1)
    new = ours.model.embed_positions.weight
    assert torch.equal(new[:offset], old[:offset])
    assert_equal(new[offset::2], old[offset:])
    assert_equal(new[offset + 1 :: 2], (old[offset:-1] + old[offset + 1 :]) / 2)
    assert f"{count} learned positions are stretched to {2 * count - 1}: needs training" in said(caplog)
    ids = torch.randint(3, VOCAB, (1, 2 * count - 1))
    assert ours(ids).logits.isfinite().all()


def test_fewer_learned_positions_are_the_first(gpt2):
    ours = triptych.import_model(gpt2, max_position_embeddings=7)
    ids = torch.randint(3, VOCAB, (2, 7))
    assert_equal(ours(ids).logits, gpt2(ids).logits)
    with pytest.raises(ValueError, match="`max_position_embeddings` is 7"):
        ours(torch.randint(3, VOCAB, (2, 8)))


def test_rotary_models_need_no_table():
    theirs = build_source("qwen2", "", "Qwen2ForCausalLM")
    ids = torch.randint(3, VOCAB, (2, 9))
    ours = triptych.import_model(theirs, max_position_embeddings=4096)
    assert_equal(ours(ids).logits, theirs(ids).logits)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    theirs.config.rope_parameters = scaled
    expected = type(theirs).from_pretrained(None, config=theirs.config, state_dict=theirs.state_dict())
    ours = triptych.import_model(build_source("qwen2", "", "Qwen2ForCausalLM"), rope_parameters=scaled)
    assert_equal(ours(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(("changes", "kept"), [({"layers": [0, 2]}, [0, 2]), ({"num_hidden_layers": 2}, [0, 2])])
def test_chosen_layers(gpt2, changes, kept, caplog):
    ours = triptych.import_model(gpt2, **changes)
    gpt2.transformer.h = torch.nn.ModuleList([gpt2.transformer.h[layer] for layer in kept])
    gpt2.config.n_layer = len(kept)
    for number, layer in enumerate(gpt2.transformer.h):
        layer.attn.layer_idx = number
    ids = torch.randint(3, VOCAB, (2, 9))
    assert_equal(ours(ids).logits, gpt2(ids).logits)
    assert "layers 0, 2 of 3 are kept: needs training" in said(caplog)


def test_grouped_heads_are_means():
    """Where the heads of each group are equal, pooling them is exact."""
    theirs = build_source("qwen2", "", "Qwen2ForCausalLM")
    config = transformers.Qwen2Config(**{**theirs.config.to_dict(), "num_key_value_heads": 6})
    wide = transformers.Qwen2ForCausalLM(config).eval()
    state = theirs.state_dict()
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = tensor.unflatten(0, (2, -1)).repeat_interleave(3, 0).flatten(0, 1)
    wide.load_state_dict(state)
    ids = torch.randint(3, VOCAB, (2, 9))
    ours = triptych.import_model(wide, num_key_value_heads=2)
    assert ours.config.num_key_value_heads == 2
    assert_equal(ours(ids).logits, theirs(ids).logits)

    wide = build_source("gpt2", "", "GPT2LMHeadModel")
    full = triptych.import_model(wide)
    pooled = triptych.import_model(wide, num_key_value_heads=3)
    old, new = (model.model.layers[1].self_attn.k_proj.weight for model in (full, pooled))
    assert_equal(new[:6], (old[:6] + old[6:12]) / 2)


def test_an_encoder_decoder_changes_in_both_stacks_or_one():
    theirs = build_source("bart", "", "BartForConditionalGeneration")
    batch = batch_for("BartForConditionalGeneration", theirs.config)
    expected = theirs(**batch).logits
    ours = triptych.import_model(theirs, sliding_window=2 * LENGTH)
    assert set(ours.config.encoder.layer_types + ours.config.decoder.layer_types) == {"sliding_attention"}
    assert_equal(ours(**batch).logits, expected)
    ours = triptych.import_model(theirs, encoder={"sliding_window": 2 * LENGTH}, decoder={"layers": [1]})
    assert (ours.config.encoder.num_hidden_layers, ours.config.decoder.num_hidden_layers) == (3, 1)
    assert set(ours.config.decoder.layer_types) == {"full_attention"}
    assert ours(**batch).logits.isfinite().all()


def test_models_of_the_family_are_changed_alike(tmp_path):
    ours = randomised(tiny_model("decoder", position_embedding_type="learned", num_hidden_layers=3))
    ours.save_pretrained(tmp_path)
    ids = torch.randint(3, 97, (2, 9))
    for source in (ours, tmp_path):
        changed = triptych.import_model(source, sliding_window=9, max_position_embeddings=9, hidden_dropout=0.3)
        assert changed is not ours and changed.config.hidden_dropout == 0.3
        assert_equal(changed(ids).logits, ours(ids).logits)


def test_recurrent_layers_are_chosen_with_those_that_read_the_encoder():
    fields = dict(num_hidden_layers=3, layer_types=["lstm"] * 3, position_embedding_type="none")
    ours = tiny_model("encoder_decoder", **fields, decoder={"cross_attention_layers": [1, 2]})
    changed = triptych.import_model(ours, layers=[0, 2])
    assert changed.config.decoder.cross_attention_layers == [1]
    old, new = ours.model.decoder.layers[2].state_dict(), changed.model.decoder.layers[1].state_dict()
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_a_backend_is_chosen_at_import(bert):
    assert triptych.import_model(bert, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="attn_implementation"):
        triptych.import_model(bert, attn_implementation="nonsense")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 24}, "`hidden_size` cannot be changed, as the weights would lose their meaning; what can is"),
        ({"norm_position": "post"}, "`norm_position` cannot be changed"),
        ({"num_key_value_heads": 4}, "`num_key_value_heads` is 4, but must divide the 6 of the source"),
        ({"num_hidden_layers": 4}, "`num_hidden_layers` is 4, but must be from 1 to 3"),
        ({"layers": [2, 1]}, r"`layers` is \[2, 1\], but must be rising numbers from 0 to 2"),
        ({"layers": [0, 3]}, r"`layers` is \[0, 3\], but must be rising numbers from 0 to 2"),
        ({"layer_types": ["sliding_attention"] * 3}, "`sliding_window` is None"),
        (
            {"layer_types": ["full_attention", "lstm", "full_attention"]},
            "attention and recurrences cannot change places",
        ),
    ],
)
def test_a_change_without_meaning_is_refused(gpt2, changes, sentence):
    with pytest.raises(Exception, match=sentence):
        triptych.import_model(gpt2, **changes)
