"""Rollouts that a framework recorded, as a run to score and compare."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "recorded",
    commands=(
        Command(
            "read-rollouts",
            "Make a run of rollouts that a framework recorded.",
            "mismatch.features.recorded.command:read_rollouts",
        ),
    ),
)
