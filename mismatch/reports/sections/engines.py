"""Two engines and the trainer: how far apart each two of them are, and which stands apart."""

from __future__ import annotations

from collections.abc import Callable

from mismatch.experiments.engine_pair import FLOOR_TEXT, TRAINER, Edge, Triangle
from mismatch.reports.formatting import MARKS, TONES, capital, line, number, percent, signed, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.types import Estimate, Report

LEAD = (
    "Both engines sampled from the same prompts, and each scored what the other had sampled, by "
    "prefill. On one set of tokens the three parties are the corners of a triangle and mean "
    "|delta| is the length of its edges. Both scored what is “given”; of what is “sampled”, the "
    "left side is as it sampled: there k3 estimates a KL, elsewhere it is a divergence score."
)
CONTRASTS = (
    "Mean |delta| of the first edge minus that of the second, paired on the same tokens. A party "
    "is odd where both its edges are longer than the third on every set of tokens, by more than "
    "chance and by a tenth. Where every edge is shorter than {floor} nats, all three agree and "
    "none is odd."
)
KINDS = {"prefill": "given", "decode": "sampled"}
COMPARED = (
    Column("first edge", text),
    Column("second edge", text),
    Column("tokens of", text),
    Column("difference", signed, interval=1),
)


def _value(name: str) -> Callable[[Edge], Estimate | None]:
    def value(edge: Edge) -> Estimate | None:
        known = edge.comparison
        return None if known is None else (known.metrics | known.routing).get(name)

    return value


def _pair(edge: Edge) -> Cell:
    pair = " / ".join(map(party, edge.parties))
    return Cell(pair, note=f"not tested: {edge.reason}" if edge.reason else "")


EDGES = (
    Column("left / right", text, of=_pair),
    Column("tokens of", text, of="tokens"),
    Column("left", text, of=lambda edge: KINDS[edge.kind]),
    Column("mean |delta|", interval=1, detail="nats", of=_value("logprob_abs_diff_mean")),
    Column("k3", number, 2, detail="nats per token", of=_value("k3_kl")),
    Column("largest |delta|", number, 4, of=_value("logprob_abs_diff_max")),
    Column(
        "routing flips", percent, 3, detail="of (token, layer)", of=_value("routing_disagree_layer")
    ),
)


def section(result: Triangle, report: Report) -> Section:
    """Every edge, those between three parties that scored alike first; always in full."""
    decided = Section(
        "engines-contrasts",
        "What the odd one out is decided by",
        CONTRASTS.format(floor=FLOOR_TEXT),
        tables=[Table(COMPARED, _contrasts(result))],
        page_only=True,
    )
    edges = sorted(result.edges, key=lambda edge: edge.kind != "prefill")
    return Section(
        "engines",
        "Engines",
        LEAD,
        sentences=sentences(result, report),
        tables=[Table.of(EDGES, edges)],
        notes=[f"not tested: {missing}" for missing in result.not_tested],
        parts=[decided],
        folded=False,
    )


def sentences(result: Triangle, report: Report) -> list[str]:
    """What follows, most useful first."""
    reason = f"{line(result.reason)}."
    if reason.startswith(("all ", "none", "not", "the ")):  # names of engines keep their own case
        reason = capital(reason)
    said = [reason]
    for side in result.sides:
        name = f"{line(side.engine)} {line(side.version)}".strip()
        facts = report.fingerprints.get(f"{side.engine}:decode", {})
        if facts.get("attention"):
            name += f", attention {line(facts['attention'])},"
        level = "no level applies"
        if side.verdict is not None:
            mark = MARKS[TONES[side.verdict.status]]
            level = f"{mark} {side.verdict.status}, {line(side.verdict.reason)}"
        said.append(f"{name} against the trainer, on its own tokens: {level}.")
    return [
        *said,
        "The verdict is that of the worse engine; all other parts of this report are of "
        f"{line(result.sides[0].engine)}.",
    ]


def _contrasts(result: Triangle) -> list[Cells]:
    """One edge at a party beside the edge that the party has no part in; each pair once."""
    rows: dict[object, Cells] = {}
    for contrast in result.contrasts:
        (third,) = set(result.parties) - {contrast.party, contrast.edge}
        edges = (contrast.party, contrast.edge), (contrast.edge, third)
        names = (" / ".join(map(party, edge)) for edge in edges)
        key = contrast.tokens, frozenset(map(frozenset, edges))
        rows.setdefault(key, (*names, contrast.tokens, contrast.difference))
    return [*rows.values()]


def party(name: str) -> str:
    """An engine by its name, or the trainer."""
    return "trainer" if name == TRAINER else line(name)
