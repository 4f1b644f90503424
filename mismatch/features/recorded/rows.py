"""Which rows are off: sequences that are farther apart than the others, and what they share.

A fault may hold in a part of the rows: one stale replica, one bad rank, rows that span two versions
of the weights. Its cause then looks like a weak fault of every row. So each row gets a score (how
far its tokens are apart, beyond what their probabilities explain), the scores are split in two
groups where that split is far too good for one group, and the split is compared with everything
that is known of the rows. A second test looks for a change inside rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.analysis.row_scores import FACTOR, FEW, far_group, surprises
from mismatch.types import Bools, Floats, Ints, Pair, Rollout

LEAST_TOKENS = 8  # of a row that is scored
LEAST_ROWS = 12  # fewer rows make no groups
SAME = 0.9  # share of rows on which an attribute and the groups must agree
CHANCE = 1e-4  # of this agreement, times the groupings that were tried
# What a framework splits rows by, and not their content: a weak difference counts there too.
IN_TURN = "row of the file, modulo"
SOURCES = ("replica", "rank", "weight_version")
WEAK_FACTOR = 1.5  # times as far apart, of all rows of a source
NAMED = 12  # rows that are off and are named
PLACES = 8  # groups of tokens by their place in the response
IN_PLACE = 0.9  # rank correlation of these groups' distances with their places
ALONG = 2.0  # times as far apart in the last group as in the first; the embedded clean run: 1.2
FITS = 0.25  # of the distance behind a token, that a shift must leave at most
CHANGED = 0.01  # chance of a change inside one row (Pettitt 1979)
MANY_CHANGED = 0.15  # share of rows with a change; clean runs have up to 0.05


@dataclass(frozen=True)
class Shared:
    """What the rows that are off have in common."""

    attribute: str
    values: tuple[str, ...]
    agreement: float
    """Share of all rows that the attribute puts into their group."""


@dataclass(frozen=True)
class RowGroups:
    """Rows in two groups, where they fall into two."""

    rows: int
    """Rows that could be scored."""
    off: tuple[int, ...] = ()
    """Sequences that are farther apart than the others; empty: one group."""
    factor: float = 1.0
    """How many times as far apart they are."""
    shared: tuple[Shared, ...] = ()
    """Attributes that tell the groups apart, the best first."""
    changed: float = 0.0
    """Share of rows inside which the distance changes."""
    change_at: float | None = None
    """Median place of that change, as a share of the response; None: too few rows change."""
    change_factor: float = 1.0
    """Distance after the change over that before it, the median row's."""
    named: tuple[str, ...] = ()
    """Of those that are off, the rows of the file, from 0, where they are few."""
    shifted: tuple[str, ...] = ()
    """Of these, rows whose two sides fit from some token on if one of them is shifted."""
    shifted_by: int = 0
    """Tokens."""
    with_position: float = 1.0
    """Distance at the last places of responses over that at the first, where it grows with them."""

    def sentence(self) -> str:
        """Say which rows are off, and whether places in them are; "" where all are alike."""
        said = self._of_rows()
        if self.with_position == 1.0:
            return said
        grows = f"the distance grows with the position in the response, {self.with_position:.2g}×"
        return f"{grows} from the first to the last eighth of the tokens{'; ' * bool(said)}{said}"

    def _of_rows(self) -> str:
        if self.off:
            share = len(self.off) / self.rows
            text = (
                f"{100 * share:.0f} % of the rows are {self.factor:.3g}× as far apart as the others"
            )
            if self.shifted:
                shift = f"one side is shifted by {self.shifted_by:+d} token from some token on"
                return f"{text}: in row {', '.join(self.shifted)} {shift}"
            if not self.shared:
                which = f": row {', '.join(self.named)} (from 0)" if self.named else ""
                known = "nothing that is known of the rows separates them from the others"
                return f"{text}{which}; {known}"
            best = self.shared[0]
            which = f"{best.attribute} {', '.join(best.values)}"
            return f"{text}: {'all' if best.agreement == 1 else 'nearly all'} of {which}"
        if self.change_at is not None:
            direction = "grows" if self.change_factor > 1 else "falls"
            return (
                f"in {100 * self.changed:.0f} % of the rows the distance {direction} in "
                "mid-response "
                f"(median: at {100 * self.change_at:.0f} %, by {self.change_factor:.2g}×)"
            )
        return ""

    def advice(self) -> str:
        """Say what to look at first."""
        if self.shifted:
            return "pass token ids, never text, from the engine to the trainer"
        if self.with_position > 1:
            return "compare what depends on the position: rotary settings, context length, windows"
        if self.off and self.shared:
            best = self.shared[0]
            return f"compare weights and settings of {best.attribute} {best.values[0]} with another"
        if self.named:
            return "look at the tokens of these rows on both sides"
        if self.off:
            return "write replica, rank and weight_version of every row into the dump"
        return (
            "compare by position and length; in asynchronous training also look for weights that "
            "are updated while a response is sampled"
        )

    def at_places(self, pair: Pair, surprise: Floats) -> RowGroups:
        """Return the groups with how the distance grows along responses, places of all pooled."""
        starts = np.searchsorted(pair.sequence, np.arange(len(pair.prompt)))
        place = np.arange(len(surprise)) - starts[pair.sequence]
        edges = np.quantile(place, np.linspace(0, 1, PLACES + 1)[1:-1])
        eighth = np.searchsorted(edges, place)
        count = np.bincount(eighth, minlength=PLACES)
        if (count < LEAST_TOKENS * LEAST_ROWS).any():
            return self
        mean = np.bincount(eighth, surprise, PLACES) / count
        order = np.corrcoef(np.argsort(np.argsort(mean)), np.arange(PLACES))[0, 1]
        if order < IN_PLACE or mean[-1] < ALONG * mean[0]:
            return self
        return replace(self, with_position=float(mean[-1] / mean[0]))


