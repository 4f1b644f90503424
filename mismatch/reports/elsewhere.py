"""A report's numbers under other frameworks' names, and their values by those frameworks' rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.metrics import METRICS, names
from mismatch.metrics.conventions import value_of
from mismatch.reports import summary
from mismatch.reports.figures import comparable
from mismatch.reports.words import words_for
from mismatch.types import Estimate, Report

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {"rollout_logprob": "rollout", "train_logprob": "train", "delta": "delta"}


@dataclass(frozen=True, slots=True)
class Other:
    """One metric in one framework.

    Attributes:
        remark: how it differs; "" where it is the same number.
        value: the number by the framework's convention, as text; "" where ours is it, or where the
            tokens to compute it from are not there.
    """

    label: str
    name: str
    remark: str
    value: str


class Elsewhere:
    """Names and values elsewhere of the headline comparison's metrics.

    Args:
        tokens: the run's tokens table, which is of the headline comparison; None: no values.
        framework: only its names; None: everybody's.
    """

    def __init__(self, tokens: pd.DataFrame | None, framework: str | None = None) -> None:
        self.framework = framework
        self._arrays = {} if tokens is None else _arrays(tokens)

    @property
    def title(self) -> str:
        """Of the column that holds the names."""
        return "known elsewhere as" if self.framework is None else f"in {self.called}"

    @property
    def called(self) -> str:
        """The framework, as it writes itself."""
        return "" if self.framework is None else names.FRAMEWORKS[self.framework]

    def of(self, metric: str, values: bool = True) -> list[Other]:
        """What a metric is called; without ``values`` (another comparison's) only that."""
        if metric not in METRICS:
            return []
        reduction = METRICS[metric].reduction
        return [
            Other(
                alias.label,
                alias.name,
                alias.remark(reduction),
                self._value(metric, alias) if values else "",
            )
            for alias in names.of(metric, self.framework)
        ]

    def rows(self, report: Report) -> list[tuple[summary.Row, Other]]:
        """Every metric of the headline comparison that has a name there, in our order."""
        found = summary.all_rows(summary.headline(report))
        return [(row, other) for row in found for other in self.of(row.metric)]

    def _value(self, metric: str, alias: names.Alias) -> str:
        if alias.value is None or not self._arrays:
            return ""
        value = value_of(alias.value, self._arrays)
        if value is None:
            return ""
        return summary.Row(metric, words_for(metric), Estimate(value, None, None, 0, 0, 0)).value


def _arrays(tokens: pd.DataFrame) -> dict[str, Any]:
    """The arrays that conventions ask for; none where no token could be compared."""
    table = comparable(tokens)
    if table.empty:
        return {}
    made: dict[str, Any] = {
        array: table[column].to_numpy(dtype=np.float64) for column, array in COLUMNS.items()
    }
    made["sequence"] = table["sequence"].to_numpy(dtype=np.int64)
    return made
