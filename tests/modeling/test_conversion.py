"""Known models come in exactly and go back out: equal outputs, losses, gradients and texts, bitwise equal weights."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sources import CASES, LABELS, SOURCES, SPECIAL, VOCAB, build_source
from tiny import SLOW_FLEX, assert_equal, assert_equal_gradients, pad_rows, tiny_model
from transformers import GenerationConfig

import triptych
from triptych.conversion.registry import find
from triptych.conversion.weights import own_weights, table_of, to_ours

GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
LENGTHS = (11, 7, 9)


def tokens(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, VOCAB, (length,)) for length in lengths]


def batch_for(name: str, config, side: str = "right", sources=None) -> dict:
    """A padded batch of the inputs that a class of theirs takes, without labels."""
    if name.startswith("ViT"):
        sides = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        return dict(pixel_values=torch.randn(3, config.num_channels, *sides))
    ids, mask = pad_rows(sources or tokens(*LENGTHS), side)
    ids = ids.masked_fill(mask == 0, config.pad_token_id)
    batch = dict(input_ids=ids, attention_mask=mask)
    if getattr(config, "type_vocab_size", 0):
        batch["token_type_ids"] = torch.randint(0, config.type_vocab_size, ids.shape)
    if name.endswith("MultipleChoice"):
        batch = {key: torch.stack((value, value.roll(1, 0)), dim=1) for key, value in batch.items()}
    if config.is_encoder_decoder and not name.endswith("EncoderModel"):
        batch["decoder_input_ids"] = torch.randint(3, VOCAB, (len(ids), 6))
    return batch


def real_tokens(batch: dict) -> torch.Tensor | None:
    """Where outputs are compared; everywhere if None."""
    return None if {"decoder_input_ids", "pixel_values"} & batch.keys() else batch["attention_mask"].bool()


def labels_for(name: str, batch: dict) -> dict:
    if name.endswith("ForMaskedImageModeling"):
        return dict(bool_masked_pos=torch.rand(3, 9) < 0.6)
    if "pixel_values" in batch:
        return dict(labels=torch.randint(0, LABELS, (3,))) if name.endswith("Classification") else {}
    ids, rows = batch["input_ids"], len(batch["input_ids"])
    words = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if "decoder_input_ids" in batch:
        words = torch.randint(3, VOCAB, batch["decoder_input_ids"].shape)
        words[1, 4:] = -100
    if name.endswith(("Model",)) and not name.endswith(GENERATIVE):
        return {}
    if name.endswith("ForQuestionAnswering"):
        return dict(start_positions=torch.randint(1, 6, (rows,)), end_positions=torch.randint(1, 6, (rows,)))
    if name.endswith("ForTokenClassification"):
        return dict(labels=torch.randint(0, LABELS, ids.shape).masked_fill(batch["attention_mask"] == 0, -100))
    if name.endswith("ForSequenceClassification"):
        return dict(labels=torch.randint(0, LABELS, (rows,)))
    if name.endswith(("MultipleChoice", "NextSentencePrediction")):
        return dict(labels=torch.randint(0, 2, (rows,)))
    if name.endswith("ForPreTraining"):
        second = "sentence_order_label" if name.startswith("Albert") else "next_sentence_label"
        return {"labels": words, second: torch.randint(0, 2, (rows,))}
    return dict(labels=words)


# What their outputs are called here.
OUTPUTS = {"sop_logits": "seq_relationship_logits"}
OUTPUTS |= {name: name for name in ("logits", "prediction_logits", "seq_relationship_logits")}
OUTPUTS |= {
    name: name for name in ("start_logits", "end_logits", "last_hidden_state", "pooler_output", "reconstruction")
}


def compare(mine, other, real: torch.Tensor | None):
    """All that both outputs say, at real tokens."""
    compared = 0
    for theirs_name, ours_name in OUTPUTS.items():
        expected = other.get(theirs_name)
        if expected is None:
            continue
        actual = mine[ours_name]
        where = real if real is not None and expected.shape[: real.ndim] == real.shape else slice(None)
        # Rounding errors grow with what they are errors of: T5 does not scale its dot products.
        tolerance = 1e-5 * max(1, expected[where].abs().max().item())
        assert_equal(actual[where], expected[where], tolerance=tolerance, what=theirs_name)
        compared += 1
    assert compared
    return compared


@pytest.mark.parametrize(("model_type", "variant", "name"), CASES)
def test_outputs_loss_and_gradients(model_type, variant, name):
    """Conv1D transposes missed, an epsilon differs; T5 tying and output scaling conflated: logits = source."""
    theirs = build_source(model_type, variant, name)
    ours = triptych.import_model(theirs)
    # To us a pad is no answer, and theirs count it as one.
    batch = batch_for(name, theirs.config, sources=tokens(9, 9, 9) if name.endswith("ForQuestionAnswering") else None)
    labels = labels_for(name, batch)
    renamed = {("next_sentence_label" if key == "sentence_order_label" else key): v for key, v in labels.items()}
    real = real_tokens(batch)
    expected = theirs(**batch, **labels, output_hidden_states=True)
    actual = ours(**batch, **renamed, output_hidden_states=True)
    compare(actual, expected, real)
    for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        if expected.get(key) is None:
            continue
        is_of_sources = key != "decoder_hidden_states" and "attention_mask" in batch
        padding = batch["attention_mask"].bool().flatten(0, -2) if is_of_sources else None
        assert len(actual[key]) == len(expected[key])
        compared = list(zip(actual[key], expected[key], strict=True))
        if model_type == "vit":
            compared.pop()  # theirs is from before the last norm
        for mine, other in compared:
            where = slice(None) if padding is None else padding
            tolerance = 1e-5 * max(1, other[where].abs().max().item())
            assert_equal(mine[where], other[where], tolerance=tolerance, what=key)
    if not labels:
        return
    assert_equal(actual.loss, expected.loss, tolerance=1e-5 * max(1, expected.loss.item()), what="loss")
    architecture, head = find(model_type, name)
    table = table_of(architecture, head, theirs, ours.config)
    wanted = to_ours(table, own_gradients(theirs, expected.loss), ours.config)
    got = own_gradients(ours, actual.loss)
    got = {key: value for key, value in got.items() if key in wanted or value.abs().max() > 0}
    got.pop("lm_head.bias", None) if "final_logits_bias" in theirs.state_dict() else None  # a buffer there
    assert_equal_gradients(got, wanted)


def own_gradients(model, loss) -> dict[str, torch.Tensor]:
    """Gradients under the names that weights are saved by; a tied one is a parameter of two names."""
    loss.backward()
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: p.grad for name, p in parameters if p.grad is not None and name not in model.all_tied_weights_keys}


@pytest.mark.parametrize(("model_type", "variant", "name"), CASES)
def test_left_padding(model_type, variant, name):
    """Ours on texts behind pads is theirs on each text alone."""
    theirs = build_source(model_type, variant, name)
    ours = triptych.import_model(theirs)
    if name.endswith("MultipleChoice") or name.startswith("ViT"):
        pytest.skip("images have no pads, and texts of several choices have them as any others")
    texts = tokens(*LENGTHS)
    batch = batch_for(name, theirs.config, "left", texts)
    output = ours(**batch)
    for row, text in enumerate(texts):
        alone = {key: value[row : row + 1] for key, value in batch.items()}
        for key in set(alone) - {"decoder_input_ids"}:
            alone[key] = alone[key][:, -len(text) :]
        expected = theirs(**alone)
        mine = {key: value[row : row + 1] for key, value in output.items() if isinstance(value, torch.Tensor)}
        for key, value in mine.items():
            if value.ndim > 1 and value.shape[1] == batch["input_ids"].shape[1]:
                mine[key] = value[:, -len(text) :]
        compare(mine, expected, None)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("model_type", "variant", "name"), [case for case in CASES if case[2].endswith(GENERATIVE)])
def test_generation(model_type, variant, name, beams):
    """Greedy and beam search from left-padded prompts give their tokens of each prompt alone, cached and not."""
    theirs = build_source(model_type, variant, name)
    ours = triptych.import_model(theirs)
    settings = GenerationConfig(
        max_new_tokens=10,
        num_beams=beams,
        do_sample=False,
        repetition_penalty=1.3,
        decoder_start_token_id=getattr(theirs.config, "decoder_start_token_id", None),
        **SPECIAL,
    )
    prompts = tokens(9, 5, 7)
    ids, mask = pad_rows(prompts, "left")
    theirs.generation_config = ours.generation_config = settings
    cached = ours.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    uncached = ours.generate(input_ids=ids, attention_mask=mask, generation_config=settings, use_cache=False)
    start = 0 if theirs.config.is_encoder_decoder else ids.shape[1]
    texts = []
    for row, prompt in enumerate(prompts):
        expected = theirs.generate(input_ids=prompt[None], generation_config=settings)[0]
        texts.append(trimmed(expected[len(prompt) if start else 0 :]))
        assert trimmed(cached[row, start:]) == texts[-1]
        assert trimmed(uncached[row, start:]) == texts[-1]
    assert len({tuple(text) for text in texts}) > 1, "all texts are the same: the comparison says little"


def trimmed(row: torch.Tensor) -> list[int]:
    """Tokens up to the end of the text; what is behind it depends on the longest text of the batch."""
    row = row.tolist()
    end = SPECIAL["eos_token_id"]
    return row[: row.index(end, 1)] if end in row[1:] else row


@pytest.mark.parametrize(("model_type", "variant", "name"), CASES)
def test_weights_go_there_and_back(model_type, variant, name, tmp_path):
    """Bitwise, in both directions, through a saved folder of theirs."""
    theirs = build_source(model_type, variant, name)
    ours = triptych.import_model(theirs)
    triptych.export_model(ours, model_type).save_pretrained(tmp_path)
    back = type(theirs).from_pretrained(tmp_path)
    assert_same_weights(back, theirs)
    assert_same_weights(triptych.import_model(tmp_path), ours)
    assert triptych.import_model(back).config.to_dict() == {
        **ours.config.to_dict(),
        "_name_or_path": triptych.import_model(back).config.to_dict()["_name_or_path"],
    }


def assert_same_weights(actual, expected):
    mine, others = own_weights(actual), own_weights(expected)
    assert mine.keys() == others.keys()
    for key, value in others.items():
        assert mine[key].dtype == value.dtype and torch.equal(mine[key], value), key


LANGUAGE_MODELS = [case for case in CASES if case[2].endswith((*GENERATIVE, "ForMaskedLM"))]


@pytest.mark.parametrize("backend", ["eager", SLOW_FLEX])
@pytest.mark.parametrize(("model_type", "variant", "name"), LANGUAGE_MODELS)
def test_every_backend(model_type, variant, name, backend):
    """sdpa is what all other tests here run on."""
    theirs = build_source(model_type, variant, name)
    if backend == "flex_attention":
        torch._dynamo.reset()
    ours = triptych.import_model(theirs, attn_implementation=backend)
    assert ours.config._attn_implementation == backend
    batch = batch_for(name, theirs.config)
    real = real_tokens(batch)
    with torch.no_grad():
        compare(ours(**batch), theirs(**batch), real)


PREDICTIONS = ("ForMaskedLM", "ForPreTraining")
MASKED = [(model_type, name) for model_type, variant, name in CASES if not variant and name.endswith(PREDICTIONS)]


@pytest.mark.parametrize(("model_type", "name"), MASKED)
def test_a_projection_to_the_vocabulary_of_its_own(model_type, name):
    """BERT and its kin then have two biases of it, of which they add the projection's alone."""
    theirs = build_source(model_type, "", name, tie_word_embeddings=False)
    projection = theirs.get_output_embeddings()
    assert projection.weight is not theirs.get_input_embeddings().weight
    ours = triptych.import_model(theirs)
    back = triptych.export_model(ours, model_type)
    batch = batch_for(name, theirs.config)
    with torch.no_grad():
        for other in (theirs, back):
            compare(ours(**batch), other(**batch), real_tokens(batch))
    mine = own_weights(back)
    idle = {key for key, value in own_weights(theirs).items() if not torch.equal(mine.pop(key), value)}
    assert not mine and all(key.endswith(("predictions.bias", "lm_head.bias")) for key in idle)


