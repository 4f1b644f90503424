"""`mismatch corrections`: what a correction in the loss would do to the tokens of a run."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from mismatch.cli.flags import Flags, with_flags
from mismatch.cli.options import OUTPUT, RunArgument


class Target(StrEnum):
    token = "token"
    sequence = "sequence"


BOUNDS = "Bounds, as ratios"


def _bound(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=help, rich_help_panel=BOUNDS)
    return option


class BoundFlags:
    cap: Annotated[float, _bound("C of TIS: weights above are cut to it.")] = 2.0
    mask_cap: Annotated[float, _bound("C of MIS: tokens or sequences above are dropped.")] = 2.0
    band: Annotated[tuple[float, float], _bound("Ratios that IcePop keeps: LOW HIGH.")] = (0.5, 5.0)
    geometric: Annotated[
        tuple[float, float], _bound("Mean ratios of the sequences that are kept: LOW HIGH.")
    ] = (0.999, 1.001)
    veto: Annotated[float, _bound("A token ratio under it drops its sequence.")] = 1e-4
    sequence_cap: Annotated[float, _bound("Cap of TRL's sequence_mask.")] = 3.0


class PreviewFlags:
    target: Annotated[
        Target,
        typer.Option(help="Rank by the ratio of the token or of the sequence."),
    ] = Target.token
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences of a training batch; default: those of the run."),
    ] = None
    scoring: Annotated[str, typer.Option(help="The trainer's scoring.", rich_help_panel=OUTPUT)] = (
        "fsdp"
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)] = (
        False
    )


@with_flags(RunArgument, PreviewFlags, BoundFlags)
def corrections(flags: Flags) -> int:
    """Try TIS, IcePop, MIS, rejection and the rest on the tokens of a run.

    Nothing is sampled or scored again. Kept shares, effective sizes, residual bias, gradient cosine
    where there are rewards, a ranking, and the setting for verl, TRL, NeMo-RL and prime-rl.
    A correction changes no delta and no verdict: the exit code is 0.
    """
    from mismatch.analysis.comparison import is_sampling_law
    from mismatch.analysis.corrections.preview import preview
    from mismatch.codec import to_json
    from mismatch.metrics.corrections import Settings
    from mismatch.run import store
    from mismatch.run.directory import load_spec

    settings = Settings(**flags.pick("cap mask_cap band geometric veto sequence_cap"))
    run = flags["run"]
    spec = load_spec(run)
    rollout = store.load_rollout(run)
    left = store.load_scoring(run, f"{spec.rollout.engine.engine}:decode")
    right = store.load_scoring(run, flags["scoring"])
    made = preview(
        rollout,
        left,
        right,
        sampled_by_left=is_sampling_law(rollout, left),
        settings=settings,
        target=flags["target"].value,
        batch=flags["batch"],
        seed=spec.seed,
    )
    if flags["as_json"]:
        document = {"schema": "mismatch.corrections/1", **to_json(made)}
        typer.echo(json.dumps(document, indent=2))
        return 0
    from rich.console import Console

    from mismatch.reports.analyses import print_corrections

    print_corrections(made, Console())
    return 0
