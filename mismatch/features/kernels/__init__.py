"""Audit of kernels: attention and expert implementations against float64, forward and backward."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "kernels",
    commands=(
        Command(
            "kernels",
            "Audit attention and expert kernels, and your own.",
            "mismatch.features.kernels.command:kernels",
        ),
    ),
)
