"""Experiments that tell the leading causes apart: which there are, and in which order.

An experiment is a fix, applied and measured as ``--fix`` does it, on the run's own tokens where the
trainer alone changes; :mod:`mismatch.experiments.confirmation` has what they say. Pure: nothing is
started here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mismatch.analysis.diagnosis.detector import Evidence, Side
from mismatch.analysis.diagnosis.ranking import KINDS, Causes
from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.planning import Builder, Variant, chosen_of
from mismatch.specs import CheckSpec
from mismatch.types import Estimate

Outcome = Literal["confirmed", "ruled out", "of little weight", "undecided", "not run"]
GONE, STAYS = 0.3, 0.1  # share of mean |delta| that goes: at least, for yes; at most, for no
UNKNOWN = 0.3  # weight of what no detector suspects
LEAST_BITS = 0.03  # an experiment that is expected to say less is not made
OWN = 0.5  # of a cause's weight that stays with its own name; the rest is its look-alikes'
UNMEASURED = 0.1  # weight of a cause whose share is not known
WORLD_S, ENGINE_S = 20.0, 60.0  # where the run does not say what they took


@dataclass(frozen=True, slots=True)
class Taken:
    """What goes when a fix is applied.

    Attributes:
        side: whose fault it shows.
        own: what is true of every mismatch that goes with it: the setting that it changes, and
            marks in the data.
        wide: causes that go with it too, and that it does not tell from one another.
    """

    side: Side
    own: tuple[str, ...]
    wide: tuple[str, ...] = ()


KERNEL = Taken(
    "trainer",
    ("function-differs", "onset", "first-token"),
    ("attention-sinks", "sliding-window", "packing-leak", "yarn-attention-factor"),
)
TESTS = {
    "attention-sinks": Taken("trainer", ("attention-sinks",)),
    "no-sinks": Taken("engine", ("attention-sinks",)),
    "no-packing": Taken("trainer", ("packing-leak",)),
    "plain-attention": KERNEL,
    "fp32-lm-head": Taken("trainer", ("bf16-lm-head",)),
    "fp32-router": Taken("trainer", ("router-precision",)),
    "no-autocast": Taken("trainer", ("trainer-autocast", "precision")),
    "fp32": Taken("trainer", ("precision",), ("bf16-lm-head", "router-precision",
                  "trainer-autocast", "fsdp-cast-inputs", "microbatch-dependence")),
    "processed-logprobs": Taken("engine", (), ("temperature-semantics", "sampling-truncation")),
    "explicit-generation-config": Taken("engine", ("implicit-generation-config", "sampling-law")),
    "sampling-mask": Taken("engine", ("sampling-truncation", "sampling-law")),
    "bf16-kv-cache": Taken("engine", ("fp8-kv", "decode-vs-prefill"), ("fp8-kv-tile",)),
    "rollout-bf16-weights": Taken("engine", ("quantised-rollout",), ("quantised-module-list",)),
    "no-prefix-cache": Taken("engine", ("prefix-cache-stale", "kv-block", "decode-vs-prefill")),
    "no-cascade-attention": Taken("engine", ("decode-vs-prefill", "onset", "kv-block")),
    "engine-fp32-lm-head": Taken("engine", ("bf16-lm-head",)),
    "engine-fp32": Taken("engine", ("precision", "decode-vs-prefill"), ("bf16-lm-head", "fp8-kv")),
    "regenerate": Taken("engine", (), ("sleep-level-2", "double-load")),
}  # fmt: skip


def taken(id: str, spec: CheckSpec) -> Taken | None:
    """What goes with a fix in this check; None where it shows nothing of a cause."""
    if id not in TESTS:
        return None
    entry, attention, sampling = TESTS[id], spec.train.attention, spec.rollout.sampling
    if id == "attention-sinks" and attention != "no-sinks":
        entry = KERNEL  # another kernel, whatever was wrong with the one in use
    if id == "no-sinks" and ":" in attention:
        return None  # the kernel that it replaces may be what is wrong
    impossible = set()
    if spec.train.layout != "packing":
        impossible.add("packing-leak")
    if sampling.temperature in (0.0, 1.0):
        impossible.add("temperature-semantics")
    if not sampling.truncates:
        impossible.add("sampling-truncation")
    return replace(entry, wide=tuple(name for name in entry.wide if name not in impossible))


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, with what it said where it was made.

    Attributes:
        id: of its fix.
        side: whose fault it would show.
        tests: causes that it takes out.
        bits: information that was expected of it.
        expected_s: seconds that it was expected to take; 0 where --fix asked for it.
        seconds: of its passes and of its engine; None where it was not made.
        gone: share of mean |delta| that goes with it.
        same_tokens: on the tokens of the run; False: the engine sampled anew.
        reason: why it was not made, or failed.
        evidence: what it measured, where that is no share of mean |delta|.
        names: the cause that it names where it confirms and no detector suspected one.
        wide: those of ``tests`` that it does not tell from one another: it confirms one only where
            no other of ``tests`` is left.
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
    wide: tuple[str, ...] = ()

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
    totals: Masses = {}
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
                totals[id, cause.side] = totals.get((id, cause.side), 0.0) + weight * share
    total = sum(totals.values())
    return {key: (1 - UNKNOWN) * value / total for key, value in totals.items()} if total else {}


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
        return self.forward + (self.load if own else 0.0) + (self.engine if variant.folder else 0.0)


def asked(id: str, spec: CheckSpec, weights: Masses) -> Experiment | None:
    """What applying one fix asks; None where it is expected to say nothing of the causes."""
    entry = taken(id, spec)
    if entry is None:
        return None
    tests = (*entry.own, *entry.wide)
    expected = bits(weights, entry.side, tests)
    if expected < LEAST_BITS:
        return None
    return Experiment(id, entry.side, tests, expected, 0.0, wide=entry.wide)


def plan(
    spec: CheckSpec, context: Context, causes: Causes, costs: Costs, done: Sequence[str] = ()
) -> list[tuple[Experiment, Variant]]:
    """Experiments worth making, by expected information per second, the best first.

    Args:
        done: ids of those that are made already.
    """
    weights = masses(causes)
    builder = Builder(spec, context)
    planned = []
    for id in TESTS:
        probe = None if id in done else asked(id, spec, weights)
        if probe is None:
            continue
        before = len(builder.variants)
        builder.add(chosen_of(id))
        if len(builder.variants) > before:
            variant = builder.variants[-1]
            probe = replace(
                probe, expected_s=costs.of(variant, spec), same_tokens=not variant.folder
            )
            planned.append((probe, variant))
    return sorted(planned, key=lambda pair: -pair[0].rate)


def costs_of(seconds: Mapping[str, float], facts: Mapping[str, object]) -> Costs:
    """From a run's journal and the fingerprint of its trainer's pass."""
    forward = facts.get("seconds")
    own = float(forward) if isinstance(forward, int | float) else WORLD_S
    return Costs(own, max(own, WORLD_S / 4), seconds.get("rollout", ENGINE_S))
