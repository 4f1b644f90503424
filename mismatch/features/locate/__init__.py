"""Where the sides part: the first module of the engine or the trainer that is no float32."""

from mismatch.plugins import Analysis, Command, Feature

FEATURE = Feature(
    "locate",
    commands=(
        Command("locate", "Name the first module where engine and trainer differ.",
                "mismatch.features.locate.command:locate"),
    ),
    analyses=(
        Analysis("locate", "mismatch.features.locate.results:Location",
                 section="mismatch.features.locate.section:section", order=10,
                 from_run="mismatch.features.locate.judge:of_run",
                 causes="mismatch.features.locate.kinds:causes_of",
                 excluded="mismatch.features.locate.kinds:excluded_by", chapter="why"),
        Analysis("locate_exact", "mismatch.features.locate.exact:ExactLocation",
                 section="mismatch.features.locate.exact:section", order=11,
                 from_run="mismatch.features.locate.exact:of_run", chapter="why"),
    ),
    check_flags="mismatch.features.locate.flags:FLAGS",
    check_step="mismatch.features.locate.step:locate_failed",
)  # fmt: skip
