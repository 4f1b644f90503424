"""Equal bits: which scorings of a run are bitwise equal, and what makes that impossible."""

from mismatch.plugins import Analysis, Feature

FEATURE = Feature(
    "exact",
    analyses=(
        Analysis("exact", "mismatch.features.exact.results:Exactness",
                 "mismatch.features.exact.measure:measure",
                 "mismatch.features.exact.section:section", order=2,
                 chapter="normal-or-not", of_pairs=True,
                 lacks="mismatch.features.exact.results:lacks"),
    ),
    plan="mismatch.features.exact.section:planned",
)  # fmt: skip
