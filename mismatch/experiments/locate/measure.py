"""Sums over tokens of what a module gave, and the errors that follow from them; numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mismatch.experiments.locate.types import Role, Site, SiteError

# Relative rounding of one operation in each dtype; float32 products differ by their order of sums.
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-21}
BEYOND = 4.0  # times what the precision costs: a module that is a source
AMPLIFIES = 3.0  # times the error of its input: a module that is an amplifier
SPREADS = 4.0  # times the rounding: an input's error from which a gain is told


@dataclass(frozen=True, slots=True)
class Sums:
    """Of one site and one sequence: sums of squares and a product, over tokens and features.

    ``y`` is the side's output, ``r`` the reference's in its own forward pass, ``s`` the reference's
    module on the side's input.

    Attributes:
        reference: sum of r²; ``own``: of y²; ``same``: of s².
        product: of y r.
        error: of (y - r)²; ``new``: of (y - s)²; ``inherited``: of (s - r)².
        flips, tokens: of a router: tokens with another set of experts, and all.
    """

    reference: float = 0.0
    own: float = 0.0
    same: float = 0.0
    product: float = 0.0
    error: float = 0.0
    new: float = 0.0
    inherited: float = 0.0
    flips: float = 0.0
    tokens: float = 0.0

    @classmethod
    def of(
        cls,
        own: NDArray[np.floating],
        reference: NDArray[np.floating],
        same: NDArray[np.floating],
        counted: NDArray[np.bool_] | None = None,
    ) -> Sums:
        """Of arrays [tokens, features]; what is no number counts as nothing, once as infinite.

        Args:
            counted: [tokens] those whose new error counts; the others chose between equals.

        Raises:
            ValueError: shapes that differ.
        """
        if not own.shape == reference.shape == same.shape:
            raise ValueError(f"shapes {own.shape}, {reference.shape}, {same.shape}")
        y, r, s = (np.asarray(array, np.float64) for array in (own, reference, same))
        lost = bool((np.isfinite(s) & ~np.isfinite(y)).any())
        finite = np.isfinite(y) & np.isfinite(r) & np.isfinite(s)
        y, r, s = (np.where(finite, array, 0.0) for array in (y, r, s))
        kept = slice(None) if counted is None else counted
        return cls(
            reference=float((r * r).sum()),
            own=float((y * y).sum()),
            same=float((s[kept] ** 2).sum()),
            product=float((y * r).sum()),
            error=float(((y - r) ** 2).sum()),
            new=math.inf if lost else float(((y - s)[kept] ** 2).sum()),
            inherited=float(((s - r) ** 2).sum()),
        )

    def __add__(self, other: Sums) -> Sums:
        names = [field.name for field in fields(self)]
        return Sums(*(getattr(self, name) + getattr(other, name) for name in names))


BySite = Mapping[Site, Sequence[Sums]]  # one entry a sequence, in one order


def total(sums: Sequence[Sums]) -> Sums:
    """Over sequences."""
    result = Sums()
    for one in sums:
        result = result + one
    return result


def ratio(part: float, whole: float) -> float:
    """Relative size from sums of squares; 0 of nothing, infinite where only the whole is nothing.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.5, 0.0)
    """
    if part == 0:
        return 0.0
    return math.sqrt(part / whole) if whole > 0 and math.isfinite(part) else math.inf


def site_errors(side: BySite, plain: BySite | None, dtype: str, layers: int) -> list[SiteError]:
    """Every site of one side, in the order of the forward pass.

    Args:
        plain: the same of the plain forward in the side's dtype; None: rounding alone.
        dtype: of the side, a key of ``ROUNDING``.
    """
    totals = {site: total(sums) for site, sums in side.items()}
    return [
        _site_error(site, side, plain, dtype, totals, layers)
        for site in sorted(totals, key=Site.order)
    ]


def _site_error(
    site: Site,
    side: BySite,
    plain: BySite | None,
    dtype: str,
    totals: Mapping[Site, Sums],
    layers: int,
) -> SiteError:
    sums, rounding = totals[site], ROUNDING[dtype]
    cost = None if plain is None or site not in plain else _new(plain[site])
    new = _new(side[site])
    excess = new / max(cost or 0.0, rounding)
    lowest = _lowest_excess(side[site], (plain or {}).get(site), rounding)
    gain = _gain(site, totals, layers, rounding)
    return SiteError(
        layer=site.layer,
        site=site.name,
        error=ratio(sums.error, sums.reference),
        cosine=_cosine(sums),
        new=new,
        cost=cost,
        excess=excess,
        lowest_excess=lowest,
        gain=gain,
        role=_role(lowest, gain),
        other_experts=sums.flips / sums.tokens if sums.tokens else None,
    )


def _new(sums: Sequence[Sums]) -> float:
    whole = total(sums)
    return ratio(whole.new, whole.same)


def _cosine(sums: Sums) -> float:
    norm = math.sqrt(sums.own * sums.reference)
    return sums.product / norm if norm else float(sums.own == sums.reference)


def _lowest_excess(side: Sequence[Sums], plain: Sequence[Sums] | None, rounding: float) -> float:
    """The smallest excess with any one sequence left out: no source rests on a single one."""
    excesses = []
    for index in range(len(side)):
        few = [*side[:index], *side[index + 1 :]] if len(side) > 1 else list(side)
        cost = 0.0
        if plain is not None and len(plain) == len(side):
            cost = _new([*plain[:index], *plain[index + 1 :]] if len(side) > 1 else plain)
        excesses.append(_new(few) / max(cost, rounding))
    return min(excesses, default=0.0)


def _gain(site: Site, totals: Mapping[Site, Sums], layers: int, rounding: float) -> float | None:
    """Relative error that leaves the reference's module over the largest that enters it."""
    entering = [
        ratio(totals[one].error, totals[one].reference)
        for one in site.inputs(layers)
        if one in totals
    ]
    if not entering or max(entering) < SPREADS * rounding:
        return None
    sums = totals[site]
    return ratio(sums.inherited, sums.reference) / max(entering)


def _role(lowest: float, gain: float | None) -> Role:
    if lowest > BEYOND:
        return "source"
    return "amplifier" if gain is not None and gain > AMPLIFIES else "passed on"
