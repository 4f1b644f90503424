"""Do both sides hold the same weights? Digests of their parameters, compared name by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from mismatch.analysis.levels import AS_LOADED, ONE_FORM
from mismatch.errors import in_list
from mismatch.facts import Digests
from mismatch.keys import WEIGHTS
from mismatch.specs import ROUNDED_FORMS
from mismatch.types import Check, CheckStatus, SideFacts

UNORDERED = 3  # sums of a digest that do not see order
MOST_UNCOMPARED = 0.5  # share of the parameters beyond which equality of the rest says nothing
# Of a fingerprint: names of parameters that the two sides hold otherwise, and this side otherwise
# than its checkpoint's files; left out where the files could not be compared.
NOT_OF_CHECKPOINT: Final = "weights_not_of_checkpoint"
# Of the engine's, and of the trainer's: see mismatch/analysis/diagnosis/digests_by_passes.py.
UNDESCRIBED: Final = "weights_not_described"  # names of parameters whose digests say nothing
IN_ENGINES_FORM: Final = "weights_in_engines_form"  # digests of a pass with the engine's form
# Parameters that another form of the weights changes: of MXFP4, and of forms of all matrices.
EXPERTS = re.compile(r"\.experts")
MATRIX = re.compile(r"\.experts|\.layers\.\d+\.(?!.*(norm|router|gate)\.weight$).*\.weight$")
AS_READ = "as read from disk, before the engine rearranges them"


@dataclass(frozen=True, slots=True)
class Difference:
    """What digests say of the parameters that both sides name.

    Attributes:
        values: parameters of other values, including exchanged parameters.
        moved: of the same values in another order.
        layouts: kinds of parameters that one side lays out otherwise in every layer.
        exchanged: what stands in the other's place on one side, as pairs of names' beginnings.
        forms: of the weights on both sides, where no others differ and they were asked to; or ().
        by_pass: the trainer's side is a pass with the engine's form, from which ``values`` and
            ``moved`` are taken, or which equals the engine where ``forms`` are given.
    """

    common: tuple[str, ...]
    values: tuple[str, ...]
    moved: tuple[str, ...]
    layouts: tuple[str, ...]
    exchanged: tuple[tuple[str, str], ...]
    forms: tuple[str, ...] = ()
    by_pass: bool = False

    @classmethod
    def between(cls, engine: SideFacts, trainer: SideFacts) -> Difference | None:
        """Compare two sides, and by the pass with the engine's form where the run has one."""
        held, other = comparable(engine, trainer), trainer.get(IN_ENGINES_FORM)
        if held is None:
            return None
        found = cls.of(*held)
        forms = tuple(asked_apart(engine, trainer, found.differ))
        if other is None or not found.differ:
            return replace(found, forms=forms)
        beyond = cls.of(held[0], other)
        if beyond.differ:
            return replace(beyond, by_pass=True)
        # The pass was loaded from the checkpoint: it speaks for a trainer that holds the same.
        equal = set(found.differ) <= set(beyond.common) and not trainer.get(NOT_OF_CHECKPOINT)
        return replace(found, forms=forms, by_pass=bool(forms) and equal)

    @classmethod
    def of(cls, left: Digests, right: Digests) -> Difference:
        common = sorted(left.keys() & right.keys())
        values = [n for n in common if list(left[n][:UNORDERED]) != list(right[n][:UNORDERED])]
        # Only what both digests say of the order counts (see mismatch.models.digests). A kind of
        # parameter that has another order in every layer is an engine's layout; in some, a fault.
        moved: dict[str, list[str]] = {}
        members: dict[str, int] = {}
        for name in (name for name in common if name not in set(values)):
            kind = kind_of(name)
            members[kind] = members.get(kind, 0) + 1
            shared = min(len(left[name]), len(right[name]))
            if list(left[name][UNORDERED:shared]) != list(right[name][UNORDERED:shared]):
                moved.setdefault(kind, []).append(name)
        layouts = [kind for kind, names in moved.items() if 1 < members[kind] == len(names)]
        faults = [name for kind, names in moved.items() if kind not in layouts for name in names]
        return cls(
            tuple(common), tuple(values), tuple(faults), tuple(layouts),
            tuple(_exchanged(left, right, values)),
        )  # fmt: skip

    @property
    def differ(self) -> tuple[str, ...]:
        return self.values + self.moved

    def text(self) -> str:
        """Say what differs: exchanged parts first, then the other parameters by their kinds."""
        swapped = [f"{first} and {second}" for first, second in self.exchanged]
        inside = {name for pair in self.exchanged for name in pair}
        rest = [
            name
            for name in self.values
            if not any(name == part or name.startswith(f"{part}.") for part in inside)
        ]
        parts = [f"{in_list(swapped)} are exchanged"] if swapped else []
        if rest:
            kinds = in_list(_kinds(rest))
            parts.append(f"{len(rest)} of {len(self.common)} parameters differ: {kinds}")
        if self.moved:
            kinds = in_list(_kinds(self.moved))
            parts.append(f"{len(self.moved)} of {len(self.common)} parameters hold the same values "
                         f"in another order: {kinds}")  # fmt: skip
        return "; ".join(parts)


