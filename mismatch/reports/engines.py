"""Two engines and the trainer, in words and rows, for every rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch.experiments.engine_pair.outlier import FLOOR_TEXT
from mismatch.experiments.engine_pair.types import TRAINER, Edge, Triangle
from mismatch.reports import quantities
from mismatch.reports.fixes import interval
from mismatch.reports.text import line
from mismatch.reports.words import MARKS, words_for
from mismatch.types import Estimate, Report

TITLE = "Engines"
LEAD = (
    "Both engines sampled from the same prompts, and each scored what the other had sampled, by "
    "prefill. On one set of tokens the three parties are the corners of a triangle and mean "
    "|delta| is the length of its edges."
)
MEAN, K3, MOST = "logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max"
ROUTES = "routing_disagree_layer"
KINDS = {"prefill": "both scored given tokens", "decode": "as sampled"}


@dataclass(frozen=True, slots=True)
class EdgeRow:
    """One edge as a line of a table; all texts.

    Attributes:
        k3_label: "k3 KL" where the left side is the law that sampled, else a score.
        reason: why it was not measured, or "".
    """

    pair: str
    how: str
    tokens: str
    mean: str
    interval: str
    k3: str
    k3_label: str
    largest: str
    experts: str
    reason: str


@dataclass(frozen=True, slots=True)
class ContrastRow:
    """One edge at a party beside the edge that the party has no part in."""

    edge: str
    opposite: str
    tokens: str
    difference: str
    interval: str


def view(report: Report) -> dict[str, Any] | None:
    """What the HTML template shows; None where one engine ran."""
    from mismatch.reports.engines_figure import pictures

    made = report.result("engines")
    if made is None:
        return None
    return {
        "lead": LEAD,
        "sentences": sentences(made, report),
        "rows": edge_rows(made),
        "contrasts": contrast_rows(made),
        "floor": FLOOR_TEXT,
        "pictures": pictures(made),
    }


def sentences(made: Triangle, report: Report) -> list[str]:
    """What follows, most useful first."""
    said = [_capital(f"{line(made.reason)}.")]
    for one in made.sides:
        name = f"{line(one.engine)} {line(one.version)}".strip()
        facts = report.fingerprints.get(f"{one.engine}:decode", {})
        if facts.get("attention"):
            name += f", attention {line(facts['attention'])},"
        if one.verdict is None:
            said.append(f"{name} against the trainer, on its own tokens: no level applies.")
        else:
            mark = MARKS[one.verdict.status]
            said.append(
                f"{name} against the trainer, on its own tokens: {mark} {one.verdict.status}, "
                f"{line(one.verdict.reason)}."
            )
    first = line(made.sides[0].engine)
    said.append(f"The verdict and all other parts of this report are about {first}.")
    return said


def edge_rows(made: Triangle) -> list[EdgeRow]:
    """All edges, those between three alike first."""
    return [_row(edge) for edge in sorted(made.edges, key=lambda edge: edge.kind != "prefill")]


def _row(edge: Edge) -> EdgeRow:
    known = edge.comparison
    values = {} if known is None else known.metrics | known.routing
    law = known is not None and known.sampled_by_left
    words = words_for(K3, sampled_by_left=law)
    return EdgeRow(
        pair=f"{party(edge.parties[0])} / {party(edge.parties[1])}",
        how=KINDS[edge.kind],
        tokens=line(edge.tokens),
        mean=_text(values.get(MEAN)),
        interval=_interval(values.get(MEAN)),
        k3=_text(values.get(K3)),
        k3_label=words.label,
        largest=_text(values.get(MOST)),
        experts=quantities.percent(values[ROUTES].value)
        if ROUTES in values
        else quantities.MISSING,
        reason=line(edge.reason),
    )


def contrast_rows(made: Triangle) -> list[ContrastRow]:
    """What the odd one was decided by; each pair of edges once."""
    rows, seen = [], set()
    for one in made.contrasts:
        (third,) = set(made.parties) - {one.party, one.edge}
        edges = frozenset((one.party, one.edge)), frozenset((one.edge, third))
        key = one.tokens, frozenset(edges)
        if key in seen:
            continue
        seen.add(key)
        rows.append(
            ContrastRow(
                edge=f"{party(one.party)} / {party(one.edge)}",
                opposite=f"{party(one.edge)} / {party(third)}",
                tokens=line(one.tokens),
                difference=("+" if one.difference.value > 0 else "")
                + quantities.number(one.difference.value),
                interval=interval(one.difference),
            )
        )
    return rows


def party(name: str) -> str:
    """An engine by its name, or the trainer."""
    return "trainer" if name == TRAINER else line(name)


def _capital(text: str) -> str:
    """Names of engines keep their own case."""
    return text[0].upper() + text[1:] if text.startswith(("all ", "none", "not", "the ")) else text


def _text(estimate: Estimate | None) -> str:
    return quantities.MISSING if estimate is None else quantities.number(estimate.value)


def _interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{quantities.number(estimate.low)} … {quantities.number(estimate.high)}"
