"""Pictures of the tokens table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports.contrasts import (
    Contrast,
    late,
    off_diagonal,
    rank_in_response,
    spread,
    unlikely,
)
from mismatch.reports.section import Figure
from mismatch.reports.summary import Row
from mismatch.reports.svg import (
    ACCENT,
    BAD,
    BAND,
    FAINT,
    HEALTHY,
    INK,
    OPACITIES,
    SECOND,
    WARN,
    Array,
    bars,
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


def of_tokens(tokens: pd.DataFrame) -> tuple[Figure, ...]:
    """The pictures that the data allow, in reading order.

    Args:
        tokens: finite deltas only (:func:`comparable`).
    """
    if tokens.empty:
        return ()
    return (
        Figure(
            "histogram",
            "How far single tokens are off",
            spread(tokens),
            lambda: histogram(tokens),
        ),
        Figure(
            "probabilities",
            "Probability, side against side",
            "Every token once; stronger colour means more of them. Agreement is the diagonal; "
            f"{off_diagonal(tokens)}. Another temperature would bend the band, misaligned tokens "
            "would leave a cloud without a diagonal.",
            lambda: probabilities(tokens),
        ),
        Figure(
            "by-probability",
            "Likely and unlikely tokens",
            f"{_told(unlikely(tokens), 'likely or unlikely')} Above the bars: tokens.",
            lambda: by_probability(tokens),
        ),
        Figure(
            "by-position",
            "Along the response",
            f"{_told(late(tokens), 'early or late')} Rounding gives a flat line; one that climbs "
            "points at positions (rope, sliding window) or at state that decays (a quantised KV "
            "cache). Far right few tokens are left.",
            lambda: by_position(tokens),
        ),
    )


def _told(contrast: Contrast | None, kind: str) -> str:
    return contrast.sentence if contrast else f"Too few {kind} tokens to compare."


def histogram(tokens: pd.DataFrame) -> str:
    """Counts of delta on a logarithmic axis: the tail is what hurts."""
    delta = tokens["delta"].to_numpy(dtype=np.float64)
    counts, edges = delta_histogram(delta)
    with drawing() as (figure, axes):
        axes.stairs(counts, edges, fill=True, color=ACCENT, linewidth=0)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(0.6, max(2.0, counts.max() * 1.6))
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("delta = train - rollout, nats")
        axes.set_ylabel("tokens (log)")
        return to_svg(figure, "histogram", "Histogram of delta, logarithmic counts")


def delta_histogram(delta: Array, bins: int = 81) -> tuple[Array, Array]:
    """Counts and edges of an odd number of bins centred on 0, [bins] and [bins + 1]."""
    reach = float(np.abs(delta).max()) or 1e-9
    counts, edges = np.histogram(delta, bins=bins, range=(-reach * 1.0001, reach * 1.0001))
    return counts, edges


def probabilities(tokens: pd.DataFrame, bins: int = 64) -> str:
    """Both sides' probabilities of every token, as a grid of counts: its size never grows."""
    counts, edges = probability_grid(tokens, bins)
    with drawing() as (figure, axes):
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, dashes=(4, 3))
        shade = np.ceil(len(OPACITIES) * np.log1p(counts) / np.log1p(max(counts.max(), 1)))
        shades(axes, shade.T, edges, edges)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_xlabel("probability, rollout")
        axes.set_ylabel("probability, train")
        return to_svg(figure, "probabilities", "Token probabilities of both sides")


def probability_grid(tokens: pd.DataFrame, bins: int = 64) -> tuple[Array, Array]:
    """Tokens per cell, [bins (rollout), bins (train)], and the edges of both axes, [bins + 1]."""
    rollout = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    train = np.exp(tokens["train_logprob"].to_numpy(dtype=np.float64))
    counts, edges, _ = np.histogram2d(rollout, train, bins=bins, range=[[0, 1], [0, 1]])
    return counts, edges


def by_probability(tokens: pd.DataFrame) -> str:
    """Mean |delta| by the probability that the engine gave."""
    edges = np.array([0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0 + 1e-9])
    probability = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    bucket = np.clip(np.searchsorted(edges, probability, side="right") - 1, 0, len(edges) - 2)
    labels = ["<.01", ".01", ".05", ".1", ".25", ".5", ".75", ".9", "≥.99"]
    mean, count = bucket_means(bucket, tokens, len(labels))
    return bars(
        "by-probability", "Mean |delta| by the engine's probability", labels,
        ("probability that the engine gave the token, from", "mean |delta|, nats"), mean,
        counts=count,
    )  # fmt: skip


def by_position(tokens: pd.DataFrame, buckets: int = 32) -> str:
    """|delta| along the response: mean and 99 % quantile per bucket of positions."""
    offset = rank_in_response(tokens)
    width = max(1, -(-int(offset.max() + 1) // buckets))
    bucket = offset // width
    size = np.abs(tokens["delta"].to_numpy(dtype=np.float64))
    rows = [(index, size[bucket == index]) for index in np.unique(bucket)]
    x = np.array([index * width + (width - 1) / 2 for index, _ in rows])
    mean = np.array([values.mean() for _, values in rows])
    high = np.array([np.quantile(values, 0.99) for _, values in rows])
    error = np.array([values.std() / np.sqrt(len(values)) for _, values in rows])
    with drawing() as (figure, axes):
        axes.fill_between(x, np.maximum(mean - 2 * error, 0), mean + 2 * error, color=BAND, lw=0)
        axes.plot(x, mean, color=ACCENT, linewidth=2, label="mean (± 2 standard errors)")
        axes.plot(x, high, color=SECOND, linewidth=1.2, dashes=(4, 2), label="99 % quantile")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("sampled token of the sequence")
        axes.set_ylabel("|delta|, nats")
        axes.legend(loc="upper right", ncols=2)
        axes.margins(x=0.01)
        axes.set_ylim(top=max(float(high.max()) * 1.25, 1e-12))
        return to_svg(figure, "by-position", "|delta| along the response")


def bucket_means(bucket: Array, tokens: pd.DataFrame, size: int) -> tuple[Array, Array]:
    """Mean |delta| and count per bucket, [size] each; NaN where a bucket is empty."""
    delta = np.abs(tokens["delta"].to_numpy(dtype=np.float64))
    count = np.bincount(bucket, minlength=size)
    total = np.bincount(bucket, weights=delta, minlength=size)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count
