"""A report as GitHub annotations, JUnit, SARIF and gates; a comparison of runs as the first two."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from mismatch.analysis.catalogue import catalogue, title_of
from mismatch.analysis.explained import explains, lead_of
from mismatch.reports.formatting import TONES, alike, chance, line
from mismatch.reports.summary import cause_step, checks, judged_rows
from mismatch.types import Check, Report
from mismatch.version import __version__

if TYPE_CHECKING:
    from mismatch.pipeline.run_comparison import Line, RunComparison

LEVELS = {"critical": "error", "warn": "warning"}  # tone -> annotation
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
GATE_STEPS = 20  # of prime-rl's gate
# NeMo-RL's name, ours, and the widest bound of its recipes.
NEMO_GATES = (
    ("gen_kl_error", "k3_kl", 0.02),
    ("token_mult_prob_error", "token_mult_prob_error", 1.1),
)
MOST = 3  # checks with a separate GitHub annotation


def to_github(report: Report, failing: bool) -> str:
    """Workflow commands that GitHub shows as annotations: the verdict, then the worst faults.

    GitHub keeps ten annotations of a step, so all metrics share a line.

    Args:
        failing: the command ends with exit code 1; then the verdict is an error.
    """
    verdict = report.verdict
    level = "error" if failing else LEVELS.get(TONES[verdict.status], "notice")
    lines = [_annotation(level, f"mismatch: {verdict.status.upper()}", verdict.reason)]
    lead = lead_of(report.result("causes"), report.checks)
    explained = lead.checks if lead else ()
    failed = failing_cases(report)
    lines += [_annotation(level, f"mismatch {each.name}", each.text) for each in failed[:MOST]]
    if lead is not None:
        if lead.cause.id not in [each.name for each in failed]:
            step = cause_step(report, lead.cause)
            lines.append(_annotation(level, f"mismatch {lead.cause.id}", step))
        names = ", ".join(check.id for check in explained)
        lines += [_annotation("notice", "mismatch: follow from it", names)] if names else []
    said = {each.name for each in failed[:MOST]}
    found = [c for c in checks(report, "failed", "inconclusive", "warning") if c not in explained]
    found = [check for check in found if check.id not in said]
    for check in found[: MOST - len(said)]:
        lines.append(
            _annotation(LEVELS[TONES[check.status]], f"mismatch {check.id}", _of_check(check))
        )
    if more := found[max(0, MOST - len(said)) :]:
        names = ", ".join(check.id for check in more)
        lines.append(_annotation("warning", f"mismatch: {len(more)} more checks", names))
    judged = [row.judgement for row in judged_rows(report) if row.judgement]
    unfit = [f"{each.metric} is {each.status}" for each in judged if each.status != "healthy"]
    if unfit:
        title = f"mismatch: {len(unfit)} of {len(judged)} metrics are not healthy"
        lines.append(_annotation("warning", title, "; ".join(unfit)))
    return "\n".join(lines) + "\n"


def to_junit(report: Report, failing: bool) -> str:
    """Return a test case for every cause, every check, every judged metric, and the verdict.

    A fault is one failure, see :func:`failing_cases`; else of the verdict where the command fails.
    What follows from it passes with its text as output; what was not tested is skipped.

    Args:
        failing: the command ends with exit code 1.
    """
    suite = ElementTree.Element("testsuite", name="mismatch")
    skipped = {check.id: check.detail for check in checks(report, "not_tested")}
    failed = failing_cases(report)
    causes = report.result("causes")
    texts = {name: (status, text) for name, status, text in _faults(report)}
    cases = [("causes", c.id, c.status, title_of(c.id)) for c in (causes.ranked if causes else ())]
    cases += [("checks", check.id, *texts.get(check.id, ("", ""))) for check in report.checks]
    rows = judged_rows(report)
    cases += [("metrics", row.metric, *texts.get(row.metric, ("", ""))) for row in rows]
    for kind, name, status, text in cases:
        case = _case(suite, f"mismatch.{kind}", name)
        if name in skipped and kind == "checks":
            ElementTree.SubElement(case, "skipped", message=line(skipped[name]))
        elif (kind, name) in [(each.kind, each.name) for each in failed]:
            ElementTree.SubElement(case, "failure", type=status, message=line(text))
        elif status:
            ElementTree.SubElement(case, "system-out").text = f"{status}: {line(text)}"
    verdict = report.verdict
    return _closed(suite, "verdict", verdict.status, verdict.reason, failing and not failed)


def to_sarif(report: Report, failing: bool) -> str:
    """Return SARIF 2.1.0: a result for each failing case, and one for each other fault.

    All formats use the same names (:func:`failing_cases`). The place of a result is report.json:
    code scanning shows none without a place.

    Args:
        failing: the command ends with exit code 1; then a verdict without a case is an error too.
    """
    failed, verdict = failing_cases(report), report.verdict
    rows = [(each.kind, each.name, "error", each.text) for each in failed]
    if failing and not failed:
        rows.append(("verdict", verdict.status, "error", verdict.reason))
    ids = [row[1] for row in rows]
    kinds = dict.fromkeys((check.id for check in report.checks), "checks")
    faults = [fault for fault in _faults(report) if fault[0] not in ids]
    rows += [(kinds.get(name, "metrics"), name, "warning", text) for name, _, text in faults]
    place = {"physicalLocation": {"artifactLocation": {"uri": "report.json"}}}
    results = [
        {
            "ruleId": f"{kind}/{name}",
            "level": level,
            "message": {"text": line(text)},
            "locations": [place],
            "partialFingerprints": {"mismatch/1": f"{kind}/{name}"},
        }
        for kind, name, level, text in rows
    ]
    rules = [
        {"id": f"{kind}/{name}", "shortDescription": {"text": title_of(name)}}
        for kind, name, *_ in rows
    ]
    driver = {"name": "mismatch", "version": __version__, "rules": rules}
    said = {"verdict": verdict.status, "reason": line(verdict.reason)}
    run = {"tool": {"driver": driver}, "results": results, "properties": said}
    document = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Failing:
    """A case that fails, by the same name in every format; ``kind``: causes, checks, metrics."""

    kind: str
    name: str
    text: str


def failing_cases(report: Report) -> list[Failing]:
    """Return what fails a run: the leading cause, else the first that is decided and no choice, and
    each failed check that it does not explain; where there is neither, the first unfit metric."""
    causes, failed = report.result("causes"), checks(report, "failed")
    faults = [(name, text) for name, status, text in _faults(report) if TONES[status] == "critical"]
    lead = lead_of(causes, report.checks)
    ranked = causes.ranked if causes and faults else ()
    known = catalogue()
    decided = [c for c in ranked if c.decided and not (c.id in known and known[c.id].choice)]
    first = lead.cause if lead and faults else next(iter(decided), None)
    found = [Failing("causes", first.id, cause_step(report, first))] if first else []
    alone = [check for check in failed if not (first and explains(first, check))]
    found += [Failing("checks", check.id, _of_check(check)) for check in alone]
    return found or [Failing("metrics", name, text) for name, text in faults[:1]]


def runs_to_github(result: RunComparison) -> str:
    """Return an annotation for every deciding metric that got worse; the outcome last."""
    assert result.gate is not None
    lines = [
        _annotation("error" if move.beyond else "warning", f"mismatch {item.metric}", _moved(item))
        for item, move in result.second_moves()
        if move.outcome in ("worse", "undecided")
    ]
    level = "error" if result.gate.fails else "notice"
    return "\n".join([*lines, _annotation(level, "mismatch: against", result.gate.reason)]) + "\n"


def runs_to_junit(result: RunComparison) -> str:
    """Return a test case per deciding metric, and the outcome; it fails if the command does."""
    assert result.gate is not None
    suite = ElementTree.Element("testsuite", name="mismatch against")
    for item, move in result.second_moves():
        case = _case(suite, "mismatch.against", item.metric)
        outcome, text = str(move.outcome), line(_moved(item))
        if move.beyond or outcome == "undecided":
            ElementTree.SubElement(case, "failure", type=outcome, message=text)
        else:
            ElementTree.SubElement(case, "system-out").text = f"{outcome}: {text}"
    return _closed(suite, "against", str(result.outcomes[1]), result.gate.reason, result.gate.fails)


def _faults(report: Report) -> Iterator[tuple[str, str, str]]:
    """(name, status, text) of every check that did not pass and metric that is not healthy."""
    for check in checks(report, "failed", "inconclusive", "warning"):
        yield check.id, check.status, _of_check(check)
    for row in judged_rows(report):
        judgement = row.judgement
        if judgement is not None and judgement.status != "healthy":
            bounds = f"healthy {row.healthy(judgement.healthy)}, unfit {row.unfit(judgement.unfit)}"
            yield row.metric, judgement.status, f"{row.words.label}: {row.value} ({bounds})"


def _of_check(check: Check) -> str:
    return f"{check.detail}; fix: {check.fix}" if check.fix else check.detail


def _moved(item: Line) -> str:
    values = [value.value for value in item.values if value is not None]
    write, move = alike(values), item.moves[1]
    p_value = "" if move is None or move.p_value is None else f", p {chance(move.p_value)}"
    return f"{item.metric} {' → '.join(map(write, values))}{p_value}"


def _annotation(level: str, title: str, text: str) -> str:
    """One workflow command; its separators are escaped as GitHub asks.

    >>> _annotation("error", "a: b", "50 % off")
    '::error title=a%3A b::50 %25 off'
    """
    escaped = line(title).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::{line(text).replace('%', '%25')}"


def to_gates(report: Report) -> str:
    """Return the numbers that frameworks' merge gates ask for, as JSON.

    prime-rl asks for the mismatch KL (k3) of 20 steps, each below 0.015; NeMo-RL's recipes gate
    gen_kl_error (k3) and token_mult_prob_error by bounds of each recipe: the widest are taken. A
    value that is missing or no finite number is null.
    """
    recorded = report.result("recorded")
    steps = [step.k3 for step in getattr(recorded, "steps", ()) if step.tokens][-GATE_STEPS:]
    enough = len(steps) == GATE_STEPS
    prime = _gate("prime-rl", "mismatch_kl", sum(steps) / len(steps) if steps else None, 0.015)
    prime |= {"steps": len(steps), "passed": max(steps) < 0.015 if enough else None}
    metrics = report.comparisons[0].metrics if report.comparisons else {}
    gates = [prime]
    for name, metric, below in NEMO_GATES:
        held = metrics[metric].value if metric in metrics else None
        gates.append(_gate("NeMo-RL", name, held, below))
    return json.dumps({"schema": "mismatch.gates/1", "gates": gates}, indent=1) + "\n"


def _gate(framework: str, name: str, value: float | None, below: float) -> dict[str, object]:
    finite = value if value is not None and math.isfinite(value) else None
    passed = None if value is None else value < below
    return {"framework": framework, "name": name, "value": finite, "below": below, "passed": passed}


def _case(suite: ElementTree.Element, group: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=group, name=line(name))


def _closed(suite: ElementTree.Element, name: str, kind: str, reason: str, failing: bool) -> str:
    """Return the suite as a document, its last case the command's."""
    case = _case(suite, "mismatch", name)
    if failing:
        ElementTree.SubElement(case, "failure", type=kind, message=line(reason))
    else:
        ElementTree.SubElement(case, "system-out").text = f"{kind}: {line(reason)}"
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("*/failure"))))
    suite.set("skipped", str(len(suite.findall("*/skipped"))))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