def kind_of(name: str) -> str:
    """Return a parameter's name without the numbers of its layer and expert.

    >>> kind_of("layers.3.mlp.up")
    'layers.*.mlp.up'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _kinds(names: Sequence[str]) -> list[str]:
    """Return the kinds of these parameters; a kind that one parameter has by its whole name."""
    groups = groupby(sorted(names, key=kind_of), key=kind_of)
    held = [(kind, list(group)) for kind, group in groups]
    return [kind if len(group) > 1 else group[0] for kind, group in held]


def _exchanged(left: Digests, right: Digests, differ: Sequence[str]) -> list[tuple[str, str]]:
    """Return the parts of the model that hold each other's values, as pairs of their names."""
    holders = {tuple(right[name]): name for name in differ}
    pairs: dict[tuple[str, str], int] = {}
    for name in differ:
        other = holders.get(tuple(left[name]))
        if other is None or other <= name or tuple(left[other]) != tuple(right[name]):
            continue
        parts = name.split("."), other.split(".")
        apart = [n for n, (a, b) in enumerate(zip(*parts, strict=False)) if a != b]
        if len(parts[0]) == len(parts[1]) and len(apart) == 1:
            until = apart[0] + 1
            pair = ".".join(parts[0][:until]), ".".join(parts[1][:until])
        else:
            pair = name, other
        pairs[pair] = pairs.get(pair, 0) + 1

    def below(part: str) -> int:
        return sum(name == part or name.startswith(f"{part}.") for name in differ)

    return [pair for pair, count in pairs.items() if below(pair[0]) == below(pair[1]) == count]


def comparable(left: SideFacts, right: SideFacts) -> tuple[Digests, Digests] | None:
    """Return both sides' digests; None where a side gave none or lost bits of its weights."""
    held, silent = (left.get("weights"), right.get("weights")), set(left.get(UNDESCRIBED, ()))
    if not all(held) or any(side.get("weights_comparable") is False for side in (left, right)):
        return None
    a, b = ({name: side[name] for name in side if name not in silent} for side in held if side)
    return a, b


def same_weights(left: SideFacts, right: SideFacts) -> bool:
    """Return whether every parameter of both sides was compared, in its order, and is equal."""
    held = comparable(left, right)
    silent = left.get("unmapped_weights") or left.get(UNDESCRIBED)
    if held is None or silent or held[0].keys() != held[1].keys():
        return False
    difference = Difference.of(*held)
    return not difference.differ and not difference.layouts


def unlike_its_checkpoint(left: SideFacts, right: SideFacts) -> int | None:
    """Return which of two sides alone holds other weights than its checkpoint, 0 or 1.

    None where both do, neither does, or the files of one were not compared.
    """
    off = [side.get(NOT_OF_CHECKPOINT) for side in (left, right)]
    if None in off or bool(off[0]) == bool(off[1]):
        return None
    return 0 if off[0] else 1


def asked_apart(left: SideFacts, right: SideFacts, differ: Sequence[str]) -> list[str]:
    """Return both forms of the weights, where no others differ and they were asked to; else []."""
    forms = [side.get("weights_form", "as-stored") for side in (left, right)]
    matrices = any(form in ROUNDED_FORMS or " of " in form for form in forms)
    changed = MATRIX if matrices else EXPERTS
    asked = bool(differ) and forms[0] != forms[1] and all(map(changed.search, differ))
    return forms if asked else []


def weights_as_loaded(left: SideFacts, right: SideFacts) -> Check:
    """Check that parameters hold the same values, by digest, where names can be mapped."""
    held, found = comparable(left, right), Difference.between(left, right)
    if held is None or found is None:
        lossy = [side["dtype"] for side in (left, right) if side.get("weights_comparable") is False]
        detail = left.get("weights_not_comparable") or "a side gave no digest of its parameters"
        if lossy:
            detail = f"held in {lossy[0]}, which the checkpoint's values do not fit"
        return Check(AS_LOADED, "not_tested", detail)
    if not found.common:
        return Check(AS_LOADED, "not_tested", "no parameter name could be mapped")
    names, silent = held[0].keys() ^ held[1].keys(), left.get(UNDESCRIBED, ())
    unmapped = sorted(names | set(left.get("unmapped_weights", ())))
    rest = f"; not compared: {in_list(unmapped)}" if unmapped else ""
    rest += "" if left.get("weights_in_memory") else f" ({AS_READ})"
    if found.forms:
        alone = f"; {WEIGHTS}, in the engine's form, equals it" if found.by_pass else ""
        detail = "asked for: weights {} in the engine, {} in the trainer; ".format(*found.forms)
        return Check(AS_LOADED, "warning", detail + found.text() + alone + rest, ONE_FORM)
    if found.differ:
        alone = f"; compared with {WEIGHTS}, in the engine's form" if found.by_pass else ""
        fix = "reload both sides from one checkpoint; look at the weight sync and at the loader"
        return Check(AS_LOADED, "failed", found.text() + alone + rest, fix)
    if found.layouts:
        kinds = in_list(found.layouts)
        rest = f"; order not compared: {kinds}, laid out otherwise in the engine{rest}"
    total = len(found.common) + len(unmapped) + len(silent)
    unordered = sum(kind_of(name) in found.layouts for name in found.common)
    little = total - len(found.common) + unordered > MOST_UNCOMPARED * total
    status: CheckStatus = "not_tested" if little else "passed"
    detail, fix = f"{len(found.common)} of {total} parameters equal{rest}", ""
    if silent and not little:
        status, fix = "warning", "report these names and the engine's version to mismatch"
        detail = (
            f"the digests of {in_list(_kinds(silent))} differ while both sides agree in float32: "
            f"a loader seems to change these values, so digests say nothing of them; {detail}"
        )
    return Check(AS_LOADED, status, detail, fix)
