"""Where the sides part: the first module of the engine or the trainer that is no float32."""

from mismatch.plugins import Command, Feature

FEATURE = Feature(
    "locate",
    commands=(
        Command(
            "locate",
            "Name the first module where engine and trainer differ.",
            "mismatch.features.locate.command:locate",
        ),
    ),
    analyses="mismatch.features.locate.judge:ANALYSES",
    check_flags="mismatch.features.locate.flags:FLAGS",
    check_step="mismatch.features.locate.step:locate_failed",
)
