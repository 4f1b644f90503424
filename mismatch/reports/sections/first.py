"""What is read first: a question and an answer each, computed from the report."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch.analysis.diagnosis.catalogue import catalogue, title_of
from mismatch.analysis.square import sides_at_fault
from mismatch.experiments.fixes.base import RANKED_BY, FixOutcome, FixTable
from mismatch.experiments.fixes.catalogue import labels
from mismatch.experiments.fixes.guides import settings_of
from mismatch.metrics.forecast import Forecast
from mismatch.reports.formatting import (
    alike,
    bound,
    capital,
    count,
    interval,
    line,
    percent,
    plural,
    times,
)
from mismatch.reports.section import Answer, Block
from mismatch.reports.sections import published_values, square
from mismatch.reports.summary import checks, headline, in_plain_words, judged_rows, untested
from mismatch.types import NotTested, Report

K3, MEAN = RANKED_BY
FRAMEWORKS = ("verl", "TRL", "NeMo-RL", "prime-rl")
NAMED = 6  # detectors, or reasons, that are named; the rest is counted


def lead(report: Report) -> str:
    """What is wrong, or how far apart the two sides are, in one sentence."""
    causes, failed = report.result("causes"), checks(report, "failed")
    if causes and causes.ranked:
        return f"{line(title_of(causes.ranked[0].id)).rstrip('.')}."
    if failed:
        return capital(f"{line(failed[0].detail).rstrip('.')}.")
    if report.verdict.status == "healthy":
        return "Engine and trainer agree within the healthy bounds."
    return in_plain_words(report)


def answers(report: Report, warnings: Sequence[str] = ()) -> tuple[Answer, ...]:
    """The fix or what was ruled out, side, effect on training, how sure, what was not tested.

    Args:
        warnings: of all sections: what has to be known before numbers are believed.
    """
    texts = {
        "Cause": _cause(report),
        "Ruled out": _ruled_out(report),
        "Side at fault" if _faulty(report) else "Each side": _side(report),
        "In training": _training(report),
        "How sure": _sure(report),
        "Checks": _checks(report),
        "Not tested": _untested(report),
    }
    said = [Answer("Careful", line(" ".join(warnings)))] if warnings else []
    said += [Answer(question, text) for question, text in texts.items() if text]
    fix = _fix(report)
    return (fix, *said) if fix else tuple(said)


def _fix(report: Report) -> Answer | None:
    """The best measured fix; else the repair of the leading cause, where there is one."""
    fixes: FixTable | None = report.result("fixes")
    if fixes is not None and fixes.best_together is not None:
        best = fixes.outcome(fixes.best_together)
        return Answer("Best fix", effect(best, report), best.flags, _settings(best))
    if report.verdict.status == "healthy":
        return None
    causes = report.result("causes")
    entry = catalogue().get(causes.ranked[0].id) if causes and causes.ranked else None
    if fixes is not None and fixes.outcomes:
        return Answer("Best fix", "None of the fixes that were measured helps significantly.")
    return Answer("Fix, not measured", line(entry.mend), "--fix all") if entry else None


def effect(best: FixOutcome, report: Report) -> str:
    """A fix by its k3 before and after, and the verdict with it."""
    parts = [best.id]
    if K3 in best.before and K3 in best.after:
        before, after = best.before[K3].value, best.after[K3].value
        less = f" ({times(before / after)} less)" if 0 < after < before / 1.1 else ""
        write = alike((before, after))
        parts.append(f"k3 {write(before)} → {write(after)}{less}")
    if best.verdict_after is not None:
        fixes = report.result("fixes")
        now = fixes.verdict_as_is or report.verdict
        parts.append(f"verdict {now.status.upper()} → {best.verdict_after.status.upper()}")
    return "; ".join(parts)


def _settings(best: FixOutcome) -> tuple[Block, ...]:
    """How each framework is told; what is known of none says so."""
    blocks = []
    for framework in FRAMEWORKS:
        lines: list[str] = []
        for label in labels(best.id):
            known = {item.framework: item for item in settings_of(label.partition("=")[0])}
            lines += known[framework].lines if framework in known else ()
        blocks.append(Block(framework, tuple(filter(None, lines))))
    return tuple(blocks)


def _cause(report: Report) -> str:
    """How much the leading cause explains, and whether an experiment confirmed it."""
    causes = report.result("causes")
    if not causes or not causes.ranked:
        return ""
    cause = causes.ranked[0]
    share = "share not measured"
    if cause.effect is not None:
        share = f"{percent(cause.effect.value)} of mean |delta| goes with it"
    how = (
        "confirmed by experiment"
        if cause.status == "confirmed"
        else "suspected, --explain confirms or rules it out"
    )
    return f"{line(cause.id)}: {share}; {how}."


def _ruled_out(report: Report) -> str:
    """What detectors looked for and did not see; said where no cause is."""
    causes = report.result("causes")
    if not causes or causes.ranked:
        return ""
    ids = list(dict.fromkeys(id for each in causes.ruled_out for id in each.causes))
    named = ", ".join(line(id) for id in ids[:NAMED])
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    looked = plural(len(causes.ruled_out), "detector")
    missing = f"; {plural(len(causes.not_tested), 'detector')} lacked data"
    return f"{named}{more} ({looked}{missing if causes.not_tested else ''})." if ids else ""


def _faulty(report: Report) -> bool:
    """Whether the square has a side beyond its level."""
    result = report.result("square")
    return result is not None and bool(sides_at_fault(result))


def _side(report: Report) -> str:
    result = report.result("square")
    if result is not None:
        return square.sentences(result)[0]
    return "".join(published_values.float32(report))


def _training(report: Report) -> str:
    """What the first step would clip, and what sequence weights would keep, here and at length."""
    metrics = headline(report).metrics
    parts = []
    if "clip_fraction" in metrics:
        parts.append(f"PPO clips {percent(metrics['clip_fraction'].value)} of tokens at step 0")
    if "ess_seq" in metrics:
        parts.append(f"sequence ESS {percent(metrics['ess_seq'].value)}")
    forecast: Forecast | None = report.result("forecast")
    if forecast is not None and forecast.missing:
        parts.append(f"no forecast: {line(forecast.missing)}")
    elif forecast is not None:
        last = forecast.rows[-1]
        kept, floor = last.ess_untruncated.value, forecast.floor
        at = f"forecast at {count(last.length)} tokens: "
        parts.append(
            at + (f"below {percent(floor)}" if kept <= floor * (1 + 1e-9) else percent(kept))
        )
    return capital("; ".join(parts)) + "." if parts else ""


def _sure(report: Report) -> str:
    """k3 with its interval beside its level, by how many prompts; the fix on held-out ones."""
    row = next((row for row in judged_rows(report) if row.metric == K3), None)
    if row is None or row.judgement is None:
        return ""
    write = alike((row.estimate.value, row.judgement.healthy))
    said = [
        f"k3 {write(row.estimate.value)} ({interval(row.estimate, write, to=' to ')}), "
        f"healthy up to {bound(row.judgement.healthy)}, unfit beyond {bound(row.judgement.unfit)}; "
        f"{plural(row.estimate.n_prompts, 'prompt')}"
    ]
    fixes = report.result("fixes")
    if fixes is not None and fixes.held_out is not None and fixes.held_out.confirmed:
        said.append("the fix is confirmed on held-out prompts")
    if "heavy-tail" in row.estimate.flags:
        said.append("heavy-tailed: a few tokens carry k3")
    return "; ".join(said) + "."


def _checks(report: Report) -> str:
    """Those that did not pass, by status."""
    said = []
    for status in ("failed", "inconclusive", "warning"):
        names = [line(check.id) for check in checks(report, status)]
        said += [f"{status}: {', '.join(names)}"] if names else []
    return capital("; ".join(said)) + "." if said else ""


def _untested(report: Report) -> str:
    """Names only; the chapter of that name has the reasons."""
    names = [NotTested.fields_of(reason)[0] for reason in untested(report)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}." if names else ""
