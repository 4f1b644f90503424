"""`mismatch corrections`: what a correction in the loss would do to the tokens of a run."""

from __future__ import annotations

import json

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, RUN, Flags, Option
from mismatch.keys import Key
from mismatch.specs import MANY, OUTPUT, Range

BOUNDS = "Bounds, as ratios"
DISTANCES = "Bounds, as distances (p: the trainer's probability, q: the engine's)"
PAIR = tuple[float, float]
BOUND_FLAGS = (
    Option("cap", float, BOUNDS, "C of TIS: weights above are cut to it.", default=2.0),
    Option(
        "mask_cap", float, BOUNDS, "C of MIS: tokens or sequences above are dropped.", default=2.0
    ),
    Option("band", PAIR, BOUNDS, "Ratios that IcePop keeps: LOW HIGH.", default=(0.5, 5.0)),
    Option(
        "geometric",
        PAIR,
        BOUNDS,
        "Mean ratios of the sequences that are kept: LOW HIGH.",
        default=(0.999, 1.001),
    ),
    Option("veto", float, BOUNDS, "A smaller token ratio drops its sequence.", default=1e-4),
    Option("sequence_cap", float, BOUNDS, "Cap of TRL's sequence_mask.", default=3.0),
    Option("cis_lambda", float, BOUNDS, "Lambda of CIS.", default=2.3),
    Option("cis_kappa", float, BOUNDS, "Kappa of CIS, a lower limit on 1 - p.", default=5e-3),
    Option("gspo", PAIR, BOUNDS, "GSPO's clip range: LOW HIGH.", default=(0.9997, 1.0004)),
    Option("ipo", float, DISTANCES, "Largest |p - q| that IPO keeps.", default=0.3),
    Option("dppo_tv", float, DISTANCES, "Largest |p - q| of DPPO.", default=0.2),
    Option("dppo_kl", float, DISTANCES, "Largest binary KL of DPPO.", default=0.05),
    Option("m2po", float, DISTANCES, "Mean squared log-ratio that M2PO leaves.", default=0.04),
)
BATCH = Option(
    "batch",
    int | None,
    "",
    "Sequences of a training batch; default: those of the run.",
    range=Range(1, MANY),
)
SCORING = Option("scoring", str, OUTPUT, "The trainer's scoring.", default="fsdp")


@with_flags(RUN, BATCH, SCORING, JSON, BOUND_FLAGS)
def corrections(flags: Flags) -> int:
    """Try TIS, IcePop, MIS, IPO, DPPO, GSPO, M2PO and more on a run's tokens.

    Nothing is sampled or scored again. Prints kept shares, effective sizes, residual bias, a
    ranking, and the setting for verl, TRL, NeMo-RL, prime-rl and others. A correction changes
    no delta and no verdict: the exit code is 0.

    Examples:
    mismatch corrections runs/A
    """
    from mismatch.analysis.comparison import is_sampling_law
    from mismatch.codec import to_json
    from mismatch.features.corrections.preview import preview
    from mismatch.metrics.importance_weights import Settings
    from mismatch.run import store
    from mismatch.run.directory import load_spec

    settings = Settings(**flags.pick(" ".join(option.name for option in BOUND_FLAGS)))
    run = flags["run"]
    spec = load_spec(run)
    rollout = store.load_rollout(run)
    left = store.load_scoring(run, Key.of(spec.rollout.engine.engine, "decode"))
    right = store.load_scoring(run, flags["scoring"])
    tried = preview(
        rollout,
        left,
        right,
        sampled_by_left=is_sampling_law(rollout, left),
        settings=settings,
        batch=flags["batch"],
        seed=spec.seed,
    )
    if flags.as_json:
        document = {"schema": "mismatch.corrections/2", **to_json(tried)}
        typer.echo(json.dumps(document, indent=2))
        return 0
    from rich.console import Console

    from mismatch.features.corrections.section import shown
    from mismatch.reports.terminal import print_section

    print_section(shown(tried), Console())
    return 0
