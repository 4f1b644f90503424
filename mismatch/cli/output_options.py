"""Flags of what a command reads and prints: they stand in no spec, and import no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mismatch.cli.flags import REQUIRED, Option, switch
from mismatch.frameworks import FRAMEWORKS
from mismatch.specs import OUTPUT

Framework = Literal[tuple(each.id for each in FRAMEWORKS.values() if each.logs)]  # type: ignore[valid-type]

RUN = Option("run", Path, "", "Run directory.", default=REQUIRED, argument=True)
JSON = Option("as_json", bool, OUTPUT, "Print JSON.", default=False, spelling="--json")
LEVELS = Option("thresholds", Path | None, OUTPUT, "TOML file that overrides levels.")
NAMES_HELP = "Also show a framework's names of the metrics, and how its numbers differ."
NAME_FLAGS = (
    Option("names", Framework | None, OUTPUT, NAMES_HELP),
    switch("details", OUTPUT, "Print every analysis in full."),
    switch("quiet", OUTPUT, "Print only the verdict."),
    Option(
        "format",
        Literal["text", "json", "markdown", "github", "junit"],
        OUTPUT,
        "Format of the report on standard output; everything else goes to standard error.",
        default="text",
    ),
)
LOG_TO = Option(
    "log_to",
    list[str] | None,
    OUTPUT,
    "Send the numbers to wandb, tensorboard, mlflow or trackio; with --names also under those "
    "names, if the number is the same; repeatable.",
)
FAIL_ON = Option(
    "fail_on",
    Literal["tolerable", "inconclusive", "unfit", "broken"] | None,
    OUTPUT,
    "Verdict from which the exit code is 1; default: inconclusive, with --quick unfit.",
)
