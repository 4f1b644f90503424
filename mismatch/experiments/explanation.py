"""Experiments that confirm a cause or rule it out: which there are, and in which order.

An experiment is a fix, applied and measured as ``--fix`` does it, on the run's own tokens where the
trainer alone changes; :mod:`mismatch.experiments.confirmation` has what they say. Pure: nothing is
started here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mismatch.analysis.diagnosis.case import Side
from mismatch.analysis.diagnosis.detector import Evidence
from mismatch.analysis.diagnosis.ranking import KINDS, Causes
from mismatch.experiments.fixes.context import Context
from mismatch.experiments.fixes.planning import Builder, Variant, chosen_of
from mismatch.specs import CheckSpec
from mismatch.types import Estimate

Outcome = Literal["confirmed", "ruled out", "of little weight", "undecided", "not run"]
Names = list[tuple[str, Side]]
GONE, STAYS = 0.3, 0.1  # share of mean |delta| that goes: at least, for yes; at most, for no


@dataclass(frozen=True, slots=True)
class Taken:
    """What goes when a fix is applied.

    Attributes:
        side: whose fault it shows.
        own: what is true of every mismatch that it removes: the setting that it changes, and
            marks in the data.
        wide: causes that it removes too, and does not separate.
    """

    side: Side
    own: tuple[str, ...]
    wide: tuple[str, ...] = ()


KERNEL = Taken(
    "trainer",
    ("function-differs", "side-off", "onset"),
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
    "fp32": Taken(
        "trainer",
        ("precision",),
        (
            "bf16-lm-head",
            "router-precision",
            "trainer-autocast",
            "fsdp-cast-inputs",
            "microbatch-dependence",
        ),
    ),
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
}


def taken(id: str, spec: CheckSpec) -> Taken | None:
    """Return what a fix removes in this check; None where it shows nothing of a cause."""
    if id not in TESTS:
        return None
    entry, attention, sampling = TESTS[id], spec.train.attention, spec.rollout.sampling
    if id == "attention-sinks" and attention != "no-sinks":
        entry = KERNEL  # another kernel, whatever was wrong with the one in use
    if id == "no-sinks" and ":" in attention:
        return None  # the kernel that it replaces may be what is wrong
    possible = {
        "packing-leak": spec.train.layout == "packing",
        "temperature-semantics": sampling.temperature not in (0.0, 1.0),
        "sampling-truncation": sampling.truncates,
    }
    return replace(entry, wide=tuple(name for name in entry.wide if possible.get(name, True)))


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, with what it said where it was made."""

    GONE = frozenset({"bits", "expected_s"})  # see mismatch/codec.py

    id: str
    """Of its fix."""
    side: Side
    """Whose fault it would show."""
    tests: tuple[str, ...]
    """Causes that it takes out."""
    outcome: Outcome = "not run"
    seconds: float | None = None
    """Of its passes and of its engine; None where it was not made."""
    gone: Estimate | None = None
    """Share of mean |delta| that disappears with the cause."""
    same_tokens: bool = True
    """On the tokens of the run; False: the engine samples again."""
    reason: str = ""
    """Why it was not made, or failed."""
    evidence: tuple[Evidence, ...] = ()
    """What it measured, where that is no share of mean |delta|."""
    names: str = ""
    """The cause that it names where it confirms and no detector suspected one."""
    wide: tuple[str, ...] = ()
    """Those of ``tests`` that it cannot separate: it confirms one of them only where
    no other of ``tests`` is left."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the experiments of one run said."""

    experiments: tuple[Experiment, ...]
    confirmed: tuple[str, ...]
    """Causes that they confirm."""
    ruled_out: tuple[str, ...]
    seconds: float
    """That they took together, with the starts of processes and passes left out before."""


def names_of(causes: Causes) -> Names:
    """Return every name that a cause could turn out to have, with its side, the leading first.

    Of a cause that is confirmed only its look-alikes are still asked about.
    """
    names: Names = []
    for cause in causes.ranked:
        # "function-differs" and its like say what is seen, not why: their look-alikes are meant.
        asked = cause.status != "confirmed" and not (cause.id in KINDS and cause.alike)
        names += [(name, cause.side) for name in ((cause.id,) * asked + cause.alike)]
    return list(dict.fromkeys(names))


def leading_names(causes: Causes) -> Names:
    """Return the names that the leading one of the causes that are not settled could have."""
    each = (names_of(replace(causes, ranked=(cause,))) for cause in causes.ranked)
    return next(filter(None, each), [])


def rank_of(names: Names, side: Side, tests: Sequence[str]) -> int | None:
    """Return the place of the first of these names that an experiment asks about; None: of none."""
    for rank, (name, of) in enumerate(names):
        if name in tests and of in (side, "either"):
            return rank
    return None


def asked(id: str, spec: CheckSpec, names: Names) -> Experiment | None:
    """Return what applying one fix asks; None where it says nothing of these causes."""
    entry = taken(id, spec)
    tests = () if entry is None else (*entry.own, *entry.wide)
    if entry is None or rank_of(names, entry.side, tests) is None:
        return None
    return Experiment(id, entry.side, tests, wide=entry.wide)


def plan(
    spec: CheckSpec, context: Context, causes: Causes, done: Sequence[str] = ()
) -> list[tuple[Experiment, Variant]]:
    """Return the experiments of the leading cause: on the run's own tokens first, of these the
    likelier name first, and of one name the narrowest first.

    Args:
        done: ids of those that are made already.
    """
    names, builder = leading_names(causes), Builder(spec, context)
    planned = []
    for id in TESTS:
        probe = None if id in done else asked(id, spec, names)
        variant = None if probe is None else builder.add(chosen_of(id))
        if probe is not None and variant is not None:  # it applies to this check
            rank = rank_of(names, probe.side, probe.tests) or 0
            probe = replace(probe, same_tokens=not variant.folder)
            planned.append((bool(variant.folder), rank, len(probe.tests), probe, variant))
    return [(probe, variant) for *_, probe, variant in sorted(planned, key=lambda row: row[:3])]
