"""The fixes that were tried; all numbers are of the loss without any weight.

Fixes of the loss are listed apart: they change weights and no log-probability, so they have no
"after".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import VALUE, check_command
from mismatch.experiments.fixes.catalogue import FIXES, chosen_of, is_combination, labels
from mismatch.experiments.fixes.guides import settings_of
from mismatch.experiments.results import RANKED_BY, FixOutcome, FixTable, HeldOut
from mismatch.frameworks import Recipe
from mismatch.metrics.permutation import LEVEL, prompts_to_tell
from mismatch.reports.formatting import (
    alike,
    chance,
    change,
    interval,
    memory,
    number,
    percent,
    plural,
    seconds,
    text,
    times,
)
from mismatch.reports.section import (
    Block,
    Cell,
    Cells,
    Column,
    Figure,
    Section,
    Table,
    Tone,
    recipe_block,
)
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, rows_of
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

K3, MEAN = RANKED_BY
SIZES = (MEAN, "logprob_abs_diff_p999", "routing_disagree_layer")
SHOWN = 3  # fixes that a page shows without being asked: the best
LEAD = "Each fix applied and measured again; no importance weights. Changes below 0 are better."
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
ONLY_OF_THE_LOSS = "Only fixes of the loss were asked for: they change no log-probability."
NOT_AGAIN = " (whether a side is broken was not measured again; fit: {})"
HIDES = "it hides the mismatch and does not remove it"
TRIED = (
    Column("fix", text),
    Column("result", text),
    Column("k3", number),
    Column("removed", percent, detail="of mean |delta|", interval=1),
    Column("verdict with it", text),
)
NUMBERS = (
    Column("fix", text),
    Column("mean |delta|", number, detail="nats"),
    Column("99.9 % of |delta|", number, 1, detail="nats", narrow="99.9 %"),
    Column("routing flips", percent, 2, detail="of (token, layer)", narrow="flips"),
    Column("change of k3", change, interval=0),
    Column("p", chance),
    Column("change of mean |delta|", change, 2, interval=3),
    Column("p, mean", chance, 2),
    Column("measured on", text, 3),
    Column("took", seconds, 4),
    Column("memory", memory, 5, detail="at the peak"),
)
LOSSES = (Column("fix", text), Column("correction", text), Column("", text))


def section(result: FixTable, report: Report) -> Section:
    """Show each fix with k3 and verdict after, best first; how to use it; what was not measured."""
    rows = [outcome for outcome in result.outcomes if outcome.measured]
    tried = [_tried(result, row) for row in rows]
    numbers = [_numbers(row) for row in rows]
    if rows:
        before, verdict = rows[0].before, result.verdict_as_is or report.verdict
        tried.insert(0, ("without", None, before.get(K3), None, verdict.status))
        numbers.insert(0, ("without", *map(before.get, SIZES), *[None] * (len(NUMBERS) - 4)))
    left = [(row.id, row.reason) for row in result.outcomes if not row.measured]
    others = Table((Column("fix", text), Column("not measured, because", text)), left)
    losses = []  # what they do to the tokens is among the corrections
    for fix in result.estimators:
        remark = HIDES if fix.hides else REMOVES_NOTHING
        remark = f"{remark}; {fix.reason}" if fix.reason else remark
        losses.append((Cell(fix.id, "code"), fix.summary, remark))
    first, rest = tried[: 1 + SHOWN], tried[1 + SHOWN :]
    folded = (
        Section("fixes-rest", f"Other fixes: {len(rest)}", tables=(Table(TRIED, rest),)),
        Section("fixes-loss", "Fixes of the loss", ON_LOSS, tables=(Table(LOSSES, losses),)),
        Section("fixes-others", "Not measured", tables=(others,), notes=result.left_out),
    )
    numbers_of_all = Section(
        "fixes-numbers",
        "Every fix and number, intervals and p-values",
        LEAD,
        tables=(Table(NUMBERS, numbers),),
        notes=(result.method,),
        parts=folded,
    )
    return Section(
        id="fixes",
        title="Fixes tried",
        sentences=sentences(result),
        tables=(Table(TRIED, first),),
        figures=_figures(rows, report, result.best_together),
        parts=(numbers_of_all, _settings(result)) if rows else folded,
        folded=False,
    )


def _name(id: str) -> str:
    """Return labels with spaces in a combination, where a line may break."""
    return " + ".join(labels(id))


def _tried(result: FixTable, row: FixOutcome) -> Cells:
    """Each by what it does, how much it removes, and the verdict with it."""
    word, tone = RESULTS[row.outcome]
    sure = {metric for metric, p in row.p_values.items() if p <= LEVEL}
    if row.outcome in ("better", "worse") and sure == {MEAN}:
        word += " (mean)"  # the change of k3 alone would not be significant
    best = row.id in (result.best, result.best_together)
    return (
        Cell(_name(row.id), "strong" if best else ""),
        Cell(word, tone),
        row.after.get(K3),
        row.removed.get(MEAN),
        row.verdict_after.status if row.verdict_after else None,
    )


def _numbers(row: FixOutcome) -> Cells:
    """Each p-value is next to its change; they are adjusted already."""
    about = "; ".join(part for part in (f"{KINDS[row.side]}: {row.summary}", row.flags) if part)
    return (
        Cell(_name(row.id), note=about),
        *map(row.after.get, SIZES),
        row.paired or row.difference or row.changes.get(K3),
        row.p_values.get(K3),
        row.changes.get(MEAN),
        row.p_values.get(MEAN),
        "the same tokens" if row.paired else "sampled again, by prompt",
        row.cost.seconds,
        row.cost.peak_bytes,
    )


def _figures(rows: list[FixOutcome], report: Report, best: str | None) -> tuple[Figure, ...]:
    """k3 before and after the best fixes, where both are above 0 and there are several fixes."""
    drawn = [row for row in rows if K3 in row.before and K3 in row.after]
    if len(drawn) < 2 or min(min(r.before[K3].value, r.after[K3].value) for r in drawn) <= 0:
        return ()
    lowest = min(drawn, key=lambda row: row.after[K3].value)
    titled = next((row for row in drawn if row.id == best), lowest)  # the fix that is recommended
    tokens = plural(titled.after[K3].n_tokens, "token")
    shown = [row for at, row in enumerate(drawn) if at < SHOWN or row in (lowest, titled)]
    return (
        Figure(
            "fixes-k3",
            f"With {titled.id} k3 goes {fall(titled, K3)}",
            f"k3 in nats per token before (ring) and after (dot), {tokens}, 95 % intervals; log "
            "axis. Dashed: healthy and unfit bounds.",
            partial(_dots, shown, report),
            (6.0, 1.0 + 0.33 * len(shown)),
        ),
    )


def _dots(rows: list[FixOutcome], report: Report, axes: Axes) -> str:
    for y, row in enumerate(rows):
        before, after = row.before[K3], row.after[K3]
        axes.plot([before.value, after.value], [y] * 2, color=FAINT, lw=1)
        if after.low and after.high:
            axes.plot([after.low, after.high], [y] * 2, color=ACCENT, lw=3)
        axes.plot(before.value, y, "o", ms=7, mfc="none", mec=INK)
        axes.plot(after.value, y, "o", ms=7, color=ACCENT)
    for judgement in report.verdict.judgements:
        for bound in (judgement.healthy, judgement.unfit):
            if judgement.metric == K3 and bound > 0:
                axes.axvline(bound, color=SECOND, lw=1.2, dashes=(4, 3))
    axes.set(xscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    rows_of(axes, [_name(row.id) for row in rows])
    axes.set_xlabel("k3, nats per token (log)")
    write = alike(value.value for row in rows for value in (row.before[K3], row.after[K3]))
    values = [
        f"{_name(r.id)} {write(r.before[K3].value)} → {write(r.after[K3].value)}" for r in rows
    ]
    return f"k3 before and after: {'; '.join(values)}"


def command_of(row: FixOutcome, made_by: str = "") -> str:
    """Return the command that makes a check with a fix or a combination.

    From the catalogue; a row of a plug-in that is not here, or with other flags, keeps its text.
    """
    try:
        flags = [chosen.flags for chosen in chosen_of(row.id)]
    except MismatchError:  # not in the catalogue
        flags = []
    if " ".join(map(str, flags)) != row.flags:
        return f"mismatch check … {row.flags}"
    return check_command(flags, made_by)


def _settings(result: FixTable) -> Section:
    """Show the command, and each framework's settings, of what the best consist of, once each."""
    used = [id for id in dict.fromkeys((result.best, result.best_together)) if id]
    best: dict[str, FixOutcome] = {}
    for id in used:
        for label in labels(id):
            best.setdefault(label, result.outcome(id))
    commands = tuple(command_of(result.outcome(id)) for id in used)
    parts = tuple(
        Section(
            f"fixes-settings-{index}",
            label,
            blocks=tuple(recipe_block(*each) for each in with_proof(row, label)),
            folded=False,
        )
        for index, (label, row) in enumerate(best.items())
    )
    own = (Block("mismatch", commands),) if commands else ()
    return Section("fixes-settings", f"How to set {', '.join(used)}", blocks=own, parts=parts)


