"""The trainer's two forward passes from the scorings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mismatch.analysis.comparison import paired_routing
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import AS_RUN, OVERRIDE, REPLAY, TwoPasses, Variant
from mismatch.errors import MismatchError
from mismatch.facts import injected_into, replay_of
from mismatch.keys import NEW, NEW_REPLAYED, REGROUPED, TRAIN
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.ppo_passes import METRICS_OF_RATIO, METRICS_OF_ROUTES, ratios
from mismatch.metrics.registry import Array, floats
from mismatch.specs import CheckSpec
from mismatch.types import Floats, Ints, Pair, Rollout, Scoring, Verdict


def measure(run: RunArtefacts, spec: CheckSpec) -> TwoPasses | None:
    """Return them of a run; None where it has no new pass."""
    return two_passes(spec, run.rollout, run.usable, spec.seed)


def two_passes(
    spec: CheckSpec, rollout: Rollout, scorings: Mapping[str, Scoring], seed: int = 0
) -> TwoPasses | None:
    """Return old against new pass, as they run and with each remedy; None without a new pass.

    Args:
        scorings: those that can be compared.

    Raises:
        MismatchError: passes that scored other tokens.
    """
    new = scorings.get(NEW, scorings.get(REGROUPED))
    if spec.two_passes is False or new is None:
        return None
    old, replayed = scorings[TRAIN], scorings.get(NEW_REPLAYED)
    injected = injected_into(new.fingerprint)
    if replayed is not None and injected_into(replayed.fingerprint) != injected:
        replayed = None  # of an earlier command, with other noise
    variants = [_variant(AS_RUN, rollout, old, new, seed)]
    if replayed is not None:
        variants.append(_variant(REPLAY, rollout, old, replayed, seed))
    variants.append(Variant(OVERRIDE, None))
    return TwoPasses(
        old=old.name,
        variants=tuple(variants),
        injected=injected,
        replayed=replay_of(old.fingerprint),
        notes=tuple(_notes(spec, old, new, replayed)),
    )


def mark_injected(verdict: Verdict, scorings: Mapping[str, Scoring]) -> Verdict:
    """Return the verdict with what the settings of its scorings say of injected noise."""
    marks: dict[str, list[str]] = {}
    for name, scoring in scorings.items():
        if text := injected_into(scoring.fingerprint):
            marks.setdefault(text, []).append(name)
    if not marks:
        return verdict
    injected = [f"{text} in {' and '.join(names)} only" for text, names in marks.items()]
    said = f"stored settings say injected on purpose: {', '.join(injected)}"
    return replace(verdict, reason=f"{verdict.reason}; {said}")


def _variant(id: str, rollout: Rollout, old: Scoring, new: Scoring, seed: int) -> Variant:
    pair = Pair.of(rollout, old, new)
    routes = paired_routing(rollout, old, new)
    return measure_pass(
        id,
        new.name,
        pair.rollout,
        pair.train,
        sequence=pair.sequence,
        prompt=pair.prompt,
        differs=None if routes is None else routes.differs,
        seed=seed,
    )


def _notes(spec: CheckSpec, old: Scoring, new: Scoring, replayed: Scoring | None) -> list[str]:
    notes = []
    moe = bool(old.fingerprint.get("moe"))
    if replayed is None and moe and not replay_of(old.fingerprint):
        notes.append(
            "router replay in the new pass: needs the trainer's routes: run without --no-routing"
            if not spec.train.routing
            else "router replay in the new pass: run it with --two-passes"
        )
    if not moe:
        notes.append("router replay in the new pass: a dense model has no routers")
    if old.fingerprint.get("device") == "cpu" and not injected_into(new.fingerprint):
        notes.append(
            "batch variance: kernels on a CPU hardly depend on the batch, a GPU's do"
            + (": --inject router-noise=SIGMA shows what that would do" if moe else "")
        )
    return notes


def measure_pass(
    id: str,
    scoring: str,
    old: Floats,
    new: Floats,
    *,
    sequence: Ints,
    prompt: Ints,
    differs: Array | None = None,
    seed: int = 0,
) -> Variant:
    """Return one new pass against the old one, with 95 % intervals by prompt.

    Args:
        old, new: [A] log-probabilities, nats.
        sequence: [A] sequence of each token; prompt: [N] prompt of each sequence.
        differs: [A, L] whether the experts differ, at the rows that predicted the tokens.

    Raises:
        EmptyComparison, MismatchError: see :func:`mismatch.metrics.ppo_passes.ratios`.
    """
    ratio = ratios(old, new)
    estimator = Estimator(sequence, prompt, seed=seed)
    finite = np.isfinite(ratio)
    if not finite.all():
        fault = f"two passes: the ratio of {int((~finite).sum())} tokens overflows in float32"
        fix = "these are no passes of one trainer: compare them as two scorings"
        raise MismatchError(fault, fix)
    routes = {}
    if differs is not None:
        routes = estimator.all(METRICS_OF_ROUTES, {"layers": floats(differs.mean(axis=1))})
    estimates = estimator.all(METRICS_OF_RATIO, {"ratio": ratio, "delta": new - old})
    return Variant(id, scoring, estimates, routes)
