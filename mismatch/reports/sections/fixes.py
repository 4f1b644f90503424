"""The fixes that were tried; all numbers are of the loss without any weight.

Fixes of the loss are listed apart: they change weights and no log-probability, so they have no
"after".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from mismatch.analysis.corrections.types import Corrections
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import (
    RANKED_BY,
    EstimatorFix,
    FixOutcome,
    FixTable,
    check_command,
)
from mismatch.experiments.fixes.catalogue import is_combination, labels
from mismatch.experiments.fixes.pages import settings_of
from mismatch.experiments.fixes.planning import chosen_of
from mismatch.metrics.inference import LEVEL, prompts_to_tell
from mismatch.reports.formatting import (
    chance,
    interval,
    memory,
    number,
    percent,
    plural,
    seconds,
    signed,
    text,
    times,
)
from mismatch.reports.section import Cell, Column, Section, Table, Tone, Value
from mismatch.reports.sections.corrections import recipe_block
from mismatch.types import Estimate, Report, Verdict

K3, MEAN = RANKED_BY
TAIL, ROUTES = "logprob_abs_diff_p999", "routing_disagree_layer"
LEAD = (
    "Each fix was applied for real and the mismatch measured again, without any weight in the "
    "loss. Changes are after minus before: below 0 is better."
)
ON_LOSS = (
    "They change weights and no log-probability: no “after”, no rank among the fixes, no better "
    "verdict."
)
KINDS = {"train": "trainer", "engine": "engine", "both": "engine and trainer"}
RESULTS: dict[str | None, tuple[str, Tone]] = {
    "better": ("helps", "healthy"),
    "worse": ("worsens", "critical"),
    "mixed": ("mixed", "warn"),
    "negligible": ("negligible", "dim"),
    "none": ("not significant", "dim"),
    None: ("not measured", "dim"),
}
REMOVES_NOTHING = "it reweighs the loss and removes nothing"
HIDES = "it hides the mismatch and does not remove it"
VALUES = (
    Column("fix", text),
    Column("k3", number),
    Column("mean |delta|", number, detail="nats"),
    Column("99.9 % of |delta|", number, 1, detail="nats", narrow="99.9 %"),
    Column("other experts", percent, 2, detail="of (token, layer)", narrow="experts"),
    Column("took", seconds, 3),
    Column("memory", memory, 4, detail="at the peak"),
    Column("verdict", text, detail="with it"),
)
change = partial(signed, digits=2)
CHANGES = (
    Column("fix", text),
    Column("result", text),
    Column("removed", percent, detail="of mean |delta|", interval=1),
    Column("change of k3", change, interval=0),
    Column("p", chance),
    Column("change of mean |delta|", change, 2, interval=3),
    Column("p, mean", chance, 2),
    Column("measured on", text, 1),
)
LOSSES = (
    Column("fix", text),
    Column("correction", text, 3),
    Column("kept", percent, detail="of the tokens"),
    Column("effective size", percent),
    Column("residual bias", change, 1, interval=2),
    Column("", text),
)


def section(result: FixTable, report: Report) -> Section:
    """Values and changes, best first; how to use the best; what was not measured."""
    rows = [outcome for outcome in result.outcomes if outcome.measured]
    tables: tuple[Table, ...] = ()
    if rows:
        before = _values(rows[0].before)
        without = Table(VALUES, (("without", *before, None, None, ""), *map(_after, rows)))
        tables = without, Table(CHANGES, tuple(_changes(result, outcome) for outcome in rows))
    return Section(
        id="fixes",
        title="Fixes tried",
        lead=LEAD,
        sentences=(*sentences(result), *_commands(result)),
        tables=tables,
        notes=(result.method,),
        parts=(_losses(result, report), *_settings(result), _others(result)),
        folded=False,
    )


def _values(metrics: Mapping[str, Estimate]) -> tuple[Value, ...]:
    return tuple(metrics.get(name) for name in (K3, MEAN, TAIL, ROUTES))


def _name(id: str) -> str:
    """A combination has spaces where a line may break."""
    return " + ".join(labels(id))


def _after(row: FixOutcome) -> tuple[Cell | Value, ...]:
    about = "; ".join(part for part in (f"{KINDS[row.side]}: {row.summary}", row.flags) if part)
    return (
        Cell(_name(row.id), note=about),
        *_values(row.after),
        row.cost.seconds,
        row.cost.peak_bytes,
        row.verdict_after.status if row.verdict_after else None,
    )


def _changes(result: FixTable, row: FixOutcome) -> tuple[Cell | Value, ...]:
    """Each p-value stands beside the change that it is of; they are adjusted already."""
    word, tone = RESULTS[row.outcome]
    sure = {metric for metric, p in row.p_values.items() if p <= LEVEL}
    if row.outcome in ("better", "worse") and sure == {MEAN}:
        word += " (mean)"  # the change of k3 alone would not be significant
    return (
        Cell(_name(row.id), "strong" if row.id in (result.best, result.best_together) else ""),
        Cell(word, tone),
        row.removed.get(MEAN),
        row.paired or row.difference or row.changes.get(K3),
        row.p_values.get(K3),
        row.changes.get(MEAN),
        row.p_values.get(MEAN),
        "the same tokens" if row.paired else "sampled anew, by prompt",
    )


def _losses(result: FixTable, report: Report) -> Section:
    """The fixes of the loss; they are never ranked among the others."""
    preview = report.result("corrections")
    table = Table(LOSSES, tuple(_loss(fix, preview) for fix in result.estimators))
    return Section("fixes-loss", "Fixes of the loss", ON_LOSS, tables=(table,), folded=False)


def _loss(fix: EstimatorFix, corrections: Corrections | None) -> tuple[Cell | Value, ...]:
    previews = {preview.id: preview for preview in corrections.previews} if corrections else {}
    preview = previews.get(fix.correction or "")
    remark = HIDES if fix.hides else REMOVES_NOTHING
    return (
        Cell(fix.id, "code"),
        preview.label if preview else fix.summary,
        preview.kept_tokens if preview else None,
        preview.ess if preview else None,
        preview.token.bias if preview and preview.token else None,
        f"{remark}; {fix.reason}" if fix.reason else remark,
    )


def _commands(result: FixTable) -> list[str]:
    """How to use the best single fix and the best combination, where they help."""
    best = dict.fromkeys(id for id in (result.best, result.best_together) if id)
    said = [f"To use {id}: {command_of(result.outcome(id))}" for id in best]
    return [*said, "How verl, TRL and others set one: mismatch fixes ID"] if best else []


def command_of(row: FixOutcome) -> str:
    """The command that makes a check with a fix or a combination.

    From the catalogue; a row that another version wrote, with other flags, keeps its own text.
    """
    try:
        flags = [chosen.flags for chosen in chosen_of(row.id)]
    except MismatchError:  # no longer in the catalogue
        flags = []
    if " ".join(map(str, flags)) != row.flags:
        return f"mismatch check … {row.flags}"
    return check_command(flags)


def _settings(result: FixTable) -> Iterable[Section]:
    """Each framework's settings of what the best consist of, once each."""
    best = [label for id in (result.best, result.best_together) if id for label in labels(id)]
    for place, label in enumerate(dict.fromkeys(best)):
        recipes = settings_of(label.partition("=")[0])
        blocks = tuple(recipe_block(recipe) for recipe in recipes)
        yield Section(f"fixes-settings-{place}", f"How to set {label}", blocks=blocks)


