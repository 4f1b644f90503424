"""Corrections in the loss (importance weights), previewed on the tokens of a run."""

from mismatch.plugins import Analysis, Command, Feature

FEATURE = Feature(
    "corrections",
    commands=(
        Command("corrections",
                "Try TIS, IcePop, MIS, IPO, DPPO, GSPO, M2PO and more on a run's tokens.",
                "mismatch.features.corrections.command:corrections"),
    ),
    analyses=(
        Analysis("corrections", "mismatch.features.corrections.results:Corrections",
                 "mismatch.features.corrections.preview:measure",
                 "mismatch.features.corrections.section:section", "not_tested", order=1,
                 chapter="helps", of_pairs=True),
    ),
)  # fmt: skip
