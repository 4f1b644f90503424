"""What this machine can measure."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "doctor",
    commands=(
        Command(
            "doctor",
            "What this machine can measure.",
            "mismatch.features.doctor.command:doctor",
            group="Information",
        ),
    ),
)
