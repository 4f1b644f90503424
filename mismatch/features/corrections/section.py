"""Importance weights: corrections previewed on the tokens of this run."""

from __future__ import annotations

from collections.abc import Mapping

from mismatch.features.corrections.results import Corrections, Preview
from mismatch.metrics.importance_weights import NONE, OVERRIDE
from mismatch.reports.formatting import (
    brief,
    capital,
    count,
    line,
    near_one,
    number,
    percent,
    plural,
    signed,
    text,
)
from mismatch.reports.section import Cell, Cells, Column, Section, Table, recipe_block
from mismatch.types import Report

LEAD = (
    "What a correction in the trainer's loss would do to the tokens of {rollout} against {train}. "
    "It reweighs or drops them; it changes no delta and no verdict."
)
METHOD = (
    "Error: √(distance² + mean squared weight / {batch} sequences), the distance being the mean "
    "|weight - ratio|. “=”: as good as rank 1, within 1 % or within the interval. The ratio is the "
    "token's: it ignores that the two policies would also have reached other states."
)
HIDES = "hides the mismatch, does not remove it: after it the PPO ratio is 1 whatever happens"
REMARK = {OVERRIDE: HIDES, NONE: "plain policy gradient"}


def section(result: Corrections, report: Report) -> Section:
    """Return the preview; a correction that was asked for as a fix says so."""
    fixes = report.result("fixes")
    asked = {
        fix.correction: f"asked for as --fix {line(fix.id)}: it removes nothing"
        for fix in (fixes.estimators if fixes else ())
        if fix.correction
    }
    return shown(result, asked)


def shown(result: Corrections, asked: Mapping[str, str] | None = None) -> Section:
    """Best first; what is not ranked comes last.

    Args:
        asked: id -> what is said of one that was asked for as a fix.
    """

    def rank(preview: Preview) -> int:
        figures = preview.token
        return 10**6 if figures is None or figures.rank is None else figures.rank

    previews = sorted(result.previews, key=rank)
    rows = [_row(result, preview, (asked or {}).get(preview.id, "")) for preview in previews]
    best, settings = headline(result), list[Section]()
    if result.best is not None:
        from mismatch.metrics.correction_settings import recipes

        named = result.named(result.best)
        wish = "" if result.favoured == result.best else "; if you want one anyway"
        blocks = [recipe_block(item) for item in recipes(result.best, result.settings)]
        title, lead = f"How to switch it on: {named.label}", f"{named.setting}{wish}"
        settings.append(Section("corrections-settings", title, lead, blocks=blocks))
    return Section(
        "corrections",
        "Corrections, previewed",
        LEAD.format(rollout=result.rollout, train=result.train),
        sentences=[best, *remarks(result)],
        tables=[
            Table(
                (
                    Column("rank"),
                    Column("correction", text),
                    Column("name", text, 9),
                    Column("error", number, detail=f"of a batch of {count(result.batch)}"),
                    Column("kept", percent, 1, detail="of the tokens"),
                    Column("ESS", percent, 1, detail="effective sample size"),
                    Column("residual bias", signed, 3, interval=2),
                ),
                rows,
            )
        ],
        notes=[METHOD.format(batch=count(result.batch))],
        parts=[
            Section(
                "corrections-effects",
                "What each does",
                sentences=[_effect(result, preview) for preview in previews],
            ),
            *settings,
        ],
        short=best,
    )


def _row(result: Corrections, preview: Preview, asked: str) -> Cells:
    figures, rank = preview.token, None
    if figures is not None and figures.rank is not None:
        as_good = figures.tied and figures.rank > 1
        rank = f"{figures.rank}{' =' if as_good else ''}"
    return (
        Cell(rank, "strong" if preview.id == result.favoured else ""),
        Cell(preview.label, note=asked),
        Cell(preview.id, "code"),
        figures.error if figures else None,
        Cell(preview.kept_tokens, note=f"{percent(preview.kept_sequences)} of the sequences"),
        preview.ess.value if preview.ess else None,
        figures.bias if figures else None,
    )


def _effect(result: Corrections, preview: Preview) -> str:
    """Return what a correction does to the weights."""
    same = ""
    if preview.same_as is not None and preview.id != OVERRIDE:
        same = f"here the same weights as {result.named(preview.same_as).label}"
    weights = (
        f"weights {near_one(preview.weight_mean)} ± {number(preview.weight_std)}, "
        f"at most {near_one(preview.weight_max)}"
    )
    parts = preview.setting, REMARK.get(preview.id, ""), same, weights
    return f"{preview.label}: {'; '.join(filter(None, parts))}"


def headline(result: Corrections) -> str:
    """Return what the data favour: its error before and after, and what is as good."""
    plain = result.named(NONE).token
    if result.best is None or result.favoured is None or plain is None:
        return f"{capital(line(result.reason))}."
    best = result.named(result.best)
    falls = f"error {brief(plain.error)} → {brief(best.token.error)}" if best.token else ""
    if result.favoured == NONE and plain.tied:
        return "No correction is needed: none is measurably better than doing nothing."
    if result.favoured == NONE:
        return f"No correction is needed: the mismatch is small against sampling noise ({falls})."
    tied = [
        each.label
        for each in result.previews
        if (figures := each.token) and figures.tied and each.id != result.best
    ]
    others = f"; as good: {'; '.join(tied)}" if tied else ""
    return f"Best correction: {best.label} ({falls}){others}."


def remarks(result: Corrections) -> list[str]:
    """Return what has to be known before the table is believed."""
    texts = []
    figures = result.named(NONE).token
    if figures is not None:
        if result.batch == figures.bias.n_sequences:
            texts.append(
                f"The batch is taken to be as large as this run, {count(result.batch)} sequences; "
                "for yours: mismatch corrections RUN --batch N."
            )
        if "few-prompts" in figures.bias.flags:
            texts.append("Few prompts: the intervals are rough.")
    if result.heavy_tail:
        texts.append("Heavy-tailed ratios: with other prompts the order may change.")
    if result.clamped:
        texts.append(
            f"{plural(result.clamped, 'log-ratio')} beyond ±20 (of tokens or sequences) "
            "clamped to ±20."
        )
    return texts + [f"Not tested: {line(reason)}." for reason in result.not_tested]
