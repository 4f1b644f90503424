"""Rows of the tokens table in the order and selection that every section shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LEAST = 20  # tokens of a group, below which its mean is too uncertain to show


def comparable(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose delta is a number, in order of sequence and position.

    Where a side gave no logprob (a failed check says so) there is nothing to draw.
    """
    finite = np.isfinite(tokens["delta"].to_numpy(dtype=np.float64))
    rows: pd.DataFrame = tokens[finite]
    return rows.sort_values(["sequence", "position"], kind="stable", ignore_index=True)
