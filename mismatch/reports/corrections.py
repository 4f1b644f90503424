"""The preview of corrections in words and rows, for every rendering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch.analysis.corrections.choice import TARGET_WORDS
from mismatch.analysis.corrections.recipes import Recipe, recipes
from mismatch.analysis.corrections.types import Against, Corrections, Preview
from mismatch.metrics.corrections import NONE, OVERRIDE, Level
from mismatch.reports import fixes, quantities
from mismatch.reports.text import line
from mismatch.types import Estimate, Report

LEAD = (
    "What a correction in the trainer's loss would do to these same tokens. It reweighs or drops "
    "them; it changes no delta, mends nothing, and does not touch the verdict."
)
STATE_SHIFT = (
    "The token ratio ignores that the two policies would also have reached other states; the "
    "sequence ratio counts that, at the price of far more spread."
)
HIDES = "hides the mismatch, does not remove it: after it the PPO ratio is 1 whatever happens"
OTHER: dict[Level, Level] = {"token": "sequence", "sequence": "token"}
REMARK = {OVERRIDE: HIDES, NONE: "plain policy gradient"}


@dataclass(frozen=True, slots=True)
class CorrectionRow:
    """One correction as a line of a table; all texts, "–" where there is nothing to say.

    Attributes:
        rank: by error beside the chosen target; "=" marks one that is as good as rank 1.
        other: the rank beside the other target.
    """

    id: str
    label: str
    setting: str
    kept: str
    kept_sequences: str
    ess: str
    weights: str
    bias: str
    interval: str
    error: str
    cosine: str
    norm_ratio: str
    rank: str
    other: str
    favoured: bool


def section(report: Report) -> dict[str, Any] | None:
    """What the HTML template shows; None where nothing was previewed."""
    made = report.result("corrections")
    if made is None:
        return None
    return {
        "lead": LEAD,
        "headline": headline(made),
        "remarks": remarks(made),
        "rows": correction_rows(made, fixes.asked_for(report)),
        "batch": quantities.count(made.batch),
        "other": OTHER[made.target],
        "title": setting_title(made),
        "recipes": setting_recipes(made),
    }


def correction_rows(
    made: Corrections, asked: Mapping[str, str] | None = None
) -> list[CorrectionRow]:
    """Best first; what is not ranked comes last.

    Args:
        asked: id -> what is said of one that was asked for as a fix.
    """
    previews = sorted(made.previews, key=lambda one: _place(one.against(made.target)))
    return [_row(made, one, (asked or {}).get(one.id, "")) for one in previews]


def _place(figures: Against | None) -> int:
    return 10**6 if figures is None or figures.rank is None else figures.rank


def _row(made: Corrections, one: Preview, asked: str) -> CorrectionRow:
    mine = one.against(made.target)
    other = one.against(OTHER[made.target])
    return CorrectionRow(
        id=one.id,
        label=one.label,
        setting="; ".join(part for part in (_setting(made, one), asked) if part),
        kept=quantities.percent(one.kept_tokens),
        kept_sequences=quantities.percent(one.kept_sequences),
        ess=quantities.percent(one.ess.value) if one.ess else quantities.MISSING,
        weights=f"{_near(one.weight_mean)} ± {quantities.number(one.weight_std)}, "
        f"at most {_near(one.weight_max)}",
        bias=_signed(mine.bias.value) if mine else quantities.MISSING,
        interval=_interval(mine.bias) if mine else quantities.MISSING,
        error=quantities.number(mine.error) if mine else quantities.MISSING,
        cosine=_near(mine.cosine.value) if mine and mine.cosine else quantities.MISSING,
        norm_ratio=_near(mine.norm_ratio.value) if mine and mine.norm_ratio else quantities.MISSING,
        rank=_rank(mine),
        other=_rank(other),
        favoured=one.id == made.favoured,
    )


def _setting(made: Corrections, one: Preview) -> str:
    parts = [part for part in (one.setting, REMARK.get(one.id, "")) if part]
    if one.same_as is not None and one.id != OVERRIDE:
        parts.append(f"here the same weights as {made.named(one.same_as).label}")
    return "; ".join(parts)


def _rank(figures: Against | None) -> str:
    if figures is None or figures.rank is None:
        return quantities.MISSING
    return f"{figures.rank}{' =' if figures.tied and figures.rank > 1 else ''}"


def _near(value: float) -> str:
    """A number around 1, where three significant digits would hide what matters."""
    return f"{value:.4f}" if 0.9 < value < 1.1 else quantities.number(value)


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + quantities.number(value, 2)


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{_signed(estimate.low)} … {_signed(estimate.high)}"


def headline(made: Corrections) -> str:
    """What the data favour, as one sentence.

    Example: "TIS, token: the mismatch can shift a batch by up to 0.34, beside …".
    """
    text = line(made.reason)
    return f"{text[:1].upper()}{text[1:]}."


def remarks(made: Corrections) -> list[str]:
    """What has to be known before the table is believed."""
    said = _about_the_ranking(made)
    if made.heavy_tail:
        said.append(
            "A few tokens carry the ratios (heavy tail): with other prompts the order may change."
        )
    if made.clamped:
        said.append(
            f"{quantities.plural(made.clamped, 'log-ratio')} beyond ±20 (of tokens or sequences) "
            "entered as ±20."
        )
    said.extend(f"Not tested: {line(reason)}." for reason in made.not_tested)
    return said


def _about_the_ranking(made: Corrections) -> list[str]:
    figures = made.named(NONE).against(made.target)
    if figures is None:
        return []
    said = [_nearest_other(made), STATE_SHIFT]
    if made.batch == figures.bias.n_sequences:
        said.append(
            f"The batch is taken to be as large as this run, {made.batch:,} sequences; for yours: "
            "mismatch corrections RUN --batch N."
        )
    if "few-prompts" in figures.bias.flags:
        said.append("Few prompts: the intervals are rough.")
    return said


def _nearest_other(made: Corrections) -> str:
    """The winner beside the other target."""
    other = OTHER[made.target]
    found = [(figures.rank, one) for one in made.previews if (figures := one.against(other))]
    _, first = min(
        ((rank, one) for rank, one in found if rank is not None), key=lambda pair: pair[0]
    )
    return f"Beside the {TARGET_WORDS[other]}, {first.label} has the least error."


def setting_title(made: Corrections) -> str:
    """Heads the recipes."""
    if made.best is None:
        return ""
    best = made.named(made.best)
    wish = "" if made.favoured == made.best else "; should you want one all the same"
    return f"{best.label}: {best.setting}{wish}"


def setting_recipes(made: Corrections) -> tuple[Recipe, ...]:
    """How each framework is told; empty where nothing is ranked."""
    return () if made.best is None else recipes(made.best, made.settings)