def test_pretraining_loss_is_berts_however_the_masked_tokens_lie():
    """The sum of two plain means, as Devlin et al. 2019 have it: a text without masked tokens still has a sentence."""
    theirs = build_source("bert", "", "BertForPreTraining")
    ours = triptych.import_model(theirs)
    batch = batch_for("BertForPreTraining", theirs.config)
    batch |= labels_for("BertForPreTraining", batch)
    batch["labels"][1:] = -100
    assert_equal(ours(**batch).loss, theirs(**batch).loss)


def test_settings_of_generation_names_of_labels_and_dtype_come_along():
    theirs = build_source("bart", "", "BartForConditionalGeneration").to(torch.bfloat16)
    theirs.generation_config.num_beams, theirs.generation_config.no_repeat_ngram_size = 4, 3
    ours = triptych.import_model(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.dtype == torch.bfloat16 and not ours.training
    back = triptych.export_model(ours, "bart")
    assert back.dtype == torch.bfloat16 and back.generation_config.num_beams == 4

    theirs = build_source("roberta", "", "RobertaForSequenceClassification")
    theirs.config.id2label, theirs.config.label2id = {0: "a", 1: "b", 2: "c", 3: "d"}, {"a": 0, "b": 1, "c": 2, "d": 3}
    ours = triptych.import_model(theirs)
    assert ours.config.id2label == theirs.config.id2label
    assert triptych.export_model(ours, "roberta").config.label2id == theirs.config.label2id


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gpt2", "GPT2LMHeadModel"), ("phi3", "Phi3ForCausalLM"), ("bloom", "BloomForCausalLM"), ("vit", "ViTModel")],
)
def test_no_two_weights_share_memory(model_type, name, tmp_path):
    """Views cannot be saved."""
    build_source(model_type, "", name).save_pretrained(tmp_path / "theirs")
    ours = triptych.import_model(tmp_path / "theirs")
    tensors = own_weights(ours).values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    ours.save_pretrained(tmp_path / "ours")
    assert_same_weights(type(ours).from_pretrained(tmp_path / "ours"), ours)