def row_groups(pair: Pair, rollout: Rollout, known: Mapping[str, Sequence[str]]) -> RowGroups:
    """Return the rows of a run in two groups, where they fall into two.

    Args:
        known: attribute -> its value for every row, [N].
    """
    surprise = surprises(pair)
    return _groups(pair, rollout, known, surprise).at_places(pair, surprise)


def _groups(
    pair: Pair, rollout: Rollout, known: Mapping[str, Sequence[str]], surprise: Floats
) -> RowGroups:
    """Return the rows of a run in two groups, whatever the places of their tokens."""
    rows = len(pair.prompt)
    tokens = np.bincount(pair.sequence, minlength=rows)
    scored = np.flatnonzero(tokens >= LEAST_TOKENS)
    if len(scored) < LEAST_ROWS:
        return RowGroups(len(scored))
    sums = np.bincount(pair.sequence, surprise, rows)
    score = np.log(np.maximum(sums[scored] / tokens[scored], 1e-6))
    changes = _changes(pair, surprise, scored)
    if changes.change_at is not None:  # these rows are farther apart as a whole, too
        return changes
    turns = np.zeros(rollout.n_sequences, np.int64)
    np.maximum.at(turns, rollout.sequence_of_token, rollout.turn)
    longest = tokens > np.quantile(tokens, 0.75)
    attributes: dict[str, Sequence[str]] = {
        **known,
        "finish reason": rollout.finish_reason,
        "turns": [str(count) for count in turns],
        "response length": ["the longest quarter" if long else "shorter" for long in longest],
    }
    ids = attributes.pop("sample_id", None)  # it names a row, and makes no group
    held = {name: np.asarray(values)[scored] for name, values in attributes.items()}
    if "row" in held:  # ranks and replicas take rows in turn, or in blocks
        at = held.pop("row").astype(np.int64)
        for ways in (2, 4, 8):
            held[f"{IN_TURN} {ways}:"] = (at % ways).astype(str)
            blocks = at * ways // (at.max() + 1)
            held[f"block of the file, of {ways}:"] = blocks.astype(str)
    far = far_group(score)
    if far is None:
        return _by_source(score, scored, held) or changes
    off = scored[far]
    shifted, by = _shifted(pair, off)
    names = list(map(str, known.get("row", range(rows))))
    if ids is not None:
        names = [f"{name} (sample {at})" for name, at in zip(names, ids, strict=True)]
    return RowGroups(
        len(scored),
        tuple(int(row) for row in off),
        float(np.exp(score[far].mean() - score[~far].mean())),
        _shared(far, held),
        named=tuple(names[row] for row in off) if len(off) <= NAMED else (),
        shifted=tuple(names[row] for row in shifted[:NAMED]),
        shifted_by=by,
    )


