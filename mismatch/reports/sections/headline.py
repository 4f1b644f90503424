"""What is read first: questions with their answers, the verdict's numbers, the checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mismatch.analysis import plugins
from mismatch.analysis.catalogue import catalogue, title_of
from mismatch.analysis.cause_results import DIFFER, Cause, place_of
from mismatch.analysis.explained import explains, lead_of, leads
from mismatch.analysis.results import sentence, sides_at_fault
from mismatch.analysis.validity import in_words, validity
from mismatch.errors import in_list
from mismatch.frameworks import CORRECTING, FRAMEWORKS
from mismatch.metrics.inference import missed_share, prompts_needed
from mismatch.reports import documentation, summary
from mismatch.reports.formatting import (
    Format,
    alike,
    bound,
    capital,
    interval,
    line,
    number,
    percent,
    plural,
    text,
    times,
)
from mismatch.reports.section import (
    Answer,
    Block,
    Cell,
    Cells,
    Column,
    Section,
    Table,
    Tone,
    status_cell,
)
from mismatch.reports.sections import noise
from mismatch.reports.sections.causes import none_found
from mismatch.reports.summary import Row
from mismatch.types import Check, Report

if TYPE_CHECKING:
    from mismatch.experiments.results import FixOutcome, FixTable

K3 = "k3_kl"
NAMED = 6  # of what was not tested; the rest is counted
ALL_CUT, CUT = 0.9999, math.log(2.0)  # share of the batch, and nats of a sequence's ratio
WRONG = ("failed", "inconclusive", "warning")
OTHER = {"engine": "trainer", "trainer": "engine"}


def lead(report: Report) -> str:
    """Return what is wrong, or how far apart the two sides are, in one sentence."""
    failed = summary.checks(report, "failed")
    if said := "" if failed else _analysis(report):
        return capital(f"{line(said)}.")
    if first := _titled(report):
        title = line(title_of(first.id)).rstrip(".")
        if (entry := catalogue().get(first.id)) and entry.choice:
            share = summary.known_by(report, first).share
            price = f" that makes {percent(share.value)} of the mismatch" if share else ""
            return f"{entry.choice}: a choice of this run{price}."
        if entry and entry.lead and first.side in OTHER:
            title = entry.lead.format(side=first.side, other=OTHER[first.side])
        elif first.fact and first.evidence:  # the headline is the list of what differs
            item = first.evidence[0]
            what = "" if item.what == DIFFER else f"{line(item.what)}, "
            title += f": {what}{line(str(item.value))}"
        if made := summary.replaced(report, first):
            title += f", with {summary.in_place_of(made)}"
        return f"{title}."
    if failed:
        return capital(f"{line(failed[0].detail).rstrip('.')}.")
    if report.verdict.status == "healthy":
        return "Engine and trainer agree within the healthy bounds."
    return summary.in_plain_words(report)


def _analysis(report: Report) -> str:
    """Return what an analysis has for the headline; "": none has anything."""
    for each in plugins.analyses():
        result = report.result(each.id)
        if result is not None and each.reason and (said := each.call("reason", result)):
            return str(said)
    return ""


def _titled(report: Report) -> Cause | None:
    """Return the cause that the headline names; None: it says something else."""
    causes, failed = report.result("causes"), summary.checks(report, "failed")
    if not failed and _analysis(report):
        return None
    leading = lead_of(causes, report.checks)
    first = leading.cause if leading else causes.ranked[0] if causes and causes.ranked else None
    explained = not failed or (first and any(explains(first, check) for check in failed))
    return first if first and leads(first) and explained else None


def answers(
    report: Report, warnings: Sequence[str] = (), first: Mapping[str, str] = MappingProxyType({})
) -> tuple[Answer, ...]:
    """Return the fix or what is ruled out, side, effect on training, how sure, what was not tested.

    Args:
        warnings: of all sections: what has to be known before numbers are believed.
        first: title -> what it says, of the sections that are read first.
    """
    result, causes = report.result("square"), report.result("causes")
    named = bool(causes and causes.ranked)  # what checks found is said with the cause
    missing = list(dict.fromkeys(line(entry.what) for entry in summary.untested(report)))
    prompts = [row.estimate.n_prompts for row in summary.judged_rows(report)[:1]]
    if any(prompts):  # what no interval knows of
        missing.append(f"kinds of prompts rarer than 1 in {1 / missed_share(prompts[0]):.0f}")
    texts = {
        "Careful": line(" ".join(warnings)),
        "Replaced": _replaced(report),
        "Cause": _cause(report),
        "Ruled out": _ruled_out(report),
        "Side at fault" if result and sides_at_fault(result) else "Both sides": _sides(report),
        **first,
        "In training": _sentence(_training(report)),
        "How sure": _sure(report),
        "Checks": "" if named else _sentence(_wrong(summary.checks(report, *WRONG))),
        "Not tested": f"{in_list(missing, NAMED)}." if missing else "",
    }
    fix = _fix(report)
    explained = {"Cause": documentation.of_cause(causes.ranked[0].id)} if named else {}
    others = (
        Answer(question, answer, explained=explained.get(question, ""))
        for question, answer in texts.items()
        if answer
    )
    return (fix, *others) if fix else tuple(others)


def _replaced(report: Report) -> str:
    """Return what of the trainer's configuration could not run here, and what follows from it."""
    found = summary.replaced(report)
    if not found:
        return ""
    why = in_list(list(dict.fromkeys(line(each["why"]) for each in found)))
    return f"{capital(summary.in_place_of(found))} ({why}). The verdict is of what ran."


