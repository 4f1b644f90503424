"""Corrections in the loss (importance weights), previewed on the tokens of a run."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "corrections",
    commands=(
        Command(
            "corrections",
            "Try TIS, IcePop, MIS, IPO, DPPO, GSPO, M2PO and more on a run's tokens.",
            "mismatch.features.corrections.command:corrections",
        ),
    ),
    analyses="mismatch.features.corrections.preview:ANALYSES",
)
