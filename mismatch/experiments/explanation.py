"""Experiments that tell the leading causes apart: which, in which order, and what they say.

An experiment is a fix, applied and measured as ``--fix`` does it, on the run's own tokens where the
trainer alone changes. A cause is confirmed where the mismatch goes with the experiment that takes
it out, and ruled out where the mismatch stays. Pure: nothing is started here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above, below
from mismatch.analysis.diagnosis.detector import Evidence, Side
from mismatch.analysis.diagnosis.ranking import KINDS, Cause, Causes, RuledOut
from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.planning import Builder, Variant, chosen_of
from mismatch.metrics.inference import jackknife_error, student
from mismatch.specs import CheckSpec
from mismatch.types import Estimate, Floats

Outcome = Literal["confirmed", "ruled out", "undecided", "not run"]
GONE, STAYS = 0.3, 0.1  # share of mean |delta| that goes: at least, for yes; at most, for no
UNKNOWN = 0.3  # weight of what no detector suspects
LEAST_BITS = 0.03  # an experiment that is expected to say less is not made
OWN = 0.5  # of a cause's weight that stays with its own name; the rest is its look-alikes'
UNMEASURED = 0.1  # weight of a cause whose share is not known
WORLD_S, ENGINE_S = 20.0, 60.0  # where the run does not say what they took

KERNEL = ("attention-sinks", "sliding-window", "packing-leak", "first-token", "onset",
          "function-differs", "yarn-attention-factor")  # fmt: skip
# Fix -> the side whose fault it shows, and the causes that it takes out; the narrowest name wins.
TESTS: dict[str, tuple[Side, tuple[str, ...]]] = {
    "attention-sinks": ("trainer", ("attention-sinks",)),
    "no-sinks": ("engine", ("attention-sinks",)),
    "no-packing": ("trainer", ("packing-leak",)),
    "plain-attention": ("trainer", KERNEL),
    "fp32-lm-head": ("trainer", ("bf16-lm-head",)),
    "fp32-router": ("trainer", ("router-precision",)),
    "no-autocast": ("trainer", ("trainer-autocast", "precision")),
    "fp32": ("trainer", ("precision", "bf16-lm-head", "router-precision", "trainer-autocast",
                         "fsdp-cast-inputs", "microbatch-dependence")),
    "processed-logprobs": ("engine", ("temperature-semantics", "sampling-truncation")),
    "explicit-generation-config": ("engine", ("implicit-generation-config", "sampling-law")),
    "sampling-mask": ("engine", ("sampling-truncation", "sampling-law")),
    "bf16-kv-cache": ("engine", ("fp8-kv", "fp8-kv-tile", "decode-vs-prefill")),
    "rollout-bf16-weights": ("engine", ("quantised-rollout", "quantised-module-list")),
    "no-prefix-cache": ("engine", ("prefix-cache-stale", "kv-block", "decode-vs-prefill")),
    "no-cascade-attention": ("engine", ("decode-vs-prefill", "onset", "kv-block")),
    "engine-fp32-lm-head": ("engine", ("bf16-lm-head",)),
    "engine-fp32": ("engine", ("precision", "bf16-lm-head", "decode-vs-prefill", "fp8-kv")),
    "regenerate": ("engine", ("sleep-level-2", "double-load")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, with what it said where it was made.

    Attributes:
        id: of its fix.
        side: whose fault it would show.
        tests: causes that it takes out.
        bits: information that was expected of it.
        expected_s: seconds that it was expected to take.
        seconds: of its passes and of its engine; None where it was not made.
        gone: share of mean |delta| that goes with it.
        same_tokens: on the tokens of the run; False: the engine sampled anew.
        reason: why it was not made, or failed.
        evidence: what it measured, where that is no share of mean |delta|.
        names: the cause that it names where it confirms and no detector suspected one.
    """

    id: str
    side: Side
    tests: tuple[str, ...]
    bits: float
    expected_s: float
    outcome: Outcome = "not run"
    seconds: float | None = None
    gone: Estimate | None = None
    same_tokens: bool = True
    reason: str = ""
    evidence: tuple[Evidence, ...] = ()
    names: str = ""

    @property
    def rate(self) -> float:
        """Bits per second expected."""
        return self.bits / max(self.expected_s, 1e-3)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the experiments of one run said.

    Attributes:
        confirmed: causes that they confirm; ``ruled_out`` likewise.
        seconds: that they took together, with the starts of processes and passes left out before.
    """

    experiments: tuple[Experiment, ...]
    confirmed: tuple[str, ...]
    ruled_out: tuple[str, ...]
    seconds: float


Masses = dict[tuple[str, Side], float]


def masses(causes: Causes) -> Masses:
    """Weight of every cause that could be meant, with its side; the rest of 1 is unknown.

    Of a cause that is confirmed only its look-alikes are still asked about.
    """
    found: Masses = {}
    for cause in causes.ranked:
        done = cause.status == "confirmed"
        weight = UNMEASURED if cause.effect is None else max(cause.effect.value, 0.01)
        own = 0.0 if cause.id in KINDS and cause.alike else OWN if cause.alike else 1.0
        own = 0.0 if done else own
        shares = {cause.id: own} | dict.fromkeys(
            cause.alike, (1 - own) / len(cause.alike) if cause.alike else 0.0
        )
        for id, share in shares.items():
            if share > 0:
                found[id, cause.side] = found.get((id, cause.side), 0.0) + weight * share
    total = sum(found.values())
    return {key: (1 - UNKNOWN) * value / total for key, value in found.items()} if total else {}


def bits(weights: Masses, side: Side, tests: Sequence[str]) -> float:
    """Expected information of asking whether one of these causes is at work, in bits."""
    p = sum(
        weight for (id, where), weight in weights.items()
        if id in tests and where in (side, "either")
    )  # fmt: skip
    if p <= 0:
        return 0.0
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things took in this run.

    Attributes:
        forward: one pass of the trainer; ``load``: its weights once more.
        engine: an engine's start and its sampling.
    """

    forward: float = WORLD_S
    load: float = WORLD_S
    engine: float = ENGINE_S

    def of(self, variant: Variant, base: CheckSpec) -> float:
        """What one variant is expected to take beyond a world that runs anyway."""
        from mismatch.specs import weights_key

        own = weights_key(variant.spec.train) != weights_key(base.train)
        return self.forward + (self.load if own else 0.0) + (self.engine if variant.place else 0.0)


