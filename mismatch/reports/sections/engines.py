"""Two engines and the trainer: how far apart each two of them are, and which stands apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.experiments.engine_pair import FLOOR, FLOOR_TEXT, TRAINER, Edge, Triangle
from mismatch.reports.formatting import MARKS, TONES, line, number, percent, signed, text
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Value
from mismatch.reports.svg import ACCENT, BAND, INK, SECOND, drawing, to_svg
from mismatch.reports.words import words_for
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
CORNERS = ((0.0, 0.0), (2.0, 0.0), (1.0, 1.5))  # first engine, second engine, trainer
LABELS = ((0.0, -0.26), (0.0, -0.26), (0.0, 0.2))  # of the names, from their corners
# Where an edge's number stands, from the middle of the edge: outside the triangle.
BESIDE = {
    (0, 1): (0.0, -0.17, "center"),
    (0, 2): (-0.1, 0.02, "right"),
    (1, 2): (0.1, 0.02, "left"),
}
WIDEST, THINNEST = 9.0, 1.2


def section(result: Triangle, report: Report) -> Section:
    """Every edge, those between three parties that scored alike first; always in full."""
    edges = sorted(result.edges, key=lambda edge: edge.kind != "prefill")
    contrasts = _contrasts(result)
    decided = Section(
        id="engines-contrasts",
        title="What the odd one out is decided by",
        lead=CONTRASTS.format(floor=FLOOR_TEXT),
        tables=(Table(COMPARED, contrasts),),
        page_only=True,
    )
    return Section(
        id="engines",
        title="Engines",
        lead=LEAD,
        sentences=tuple(sentences(result, report)),
        tables=(Table(EDGES, tuple(_edge(edge) for edge in edges)),),
        figures=_figures(result),
        notes=tuple(f"not tested: {missing}" for missing in result.not_tested),
        parts=(decided,) if contrasts else (),
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


def _edge(edge: Edge) -> tuple[Cell | Value, ...]:
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


def _contrasts(result: Triangle) -> tuple[tuple[Cell | Value, ...], ...]:
    """One edge at a party beside the edge that the party has no part in; each pair once."""
    rows: list[tuple[Cell | Value, ...]] = []
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
    return tuple(rows)


def party(name: str) -> str:
    """An engine by its name, or the trainer."""
    return "trainer" if name == TRAINER else line(name)


def _capital(text: str) -> str:
    """Names of engines keep their own case."""
    return text[0].upper() + text[1:] if text.startswith(("all ", "none", "not", "the ")) else text


def _figures(result: Triangle) -> tuple[Figure, ...]:
    """One for each set of tokens that has all its edges; widths follow mean |delta|.

    Edges that are rounding stay thin: the scale reaches up to ``FLOOR`` at least.
    """
    sets = [side.engine for side in result.sides if _lengths(result, side.engine)]
    longest = max([FLOOR, *(max(_lengths(result, tokens).values()) for tokens in sets)])
    return tuple(
        _figure(result, f"triangle-{place}", tokens, longest) for place, tokens in enumerate(sets)
    )


def _figure(result: Triangle, name: str, tokens: str, longest: float) -> Figure:
    odd = ""
    if result.odd:
        odd = f" {'The trainer' if result.odd == TRAINER else line(result.odd)} stands apart."
    return Figure(
        name,
        f"On the tokens of {tokens}",
        "Mean |delta| between two parties that scored the same given tokens; a wider line is a "
        f"larger distance.{odd}",
        lambda: _draw(result, name, tokens, longest),
    )


def _draw(result: Triangle, name: str, tokens: str, longest: float) -> str:
    with drawing(4.4, 2.7) as (figure, axes):
        _triangle(axes, result, tokens, longest)
        axes.set_aspect("equal")
        axes.set_xlim(-0.9, 2.9)
        axes.set_ylim(-0.45, 1.85)
        axes.axis("off")
        return to_svg(figure, name, f"{_title(result)}, on the tokens of {line(tokens)}")


def _title(result: Triangle) -> str:
    first, second, _ = result.parties
    return f"Mean |delta| between {line(first)}, {line(second)} and the trainer"


def _lengths(result: Triangle, tokens: str) -> dict[tuple[int, int], float]:
    """(corner, corner) -> mean |delta|; empty where an edge is missing."""
    lengths = {}
    for first, second in BESIDE:
        edge = result.edge(result.parties[first], result.parties[second], tokens, "prefill")
        if edge is None or edge.comparison is None:
            return {}
        lengths[first, second] = edge.comparison.metrics["logprob_abs_diff_mean"].value
    return lengths


def _triangle(axes: Axes, result: Triangle, tokens: str, longest: float) -> None:
    for (first, second), length in _lengths(result, tokens).items():
        (x1, y1), (x2, y2) = CORNERS[first], CORNERS[second]
        at_odd = result.odd in (result.parties[first], result.parties[second])
        axes.plot(
            [x1, x2],
            [y1, y2],
            color=SECOND if at_odd else ACCENT,
            linewidth=THINNEST + (WIDEST - THINNEST) * length / longest,
            solid_capstyle="round",
            zorder=1,
        )
        dx, dy, align = BESIDE[first, second]
        axes.text(
            (x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy, number(length),
            ha=align, va="center", color=INK,
        )  # fmt: skip
    for name, (x, y), (dx, dy) in zip(result.parties, CORNERS, LABELS, strict=True):
        odd = name == result.odd
        axes.plot([x], [y], "o", markersize=13, color=SECOND if odd else BAND, zorder=2)
        axes.text(
            x + dx, y + dy, "trainer" if name == TRAINER else line(name),
            ha="center", va="center", color=INK, weight="bold" if odd else "normal",
        )  # fmt: skip
