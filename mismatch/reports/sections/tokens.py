"""Which tokens the two sides disagree about, in pictures."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mismatch.metrics.importance_weights import Settings
from mismatch.metrics.token import CLIP
from mismatch.reports.formatting import alike, bound, line, number, percent, plural
from mismatch.reports.section import Figure, Section
from mismatch.reports.summary import noise_rows
from mismatch.reports.svg import (
    ACCENT,
    BAND,
    FAINT,
    INK,
    OPACITIES,
    SECOND,
    Array,
    legend_above,
    shades,
)
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


LEAST = 20  # tokens of a group, below which its mean is too uncertain to show


def comparable(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return the rows whose delta is a number, in order of sequence and position.

    Where a side gave no logprob (a failed check says so) there is nothing to draw.
    """
    finite = np.isfinite(tokens["delta"].to_numpy(dtype=np.float64))
    rows: pd.DataFrame = tokens[finite]
    return rows.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


REACH = 1e3  # ratios that the axis reaches at most
NEAREST = 6.0  # and at least: every guide is on it
NEAR, FAR = (
    (0.1, 0.2, 0.5, 0.8, 1.25, 2, 5, 10),
    (0.001, 0.01, 0.1, 0.5, 2, 10, 100, 1000),
)  # labels
CELLS = 64  # of the scatter, along each axis
DEEPEST = -12.0  # log-probability at the edge of the scatter, nats
NOWHERE = "Nowhere: delta is exactly 0 for every token."
OF_FIX = "with the best fix"
BUCKETS = 32  # of places in the response
ONE_SIDED = 0.75  # share of the far tokens on one side of 0


def section(report: Report, tokens: pd.DataFrame | None) -> Section | None:
    """Return the pictures of all tokens; None without a table of them.

    Args:
        tokens: one row per action token, as in tokens.parquet.
    """
    if tokens is None:
        return None
    tokens = comparable(tokens)
    noise = (row.largest for row in noise_rows(report) if row.agree)
    floor = max((largest.value for largest in noise if largest is not None), default=None)
    nothing = "" if tokens["delta"].to_numpy(dtype=np.float64).any() else NOWHERE
    if tokens.empty:
        nothing = "Unknown: the two sides could not be compared token by token."
    return Section(
        id="tokens",
        title="By token",
        sentences=[nothing],
        figures=() if tokens.empty else (histogram(tokens, floor), by_position(tokens)),
        parts=[
            Section(
                "scatter",
                "Log-probability, side against side",
                figures=() if tokens.empty else (logprobs(tokens),),
            )
        ],
        folded=False,
        page_only=True,
    )


# ---------------------------------------------------------------- the ratio of every token


def histogram(tokens: pd.DataFrame, floor: float | None = None) -> Figure:
    """Draw counts of the ratio, both axes logarithmic, with the ranges of PPO, TIS and IcePop.

    Args:
        tokens: finite deltas only (:func:`comparable`).
        floor: largest |delta| of passes that should agree; None: it was not measured.
    """
    after = fixed(tokens)
    title = spread(tokens)
    if after is not None:
        far = float((np.abs(after) > np.log(2)).mean())
        title += f"; with {line(tokens['fix'].iloc[0])} {'none' if far == 0 else percent(far)}"
    shown = "tokens&least=0.693" if (tokens["delta"].abs() > np.log(2)).any() else ""
    paint = partial(_histogram, tokens, floor, after)
    return Figure("histogram", title, beyond(tokens), paint, link=shown)


def spread(tokens: pd.DataFrame) -> str:
    """Return how many tokens are off by over 2×, and on which side they lie."""
    delta = tokens["delta"].to_numpy(dtype=np.float64)
    far = delta[np.abs(delta) > np.log(2)]
    if len(far) == 0:
        return f"No token of {len(delta):,} is off by over 2×"
    sentence = f"{percent(len(far) / len(delta))} of {len(delta):,} tokens are off by over 2×"
    if len(far) < LEAST:
        return sentence
    lower = float((far < 0).mean())
    side = "less" if lower >= 0.5 else "more"
    share = percent(max(lower, 1.0 - lower))
    reading = "one-sided" if max(lower, 1.0 - lower) >= ONE_SIDED else "both ways, as noise is"
    return f"{sentence}; {share} of these are {side} likely in training: {reading}"


