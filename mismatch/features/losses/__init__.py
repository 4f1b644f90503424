"""A framework's own loss function against the formula of its loss and gradient."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "losses",
    commands=(
        Command(
            "losses",
            "Compare a framework's loss and gradient with the formula.",
            "mismatch.features.losses.command:losses",
        ),
    ),
)
