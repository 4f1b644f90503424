"""Do only the rows that open a pack agree? Then the rows of a pack see each other."""

from __future__ import annotations

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.keys import ALONE
from mismatch.types import NotTested

WHAT = "rows that open a pack"
MIN_ROWS = 12
CALM = 2.0  # times the other side's distance from float32; of 384 clean rows 3 lie beyond
LEAST = 6  # tokens of a row that says something
MOST = 0.25  # of the rows, that open packs
EVEN = 0.7  # the smallest of the packs over the largest, the last one aside: they are filled
WORTH = 0.3  # of mean |delta|, that the side at fault explains


def packs(case: Case) -> Look | NotTested:
    """Rows that agree, at even distances in tokens from the first row on, among rows that do not.

    Packs are filled with rows in their order up to a number of tokens; their first rows see nothing
    of others. A trainer that sorts or deals out its rows first leaves another mark.
    """
    rows = [np.flatnonzero(case.kept[row]) + row.start for row in case.rows]
    if case.reference is None or sum(len(row) >= LEAST for row in rows) < MIN_ROWS:
        return NotTested(WHAT, f"needs float32 and {MIN_ROWS} rows of {LEAST} tokens")
    legs = [np.abs(side - case.reference) for side in (case.left, case.right)]
    engine_off = legs[0][case.kept].mean() > legs[1][case.kept].mean()
    off, other = legs if engine_off else legs[::-1]
    far, near = (np.array([leg[row].mean() if len(row) >= LEAST else np.nan for row in rows])
                 for leg in (off, other))  # fmt: skip
    calm = far < CALM * np.maximum(near, np.nanmean(near))
    starts = case.rollout.offsets[:-1][np.unique(case.sequence)][calm]
    tokens = np.diff(starts)
    evidence = (
        Evidence("rows that agree", int(calm.sum()), "0 or most"),
        Evidence("tokens from one to the next, at most", int(tokens.max(initial=0))),
    )
    even = len(tokens) > 1 and tokens.min() >= EVEN * tokens.max()
    if not calm[0] or not even or calm.mean() > MOST or not case.beyond_rounding(case.kept):
        return Look(evidence)
    side: Side = "engine" if engine_off else "trainer"
    repair = case.by_float32(side)
    effect = case.gone(repair)
    if not above(effect, WORTH):
        return Look(evidence)
    confirmed, alone = False, case.others.get(ALONE)
    if alone is not None and side == "trainer":  # the experiment is part of the run
        moved = alone.logprobs - case.trainer.logprobs
        confirmed = above(case.share(case.delta + moved), WORTH)
    finding = Finding("packing-leak", side, effect, evidence, confirmed, repair=repair)
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("packs", "pairing", ("packing-leak",), packs, "float32 of both sides' tokens", 10),
)