def with_proofs(row: FixOutcome) -> list[tuple[Recipe, str]]:
    """Return the settings of all fixes of a row."""
    return [each for label in labels(row.id) for each in with_proof(row, label)]


def with_proof(row: FixOutcome, label: str) -> list[tuple[Recipe, str]]:
    """Return a fix's settings in every framework, each with whether that is what was measured."""
    name, _, value = label.partition("=")
    in_trainer = any(fix.id == name and fix.side == "train" for fix in FIXES)
    found = []
    for recipe in settings_of(name):
        proof = recipe.proof((row.kernel, value), in_trainer=in_trainer) if recipe.lines else ""
        lines = tuple(line.replace(VALUE, value) for line in recipe.lines)
        found.append((replace(recipe, lines=lines), proof))
    return found


# ---------------------------------------------------------------- sentences


def sentences(result: FixTable) -> list[str]:
    """Return what follows from the table, most useful first; never empty where fixes were tried."""
    texts = _best(result, [row for row in result.outcomes if row.measured])
    worse = [row.id for row in result.outcomes if row.outcome == "worse"]
    if worse:
        texts.append(f"{', '.join(worse)} {'makes' if len(worse) == 1 else 'make'} it worse.")
    before = result.verdict_as_is
    if result.verdict == "after-fixes" and before is not None:
        texts.append(
            f"The verdict of this report is that of a run with {result.best_together}. As it runs "
            f"now: {before.status.upper()} – {before.reason}"
        )
    failed = [
        row.id
        for row in result.outcomes
        if row.applies and row.reason and not row.measured and row.verdict_after is None
    ]
    if failed:
        texts.append(f"Failed while running, and so not measured: {', '.join(failed)}.")
    return texts


