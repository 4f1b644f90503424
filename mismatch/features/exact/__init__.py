"""Equal bits: which scorings of a run are bitwise equal, and what makes that impossible."""

from mismatch.plugins import Analysis, Feature

FEATURE = Feature(
    "exact",
    analyses=(
        Analysis("exact", "mismatch.features.exact.results:Exactness",
                 "mismatch.features.exact.measure:measure",
                 "mismatch.features.exact.section:section", order=2,
                 chapter="normal-or-not", of_pairs=True,
                 lacks="mismatch.features.exact.section:lacks"),
        Analysis("batch_probe", "mismatch.features.exact.results:BatchProbe",
                 section="mismatch.features.exact.section:probed", unseen="not_tested", order=3,
                 from_run="mismatch.features.exact.results:probe_of_run", chapter="normal-or-not"),
        Analysis("exact_fixes", "mismatch.features.exact.results:FixesByBits",
                 section="mismatch.features.exact.section:fixed", order=6,
                 from_run="mismatch.features.exact.fixes:of_run", chapter="helps"),
    ),
    check_flags="mismatch.features.exact.flags:FLAGS",
    check_step="mismatch.features.exact.probe:probe",
    plan="mismatch.features.exact.excluded:planned",
)  # fmt: skip
