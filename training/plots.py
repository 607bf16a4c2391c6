"""Pictures of a training and of a model: the loss curve, and where cross-attention looks."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

import matplotlib.pyplot as plt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from triptych.training.reporting import read_metrics

# Two colours of the palette by Okabe and Ito (2008), told apart with any colour vision.
TRAINING_COLOR, VALIDATION_COLOR = "#0072B2", "#D55E00"


def plot_losses(metrics: Path, picture: Path, title: str) -> None:
    """Draw training and validation loss over updates, from a metrics file to a PNG file."""
    rows = read_metrics(metrics)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for key, label, style in (
        ("loss", "training (as optimised)", {"color": TRAINING_COLOR, "linewidth": 1}),
        ("validation_loss", "validation", {"color": VALIDATION_COLOR, "marker": "o", "linewidth": 2}),
    ):
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(title=title, xlabel="update", ylabel="loss per target token (nats)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


@torch.no_grad()
def plot_cross_attention(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, picture: Path) -> str:
    """Draw which source tokens the decoder looks at as it writes each target token; return what it writes.

    The picture shows the mean over the heads of the last decoder layer. The model must run with
    `attn_implementation="eager"`, the one that returns weights.
    """
    inputs = tokenizer(source, return_tensors="pt").to(model.device)
    written = model.generate(**inputs)
    decoder_inputs, outputs = written[:, :-1], written[0, 1:]
    attentions = model(**inputs, decoder_input_ids=decoder_inputs, output_attentions=True).cross_attentions
    weights = attentions[-1][0].mean(0).float().cpu().numpy()  # [T, S]

    source_labels, target_labels = ([_label(tokenizer, id) for id in ids] for ids in (inputs.input_ids[0], outputs))
    width, height = (max(4.0, 0.28 * len(labels) + 2) for labels in (source_labels, target_labels))
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    image = axes.imshow(weights, cmap="cividis", vmin=0, aspect="auto")
    axes.set_xticks(range(len(source_labels)), source_labels)
    axes.set_yticks(range(len(target_labels)), target_labels)
    axes.set(title="Cross-attention, last layer, mean of heads", xlabel="source token", ylabel="target token")
    figure.colorbar(image, label="attention weight")
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return tokenizer.decode(outputs, skip_special_tokens=True)


def _label(tokenizer: PreTrainedTokenizerBase, id: int) -> str:
    text = tokenizer.decode([id])
    return "␣" if text.isspace() else text.strip()