def _best(result: FixTable, measured: list[FixOutcome]) -> list[str]:
    if not measured:
        ends = [f"{o.id} ({o.verdict_after.status})" for o in result.outcomes if o.verdict_after]
        if not result.outcomes and result.estimators:
            return [ONLY_OF_THE_LOSS]
        if not ends:
            return ["No fix could be measured; the reasons are below."]
        return [
            "There is nothing to compare with; runs that can be judged, and how they end: "
            f"{', '.join(ends)}."
        ]
    if result.best is None and result.best_together is None:
        many = f"None of the {len(measured)} fixes that could be measured makes an"
        none = many if len(measured) > 1 else "The one fix that could be measured makes no"
        return [f"{none} improvement that exceeds chance.", *_too_few(measured)]
    texts = []
    if result.best is not None:
        texts.append(f"Best single fix: {_effect(result.outcome(result.best))}")
    if result.best_together not in (None, result.best):
        texts.append(f"Best combination: {_effect(result.outcome(str(result.best_together)))}")
    several = next((row for row in measured if is_combination(row)), None)
    if result.best is not None and result.best == result.best_together and several is not None:
        enough = result.outcome(result.best).heals
        no = "is needed" if enough else "does clearly better"
        texts.append(f"No combination {no}: the best of them, {several.id}, is in the table.")
    return texts if result.held_out is None else [*texts, _confirmation(result.held_out)]


def _confirmation(again: HeldOut) -> str:
    """Say what the best does on prompts that had no part in choosing it."""
    if again.reason:
        return (
            f"{again.id} was not confirmed on other prompts ({again.reason}): chosen and measured "
            "on the same prompts, its effect may look too good."
        )
    share = again.removed.get(MEAN)
    removes = "removes nothing that can be measured"
    if share is not None:
        removes = f"removes {percent(share.value)} ({interval(share, percent, ' to ')})"
    if again.confirmed:
        chose = f"Confirmed on held-out prompts: {again.chosen},"
    elif again.chosen == again.id:
        chose = f"Not confirmed on held-out prompts: {again.chosen},"
    else:
        chose = f"Not confirmed: half of the prompts choose {again.chosen} instead of {again.id};"
    return (
        f"{chose} chosen on {plural(again.chosen_on, 'prompt')}, on the other "
        f"{again.measured_on} it {removes} of mean |delta|."
    )


def _too_few(measured: list[FixOutcome]) -> list[str]:
    """Say where even a change in every prompt is not significant."""
    tests = sum(len(row.p_values) for row in measured)
    prompts = min((row.before[K3].n_prompts for row in measured if K3 in row.before), default=0)
    if not tests or not prompts or prompts >= (needed := prompts_to_tell(tests)):
        return []
    return [
        f"With {plural(prompts, 'prompt')} no change could be, however large: with this many fixes "
        f"at least {needed} prompts are needed (--num-prompts), or fewer fixes."
    ]


def _effect(row: FixOutcome) -> str:
    parts = [
        f"{name} {fall(row, metric)}"
        for name, metric in (("k3", K3), ("mean |delta|", MEAN))
        if metric in row.before and metric in row.after
    ]
    share, after = row.removed.get(MEAN), row.verdict_after
    if share is not None:
        parts.append(f"{percent(share.value)} of mean |delta| removed")
    if after:
        side, fit = after.correctness, after.fitness  # of the two, fitness may be known
        half = side and fit and side.status == after.status == "inconclusive"
        known = NOT_AGAIN.format(fit.status) if fit and half else ""
        parts.append(f"the verdict with it: {after.status}{known}")
    return f"{row.id}. {'; '.join(parts)}."


def fall(row: FixOutcome, metric: str, words: str = "from {} to {}") -> str:
    """Return a metric before and after a fix, and how many times less that is."""
    before, after = row.before[metric].value, row.after[metric].value
    write = alike((before, after))
    less = f" ({times(before / after)} less)" if 0 < after < before / 1.1 else ""
    return words.format(write(before), write(after)) + less
