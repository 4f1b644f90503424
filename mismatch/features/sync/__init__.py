"""Whether weights arrive: known updates, pushed into an engine, and what it holds then."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "sync",
    commands=(
        Command(
            "sync-probe",
            "Push known weight updates into an engine and check which parameters arrive.",
            "mismatch.features.sync.command:sync_probe",
            "Before upgrades",
        ),
    ),
)
