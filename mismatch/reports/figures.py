"""Pictures of the tokens table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch.metrics.corrections import Settings
from mismatch.metrics.two_passes import CLIP
from mismatch.reports.contrasts import (
    LEAST,
    late,
    off_diagonal,
    rank_in_response,
    spread,
)
from mismatch.reports.formatting import alike, bound, line, number, percent, plural
from mismatch.reports.section import Figure
from mismatch.reports.svg import (
    ACCENT,
    BAND,
    FAINT,
    INK,
    OPACITIES,
    SECOND,
    Array,
    drawing,
    shades,
    to_svg,
)

if TYPE_CHECKING:
    import pandas as pd


def comparable(tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows whose delta is a number, in order of sequence and position.

    Where a side gave no logprob (a failed check says so) there is nothing to draw.
    """
    finite = np.isfinite(tokens["delta"].to_numpy(dtype=np.float64))
    rows: pd.DataFrame = tokens[finite]
    return rows.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def of_tokens(tokens: pd.DataFrame, floor: float | None = None) -> tuple[Figure, ...]:
    """The ratio of every token, and what becomes of it along the response.

    Args:
        tokens: finite deltas only (:func:`comparable`).
        floor: largest |delta| of passes that should agree; None: it was not measured.
    """
    if tokens.empty:
        return ()
    change = late(tokens)
    return (
        Figure(
            "histogram",
            f"{spread(tokens)}{with_fix(tokens)}",
            beyond(tokens),
            lambda: histogram(tokens, floor),
        ),
        Figure(
            "by-position",
            change.sentence if change else "Too few tokens to compare early and late ones.",
            "Mean |delta| (± 2 standard errors) and mean delta in nats, by place in the response; "
            f"places with fewer than {LEAST} tokens are left out. Rounding is flat; a climb points "
            "at positions (rope, sliding window) or a decaying KV cache.",
            lambda: by_position(tokens),
        ),
    )


def scatter(tokens: pd.DataFrame) -> tuple[Figure, ...]:
    """Both sides' probabilities, and their logarithms."""
    if tokens.empty:
        return ()
    return (
        Figure(
            "logprobs",
            off_by_class(tokens),
            f"Log-probability of {plural(len(tokens), 'token')} in nats, side against side; "
            f"below {DEEPEST:g} at the edge. A wrong kernel widens the band everywhere, rounding "
            "only where tokens are unlikely.",
            lambda: logprobs(tokens),
        ),
        Figure(
            "probabilities",
            off_diagonal(tokens),
            f"Probability of {plural(len(tokens), 'token')}, side against side; stronger colour is "
            "more tokens. Another temperature bends the band; misalignment leaves no diagonal.",
            lambda: probabilities(tokens),
        ),
    )


REACH = 1e3  # ratios that the axis reaches at most
NEAREST = 6.0  # and at least: every guide is on it


def beyond(tokens: pd.DataFrame) -> str:
    """How many ratios leave each range that the field draws."""
    ratio = np.exp(np.clip(tokens["delta"].to_numpy(dtype=np.float64), -700, 700))
    settings, size = Settings(), len(ratio)
    low, high = settings.band
    cut = int(((ratio > REACH) | (ratio < 1 / REACH)).sum())
    parts = (
        f"outside PPO's clip range ({1 - CLIP:g} to {1 + CLIP:g}) "
        f"{percent(float((np.abs(ratio - 1) > CLIP).mean()))}",
        f"over TIS's cap of {bound(settings.cap)} {percent(float((ratio > settings.cap).mean()))}",
        f"outside IcePop's {bound(low)} to {bound(high)} "
        f"{percent(float(((ratio < low) | (ratio > high)).mean()))}",
        *([f"beyond the axis {plural(cut, 'token')}"] if cut else []),
    )
    return f"Ratio train / rollout of {plural(size, 'token')}: {'; '.join(parts)}."


def fixed(tokens: pd.DataFrame) -> Array | None:
    """Delta with the best fix that kept the tokens, [A]; None where there is none."""
    if "fix_logprob" not in tokens:
        return None
    after = (tokens["fix_logprob"] - tokens["rollout_logprob"]).to_numpy(dtype=np.float64)
    return after if np.isfinite(after).all() else None


def with_fix(tokens: pd.DataFrame) -> str:
    """How many tokens are off by over 2× with the best fix, to end a title; "" without one."""
    after = fixed(tokens)
    if after is None:
        return ""
    far = float((np.abs(after) > np.log(2)).mean())
    return f"; with {line(tokens['fix'].iloc[0])} {'none' if far == 0 else percent(far)}"


