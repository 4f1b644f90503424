"""The policy gradient of one batch: its length and angle next to the float32 trainer's."""

from mismatch.plugins import Feature

FEATURE = Feature(
    "gradients",
    analyses="mismatch.features.gradients.results:ANALYSES",
    check_flags="mismatch.features.gradients.flags:FLAGS",
    check_step="mismatch.features.gradients.step:take_gradients",
)
