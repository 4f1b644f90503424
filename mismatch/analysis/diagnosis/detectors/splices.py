"""Were the trainer's tokens the engine's? Text that was encoded again, rows cut at other places.

A template that is applied again, or a turn that is decoded and encoded, adds or drops a token
inside a row: what follows is paired with its neighbour. An end token that one side counts and the
other does not moves all later rows by one more each, or spoils the last token alone.
"""

from __future__ import annotations

from statistics import multimode

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, Repair, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look, paired_anew
from mismatch.analysis.diagnosis.legs import CALM, imbalance
from mismatch.types import Bools, Floats, Ints, NotTested

SHIFTS = (-4, -3, -2, -1, 1, 2, 3, 4)
APART = 0.1  # nats of |delta|, from which a row is tried, on average, and a token is off
LEAST = 6  # tokens of the part that moved
OFF = 4  # of them, that must be far off: a single one is no shift
FITS = 0.25  # of its mean |delta|, that may be left of the part that moved
FEW = 3  # rows
CLEAR = 0.3  # share of the mismatch that must go
ENDS = 8.0  # times the other tokens' |delta|, on last tokens
ONE_SIDED = 0.7  # |mean delta| over mean |delta| of last tokens, that speaks at a smaller size
LARGER = 1.5  # times the other tokens' |delta|, where they are one-sided
LARGE = 0.1  # nats


def retokenised(case: Case) -> Look:
    """Rows whose later part fits the other side a few tokens on, and whose earlier part does not.

    Every split and shift of a row is tried: cost |left[t] - right[t]| before the split and
    |left[t] - right[t + shift]| behind it.
    """
    long_enough = [row for row in case.rows if _length(row) >= 2 * LEAST]
    tried = [row for row in long_enough if np.abs(case.delta[row]).mean() > APART]
    right, kept = case.right.copy(), np.ones(len(case.right), bool)
    splits: list[tuple[int, int]] = []
    for row in tried:
        split = _split(case.left[row], case.right[row])
        if split is None:
            continue
        at, shift = split
        splits.append(split)
        right[row], inside = _moved(case.right[row], case.left[row], at, shift)
        kept[row] = inside
    evidence: tuple[Evidence, ...] = (
        Evidence("rows that fit a few tokens on from some place", len(splits), "0"),
        Evidence("of rows that are far off", len(tried)),
    )
    if len(splits) < FEW:
        return Look(evidence)
    evidence += (
        Evidence("tokens that they moved by, mostly", min(multimode(s for _, s in splits))),
        Evidence("first of their places, median", float(np.median([at for at, _ in splits]))),
    )
    return paired_anew(case, right, kept, evidence, "retokenisation", "template-drift",
                       "misalignment", least=CLEAR)  # fmt: skip


def _length(row: slice) -> int:
    return int(row.stop - row.start)


def _split(left: Floats, right: Floats) -> tuple[int, int] | None:
    """(token, shift) from which a row fits shifted; None where it fits no better."""
    own = np.minimum(np.abs(left - right), 12.0)
    best: tuple[float, int, int] | None = None
    for shift in SHIFTS:
        moved, inside = _moved(right, left, 0, shift)
        other = np.where(inside, np.minimum(np.abs(left - moved), 12.0), own)
        cost = np.concatenate([[0.0], np.cumsum(own)])[:-1] + np.cumsum(other[::-1])[::-1]
        at = int(cost[: len(own) - LEAST + 1].argmin())
        if best is None or cost[at] < best[0]:
            best = float(cost[at]), at, shift
    assert best is not None
    _, at, shift = best
    moved, inside = _moved(right, left, at, shift)
    behind = np.arange(len(own)) >= at
    partner = behind & inside
    if partner.sum() < LEAST or (own[partner] > APART).sum() < OFF:
        return None
    left_over = np.abs(left - moved)[partner].mean()
    early = own[~behind].mean() if at else 0.0
    calm = early < FITS * own[behind].mean()
    return (at, shift) if left_over < FITS * own[partner].mean() and calm else None


