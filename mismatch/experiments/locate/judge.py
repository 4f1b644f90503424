"""From errors of modules to sources, and to the sentence; numpy alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mismatch.codec import status_schema, to_json, with_verdict, without_verdict
from mismatch.errors import MismatchError
from mismatch.experiments.locate.types import (
    TITLES,
    Group,
    Location,
    SideLocation,
    Site,
    SiteError,
    Status,
)
from mismatch.run import store
from mismatch.types import Floats

MATTERS = 0.05  # share of a side's distance that a first source explains, or that goes with it
MOVES = 0.1  # of a side's distance, that a first source moves the end by all the same
FAR = 2.0  # times the plain forward's distance: a side that is off although no source explains it
OTHER_NATS = 1e-3  # or the plain forward's distance: what ran here is not what the run recorded
PAIRS = 3  # groups whose pairs are taken out


def groups_of(sites: Sequence[SiteError]) -> list[tuple[Group, tuple[Site, ...]]]:
    """The sources, those of one module in several layers together, in the forward pass's order.

    Their effects are not measured yet: NaN.
    """
    sources = sorted((s for s in sites if s.role == "source"), key=lambda o: o.location.order())
    names = {s.site for s in sources}
    named: dict[str, list[SiteError]] = {}
    for s in sources:
        named.setdefault(module_of(s.site, names), []).append(s)
    groups = []
    for name, errors in named.items():
        layers = tuple(dict.fromkeys(error.layer for error in errors if error.layer is not None))
        excess = max(error.excess for error in errors)
        groups.append(
            (Group(name, layers, excess, np.nan, np.nan), tuple(error.location for error in errors))
        )
    return groups


def module_of(site: str, sources: Collection[str]) -> str:
    """The site that a group is named after: rope turns queries and keys alike.

    >>> module_of("rope_k", {"rope_q", "rope_k"}), module_of("rope_k", {"rope_k"})
    ('rope_q', 'rope_k')
    """
    return "rope_q" if site == "rope_k" and "rope_q" in sources else site


def sites_in(side: SideLocation, group: Group) -> tuple[Site, ...]:
    """The sites of one of a side's groups."""
    sources = [site for site in side.sites if site.role == "source"]
    names = {site.site for site in sources}
    return tuple(site.location for site in sources if module_of(site.site, names) == group.site)


def explained(end: Floats, alone: Floats) -> float:
    """Share of the squared distance ``end`` [A] that ``alone`` [A] reproduces, token by token.

    >>> explained(np.array([1.0, -1.0]), np.array([1.0, -1.0]))
    1.0
    """
    whole = float((end**2).sum())
    return 1.0 - float(((end - alone) ** 2).sum()) / whole if whole else 0.0


def moved(end: Floats, alone: Floats) -> float:
    """Root mean square of ``alone`` [A] over that of ``end`` [A].

    >>> moved(np.array([2.0, 0.0]), np.array([0.0, 1.0]))
    0.5
    """
    whole = float((end**2).sum())
    return math.sqrt(float((alone**2).sum()) / whole) if whole else 0.0


def removed(end: Floats, without: Floats) -> float:
    """Share of the mean |distance| ``end`` [A] that is gone in ``without`` [A]."""
    whole = float(np.abs(end).mean())
    return 1.0 - float(np.abs(without).mean()) / whole if whole else 0.0


def with_first(side: SideLocation) -> SideLocation:
    """The side with its first source: the earliest that does anything to the end."""
    first = next(
        (index for index, group in enumerate(side.groups) if does_anything(group)),
        None,
    )
    together = max(side.explained or 0.0, side.removed or 0.0)
    if first is None and side.groups and together >= MATTERS:
        first = 0  # no module by itself, all of them together
    return replace(side, first=first)


def does_anything(group: Group) -> bool:
    """Whether a source matters at the end; of one that gives no numbers nothing can be told."""
    if not math.isfinite(group.excess):
        return True
    return max(group.explains, group.removed) >= MATTERS or group.moves >= MOVES


@dataclass(frozen=True, slots=True)
class Verdict:
    """The last line.

    Attributes:
        code: of the command: 0 or 1.
    """

    status: Status
    reason: str
    code: int

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"verdict: {self.status} – {self.reason}"


