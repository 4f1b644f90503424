"""`mismatch loop`: what a mismatch does to training, and what a fix restores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option, flag_of, flags_of, spec_values
from mismatch.cli.options import AROUND_A_RUN, CHECK
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
    names_in,
    read_seeds,
)
from mismatch.models import resolve_model
from mismatch.models.config import serves_mxfp4
from mismatch.specs import AS_STORED, MODEL

if TYPE_CHECKING:
    from mismatch.doctor.fit import Fit

# What --resume RUN may have with it and still go on as the run began.
BESIDE_RESUME = AROUND_A_RUN | {"arms", "seeds", "steps", "checkpoint_every"}
DEFAULT_MODEL = "tiny-gpt-oss"
POOL, SAMPLES = 24, 8  # few prompts that come again soon: what can be learnt in some steps
NAMES = "as-is, and fixes by name (mismatch fixes), several joined by +; also no-sinks."
SIZES = ("num_prompts", "samples_per_prompt", "max_tokens")  # a loop may take less than its check
SIDES = (
    *("model", "prompts", "temperature", "engine", "dtype", "nproc_per_node"),
    *("train_dtype", "attention"),
)
AROUND = ("out", "resume", "trust_run", "dry_run", "force")
OTHERWISE = {  # than in a check
    "samples_per_prompt": {"default": SAMPLES},
    "dry_run": {"help": "Show arms, steps and memory of both sides; start nothing."},
}


@with_flags(
    Option("like", Path | None, MODEL, "Take sides, prompts and verdicts of this check."),
    Option("arms", str, LOOP, NAMES, default=AS_IS),
    Option("seeds", str, LOOP, "Seeds that every arm is run with.", default="0"),
    flags_of(LoopSpec),
    tuple(
        replace(flag, **OTHERWISE.get(flag.name, {}))  # type: ignore[arg-type]
        for flag in CHECK
        if flag.name in (*SIDES, *SIZES, *AROUND)
    ),
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
    from mismatch.doctor.fit import warnings_of
    from mismatch.features.loop.arms import memory_of_loop, run_loop
    from mismatch.features.loop.judge import loop_to_json
    from mismatch.features.loop.section import page
    from mismatch.pipeline.preflight import require_names
    from mismatch.reports.terminal import print_page

    wanted = asked(flags)
    session.require_directory(flags)
    require_names(wanted.loop.check)
    checks = {arm: arm_of(wanted.loop, arm).check for arm in wanted.arms}  # names first: 5 s less
    sides = [(arm, fit) for arm, check in checks.items() for fit in memory_of_loop(check)]
    if flags["dry_run"]:
        return plan(wanted, sides)
    if wanted.loop.check.train.python is None:
        require_packages("torch", "transformers")
    never = warnings_of(fit for _, fit in sides if fit.certain)
    if never and not flags["force"]:
        raise MismatchError("\n    ".join(never), "to start anyway: --force")
    narrator = session.narrator_of(flags, DEFAULT_MODEL)
    run_dir = session.open_run("loop", wanted.loop.check, flags)
    report = run_loop(wanted, run_dir, narrator, session.command())
    if flags.as_json:
        typer.echo(json.dumps(loop_to_json(report), indent=2, allow_nan=False))
    else:
        print_page(page(report), Console(), run_dir)
    return 0


def asked(flags: Flags) -> Asked:
    """Return what the flags ask, or what the run was asked that ``--resume RUN`` names."""
    from mismatch.cli import session
    from mismatch.experiments.fixes.spec_edits import on_engine
    from mismatch.features.loop.arms import read_settings
    from mismatch.run.directory import NEWEST

    run, given = flags["resume"], flags.explicit
    arms, seeds = names_in(flags["arms"]), read_seeds(flags["seeds"])
    if run in (None, NEWEST) or given - BESIDE_RESUME:
        return Asked(loop_spec(flags), arms, seeds)
    before, trusted = read_settings(Path(run)), bool(flags.get("trust_run"))
    session.require_own(Path(run), before.loop.check, trusted)
    if before.loop.reward is not None and not trusted:
        fault = f"{run} names a reward function: {before.loop.reward}"
        raise MismatchError(fault, "if that is yours: --trust-run")
    changed = {name: flags[name] for name in {"steps", "checkpoint_every"} & given}
    check = before.loop.check  # with the models of this installation
    check = on_engine(check, model=resolve_model(check.rollout.engine.model))
    check = replace(check, train=replace(check.train, model=resolve_model(check.train.model)))
    return Asked(
        replace(before.loop, check=check, **changed),
        arms if "arms" in given else before.arms,
        seeds if "seeds" in given else before.seeds,
    )


def plan(wanted: Asked, sides: Sequence[tuple[str, Fit]]) -> int:
    """Print what would be run; 0 if it fits here, else 2."""
    from rich.console import Console

    from mismatch.doctor.fit import warnings_of
    from mismatch.reports.plan import memory_table, print_sections
    from mismatch.reports.section import Section, named

    loop, arms, seeds = wanted
    samples = loop.check.rollout.sampling.samples_per_prompt
    lines = [
        ("arms", f"{', '.join(arms)}; seeds {', '.join(map(str, seeds))}"),
        ("steps", f"{loop.steps} of each, {len(arms) * len(seeds) * loop.steps} in all"),
        ("a step", f"{loop.prompts} prompts x {samples}, {loop.mini_batches} updates of AdamW"),
        ("learning rate", f"{loop.learning_rate:g}"),
    ]
    memory = memory_table((f"{arm}: {fit.side}", fit) for arm, fit in sides)
    print_sections(
        Console(),
        Section("loop", "loop", tables=[named(lines)]),
        Section("memory", "memory", tables=[memory]),
        Section("warnings", "warnings", warnings=warnings_of(fit for _, fit in sides)),
    )
    return 2 if any(fit.level == "does not fit" for _, fit in sides) else 0


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
    from mismatch.cli import session
    from mismatch.cli.to_spec import check_spec
    from mismatch.run.directory import load_spec

    values, run = spec_values(LoopSpec, flags), flags["like"]
    if run is not None:
        if given := flags.explicit & {*SIDES}:
            fault = f"--like takes model, engine, trainer and prompts of {run}"
            raise MismatchError(fault, f"drop {flag_of(min(given))}, or --like")
        spec = load_spec(run)
        session.require_own(run, spec, flags["trust_run"])
        if spec.train.layers is not None:
            fault = f"--like {run}: {spec.train.layers} layers alone ran, whose text earns nothing"
            raise MismatchError(fault, "check the whole model")
        values["checked"] = checked_of(run)
        less = {name: flags[name] for name in SIZES if name in flags.explicit}
        count = less.pop("num_prompts", spec.rollout.prompts.num_prompts)
        prompts = replace(spec.rollout.prompts, num_prompts=count)
        sampling = replace(spec.rollout.sampling, **less)
        spec = replace(spec, rollout=replace(spec.rollout, prompts=prompts, sampling=sampling))
    else:
        flags["model"] = flags["model"] or DEFAULT_MODEL
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
    if engine.weights not in (AS_STORED, "bf16") or serves_mxfp4(engine):
        fault = "a push brings the trainer's weights in bf16; experts in another form stay behind"
        raise MismatchError(fault, "mismatch check --weights engine=bf16, then loop --like RUN")
    if serves_mxfp4(replace(engine, weights=AS_STORED)):  # exported under the engine's names
        spec = replace(spec, train=replace(spec.train, weights="bf16"))
    if sampling.temperature == 0 or sampling.samples_per_prompt < 2:
        drawn = f"--temperature {sampling.temperature:g}"
        fault = f"{drawn}: advantages need several samples of a prompt that may differ"
        raise MismatchError(fault, "--temperature 1 --samples-per-prompt 4")
    # The loop measures decode against the trainer; the other passes are a check's.
    rollout = replace(spec.rollout, exact_kl=0, engine=replace(engine, prefill=False))
    check = replace(spec, rollout=rollout, two_passes=False, noise_floor=False)
    if engine.model != resolve_model(DEFAULT_MODEL) and "learning_rate" not in flags.explicit:
        values["learning_rate"] = LARGE_MODELS
    return LoopSpec(check=check, **values)
