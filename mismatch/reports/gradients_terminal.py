"""On a terminal: the gradient check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.experiments.gradients.types import GradientCheck
from mismatch.reports import gradients
from mismatch.reports.console import columns, heading, paragraph

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red", "none": "dim"}


def print_gradients(made: GradientCheck, console: Console) -> None:
    """Every gradient of the token-level loss as a row, then what follows and what to know."""
    from rich.text import Text

    parts = gradients.parts(made)
    heading(console, gradients.TITLE, "beside the float32 reference's; one batch, no training")
    table = columns(
        ("", False, 0), ("off", True, 0), ("length", True, 0), ("error", True, 0),
        ("bias", True, 0), ("noise", True, 0), ("", False, 0),
    )  # fmt: skip
    table.columns[0].overflow = "fold"
    for row in parts[0].lines:
        table.add_row(
            f"  {row.id}", row.off, row.length, row.error, row.bias, row.noise_times,
            Text(f"{row.sign} {row.verdict}".strip(), STYLES[row.tone]),
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)
    told = "error and bias over the reference's size; noise: variance over the baseline's"
    paragraph(console, f"{parts[0].title}; {told}.", style="dim")
    for same in parts[0].same:
        paragraph(console, same, style="dim")
    for sentence in gradients.sentences(made):
        paragraph(console, f"- {sentence}")
    for note in (gradients.batch(made), *gradients.notes(made)):
        paragraph(console, f"- {note}", style="dim")
