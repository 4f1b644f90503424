"""A check whose trainer fails scores its tokens once more, with the whole model on one rank.

The error that goes away is of the layout: of what tensor, expert or pipeline parallelism reduces,
cuts or sends. Errors are distances from the float32 reference; it does not know which rank erred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mismatch.analysis.cause_results import ONE_RANK, Cause, Evidence, Excluded
from mismatch.analysis.results import Displaced, Finding
from mismatch.codec import from_json, to_json
from mismatch.features.megatron.layout import read_layout
from mismatch.keys import REFERENCE, TRAIN, TRAINER_FLOAT32, Key
from mismatch.pipeline.build import square_of
from mismatch.processes.adapter import keep_scores, prepared
from mismatch.processes.launch import started
from mismatch.processes.stages import Stages
from mismatch.reports.formatting import number
from mismatch.reports.section import Section
from mismatch.run import manifest, store
from mismatch.specs import CheckSpec, Pass
from mismatch.types import Report

FILE, SCHEMA, ID = "layout.json", "mismatch.layout/1", "layout"
CAUSE = "tp-layout"
GOES = 0.5  # share of the error that has to go before the layout is its cause


@dataclass(frozen=True, slots=True)
class LayoutEffect:
    """What the layout does to the trainer's error.

    Attributes:
        precision: in which both computed.
        spread, alone: mean |distance| from the float32 reference in the run's layout and with the
            whole model on every rank, nats per token.
    """

    layout: str
    precision: str
    spread: float
    alone: float

    @property
    def removed(self) -> float:
        """Return the share of the error that is gone on one rank."""
        return 1 - self.alone / self.spread if self.spread > 0 else 0.0


def score_again(stages: Stages) -> None:
    """Score on one rank what failed, in float32 where that failed; leave ``layout.json``.

    Raises:
        MismatchError: the whole model does not fit on one rank, or a rank failed.
    """
    run_dir, train = stages.run_dir, stages.spec.train
    if train.scorer != "megatron":
        return
    layout = read_layout(train.scorer_config, train.scorer_overrides)
    if layout.tp * layout.ep * layout.pp == 1:
        return
    square = square_of(run_dir, stages.spec)
    every: list[Finding | Displaced] = []
    if square is not None:
        every = [*square.findings, *square.displaced]
    failed = [
        Key(each.scoring).precision
        for each in every
        if each.standing == "beyond" and Key(each.scoring).side == TRAIN
    ]
    made_by = ",".join(sorted(failed))
    if manifest.is_current(run_dir, FILE, made_by):
        return
    manifest.forget(run_dir, FILE)  # of other scorings than those that are there now
    if not failed:
        return
    exact = "fp32" in failed
    alone = f"tp=1,dispatcher={layout.dispatcher}" + f",router={layout.router}" * bool(
        layout.router
    )
    spec = replace(
        train,
        scorer_config=alone,
        scorer_overrides=(),
        dtype="fp32" if exact else train.dtype,
    )
    passes = [Pass("one_rank", spec)]
    rollout = store.load_rollout(run_dir)
    run = prepared(stages.spec, passes, run_dir, rollout, stages.placement.trainer)
    with started("trainer", run.command, run_dir, env=run.env) as worker:
        stages.wait(worker, ID, "score: megatron, the whole model on one rank")
    keep_scores(passes, run_dir, rollout)
    reference = store.load_scoring(run_dir, REFERENCE).logprobs
    names = (TRAINER_FLOAT32 if exact else TRAIN, passes[0].name)
    errors = [np.abs(store.load_scoring(run_dir, name).logprobs - reference) for name in names]
    spread, one = (float(each.mean()) for each in errors)
    effect = LayoutEffect(str(layout), spec.dtype, spread, one)
    document = {"schema": SCHEMA, ID: to_json(effect)}
    store.save_document(run_dir, FILE, document, schema=SCHEMA, made_by=made_by)


def of_run(run_dir: Path, spec: CheckSpec) -> LayoutEffect | None:
    """Return what a check left in its run directory; None where it scored on no single rank.

    Raises:
        MismatchError: it is damaged.
    """
    if not (run_dir / FILE).exists():
        return None
    return from_json(LayoutEffect, store.load_document(run_dir, FILE)[ID])


def causes_of(effect: LayoutEffect) -> tuple[Cause, ...]:
    """Return the layout as a cause where its error goes away on one rank."""
    if effect.removed < GOES:
        return ()
    evidence = (
        Evidence(f"error with {effect.layout}, {effect.precision}, nats", effect.spread),
        Evidence(ONE_RANK, effect.alone),
    )
    return (Cause(CAUSE, "confirmed", "trainer", None, evidence, fact=True),)


def excluded_by(effect: LayoutEffect) -> tuple[Excluded, ...]:
    """Return that it is not the layout, where the error stays on one rank."""
    if effect.removed >= GOES:
        return ()
    evidence = Evidence("error with the whole model on one rank, nats", effect.alone)
    return (Excluded("trainer", (CAUSE,), evidence),)


def section(effect: LayoutEffect, report: Report) -> Section:
    """Show both errors."""
    stays = "goes away" if effect.removed >= GOES else "stays"
    said = (
        f"In {effect.precision} Megatron-Core is {number(effect.spread)} nats from the float32 "
        f"reference with {effect.layout}, and {number(effect.alone)} nats with the whole model on "
        f"one rank: the error {stays}"
    )
    return Section(
        ID,
        "Layout of the trainer",
        "The same tokens and weights, scored by the same code without tensor, expert and pipeline "
        "parallelism.",
        sentences=[f"{said}."],
        short=said,
    )
