"""What experiments say of the causes of a run: which they confirm, which they rule out.

A cause is confirmed where the mismatch goes with the experiment that takes it out, and ruled out
where the mismatch stays, or of little weight where a side states it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above, below
from mismatch.analysis.diagnosis.detector import Evidence, Side
from mismatch.analysis.diagnosis.ranking import LITTLE, Cause, Causes, RuledOut
from mismatch.experiments.explanation import GONE, STAYS, Experiment, Outcome
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
    sums = [_by_prompt(case) for case in (before, after)]
    common = np.intersect1d(np.flatnonzero(sums[0][1] > 0), np.flatnonzero(sums[1][1] > 0))
    (s0, n0), (s1, n1) = ((total[common], count[common]) for total, count in sums)

    def value(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
        return np.asarray(1 - (c / d) / (a / b))

    whole = [x.sum() for x in (s0, n0, s1, n1)]
    share = float(value(*map(np.asarray, whole)))
    low = high = None
    if len(common) > 1:
        without = value(*(np.asarray(t - x) for t, x in zip(whole, (s0, n0, s1, n1), strict=True)))
        arm = student(len(common) - 1) * jackknife_error(without)
        low, high = share - arm, share + arm
    return Estimate(share, low, high, int(n1.sum()), after.rollout.n_sequences, len(common))


def _by_prompt(case: Case) -> tuple[Floats, Floats]:
    prompts = case.rollout.prompt_index[case.sequence]
    size = int(case.rollout.prompt_index.max()) + 1
    return (
        np.asarray(np.bincount(prompts, np.abs(case.delta), size), np.float64),
        np.asarray(np.bincount(prompts, minlength=size), np.float64),
    )


def judged(experiment: Experiment, before: Case, after: Case, seconds: float) -> Experiment:
    """An experiment with what it said."""
    share = gone(before, after)
    outcome: Outcome = "undecided"
    if above(share, GONE):
        outcome = "confirmed"
    elif below(share, STAYS):
        outcome = "ruled out"
    return replace(experiment, outcome=outcome, gone=share, seconds=seconds)


def settled(causes: Causes, experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments; undecided where less went than rules out, yet a cause would take no more."""
    return [
        replace(experiment, outcome="undecided")
        if experiment.outcome == "ruled out"
        and (asked := [c for c in causes.ranked if _asks(experiment, c)])
        and not any(_contradicts(experiment, cause, causes) for cause in asked)
        else experiment
        for experiment in experiments
    ]


def applied(
    causes: Causes, experiments: Sequence[Experiment]
) -> tuple[Causes, tuple[str, ...], tuple[str, ...]]:
    """The causes after their experiments, and the ids that were confirmed and ruled out.

    The share of a cause is that of the experiment that confirms it, where no other cause goes with
    the same one.
    """
    kept: list[Cause] = []
    dropped: list[RuledOut] = []
    confirmed: list[str] = []
    ruled_out: set[str] = set()
    by: dict[str, list[int]] = {}  # experiment -> places of what it confirms
    for cause in causes.ranked:
        against = _against(cause, causes, experiments)
        names = (cause.id, *cause.alike)
        gone_names = {n for n in names if _sides(cause.side) <= against.get(n, set())}
        yes = _confirming(cause, experiments, against)
        ruled_out |= gone_names
        alike = tuple(n for n in cause.alike if n not in gone_names)
        if yes is not None:
            experiment, name, left = yes
            confirmed.append(name)
            by.setdefault(experiment.id, []).append(len(kept))
            kept.append(replace(
                cause, id=name, status="confirmed", side=experiment.side,
                evidence=(*cause.evidence, *_evidence(experiment)),
                alike=tuple(n for n in alike if n in left and n != name),
            ))  # fmt: skip
        elif cause.stated and cause.id in gone_names:
            kept += _of_little(cause, experiments)
        elif cause.id not in gone_names or cause.status == "confirmed":
            kept.append(_with_evidence(replace(cause, alike=alike), experiments))
        elif alike:  # what it could also be is what is left
            left_of = replace(cause, id=alike[0], alike=alike[1:])
            kept.append(_with_evidence(left_of, experiments))
        else:
            evidence = tuple(
                item for e in experiments
                if e.outcome == "ruled out" and cause.id in e.tests
                for item in _evidence(e)
            )  # fmt: skip
            dropped.append(RuledOut("experiment", (cause.id,), evidence))
    for experiment in experiments:
        places = by.get(experiment.id, [])
        if experiment.gone is not None and len(places) == 1:
            kept[places[0]] = replace(kept[places[0]], effect=experiment.gone)
    for experiment in _of_their_own(experiments, confirmed):
        out = {
            n
            for e in experiments
            if (e.outcome, e.side) == ("ruled out", "engine")
            for n in e.tests
        }
        confirmed.append(experiment.names)
        kept.append(
            Cause(experiment.names, "confirmed", experiment.side, experiment.gone,
                  _evidence(experiment), tuple(n for n in experiment.tests[1:] if n not in out))
        )  # fmt: skip
    kept.sort(key=lambda cause: -1.0 if cause.effect is None else cause.effect.value, reverse=True)
    result = replace(causes, ranked=tuple(kept), ruled_out=(*causes.ruled_out, *dropped))
    return result, tuple(confirmed), tuple(sorted(ruled_out - {cause.id for cause in kept}))