def _sides(report: Report) -> str:
    """Return what the square says; if it sees no fault, a side that the long sequence shows off."""
    result, long = report.result("square"), report.result("long_sequence")
    off = [] if long is None else [gap for gap in long.gaps if gap.status != "passed"]
    if off and not (result and sides_at_fault(result)):
        return _sentence(line(sentence(long, gap)) for gap in off)
    if not result:
        return "".join(noise.float32(report))
    from mismatch.reports.sections import square

    return square.sentences(result, report)[0]


def _sentence(parts: Iterable[str]) -> str:
    sentence = capital("; ".join(parts))
    return f"{sentence}." if sentence else ""


def _fix(report: Report) -> Answer | None:
    """Return the best measured fix; else the repair of the leading cause, where there is one."""
    table: FixTable | None = report.result("fixes")
    if table is not None and table.best_together is not None:
        best = table.outcome(table.best_together)
        how = summary.applied(report, best) if best.flags else ""
        return Answer("Best fix", effect(best, report), how, tuple(_settings(best)))
    if report.verdict.status == "healthy":
        return None
    causes = report.result("causes")
    first = causes.ranked[0] if causes and causes.ranked else None
    # The fix of what explains less than half leaves more behind than it takes out.
    entry = catalogue().get(first.id) if first is not None and leads(first) else None
    if table is not None and table.outcomes:
        return Answer("Best fix", "None of the fixes that were measured helps significantly.")
    if first is None or entry is None or summary.replaced(report, first):  # the run may not have it
        return None
    name = "Fix" if first.status == "confirmed" else "Fix, not measured"
    return Answer(name, line(summary.what_to_do(report, first)), summary.trial_of(report, first))


def effect(best: FixOutcome, report: Report) -> str:
    """Return a fix by its k3 before and after, and the verdict with it."""
    from mismatch.reports.sections import fixes

    known = [recipe for recipe, _ in fixes.with_proofs(best)]
    kernel = f" (with {best.kernel})" if best.kernel and any(r.selects for r in known) else ""
    parts = [f"{best.id}{kernel}"]
    if K3 in best.before and K3 in best.after:
        parts.append(f"k3 {fixes.fall(best, K3, '{} → {}')}")
    if best.verdict_after is not None:
        now = report.result("fixes").verdict_as_is or report.verdict
        parts.append(f"verdict {now.status.upper()} → {best.verdict_after.status.upper()}")
    return "; ".join(parts)


def _settings(best: FixOutcome) -> Iterator[Block]:
    """Yield the known settings of each framework, and whether they were measured."""
    from mismatch.reports.sections import fixes

    known = fixes.with_proofs(best)
    for name in CORRECTING:
        for recipe, proof in known:
            if recipe.framework == name and recipe.lines:
                yield Block(name, recipe.lines, proof)


