"""`mismatch loop`: what a mismatch does to training, and what a fix restores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.configuration import configured, configured_model
from mismatch.cli.flags import Flags, Option, flags_of, spec_values
from mismatch.cli.options import (
    CONFIG,
    CONFIGURATION_FLAGS,
    DRY_RUN,
    ENGINE_FLAGS,
    FORCE,
    GPUS,
    JSON,
    MODEL_FLAGS,
    NEW_RUN,
    PROMPT_FLAGS,
    ROUTING,
    TRAIN_FLAGS,
)
from mismatch.errors import MismatchError
from mismatch.features.loop.spec import AS_IS, LARGE_MODELS, LOOP, LoopSpec
from mismatch.specs import MANY, CheckSpec, Range, RolloutSpec

if TYPE_CHECKING:
    from mismatch.features.loop.judge import LoopReport

# What --resume RUN may have beside it and still go on as the run began.
BESIDE_RESUME = frozenset(
    (
        *("resume", "arms", "seeds", "steps", "checkpoint_every"),
        *("budget_minutes", "dry_run", "force", "as_json"),
    )
)
DEFAULT_MODEL = "tiny-gpt-oss"
EXACT_KL = RolloutSpec().exact_kl
POOL, SAMPLES = 24, 8  # few prompts that come again soon: what can be learnt in some steps
ARMS = (
    Option(
        "arms",
        str,
        LOOP,
        "as-is, and fixes by name (mismatch fixes), several joined by +; also frozen-attention, "
        "fp8-kv-cache, raw-logprobs, router-noise=SIZE, no-sinks, forward-sinks.",
        default=AS_IS,
    ),
    Option("seeds", str, LOOP, "Each a run of its own, over all arms.", default="0"),
    Option(
        "full_check",
        bool,
        LOOP,
        "The first and the last step's tokens get all passes of a check.",
        default=True,
    ),
    Option(
        "budget_minutes",
        float | None,
        LOOP,
        "Stop then; arms and seeds share it. --resume goes on.",
        range=Range(0, MANY, above=True),
    ),
)
LOOP_FIELDS = (
    "steps prompts mini_batches learning_rate loss clip max_norm old path perfectible "
    "checkpoint_every reward"
)


@with_flags(
    MODEL_FLAGS,
    ARMS,
    flags_of(LoopSpec, LOOP_FIELDS),
    tuple(
        replace(flag, default=SAMPLES) if flag.name == "samples_per_prompt" else flag
        for flag in PROMPT_FLAGS
    ),
    ENGINE_FLAGS,
    ROUTING,
    TRAIN_FLAGS,
    CONFIGURATION_FLAGS,
    NEW_RUN,
    replace(DRY_RUN, help="Show arms, steps and memory of both sides; start nothing."),
    GPUS,
    FORCE,
    JSON,
    CONFIG,
)
def loop(flags: Flags) -> int:
    """Train a few steps on-policy, with the mismatch and with its fixes, and show the curves.

    The engine samples, the FSDP2 world takes a GRPO step, the weights go back into the engine and
    are read back there. Every arm starts from the same weights with the same prompts.

    Exit code 0: every arm and seed ran to its end. 2: one did not.

    Examples:
    mismatch loop --dry-run
    mismatch loop --model tiny-gpt-oss
    """
    from rich.console import Console

    from mismatch.cli import session
    from mismatch.features.loop.arms import run_loop
    from mismatch.features.loop.judge import loop_to_json
    from mismatch.features.loop.section import section
    from mismatch.features.loop.spec import arm_of
    from mismatch.reports.terminal import print_section, say

    base, arms, seeds = asked(flags)
    for arm_spec in (arm_of(base, arm) for arm in arms):
        refused = [*unfit(arm_spec)]
        if flags["dry_run"] or not refused or flags["force"]:
            continue
        raise MismatchError("\n    ".join(refused), "to start all the same: --force")
    if flags["dry_run"]:
        return plan(base, arms, seeds, flags["gpus"])
    narrator = session.ConsoleNarrator(Console(stderr=flags["as_json"]))
    if not (flags.explicit & {"model", "resume"} or configured_model(flags)):
        narrator.note(f"no --model was given: the embedded {DEFAULT_MODEL} is taken")
    run_dir = session.open_run("loop", base.check, flags)
    report = run_loop(
        base, arms, seeds, run_dir, narrator, session.command(), save_page, flags["budget_minutes"]
    )
    if flags["as_json"]:
        typer.echo(json.dumps(loop_to_json(report), indent=2, allow_nan=False))
    else:
        print_section(section(report), Console())
        say(Console(), f"\nEverything is in {run_dir} (open loop.html)")
    return 0


def asked(flags: Flags) -> tuple[LoopSpec, tuple[str, ...], tuple[int, ...]]:
    """Settings, arms and seeds: of the flags, or of the run that ``--resume RUN`` alone names.

    Raises:
        MismatchError: flags that a loop cannot honour, no such run, or one that names code.
    """
    from mismatch.features.loop.arms import read_settings
    from mismatch.features.loop.spec import read_arms, read_seeds
    from mismatch.run.directory import NEWEST
    from mismatch.run.trust import require_trust

    run = flags["resume"]
    if run in (None, NEWEST) or flags.explicit - BESIDE_RESUME:
        return loop_spec(flags), read_arms(flags["arms"]), read_seeds(flags["seeds"])
    base, arms, seeds = read_settings(Path(run))
    require_trust(Path(run), base.check, trusted=False)
    if base.reward is not None:
        raise MismatchError(
            f"{run} has a reward function of its own: {base.reward}",
            "if that is yours: give the flags of the run again, with --resume",
        )
    changed = {name: flags[name] for name in {"steps", "checkpoint_every"} & flags.explicit}
    base = replace(base, check=resolved(base.check), **changed)
    given = flags.explicit
    return (
        base,
        read_arms(flags["arms"]) if "arms" in given or not arms else tuple(arms),
        read_seeds(flags["seeds"]) if "seeds" in given or not seeds else tuple(seeds),
    )


def resolved(check: CheckSpec) -> CheckSpec:
    """A stored spec with the models of this installation."""
    from mismatch.models import resolve_model

    engine, train = check.rollout.engine, check.train
    rollout = replace(check.rollout, engine=replace(engine, model=resolve_model(engine.model)))
    return replace(check, rollout=rollout, train=replace(train, model=resolve_model(train.model)))


def unfit(arm_spec: LoopSpec) -> Iterator[str]:
    """Why engine and trainer, with gradients and moments, can never be here at once."""
    from mismatch.features.loop.cost import memory_of_loop

    for fit in memory_of_loop(arm_spec.check):
        if fit.level == "does not fit" and fit.certain:
            yield from fit.warnings


def plan(
    base: LoopSpec, arms: tuple[str, ...], seeds: tuple[int, ...], gpus: str | None = None
) -> int:
    """Print what would be run; 0 if it fits here, else 2.

    Args:
        gpus: in place of this machine's own, e.g. "8xH100-80GB".
    """
    from mismatch.doctor.machine import inspect_machine, machine_with, parse_kind
    from mismatch.features.loop.cost import memory_of_loop, seconds_of_step
    from mismatch.features.loop.spec import arm_of
    from mismatch.reports.formatting import memory, number

    machine = inspect_machine(try_imports=False)
    if gpus:
        machine = machine_with(machine, *parse_kind(gpus))
    samples = base.check.rollout.sampling.samples_per_prompt
    steps = len(arms) * len(seeds) * base.steps
    typer.echo(f"arms     {', '.join(arms)}; seeds {', '.join(map(str, seeds))}")
    typer.echo(f"steps    {base.steps} of each, {steps} in all")
    typer.echo(f"a step   {base.prompts} prompts x {samples}, {base.mini_batches} updates")
    if (times := seconds_of_step(base, machine)) is None:
        typer.echo("time     unknown: neither the model's sizes nor the GPU's kind may be missing")
    else:
        least, most = (number(each) for each in times)
        whole = " to ".join(number(each * steps / 60) for each in times)
        estimate = "an estimate from sizes"
        typer.echo(f"time     {least} to {most} s a step, {whole} min in all: {estimate}")
    code = 0
    for arm in arms:
        for fit in memory_of_loop(arm_of(base, arm).check, machine):
            need, room = memory(fit.needed), memory(fit.capacity)
            typer.echo(f"memory   {arm}, {fit.side}: {need} of {room}: {fit.level}")
            for warning in fit.warnings:
                typer.echo(f"         {warning}")
            code = 2 if fit.level == "does not fit" else code
    return code


def save_page(run_dir: Path, report: LoopReport) -> None:
    """Write loop.html."""
    from mismatch.features.loop.section import page
    from mismatch.reports.html import show_page
    from mismatch.run import store

    store.write_text(run_dir / "loop.html", show_page(page(report)))


def loop_spec(flags: Flags) -> LoopSpec:
    """What all arms share.

    Raises:
        MismatchError: flags that a loop cannot honour.
    """
    from mismatch.cli.to_spec import check_spec

    flags["model"] = flags["model"] or configured_model(flags) or DEFAULT_MODEL
    flags["train_model"] = None
    if flags["num_prompts"] is None and flags["prompts"] is None:
        flags["num_prompts"] = POOL
    # A check's flag of this name belongs to its fixes.
    of_check = Flags({name: value for name, value in flags.items() if name != "budget_minutes"})
    of_check.explicit = flags.explicit - {"budget_minutes"}
    spec = configured(check_spec(of_check), of_check).spec
    if spec.rollout.sampling.temperature == 0:
        raise MismatchError(
            "--temperature 0: greedy samples of a prompt are all the same", "--temperature 1"
        )
    if spec.rollout.sampling.samples_per_prompt < 2:
        raise MismatchError(
            "group-normalised advantages need several samples of a prompt",
            "--samples-per-prompt 4",
        )
    train = spec.train
    if "master_dtype" not in flags.explicit:  # an optimiser's steps are smaller than bf16's
        train = replace(train, master_dtype="fp32")
    engine, full = spec.rollout.engine, flags["full_check"]
    float32 = (engine.dtype, train.dtype) == ("fp32", "fp32")  # nothing rounds
    rollout = replace(spec.rollout, exact_kl=EXACT_KL if full else 0)
    check = replace(spec, train=train, rollout=rollout, two_passes=False)
    check = replace(check, noise_floor=full and not float32)
    values = spec_values(LoopSpec, flags, LOOP_FIELDS)
    if flags["model"] != DEFAULT_MODEL and "learning_rate" not in flags.explicit:
        values["learning_rate"] = LARGE_MODELS
    return LoopSpec(check=check, **values)
