"""Triptych: encoder, decoder and encoder-decoder Transformers of one block set, at home in the Hugging Face world.

Importing this package registers the family with the Auto classes, and tasks with `transformers.pipeline`; importing it
again changes nothing.
"""

import sys

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from . import modeling_triptych
from .auto_map import AUTO_CLASSES
from .configuration_triptych import (
    TOPOLOGIES,
    TriptychConfig,
    TriptychDecoderConfig,
    TriptychEncoderConfig,
    TriptychEncoderDecoderConfig,
)
from .conversion import export_model, import_model
from .modeling_triptych import (
    TriptychDecoderForQuestionAnswering,
    TriptychDecoderForSequenceClassification,
    TriptychDecoderForTokenClassification,
    TriptychDecoderModel,
    TriptychEncoderDecoderModel,
    TriptychEncoderForAudioClassification,
    TriptychEncoderForImageClassification,
    TriptychEncoderForMaskedImageModeling,
    TriptychEncoderForMultipleChoice,
    TriptychEncoderForNextSentencePrediction,
    TriptychEncoderForPreTraining,
    TriptychEncoderForQuestionAnswering,
    TriptychEncoderForSequenceClassification,
    TriptychEncoderForTokenClassification,
    TriptychEncoderForVideoClassification,
    TriptychEncoderModel,
    TriptychForCausalLM,
    TriptychForConditionalGeneration,
    TriptychForMaskedLM,
    TriptychPreTrainedModel,
)
from .pipelines import TriptychTextToTextPipeline, register_pipelines

__version__ = "0.1.0"

__all__ = [
    "TriptychConfig",
    "TriptychDecoderConfig",
    "TriptychDecoderForQuestionAnswering",
    "TriptychDecoderForSequenceClassification",
    "TriptychDecoderForTokenClassification",
    "TriptychDecoderModel",
    "TriptychEncoderConfig",
    "TriptychEncoderDecoderConfig",
    "TriptychEncoderDecoderModel",
    "TriptychEncoderForAudioClassification",
    "TriptychEncoderForImageClassification",
    "TriptychEncoderForMaskedImageModeling",
    "TriptychEncoderForMultipleChoice",
    "TriptychEncoderForNextSentencePrediction",
    "TriptychEncoderForPreTraining",
    "TriptychEncoderForQuestionAnswering",
    "TriptychEncoderForSequenceClassification",
    "TriptychEncoderForTokenClassification",
    "TriptychEncoderForVideoClassification",
    "TriptychEncoderModel",
    "TriptychForCausalLM",
    "TriptychForConditionalGeneration",
    "TriptychForMaskedLM",
    "TriptychPreTrainedModel",
    "TriptychTextToTextPipeline",
    "export_model",
    "import_model",
]


def _register():
    transformers.AutoConfig.register("triptych", TriptychConfig, exist_ok=True)
    for topology, classes in AUTO_CLASSES.items():
        for auto_class, name in classes.items():
            model_class = getattr(modeling_triptych, name)
            getattr(transformers, auto_class).register(TOPOLOGIES[topology], model_class, exist_ok=True)
            # There `transformers serve` and TRL look for an architecture; transformers makes its module anew while it
            # loads, so that the one imported above need not be it.
            setattr(sys.modules["transformers"], name, model_class)
    # Trainer's label smoothing looks here to know that this head's labels are still to be shifted, and the pipeline of
    # speech recognition that this one generates.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["triptych"] = "TriptychForCausalLM"
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES["triptych"] = "TriptychForConditionalGeneration"
    register_pipelines()


_register()