def beyond(tokens: pd.DataFrame) -> str:
    """Return how many ratios leave each range that the field draws."""
    ratio = np.exp(np.clip(tokens["delta"].to_numpy(dtype=np.float64), -700, 700))
    settings, size = Settings(), len(ratio)
    low, high = settings.band
    cut = int(((ratio > REACH) | (ratio < 1 / REACH)).sum())
    parts = (
        f"{percent(float((np.abs(ratio - 1) > CLIP).mean()))} lie outside PPO's clip range "
        f"({1 - CLIP:g} to {1 + CLIP:g})",
        f"{percent(float((ratio > settings.cap).mean()))} over TIS's cap of {bound(settings.cap)}",
        f"{percent(float(((ratio < low) | (ratio > high)).mean()))} outside IcePop's "
        f"{bound(low)} to {bound(high)}",
        *([f"{plural(cut, 'token')} beyond the axis"] if cut else []),
    )
    return f"Ratio train / rollout of {plural(size, 'token')}: {'; '.join(parts)}."


def fixed(tokens: pd.DataFrame) -> Array | None:
    """Delta with the best fix that kept the tokens, [A]; None where there is none."""
    if "fix_logprob" not in tokens:
        return None
    after = (tokens["fix_logprob"] - tokens["rollout_logprob"]).to_numpy(dtype=np.float64)
    return after if np.isfinite(after).all() else None


def _histogram(tokens: pd.DataFrame, floor: float | None, after: Array | None, axes: Axes) -> str:
    """Draw the best fix as an outline; dash-dotted: largest token of passes that should agree."""
    settings, description = Settings(), beyond(tokens)
    counts, edges = ratio_histogram(tokens["delta"].to_numpy(dtype=np.float64))
    axes.axvspan(1 - CLIP, 1 + CLIP, color=BAND, lw=0, label=f"PPO clip, {CLIP:g}")
    axes.stairs(counts, edges, fill=True, color=ACCENT, linewidth=0)
    if after is not None:
        reach = np.log(edges[-1])
        fix, _ = np.histogram(np.clip(after, -reach, reach), bins=np.log(edges))
        axes.stairs(fix, edges, color=INK, linewidth=1.2, label=OF_FIX)
        sizes = number(float(np.median(np.abs(after)))), number(float(np.abs(after).max()))
        description += f" With the best fix: median |delta| {sizes[0]}, largest {sizes[1]}."
    if floor:
        far = float(np.exp(min(floor, 700.0)))
        for ratio, label in ((far, "largest of repeated passes"), (1 / far, None)):
            axes.axvline(ratio, color=FAINT, lw=1, ls="-.", label=label)
    guides = (
        ([1 / settings.cap, settings.cap], (4, 2), f"{settings.cap:g}×; TIS caps above"),
        (list(settings.band), (1, 1), "IcePop, {:g} to {:g}".format(*settings.band)),
    )
    for places, dashes, label in guides:
        for ratio, name in zip(places, (None, label), strict=True):
            axes.axvline(ratio, color=SECOND, lw=1.3, dashes=dashes, label=name)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(edges[0], edges[-1]))
    axes.set_ylim(0.6, max(2.0, counts.max() * 1.6))
    labels = NEAR if edges[-1] < 20 else FAR
    places = [at for at in labels if edges[0] <= at <= edges[-1]]
    axes.set_xticks(places, [f"{at:g}" for at in places])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("probability ratio, train / rollout (log)")
    axes.set_ylabel("tokens (log)")
    legend_above(axes, 3, handlelength=1.4)
    return description


def ratio_histogram(delta: Array) -> tuple[Array, Array]:
    """Return counts and edges of 61 bins centred on ratio 1, [61] and [62].

    Ratios beyond the axis are counted in its outermost bins.
    """
    far = np.log(np.clip(np.exp(min(float(np.abs(delta).max()), 700.0)), NEAREST, REACH)) * 1.0001
    counts, edges = np.histogram(np.clip(delta, -far, far), bins=61, range=(-far, far))
    return counts, np.exp(edges)


# ---------------------------------------------------------------- side against side


