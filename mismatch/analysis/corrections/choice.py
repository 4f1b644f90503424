"""Which correction the data favour, and why: the rule of docs/corrections.md, in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mismatch.analysis.corrections.types import Against, Preview
from mismatch.metrics.corrections import NONE, OVERRIDE, Level

TARGET_WORDS: dict[Level, str] = {"token": "token ratio", "sequence": "sequence ratio"}
# A bias of a third of the noise adds 5.4 % to the root mean square error of a batch.
NEGLIGIBLE = 1.0 / 3.0
ONE_PROMPT = (
    "undecided: all tokens come from one prompt, so that nothing tells the mismatch, or one "
    "correction from another, from chance; the ranks are of these tokens alone"
)


def choose(
    previews: Sequence[Preview], target: Level, batch: int
) -> tuple[str | None, str | None, str]:
    """The favoured correction, the best real one, and the reason.

    None is needed while the worst that the mismatch can do to a batch stays under a third of the
    batch's sampling noise, or where no correction is measurably nearer to the target. Else the
    least error wins; of those that are as good, the one that interferes least. The override
    never does: it is not ranked. Nothing is favoured where no interval tells it from chance.
    """
    found = {one.id: figures for one in previews if (figures := one.against(target))}
    # previews come in the order of interference: the first of those tied interferes least
    real = [id for id in found if id not in (NONE, OVERRIDE)]
    leader = min(real, key=lambda id: found[id].rank or len(found))
    best = next((id for id in real if found[id].tied and found[leader].tied), leader)
    bare, noise = found[NONE], 1.0 / math.sqrt(batch)
    if bare.distance.high is None and bare.distance.value > 0.0:
        return None, best, ONE_PROMPT
    worst = _upper(bare)
    names = {one.id: one.label for one in previews}
    if worst <= NEGLIGIBLE * noise:
        return NONE, best, _needless(worst, noise, batch)
    sizes = (
        f"the mismatch can shift a batch by up to {worst:.2g}, beside sampling noise of "
        f"{noise:.2g} from {batch:,} sequences"
    )
    if bare.tied:
        return NONE, best, (
            f"none helps: {sizes}, but no correction is measurably nearer to the "
            f"{TARGET_WORDS[target]}"
        )  # fmt: skip
    return best, best, (
        f"{names[best]}: {sizes}; with the correction the error falls from {bare.error:.2g} to "
        f"{found[best].error:.2g}{_company(previews, target, best)}"
    )  # fmt: skip


def _upper(figures: Against) -> float:
    """The largest distance that the interval allows."""
    high = figures.distance.high
    return figures.distance.value if high is None else high


def _needless(worst: float, noise: float, batch: int) -> str:
    if worst == 0.0:
        return "none needed: both sides agree, and every weight is exactly 1"
    batches = math.floor((noise / worst) ** 2)
    return (
        f"none needed: the mismatch can shift a batch by at most {worst:.2g}, under a third of the "
        f"sampling noise of {noise:.2g} from {batch:,} sequences. Noise averages out and a bias "
        f"does not: in the worst case it would take {batches:,} batches to show"
    )


def _company(previews: Sequence[Preview], target: Level, best: str) -> str:
    """Who is as good."""
    others = [
        one.label
        for one in previews
        if one.id not in (best, NONE) and (figures := one.against(target)) and figures.tied
    ]
    return f"; as good: {', '.join(others)}" if others else ""
