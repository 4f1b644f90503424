"""`mismatch loop`: what a mismatch does to training, and what a fix restores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, flags_of, spec_values
from mismatch.cli.options import (
    CONFIG,
    ENGINE_FLAGS,
    JSON,
    MODEL_FLAGS,
    NEW_RUN,
    PROMPT_FLAGS,
    ROUTING,
    TRAIN_FLAGS,
    VERL_FLAGS,
)
from mismatch.errors import MismatchError
from mismatch.experiments.loop.types import AS_IS, LOOP, LoopSpec

if TYPE_CHECKING:
    from mismatch.experiments.loop.judge import LoopReport

DEFAULT_MODEL = "tiny-gpt-oss"
POOL = 160
ARMS = (
    Option(
        "arms",
        str,
        LOOP,
        "as-is, and fixes by name (mismatch fixes), several joined by +; also frozen-attention, "
        "fp8-kv-cache, router-noise=SIZE, no-sinks.",
        default=AS_IS,
    ),
    Option(
        "seeds", str, LOOP, "Of prompts, sampling and mini-batches, each an own run.", default="0"
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
    PROMPT_FLAGS,
    ENGINE_FLAGS,
    ROUTING,
    TRAIN_FLAGS,
    VERL_FLAGS,
    NEW_RUN,
    JSON,
    CONFIG,
)
def loop(flags: Flags) -> int:
    """Train a few steps on-policy, with the mismatch and with its fixes, and show the curves.

    The engine samples, the FSDP2 world takes a GRPO step, the weights go back into the engine and
    are read back there. Every arm starts from the same weights with the same prompts.

    Exit code 0: every arm and seed ran to its end. 2: one did not.
    """
    from rich.console import Console

    from mismatch.cli import session
    from mismatch.experiments.loop.judge import loop_to_json
    from mismatch.experiments.loop.types import read_arms, read_seeds
    from mismatch.pipeline.loop import run_loop
    from mismatch.reports.sections.loop import section
    from mismatch.reports.terminal import print_section, say

    base = loop_spec(flags)
    arms, seeds = read_arms(flags["arms"]), read_seeds(flags["seeds"])
    told = session.ConsoleNarrator(Console(stderr=flags["as_json"]))
    if flags["model"] is None:
        told.note(f"no --model was given: the embedded {DEFAULT_MODEL} is taken")
    run_dir = session.open_run("loop", base.check, flags)
    report = run_loop(base, arms, seeds, run_dir, told, session.command(), save_page)
    if flags["as_json"]:
        typer.echo(json.dumps(loop_to_json(report), indent=2, allow_nan=False))
    else:
        print_section(section(report), Console())
        say(Console(), f"\nEverything is in {run_dir} (open loop.html)")
    return 0


def save_page(run_dir: Path, report: LoopReport) -> None:
    """Write loop.html."""
    from mismatch.reports.html import show_page
    from mismatch.reports.sections.loop import page
    from mismatch.run import store

    store.write_text(run_dir / "loop.html", show_page(page(report)))


def loop_spec(flags: Flags) -> LoopSpec:
    """What all arms share.

    Raises:
        MismatchError: flags that a loop cannot honour.
    """
    from mismatch.cli.to_spec import check_spec, verl_model, with_trainer

    flags["model"] = flags["model"] or verl_model(flags) or DEFAULT_MODEL
    flags["train_model"] = None
    if flags["num_prompts"] is None and flags["prompts"] is None:
        flags["num_prompts"] = POOL
    spec, _ = with_trainer(check_spec(flags), flags)
    if spec.other_engine is not None or (spec.rollout.engine.data_parallel_size or 1) > 1:
        raise MismatchError("a loop has one engine", "one --engine, and no --data-parallel-size")
    if spec.rollout.prompts.environment is not None:
        raise MismatchError("a loop has one turn a sequence", "drop --environment")
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
    rollout = replace(spec.rollout, exact_kl=0)
    check = replace(spec, train=train, rollout=rollout, noise_floor=False, two_passes=False)
    return LoopSpec(check=check, **spec_values(LoopSpec, flags, LOOP_FIELDS))
