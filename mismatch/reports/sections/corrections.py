"""Importance weights: corrections previewed on these tokens, and what a longer response keeps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from mismatch.analysis.corrections.preview import TARGET_WORDS
from mismatch.analysis.corrections.recipes import Against, Corrections, Preview, Recipe, recipes
from mismatch.metrics.forecast import Forecast
from mismatch.metrics.importance_weights import NONE, OVERRIDE, Level
from mismatch.reports.formatting import (
    MISSING,
    brief,
    capital,
    count,
    interval,
    line,
    near_one,
    number,
    percent,
    plural,
    signed,
    text,
    times,
    wording,
)
from mismatch.reports.section import Block, Cell, Cells, Column, Figure, Section, Table
from mismatch.reports.svg import ACCENT, BAND, FAINT, INK, SECOND
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "What a correction in the trainer's loss would do to the tokens of {rollout} against {train}. "
    "It reweighs or drops them; it changes no delta and no verdict."
)
BESIDE = "Judged by the {}: {}."
STATE_SHIFT = (
    "The token ratio ignores that the two policies would also have reached other states; the "
    "sequence ratio counts that, at the price of far more spread."
)
METHOD = (
    "Error: √(distance² + mean squared weight / {batch} sequences), the distance being the mean "
    "|weight - ratio|. “=”: as good as rank 1, within 1 % or within the interval. Cosine and "
    "length: of the weights times the advantages, beside the ratio times the advantages."
)
HIDES = "hides the mismatch, does not remove it: after it the PPO ratio is 1 whatever happens"
OTHER: dict[Level, Level] = {"token": "sequence", "sequence": "token"}
REMARK = {OVERRIDE: HIDES, NONE: "plain policy gradient"}


def section(result: Corrections, report: Report) -> Section:
    """The preview; a correction that was asked for as a fix says so."""
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
        figures = preview.against(result.target)
        return 10**6 if figures is None or figures.rank is None else figures.rank

    previews = sorted(result.previews, key=rank)
    rows = [_row(result, preview, (asked or {}).get(preview.id, "")) for preview in previews]
    best = headline(result)
    return Section(
        "corrections",
        "Corrections, previewed",
        LEAD.format(rollout=result.rollout, train=result.train),
        sentences=[best, *remarks(result)],
        tables=[Table(_columns(result), rows)],
        notes=[METHOD.format(batch=count(result.batch))],
        parts=[
            Section(
                "corrections-effects",
                "What each does",
                sentences=[_effect(result, preview) for preview in previews],
            ),
            *_settings(result),
        ],
        short=best,
    )


def _columns(result: Corrections) -> tuple[Column, ...]:
    return (
        Column("rank"),
        Column("correction", text),
        Column("name", text, 9),
        Column("error", number, detail=f"of a batch of {count(result.batch)}"),
        Column("kept", percent, 1, detail="of the tokens"),
        Column("ESS", percent, 1, detail="effective sample size"),
        Column("residual bias", signed, 3, interval=2),
        Column("cosine", near_one, 1, detail="of the gradient"),
        Column(f"rank by {OTHER[result.target]} ratio", number, 5),
    )


def _row(result: Corrections, preview: Preview, asked: str) -> Cells:
    figures, other = preview.against(result.target), preview.against(OTHER[result.target])
    length = figures.norm_ratio if figures else None
    return (
        Cell(_rank(figures), "strong" if preview.id == result.favoured else ""),
        Cell(preview.label, note=asked),
        Cell(preview.id, "code"),
        figures.error if figures else None,
        Cell(preview.kept_tokens, note=f"{percent(preview.kept_sequences)} of the sequences"),
        preview.ess.value if preview.ess else None,
        figures.bias if figures else None,
        Cell(
            figures.cosine.value if figures and figures.cosine else None,
            note=f"length × {near_one(length.value)}" if length else "",
        ),
        _rank(other),
    )


def _effect(result: Corrections, preview: Preview) -> str:
    """What a correction does to the weights."""
    same = ""
    if preview.same_as is not None and preview.id != OVERRIDE:
        same = f"here the same weights as {result.named(preview.same_as).label}"
    weights = (
        f"weights {near_one(preview.weight_mean)} ± {number(preview.weight_std)}, "
        f"at most {near_one(preview.weight_max)}"
    )
    parts = preview.setting, REMARK.get(preview.id, ""), same, weights
    return f"{preview.label}: {'; '.join(filter(None, parts))}"


def _rank(figures: Against | None) -> str | None:
    """By error beside a target; "=" marks one that is as good as rank 1."""
    if figures is None or figures.rank is None:
        return None
    return f"{figures.rank}{' =' if figures.tied and figures.rank > 1 else ''}"


def headline(result: Corrections) -> str:
    """What the data favour: its error before and after, and what is as good."""
    plain = result.named(NONE).against(result.target)
    if result.best is None or plain is None or plain.error is None:
        return f"{capital(line(result.reason))}."
    best = result.named(result.best)
    after = best.against(result.target)
    tied = [
        each.label
        for each in result.previews
        if (figures := each.against(result.target)) and figures.tied and each.id != result.best
    ]
    sentence = f"Best correction: {best.label}"
    if result.favoured != result.best:
        sentence = f"None is needed; the least error has {best.label}"
    if after is not None and after.error is not None:
        sentence += f": error {brief(plain.error)} → {brief(after.error)}"
    return f"{sentence}{'; as good: ' + ', '.join(tied) if tied else ''}."


def remarks(result: Corrections) -> list[str]:
    """What has to be known before the table is believed."""
    texts = []
    figures = result.named(NONE).against(result.target)
    if figures is not None:
        other = OTHER[result.target]
        ranked = [
            (against.rank, preview.label)
            for preview in result.previews
            if (against := preview.against(other)) and against.rank is not None
        ]
        first = min(ranked, key=lambda pair: pair[0])[1]
        texts += [BESIDE.format(TARGET_WORDS[other], first), STATE_SHIFT]
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


def _settings(result: Corrections) -> tuple[Section, ...]:
    """How each framework switches the best on; nothing without a ranking."""
    if result.best is None:
        return ()
    best = result.named(result.best)
    wish = "" if result.favoured == result.best else "; should you want one all the same"
    blocks = [recipe_block(item) for item in recipes(result.best, result.settings)]
    title = f"How to switch it on: {best.label}"
    return (Section("corrections-settings", title, f"{best.setting}{wish}", blocks=blocks),)


def recipe_block(recipe: Recipe) -> Block:
    """One framework's setting, with what to know about it."""
    remark = "; ".join(filter(None, (recipe.remark, recipe.source)))
    return Block(f"{recipe.framework}: {remark}", recipe.lines)


