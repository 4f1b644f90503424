"""The tokens of a run as a file, for a trainer on another machine."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "exchange",
    commands=(
        Command(
            "tokens",
            "Write a run's tokens into a file, for a trainer on another machine.",
            "mismatch.features.exchange.command:tokens",
        ),
    ),
)
