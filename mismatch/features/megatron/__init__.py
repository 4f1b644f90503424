"""Megatron-Core as the trainer: ``--scorer megatron``, with experts and tensors over ranks."""

from mismatch.plugins import Feature, Scorer

FEATURE = Feature(
    "megatron",
    scorers=(
        Scorer(
            "megatron",
            "mismatch.features.megatron.adapter:Megatron",
            modules=("torch", "numpy", "safetensors", "megatron.core"),
            require="mismatch.features.megatron.layout:require",
        ),
    ),
)
