"""Every token of the run to look at: sequences as coloured strips, and each token's numbers.

The page's script draws it (templates/explorer.js); without scripts, and on paper, the worst tokens
stand there as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.reports.contrasts import comparable
from mismatch.reports.formatting import count, plural
from mismatch.reports.packing import EXACT, OPTIONAL, Packed, pack
from mismatch.reports.section import Section, Widget
from mismatch.reports.sections.patterns import worst_tokens
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

LEAD = (
    "Every sampled token, coloured by how far the two sides are apart. Choose a strip, then a "
    "token; j and k walk through the largest |Δ|, arrow keys through tokens and sequences. The "
    "address of the page names the token."
)
SOURCES = {"fix": "fix_logprob", "reference": "reference_logprob", "margin": "routing_margin"}
WORDS = {
    "layers": "flipped layers",
    "fix": "the best fix",
    "entropy": "entropy",
    "reference": "float32",
    "margin": "router margins",
}


def section(report: Report, tokens: pd.DataFrame) -> Section | None:
    """The explorer; None where nothing was compared.

    Args:
        tokens: as in tokens.parquet, of either version.
    """
    rows = comparable(tokens)
    if rows.empty:
        return None
    columns = {name: SOURCES.get(name, name) for name in OPTIONAL if name != "layers"}
    has = [name for name, at in columns.items() if at in rows and rows[at].notna().any()]
    fix = str(rows["fix"].iloc[0]) if "fix" in has else ""
    packed = pack(rows, {"has": has, "fix": fix})
    return Section(
        id="tokens-explorer",
        title="Token explorer",
        lead=LEAD,
        notes=notes(packed, len(rows), rows["sequence"].nunique()),
        widget=Widget("explorer", packed.text, worst_tokens(rows).tables),
        page_only=True,
        short=f"{plural(packed.tokens, 'token')} of {plural(packed.sequences, 'sequence')}",
    )


def notes(packed: Packed, tokens: int, sequences: int) -> tuple[str, ...]:
    """What the page does not hold, and how exactly it holds the rest."""
    exact = (
        f"The {count(min(EXACT, tokens))} tokens of largest |Δ| have the measured values; those of "
        "the others (≈) are rounded to one byte each."
    )
    sampled = left_out = ""
    if packed.tokens < tokens:
        sampled = (
            f"A sample: {count(packed.sequences)} of {plural(sequences, 'sequence')} "
            f"({count(packed.tokens)} of {plural(tokens, 'token')}), the worst ones first, then "
            "any. All of them are in tokens.parquet."
        )
    if packed.left_out:
        names = ", ".join(WORDS[name] for name in packed.left_out)
        left_out = f"For lack of room only those of largest |Δ| have: {names}."
    missing = packed.worst - packed.with_tops
    tops = (
        f"What both sides think likeliest is kept at {count(packed.with_tops)} of the "
        f"{plural(packed.worst, 'token')} of largest |Δ|: a side gave no likeliest tokens, as in "
        "runs of earlier versions and in recorded ones."
    )
    parts = (sampled, exact if tokens > EXACT else "", left_out, tops if missing else "")
    return tuple(filter(None, parts))