def _others(result: FixTable) -> Section:
    """What does not apply here, failed while it ran, or was left out; each with its reason."""
    rows = tuple((row.id, row.reason) for row in result.outcomes if not row.measured)
    tables = (Table((Column("fix", text), Column("not measured, because", text)), rows),)
    notes = result.left_out
    return Section("fixes-others", "Not measured", tables=tables, notes=notes, folded=False)


# ---------------------------------------------------------------- sentences


def sentences(result: FixTable) -> list[str]:
    """What follows from the table, most useful first; never empty where fixes were tried."""
    said = [*_best(result), *_worse(result), *_whose_verdict(result)]
    failed = [
        row.id
        for row in result.outcomes
        if row.applies and row.reason and not row.measured and row.verdict_after is None
    ]
    if failed:
        said.append(f"Failed while running, and so not measured: {', '.join(failed)}.")
    return said


def _best(result: FixTable) -> list[str]:
    measured = [row for row in result.outcomes if row.measured]
    if not measured:
        return [_nothing_measured(result)]
    if result.best is None and result.best_together is None:
        many = len(measured)
        none = "The one fix that could be measured makes no"
        if many > 1:
            none = f"None of the {many} fixes that could be measured makes an"
        return [f"{none} improvement that can be told from chance.", *_too_few(measured)]
    said = []
    if result.best is not None:
        said.append(f"Best single fix: {_effect(result.outcome(result.best))}")
    if result.best_together not in (None, result.best):
        said.append(f"Best together: {_effect(result.outcome(str(result.best_together)))}")
    several = next((row for row in measured if is_combination(row)), None)
    if result.best is not None and result.best == result.best_together and several is not None:
        said.append(f"No combination does clearly better. Best of them: {_effect(several)}")
    return [*said, *_confirmation(result)]


