"""Experiments that confirm a cause or rule it out: which there are, and in which order.

Most are a fix, applied and measured as ``--fix`` does it, on the run's own tokens where the trainer
alone changes; a fresh engine answers the others (:mod:`mismatch.experiments.probes`). What they say
is in :mod:`mismatch.experiments.confirmation`. Pure: nothing is started here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mismatch.analysis.cause_results import KINDS, Causes, Side
from mismatch.analysis.diagnosis.case import Case
from mismatch.experiments.fixes.catalogue import chosen_of
from mismatch.experiments.fixes.context import Context
from mismatch.experiments.fixes.planning import Builder, Variant
from mismatch.experiments.probes import CACHE, DECODE, PROBES, RESCORING, STALE
from mismatch.experiments.results import KERNEL, TESTS, Experiment, Taken
from mismatch.specs import CheckSpec

Names = list[tuple[str, Side]]


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
    spec: CheckSpec,
    context: Context,
    case: Case,
    causes: Causes,
    done: Sequence[str] = (),
    broken: bool = False,
) -> list[tuple[Experiment, Variant | None]]:
    """Return the experiments of the leading cause: those of a fresh engine, which need no variant,
    then fixes on the run's own tokens, of these the likelier name first, and of one name the
    narrowest first, then fixes that sample again.

    Where the run holds no rescoring by its engine, a decode path at fault is part of what no
    detector could see. Where none saw anything in a broken run, a fresh engine is asked.

    Args:
        done: ids of those that are made already.
        broken: a check failed.
    """
    names, builder = leading_names(causes), Builder(spec, context)
    seen = [*names, DECODE] if names and case.prefill is None else names
    seen = seen or ([DECODE, STALE] if broken and not causes.ranked else [])
    possible = {RESCORING: True, CACHE: case.engine.fingerprint.get("prefix_caching") is True}
    planned: list[tuple[Experiment, Variant | None]] = [
        (Experiment(id, "engine", tests, names=tests[0], wide=tests[1:]), None)
        for id, tests in PROBES.items()
        if possible[id] and id not in done and rank_of(seen, "engine", tests) is not None
    ]
    fixes = []
    for id in TESTS:
        probe = None if id in done else asked(id, spec, names)
        variant = None if probe is None else builder.add(chosen_of(id))
        if probe is not None and variant is not None:  # it applies to this check
            rank = rank_of(names, probe.side, probe.tests) or 0
            probe = replace(probe, same_tokens=not variant.folder)
            fixes.append((bool(variant.folder), rank, len(probe.tests), probe, variant))
    return planned + [(probe, variant) for *_, probe, variant in sorted(fixes, key=lambda x: x[:3])]