# ---------------------------------------------------------------- at a longer response

FORECAST_LEAD = (
    "What importance weights would do at a planned response length, extrapolated from the tokens "
    "of this run."
)


def forecast(result: Forecast, report: Report) -> Section:
    """What the forecast says, how it was checked, how far it reaches, and what to doubt."""
    sentences = forecast_sentences(result)
    full = "effective size, full ratios"
    columns = (
        Column("tokens", count, of="length"),
        Column("spread, nats", number, interval=1, of="spread"),
        Column("effective size", percent, 3, interval=4, detail="ratios capped at 2", of="ess"),
        Column(full, percent, 1, detail="ratios not capped", of=lambda row: Cell(
            row.ess_untruncated, note="the floor, 1/N" if result.at_floor(row) else ""
        )),
        Column("ratio over 2", percent, 3, detail="truncated or masked", of="truncated"),
        Column("outside [1/2, 2]", percent, 3, detail="two-sided mask", of="outside"),
        Column("rejected", percent, 2, detail="geometric bounds", of="geo_rejected"),
    )  # fmt: skip
    kept = Figure(
        "forecast-kept",
        "What importance weights would keep",
        "Effective size is the share of the sequences that importance weights leave in force. "
        "Geometric rejection looks at the mean of delta, so it can fall with length; weights of "
        "whole sequences only get worse.",
        partial(_kept, result),
    )
    return Section(
        "forecast",
        "At a longer response",
        FORECAST_LEAD,
        sentences=sentences,
        tables=[Table.of(columns, result.rows)],
        figures=[kept] if len(result.rows) > 1 else (),
        short=sentences[0],
    )