def _cause(report: Report) -> str:
    """How much the leading cause explains, how it is known, and where it starts."""
    causes = report.result("causes")
    if not causes or not causes.ranked:
        return ""
    cause = causes.ranked[0]
    known = summary.known_by(report, cause)
    how, share = known.how, "share not measured"
    if known.share is not None:
        part = f"{percent(known.share.value)} of mean |delta|"
        share = f"without it {part} is gone" if known.gone else f"explains {part}"
    if made := summary.replaced(report, cause):
        how = f"suspected: {summary.in_place_of(made)} can make it, and the run's own setting was "
        how += "not measured here"
    explained = [check for check in summary.checks(report, *WRONG) if explains(cause, check)]
    explained = explained if cause.decided and leads(cause) else []
    other = [check for check in summary.checks(report, *WRONG) if check not in explained]
    title = "" if _titled(report) == cause else f"{line(title_of(cause.id)).rstrip('.')}: "
    parts = [f"{title}{how if title else capital(how)}; {share}."]
    place = place_of(causes.ranked)
    parts += [f"It starts in {place}."] if place else []
    # The verdict's reason names those that failed because of it.
    rest = [check for check in explained if check.status != "failed"]
    parts += [f"From it follow the checks {'; '.join(_wrong(rest))}."] if rest else []
    parts += [f"{'Other checks' if explained else 'Checks'} {'; '.join(_wrong(other))}."] * bool(
        other
    )
    return " ".join(parts)


def _wrong(checked: Sequence[Check]) -> Iterator[str]:
    """Yield the ids of the checks that did not pass, by their status."""
    for status in WRONG:
        if names := [line(check.id) for check in checked if check.status == status]:
            yield f"{status}: {', '.join(names)}"


def _ruled_out(report: Report) -> str:
    """How many known causes were checked; said where none was found."""
    causes = report.result("causes")
    if not causes or causes.ranked:
        return ""
    return none_found(causes)


def _training(report: Report) -> Iterator[str]:
    """Yield what the first step would clip and what sequence weights would keep."""
    metrics = summary.headline(report).metrics
    if "clip_fraction" in metrics:
        share = percent(metrics["clip_fraction"].value)
        yield f"PPO would clip {share} of tokens before the first update"
    sums = metrics.get("seq_logratio_mean")
    if "ess_seq" in metrics and metrics["ess_seq"].value > ALL_CUT and sums and sums.value > CUT:
        yield "every sequence-level weight is cut, so they say nothing about the batch"
    elif "ess_seq" in metrics:
        yield f"sequence-level weights keep {percent(metrics['ess_seq'].value)} of the batch"


def _sure(report: Report) -> str:
    """Return what decided the verdict: its value, interval and limit, by how many prompts."""
    by, flags = summary.deciding(report), tuple[str, ...]()
    parts: list[str] = []
    if isinstance(by, Row) and by.judgement is not None:
        judged, value, write, flags = by.judgement, by.estimate, by.write, by.estimate.flags
        if write is number:
            write = alike((value.value, judged.healthy))
        parts.append(
            f"{by.words.label.split(',')[0]} {write(value.value)} "
            f"({interval(value, write, to=' to ')}), healthy {by.healthy(judged.healthy)}"
            + f", unfit {by.unfit(judged.unfit)}"
            * (judged.status != "healthy")
            + "; "
            f"{plural(value.n_prompts, 'prompt')}"
        )
    elif isinstance(by, Check) and (finding := summary.findings(report).get(by.id)):
        value, unit, write = finding.value, " what precision costs", times
        limit: Format = times
        flags = value.flags
        if finding.evidence == "gap":
            unit, write, limit = " nats in float32", number, bound
        parts.append(
            f"{line(by.id)}: {write(value.value)}{unit} ({interval(value, write, ' to ')}), "
            f"limit {limit(finding.level)}; {plural(value.n_prompts, 'prompt')}"
        )
        if finding.standing != "beyond" and (wanted := prompts_needed(value, finding.level)):
            parts.append(f"about {plural(wanted, 'prompt')} would settle it")
    elif isinstance(by, Check):
        parts.append(f"{line(by.id)} {by.status}: {line(by.detail)}")
    table = report.result("fixes")
    if table is not None and table.held_out is not None and table.held_out.confirmed:
        parts.append("the fix is confirmed on held-out prompts")
    if "heavy-tail" in flags:
        parts.append("heavy-tailed: a few tokens carry it")
    return "; ".join(parts) + "." if parts else ""


# ---------------------------------------------------------------- numbers next to their levels

LEAD = "delta = train − rollout, nats; 95 % intervals by prompt."
SCORES = " Neither side sampled these tokens: the KL formulas are scores here."
COLUMNS = (
    Column(
        "metric",
        text,
        of=lambda row: Cell(row.words.label, explained=f"reference/metrics.md#{row.metric}"),
    ),
    Column("value", interval=1, of="cell"),
    Column("healthy", of=lambda row: _level(row, "healthy")),
    Column("unfit", of=lambda row: _level(row, "unfit")),
    Column(
        "level", text, of=lambda row: status_cell(row.judgement.status) if row.judgement else ""
    ),
)
STANDINGS: dict[str, Tone] = {"proven": "healthy", "not proven": "warn", "refuted": "critical"}
VALID = (
    Column("the same", text),
    Column("standing", text),
    Column("by these checks; or what would prove it", text, priority=1),
)
NAMES = (
    Column("metric", text),
    Column("value", priority=1),
    Column("name there", text),
    Column("same number", text),
)


