"""Two engines and the trainer: how far apart each two of them are, and which stands apart."""

from __future__ import annotations

from mismatch.experiments.engine_pair import FLOOR_TEXT, TRAINER, Edge, Triangle
from mismatch.reports.formatting import MARKS, TONES, line, number, percent, signed, text
from mismatch.reports.metric_labels import words_for
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.types import Report

LEAD = (
    "Both engines sampled from the same prompts, and each scored what the other had sampled, by "
    "prefill. On one set of tokens the three parties are the corners of a triangle and mean "
    "|delta| is the length of its edges. Both scored what is “given”; of what is “sampled”, the "
    "left side is as it sampled."
)
CONTRASTS = (
    "Mean |delta| of the first edge minus that of the second, paired on the same tokens. A party "
    "is odd where both its edges are longer than the third on every set of tokens, by more than "
    "chance and by a tenth. Where every edge is shorter than {floor} nats, all three agree and "
    "none is odd."
)
MEAN, K3, MOST = "logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max"
ROUTES = "routing_disagree_layer"
KINDS = {"prefill": "given", "decode": "sampled"}
EDGES = (
    Column("left / right", text),
    Column("tokens of", text),
    Column("left", text),
    Column("mean |delta|", number, interval=1, detail="nats"),
    Column("k3", number, 2),
    Column("largest |delta|", number, 4),
    Column("routing flips", percent, 3, detail="of (token, layer)"),
)
COMPARED = (
    Column("first edge", text),
    Column("second edge", text),
    Column("tokens of", text),
    Column("difference", signed, interval=1),
)


def section(result: Triangle, report: Report) -> Section:
    """Every edge, those between three parties that scored alike first; always in full."""
    edges = sorted(result.edges, key=lambda edge: edge.kind != "prefill")
    decided = Section(
        id="engines-contrasts",
        title="What the odd one out is decided by",
        lead=CONTRASTS.format(floor=FLOOR_TEXT),
        tables=(Table(COMPARED, _contrasts(result)),),
        page_only=True,
    )
    return Section(
        id="engines",
        title="Engines",
        lead=LEAD,
        sentences=sentences(result, report),
        tables=(Table(EDGES, [_edge(edge) for edge in edges]),),
        notes=[f"not tested: {missing}" for missing in result.not_tested],
        parts=(decided,),
        folded=False,
    )


def sentences(result: Triangle, report: Report) -> list[str]:
    """What follows, most useful first."""
    said = [_capital(f"{line(result.reason)}.")]
    for one in result.sides:
        name = f"{line(one.engine)} {line(one.version)}".strip()
        facts = report.fingerprints.get(f"{one.engine}:decode", {})
        if facts.get("attention"):
            name += f", attention {line(facts['attention'])},"
        if one.verdict is None:
            said.append(f"{name} against the trainer, on its own tokens: no level applies.")
        else:
            mark = MARKS[TONES[one.verdict.status]]
            said.append(
                f"{name} against the trainer, on its own tokens: {mark} {one.verdict.status}, "
                f"{line(one.verdict.reason)}."
            )
    first = line(result.sides[0].engine)
    said.append(
        f"The verdict is that of the worse engine; all other parts of this report are of {first}."
    )
    return said


def _edge(edge: Edge) -> Cells:
    known = edge.comparison
    values = {} if known is None else known.metrics | known.routing
    words = words_for(K3, sampled_by_left=known is not None and known.sampled_by_left)
    pair = f"{party(edge.parties[0])} / {party(edge.parties[1])}"
    return (
        Cell(pair, note=f"not tested: {edge.reason}" if edge.reason else ""),
        edge.tokens,
        KINDS[edge.kind],
        values.get(MEAN),
        Cell(values.get(K3), note="" if known is None else words.label),
        values.get(MOST),
        values.get(ROUTES),
    )


def _contrasts(result: Triangle) -> list[Cells]:
    """One edge at a party beside the edge that the party has no part in; each pair once."""
    rows: list[Cells] = []
    seen = set()
    for contrast in result.contrasts:
        (third,) = set(result.parties) - {contrast.party, contrast.edge}
        edges = frozenset((contrast.party, contrast.edge)), frozenset((contrast.edge, third))
        key = contrast.tokens, frozenset(edges)
        if key in seen:
            continue
        seen.add(key)
        first = f"{party(contrast.party)} / {party(contrast.edge)}"
        second = f"{party(contrast.edge)} / {party(third)}"
        rows.append((first, second, contrast.tokens, contrast.difference))
    return rows


def party(name: str) -> str:
    """An engine by its name, or the trainer."""
    return "trainer" if name == TRAINER else line(name)


def _capital(text: str) -> str:
    """Names of engines keep their own case."""
    return text[0].upper() + text[1:] if text.startswith(("all ", "none", "not", "the ")) else text