def logprobs(tokens: pd.DataFrame) -> Figure:
    """Draw both sides' log-probabilities of every token as a grid of counts: its size is fixed."""
    sides = [
        np.maximum(tokens[f"{side}_logprob"].to_numpy(dtype=np.float64), DEEPEST)
        for side in ("rollout", "train")
    ]
    deepest = min(-1.0, float(np.floor(min(side.min() for side in sides))))
    ends = (deepest, 0.0)
    counts, edges, _ = np.histogram2d(sides[0], sides[1], bins=CELLS, range=[ends, ends])
    return Figure(
        "logprobs",
        off_by_class(tokens),
        f"Log-probability of {plural(len(tokens), 'token')} in nats, side against side; "
        f"below {DEEPEST:g} at the edge; stronger colour is more tokens. A wrong kernel widens the "
        "band everywhere, rounding only where tokens are unlikely; another temperature bends it, "
        "and misalignment leaves no diagonal.",
        partial(_logprobs, counts, edges),
    )


def _logprobs(counts: Array, edges: Array, axes: Axes) -> str:
    """Return the trainer over the engine."""
    ends = (edges[0], edges[-1])
    axes.plot(ends, ends, color=FAINT, linewidth=0.8, dashes=(4, 3))
    shade = np.ceil(len(OPACITIES) * np.log1p(counts) / np.log1p(max(counts.max(), 1)))
    shades(axes, shade.T, edges, edges)
    axes.set(xlim=ends, ylim=ends)
    axes.set_xlabel("log-probability, rollout (nats)")
    axes.set_ylabel("log-probability, train (nats)")
    return ""


def off_by_class(tokens: pd.DataFrame) -> str:
    """Return median |delta| of confident and of unlikely tokens, or of all where either are few."""
    size = np.abs(tokens["delta"].to_numpy(dtype=np.float64))
    rollout = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    sure, unlikely = size[rollout >= 0.9], size[rollout < 0.1]
    if min(len(sure), len(unlikely)) < LEAST:
        return f"Median |delta| {number(float(np.median(size)))} nats"
    far, near = float(np.median(unlikely)), float(np.median(sure))
    write = alike((far, near))
    return f"Median |delta| {write(far)} nats at p < 0.1, {write(near)} at p ≥ 0.9"


# ---------------------------------------------------------------- along the response


def by_position(tokens: pd.DataFrame) -> Figure:
    """Return what becomes of delta along the response."""
    return Figure(
        "by-position",
        "Mean |delta| along the response",
        "Mean |delta| (± 2 standard errors) and mean delta in nats, by place in the response; "
        f"places with fewer than {LEAST} tokens are left out. Rounding follows the "
        "policy: it falls where tokens become certain. A climb points at positions (rope, sliding "
        "window) or at the KV cache.",
        partial(_by_position, tokens),
    )


def _by_position(tokens: pd.DataFrame, axes: Axes) -> str:
    """Mean of the size of delta, and signed mean, per bucket of positions."""
    offset = tokens.groupby("sequence").cumcount()  # place among the sequence's sampled tokens
    width = max(1, -(-int(offset.max() + 1) // BUCKETS))
    by_bucket = tokens["delta"].groupby(offset // width)
    size = tokens["delta"].abs().groupby(offset // width)
    kept = by_bucket.size() >= LEAST
    kept |= not kept.any()
    mean, signed = size.mean()[kept], by_bucket.mean()[kept]
    error = 2 * (size.std(ddof=0) / np.sqrt(size.size()))[kept]
    x = mean.index.to_numpy() * width + (width - 1) / 2
    axes.fill_between(x, np.maximum(mean - error, 0), mean + error, color=BAND, lw=0)
    axes.plot(x, mean, color=ACCENT, linewidth=2, label="mean |delta|")
    axes.plot(x, signed, color=SECOND, linewidth=1.4, dashes=(4, 2), label="mean delta")
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("sampled token of the sequence")
    axes.set_ylabel("nats")
    legend_above(axes, 2)
    axes.margins(x=0.01)
    ends = f"{number(mean.iloc[0])} nats at the start, {number(mean.iloc[-1])} at the end"
    return f"Mean |delta| along the response: {ends}"
