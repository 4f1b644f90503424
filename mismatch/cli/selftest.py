"""`mismatch selftest`: known faults in your own pipeline; which does a check name?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags
from mismatch.cli.options import (
    CONFIG,
    ENGINE_FLAGS,
    JSON,
    MODEL_FLAGS,
    NEW_RUN,
    PROMPT_FLAGS,
    ROUTING,
    TRAIN_FLAGS,
    TRAIN_MODEL,
)

if TYPE_CHECKING:
    from mismatch.pipeline.selftest import SelfTest, Tried

GRADES = {
    "first": "named first",
    "top three": "in the first three",
    "noticed": "only noticed",
    "missed": "missed",
}
SIDES = {True: "right", False: "not right", None: "–"}
SMALLER = {"num_prompts": 32, "samples_per_prompt": 2, "max_tokens": 64, "temperature": 0.8}


@with_flags(
    MODEL_FLAGS, TRAIN_MODEL, PROMPT_FLAGS, ENGINE_FLAGS, ROUTING, TRAIN_FLAGS, NEW_RUN, JSON,
    CONFIG,
)  # fmt: skip
def selftest(flags: Flags) -> int:
    """Plant known faults in your own pipeline and see which are named.

    The engine samples once (32 prompts, 2 samples of 64 tokens at temperature 0.8, unless flags
    say otherwise).
    Exit code 0: every fault is among the first three causes at its largest size. 1: one is not.

    Examples:
    mismatch selftest --model MODEL
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import check_spec, with_trainer
    from mismatch.codec import to_json
    from mismatch.pipeline.preflight import preflight
    from mismatch.pipeline.selftest import SCHEMA, run_selftest

    for name, value in SMALLER.items():
        if name not in flags.explicit:
            flags[name] = value
    spec = with_trainer(check_spec(flags), flags)[0]
    spec = replace(spec, quick=True, two_passes=False, rollout=replace(spec.rollout, exact_kl=0))
    preflight(spec)
    run_dir = session.open_run("selftest", spec, flags)
    narrator = session.narrator(silent=flags["as_json"])
    result = run_selftest(spec, run_dir, narrator, session.command())
    if flags["as_json"]:
        document = {"schema": SCHEMA, "caught": result.caught, **to_json(result)}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(result)
    return 0 if result.caught else 1


def _print(result: SelfTest) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    words = ("fault", "named first", "result")
    for title in (
        "fault",
        "size",
        "named first",
        "side",
        "rank",
        "share",
        "mean |delta|",
        "result",
    ):
        table.add_column(title, justify="left" if title in words else "right")
    for tried in result.faults:
        for index, attempt in enumerate(tried.attempts):
            table.add_row(
                "" if index else tried.fault,
                f"{attempt.size:g}",
                attempt.named or "–",
                SIDES[attempt.right_side],
                str(attempt.rank or "–"),
                "–" if attempt.effect is None else f"{100 * attempt.effect.value:.0f} %",
                f"{attempt.mean_abs_delta:.3g}",
                GRADES[attempt.grade],
            )
    console = Console()
    console.print(table, highlight=False, markup=False)
    for tried in result.faults:
        console.print(_line(tried), highlight=False, markup=False)
    console.print(_counts(result), highlight=False, markup=False)
    clean = ", ".join(result.clean) or "no cause"
    console.print(
        f"without a fault: {clean}, mean |delta| {result.mean_abs_delta:.3g}, "
        f"{result.n_tokens:,} tokens",
        highlight=False,
        markup=False,
    )


def _line(tried: Tried) -> str:
    if tried.found is None:
        return f"{tried.fault}: not planted: {tried.reason}"
    if tried.smallest is None:
        return f"{tried.fault}: NOT CAUGHT"
    word = "caught" if tried.found else "NOT CAUGHT at its largest size, but"
    return f"{tried.fault}: {word} down to size {tried.smallest:g}"


def _counts(result: SelfTest) -> str:
    """How the largest sizes ended."""
    right, sided = result.sides
    counts = ", ".join(f"{count} {GRADES[grade]}" for grade, count in result.grades.items())
    return f"at the largest size: {counts}; side right {right} of {sided}"