def _shifted(pair: Pair, off: Ints) -> tuple[list[int], int]:
    """Return the rows whose sides fit from some token on when one is shifted, and by how much."""
    best: tuple[list[int], int] = [], 0
    for lag in (1, -1, 2, -2):
        rows = []
        for row in off:
            a, b = np.searchsorted(pair.sequence, [row, row + 1])
            left, right = pair.rollout[a:b], pair.train[a:b]
            n = len(left)
            if n < 2 * LEAST_TOKENS:
                continue
            moved = np.full(n, np.nan)
            moved[max(0, -lag) : n - max(0, lag)] = left[max(0, lag) : n + min(0, lag)]
            own, other = np.abs(right - left), np.abs(right - moved)
            other[np.isnan(other)] = 0.0
            behind = [np.cumsum(each[::-1])[::-1] for each in (own, other)]
            cut = int(np.argmax(behind[0] - behind[1]))
            long_enough = n - cut >= LEAST_TOKENS and cut > 0
            if long_enough and behind[1][cut] < FITS * behind[0][cut]:
                rows.append(int(row))
        if len(rows) > len(best[0]):
            best = rows, lag
    return best if len(best[0]) >= max(1, len(off) / 2) else ([], 0)


def _by_source(score: Floats, scored: Ints, known: Mapping[str, np.ndarray]) -> RowGroups | None:
    """Return the rows of sources whose scores are higher than the others', by ranks."""
    tried = {
        name: values
        for name, values in known.items()
        if name in SOURCES or name.startswith(IN_TURN)
    }
    for name, values in tried.items():  # what the dump names comes before the order of its rows
        kinds, kind = np.unique(values, return_inverse=True)
        if not 2 <= len(kinds) <= len(score) // FEW:
            continue
        order = np.argsort(np.bincount(kind, score) / np.bincount(kind))
        for cut in range(1, len(kinds)):
            high = np.isin(kind, order[cut:])
            factor = float(np.exp(score[high].mean() - score[~high].mean()))
            if factor < WEAK_FACTOR:
                continue
            from scipy.stats import mannwhitneyu  # a second of imports: only where it may matter

            chance = mannwhitneyu(score[high], score[~high], alternative="greater").pvalue
            if chance * len(tried) * 2 ** (len(kinds) - 1) < CHANCE:
                rows = tuple(int(row) for row in scored[high])
                shared = Shared(name, tuple(kinds[order[cut:]].tolist()), 1.0)
                return RowGroups(len(score), rows, factor, (shared,))
    return None


def _shared(far: Bools, known: Mapping[str, np.ndarray]) -> tuple[Shared, ...]:
    """Return the attributes that tell the far rows from the others, the best first."""
    from scipy.stats import hypergeom

    found = []
    for name, values in known.items():
        kinds, kind = np.unique(values, return_inverse=True)
        if not 2 <= len(kinds) <= len(far) // 2:
            continue
        share = np.bincount(kind, far) / np.bincount(kind)
        predicted = (share > 0.5)[kind]
        agreement = float((predicted == far).mean())
        if not predicted.any() or predicted.all() or agreement < SAME:
            continue
        hits = int((far & predicted).sum())  # as many or more, of a grouping drawn at random:
        chance = hypergeom.sf(hits - 1, len(far), int(far.sum()), int(predicted.sum()))
        if chance * len(known) * 2 ** (len(kinds) - 1) < CHANCE:
            found.append(Shared(name, tuple(kinds[share > 0.5].tolist()), agreement))
    found.sort(key=lambda each: (-each.agreement, len(each.values)))
    return tuple(found)


def _changes(pair: Pair, surprise: Floats, scored: Ints) -> RowGroups:
    """Look for a change inside rows, by ranks, so that a few far tokens make none."""
    places, factors = [], []
    starts = np.searchsorted(pair.sequence, scored)
    ends = np.searchsorted(pair.sequence, scored, side="right")
    for start, end in zip(starts, ends, strict=True):
        values = surprise[start:end]
        n = len(values)
        ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") + 1.0
        walk = 2 * np.cumsum(ranks) - np.arange(1, n + 1) * (n + 1)
        cut = int(np.argmax(np.abs(walk[:-1]))) + 1
        if 2 * np.exp(-6 * walk[cut - 1] ** 2 / (n**3 + n**2)) < CHANGED:
            places.append(cut / n)
            factors.append(np.log((values[cut:].mean() + 1e-9) / (values[:cut].mean() + 1e-9)))
    groups = RowGroups(len(scored), changed=len(places) / len(scored))
    factor = float(np.exp(np.median(factors))) if factors else 1.0
    if groups.changed < MANY_CHANGED or 1 / FACTOR < factor < FACTOR:
        return groups
    return replace(groups, change_at=float(np.median(places)), change_factor=factor)
