"""`mismatch locate`: at which module do engine and trainer part?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, switch
from mismatch.cli.options import JSON, MODEL_FLAGS, OUT, TRUST_RUN
from mismatch.errors import MismatchError
from mismatch.specs import MANY, OUTPUT, SEEDS, Range

if TYPE_CHECKING:
    from mismatch.cli.session import ConsoleNarrator
    from mismatch.experiments.locate.types import Location

WHAT = "What to record"
RUN = Option("run", Path | None, "", "Run directory; none with --model.", argument=True)
PROMPTS, MAX_TOKENS = 8, 64  # of the run that --model makes
FLAGS = (
    Option(
        "sequences",
        int,
        WHAT,
        "Sequences of the run: the worst half, and others at random.",
        default=8,
        range=Range(1, MANY),
    ),
    Option(
        "max_sequence_tokens",
        int,
        WHAT,
        "Of each sequence, its beginning; memory and disk grow with it.",
        default=512,
        range=Range(2, MANY),
    ),
    Option(
        "budget_minutes",
        float,
        WHAT,
        "After which no further sequence or pair of sources is begun.",
        default=10.0,
        range=Range(0, MANY, above=True),
    ),
    Option("seed", int, WHAT, "Of the random sequences.", default=0, range=SEEDS),
)
DETAILS = switch("details", OUTPUT, "Every module of every layer.")


@with_flags(RUN, MODEL_FLAGS, FLAGS, OUT, DETAILS, JSON, TRUST_RUN)
def locate(flags: Flags) -> int:
    """Name the first module at which a side of a run parts from float32.

    Engine, trainer and plain forwards run on some of the run's tokens while every module is
    recorded. A module is a source if it errs on the same input beyond what its precision costs.

    Exit code 0: no module does. 1: one does, or a side is off and none says why. 2: nothing was
    recorded.

    Examples:
    mismatch locate runs/A
    mismatch locate --model MODEL
    """
    from rich.console import Console

    from mismatch.cli import session
    from mismatch.experiments.locate.judge import judge, to_document
    from mismatch.pipeline.locate_run import Asked, locate
    from mismatch.reports.sections.locate import section
    from mismatch.reports.terminal import print_alone
    from mismatch.run.directory import load_spec
    from mismatch.run.trust import require_trust

    narrator = session.narrator(silent=flags["as_json"])
    run = small_run(flags, narrator) if flags["run"] is None else flags["run"]
    if flags["run"] is not None:
        require_trust(run, load_spec(run), flags["trust_run"])
    asked = Asked(
        flags["sequences"],
        flags["max_sequence_tokens"],
        60 * flags["budget_minutes"],
        flags["seed"],
    )
    location = locate(run, narrator, asked, session.command())
    in_report(location, run)
    verdict = judge(location)
    if flags["as_json"]:
        typer.echo(json.dumps(to_document(location), indent=2, allow_nan=False))
    else:
        print_alone(section(location), verdict, Console(), run, "locate.json", flags["details"])
    return verdict.code


def small_run(flags: Flags, narrator: ConsoleNarrator) -> Path:
    """A check of 8 short responses, the trainer's own pass alone; its directory.

    Raises:
        MismatchError: no model, or the check cannot be done.
    """
    from mismatch.cli import session
    from mismatch.cli.to_spec import engine_spec
    from mismatch.models import resolve_model
    from mismatch.pipeline.commands import run_check
    from mismatch.pipeline.preflight import preflight
    from mismatch.reports.files import write_report
    from mismatch.run.directory import open_run
    from mismatch.specs import CheckSpec, PromptSpec, RolloutSpec, TrainSpec
    from mismatch.types import Sampling

    if flags["model"] is None:
        raise MismatchError("locate needs a run or a model", "mismatch locate RUN, or --model M")
    model = resolve_model(flags["model"])
    engine = engine_spec(flags, model, "vllm", None)
    revision, trust = engine.revision, engine.trust_remote_code
    spec = CheckSpec(
        rollout=RolloutSpec(
            engine=engine,
            prompts=PromptSpec(num_prompts=PROMPTS),
            sampling=Sampling(samples_per_prompt=1, max_tokens=MAX_TOKENS, seed=flags["seed"]),
        ),
        train=TrainSpec(model=model, revision=revision, trust_remote_code=trust),
        quick=True,
        noise_floor=False,
    )
    spec = session.placed(spec)
    preflight(spec)
    run, _ = open_run("check", spec, model, flags["out"], None)
    run_check(spec, run, narrator, None, session.command(), write_report)
    return run


def in_report(location: Location, run: Path) -> None:
    """Write the run's report again, with this section, if it has one."""
    from mismatch.pipeline.document import report_from_json
    from mismatch.reports.files import write_report
    from mismatch.run import store

    if not (run / "report.json").exists():
        return
    stored = report_from_json(store.load_document(run, "report.json"))
    write_report(run, stored.with_analyses(locate=location), store.load_tokens(run))