def judge(location: Location) -> Verdict:
    """Located as soon as one side has a source that explains something.

    Raises:
        MismatchError: no side was recorded.
    """
    if not location.sides:
        raise MismatchError("no side was recorded", "see what was not tested, and why")
    named = [side for side in location.sides if side.source is not None]
    if named:
        return Verdict("located", "; ".join(sentence(side) for side in named), 1)
    other = [side for side in location.sides if is_other(side)]
    if other:
        return Verdict("unlocated", "; ".join(other_than_the_run(side) for side in other), 1)
    far = [side for side in location.sides if is_far(location, side)]
    if far:
        names = ", ".join(side.name for side in far)
        reason = f"{names} is off beyond its precision, and no module that was recorded says why"
        return Verdict("unlocated", reason, 1)
    idle = [
        f"{side.name} at the {place_of(side.groups[0])}" for side in location.sides if side.groups
    ]
    if idle:
        reason = f"{' and '.join(idle)} errs beyond its precision, which does nothing to the end"
        return Verdict("none", reason, 0)
    names = " and ".join(side.name for side in location.sides)
    reason = f"no module of {names} errs beyond what its precision costs"
    return Verdict("none", reason, 0)


def is_far(location: Location, side: SideLocation) -> bool:
    """Whether a side is further from float32 than the plain forward in its dtype.

    Told from the sequences that were drawn at random, whichever of them is left out: the worst ones
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


def is_other(side: SideLocation) -> bool:
    """Whether what was recorded is not what the run recorded of this side."""
    limit = max(side.plain_distance or 0.0, OTHER_NATS)
    return side.held is not None and not side.held <= limit  # NaN too


def other_than_the_run(side: SideLocation) -> str:
    """What that means."""
    return (
        f"{side.name} is {side.held:.3g} nats from what the run recorded of it: what was different "
        "there (its start, batch or cache) is in none of these modules"
    )


def sentence(side: SideLocation) -> str:
    """What a side's first source is, and how far it goes.

    Raises:
        ValueError: it has none.
    """
    group = side.source
    if group is None:
        raise ValueError("no source")
    if not math.isfinite(group.excess):
        return f"{side.name} gives values that are no numbers at the {place_of(group)}"
    more = len(side.groups) - 1
    others = f", with {more} more {'source' if more == 1 else 'sources'}" if more else ""
    layers = {layer for source in side.groups for layer in source.layers or (None,)}
    if more and len(layers) == 1 and None not in layers:
        others += f", all in layer {group.layers[0]}"
    share = (side.explained if more else group.explains) or 0.0
    shown = f"{100 * min(1.0, max(0.0, share)):.0f} % of its squared distance come of it"
    return (
        f"{side.name} parts from float32 at the {place_of(group)} "
        f"({group.excess:.3g} times what {side.dtype} costs there){others}: {shown}"
    )


def place_of(group: Group) -> str:
    """Module and layers.

    >>> place_of(Group("rope_q", (3,), 9.0, 0.9, 0.9))
    'rope of layer 3'
    """
    title = TITLES[group.site]
    if not group.layers:
        return title
    if len(group.layers) == 1:
        return f"{title} of layer {group.layers[0]}"
    low, high = group.layers[0], group.layers[-1]
    run = len(group.layers) == high - low + 1
    listed = f"{low} to {high}" if run else ", ".join(map(str, group.layers))
    return f"{title} of layers {listed}"


SCHEMA, FILE = "mismatch.locate/1", "locate.json"
COMMAND, PAGE = "mismatch locate", "docs/locate.md"


def to_document(location: Location) -> dict[str, Any]:
    """As JSON data, with the verdict."""
    verdict = judge(location)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(location)}


def from_document(document: Any) -> Location:
    """The inverse of :func:`to_document`; raises as :func:`mismatch.codec.without_verdict`."""
    return without_verdict(Location, document, SCHEMA, command=COMMAND, page=PAGE)


def of_run(run_dir: Path | str) -> Location | None:
    """What ``mismatch locate`` left in a run; None where it left nothing.

    Raises:
        MismatchError: it is damaged.
    """
    if not (Path(run_dir) / FILE).exists():
        return None
    return from_document(store.load_document(run_dir, FILE))


def document_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema of the document, as a part of another."""
    return with_verdict(Location, SCHEMA, status_schema(get_args(Status)), definitions)
