"""Do both sides' routers choose alike, and where not, was it a near-tie?"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.cause_results import Evidence
from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.metrics.routing_pairs import in_other
from mismatch.types import Bools, Floats, Ints, NotTested, Routing

MIN_FLIPS = 40
SEEN = 4096  # rows
CHANCE = 0.35  # of the way from chance to full agreement
SHIFTS = (-2, -1, 0, 1, 2)
FAR_FLIPS = 0.35  # mean rank of a flipped row's margin; near-ties lie near 0, any row near 0.5


def routes(case: Case) -> Look | NotTested:
    """Layers at chance level, rows that fit better one token on, flips that were no near-ties."""
    left, right = case.engine.routing, case.trainer.routing
    if left is None or right is None:
        return NotTested("routed experts", "a side captured none", "run without --no-routing")
    columns = [
        (left.layers.index(k), right.layers.index(k)) for k in left.layers if k in right.layers
    ]
    if not columns or (left.top_k, left.num_experts) != (right.top_k, right.num_experts):
        return NotTested("routed experts", "the two sides captured other layers or experts")
    if left.top_k == left.num_experts:
        return NotTested("routed experts", "every expert is chosen")
    if case.trainer.fingerprint.get("replay"):
        return NotTested("routed experts", "the trainer replays the engine's")
    rows = case.rollout.actions - 1
    # Routes that differ among the first of these rows: one prompt repeated is one observation.
    first = [side.ids[rows[:SEEN]].reshape(min(len(rows), SEEN), -1) for side in (left, right)]
    if max(len(np.unique(routes, axis=0)) for routes in first) < MIN_FLIPS:
        return NotTested("routed experts", f"needs {MIN_FLIPS} tokens that are routed differently")
    of_token = case.rollout.sequence_of_token

    def agreement(shift: int) -> Floats:
        """Return |A ∩ B| / K of engine row t and trainer row t + shift, [A, L]; NaN past an end."""
        other = np.clip(rows + shift, 0, len(of_token) - 1)
        inside = (other == rows + shift) & (of_token[other] == case.sequence)
        inside &= left.present[rows] & right.present[other]
        values = np.full((len(rows), len(columns)), np.nan)
        for line, (i, j) in enumerate(columns):
            a, b = left.ids[rows[inside], i], right.ids[other[inside], j]
            values[inside, line] = in_other(a.T, b.T).mean(axis=0)
        return values if shift else np.nan_to_num(values, nan=1.0)

    agreed = {shift: agreement(shift) for shift in SHIFTS}
    overlap = agreed[0].mean(axis=0)
    chance = left.top_k / left.num_experts
    worst = int(overlap.argmin())
    layer = left.layers[columns[worst][0]]
    best = max(SHIFTS, key=lambda shift: float(np.nanmean(agreed[shift])))
    evidence = [
        Evidence("experts in common, mean", float(overlap.mean()), "near 1"),
        Evidence("layer that agrees least", layer),
        Evidence("experts in common there", float(overlap[worst])),
        Evidence("by chance", chance),
    ]
    findings: list[Finding] = []
    gained = float(np.nanmean(agreed[best])) - float(overlap.mean())
    lost = _turns_lost(case, agreed[0].mean(axis=1), chance)
    at_chance = [k for k, value in enumerate(overlap) if value < chance + CHANCE * (1 - chance)]
    if best != 0 and gained > 0.1:
        shown = (Evidence("rows that the capture is shifted by", best, "0"), *evidence)
        findings.append(Finding("shifted-route-capture", "either", None, shown))
    elif lost:
        shown = (
            Evidence("turns with the experts of other tokens", ", ".join(map(str, lost))),
            *evidence,
        )
        findings.append(Finding("shifted-route-capture", "either", None, tuple(shown),
                                alike=("corrupt-route-capture",)))  # fmt: skip
    elif at_chance:
        shown = (Evidence("layers near chance", len(at_chance), "0"), *evidence)
        alike = ("experts-differ", "stale-weights")
        findings.append(Finding("corrupt-route-capture", "either", None, tuple(shown), alike=alike))
    else:
        findings += _far_flips(case, agreed[0] < 1, right, rows, columns, evidence)
    return Look(tuple(evidence), tuple(findings))


def _turns_lost(case: Case, overlap: Floats, chance: float) -> list[int]:
    """Return turns whose experts agree far less than those of the best turn, if not all do."""
    count = np.bincount(case.turn)
    mean = np.bincount(case.turn, overlap) / np.maximum(count, 1)
    turns = np.flatnonzero(count >= MIN_FLIPS)
    best = mean[turns].max(initial=0.0)
    lost = [int(n) for n in turns if best - mean[n] > CHANCE * (1 - chance)]
    return lost if len(turns) > 1 else []


def _far_flips(
    case: Case, differs: Bools, right: Routing, rows: Ints, columns: list[tuple[int, int]],
    evidence: list[Evidence],
) -> list[Finding]:  # fmt: skip
    """Flips of rows whose margin was large: noise cannot have made them."""
    flips = int(differs.sum())
    evidence.append(Evidence("share of (token, layer) with a flip", float(differs.mean())))
    if right.margin is None or flips < MIN_FLIPS:
        return []
    margin = right.margin[rows][:, [j for _, j in columns]]
    ranks = margin.argsort(axis=0, kind="stable").argsort(axis=0) / max(1, len(margin) - 1)
    rank = float(ranks[differs].mean())
    evidence.append(Evidence("mean rank of the margin of flipped rows", rank, "below 0.2"))
    if rank < FAR_FLIPS or differs.mean() > 0.8:
        return []
    token = differs.any(axis=1)
    calm = float(np.abs(case.delta[~token & case.kept]).mean()) if (~token).any() else 0.0
    size = np.abs(case.delta)
    effect = case.share(np.where(token, np.minimum(size, calm), size))
    if not above(effect, 0.1):
        return []
    alike = ("router-config", "weights-differ")
    return [Finding("router-precision", "either", effect, tuple(evidence), alike=alike)]


DETECTORS = (
    Detector("routes", "routing", ("shifted-route-capture", "corrupt-route-capture",
             "router-precision"), routes, "routed experts of both sides", 70),
)  # fmt: skip
