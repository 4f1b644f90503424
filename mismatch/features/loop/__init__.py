"""A short on-policy RL run: what a mismatch does to training, and what a fix restores."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "loop",
    commands=(
        Command(
            "loop",
            "Train a few steps with the mismatch and with its fixes; show the curves.",
            "mismatch.features.loop.command:loop",
        ),
    ),
)
