"""Every token of the run to look at: sequences as coloured strips, and each token's numbers.

The page's script draws it (templates/explorer.js); without scripts, and on paper, the worst tokens
are there as a table. Its data are columns of bytes, deflated, as lines of text: the largest
differences are kept exactly; of every other token each value is one byte, a place on a logarithmic
scale. Where even that is more than a page should hold, whole sequences are left out.

A line is ``name base64``: base64url of a zlib stream of JSON or of bytes. (Base64 with "+" and "/"
could hold what looks like an access key, and keys are struck out of what is written.)
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import LIKELIEST
from mismatch.reports.formatting import count, number, plural, signed, text, token_text, visible
from mismatch.reports.section import Cell, Column, Section, Table, Widget
from mismatch.reports.sections.tokens import comparable
from mismatch.types import Floats, Ints, Report

if TYPE_CHECKING:
    import pandas as pd

BUDGET = 4_400_000  # characters: with the rest of the page at most 5 MB
FINE = 200_000  # tokens up to which every value has all steps of a byte; delta always
EXACT = 1000  # tokens of largest |delta| whose values are kept as they are
LONGEST = 60  # characters of a token that are shown
CONTEXT = 200_000  # tokens of prompts and tool outputs, all together
# The least value of a scale that is not 0.
SMALLEST = {
    "delta": 1e-4,
    "left": 1e-5,
    "entropy": 1e-3,
    "reference": 1e-4,
    "fix": 1e-4,
    "margin": 1e-5,
}
SIGNED = ("delta", "reference", "fix")
SOURCES = {
    "entropy": "entropy",
    "margin": "routing_margin",
    "reference": "reference_logprob",
    "fix": "fix_logprob",
}
LEAD = (
    "Every sampled token, coloured by how far the two sides are apart. Choose a strip, then a "
    "token; j and k walk through the largest |Δ|, arrow keys through tokens and sequences. The "
    "address of the page names the token."
)
STILL = (
    Column(
        "token", text, of=lambda row: Cell(token_text(str(row.token)), note=f"id {row.token_id}")
    ),
    Column("Δ, nats", signed, of="delta"),
    Column("logprob, rollout", number, of="rollout_logprob"),
    Column("logprob, train", number, of="train_logprob"),
    Column(
        "where",
        text,
        of=lambda row: Cell(
            f"sequence {row.sequence}",
            note=f"position {row.position}",
            link=f"s{row.sequence}t{row.position}",
        ),
    ),
)
MOST = 12  # rows of it
Bytes = NDArray[np.uint8]


def section(report: Report, tokens: pd.DataFrame | None) -> Section | None:
    """Return the explorer; None where nothing was compared.

    Args:
        tokens: as in tokens.parquet, of either version.
    """
    if tokens is None:
        return None
    rows = comparable(tokens)
    if rows.empty:
        return None
    has = [name for name, at in SOURCES.items() if at in rows and rows[at].notna().any()]
    packed = pack(rows, {"has": has, "fix": str(rows["fix"].iloc[0]) if "fix" in has else ""})
    broken = report.verdict.status == "broken"
    return Section(
        "tokens-explorer",
        "Token explorer",
        LEAD,
        notes=notes(packed, len(rows), rows["sequence"].nunique()),
        widget=Widget("explorer", packed.text, worst_tokens(rows)),
        folded=not broken,  # open at the worst token, without controls until they are asked for
        page_only=True,
        short=f"{plural(packed.tokens, 'token')} of {plural(packed.sequences, 'sequence')}",
    )


def worst_tokens(rows: pd.DataFrame) -> list[Table]:
    """Return the tokens of largest |delta| as a table, where there are any."""
    size = rows["delta"].abs()
    worst = rows.loc[size[size > 0].nlargest(MOST).index]
    return [Table.of(STILL, worst.itertuples())] if len(worst) else []


def notes(packed: Packed, tokens: int, sequences: int) -> tuple[str, ...]:
    """Return what the page does not hold, and how exactly it holds the rest."""
    parts = {
        f"A sample: {count(packed.sequences)} of {plural(sequences, 'sequence')} "
        f"({count(packed.tokens)} of {plural(tokens, 'token')}), the worst first, then "
        "any. All of them are in tokens.parquet.": packed.tokens < tokens,
        f"The {count(min(EXACT, tokens))} tokens of largest |Δ| have the measured values; those of "
        "the others (≈) are rounded to one byte each.": tokens > EXACT,
        f"What both sides think likeliest is kept at {count(packed.with_tops)} of the "
        f"{plural(packed.worst, 'token')} of largest |Δ|: a side gave no likeliest tokens, as in "
        "recorded runs.": packed.worst > packed.with_tops,
    }
    return tuple(note for note, holds in parts.items() if holds)


# ---------------------------------------------------------------- lines of text


@dataclass(frozen=True, slots=True)
class Packed:
    """What a page holds of a run's tokens.

    Attributes:
        text: the lines; ASCII without quotes and angle brackets.
        tokens, sequences: that are in it.
        worst, with_tops: tokens of largest |delta|; how many of them have the likeliest tokens.
    """

    text: str
    tokens: int
    sequences: int
    worst: int
    with_tops: int


def pack(tokens: pd.DataFrame, about: dict[str, Any], budget: int = BUDGET) -> Packed:
    """Pack a tokens table.

    Args:
        tokens: as :func:`mismatch.reports.sections.tokens.comparable` gives them, at least one.
        about: JSON data that the page's script is to know in addition to the tokens.
        budget: most characters of text.
    """
    kept, text = tokens, _lines(tokens, about)
    for seed in itertools.count():
        if len(text) <= budget or kept["sequence"].nunique() == 1:
            break
        kept = _sampled(kept, 0.95 * budget / len(text), seed)
        text = _lines(kept, about)
    worst, tops = _worst(kept["delta"].abs().to_numpy()), flat_lists(kept, "top_ids")
    with_tops = 0 if tops is None else int(np.count_nonzero(np.diff(tops[1])[worst]))
    return Packed(text, len(kept), kept["sequence"].nunique(), len(worst), with_tops)


def _sampled(tokens: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Whole sequences that hold about this share of the tokens: the worst, then any."""
    delta = tokens["delta"].abs()
    sequence = tokens["sequence"]
    worst = sequence.loc[delta.nlargest(EXACT).index].drop_duplicates().to_numpy()
    others = np.setdiff1d(sequence.unique(), worst)
    order = np.concatenate([worst, np.random.default_rng(seed).permutation(others)])
    lengths = sequence.value_counts().reindex(order).to_numpy()
    fits = max(1, int(np.searchsorted(np.cumsum(lengths), share * len(tokens), "right")))
    return tokens[sequence.isin(order[:fits])].reset_index(drop=True)


