"""Which class of transformers builds a model: token ids in, logits out."""

from __future__ import annotations

from typing import Any


def auto_class(model_type: str) -> Any:
    """Return the auto class for a ``model_type``.

    A vision-language model is read without images; of its parts the language model alone runs.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    text_alone = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in with_images and model_type not in text_alone:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
