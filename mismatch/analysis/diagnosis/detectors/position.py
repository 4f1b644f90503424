"""Where in a sequence the two sides part: an onset, perhaps at a stated boundary, and blocks.

|delta| is first divided by what tokens of that probability have on average, so that an unlikely
token is not taken for a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mismatch.analysis.cause_results import Evidence
from mismatch.analysis.diagnosis.case import Case, Repair, above, correlation
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.legs import CALM, farther, imbalance, legs_of
from mismatch.types import Floats, NotTested

MIN_TOKENS = 400
JUMP = 2.2  # times, that |delta| must rise by; clean blocks reach 1.5
OPENS = 3.0  # times the others, of tokens that open a block; the best of many lengths
BLOCKS = (16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048)
LEAST = 20  # tokens past a boundary, without which nothing behind it was seen
OPENING = 24  # tokens that open a block
ONSET_AT = "position of the onset"
UNLIKE = 0.5  # correlation of the sides, below which nothing of one side is left in the other
BOUNDARIES = {
    "sliding_window": "sliding-window",
    "max_num_batched_tokens": "chunked-prefill",
    "block_size": "kv-block",
    "original_max_position_embeddings": "rope-config",
}  # what a side states in tokens -> the cause of an onset there


def size(case: Case) -> Floats:
    """Return |delta| over its mean among tokens of like probability, [A]; 1 on average."""
    level = case.left + case.right
    edges = np.quantile(level[case.kept], np.linspace(0, 1, 11)[1:-1])
    group = np.searchsorted(edges, level)
    a = np.abs(case.delta)
    a = np.minimum(a, np.quantile(a[case.kept], 0.995))
    count = np.bincount(group[case.kept], minlength=10)
    mean = np.bincount(group[case.kept], a[case.kept], 10) / np.maximum(count, 1)
    floor = 1e-3 * float(a[case.kept].mean()) + 1e-12
    return np.asarray(a / np.maximum(mean, floor)[group])


class Change(NamedTuple):
    """A place where a value along the sequence rises most."""

    at: int
    before: float
    after: float
    steep: float
    """Share of the rise that is a step at that place."""


def change(case: Case, u: Floats, position: np.ndarray) -> Change | None:
    """Return the position where u changes most; None where too few tokens or places are there."""
    kept = case.kept
    if kept.sum() < MIN_TOKENS:
        return None
    width = int(position.max()) + 2
    count = np.bincount(position[kept], minlength=width).astype(float)
    total = np.bincount(position[kept], u[kept], width)
    n, s = np.cumsum(count)[:-1], np.cumsum(total)[:-1]
    N, S = count.sum(), total.sum()
    allowed = (n >= 0.05 * N) & (n <= 0.95 * N)
    if allowed.sum() < 16:
        return None
    with np.errstate(all="ignore"):
        gain = (S * n / N - s) / np.sqrt(n * (N - n) / N)  # above 0: larger afterwards
    gain[~allowed] = -np.inf
    best = int(np.argmax(gain))
    before, after = float(s[best] / n[best]), float((S - s[best]) / (N - n[best]))
    # A step keeps its height close by; growth has only a part of it there.
    near = max(4, int(0.08 * width))
    low, high = slice(max(0, best + 1 - near), best + 1), slice(best + 1, best + 1 + near)
    steep = 0.0
    if min(count[low].sum(), count[high].sum()) >= 20 and after > before:
        jump = total[high].sum() / count[high].sum() - total[low].sum() / count[low].sum()
        steep = float(jump / (after - before))
    return Change(best + 1, max(before, 1e-9), max(after, 1e-9), steep)


def scan(case: Case) -> Look | NotTested:
    """Look at all absolute positions for that from which |delta| is larger."""
    position, u = case.position, size(case)
    found = change(case, u, position)
    if found is None:
        return NotTested("onset", f"needs {MIN_TOKENS} tokens at more than 16 positions")
    evidence: tuple[Evidence, ...] = (
        Evidence(ONSET_AT, found.at),
        Evidence("|delta| after over before", found.after / found.before, "1"),
        Evidence("share of the rise at that place", found.steep),
    )
    later = position >= found.at
    rise = case.ratio(np.where(later, u, 0.0), np.where(later, found.before, 0.0) + 1e-12)
    scale = np.where(later, found.before / found.after, 1.0)
    effect = case.share(case.delta * scale)
    if (
        correlation(case) < UNLIKE  # then a place says nothing
        or found.steep < 0.5  # growth is no onset
        or not above(rise, JUMP)
        or not case.beyond_rounding(later)
        or not above(effect, 0.2)
        # What begins somewhere leaves nothing before it.
        or (case.reference is not None and case.beyond_rounding(~later))
        or _opens_blocks(case)
    ):
        return Look(evidence)
    repair = Repair(case.left, case.left + case.delta * scale)
    alike = ("fp8-kv-tile", "sliding-window", "chunked-prefill", "rope-config")
    finding = Finding("onset", farther(case, later), effect, evidence, alike=alike, repair=repair)
    return Look(evidence, (finding,))


def lengths(case: Case, name: str) -> list[int]:
    """Return what both sides state of a boundary, in tokens, ascending."""
    found: set[int] = set()
    for side in (case.engine, case.trainer):
        config = side.fingerprint.get("config")
        tables: list[Mapping[str, Any]] = [side.fingerprint, config or {}]
        tables += [
            table[key]
            for table in tables
            for key in ("rope_scaling", "rope_parameters")
            if isinstance(table.get(key), dict)
        ]
        for value in (table.get(name) for table in tables):
            several = value if isinstance(value, list) else [value]
            found |= {each for each in several if isinstance(each, int) and each > 1}
    return sorted(found)


def at_boundary(name: str, cause: str) -> Callable[[Case], Look | NotTested]:
    """Make the detector of an onset at one kind of boundary."""

    def find(case: Case) -> Look | NotTested:
        stated = lengths(case, name)
        if not stated:
            return NotTested(cause, "no side states where it lies")
        if (case.position[case.kept] >= stated[0]).sum() < LEAST:
            longest = int(case.position[case.kept].max(initial=-1)) + 1
            reason = f"it lies at {stated[0]} tokens, no sequence is longer than {longest}"
            return NotTested(cause, reason, "measure longer sequences: --max-tokens")
        look = scan(case)
        if isinstance(look, NotTested) or not look.findings:
            return look
        (finding,) = look.findings
        at = look.number(ONSET_AT)
        here = [length for length in stated if abs(at - length) <= 2]
        if not here:
            return replace(look, findings=())
        evidence = (*finding.evidence, Evidence(name, here[0]))
        alike = ("onset", *(each for each in finding.alike if each != cause))
        return Look(evidence, (replace(finding, cause=cause, evidence=evidence, alike=alike),))

    return find


def onset(case: Case) -> Look | NotTested:
    """Look for an onset, under the name of the stated boundary that it lies at."""
    look = scan(case)
    if isinstance(look, NotTested) or not look.findings:
        return look
    for name, cause in BOUNDARIES.items():
        named = at_boundary(name, cause)(case)
        if isinstance(named, Look) and named.findings:
            return named
    return look


def _opens_blocks(case: Case) -> bool:
    """Return whether float32 shows that tokens which open a block are off, and no others."""
    look = blocks(case) if legs_of(case) is not None else None
    return isinstance(look, Look) and bool(look.findings)


def blocks(case: Case) -> Look | NotTested:
    """Look whether tokens that open a block of the KV cache or a chunk are worse than others."""
    if case.kept.sum() < MIN_TOKENS:
        return NotTested("block boundaries", f"needs {MIN_TOKENS} tokens")
    u = size(case)
    forward = case.position - 1  # the forward that predicts a token is that of the one before
    fits: list[tuple[float, float, int]] = []
    for length in lengths(case, "block_size") or BLOCKS:
        opens = (forward % length == 0) & (forward > 0) & case.kept
        if opens.sum() < OPENING:
            continue
        ratio = case.ratio(np.where(opens, u, 0.0), opens + 1e-12)
        if ratio.low is not None:
            scaled = np.where(opens, case.delta / max(ratio.low, 1.0), case.delta)
            fits.append((case.share(scaled).value, ratio.low, length))
    if not fits:
        return NotTested("block boundaries", "too few tokens open a block")
    # Of a length and its multiples, all of which may stand out, the one that explains most.
    _, times, length = max(fits, key=lambda fit: (fit[1] >= OPENS, fit[0], fit[1]))
    evidence = (
        Evidence("block length that fits best", length),
        Evidence("|delta| of tokens that open a block over the others, at least", times, "1"),
    )
    opens = np.asarray(forward % length == 0)
    far = legs_of(case) is not None and imbalance(case, ~opens) > CALM
    if times < OPENS or not case.beyond_rounding(opens) or far:
        return Look(evidence)
    scale = np.where(opens, 1 / times, 1.0)
    effect = case.share(case.delta * scale)
    if not above(effect, 0.05):
        return Look(evidence)
    repair = Repair(case.left, case.left + case.delta * scale)
    finding = Finding(
        "kv-block", "engine", effect, evidence, repair=repair, alike=("chunked-prefill",)
    )
    return Look(evidence, (finding,))


DETECTORS = (
    *(
        Detector(
            f"at-{cause}",
            "position",
            (cause,),
            at_boundary(name, cause),
            f"tokens past the stated {name}",
            40,
        )
        for name, cause in BOUNDARIES.items()
    ),
    Detector("onset", "position", ("onset",), scan, order=41),
    Detector("blocks", "position", ("kv-block",), blocks, order=42),
)
