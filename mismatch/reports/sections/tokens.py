"""Which tokens the two sides disagree about: where they sit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports import figures
from mismatch.reports.contrasts import concentration, flipped, unlikely
from mismatch.reports.section import Section
from mismatch.reports.summary import noise_rows
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd


def of_tokens(report: Report, tokens: pd.DataFrame) -> Section:
    """Contrasts between groups of tokens, and their pictures.

    Args:
        tokens: one row per action token, as in tokens.parquet.
    """
    tokens = figures.comparable(tokens)
    pair = Section("scatter", "Probability, side against side", figures=figures.scatter(tokens))
    drift = Section("drift-along", "Drift of whole sequences", figures=figures.drift(tokens))
    noise = (row.largest for row in noise_rows(report) if row.agree)
    floor = max((largest.value for largest in noise if largest is not None), default=None)
    return Section(
        id="tokens",
        title="By token",
        sentences=tuple(places(tokens)),
        figures=figures.of_tokens(tokens, floor),
        parts=(pair, drift),
        folded=False,
        page_only=True,
    )


def places(tokens: pd.DataFrame) -> list[str]:
    """Where the mismatch sits, one sentence each, the strongest contrast first.

    Every contrast is a ratio of two means of |delta|; groups under 20 tokens say nothing.
    """
    if tokens.empty:
        return ["Unknown: the two sides could not be compared token by token."]
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    if not size.any():
        return ["Nowhere: delta is exactly 0 for every token."]
    found = (unlikely(tokens), flipped(tokens))  # early and late ones: the picture's title
    ranked = sorted((each for each in found if each is not None), key=lambda each: -each.strength)
    return [concentration(size), *(contrast.sentence for contrast in ranked)]