def _lines(tokens: pd.DataFrame, about: dict[str, Any]) -> str:
    words = _Words(tokens)
    left = tokens["rollout_logprob"].to_numpy(np.float64)
    # Differences to the rollout side, as delta is, but for entropy and margin; NaN: not measured.
    values = {"delta": tokens["delta"].to_numpy(np.float64), "left": -left}
    for name, source in SOURCES.items():
        if source in tokens and not tokens[source].isna().all():
            column = tokens[source].to_numpy(np.float64)
            values[name] = column - left if name in SIGNED else column
    fine = len(tokens) <= FINE
    scales = {name: _scale(name, array, fine) for name, array in values.items()}
    layers, masks = _layer_masks(tokens)
    turns, turn = np.unique(tokens.get("turn", np.zeros(0)), return_inverse=True)
    meta = about | {
        "scales": {name: scale.round(9).tolist() for name, scale in scales.items()},
        "layers": layers,
        "turns": turns[:256].tolist(),
        **_sequences(tokens),
    }
    data: dict[str, Any] = {
        "meta": meta,
        "contexts": words.contexts(tokens),
        "exact": _exact(tokens, values, words),
        "words": words.table(),  # after those that add to it
        "word": words.planes(),
        **{name: _codes(array, scales[name]) for name, array in values.items()},
    }
    if layers:
        data["layers"] = masks
    if len(turns) > 1:
        data["turn"] = np.minimum(turn, 255).astype(np.uint8)  # the 256th and later are one
    return "\n".join(f"{name} {_encoded(each)}" for name, each in data.items())