def histogram(tokens: pd.DataFrame, floor: float | None = None) -> str:
    """Counts of the ratio, both axes logarithmic, with the ranges of PPO, TIS and IcePop.

    The best fix is an outline over the bars; the noise floor is where passes that should agree end.
    """
    settings, after = Settings(), fixed(tokens)
    counts, edges = ratio_histogram(tokens["delta"].to_numpy(dtype=np.float64))
    with drawing() as (figure, axes):
        axes.axvspan(1 - CLIP, 1 + CLIP, color=BAND, lw=0, label=f"PPO clip, {CLIP:g}")
        axes.stairs(counts, edges, fill=True, color=ACCENT, linewidth=0)
        if after is not None:
            reach = np.log(edges[-1])
            fix, _ = np.histogram(np.clip(after, -reach, reach), bins=np.log(edges))
            axes.stairs(fix, edges, color=INK, linewidth=1.2, label="with the best fix")
        if floor:
            far = float(np.exp(min(floor, 700.0)))
            for place, label in ((far, "noise floor"), (1 / far, None)):
                axes.axvline(place, color=FAINT, lw=1, ls="-.", label=label)
        guides = (
            ([1 / settings.cap, settings.cap], (4, 2), f"{settings.cap:g}×; TIS caps above"),
            (list(settings.band), (1, 1), "IcePop, {:g} to {:g}".format(*settings.band)),
        )
        for places, dashes, label in guides:
            for number_of, place in enumerate(places):
                name = label if number_of else None
                axes.axvline(place, color=SECOND, lw=1.3, dashes=dashes, label=name)
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlim=(edges[0], edges[-1]))
        axes.set_ylim(0.6, max(2.0, counts.max() * 1.6))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
            axis.set_minor_formatter(lambda value, _: "")
        axes.set_xlabel("probability ratio, train / rollout (log)")
        axes.set_ylabel("tokens (log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, handlelength=1.4)
        told = f"{beyond(tokens)}{_fix_values(after)}"
        return to_svg(figure, "histogram", told)


def _fix_values(after: Array | None) -> str:
    """What the outline shows, for those who cannot see it."""
    if after is None:
        return ""
    sizes = number(float(np.median(np.abs(after)))), number(float(np.abs(after).max()))
    return f" With the best fix: median |delta| {sizes[0]}, largest {sizes[1]}."


def ratio_histogram(delta: Array, bins: int = 61) -> tuple[Array, Array]:
    """Counts and edges of an odd number of bins centred on ratio 1, [bins] and [bins + 1].

    Ratios beyond the axis are counted in its outermost bins.
    """
    far = np.log(np.clip(np.exp(min(float(np.abs(delta).max()), 700.0)), NEAREST, REACH)) * 1.0001
    counts, edges = np.histogram(np.clip(delta, -far, far), bins=bins, range=(-far, far))
    return counts, np.exp(edges)


def probabilities(tokens: pd.DataFrame) -> str:
    """Both sides' probabilities of every token."""
    return _side_by_side(
        "probabilities",
        "Token probabilities of both sides",
        *probability_grid(tokens),
        "probability, {}",
    )


def probability_grid(tokens: pd.DataFrame, bins: int = 64) -> tuple[Array, Array]:
    """Tokens per cell, [bins (rollout), bins (train)], and the edges of both axes, [bins + 1]."""
    return _grid([np.exp(side) for side in _logprobs(tokens)], (0.0, 1.0), bins)


DEEPEST = -12.0  # log-probability at the edge of the scatter, nats


def logprobs(tokens: pd.DataFrame) -> str:
    """Both sides' log-probabilities of every token."""
    sides = [np.maximum(side, DEEPEST) for side in _logprobs(tokens)]
    deepest = min(-1.0, float(np.floor(min(side.min() for side in sides))))
    return _side_by_side(
        "logprobs",
        off_by_class(tokens),
        *_grid(sides, (deepest, 0.0)),
        "log-probability, {} (nats)",
    )


def _logprobs(tokens: pd.DataFrame) -> list[Array]:
    return [tokens[f"{side}_logprob"].to_numpy(dtype=np.float64) for side in ("rollout", "train")]


def _grid(sides: list[Array], ends: tuple[float, float], bins: int = 64) -> tuple[Array, Array]:
    counts, edges, _ = np.histogram2d(sides[0], sides[1], bins=bins, range=[ends, ends])
    return counts, edges


def _side_by_side(name: str, title: str, counts: Array, edges: Array, label: str) -> str:
    """The trainer over the engine as a grid of counts: its size never grows."""
    ends = (edges[0], edges[-1])
    with drawing() as (figure, axes):
        axes.plot(ends, ends, color=FAINT, linewidth=0.8, dashes=(4, 3))
        shade = np.ceil(len(OPACITIES) * np.log1p(counts) / np.log1p(max(counts.max(), 1)))
        shades(axes, shade.T, edges, edges)
        axes.set(xlim=ends, ylim=ends)
        axes.set_xlabel(label.format("rollout"))
        axes.set_ylabel(label.format("train"))
        return to_svg(figure, name, title)


def off_by_class(tokens: pd.DataFrame) -> str:
    """Median |delta| of confident and of unlikely tokens, or of all where either are few."""
    size = np.abs(tokens["delta"].to_numpy(dtype=np.float64))
    rollout = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    sure, unlikely = size[rollout >= 0.9], size[rollout < 0.1]
    if min(len(sure), len(unlikely)) < LEAST:
        return f"Median |delta| {number(float(np.median(size)))} nats"
    far, near = float(np.median(unlikely)), float(np.median(sure))
    write = alike((far, near))
    return f"Median |delta| {write(far)} nats at p < 0.1, {write(near)} at p ≥ 0.9"


def drift(tokens: pd.DataFrame) -> tuple[Figure, ...]:
    """The sequences' log-ratios as they add up along the response."""
    table = drift_table(tokens)
    if table is None:
        return ()
    title = drift_title(table)
    return (
        Figure(
            "drift",
            title,
            "Sum of delta over the response so far, in nats: median, middle half and 5 to 95 % of "
            f"the sequences that are as long; lengths with fewer than {LEAST} are left out. What "
            "sequence-level weights (GSPO, sequence TIS) see is e to this.",
            lambda: draw_drift(table, title),
        ),
    )


def drift_table(tokens: pd.DataFrame, places: int = 48) -> dict[str, Array] | None:
    """Quantiles of the cumulative delta over sequences, at some lengths; None for short ones.

    Returns:
        "length" in tokens, "n" sequences that long, "q5" … "q95", each [places].
    """
    if tokens.empty:
        return None
    total = tokens.groupby("sequence")["delta"].cumsum().to_numpy(dtype=np.float64)
    length = rank_in_response(tokens) + 1
    counts = np.bincount(length)
    known = np.flatnonzero(counts >= LEAST)
    if len(known) < 4:
        return None
    chosen = np.unique(known[np.linspace(0, len(known) - 1, places).round().astype(int)])
    order = np.argsort(length, kind="stable")
    starts = np.searchsorted(length[order], chosen)
    rows = [
        np.quantile(total[order[start : start + counts[at]]], (0.05, 0.25, 0.5, 0.75, 0.95))
        for start, at in zip(starts, chosen, strict=True)
    ]
    names = ("q5", "q25", "q50", "q75", "q95")
    columns = dict(zip(names, np.array(rows).T, strict=True))
    return {"length": chosen, "n": counts[chosen], **columns}


def drift_title(table: dict[str, Array]) -> str:
    """Where the sequences' log-ratios are at the greatest length."""
    last = {name: values[-1] for name, values in table.items()}
    return (
        f"After {int(last['length'])} tokens the sequence log-ratio is {number(last['q50'])} nats "
        f"({number(last['q5'])} to {number(last['q95'])}, {plural(int(last['n']), 'sequence')})"
    )


def draw_drift(table: dict[str, Array], title: str) -> str:
    """Median and two bands."""
    x = table["length"]
    with drawing() as (figure, axes):
        axes.fill_between(x, table["q5"], table["q95"], color=BAND, lw=0, label="5 to 95 %")
        for name, label in (("q25", "middle half"), ("q75", None)):
            axes.plot(x, table[name], color=SECOND, linewidth=1, dashes=(4, 2), label=label)
        axes.plot(x, table["q50"], color=ACCENT, linewidth=2, label="median")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("sampled tokens so far")
        axes.set_ylabel("log-ratio, nats")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        axes.margins(x=0.01)
        return to_svg(figure, "drift", title)


def by_position(tokens: pd.DataFrame, buckets: int = 32) -> str:
    """delta along the response: mean of its size, and signed mean, per bucket of positions."""
    offset = rank_in_response(tokens)
    width = max(1, -(-int(offset.max() + 1) // buckets))
    bucket, delta = offset // width, tokens["delta"].to_numpy(dtype=np.float64)
    rows = [(index, delta[bucket == index]) for index in np.unique(bucket)]
    rows = [row for row in rows if len(row[1]) >= LEAST] or rows
    x = np.array([index * width + (width - 1) / 2 for index, _ in rows])
    mean = np.array([np.abs(values).mean() for _, values in rows])
    signed = np.array([values.mean() for _, values in rows])
    error = np.array([np.abs(values).std() / np.sqrt(len(values)) for _, values in rows])
    with drawing() as (figure, axes):
        axes.fill_between(x, np.maximum(mean - 2 * error, 0), mean + 2 * error, color=BAND, lw=0)
        axes.plot(x, mean, color=ACCENT, linewidth=2, label="mean |delta|")
        axes.plot(x, signed, color=SECOND, linewidth=1.4, dashes=(4, 2), label="mean delta")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("sampled token of the sequence")
        axes.set_ylabel("nats")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        axes.margins(x=0.01)
        ends = f"{number(mean[0])} nats at the start, {number(mean[-1])} at the end"
        return to_svg(figure, "by-position", f"Mean |delta| along the response: {ends}")
