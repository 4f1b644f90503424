"""The policy gradient of one batch: its length and angle next to the float32 trainer's."""

from mismatch.plugins import Analysis, Feature

FEATURE = Feature(
    "gradients",
    analyses=(
        Analysis("gradients", "mismatch.features.gradients.results:GradientCheck",
                 section="mismatch.features.gradients.section:section", unseen="not_tested",
                 order=8, from_run="mismatch.features.gradients.results:of_run",
                 checks="mismatch.features.gradients.results:gradient_checks", chapter="helps"),
    ),
    check_flags="mismatch.features.gradients.flags:FLAGS",
    check_step="mismatch.features.gradients.step:take_gradients",
)  # fmt: skip