def _confirmation(result: FixTable) -> list[str]:
    """The best on prompts that had no part in choosing it."""
    again = result.held_out
    if again is None:
        return []
    if again.reason:
        return [
            f"{again.id} was not confirmed on other prompts ({again.reason}): chosen and measured "
            "on the same ones, its effect may look too good."
        ]
    share = again.removed.get(MEAN)
    removes = "removes nothing that can be measured"
    if share is not None:
        removes = f"removes {percent(share.value)} ({interval(share, percent, ' to ')})"
    measured = (
        f"chosen on {plural(again.chosen_on, 'prompt')}, on the other {again.measured_on} it "
        f"{removes} of mean |delta|"
    )
    if again.confirmed:
        return [f"Confirmed on held-out prompts: {again.chosen}, {measured}."]
    if again.chosen != again.id:
        return [
            f"Not confirmed: half of the prompts choose {again.chosen} instead of {again.id}; "
            f"{measured}."
        ]
    return [f"Not confirmed on held-out prompts: {again.chosen}, {measured}."]


def _nothing_measured(result: FixTable) -> str:
    if not result.outcomes and result.estimators:
        return "Only fixes of the loss were asked for: they change no log-probability."
    ends = [f"{o.id} ({o.verdict_after.status})" for o in result.outcomes if o.verdict_after]
    if not ends:
        return "No fix could be measured; the reasons are below."
    return (
        "There is nothing to compare with; runs that can be judged, and how they end: "
        f"{', '.join(ends)}."
    )


def _too_few(measured: list[FixOutcome]) -> list[str]:
    """Where even a change in every prompt is not significant."""
    tests = sum(len(row.p_values) for row in measured)
    prompts = min((row.before[K3].n_prompts for row in measured if K3 in row.before), default=0)
    if tests == 0 or prompts == 0:
        return []
    needed = prompts_to_tell(tests)
    if prompts >= needed:
        return []
    return [
        f"With {plural(prompts, 'prompt')} no change could be, however large: with this many fixes "
        f"at least {needed} prompts are needed (--num-prompts), or fewer fixes."
    ]


def _effect(row: FixOutcome) -> str:
    parts = [
        f"{name} {_fall(row.before[metric].value, row.after[metric].value)}"
        for name, metric in (("k3", K3), ("mean |delta|", MEAN))
        if metric in row.before and metric in row.after
    ]
    share = row.removed.get(MEAN)
    if share is not None:
        parts.append(f"{percent(share.value)} of mean |delta| removed")
    if row.verdict_after:
        parts.append(f"the verdict with it: {row.verdict_after.status}{_open(row.verdict_after)}")
    return f"{row.id}. {'; '.join(parts)}."


def _open(after: Verdict) -> str:
    """What a verdict that correctness alone leaves open says of training."""
    if after.correctness is None or after.fitness is None:
        return ""
    if after.correctness.status != "inconclusive" or after.status != "inconclusive":
        return ""
    return f" (whether a side is broken was not measured again; fit: {after.fitness.status})"


def _fall(before: float, after: float) -> str:
    values = f"from {number(before)} to {number(after)}"
    if after <= 0 or before <= 0 or not before / after > 1.1:
        return values
    return f"{values} ({times(before / after)} less)"


def _worse(result: FixTable) -> list[str]:
    names = [row.id for row in result.outcomes if row.outcome == "worse"]
    verb = "makes" if len(names) == 1 else "make"
    return [f"{', '.join(names)} {verb} it worse."] if names else []


def _whose_verdict(result: FixTable) -> list[str]:
    if result.verdict != "after-fixes" or result.verdict_as_is is None:
        return []
    before = result.verdict_as_is
    return [
        f"The verdict of this report is that of a run with {result.best_together}. As it runs now: "
        f"{before.status.upper()} – {before.reason}"
    ]
