"""Everything that a report or a dashboard may call by a name: what it is, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mismatch.analysis.catalogue import catalogue
from mismatch.analysis.thresholds import COLUMNS, default_thresholds
from mismatch.errors import MismatchError, did_you_mean
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.experiments.fixes.guides import guides, sentence
from mismatch.metrics import METRICS, framework_names
from mismatch.metrics.framework_names import Alias
from mismatch.metrics.registry import Metric
from mismatch.pipeline.document import jq_name
from mismatch.reports.formatting import wording

NO_LEVEL = "none: it is shown and judges nothing"
OVER = "mismatch check names the cause and the side; mismatch postmortem DUMP reads a recorded run"


@dataclass(frozen=True, slots=True)
class Meaning:
    """One name.

    Attributes:
        kind: "metric", "check", "cause", "fix" or "word".
        facts: heading -> text, in the order in which they are read.
    """

    kind: str
    name: str
    facts: dict[str, str]


def names() -> dict[str, list[str]]:
    """Return all names by kind."""
    return {
        "metric": list(METRICS),
        "check": list(wording("checks")),
        "cause": list(catalogue()),
        "fix": [fix.id for fix in FIXES],
        "word": list(wording("glossary")),
    }


def meanings_of(asked: str) -> list[Meaning]:
    """Return what a name means, of every kind that has it.

    A framework's name of a metric is found with and without its group, which ends in a slash.

    Raises:
        MismatchError: nothing is called so.
    """
    name = asked.strip()
    found = [*_metrics(name)]
    if asks := wording("checks").get(name):
        said = {
            "asks": asks,
            "if it fails": "the run is BROKEN, whatever its numbers are",
        }
        found.append(Meaning("check", name, said))
    if entry := catalogue().get(name):
        said = {"what": entry.title, "data show": entry.see, "why": entry.why}
        said |= {"confirmed by": entry.confirm, "what to do": entry.mend}
        said |= {f"in {title}": text for title, text in entry.frameworks.items()}
        said |= {"seen in": ", ".join(entry.seen)} if entry.seen else {}
        found.append(Meaning("cause", name, said))
    for fix in FIXES:
        if fix.id == name:
            guide = guides()[name]
            said = {"what": sentence(fix.summary), "changes": guide.changes, "cost": fix.cost}
            said |= {"beware": guide.worse, "settings of frameworks": f"mismatch fixes {name}"}
            found.append(Meaning("fix", name, said))
    for word, text in wording("glossary").items():
        if name.lower() in word.lower().split(", "):
            found.append(Meaning("word", word, {"is": text}))
    if not found:  # tables and verdicts have labels
        labels = {
            metric: (metric.label, metric.label.partition(",")[0]) for metric in METRICS.values()
        }
        found = [Meaning("metric", m.name, _facts(m, [])) for m in labels if name in labels[m]]
    if not found:
        logged = {
            a.name.rpartition("/")[2] for each in framework_names.aliases().values() for a in each
        }
        known = {*logged, *(each for all_ in names().values() for each in all_)}
        guess = did_you_mean(name, sorted(known))
        raise MismatchError(
            f"no report calls anything {asked!r}", f"{guess}mismatch explain lists all names"
        )
    return found


def _metrics(name: str) -> Iterator[Meaning]:
    for metric in METRICS.values():
        given = [alias for alias in framework_names.of(metric.name) if _is(name, alias.name)]
        if name in (metric.name, jq_name(metric.name)) or given:
            yield Meaning("metric", metric.name, _facts(metric, given))


def _is(asked: str, logged: str) -> bool:
    """Whether one of two names is the other, or its end behind a slash."""
    return asked == logged or asked.endswith(f"/{logged}") or logged.endswith(f"/{asked}")


def _facts(metric: Metric, asked: list[Alias]) -> dict[str, str]:
    said = {"asked for": "; ".join(_logged(alias) for alias in asked)} if asked else {}
    formula = " ".join(metric.definition.strip().split("\n\n")[0].split())
    said |= {"what": sentence(metric.meaning), "formula": formula}
    if metric.unit:
        said["unit"] = metric.unit
    if metric.good != "neither":
        said["agreement"] = f"{metric.good} values"
    levels = default_thresholds().get(metric.name, {})
    sign = "≥" if metric.good == "high" else "≤"
    beyond = "<" if metric.good == "high" else ">"
    for column in COLUMNS:
        if column in levels:
            cell = levels[column]
            bounds = f"healthy {sign} {cell.healthy:g}, unfit {beyond} {cell.unfit:g}"
            said[f"level, {column}"] = f"{bounds} ({cell.source})"
    said["beyond its level" if levels else "level"] = OVER if levels else NO_LEVEL
    others = [alias for alias in framework_names.of(metric.name) if alias not in asked]
    if others:
        said["others call it"] = "; ".join(_logged(alias) for alias in others)
    return said


def _logged(alias: Alias) -> str:
    text = alias.label + (", which is another number" if alias.differs else "")
    return f"{text} ({alias.remark})" if alias.remark else text