def plan(
    spec: CheckSpec, context: Context, causes: Causes, costs: Costs, made: Sequence[str] = ()
) -> list[tuple[Experiment, Variant]]:
    """Experiments worth making, by expected information per second, the best first.

    Args:
        made: ids of those that are made already.
    """
    weights = masses(causes)
    builder = Builder(spec, context)
    planned = []
    for id, (side, tests) in TESTS.items():
        expected = bits(weights, side, tests)
        if id in made or expected < LEAST_BITS:
            continue
        before = len(builder.variants)
        builder.add(chosen_of(id))
        if len(builder.variants) > before:
            variant = builder.variants[-1]
            seconds = costs.of(variant, spec)
            planned.append((Experiment(id, side, tests, expected, seconds,
                                       same_tokens=not variant.place), variant))  # fmt: skip
    return sorted(planned, key=lambda pair: -pair[0].rate)


# ---------------------------------------------------------------- what they say


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


def applied(
    causes: Causes, experiments: Sequence[Experiment]
) -> tuple[Causes, tuple[str, ...], tuple[str, ...]]:
    """The causes after their experiments, and the ids that were confirmed and ruled out."""
    against = _against(experiments)
    kept: list[Cause] = []
    dropped: list[RuledOut] = []
    confirmed: list[str] = []
    ruled_out: set[str] = set()
    for cause in causes.ranked:
        names = (cause.id, *cause.alike)
        gone_names = {n for n in names if _sides(cause.side) <= against.get(n, set())}
        yes = _confirming(cause, experiments, gone_names)
        ruled_out |= gone_names
        alike = tuple(n for n in cause.alike if n not in gone_names)
        if yes is not None:
            experiment, name = yes
            confirmed.append(name)
            kept.append(replace(
                cause, id=name, status="confirmed", side=experiment.side,
                effect=experiment.gone if cause.effect is None else cause.effect,
                evidence=(*cause.evidence, *_evidence(experiment)),
                alike=() if len(experiment.tests) == 1 else
                tuple(n for n in alike if n in experiment.tests and n != name),
            ))  # fmt: skip
        elif cause.id not in gone_names or cause.status == "confirmed":
            kept.append(replace(cause, alike=alike))
        elif alike:  # what it could also be is what is left
            kept.append(replace(cause, id=alike[0], alike=alike[1:]))
        else:
            evidence = tuple(
                item for e in experiments
                if e.outcome == "ruled out" and cause.id in e.tests
                for item in _evidence(e)
            )  # fmt: skip
            dropped.append(RuledOut("experiment", (cause.id,), evidence))
    for experiment in _of_their_own(experiments, confirmed):
        confirmed.append(experiment.names)
        kept.append(
            Cause(experiment.names, "confirmed", experiment.side, experiment.gone,
                  _evidence(experiment),
                  tuple(n for n in experiment.tests[1:] if "engine" not in against.get(n, set())))
        )  # fmt: skip
    result = replace(causes, ranked=tuple(kept), ruled_out=(*causes.ruled_out, *dropped))
    return result, tuple(confirmed), tuple(sorted(ruled_out - set(confirmed)))


def _sides(side: Side) -> set[str]:
    return {"engine", "trainer"} if side == "either" else {side}


def _against(experiments: Sequence[Experiment]) -> dict[str, set[str]]:
    """Cause -> sides on which an experiment has ruled it out."""
    found: dict[str, set[str]] = {}
    for experiment in experiments:
        if experiment.outcome == "ruled out":
            for name in experiment.tests:
                found.setdefault(name, set()).add(experiment.side)
    return found


def _confirming(
    cause: Cause, experiments: Sequence[Experiment], gone_names: set[str]
) -> tuple[Experiment, str] | None:
    """The narrowest experiment that takes this cause out, and the name that it gives it."""
    names = [n for n in (cause.id, *cause.alike) if n not in gone_names]
    fitting = [
        (len(e.tests), place, e, n)
        for e in experiments
        for place, n in enumerate(names)
        if e.outcome == "confirmed" and n in e.tests and e.side in _sides(cause.side)
    ]
    if not fitting:
        return None
    _, _, experiment, name = min(fitting, key=lambda row: row[:2])
    if len(experiment.tests) > 1 and cause.id in experiment.tests:
        name = cause.id  # a wide experiment gives no narrower name
    return experiment, name


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
    normal = f"above {GONE:g} confirms, below {STAYS:g} rules out"
    share = Evidence(f"share gone with {experiment.id}", experiment.gone.value, normal)
    return (share, *experiment.evidence)


def costs_of(seconds: Mapping[str, float], facts: Mapping[str, object]) -> Costs:
    """From a run's journal and the fingerprint of its trainer's pass."""
    forward = facts.get("seconds")
    own = float(forward) if isinstance(forward, int | float) else WORLD_S
    return Costs(own, max(own, WORLD_S / 4), seconds.get("rollout", ENGINE_S))
