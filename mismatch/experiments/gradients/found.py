"""The gradient check of a run directory."""

from __future__ import annotations

from pathlib import Path

from mismatch.errors import MismatchError
from mismatch.experiments.gradients.analysis import check_gradients
from mismatch.experiments.gradients.files import (
    ALL_PASSES,
    gradient_failures,
    load_batch,
    load_gradients,
)
from mismatch.experiments.gradients.types import GradientCheck


def check_of_run(
    run_dir: Path | str, *, asked: bool = False
) -> tuple[GradientCheck | None, list[str]]:
    """The check, and what it could not see, one sentence each.

    None where no gradient was asked for, or where none can be compared; then the reason is among
    the sentences. Gradients never keep a report from being made.

    Args:
        asked: the run was to take gradients, so that there must be a word about them.
    """
    try:
        batch = load_batch(run_dir)
        if batch is None:
            reasons = gradient_failures(run_dir, [ALL_PASSES])
            said = [f"gradients: {reason}" for reason in reasons.values()]
            none = ["gradients: none were taken (mismatch check --gradients --resume)"]
            return None, said or (none if asked else [])
        made = check_gradients(load_gradients(run_dir), batch)
    except MismatchError as error:
        text = error.message
        text = text if text.startswith("gradients") else f"gradients: {text}"
        return None, [f"{text} ({error.fix})" if error.fix else text]
    return made, list(made.not_tested)
