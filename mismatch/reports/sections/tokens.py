"""Which tokens the two sides disagree about: where they sit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports import figures
from mismatch.reports.contrasts import concentration, flipped, late, unlikely
from mismatch.reports.section import Section
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd


def of_tokens(report: Report, tokens: pd.DataFrame) -> Section:
    """Contrasts between groups of tokens, and their pictures.

    Args:
        tokens: one row per action token, as in tokens.parquet.
    """
    tokens = figures.comparable(tokens)
    return Section(
        id="tokens",
        title="Where does it sit?",
        sentences=tuple(places(tokens)),
        figures=figures.of_tokens(tokens),
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
    found = (unlikely(tokens), late(tokens), flipped(tokens))
    ranked = sorted((each for each in found if each is not None), key=lambda each: -each.strength)
    return [concentration(size), *(contrast.sentence for contrast in ranked)]
