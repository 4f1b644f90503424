"""Runs that a framework recorded: judged as they are, or scored again."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "recorded",
    commands=(
        Command(
            "postmortem",
            "Judge a run that already happened, from its dump.",
            "mismatch.features.recorded.command:postmortem",
        ),
        Command(
            "watch",
            "Follow the mismatch while a run trains.",
            "mismatch.features.recorded.command:watch",
        ),
        Command(
            "read-rollouts",
            "Make a run from rollouts that a framework recorded.",
            "mismatch.features.recorded.command:read_rollouts",
            "Check and its results",
        ),
    ),
    analyses="mismatch.features.recorded.facts:ANALYSES",
)
