"""A report's numbers under other frameworks' names, and their values by those frameworks' rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.metrics import METRICS, framework_names
from mismatch.metrics.framework_formulas import value_of
from mismatch.metrics.frameworks import FRAMEWORKS
from mismatch.reports import summary
from mismatch.reports.formatting import Format
from mismatch.reports.tokens_table import comparable
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {"rollout_logprob": "rollout", "train_logprob": "train", "delta": "delta"}


@dataclass(frozen=True, slots=True)
class FrameworkValue:
    """One metric in one framework.

    Attributes:
        remark: how it differs; "" where it is the same number.
        value: the number by the framework's convention; None where ours is it, or where the tokens
            to compute it from are not there.
    """

    label: str
    name: str
    remark: str
    value: float | None

    def text(self, write: Format) -> str:
        """Name, value and remark; ``write`` is the metric's format."""
        value = "" if self.value is None else f" = {write(self.value)}"
        return f"{self.label}{value}" + (f" ({self.remark})" if self.remark else "")


class FrameworkValues:
    """Names and values elsewhere of the headline comparison's metrics.

    Args:
        tokens: the run's tokens table, which is of the headline comparison; None: no values.
        framework: only its names; None: everybody's.
    """

    def __init__(self, tokens: pd.DataFrame | None, framework: str | None = None) -> None:
        self.framework = framework
        self._arrays = {} if tokens is None else _arrays(tokens)

    @property
    def measured(self) -> bool:
        """Whether there are tokens to compute other conventions from."""
        return bool(self._arrays)

    @property
    def title(self) -> str:
        """Of the column that holds the names."""
        return "known elsewhere as" if self.framework is None else f"in {self.called}"

    @property
    def called(self) -> str:
        """The framework, as it writes itself."""
        return "" if self.framework is None else FRAMEWORKS[self.framework].title

    def of(self, metric: str, values: bool = True) -> list[FrameworkValue]:
        """What a metric is called; without ``values`` (another comparison's) only that."""
        if metric not in METRICS:
            return []
        reduction = METRICS[metric].reduction
        return [
            FrameworkValue(
                alias.label,
                alias.name,
                alias.remark(reduction),
                self._value(alias) if values else None,
            )
            for alias in framework_names.of(metric, self.framework)
        ]

    def rows(self, report: Report) -> list[tuple[summary.Row, FrameworkValue]]:
        """Every metric of the headline comparison that has a name there, in our order."""
        rows = summary.all_rows(summary.headline(report))
        return [(row, other) for row in rows for other in self.of(row.metric)]

    def _value(self, alias: framework_names.Alias) -> float | None:
        return value_of(alias.value, self._arrays) if alias.value and self._arrays else None


def _arrays(tokens: pd.DataFrame) -> dict[str, Any]:
    """The arrays that conventions ask for; none where no token could be compared."""
    table = comparable(tokens)
    if table.empty:
        return {}
    arrays: dict[str, Any] = {
        array: table[column].to_numpy(dtype=np.float64) for column, array in COLUMNS.items()
    }
    arrays["sequence"] = table["sequence"].to_numpy(dtype=np.int64)
    return arrays
