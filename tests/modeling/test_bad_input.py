"""Bad input ends in one sentence that names the thing, its value and what is allowed.

Shapes: B batch, T tokens, S source tokens.
"""

from contextlib import contextmanager

import pytest
import torch
from tiny import QUICK_BACKENDS, TOPOLOGIES, VOCAB, needs_compiler, random_tokens, tiny_config, tiny_model
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import triptych


def inputs_of(topology: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if topology == "encoder_decoder" else {})


@contextmanager
def refused(*words: str):
    """A ValueError of one sentence that holds all the words."""
    with pytest.raises(ValueError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


@pytest.mark.parametrize("wrong", [-1, VOCAB, 10**9])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_token_ids_outside_the_vocabulary(topology, wrong):
    model, ids = tiny_model(topology), random_tokens(2, 5)
    bad = ids.clone()
    bad[1, 3] = wrong
    for name in inputs_of(topology, ids):
        with refused("input_ids", str(wrong), "from 0 to", str(VOCAB - 1)):
            model(**{**inputs_of(topology, ids), name: bad})


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_empty_batch(topology, shape):
    model, empty = tiny_model(topology), torch.empty(shape, dtype=torch.long)
    with refused("`input_ids`", str(list(shape)), "at least one token"):
        model(**inputs_of(topology, empty))
    with refused("`inputs_embeds`", str([*shape, 32]), "at least one token"):
        base = tiny_model({"encoder_decoder": "encoder"}.get(topology, topology))
        base(inputs_embeds=torch.empty(*shape, 32))


@pytest.mark.parametrize("shape", [(5,), (2, 5, 1)])
def test_token_ids_of_the_wrong_rank(shape):
    with refused("`input_ids`", str(list(shape))):
        tiny_model("decoder")(torch.full(shape, 3))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_input_or_two(topology):
    model, ids = tiny_model(topology), random_tokens(1, 4)
    with refused("`input_ids`", "`inputs_embeds`"):
        model(**({"decoder_input_ids": ids} if topology == "encoder_decoder" else {}))
    with refused("`input_ids`", "`inputs_embeds`"):
        model(**inputs_of(topology, ids), inputs_embeds=torch.randn(1, 4, 32))


def test_no_target():
    """Neither decoder inputs nor labels: the sentence names what is missing, not the source that is there."""
    with refused("decoder_input_ids", "labels"):
        tiny_model("encoder_decoder")(input_ids=random_tokens(1, 4))


@pytest.mark.parametrize("topology", ["encoder", "decoder"])
def test_token_types_outside_their_table(topology):
    model, ids = tiny_model(topology, type_vocab_size=2), random_tokens(1, 4)
    with refused("`token_type_ids`", "2", "from 0 to", "1"):
        model(ids, token_type_ids=torch.full_like(ids, 2))
    with refused("`token_type_ids`", "[1, 3]", "[1, 4]"):
        model(ids, token_type_ids=torch.zeros(1, 3, dtype=torch.long))


# ---------------------------------------------------------------------------------------------------------------------
# Masks and positions


@pytest.mark.parametrize(
    "shape", [(2, 5), (2, 7), (1, 6), (3, 6), (6,), (2, 6, 6), (3, 1, 6, 6), (2, 3, 6, 6), (2, 1, 5, 6), (2, 1, 6, 7)]
)
@pytest.mark.parametrize("backend", QUICK_BACKENDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_mask_of_the_wrong_shape(topology, backend, shape):
    ids = random_tokens(2, 6)
    with refused("`attention_mask`", str(list(shape)), "[2, 6]" if len(shape) == 2 else "2D"):
        tiny_model(topology, backend)(**inputs_of(topology, ids), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_mask_of_pairs_in_whole_numbers(topology):
    """Ones and zeros could mean what is seen or what is added to the scores."""
    ids = random_tokens(2, 6)
    with refused("`attention_mask`", "torch.int64", "boolean"):
        tiny_model(topology)(**inputs_of(topology, ids), attention_mask=ids.new_ones(2, 1, 6, 6))


def test_global_tokens_beside_a_cache():
    """A window's cache would forget what the caller's global tokens are, and the next call give other outputs."""
    model, ids = tiny_model("decoder", sliding_window=4), random_tokens(2, 6)
    model(ids, global_attention_mask=ids < 50, use_cache=False)
    with refused("`global_attention_mask`", "`use_cache=False`"):
        model(ids, global_attention_mask=ids < 50)


def test_target_and_source_masks_of_the_wrong_shape():
    model, ids = tiny_model("encoder_decoder"), random_tokens(2, 6)
    with refused("attention_mask`", "[2, 5]", "[2, 6]"):
        model(**inputs_of("encoder_decoder", ids), decoder_attention_mask=torch.ones(2, 5))
    with refused("`encoder_attention_mask`", "[2, 5]", "[2, 6]"):
        memory = torch.randn(2, 6, 32)
        model.model.decoder(inputs_embeds=memory, encoder_hidden_states=memory, encoder_attention_mask=torch.ones(2, 5))


def test_mask_that_forgets_the_cache():
    """The mask of a later call covers the cached tokens too, and the sentence says how many those are."""
    model, ids = tiny_model("decoder"), random_tokens(2, 6)
    cache = model(ids[:, :4]).cache
    with refused("`attention_mask`", "[2, 2]", "[2, 6]", "4 are cached"):
        model(ids[:, 4:], attention_mask=torch.ones(2, 2), cache=cache)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
@pytest.mark.parametrize("topology", ["encoder", "decoder"])
def test_positions_of_the_wrong_shape(topology, name):
    with refused(f"`{name}`", "[2, 5]", "[2, 6]"):
        tiny_model(topology)(random_tokens(2, 6), **{name: torch.zeros(2, 5, dtype=torch.long)})


def test_prefix_of_the_wrong_shape():
    with refused("`prefix_length`", "[3]", "[2]"):
        tiny_model("decoder")(random_tokens(2, 6), prefix_length=torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_text_longer_than_a_learned_table(topology):
    model = tiny_model(topology, position_embedding_type="learned", max_position_embeddings=8)
    model(**inputs_of(topology, random_tokens(1, 8)))
    with refused("9", "`max_position_embeddings`", "8"):
        model(**inputs_of(topology, random_tokens(1, 9)))


def test_prompt_that_grows_beyond_a_learned_table():
    model = tiny_model("decoder", position_embedding_type="learned", max_position_embeddings=8, eos_token_id=None)
    with refused("`max_position_embeddings`", "8"):
        model.generate(random_tokens(1, 6), max_new_tokens=5, do_sample=False)


def test_negative_positions():
    model, ids = tiny_model("decoder", position_embedding_type="learned"), random_tokens(1, 3)
    with refused("position", "-1"):
        model(ids, position_ids=torch.tensor([[-1, 0, 1]]))


# ---------------------------------------------------------------------------------------------------------------------
# Labels


@pytest.mark.parametrize("wrong", [VOCAB, -1, -99])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_token_labels_of_the_wrong_value(topology, wrong):
    ids, labels = random_tokens(2, 5), random_tokens(2, 5)
    labels[1, 2] = wrong
    with refused("`labels`", str(wrong), "-100", str(VOCAB - 1)):
        tiny_model(topology)(**inputs_of(topology, ids), labels=labels)


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (10,)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_token_labels_of_the_wrong_length(topology, shape):
    with refused("`labels`", str(list(shape)), "[2, 5]"):
        tiny_model(topology)(**inputs_of(topology, random_tokens(2, 5)), labels=random_tokens(*shape))


@pytest.mark.parametrize("panel", ["Encoder", "Decoder"])
def test_class_labels(panel):
    model = tiny_model(getattr(triptych, f"Triptych{panel}ForSequenceClassification"), num_labels=3)
    ids = random_tokens(2, 5)
    with refused("`labels`", "3", "from 0 to 2"):
        model(ids, labels=torch.tensor([0, 3]))
    with refused("`labels`", "[3]", "[2]"):
        model(ids, labels=torch.tensor([0, 1, 2]))
    with refused("`labels`", "[2, 2]", "[2, 3]"):
        model(ids, labels=torch.zeros(2, 2))
    tokens = tiny_model(getattr(triptych, f"Triptych{panel}ForTokenClassification"), num_labels=3)
    with refused("`labels`", "[2, 4]", "[2, 5]"):
        tokens(ids, labels=torch.zeros(2, 4, dtype=torch.long))


def test_sentence_and_choice_labels():
    ids = random_tokens(2, 5)
    with refused("labels", "2", "from 0 to 1"):
        tiny_model(triptych.TriptychEncoderForNextSentencePrediction)(ids, labels=torch.tensor([0, 2]))
    with refused("label", "2", "from 0 to 1"):
        tiny_model(triptych.TriptychEncoderForPreTraining)(ids, next_sentence_label=torch.tensor([0, 2]))
    with refused("label", "[3]", "[2]"):
        tiny_model(triptych.TriptychEncoderForPreTraining)(ids, labels=ids, next_sentence_label=torch.tensor([0, 1, 1]))
    with refused("`labels`", "4", "from 0 to 3"):
        tiny_model(triptych.TriptychEncoderForMultipleChoice)(random_tokens(2, 4, 5), labels=torch.tensor([0, 4]))


@pytest.mark.parametrize("panel", ["Encoder", "Decoder"])
def test_span_positions_of_the_wrong_length(panel):
    model = tiny_model(getattr(triptych, f"Triptych{panel}ForQuestionAnswering"))
    with refused("positions", "[3]", "[2]"):
        model(random_tokens(2, 5), start_positions=torch.tensor([0, 1, 2]), end_positions=torch.tensor([0, 1, 2]))


def test_labels_without_a_start_token():
    model = tiny_model("encoder_decoder", bos_token_id=None)
    with refused("`decoder_start_token_id` is None"):
        model(input_ids=random_tokens(1, 4), labels=random_tokens(1, 4))


# ---------------------------------------------------------------------------------------------------------------------
# Topologies and backends

HEADS = {name: getattr(triptych, name) for name in triptych.__all__ if "For" in name or name.endswith("Model")}
HEADS.pop("TriptychPreTrainedModel")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_refuses_other_topologies(name):
    own = HEADS[name].config_class.__dataclass_fields__["topology"].default
    for topology in TOPOLOGIES:
        if topology != own:
            with refused("topology", repr(topology), repr(own), name):
                HEADS[name](tiny_config(topology))


def test_an_auto_class_refuses_other_topologies():
    with pytest.raises(ValueError, match="TriptychEncoderConfig"):  # transformers' sentence, of several lines
        AutoModelForCausalLM.from_config(tiny_config("encoder"))
    with pytest.raises(ValueError, match="TriptychDecoderConfig"):
        AutoModelForMaskedLM.from_config(tiny_config("decoder"))


def test_cross_attention_and_encoder_states_come_together():
    ids, states = random_tokens(1, 4), torch.randn(1, 3, 32)
    plain = tiny_model(triptych.TriptychDecoderModel)
    crossed = tiny_model(triptych.TriptychDecoderModel, add_cross_attention=True)
    with refused("`encoder_hidden_states`", "`add_cross_attention` is False"):
        plain(ids, encoder_hidden_states=states)
    with refused("`encoder_hidden_states`", "`add_cross_attention` is True"):
        crossed(ids)


@pytest.fixture
def unmasked_attention():
    """An attention function registered without its mask function."""
    AttentionInterface.register("unmasked", sdpa_attention_forward)
    yield "unmasked"
    del AttentionInterface._global_mapping["unmasked"]


@pytest.mark.parametrize("how", ["at load", "live"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_attention_without_a_mask_function(topology, how, unmasked_attention):
    """A new attention name without a mask function loses its mask: here it is refused."""
    with refused("`attn_implementation` is 'unmasked'", "mask function", "sdpa"):
        model = tiny_model(topology, unmasked_attention if how == "at load" else None)
        if how == "live":
            model.set_attn_implementation(unmasked_attention)
        model(**inputs_of(topology, random_tokens(1, 4)))


@pytest.mark.parametrize("how", ["at load", "live"])
def test_unknown_attention(how):
    with refused("sdpaa"):
        if how == "at load":
            tiny_model("decoder", "sdpaa")
        else:
            tiny_model("decoder").set_attn_implementation("sdpaa")


@needs_compiler
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_flex_attention_refuses_to_train_on_a_cpu(topology, mode):
    """flex_attention has no backward on a CPU."""
    model = getattr(tiny_model(topology, "flex_attention", num_hidden_layers=1), mode)()
    with refused("flex_attention", "CPU", "sdpa"):
        model(**inputs_of(topology, random_tokens(1, 4))).logits.sum().backward()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "alibi"}, ["alibi"]),
        ({"position_embedding_type": "relative"}, ["relative"]),
        ({"attention_chunk_size": 4}, ["chunked_attention"]),
    ],
)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_flash_attention_refuses_what_it_cannot_do(topology, changes, words):
    """Biases and chunks would be ignored; refused at construction, whether flash attention is installed or not."""
    for wrong in (
        lambda: tiny_model(topology, "flash_attention_2", **changes),
        lambda: tiny_model(topology, **changes).set_attn_implementation("flash_attention_2"),
    ):
        with refused("`attn_implementation` is 'flash_attention_2'", "sdpa", *words):
            wrong()
