"""Conversations of several turns: does a chat template keep the ids of earlier turns?"""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "turns",
    commands=(
        Command(
            "template",
            "Check that a chat template keeps the ids of earlier turns.",
            "mismatch.features.turns.command:template",
            "Before upgrades",
        ),
    ),
)