def test_an_imported_model_has_weights_of_its_own():
    theirs = build_source("llama", "", "LlamaForCausalLM")
    ours = triptych.import_model(theirs)
    back = triptych.export_model(ours, "llama")
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    with torch.no_grad():
        for parameter in (*ours.parameters(), *back.parameters()):
            parameter.add_(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in theirs.state_dict().items())
    assert torch.equal(back.lm_head.weight, ours.lm_head.weight)  # both moved by one


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def tiny_source(model_type, name, **settings):
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**{**SOURCES[model_type][""], **settings}))


@pytest.mark.parametrize(
    ("model_type", "name", "settings", "sentence"),
    [
        (
            "gpt2",
            "GPT2LMHeadModel",
            {"scale_attn_by_inverse_layer_idx": True},
            "`scale_attn_by_inverse_layer_idx` = True",
        ),
        ("bert", "BertForMaskedLM", {"is_decoder": True}, "`is_decoder` = True of bert is not supported; False is."),
        ("albert", "AlbertForMaskedLM", {"num_hidden_groups": 3}, "`num_hidden_groups` = 3 of albert is not supported"),
        ("roberta", "RobertaForMaskedLM", {"hidden_act": "relu"}, "`hidden_act` = 'relu' of roberta is not supported"),
        ("modernbert", "ModernBertForMaskedLM", {"classifier_activation": "relu"}, "`classifier_activation` = 'relu'"),
        ("opt", "OPTForCausalLM", {"word_embed_proj_dim": 12}, "`word_embed_proj_dim` = 12 of opt is not supported"),
        ("stablelm", "StableLmForCausalLM", {"qk_layernorm": True}, "`qk_layernorm` = True of stablelm is not"),
        ("bloom", "BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "of bloom is not supported"),
    ],
)
def test_a_feature_that_does_not_fit_is_refused_by_name(model_type, name, settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        triptych.import_model(tiny_source(model_type, name, **settings))


def test_an_architecture_or_head_that_does_not_fit_is_refused_by_name():
    sizes = dict(vocab_size=VOCAB, hidden_size=12, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(ValueError, match="Disentangled attention of deberta is not supported"):
        triptych.import_model(transformers.DebertaModel(transformers.DebertaConfig(**sizes)))
    with pytest.raises(ValueError, match="The architecture 'nystromformer' is not supported; supported are albert, "):
        triptych.import_model(transformers.NystromformerModel(transformers.NystromformerConfig(**sizes)))
    with pytest.raises(ValueError, match="BartForSequenceClassification of bart is not supported; supported are Bart"):
        triptych.import_model(tiny_source("bart", "BartForSequenceClassification"))


def test_what_the_other_architecture_cannot_have_is_refused_by_name():
    with pytest.raises(ValueError, match="`attention_bias` is False, but must be True in bert"):
        triptych.export_model(tiny_model("encoder", norm_position="post"), "bert")
    with pytest.raises(ValueError, match="TriptychForCausalLM has no counterpart in bert"):
        triptych.export_model(tiny_model("decoder"), "bert")
    ours = triptych.import_model(build_source("llama", "", "LlamaForCausalLM"))
    with pytest.raises(ValueError, match="`qk_norm` is False, but must be True in qwen3"):
        triptych.export_model(ours, "qwen3")


def test_one_architecture_leaves_as_another_where_both_have_a_point():
    """Llama without windows is a Mistral without windows."""
    theirs = build_source("llama", "", "LlamaForCausalLM")
    theirs.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = type(theirs).from_pretrained(None, config=theirs.config, state_dict=theirs.state_dict())
    mistral = triptych.export_model(triptych.import_model(theirs), "mistral")
    assert isinstance(mistral, transformers.MistralForCausalLM)
    ids = torch.randint(3, VOCAB, (2, 9))
    assert_equal(mistral(ids).logits, theirs(ids).logits)


@pytest.fixture
def folder(tmp_path):
    """A saved BERT."""
    build_source("bert", "", "BertForMaskedLM").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_pickle_is_refused_with_the_way_to_convert_it(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin' is a pickle.* use_safetensors=False"):
        triptych.import_model(folder)


def test_a_broken_file_is_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for broken in (whole[:-100], whole[:50], b"", b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model.safetensors' is truncated or corrupted"):
            triptych.import_model(folder)


def test_missing_and_unexpected_weights_are_listed(folder, caplog):
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "extra.weight": torch.ones(2)}, path)
    triptych.import_model(folder)
    assert "has weights that BertForMaskedLM does not, which stay behind: extra.weight." in caplog.text
    del weights["bert.encoder.layer.1.output.dense.bias"]
    save_file(weights, path)
    with pytest.raises(
        ValueError, match=r"Missing weights of .* as BertForMaskedLM: bert.encoder.layer.1.output.dense.bias\."
    ):
        triptych.import_model(folder)
    weights["bert.encoder.layer.1.output.dense.bias"] = torch.zeros(3)
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"Mismatched weights of .*: bert.encoder.layer.1.output.dense.bias\."):
        triptych.import_model(folder)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000, but must be at most 1000"),
        ({"hidden_size": -6}, "is -6, but must be greater than 0"),
        ({"vocab_size": 10**9}, r"is that of 37,\d{3},\d{3},\d{3} parameters, but its files hold"),
        (
            {"architectures": [["BertModel"]]},
            r"`architectures` of .* is \[\['BertModel'\]\], but must be a list of names",
        ),
        ({"architectures": {"a": 1}}, "`architectures` of .* is {'a': 1}, but must be a list of names of classes"),
    ],
)
def test_what_a_configuration_claims_is_weighed_before_it_is_built(folder, fields, sentence):
    """A billion layers are built until memory ends, though the files beside them hold three."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **fields}))
    with pytest.raises(Exception, match=sentence):
        triptych.import_model(folder)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="has no configuration that can be read"):
        triptych.import_model(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Real weights


@pytest.mark.data
def test_stories_go_on_as_llama_tells_them(data_folder):
    theirs = transformers.LlamaForCausalLM.from_pretrained(data_folder / "stories260k")
    ours = triptych.import_model(data_folder / "stories260k")
    start = torch.tensor([[1]])
    expected = theirs.generate(start, max_new_tokens=200, do_sample=False)
    assert expected.shape[1] == 201
    assert torch.equal(ours.generate(start, max_new_tokens=200, do_sample=False), expected)


@pytest.mark.data
def test_masks_are_filled_as_albert_fills_them(data_folder):
    theirs = transformers.AlbertForMaskedLM.from_pretrained(data_folder / "rxnmapper_albert")
    ours = triptych.import_model(data_folder / "rxnmapper_albert")
    ids = torch.randint(5, theirs.config.vocab_size, (8, 50))
    expected, actual = theirs(ids).logits, ours(ids).logits
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    assert_equal(actual, expected, tolerance=1e-5 * expected.abs().max().item())
