"""Experiments of a fresh engine, for ``--explain``; they change no setting.

``engine-rescoring`` reads the run's tokens at once: a difference that disappears then belongs to
decoding, or to the state of the process that sampled. ``prefix-cache`` continues the same contexts
with the prefix cache unread, and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import NOTABLE, Case
from mismatch.captures import CacheKind, CachePair
from mismatch.errors import MismatchError
from mismatch.experiments.results import Experiment, Outcome
from mismatch.keys import FIX, Key
from mismatch.metrics.inference import student
from mismatch.specs import RolloutSpec
from mismatch.types import Estimate, Floats

RESCORING, CACHE = "engine-rescoring", "prefix-cache"
FRESH = Key.of(FIX, RESCORING)  # scoring of the fresh engine
CACHE_FILE = "fixes/prefix-cache.json"
DECODE: tuple[str, Side] = ("decode-vs-prefill", "engine")
STALE: tuple[str, Side] = ("prefix-cache-stale", "engine")
OWN_ROUNDING = 1.6  # times the engine's own rounding; two roundings of one size differ by 1.4
PROBES: dict[str, tuple[str, ...]] = {
    RESCORING: (
        "decode-vs-prefill", "fp8-kv-tile", "spec-decode", "prefix-cache-stale",
        "sleep-level-2", "double-load",
    ),
    CACHE: ("prefix-cache-stale",),
}  # fmt: skip


def fresh(spec: RolloutSpec) -> RolloutSpec:
    """Return the same engine, which captures nothing.

    Raises:
        MismatchError: servers, which run as they were started.
    """
    if spec.engine.servers:
        fault = "servers run as they were started"
        raise MismatchError(fault, "check a local engine of the same version")
    engine = replace(spec.engine, routing=False, prefill=True)
    return replace(spec, engine=engine, exact_kl=0)


def judged_cache(
    experiment: Experiment, case: Case, pairs: Sequence[CachePair], seconds: float
) -> Experiment:
    """Return what reading the cache changed, against the engine's own distance from float32.

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
    if any(estimate.low is not None and estimate.low > bound for estimate in sizes):
        outcome = "confirmed"
    elif len(sizes) == len(kinds) and all(
        estimate.high is not None and estimate.high <= bound for estimate in sizes
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
    passes = filter(None, (case.engine, case.prefill, case.trainer))
    return min(float(np.abs(scoring.logprobs - case.reference).mean()) for scoring in passes)


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
