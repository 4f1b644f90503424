"""Runs that a framework recorded: judged as they are, or scored again."""

from mismatch.plugins import Analysis, Command, Feature

FEATURE = Feature(
    "recorded",
    commands=(
        Command("postmortem", "Judge a run that already happened, from its dump.",
                "mismatch.features.recorded.command:postmortem"),
        Command("watch", "Follow the mismatch while a run trains.",
                "mismatch.features.recorded.command:watch"),
        Command("read-rollouts", "Make a run from rollouts that a framework recorded.",
                "mismatch.features.recorded.command:read_rollouts", "Check and its results"),
    ),
    analyses=(
        Analysis("recorded", "mismatch.features.recorded.facts:RecordedReport",
                 section="mismatch.features.recorded.section:section",
                 from_run="mismatch.features.recorded.facts:of_run",
                 checks="mismatch.features.recorded.facts:checks",
                 told="mismatch.features.recorded.facts:causes",
                 measured="mismatch.features.recorded.facts:measured",
                 judged="mismatch.features.recorded.facts:judged",
                 unseen="unseen",
                 reason="mismatch.features.recorded.facts:reason", order=50, chapter="why"),
    ),
)  # fmt: skip
