"""From errors of modules to sources, and to the verdict; numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import fields_of, from_json, refused, to_json
from mismatch.errors import MismatchError
from mismatch.features.locate.errors import BEYOND
from mismatch.features.locate.results import (
    FORMS,
    Group,
    Location,
    SideLocation,
    Site,
    SiteError,
)
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Floats, Judged

MATTERS = 0.05  # share of a side's distance that a first source explains, or that goes without it
MOVES = 0.1  # of a side's distance, that a first source moves the end by all the same
FAR = 2.0  # times the plain forward's distance: a side that is off although no source explains it


def groups_of(sites: Sequence[SiteError]) -> list[tuple[Group, tuple[Site, ...]]]:
    """Return the sources, those of one module in several layers together, in the forward order.

    Rope turns queries and keys alike, so that its two sites are one group. Effects are not measured
    yet: 0.
    """
    sources = sorted((s for s in sites if s.role == "source"), key=lambda s: s.location.order())
    names = {source.site for source in sources}
    named: dict[str, list[SiteError]] = {}
    for source in sources:
        rope = source.site == "rope_k" and "rope_q" in names
        named.setdefault("rope_q" if rope else source.site, []).append(source)
    groups = []
    for name, errors in named.items():
        layers = tuple(dict.fromkeys(error.layer for error in errors if error.layer is not None))
        largest = max(error.excess for error in errors), max(error.unlike for error in errors)
        group = Group(name, layers, largest[0], 0.0, 0.0, unlike=largest[1])
        groups.append((group, tuple(error.location for error in errors)))
    return groups


def explained(end: Floats, alone: Floats) -> float:
    """Return the share of the squared distance ``end`` [A] that ``alone`` [A] reproduces."""
    whole = float((end**2).sum())
    return 1.0 - float(((end - alone) ** 2).sum()) / whole if whole else 0.0


def moved(end: Floats, alone: Floats) -> float:
    """Return the root mean square of ``alone`` [A] over that of ``end`` [A].

    >>> moved(np.array([2.0, 0.0]), np.array([0.0, 1.0]))
    0.5
    """
    whole = float((end**2).sum())
    return math.sqrt(float((alone**2).sum()) / whole) if whole else 0.0


def removed(end: Floats, without: Floats) -> float:
    """Return the share of the mean |distance| ``end`` [A] that is gone in ``without`` [A]."""
    whole = float(np.abs(end).mean())
    return 1.0 - float(np.abs(without).mean()) / whole if whole else 0.0


def with_first(side: SideLocation) -> SideLocation:
    """Return the side with its first source: the earliest that does anything to the end.

    Of a source that gives no numbers no effect can be measured, and it matters.
    """
    first = next(
        (
            index
            for index, group in enumerate(side.groups)
            if not math.isfinite(group.excess)
            or max(group.explains, group.removed) >= MATTERS
            or group.moves >= MOVES
        ),
        None,
    )
    together = max(side.explained or 0.0, side.removed or 0.0)
    if first is None and side.groups and together >= MATTERS:
        first = 0  # no module by itself, all of them together
    return replace(side, first=first)


def judge(location: Location) -> Judged:
    """Judge: located as soon as one side has a source that explains something.

    Raises:
        MismatchError: no side was recorded.
    """
    if not location.sides:
        raise MismatchError("no side was recorded", "see what was not tested, and why")
    named = [side for side in location.sides if side.source is not None]
    if named:
        return Judged("located", "; ".join(sentence(side) for side in named), 1)
    other = [side for side in location.sides if side.is_other]
    if other:
        return Judged("unlocated", "; ".join(other_than_the_run(side) for side in other), 1)
    far = [side for side in location.sides if is_far(location, side)]
    if far:
        names = ", ".join(side.name for side in far)
        reason = f"{names} is off beyond its precision, and no module that was recorded says why"
        return Judged("unlocated", reason, 1)
    names = " and ".join(side.name for side in location.sides)
    reason = f"no module of {names} errs beyond what its precision costs"
    if any(side.groups for side in location.sides):
        reason += " and does anything to the end"
    if all(side.role != "engine" for side in location.sides):
        reason += "; the engine's side could not be located"
        if location.broken:
            return Judged("unlocated", f"{reason}, and the run is BROKEN", 1)
    return Judged("none", reason, 0)


def is_far(location: Location, side: SideLocation) -> bool:
    """Return whether a side is further from float32 than the plain forward in its dtype.

    Only sequences that were drawn at random count, whichever of them is left out: the worst
    were chosen because a side rounded unluckily there, and the plain forward was not.
    """
    if side.plain_distance is None:
        return False
    drawn = [
        pair
        for s, *pair in zip(location.sequences, side.distances, side.plain_distances, strict=False)
        if s.why == "random"
    ]
    if not drawn:
        return side.distance > FAR * side.plain_distance > 0
    kept = [drawn[:n] + drawn[n + 1 :] for n in range(len(drawn))] if len(drawn) > 1 else [drawn]
    return all(sum(d for d, _ in few) > FAR * sum(p for _, p in few) > 0 for few in kept)


def other_than_the_run(side: SideLocation) -> str:
    """Say what that means."""
    return (
        f"{side.name} is {side.held:.3g} nats from what the run recorded of it: what was different "
        "there (its start, batch or cache) is in none of these modules"
    )


def sentence(side: SideLocation) -> str:
    """Say what the first source is of a side that has one, and how far it goes."""
    group = side.source
    assert group is not None
    if not math.isfinite(group.excess):
        return f"{side.name} gives values that are no numbers at the {group.place}"
    more = len(side.groups) - 1
    others = f", with {more} more {'source' if more == 1 else 'sources'}" if more else ""
    share = (side.explained if more else group.explains) or 0.0
    kind = "" if side.kind is None else f", where its {side.kind} differs"
    kind += f": it is computed {FORMS[group.form]}" if group.form else ""
    if group.excess <= BEYOND:  # it rounds otherwise, if not more
        far = f"{group.unlike:.2g} times what the plain forward's module rounds there"
        return f"{side.name} rounds otherwise first at the {group.place}: {far}{others}"
    times = f"{group.excess:.3g} times what" if group.excess < 100 else "far more than"
    shown = f"{100 * min(1.0, max(0.0, share)):.0f} % of its squared distance comes from it"
    return (
        f"{side.name} differs from float32 first at the {group.place}{kind} "
        f"({times} {side.dtype} costs there){others}: {shown}"
    )


# ---------------------------------------------------------------- document

SCHEMA, FILE = "mismatch.locate/1", "locate.json"


def to_document(location: Location) -> dict[str, Any]:
    """Return the location as JSON data, with the verdict."""
    verdict = judge(location)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(location)}


def from_document(document: Any) -> Location:
    """Read what :func:`to_document` wrote; the verdict follows from the rest.

    Raises:
        MismatchError: no such document, a schema of another version, or a field that does not fit.
    """
    fields = fields_of(document, SCHEMA, command="mismatch locate")
    fields.pop("verdict", None)
    with refused(SCHEMA, command="mismatch locate", page="docs/how-to/locate.md"):
        return from_json(Location, fields)


def of_run(run_dir: Path | str, spec: CheckSpec | None = None) -> Location | None:
    """Return what ``mismatch locate`` left in a run; None where it left nothing.

    Raises:
        MismatchError: it is damaged.
    """
    if not (Path(run_dir) / FILE).exists():
        return None
    return from_document(store.load_document(run_dir, FILE))