def _encoded(data: Any) -> str:
    if isinstance(data, np.ndarray):
        raw = np.ascontiguousarray(data).tobytes()
    else:
        raw = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.compress(raw, 6)).decode().rstrip("=")


def _scale(name: str, values: Floats, fine: bool) -> Floats:
    """Return what each code stands for; 0 is nearly 0. A signed scale's second half is negative."""
    low, signed = SMALLEST[name], name in SIGNED
    finite = np.abs(values[np.isfinite(values)])
    high = max(float(finite.max(initial=0.0)), 10 * low)
    steps = 255 if fine or name == "delta" else 63
    levels = np.concatenate([[0.0], np.geomspace(low, high, steps // 2 if signed else steps)])
    return np.concatenate([levels, -levels]) if signed else levels


def _codes(values: Floats, scale: Floats) -> Bytes:
    """Return the nearest code of every value, [A]; NaN is 0."""
    signed = scale[-1] < 0
    levels = scale[: len(scale) // 2] if signed else scale
    size = np.abs(np.nan_to_num(values, nan=0.0))
    steps = len(levels) - 2
    with np.errstate(divide="ignore"):
        position = 1 + steps * np.log(size / levels[1]) / np.log(levels[-1] / levels[1])
    code = np.where(size < levels[1], 0, np.clip(np.rint(position), 1, steps + 1))
    below = len(levels) * (values < 0) * (code > 0) if signed else 0
    return np.asarray(code + below, np.uint8)


def _sequences(tokens: pd.DataFrame) -> dict[str, list[Any]]:
    """Of each sequence: its number, how many tokens, prompt, sample and reward."""
    groups = tokens.groupby("sequence", sort=False)
    columns: dict[str, list[Any]] = {"lengths": groups.size().tolist()}
    named = {
        "numbers": "sequence",
        "prompts": "prompt",
        "samples": "sample",
        "rewards": "reward",
        "starts": "position",
    }
    for name, column in named.items():
        if column in tokens:
            first = groups[column].first().tolist()
            columns[name] = [None if value != value else value for value in first]
    return columns


def _layer_masks(tokens: pd.DataFrame) -> tuple[list[int], Bytes]:
    """Numbers of the layers that flipped anywhere, and a bit for each and every token: whole bytes
    of eight layers, one after another, [bytes, A]."""
    lists = flat_lists(tokens, "routing_flipped_layers")
    if lists is None or not len(lists[0]):
        return [], np.zeros((0, len(tokens)), np.uint8)
    layers, columns = np.unique(lists[0], return_inverse=True)
    rows = np.repeat(np.arange(len(tokens)), np.diff(lists[1]))
    masks = np.zeros((-(-len(layers) // 8), len(tokens)), np.uint8)
    np.bitwise_or.at(masks, (columns // 8, rows), (1 << (columns % 8)).astype(np.uint8))
    return layers.tolist(), masks


def flat_lists(tokens: pd.DataFrame, name: str) -> tuple[NDArray[Any], Ints] | None:
    """Values and offsets [A + 1] of a column of lists, null being an empty one; None without it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in tokens:
        return None
    column = pa.chunked_array([pa.array(tokens[name].array)])
    if pa.types.is_null(column.type):
        return None
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    values = pc.list_flatten(column).to_numpy()
    return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


class _Words:
    """Every text once, the commonest first; those of prompts and of likely outcomes too."""

    def __init__(self, tokens: pd.DataFrame) -> None:
        import pandas as pd

        which, texts = pd.factorize(tokens["token"].to_numpy(object))
        classes: Any = [""]
        kind = np.zeros(len(tokens), np.int64)
        if "token_class" in tokens:
            kind, classes = pd.factorize(tokens["token_class"].to_numpy(object))
        pairs, word = np.unique(which * len(classes) + kind, return_inverse=True)
        order = np.argsort(-np.bincount(word), kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        self._word = rank[word]
        self._texts = [str(texts[pair // len(classes)]) for pair in pairs[order]]
        self._class_of = [str(classes[pair % len(classes)]) for pair in pairs[order]]
        self._index = {text: i for i, text in enumerate(self._texts)}

    def number(self, text: str) -> int:
        """Return the number of a text, which is added where it is new."""
        if text not in self._index:
            self._index[text] = len(self._texts)
            self._texts.append(text)
            self._class_of.append("")
        return self._index[text]

    def planes(self) -> Bytes:
        """Low bytes of all tokens, then the next, [2 or 3, A]."""
        count = 2 if len(self._texts) < 1 << 16 else 3
        return np.stack([(self._word >> 8 * i & 255).astype(np.uint8) for i in range(count)])

    def table(self) -> dict[str, Any]:
        classes = sorted(set(self._class_of) - {""})
        return {
            "texts": [shown(text) for text in self._texts],
            "classes": classes,
            "of": [classes.index(name) if name else -1 for name in self._class_of],
        }

    def contexts(self, tokens: pd.DataFrame) -> dict[str, Any]:
        """Return what comes before which token: contexts are numbered, ``of`` has one per row."""
        lists = flat_lists(tokens, "context")
        if lists is None:
            return {"at": [], "of": [], "texts": [], "lengths": []}
        values, offsets = lists
        at = np.flatnonzero(np.diff(offsets))
        contexts: dict[tuple[str, ...], int] = {}
        each = max(16, CONTEXT // max(1, len(at)))
        of = [
            contexts.setdefault(tuple(values[offsets[row] : offsets[row + 1]]), len(contexts))
            for row in at
        ]
        return {
            "at": at.tolist(),
            "of": of,
            "texts": [[self.number(str(text)) for text in texts[-each:]] for texts in contexts],
            "lengths": [len(texts) for texts in contexts],
        }


def shown(text: str) -> str:
    """Return a token as a page holds it: harmless, and never longer than a line."""
    return visible(text) if len(text) <= LONGEST else visible(text[: LONGEST - 1]) + "…"


def _worst(size: Floats) -> Ints:
    """Rows of the largest |delta|, at most EXACT."""
    return np.asarray(np.argsort(-size, kind="stable")[:EXACT], np.int64)


def _exact(tokens: pd.DataFrame, values: dict[str, Floats], words: _Words) -> dict[str, Any]:
    """Return the worst tokens and those with both sides' likeliest outcomes, as measured."""
    size = np.abs(values["delta"])
    worst, lists = _worst(size), flat_lists(tokens, "top_ids")
    tops = np.zeros(0, np.int64) if lists is None else np.flatnonzero(np.diff(lists[1]))
    others = np.setdiff1d(tops, worst)
    others = others[np.argsort(-size[others], kind="stable")][:EXACT]
    tops = np.union1d(np.intersect1d(tops, worst), others)
    rows = np.union1d(worst, tops)
    exact: dict[str, Any] = {"at": rows.tolist()}
    for name, array in values.items():
        exact[name] = [None if x != x else float(f"{x:.7g}") for x in array[rows].tolist()]
    if lists is None:
        return exact
    columns = [flat_lists(tokens, f"top_{name}") for name in ("tokens", "rollout", "train")]
    offsets = lists[1]
    exact["top"] = {}
    for row in tops.tolist():
        texts, left, right = (
            column[0][offsets[row] : offsets[row + 1]].tolist() for column in columns if column
        )
        bounds = [_bound(side) for side in (left, right)]
        exact["top"][row] = [
            [words.number(str(text)), *map(_outcome, pair, bounds)]
            for text, *pair in zip(texts, left, right, strict=True)
        ]
    return exact


def _bound(side: list[float]) -> float:
    """Return what is above everything that a side did not name: the last of its likeliest."""
    named = sorted((x for x in side if not np.isnan(x)), reverse=True)
    return named[min(LIKELIEST, len(named)) - 1] if named else 0.0


def _outcome(logprob: float, bound: float) -> float | None:
    """As explorer.js reads it: null is p = 0, and what is only known to be below ``bound`` (the
    least likely of those that the side named) is 1 - bound, which no log-probability is."""
    if np.isnan(logprob):
        return round(1 - bound, 5) if np.isfinite(bound) else None
    return round(logprob, 5) if np.isfinite(logprob) else None
