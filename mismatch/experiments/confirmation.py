"""What experiments say of the causes of a run: which they confirm, which they rule out.

A cause is confirmed where the experiment that takes it out removes the mismatch, and ruled out
where the mismatch stays, or of little weight where a side states it. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mismatch.analysis.cause_results import LITTLE, Cause, Causes, Evidence, RuledOut, Side
from mismatch.analysis.diagnosis.case import Case, above, below
from mismatch.analysis.diagnosis.ranking import in_order
from mismatch.experiments.results import GONE, STAYS, Experiment, Outcome
from mismatch.metrics.inference import jackknife_error, student
from mismatch.types import Estimate, Floats


def gone(before: Case, after: Case) -> Estimate:
    """Share of mean |delta| that goes from one measurement to another, by prompt (jackknife).

    1 - (mean |delta| after) / (mean |delta| before); the tokens may be others, the prompts not.
    """
    if len(before.delta) == len(after.delta) and np.array_equal(
        before.engine.token_ids, after.engine.token_ids
    ):
        return before.share(after.delta)
    size = 1 + min(int(case.rollout.prompt_index.max()) for case in (before, after))
    rows = []
    for case in (before, after):
        prompts = case.rollout.prompt_index[case.sequence]
        rows.append(np.bincount(prompts, np.abs(case.delta), size)[:size])
        rows.append(np.bincount(prompts, minlength=size)[:size])
    common = (rows[1] > 0) & (rows[3] > 0)  # prompts that both have
    sums = np.array([row[common] for row in rows])

    def share(of: Floats) -> Floats:
        return np.asarray(1 - (of[2] / of[3]) / (of[0] / of[1]))

    whole, n_prompts = sums.sum(axis=1), sums.shape[1]
    value, low, high = float(share(whole)), None, None
    if n_prompts > 1:
        arm = student(n_prompts - 1) * jackknife_error(share(whole[:, None] - sums))
        low, high = value - arm, value + arm
    return Estimate(value, low, high, int(whole[3]), after.rollout.n_sequences, n_prompts)


def judged(experiment: Experiment, before: Case, after: Case, seconds: float) -> Experiment:
    """Return an experiment with what it said."""
    share = gone(before, after)
    outcome: Outcome = "undecided"
    if above(share, GONE):
        outcome = "confirmed"
    elif below(share, STAYS):
        outcome = "ruled out"
    return replace(experiment, outcome=outcome, gone=share, seconds=seconds)


def settled(causes: Causes, experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments; one is undecided where less went than rules out, yet no cause that
    it asks about would take more."""

    def open_still(experiment: Experiment) -> bool:
        about = [cause for cause in causes.ranked if _asks(experiment, cause)]
        contradicted = any(_contradicts(experiment, cause, causes) for cause in about)
        return experiment.outcome == "ruled out" and bool(about) and not contradicted

    return [replace(e, outcome="undecided") if open_still(e) else e for e in experiments]


class Applied(NamedTuple):
    """The causes after their experiments."""

    causes: Causes
    confirmed: tuple[str, ...]
    ruled_out: tuple[str, ...]


def applied(causes: Causes, experiments: Sequence[Experiment]) -> Applied:
    """Return the causes after their experiments, and the ids that were confirmed and ruled out.

    The share of a cause is that of the experiment that confirms it, where no other cause shares
    the same one.
    """
    found = []
    for cause in causes.ranked:
        against: dict[str, set[str]] = {}  # name -> sides on which an experiment has ruled it out
        for experiment in experiments:
            if _contradicts(experiment, cause, causes):
                for name in experiment.tests:
                    against.setdefault(name, set()).add(experiment.side)
        found.append((cause, against, _narrowest_proof(cause, experiments, against)))
    uses = Counter(proof.experiment.id for _, _, proof in found if proof is not None)
    kept: list[Cause] = []
    dropped: list[RuledOut] = []
    confirmed: list[str] = []
    ruled_out: set[str] = set()
    for cause, against, proof in found:
        out = {n for n in (cause.id, *cause.alike) if _sides(cause.side) <= against.get(n, set())}
        ruled_out |= out
        alike = tuple(name for name in cause.alike if name not in out)
        if proof is not None:
            experiment, name, left = proof
            confirmed.append(name)
            sole = experiment.gone is not None and uses[experiment.id] == 1
            kept.append(
                replace(
                    cause,
                    id=name,
                    status="confirmed",
                    side=experiment.side,
                    effect=experiment.gone if sole else cause.effect,
                    evidence=(*cause.evidence, *_evidence(experiment)),
                    alike=tuple(other for other in alike if other in left and other != name),
                )
            )
        elif cause.stated and cause.id in out:
            kept += _of_little(cause, experiments)
        elif cause.id not in out or cause.status == "confirmed":
            kept.append(_with_evidence(replace(cause, alike=alike), experiments))
        elif alike:  # what it could also be is what is left
            left_of = replace(cause, id=alike[0], alike=alike[1:])
            kept.append(_with_evidence(left_of, experiments))
        else:
            tried = [e for e in experiments if e.outcome == "ruled out" and cause.id in e.tests]
            evidence = tuple(item for experiment in tried for item in _evidence(experiment))
            dropped.append(RuledOut("experiment", (cause.id,), evidence))
    # Experiments that confirm what no detector suspected, the narrowest first.
    engines = [e for e in experiments if e.outcome == "ruled out" and e.side == "engine"]
    out_of_engine = {name for experiment in engines for name in experiment.tests}
    for experiment in sorted(experiments, key=lambda each: len(each.tests)):
        yes = experiment.names and experiment.outcome == "confirmed"
        if yes and not set(confirmed) & set(experiment.tests):
            confirmed.append(experiment.names)
            alike = tuple(name for name in experiment.tests[1:] if name not in out_of_engine)
            side, share, evidence = experiment.side, experiment.gone, _evidence(experiment)
            kept.append(Cause(experiment.names, "confirmed", side, share, evidence, alike))
    result = replace(causes, ranked=tuple(in_order(kept)), ruled_out=(*causes.ruled_out, *dropped))
    left_out = ruled_out - {cause.id for cause in kept}
    return Applied(result, tuple(confirmed), tuple(sorted(left_out)))


