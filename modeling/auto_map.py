"""Which class each Auto class builds, per topology. Registration and saved code read this one table."""

AUTO_CLASSES = {
    "encoder": {
        "AutoModel": "TriptychEncoderModel",
        "AutoModelForMaskedLM": "TriptychForMaskedLM",
        "AutoModelForSequenceClassification": "TriptychEncoderForSequenceClassification",
        "AutoModelForTokenClassification": "TriptychEncoderForTokenClassification",
        "AutoModelForQuestionAnswering": "TriptychEncoderForQuestionAnswering",
        "AutoModelForMultipleChoice": "TriptychEncoderForMultipleChoice",
        "AutoModelForNextSentencePrediction": "TriptychEncoderForNextSentencePrediction",
        "AutoModelForPreTraining": "TriptychEncoderForPreTraining",
        "AutoModelForImageClassification": "TriptychEncoderForImageClassification",
        "AutoModelForVideoClassification": "TriptychEncoderForVideoClassification",
        "AutoModelForAudioClassification": "TriptychEncoderForAudioClassification",
        "AutoModelForMaskedImageModeling": "TriptychEncoderForMaskedImageModeling",
    },
    "decoder": {
        "AutoModel": "TriptychDecoderModel",
        "AutoModelForCausalLM": "TriptychForCausalLM",
        "AutoModelForSequenceClassification": "TriptychDecoderForSequenceClassification",
        "AutoModelForTokenClassification": "TriptychDecoderForTokenClassification",
        "AutoModelForQuestionAnswering": "TriptychDecoderForQuestionAnswering",
    },
    "encoder_decoder": {
        "AutoModel": "TriptychEncoderDecoderModel",
        "AutoModelForSeq2SeqLM": "TriptychForConditionalGeneration",
        "AutoModelForSpeechSeq2Seq": "TriptychForConditionalGeneration",
        "AutoModelForImageTextToText": "TriptychForConditionalGeneration",
    },
}


def auto_map(topology: str) -> dict[str, str]:
    """The `auto_map` of a saved configuration, by which `trust_remote_code=True` finds every class in the folder."""
    classes = {auto_class: f"modeling_triptych.{name}" for auto_class, name in AUTO_CLASSES[topology].items()}
    return {"AutoConfig": "configuration_triptych.TriptychConfig", **classes}
