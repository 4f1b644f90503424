"""Megatron-Core as the trainer: ``--scorer megatron``, with experts and tensors over ranks."""

from mismatch.plugins import Analysis, Feature, Scorer

FEATURE = Feature(
    "megatron",
    scorers=(
        Scorer("megatron", "mismatch.features.megatron.adapter:Megatron",
               modules=("torch", "numpy", "safetensors", "megatron.core"),
               require="mismatch.features.megatron.layout:require"),
    ),
    analyses=(
        Analysis("layout", "mismatch.features.megatron.one_rank:LayoutEffect",
                 section="mismatch.features.megatron.one_rank:section", order=12,
                 from_run="mismatch.features.megatron.one_rank:of_run",
                 causes="mismatch.features.megatron.one_rank:causes_of",
                 excluded="mismatch.features.megatron.one_rank:excluded_by", chapter="why"),
    ),
    check_step="mismatch.features.megatron.one_rank:score_again",
)  # fmt: skip
