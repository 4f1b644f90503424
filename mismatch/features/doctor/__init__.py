"""What this machine can measure, and whether a model fits."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "doctor",
    commands=(
        Command(
            "doctor",
            "What this machine can measure, and whether a model fits.",
            "mismatch.features.doctor.command:doctor",
            group="Information",
        ),
    ),
)
