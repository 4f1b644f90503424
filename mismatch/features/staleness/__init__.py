"""What only runs over time show: staleness apart from mismatch, false version labels, drift."""

from mismatch.plugins import Analysis, Feature

_HERE = "mismatch.features.staleness"
FEATURE = Feature(
    "staleness",
    analyses=(
        Analysis("staleness", f"{_HERE}.results:StalenessReport",
                 section=f"{_HERE}.section:staleness", from_run=f"{_HERE}.results:staleness_of",
                 checks=f"{_HERE}.results:staleness_checks", told=f"{_HERE}.results:told",
                 order=51, chapter="why"),
        Analysis("drift", "mismatch.analysis.drift:Drift", section=f"{_HERE}.section:drift",
                 from_run=f"{_HERE}.results:drift_of_run", checks=f"{_HERE}.results:drift_checks",
                 order=52, chapter="why"),
    ),
)  # fmt: skip
