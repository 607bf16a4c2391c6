"""Tiny models of the family and ragged batches for them, shared by the tests of this folder.

Shapes: B batch, T tokens, V vocabulary.
"""

import shutil

import pytest
import torch
from torch import nn

import triptych
from triptych import TriptychConfig

VOCAB = 97
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.2,
    hidden_dropout=0.0,
)
TOPOLOGIES = ("encoder", "decoder", "encoder_decoder")
POSITIONS = ("sinusoidal", "learned", "rotary", "relative", "alibi", "none")
LAYERS = {
    "full": {},
    "sliding": {"sliding_window": 4},
    "chunked": {"attention_chunk_size": 4},
    "global": {"sliding_window": 4, "num_global_tokens": 2},
    "sparse": {"sliding_window": 2, "num_global_tokens": 1, "num_random_blocks": 1, "random_block_size": 2},
    "dilated": {"sliding_window": 3, "attention_dilation": [2, 3]},
}
MIXED = dict(
    num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "chunked_attention"],
    sliding_window=4,
    attention_chunk_size=4,
)
# Linear attention with all that it can have.
DELTA = dict(
    linear_feature_map="unit",
    linear_decay="gated",
    linear_update="delta",
    linear_conv_kernel=3,
    linear_output_gate=True,
)
# What an encoder can read beside texts: 8 patches of 3 x 4 pixels, twice as many tubelets, mel bins.
IMAGES = dict(input_type="image", image_size=[8, 12], patch_size=[4, 3], num_channels=2)
SENSES = {
    "image": IMAGES,
    "video": {**IMAGES, "input_type": "video", "num_frames": 4, "tubelet_size": 2},
    "audio": dict(input_type="audio", num_mel_bins=6),
}
SIDES = ("left", "right", "inside")

# What a language model of each topology is called.
LANGUAGE_MODELS = {
    "encoder": triptych.TriptychForMaskedLM,
    "decoder": triptych.TriptychForCausalLM,
    "encoder_decoder": triptych.TriptychForConditionalGeneration,
}

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="flex_attention compiles its kernels on a CPU, and there is no C++ compiler",
)
FLEX = pytest.param("flex_attention", marks=needs_compiler)
SLOW_FLEX = pytest.param("flex_attention", marks=(needs_compiler, pytest.mark.slow))
QUICK_BACKENDS = ("eager", "sdpa", "banded")
BACKENDS = (*QUICK_BACKENDS, FLEX)
BACKENDS_SLOW_FLEX = (*QUICK_BACKENDS, SLOW_FLEX)


def tiny_config(topology: str, **changes) -> TriptychConfig:
    """A configuration of width 32, 2 layers, 4 heads and 97 tokens, with the given fields changed."""
    return TriptychConfig(topology=topology, **{**TINY, **changes})


def tiny_model(model_class: type | str, backend: str | None = None, **changes) -> nn.Module:
    """A model in eval mode, of a class or of a topology's language model, whose biases and norms are random too.

    Equal arguments give equal weights, whatever the backend.
    """
    if isinstance(model_class, str):
        model_class = LANGUAGE_MODELS[model_class]
    topology = model_class.config_class.__dataclass_fields__["topology"].default
    torch.manual_seed(0)
    if backend == "flex_attention":
        torch._dynamo.reset()  # each test compiles for its own shapes, as a new process would
    model = model_class._from_config(tiny_config(topology, **changes), attn_implementation=backend)
    return randomised(model).eval()


def randomised(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Adds noise to what is initialised to zero or one: biases and norms."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * std)
    return model


def random_tokens(*shape: int) -> torch.Tensor:
    """Token ids that are no special tokens."""
    return torch.randint(3, VOCAB, shape)


def sense_inputs(config: TriptychConfig, batch_size: int = 2, frames: int = 9) -> dict[str, torch.Tensor]:
    """A random batch of what an encoder with this configuration reads beside texts."""
    if config.input_type == "audio":
        return dict(input_features=torch.randn(batch_size, config.num_mel_bins, frames))
    *time, height, width = config.input_sizes
    return dict(pixel_values=torch.randn(batch_size, *time, config.num_channels, height, width))


def pad_rows(rows: list[torch.Tensor], side: str, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of unequal lengths as (input_ids, attention_mask) [B, T]; pads are random tokens, so that a leak shows.

    Args:
        side: "left", "right", or "inside": pads between the tokens, never at an end.
        extra: so many pads more than the longest row needs.
    """
    length = max(len(row) for row in rows) + extra
    ids, mask = random_tokens(len(rows), length), torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        pads = length - len(row)
        if side == "inside":
            inner = torch.randperm(length - 2)[: len(row) - 2].sort().values + 1
            slots = torch.cat((torch.tensor([0]), inner, torch.tensor([length - 1])))
        else:
            slots = torch.arange(len(row)) + (pads if side == "left" else 0)
        ids[index, slots] = row
        mask[index, slots] = 1
    return ids, mask


def ragged_rows(*lengths: int) -> list[torch.Tensor]:
    return [random_tokens(length) for length in lengths]


class Ragged:
    """Texts of unequal lengths for one topology: as one padded batch, and each alone."""

    def __init__(self, topology: str, side: str, lengths=(9, 5, 7), target_lengths=(4, 6, 5)):
        self.is_pair = topology == "encoder_decoder"
        self.rows = ragged_rows(*lengths)
        ids, mask = pad_rows(self.rows, side)
        self.batch = dict(input_ids=ids, attention_mask=mask)
        self.mask = mask.bool()  # [B, T] where the logits are of real tokens
        if self.is_pair:
            self.targets = ragged_rows(*target_lengths)
            ids, mask = pad_rows(self.targets, side)
            self.batch |= dict(decoder_input_ids=ids, decoder_attention_mask=mask)
            self.mask = mask.bool()

    @property
    def labels(self) -> torch.Tensor:
        """The tokens themselves as labels, -100 on pads: [B, T]."""
        ids = self.batch["decoder_input_ids" if self.is_pair else "input_ids"]
        return ids.masked_fill(~self.mask, -100)

    def alone(self, model: nn.Module) -> torch.Tensor:
        """Logits [N, V] of all N real tokens, each text run by itself, without a mask."""
        logits = []
        for index, row in enumerate(self.rows):
            inputs = dict(input_ids=row[None])
            if self.is_pair:
                inputs["decoder_input_ids"] = self.targets[index][None]
            logits.append(model(**inputs).logits[0])
        return torch.cat(logits)

    def together(self, model: nn.Module, **more) -> torch.Tensor:
        """Logits [N, V] of all N real tokens, from the padded batch."""
        return model(**self.batch, **more).logits[self.mask]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5, what: str = "tensors"):
    """Equal within an absolute tolerance, and finite."""
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)} against {list(expected.shape)}"
    difference = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert difference <= tolerance, f"{what} differ by {difference:.2g}, allowed is {tolerance:.0e}"


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance=1e-4):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_equal(actual[name], gradient, tolerance, what=f"gradients of {name}")
