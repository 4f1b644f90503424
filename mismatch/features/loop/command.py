"""`mismatch loop`: what a mismatch does to training, and what a fix restores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, flags_of, spec_values
from mismatch.cli.options import CHECK, DRY_RUN, FORCE, JSON, MODEL_FLAGS, NEW_RUN, TRUST_RUN
from mismatch.errors import MismatchError, require_packages
from mismatch.features.loop.spec import (
    AS_IS,
    LARGE_MODELS,
    LOOP,
    PATHS,
    Asked,
    Checked,
    LoopSpec,
    arm_of,
    read_arms,
    read_seeds,
)
from mismatch.models import resolve_model
from mismatch.specs import MODEL

if TYPE_CHECKING:
    from mismatch.doctor.fit import Fit
    from mismatch.features.loop.judge import LoopReport

# What --resume RUN may have with it and still go on as the run began.
BESIDE_RESUME = {
    *("resume", "arms", "seeds", "steps", "checkpoint_every", "dry_run", "force", "as_json")
}
DEFAULT_MODEL = "tiny-gpt-oss"
POOL, SAMPLES = 24, 8  # few prompts that come again soon: what can be learnt in some steps
NAMES = (
    "as-is, and fixes by name (mismatch fixes), several joined by +; also fp8-kv-cache, "
    "raw-logprobs, no-sinks, forward-sinks."
)
EACH = "Every arm is run with each of these seeds."
OF_CHECK = "Run of a check: take model, engine, trainer and prompts from it, and its verdicts."
LOOP_FIELDS = (
    "steps prompts mini_batches learning_rate loss clip old perfectible checkpoint_every reward"
)
SIDES = (
    *("prompts", "num_prompts", "samples_per_prompt", "max_tokens", "temperature"),
    *("engine", "dtype", "train_dtype", "attention", "nproc_per_node"),
)
SIZES = ("num_prompts", "samples_per_prompt", "max_tokens")  # a loop may take less than its check


@with_flags(
    MODEL_FLAGS[0],
    Option("like", Path | None, MODEL, OF_CHECK),
    Option("arms", str, LOOP, NAMES, default=AS_IS),
    Option("seeds", str, LOOP, EACH, default="0"),
    flags_of(LoopSpec, LOOP_FIELDS),
    tuple(
        replace(flag, default=SAMPLES) if flag.name == "samples_per_prompt" else flag
        for flag in CHECK
        if flag.name in SIDES
    ),
    NEW_RUN,
    TRUST_RUN,
    replace(DRY_RUN, help="Show arms, steps and memory of both sides; start nothing."),
    FORCE,
    JSON,
)
def loop(flags: Flags) -> int:
    """Train a few steps on-policy, with the mismatch and with its fixes, and show the curves.

    The engine samples, the FSDP2 world takes a GRPO step, and the engine gets the new weights,
    which are read back and compared. Every arm starts from the same weights with the same prompts.

    Exit code 0: every arm finished with every seed. 2: some did not.

    Examples:
    mismatch loop --dry-run
    mismatch loop --like RUN --arms as-is,seq-tis
    """
    from rich.console import Console

    from mismatch.cli import session
    from mismatch.features.loop.arms import memory_of_loop, run_loop
    from mismatch.features.loop.judge import loop_to_json
    from mismatch.features.loop.section import section
    from mismatch.pipeline.preflight import require_names
    from mismatch.reports.terminal import print_section, say

    wanted = asked(flags)
    session.require_directory(flags)
    require_names(wanted.loop.check)
    specs = {arm: arm_of(wanted.loop, arm).check for arm in wanted.arms}  # names first: 5 s less
    fits = {arm: memory_of_loop(check) for arm, check in specs.items()}
    if flags["dry_run"]:
        return plan(wanted, fits)
    if wanted.loop.check.train.python is None:
        require_packages("torch", "transformers")
    never = [fit for each in fits.values() for fit in each if fit.level == "does not fit"]
    refused = dict.fromkeys(text for fit in never if fit.certain for text in fit.warnings)
    if refused and not flags["force"]:
        raise MismatchError("\n    ".join(refused), "to start anyway: --force")
    narrator = session.narrator_of(flags, DEFAULT_MODEL)
    run_dir = session.open_run("loop", wanted.loop.check, flags)
    report = run_loop(wanted, run_dir, narrator, session.command(), save_page)
    if flags["as_json"]:
        typer.echo(json.dumps(loop_to_json(report), indent=2, allow_nan=False))
    else:
        print_section(section(report), Console())
        say(Console(), f"\nEverything is in {run_dir} (open loop.html)")
    return 0


def asked(flags: Flags) -> Asked:
    """Return what the flags ask, or what the run was asked that ``--resume RUN`` names."""
    from mismatch.features.loop.arms import read_settings
    from mismatch.run.directory import NEWEST, require_known_prompts
    from mismatch.run.trust import require_trust

    run, given = flags["resume"], flags.explicit
    if run in (None, NEWEST) or given - BESIDE_RESUME:
        return Asked(loop_spec(flags), read_arms(flags["arms"]), read_seeds(flags["seeds"]))
    before = read_settings(Path(run))
    check, reward = before.loop.check, before.loop.reward
    require_trust(Path(run), check, trusted=False)
    require_known_prompts(Path(run), check)
    if reward is not None:
        fault = f"{run} names a reward function: {reward}"
        fix = "if that is yours: give the flags of the run again, with --resume"
        raise MismatchError(fault, fix)
    engine, train = check.rollout.engine, check.train  # with the models of this installation
    engine = replace(engine, model=resolve_model(engine.model))
    train = replace(train, model=resolve_model(train.model))
    check = replace(check, rollout=replace(check.rollout, engine=engine), train=train)
    changed = {name: flags[name] for name in {"steps", "checkpoint_every"} & given}
    return Asked(
        replace(before.loop, check=check, **changed),
        read_arms(flags["arms"]) if "arms" in given or not before.arms else before.arms,
        read_seeds(flags["seeds"]) if "seeds" in given or not before.seeds else before.seeds,
    )


def plan(wanted: Asked, fits: Mapping[str, Sequence[Fit]]) -> int:
    """Print what would be run; 0 if it fits here, else 2."""
    from mismatch.reports.formatting import memory

    loop, arms, seeds = wanted
    samples = loop.check.rollout.sampling.samples_per_prompt
    steps = len(arms) * len(seeds) * loop.steps
    typer.echo(f"arms     {', '.join(arms)}; seeds {', '.join(map(str, seeds))}")
    typer.echo(f"steps    {loop.steps} of each, {steps} in all")
    typer.echo(f"a step   {loop.prompts} prompts x {samples}, {loop.mini_batches} updates")
    typer.echo(f"updates  AdamW, learning rate {loop.learning_rate:g}")
    code = 0
    for arm, fit in ((name, each) for name in arms for each in fits[name]):
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


def checked_of(run: Path) -> Checked | None:
    """Return the verdicts of a check, as it is and with its fixes; None if it has no report."""
    from mismatch.pipeline.saved_runs import REPORT, load_report, verdict_as_is

    if not (run / REPORT).exists():
        return None
    report = load_report(run)
    table = report.result("fixes")
    after = {row.id: row.verdict_after for row in (table.outcomes if table else ())}
    verdicts = {AS_IS: verdict_as_is(report), **after}
    size = report.comparisons[0].metrics["k3_kl"]
    return Checked(
        size.n_prompts,
        size.n_sequences // size.n_prompts,
        {arm: verdict.status for arm, verdict in verdicts.items() if verdict is not None},
    )


def loop_spec(flags: Flags) -> LoopSpec:
    """Return what all arms share; flags that a loop cannot honour are refused."""
    from mismatch.cli.to_spec import check_spec
    from mismatch.models import resolve_model
    from mismatch.run.directory import load_spec, require_known_prompts
    from mismatch.run.trust import require_trust

    values, small = spec_values(LoopSpec, flags, LOOP_FIELDS), False
    if flags["like"] is not None:
        run = flags["like"]
        if given := flags.explicit & ({"model", *SIDES} - {*SIZES}):
            fault = f"--like takes model, engine, trainer and prompts of {run}"
            raise MismatchError(fault, f"drop --{min(given).replace('_', '-')}, or --like")
        spec = load_spec(run)
        require_trust(run, spec, flags["trust_run"])
        if not flags["trust_run"]:
            require_known_prompts(run, spec)
        if spec.train.layers is not None:
            fault = f"--like {run}: {spec.train.layers} layers alone ran, whose text earns nothing"
            raise MismatchError(fault, "check the whole model")
        values["checked"] = checked_of(run)
        small = spec.rollout.engine.model == resolve_model(DEFAULT_MODEL)
        less = {name: flags[name] for name in SIZES if name in flags.explicit}
        prompts = {"num_prompts": less.pop("num_prompts")} if "num_prompts" in less else {}
        rollout = replace(
            spec.rollout,
            prompts=replace(spec.rollout.prompts, **prompts),
            sampling=replace(spec.rollout.sampling, **less),
        )
        spec = replace(spec, rollout=rollout)
    else:
        flags["model"] = flags["model"] or DEFAULT_MODEL
        small = flags["model"] == DEFAULT_MODEL
        if flags["num_prompts"] is None and flags["prompts"] is None:
            flags["num_prompts"] = POOL
        whole = Flags({flag.name: flag.default for flag in CHECK} | flags)
        whole.explicit = flags.explicit
        spec = check_spec(whole)
    if spec.train.master_dtype == "auto":  # an optimiser's steps are smaller than bf16's
        spec = replace(spec, train=replace(spec.train, master_dtype="fp32"))
    engine, sampling = spec.rollout.engine, spec.rollout.sampling
    if engine.servers or engine.engine not in PATHS:
        fault = f"the loop has no way to bring weights into {engine.engine}"
        raise MismatchError(fault, f"--engine {', '.join(PATHS)}")
    if sampling.temperature == 0:
        fault = "--temperature 0: greedy samples of a prompt are all the same"
        raise MismatchError(fault, "--temperature 1")
    if sampling.samples_per_prompt < 2:
        fault = "group-normalised advantages need several samples of a prompt"
        raise MismatchError(fault, "--samples-per-prompt 4")
    # The loop measures decode against the trainer; the other passes are a check's.
    rollout = replace(spec.rollout, exact_kl=0, engine=replace(engine, prefill=False))
    check = replace(spec, rollout=rollout, two_passes=False, noise_floor=False)
    if not small and "learning_rate" not in flags.explicit:
        values["learning_rate"] = LARGE_MODELS
    return LoopSpec(check=check, **values)