def forecast_sentences(forecast: Forecast) -> list[str]:
    """The same in words."""
    if forecast.missing:
        return [f"No forecast: {forecast.missing}."]
    last, check = forecast.rows[-1], forecast.check
    between = interval(last.spread, to=" to ").replace(MISSING, "no interval")
    sentences = [
        f"At {count(last.length)} tokens the sequence log-ratio would spread by "
        f"{number(last.spread.value)} nats ({between}); full importance weights would leave an "
        f"ESS of {percent(last.ess_untruncated.value)}, geometric bounds of "
        f"0.999 and 1.001 would reject {percent(last.geo_rejected.value)}."
    ]
    if check is not None:
        error = _signed(check.error.value)
        if check.error.low is not None:
            error += f", interval {interval(check.error, _signed, ' to ')}"
        reach = "The target lies within the data."
        if forecast.reach > 1:
            reach = (
                "Validated to 2× the observed length; the target is "
                f"{times(forecast.reach)}: order of magnitude only."
            )
        sentences.append(
            f"Checked on this run: the first {count(check.fitted)} positions predict the spread "
            f"at {count(check.length)} tokens as {number(check.predicted)} nats, it is "
            f"{number(check.observed)} ({error}). {reach}"
        )
    if any(map(forecast.at_floor, forecast.rows)):
        floor = forecast.floor
        sentences.append(f"ESS floor: 1/{count(round(1 / floor))} ({percent(floor)}).")
    cautions = wording("cautions")
    return sentences + [f"Caution: {cautions[f]}." for f in forecast.flags if f in cautions]


def _signed(share: float) -> str:
    return f"{100 * share:+.0f} %"


def _kept(forecast: Forecast, axes: Axes) -> str:
    rows = forecast.rows
    length = [row.length for row in rows]
    low = [100 * (row.ess.value if row.ess.low is None else row.ess.low) for row in rows]
    high = [100 * (row.ess.value if row.ess.high is None else row.ess.high) for row in rows]
    axes.fill_between(length, low, high, color=BAND, lw=0)
    curves = []
    for label, color, style, estimates in (
        ("effective size, ratios capped at 2", ACCENT, "-", [row.ess for row in rows]),
        ("effective size, full ratios", INK, ":", [row.ess_untruncated for row in rows]),
        ("rejected, geometric bounds", SECOND, "--", [row.geo_rejected for row in rows]),
        ("outside [1/2, 2]", FAINT, "-.", [row.outside for row in rows]),
    ):
        values = [100 * estimate.value for estimate in estimates]
        axes.plot(length, values, style, color=color, lw=1.8, label=label)
        ends = [(rows[at].length, estimates[at].value) for at in (0, -1)]
        curves.append(
            f"{label}: " + ", ".join(f"{percent(x)} at {count(n)} tokens" for n, x in ends)
        )
    axes.set(xscale="log", ylim=(-3, 130), ylabel="sequences, %")
    axes.set(xlabel="response length, tokens")
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.axvline(forecast.longest, color=FAINT, lw=1, dashes=(4, 3))
    ticks = length[:-1][:: max(1, len(length) // 4)] + length[-1:]
    if len(ticks) > 2 and ticks[-1] < 1.8 * ticks[-2]:
        del ticks[-2]
    axes.set_xticks(ticks, [count(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.legend(loc="upper left", ncols=2)
    return "; ".join(curves)