def weighed(causes: Causes, experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments; of little weight where a cause that stays was found to be so."""
    little = [cause for cause in causes.ranked if cause.status == LITTLE]
    return [
        replace(experiment, outcome=LITTLE)
        if experiment.outcome == "ruled out"
        and any(c.id in experiment.tests and experiment.side in _sides(c.side) for c in little)
        else experiment
        for experiment in experiments
    ]


def _sides(side: Side) -> set[str]:
    return {"engine", "trainer"} if side == "either" else {side}


def _asks(experiment: Experiment, cause: Cause) -> bool:
    """Whether an experiment says something of a cause."""
    tested = not {cause.id, *cause.alike}.isdisjoint(experiment.tests)
    return tested and experiment.side in _sides(cause.side)


def _contradicts(experiment: Experiment, cause: Cause, causes: Causes) -> bool:
    """Whether less went with an experiment than this cause would take along, or half of that.

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


def _against(
    cause: Cause, causes: Causes, experiments: Sequence[Experiment]
) -> dict[str, set[str]]:
    """Name -> sides on which an experiment has ruled it out, as what this cause is."""
    ruled_out: dict[str, set[str]] = {}
    for experiment in experiments:
        if _contradicts(experiment, cause, causes):
            for name in experiment.tests:
                ruled_out.setdefault(name, set()).add(experiment.side)
    return ruled_out


def _confirming(
    cause: Cause, experiments: Sequence[Experiment], against: dict[str, set[str]]
) -> tuple[Experiment, str, tuple[str, ...]] | None:
    """The narrowest experiment that takes this cause out, the name that it gives it, and what it
    takes out and no other experiment has ruled out."""
    fitting = []
    for experiment in experiments:
        if experiment.outcome != "confirmed" or experiment.side not in _sides(cause.side):
            continue
        left = tuple(n for n in experiment.tests if experiment.side not in against.get(n, set()))
        for rank, name in enumerate((cause.id, *cause.alike)):
            if name in left and (name not in experiment.wide or len(left) == 1):
                fitting.append((len(left), rank, experiment, name, left))
    if not fitting:
        return None
    _, _, experiment, name, left = min(fitting, key=lambda row: row[:2])
    return experiment, name, left


def _of_little(cause: Cause, experiments: Sequence[Experiment]) -> list[Cause]:
    """What a side states and an experiment finds of little weight, with the share that went; and
    what the data see under another name, which is not it."""
    tried = [e for e in experiments if cause.id in e.tests and e.outcome == "ruled out"]
    tried = [e for e in tried if e.side in _sides(cause.side)]
    narrow = min(tried, key=lambda e: len(e.tests))
    stated = replace(
        cause, status=LITTLE, effect=narrow.gone, evidence=(*cause.evidence, *_evidence(narrow)),
        kind="",
    )  # fmt: skip
    seen = replace(cause, id=cause.kind, alike=(), consequences=(), stated=False, kind="")
    return [seen, stated] if cause.kind else [stated]


def _with_evidence(cause: Cause, experiments: Sequence[Experiment]) -> Cause:
    """What went with experiments that take this cause out and others too."""
    wide = [e for e in experiments if e.outcome == "confirmed" and _asks(e, cause)]
    evidence = tuple(
        replace(item, normal=f"takes out {', '.join(n for n in e.tests if n != cause.id)} too")
        for e in wide
        for item in _evidence(e)
    )
    sides = {e.side for e in wide}
    side = sides.pop() if len(sides) == 1 else cause.side
    return replace(cause, side=side, evidence=(*cause.evidence, *evidence))


def _of_their_own(experiments: Sequence[Experiment], confirmed: Sequence[str]) -> list[Experiment]:
    """Experiments that confirm what no detector suspected, the narrowest first."""
    yes = [e for e in experiments if e.names and e.outcome == "confirmed"]
    own: list[Experiment] = []
    for experiment in sorted(yes, key=lambda e: len(e.tests)):
        named = {*confirmed, *(e.names for e in own)}
        if not named & set(experiment.tests):
            own.append(experiment)
    return own


def _evidence(experiment: Experiment) -> tuple[Evidence, ...]:
    if experiment.gone is None:
        return experiment.evidence
    normal = f"below {STAYS:g}"
    share = Evidence(f"share gone with {experiment.id}", experiment.gone.value, normal)
    return (share, *experiment.evidence)