def _moved(right: Floats, left: Floats, at: int, shift: int) -> tuple[Floats, Bools]:
    """right[t + shift] in the place of right[t] from a token on, and which tokens have one."""
    index = np.arange(len(right))
    return _from(np.where(index >= at, index + shift, index), right, left)


def _from(source: Ints, right: Floats, left: Floats) -> tuple[Floats, Bools]:
    """right[source], with ``left`` where a source lies outside, and which lie inside."""
    inside = (source >= 0) & (source < len(right))
    return np.where(inside, right[np.clip(source, 0, len(right) - 1)], left), inside


def row_lengths(case: Case) -> Look | NotTested:
    """Whether each row moves the later rows by one more: the flat tokens were cut elsewhere."""
    if len(case.rows) < 4:
        return NotTested("row lengths", "needs 4 rows")
    number = np.repeat(np.arange(len(case.rows)), [_length(row) for row in case.rows])
    index = np.arange(len(case.right))
    tried = []
    for step in (-1, 1):
        right, inside = _from(index + step * number, case.right, case.left)
        tried.append((float(np.abs(case.left - right)[inside].mean()), step, right, inside))
    gap, step, right, inside = min(tried, key=lambda each: each[0])
    if step < 0:  # the trainer lacks the last token of every row
        inside[[row.stop - 1 for row in case.rows]] = False
    own = float(np.abs(case.delta).mean())
    evidence = (
        Evidence("tokens by which each row moves the rows after it", step),
        Evidence(
            "share of mean |delta| that is left if rows are cut there",
            gap / own if own else 1.0,
            "1 or more",
        ),
    )
    if own < APART or gap > FITS * own:
        return Look(evidence)
    return paired_anew(case, right, inside, evidence, "row-lengths", "misalignment",
                       "appended-eos", least=CLEAR)  # fmt: skip


def ends(case: Case) -> Look | NotTested:
    """Whether last tokens alone are far off: an end token that one side did not sample or see."""
    last = np.zeros(len(case.kept), bool)
    last[[row.stop - 1 for row in case.rows if _length(row) > 1]] = True
    far = last & case.kept & (np.abs(case.delta) > LARGE)
    rest = case.kept & ~last
    if (last & case.kept).sum() < 8 or rest.sum() < 64:
        return NotTested("last tokens", "needs 8 rows of several tokens")
    elsewhere = float(np.abs(case.delta[rest]).mean())
    ratio = case.ratio(
        np.where(last, np.abs(case.delta), 0.0), np.where(last, elsewhere, 0.0) + 1e-12
    )
    evidence = (
        Evidence("|delta| of last tokens over the others", ratio.value, "near 1"),
        Evidence("last tokens off by 0.1 nats or more", int(far.sum()), "few"),
    )
    sided = abs(float(case.delta[last & case.kept].mean()))
    one_sided = sided > ONE_SIDED * float(np.abs(case.delta[last & case.kept]).mean())
    alone = sided > 3 * abs(float(case.delta[rest].mean()))
    clear = above(ratio, ENDS) or (
        above(ratio, LARGER) and one_sided and alone and imbalance(case, rest) < CALM
    )
    if not clear or far.sum() < FEW:
        return Look(evidence)
    effect = case.share(np.where(far, 0.0, case.delta))
    if not above(effect, 0.0):
        return Look(evidence)
    side: Side = "engine" if case.delta[far].mean() < 0 else "trainer"
    if case.reference is not None:
        engine, trainer = (
            float(np.abs(values - case.reference)[far].mean()) for values in (case.left, case.right)
        )
        side = "engine" if engine > trainer else "trainer"
    repair = Repair(case.left, case.right, ~far)
    finding = Finding("appended-eos", side, effect, evidence, confirmed=True,
                      alike=("template-drift",), repair=repair)  # fmt: skip
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("row-lengths", "pairing", ("row-lengths",), row_lengths, order=8),
    Detector("retokenised", "pairing", ("retokenisation",), retokenised, order=11),
    Detector("ends", "pairing", ("appended-eos",), ends, order=14),
)
