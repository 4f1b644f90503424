"""What differs between two runs: versions, dtypes, kernels, settings, the machine. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mismatch.experiments.regression.types import Changed, Where

# Of a fingerprint: measured anew in every run, compared elsewhere, or a place on one machine.
NOT_SETTINGS = {"weights", "unmapped_weights", "seconds", "peak_bytes", "model", "not_tested"}
LONGEST = 120  # characters of a value
ABSENT = "–"


def changed(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> tuple[Changed, ...]:
    """Every fact that is not the same, engine first.

    Args:
        old, new: "engine", "trainer", "machine" -> fingerprint or provenance.
    """
    known = not unknown_machine(old, new)
    places: tuple[Where, ...] = ("engine", "trainer", *(("machine",) if known else ()))
    return tuple(
        Changed(where, name, before, after)
        for where in places
        for name, before, after in _differing(old.get(where, {}), new.get(where, {}))
    )


def unknown_machine(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why the machines are not compared, in one sentence; nothing where both runs know theirs."""
    silent = [name for name, facts in (("old", old), ("new", new)) if not facts.get("machine")]
    if not silent:
        return []
    who = f"the {silent[0]} run does not say" if len(silent) == 1 else "neither run says"
    return [f"the machine: not compared, since {who} what it ran on (run.json)"]


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    before, after = dict(_flat(old)), dict(_flat(new))
    for name in sorted({*before, *after}, key=_order):
        pair = before.get(name, ABSENT), after.get(name, ABSENT)
        if pair[0] != pair[1] and set(pair) != {ABSENT, "null"}:  # unset is as good as unknown
            yield name, *pair


def _order(name: str) -> tuple[bool, bool, str]:
    """The version and versions first: they are what an upgrade is about."""
    return name != "version", not name.startswith("versions."), name


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if not prefix and key in NOT_SETTINGS:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
