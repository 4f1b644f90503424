"""What follows from the fixes that were tried, in sentences."""

from __future__ import annotations

from mismatch.experiments.fixes.base import RANKED_BY, FixOutcome, FixTable
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.metrics.inference import prompts_to_tell
from mismatch.reports import quantities
from mismatch.reports.text import line
from mismatch.types import Report

K3, MEAN = RANKED_BY


def sentences(report: Report) -> list[str]:
    """What follows from the table, most useful first; never empty where fixes were tried."""
    made = report.result("fixes")
    if made is None:
        return []
    said = [*_best(made), *_worse(made), *_whose_verdict(made)]
    failed = [
        one
        for one in made.outcomes
        if one.applies and one.reason and not one.measured and one.verdict_after is None
    ]
    if failed:
        names = ", ".join(line(one.id) for one in failed)
        said.append(f"Failed while running, and so not measured: {names}.")
    return said


def _best(made: FixTable) -> list[str]:
    measured = [one for one in made.outcomes if one.measured]
    if not measured:
        return [_nothing_measured(made)]
    if made.best is None and made.best_together is None:
        many = len(measured)
        none = "The one fix that could be measured makes no"
        if many > 1:
            none = f"None of the {many} fixes that could be measured makes an"
        return [f"{none} improvement that can be told from chance.", *_too_few(measured)]
    said = []
    if made.best is not None:
        said.append(f"Best single fix: {_effect(made.outcome(made.best))}")
    if made.best_together not in (None, made.best):
        said.append(f"Best together: {_effect(made.outcome(str(made.best_together)))}")
    several = next((one for one in measured if is_combination(one)), None)
    if made.best is not None and made.best == made.best_together and several is not None:
        said.append(f"No combination does clearly better. Best of them: {_effect(several)}")
    return said


def _nothing_measured(made: FixTable) -> str:
    if not made.outcomes and made.estimators:
        return "Only fixes of the loss were asked for: they change no log-probability."
    ends = [(one.id, one.verdict_after.status) for one in made.outcomes if one.verdict_after]
    if not ends:
        return "No fix could be measured; the reasons are below."
    named = ", ".join(f"{line(name)} ({status})" for name, status in ends)
    return f"There is nothing to compare with; runs that can be judged, and how they end: {named}."


def _too_few(measured: list[FixOutcome]) -> list[str]:
    """Where even a change in every prompt is not significant."""
    tests = sum(len(one.p_values) for one in measured)
    prompts = min((one.before[K3].n_prompts for one in measured if K3 in one.before), default=0)
    if tests == 0 or prompts == 0:
        return []
    needed = prompts_to_tell(tests)
    if prompts >= needed:
        return []
    return [
        f"With {quantities.plural(prompts, 'prompt')} no change could be, however large: with this "
        f"many fixes at least {needed} prompts are needed (--num-prompts), or fewer fixes."
    ]


def _effect(one: FixOutcome) -> str:
    parts = [
        f"{name} {_fall(one.before[metric].value, one.after[metric].value)}"
        for name, metric in (("k3", K3), ("mean |delta|", MEAN))
        if metric in one.before and metric in one.after
    ]
    after = f"; the verdict with it: {one.verdict_after.status}" if one.verdict_after else ""
    return f"{line(one.id)}. {'; '.join(parts)}{after}."


def _fall(before: float, after: float) -> str:
    values = f"from {quantities.number(before)} to {quantities.number(after)}"
    if after <= 0 or before <= 0 or not before / after > 1.1:
        return values
    return f"{values} ({quantities.times(before / after)} less)"


def _worse(made: FixTable) -> list[str]:
    names = [line(one.id) for one in made.outcomes if one.outcome == "worse"]
    verb = "makes" if len(names) == 1 else "make"
    return [f"{', '.join(names)} {verb} it worse."] if names else []


def _whose_verdict(made: FixTable) -> list[str]:
    if made.verdict != "after-fixes" or made.verdict_as_is is None:
        return []
    before = made.verdict_as_is
    return [
        f"The verdict of this report is that of a run with {line(made.best_together)}. As it runs "
        f"now: {before.status.upper()} – {line(before.reason)}"
    ]
