"""A framework's own loss function against the closed form of its loss and gradient."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "losses",
    commands=(
        Command(
            "losses",
            "Hold a framework's loss and gradient against the closed form.",
            "mismatch.features.losses.command:losses",
        ),
    ),
)
