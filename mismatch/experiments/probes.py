"""Experiments of --explain that start the engine afresh, change nothing and mend nothing. Pure.

``engine-rescoring``: a fresh engine reads the run's tokens at once. What goes with it belongs to
decoding, or to the state of the process that sampled; what stays is what the engine computes.
``prefix-cache``: the same contexts continued with the prefix cache unread, and read where prefill
or decode had written it. The third of the kind, ``regenerate``, samples anew and is a variant like
any other (:data:`mismatch.experiments.fixes.trainer_fixes.PROBES`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mismatch.analysis.diagnosis.case import NOTABLE, Case
from mismatch.analysis.diagnosis.detector import Evidence, Side
from mismatch.analysis.diagnosis.ranking import KINDS, Causes
from mismatch.captures import CacheKind, CachePair
from mismatch.experiments.explanation import (
    GONE,
    LEAST_BITS,
    UNKNOWN,
    Costs,
    Experiment,
    Outcome,
    bits,
    masses,
)
from mismatch.experiments.locate.judge import judge
from mismatch.experiments.locate.types import TITLES, Location
from mismatch.metrics.inference import student
from mismatch.run.store import FIX_PREFIX
from mismatch.types import Estimate, Floats

RESCORING, CACHE, LOCATE = "engine-rescoring", "prefix-cache", "locate"
FRESH = f"{FIX_PREFIX}{RESCORING}"  # scoring of the fresh engine
LOCATE_S = 60.0  # an engine's start and a few passes with hooks
CACHE_FILE = "fixes/prefix-cache.json"
DECODE: tuple[str, Side] = ("decode-vs-prefill", "engine")
OWN_ROUNDING = 1.6  # times the engine's own rounding; two roundings of one size differ by 1.4
PROBES: dict[str, tuple[str, ...]] = {
    RESCORING: (
        "decode-vs-prefill", "fp8-kv-tile", "spec-decode", "prefix-cache-stale",
        "sleep-level-2", "double-load",
    ),
    CACHE: ("prefix-cache-stale",),
}  # fmt: skip


def plan_probes(
    case: Case, causes: Causes, costs: Costs, made: Sequence[str] = ()
) -> list[Experiment]:
    """Those that could say something of these causes, the best first.

    Where the run holds no rescoring by its engine, a decode path at fault is part of what no
    detector could see.
    """
    weights = masses(causes)
    if weights and f"{case.engine.name.partition(':')[0]}:prefill" not in case.others:
        weights[DECODE] = weights.get(DECODE, 0.0) + UNKNOWN / 2
    possible = {RESCORING: True, CACHE: case.engine.fingerprint.get("prefix_caching") is True}
    planned = [
        Experiment(id, "engine", tests, expected, costs.engine, names=tests[0])
        for id, tests in PROBES.items()
        if possible[id]
        and id not in made
        and (expected := bits(weights, "engine", tests)) >= LEAST_BITS
    ]
    return sorted(planned, key=lambda one: -one.rate)


def judged_cache(
    experiment: Experiment, case: Case, pairs: Sequence[CachePair], seconds: float
) -> Experiment:
    """What reading the cache changed, against the engine's own distance from float32.

    Confirmed where log-probabilities move by more than that rounding, by the whole interval over
    prompts; ruled out where they move by less, read after prefill and after decode.
    """
    bound = OWN_ROUNDING * own_rounding(case)
    kinds: tuple[CacheKind, ...] = ("warm prompt", "warm decode")
    moved = {kind: _moved([p for p in pairs if p.kind == kind and p.was_read]) for kind in kinds}
    sizes = [estimate for estimate in moved.values() if estimate is not None]
    if not sizes:
        return replace(experiment, seconds=seconds, reason="nothing was read from the cache")
    outcome: Outcome = "undecided"
    if any(one.low is not None and one.low > bound for one in sizes):
        outcome = "confirmed"
    elif len(sizes) == len(kinds) and all(
        one.high is not None and one.high <= bound for one in sizes
    ):
        outcome = "ruled out"
    evidence = tuple(
        Evidence(
            f"mean |{kind} - cold|, nats",
            "nothing was read" if estimate is None else estimate.value,
            f"below {bound:.3g}",
        )
        for kind, estimate in moved.items()
    )
    return replace(experiment, outcome=outcome, seconds=seconds, evidence=evidence)


def own_rounding(case: Case) -> float:
    """Mean distance from float32 of the nearest pass of both sides, nats.

    The decode itself may have read the cache that is in question. A fixed size where the run holds
    no float32.
    """
    if case.reference is None:
        return NOTABLE
    prefill = case.others.get(f"{case.engine.name.partition(':')[0]}:prefill")
    passes = [one for one in (case.engine, prefill, case.trainer) if one is not None]
    return min(float(np.abs(one.logprobs - case.reference).mean()) for one in passes)


def _moved(pairs: Sequence[CachePair]) -> Estimate | None:
    """Mean over contexts of their mean |warm - cold|, with its 95 % interval.

    By context, not by token: one whose continuations part at once holds a single token.
    """
    if not pairs:
        return None
    means: Floats = np.array([np.abs(np.subtract(p.warm, p.cold)).mean() for p in pairs])
    value, low, high = float(means.mean()), None, None
    if len(pairs) > 1:
        arm = student(len(pairs) - 1) * float(means.std(ddof=1)) / len(pairs) ** 0.5
        low, high = value - arm, value + arm
    count = sum(len(pair.cold) for pair in pairs)
    return Estimate(value, low, high, count, len(pairs), len(pairs))


def to_locate(causes: Causes) -> Experiment | None:
    """`mismatch locate`, where another function or other weights are named without a place."""
    for cause in causes.ranked:
        if cause.status == "suspected" and cause.id in KINDS:
            side: Side = "engine" if cause.side == "engine" else "trainer"
            return Experiment(LOCATE, side, (cause.id, *cause.alike), 1.0, LOCATE_S)
    return None


def judged_location(experiment: Experiment, found: Location) -> Experiment:
    """Confirmed where a module of a side errs on right inputs, and the distance goes with it.

    Its name stays that of the kind: a module is no cause.
    """
    sides = [side for side in found.sides if side.source is not None]
    sides.sort(key=lambda side: (side.role != experiment.side, -side.distance))
    if not sides:
        reason = judge(found).reason if found.sides else "; ".join(map(str, found.not_tested))
        return replace(experiment, seconds=found.seconds, outcome="undecided", reason=reason)
    side = sides[0]
    source = side.source
    assert source is not None
    layers = ", ".join(map(str, source.layers))
    place = f"{TITLES[source.site]}, layer {layers}" if layers else TITLES[source.site]
    evidence = (
        Evidence(f"first module of the {side.role} that errs", place, "none"),
        Evidence("share of that side's distance from float32 gone without it", source.removed),
    )
    outcome: Outcome = "confirmed" if source.removed > GONE else "undecided"
    return replace(
        experiment, side=side.role, outcome=outcome, seconds=found.seconds, evidence=evidence
    )