def weighed(causes: Causes, experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the experiments; of little weight where a cause that stays was found to be so."""

    def light(experiment: Experiment) -> bool:
        return experiment.outcome == "ruled out" and any(
            cause.id in experiment.tests and experiment.side in _sides(cause.side)
            for cause in causes.ranked
            if cause.status == LITTLE
        )

    return [replace(e, outcome=LITTLE) if light(e) else e for e in experiments]


def _sides(side: Side) -> set[str]:
    return {"engine", "trainer"} if side == "either" else {side}


def _asks(experiment: Experiment, cause: Cause) -> bool:
    """Return whether an experiment says something of a cause."""
    tested = not {cause.id, *cause.alike}.isdisjoint(experiment.tests)
    return tested and experiment.side in _sides(cause.side)


def _contradicts(experiment: Experiment, cause: Cause, causes: Causes) -> bool:
    """Return whether an experiment removed less than half of what this cause would take along.

    Errors of several causes add in quadrature where they are independent: a cause of share s alone
    takes 1 - sqrt(1 - s^2) of the whole with it at least. A share that is not known is what the
    others leave.
    """
    if experiment.outcome != "ruled out":
        return False
    if experiment.gone is None or experiment.gone.high is None:
        return True
    others = sum(c.effect.value for c in causes.ranked if c is not cause and c.effect is not None)
    share = 1.0 - others if cause.effect is None else cause.effect.value
    share = min(max(share, 0.0), 1.0)
    return experiment.gone.high < min(STAYS, (1.0 - math.sqrt(1.0 - share**2)) / 2)


class Proof(NamedTuple):
    """An experiment that confirms a cause."""

    experiment: Experiment
    name: str
    """That it gives the cause."""
    left: tuple[str, ...]
    """What it takes out and no other experiment has ruled out."""


def _narrowest_proof(
    cause: Cause, experiments: Sequence[Experiment], against: dict[str, set[str]]
) -> Proof | None:
    proofs = []
    for experiment in experiments:
        if experiment.outcome != "confirmed" or experiment.side not in _sides(cause.side):
            continue
        left = tuple(n for n in experiment.tests if experiment.side not in against.get(n, set()))
        for rank, name in enumerate((cause.id, *cause.alike)):
            if name in left and (name not in experiment.wide or len(left) == 1):
                proofs.append((len(left), rank, Proof(experiment, name, left)))
    return min(proofs, key=lambda row: row[:2])[2] if proofs else None


def _of_little(cause: Cause, experiments: Sequence[Experiment]) -> list[Cause]:
    """Return what a side states and an experiment finds of little weight, and before it what the
    data see under another name."""
    tried = [e for e in experiments if cause.id in e.tests and e.side in _sides(cause.side)]
    narrow = min((e for e in tried if e.outcome == "ruled out"), key=lambda e: len(e.tests))
    evidence = (*cause.evidence, *_evidence(narrow))
    stated = replace(cause, status=LITTLE, effect=narrow.gone, evidence=evidence, kind="")
    seen = replace(cause, id=cause.kind, alike=(), consequences=(), stated=False, kind="")
    return [seen, stated] if cause.kind else [stated]


def _with_evidence(cause: Cause, experiments: Sequence[Experiment]) -> Cause:
    """Add what experiments removed that take this cause out and others too."""
    wide = [e for e in experiments if e.outcome == "confirmed" and _asks(e, cause)]
    evidence = tuple(
        replace(item, normal=f"takes out {', '.join(n for n in e.tests if n != cause.id)} too")
        for e in wide
        for item in _evidence(e)
    )
    sides = {e.side for e in wide}
    side = sides.pop() if len(sides) == 1 else cause.side
    return replace(cause, side=side, evidence=(*cause.evidence, *evidence))


def _evidence(experiment: Experiment) -> tuple[Evidence, ...]:
    if experiment.gone is None:
        return experiment.evidence
    normal = f"below {STAYS:g}"
    share = Evidence(f"share removed by {experiment.id}", experiment.gone.value, normal)
    return (share, *experiment.evidence)