def valid(report: Report) -> Section:
    """Return what both sides have in common, and how that is known."""
    rows: list[Cells] = []
    for each in validity(report):
        cell = Cell(each.standing, STANDINGS[each.standing])
        rows.append((each.what, cell, ", ".join(each.by) or each.how))
    lead = "A difference means something only if both sides have these in common."
    title = "Is the comparison valid?"
    short = in_words(validity(report))
    return Section("valid", title, lead, short=short, tables=[Table(VALID, rows)])


def section(report: Report, framework: str | None) -> Section | None:
    """Return the judged metrics next to their levels; None where nothing was judged.

    Args:
        framework: whose names get a separate table.
    """
    rows = summary.judged_rows(report)
    if not rows:
        return None
    shown = summary.most_telling(report)
    return Section(
        "headline",
        "How far apart",
        LEAD + ("" if summary.headline(report).sampled_by_left else SCORES),
        sentences=[summary.in_plain_words(report), *_small(report)],
        tables=[table(shown)],
        parts=[
            Section(
                "judged",
                f"All {len(rows)} judged metrics, and where their levels come from",
                tables=[table(rows if len(shown) < len(rows) else [])],
                sentences=[f"{r.words.label}: {r.judgement.source}" for r in rows if r.judgement],
                notes=summary.cautions(rows),
            ),
            *names_there(report, framework),
        ],
        folded=False,
    )


def _small(report: Report) -> list[str]:
    """Return a caution where a dense bf16 run is not healthy although nothing is broken."""
    correct, fit = report.verdict.correctness, report.verdict.fitness
    if report.verdict.levels != "bf16 dense" or not correct or not fit:
        return []
    if correct.status != "healthy" or fit.status == "healthy":
        return []
    return [
        "Nothing is broken, and the bounds come from models of billions of parameters. Below one "
        "billion, bf16 alone can cost more: SmolLM2-135M has a mean |delta| of 0.037 nats."
    ]


def table(rows: list[Row]) -> Table:
    """Return metrics next to their levels; shares in percent."""
    return Table.of(COLUMNS, rows)


def _level(row: Row, name: str) -> Cell:
    return Cell(getattr(row.judgement, name, None), format=getattr(row, name))


def names_there(report: Report, framework: str | None) -> tuple[Section, ...]:
    """Return the metrics under a framework's names, where a framework was asked for."""
    if framework is None:
        return ()
    from mismatch.metrics import framework_names

    rows: list[Cells] = []
    remarks: dict[str, list[str]] = {}
    for row in summary.all_rows(summary.headline(report)):
        for alias in framework_names.of(row.metric, framework):
            value, name = Cell(row.estimate.value, format=row.write), Cell(alias.name, "code")
            rows.append((row.words.label, value, name, "no" if alias.differs else "yes"))
            if alias.remark:
                remarks.setdefault(alias.remark, []).append(alias.name)
    return (
        Section(
            "names",
            f"In {FRAMEWORKS[framework].title}",
            "" if rows else "None of these metrics is known to have a name there.",
            tables=[Table(NAMES, rows)],
            notes=[f"{', '.join(concerned)}: {remark}" for remark, concerned in remarks.items()],
            folded=False,
        ),
    )


# ---------------------------------------------------------------- checks

CHECKS = (
    Column(
        "check", text, of=lambda check: Cell(check.id, explained=documentation.of_check(check.id))
    ),
    Column("result", text, of=lambda check: status_cell(check.status)),
    Column("found", text, of="detail"),
    Column("fix", text, 1, of="fix"),
)


def checks(report: Report) -> tuple[Section, ...]:
    """Failed checks with their fix, passed checks folded; then what was not tested."""
    wrong, passed = summary.checks(report, *WRONG), summary.checks(report, "passed")
    title = f"{plural(len(passed), 'check')} passed"
    untested = [line(entry) for entry in summary.untested(report)]
    shown = (
        Section("checks", "Checks", tables=[Table.of(CHECKS, wrong)], folded=False),
        Section("passed", title, tables=[Table.of(CHECKS[:-1], passed)]),
        Section("untested", "Not tested", sentences=untested, folded=False),
    )
    return tuple(section for section in shown if section.holds)
