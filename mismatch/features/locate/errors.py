"""Errors of modules from sums of squares, and which module is a source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from mismatch.features.locate.results import FORMS, TITLES, Site, SiteError

if TYPE_CHECKING:
    import torch

# Relative rounding of one operation in each dtype; float32 products differ by their order of sums.
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-21}
# Times what the precision costs: a module that is a source. The largest excess of any module in
# clean runs was 1.97 (docs/evidence/locate.md).
BEYOND = 4.0
# Times the rounding of the plain forward's module, that a side's output may be from it on the same
# input. A matrix product or a sum rounds once, at its end: two right sides are equal but for rare
# ties. Norms, rotations and attention are put together in several ways: in an engine, and attention
# in a trainer too. An engine's kernel of experts rounds at other steps: 2.6 in a clean olmoe, so
# that its level is that of errors. Clean runs: docs/evidence/precisions.md.
EQUAL, ALIKE = 0.5, 1.75
KERNELS = ("attention", "mixer")
WAYS = (*KERNELS, "rope_q", "rope_k", *(name for name in TITLES if name.endswith("_norm")))


def unlike_level(site: str, role: str, experts: bool = False) -> float:
    """Return how unlike the plain forward's a module of a side may be.

    Args:
        experts: the layer has a router.
    """
    if role == "engine" and site == "mlp" and experts:
        return BEYOND
    return ALIKE if site in (KERNELS if role == "trainer" else WAYS) else EQUAL


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one site and one sequence: sums of squares, over tokens and features.

    ``y`` is the side's output, ``r`` the reference's in its forward pass, ``s`` the reference's
    module on the side's input, ``p`` that of the plain forward in the side's dtype.

    Attributes:
        reference: sum of r²; ``same``: of s².
        error: of (y - r)²; ``new``: of (y - s)².
        plain: of (p - s)²; ``unlike``: of (y - p)²; both 0 where there is no p.
    """

    reference: float = 0.0
    same: float = 0.0
    error: float = 0.0
    new: float = 0.0
    plain: float = 0.0
    unlike: float = 0.0

    @classmethod
    def of(
        cls,
        own: torch.Tensor,
        reference: torch.Tensor,
        same: torch.Tensor,
        counted: torch.Tensor | None = None,
        plain: torch.Tensor | None = None,
    ) -> Sums:
        """Sum over [tokens, features], on their device; what is no number makes new infinite.

        Args:
            counted: [tokens] those whose new error counts; the others chose between equals.
        """
        y, r, s = own.double(), reference.double(), same.double()
        p, lost = s if plain is None else plain.double(), False
        if not (y.sum() + r.sum() + s.sum() + p.sum()).isfinite():
            lost = bool((s.isfinite() & ~y.isfinite()).any())
            finite = y.isfinite() & r.isfinite() & s.isfinite() & p.isfinite()
            y, r, s, p = (values.where(finite, 0.0) for values in (y, r, s, p))
        kept = slice(None) if counted is None else counted
        new = math.inf if lost else _squares((y - s)[kept])
        alike = () if plain is None else (_squares((p - s)[kept]), _squares((y - p)[kept]))
        return cls(_squares(r), _squares(s[kept]), _squares(y - r), new, *alike)

    @classmethod
    def total(cls, parts: Several[Sums]) -> Sums:
        """Add up sequences."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


def _squares(values: torch.Tensor) -> float:
    flat = values.ravel()
    return float(flat.dot(flat))


BySite = Mapping[Site, Several[Sums]]  # one entry a sequence, in one order
Forms = dict[tuple[Site, str], list[Sums]]  # likewise, of other forms of a module


def ratio(part: float, whole: float) -> float:
    """Return a relative size from sums of squares; infinite where only the whole is nothing.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.5, 0.0)
    """
    if part == 0:
        return 0.0
    return math.sqrt(part / whole) if whole > 0 and math.isfinite(part) else math.inf


def site_errors(side: BySite, plain: BySite | None, dtype: str, alike: str = "") -> list[SiteError]:
    """Return every site of one side, in the order of the forward pass.

    Args:
        plain: the same of the plain forward in the side's dtype; None: rounding alone.
        dtype: of the side, a key of ``ROUNDING``.
        alike: "engine" or "trainer", of a side whose modules are to round as the plain forward's.
    """
    errors = []
    for site in sorted(side, key=Site.order):
        sums, yardstick = Sums.total(side[site]), (plain or {}).get(site)
        cost = None if yardstick is None else _new(yardstick)
        lowest = _lowest_excess(side[site], yardstick, ROUNDING[dtype])
        new, unlike = ratio(sums.new, sums.same), _unlike(side[site], ROUNDING[dtype])
        level = unlike_level(site.name, alike, Site(site.layer, "router") in side)
        source = lowest > BEYOND or (alike and unlike > level)
        errors.append(
            SiteError(
                layer=site.layer,
                site=site.name,
                error=ratio(sums.error, sums.reference),
                new=new,
                cost=cost,
                excess=new / max(cost or 0.0, ROUNDING[dtype]),
                lowest_excess=lowest,
                role="source" if source else "passed on",
                unlike=unlike,
            )
        )
    return errors


def form_of(places: Several[Site], forms: Forms, plain: BySite | None, dtype: str) -> str:
    """Return the form of the reference's module that a side has at all of these sites; "": none.

    Of two forms that fit the first one of ``FORMS``, which has the fewer free factors.
    """

    def fits(site: Site, name: str) -> bool:
        sums, yardstick = forms.get((site, name), ()), (plain or {}).get(site)
        cost = 0.0 if yardstick is None else _new(yardstick)
        return bool(sums) and _new(sums) <= BEYOND * max(cost, ROUNDING[dtype])

    return next((name for name in FORMS if all(fits(site, name) for site in places)), "")


def _new(parts: Several[Sums]) -> float:
    whole = Sums.total(parts)
    return ratio(whole.new, whole.same)


def _unlike(parts: Several[Sums], rounding: float) -> float:
    """Return how far a side is from the plain module on the same input, over what that one rounds.

    The smallest with any one sequence left out.
    """
    few = [[*parts[:n], *parts[n + 1 :]] for n in range(len(parts))] if len(parts) > 1 else [parts]
    sums = map(Sums.total, few)
    return min(ratio(s.unlike, max(s.plain, rounding**2 * s.same)) for s in sums)


def _lowest_excess(side: Several[Sums], plain: Several[Sums] | None, rounding: float) -> float:
    """Return the smallest excess with any one sequence left out: no source rests on one alone."""

    def new(parts: Several[Sums], left_out: int) -> float:
        return _new([*parts[:left_out], *parts[left_out + 1 :]] if len(parts) > 1 else parts)

    costs = [new(plain, n) if plain else 0.0 for n in range(len(side))]
    return min(new(side, n) / max(cost, rounding) for n, cost in enumerate(costs))
