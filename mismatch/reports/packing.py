"""The tokens of a run, small enough for a page: columns of bytes, deflated, as lines of text.

The largest differences are kept exactly; of every other token each value is one byte, a place on a
logarithmic scale. Where even that is more than a page should hold, columns that can be missed are
left out, then whole sequences. templates/explorer.js reads it.

A line is ``name base64``: base64url of a zlib stream of JSON or of bytes. (Base64 with "+" and "/"
could hold what looks like an access key, and keys are struck out of what is written.)
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import LIKELIEST
from mismatch.reports.formatting import visible
from mismatch.types import Floats, Ints

if TYPE_CHECKING:
    import pandas as pd

BUDGET = 4_400_000  # characters: with the rest of the page at most 5 MB
FINE = 200_000  # tokens up to which every value has all steps of a byte; delta always
EXACT = 1000  # tokens of largest |delta| whose values are kept as they are
LONGEST = 60  # characters of a token that are shown
CONTEXT = 200_000  # tokens of prompts and tool outputs, all together
SMALLEST = {"delta": 1e-4, "left": 1e-5, "entropy": 1e-3, "reference": 1e-4, "fix": 1e-4,
            "margin": 1e-5}  # fmt: skip
SIGNED = ("delta", "reference", "fix")
OPTIONAL = ("layers", "fix", "entropy", "reference", "margin")  # what is missed most comes first
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Packed:
    """What a page holds of a run's tokens.

    Attributes:
        text: the lines; ASCII without quotes and angle brackets.
        tokens, sequences: that are in it.
        left_out: names of columns for which there was no room.
        worst, with_tops: tokens of largest |delta|; how many of them have the likeliest tokens.
    """

    text: str
    tokens: int
    sequences: int
    left_out: tuple[str, ...] = ()
    worst: int = 0
    with_tops: int = 0


def pack(tokens: pd.DataFrame, about: dict[str, Any], budget: int = BUDGET) -> Packed:
    """Pack a tokens table.

    Args:
        tokens: as :func:`mismatch.reports.contrasts.comparable` gives them, at least one.
        about: JSON data that the page's script is to know beside the tokens.
        budget: most characters of text.
    """
    lines, left_out = _within(tokens, about, budget)
    kept = tokens
    seed = 0
    while (size := _size(lines)) > budget and kept["sequence"].nunique() > 1:
        kept = _sampled(kept, 0.95 * budget / size, seed)
        lines, left_out = _within(kept, about, budget)
        seed += 1
    text = "\n".join(f"{name} {value}" for name, value in lines.items())
    sequences = kept["sequence"].nunique()
    return Packed(text, len(kept), sequences, left_out, *_tops_of_worst(kept))


def _within(
    tokens: pd.DataFrame, about: dict[str, Any], budget: int
) -> tuple[dict[str, str], tuple[str, ...]]:
    """All lines, less those of optional columns for which there is no room."""
    lines = _lines(tokens, about)
    spare = {name: lines.pop(name) for name in OPTIONAL if name in lines}
    room = budget - _size(lines)
    for name, value in spare.items():
        if room < 0 or (need := _size({name: value})) <= room:
            lines[name] = value
            room -= 0 if room < 0 else need
    return lines, tuple(name for name in spare if name not in lines)


def _size(lines: dict[str, str]) -> int:
    return sum(len(name) + len(value) + 2 for name, value in lines.items())


def _sampled(tokens: pd.DataFrame, share: float, seed: int) -> pd.DataFrame:
    """Whole sequences that hold about this share of the tokens: the worst, then any."""
    delta = tokens["delta"].abs()
    sequence = tokens["sequence"]
    worst = sequence.loc[delta.nlargest(EXACT).index].drop_duplicates().to_numpy()
    others = np.setdiff1d(sequence.unique(), worst)
    order = np.concatenate([worst, np.random.default_rng(seed).permutation(others)])
    lengths = sequence.value_counts().reindex(order).to_numpy()
    fits = max(1, int(np.searchsorted(np.cumsum(lengths), share * len(tokens), "right")))
    kept: pd.DataFrame = tokens[sequence.isin(order[:fits])].reset_index(drop=True)
    return kept


def _lines(tokens: pd.DataFrame, about: dict[str, Any]) -> dict[str, str]:
    words = _Words(tokens)
    values = _columns(tokens)
    fine = len(tokens) <= FINE
    scales = {name: _scale(name, array, fine) for name, array in values.items()}
    layers, masks = _layer_masks(tokens)
    turns, turn = _turns(tokens)
    meta = about | {
        "scales": {name: scale.round(9).tolist() for name, scale in scales.items()},
        "layers": layers,
        "turns": turns,
        **_sequences(tokens),
    }
    lines = {
        "meta": _json(meta),
        "contexts": _json(words.contexts(tokens)),
        "exact": _json(_exact(tokens, values, words)),
        "words": _json(words.table()),  # after those that add to it
    }
    lines["word"] = _bytes(words.planes())
    lines |= {name: _bytes(_codes(array, scales[name])) for name, array in values.items()}
    if layers:
        lines["layers"] = _bytes(masks)
    if len(turns) > 1:
        lines["turn"] = _bytes(turn)
    return lines


def _json(data: Any) -> str:
    return _text(json.dumps(data, allow_nan=False, separators=(",", ":")).encode())


def _bytes(values: Bytes) -> str:
    return _text(np.ascontiguousarray(values).tobytes())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(data, 6)).decode().rstrip("=")


def _columns(tokens: pd.DataFrame) -> dict[str, Floats]:
    """What has a value for every token, [A] each; NaN where one has none.

    ``reference`` and ``fix`` are differences to the rollout side, as delta is.
    """

    def column(name: str) -> Floats | None:
        if name not in tokens or tokens[name].isna().all():
            return None
        return tokens[name].to_numpy(np.float64)

    left = tokens["rollout_logprob"].to_numpy(np.float64)
    values: dict[str, Floats | None] = {
        "delta": tokens["delta"].to_numpy(np.float64),
        "left": -left,
        "entropy": column("entropy"),
        "margin": column("routing_margin"),
    }
    for name in ("reference", "fix"):
        other = column(f"{name}_logprob")
        values[name] = None if other is None else other - left
    return {name: array for name, array in values.items() if array is not None}


def _scale(name: str, values: Floats, fine: bool) -> Floats:
    """What each code stands for; 0 is nearly 0. Of a signed scale the second half is negative."""
    low = SMALLEST[name]
    finite = np.abs(values[np.isfinite(values)])
    high = max(float(finite.max(initial=0.0)), 10 * low)
    if name in SIGNED:
        half = np.concatenate(
            [[0.0], np.geomspace(low, high, 127 if fine or name == "delta" else 31)]
        )
        return np.concatenate([half, -half])
    return np.concatenate([[0.0], np.geomspace(low, high, 255 if fine else 63)])


def _codes(values: Floats, scale: Floats) -> Bytes:
    """The nearest code of every value, [A]; NaN is 0."""
    signed = scale[-1] < 0
    levels = scale[: len(scale) // 2] if signed else scale
    size = np.abs(np.nan_to_num(values, nan=0.0))
    steps = len(levels) - 2
    with np.errstate(divide="ignore"):
        place = 1 + steps * np.log(size / levels[1]) / np.log(levels[-1] / levels[1])
    code = np.where(size < levels[1], 0, np.clip(np.rint(place), 1, steps + 1))
    below = len(levels) * (values < 0) * (code > 0) if signed else 0
    return np.asarray(code + below, np.uint8)


def _sequences(tokens: pd.DataFrame) -> dict[str, list[Any]]:
    """Of each sequence: its number, how many tokens, prompt, sample and reward."""
    groups = tokens.groupby("sequence", sort=False)
    found: dict[str, list[Any]] = {"lengths": groups.size().tolist()}
    for name, column in (("numbers", "sequence"), ("prompts", "prompt"), ("samples", "sample"),
                         ("rewards", "reward"), ("starts", "position")):  # fmt: skip
        if column in tokens:
            first = groups[column].first()
            found[name] = [None if value != value else value for value in first.tolist()]
    return found


def _turns(tokens: pd.DataFrame) -> tuple[list[int], Bytes]:
    """Turns of the run, and which of them each token is in, [A]; the 256th and later are one."""
    if "turn" not in tokens:
        return [], np.zeros(len(tokens), np.uint8)
    turns, place = np.unique(tokens["turn"].to_numpy(np.int64), return_inverse=True)
    return turns[:256].tolist(), np.minimum(place, 255).astype(np.uint8)


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
        texts, which = _factorized(tokens["token"])
        classes, kind = [""], np.zeros(len(tokens), np.int64)
        if "token_class" in tokens:
            classes, kind = _factorized(tokens["token_class"])
        pairs, word = np.unique(which * len(classes) + kind, return_inverse=True)
        order = np.argsort(-np.bincount(word), kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        self._word = rank[word]
        self._texts = [texts[pair // len(classes)] for pair in pairs[order]]
        self._class_of = [classes[pair % len(classes)] for pair in pairs[order]]
        self._index = {text: i for i, text in enumerate(self._texts)}

    def number(self, text: str) -> int:
        """Of a text, which is added where it is new."""
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
        """What stands before which token: contexts are numbered, ``of`` has one for each row."""
        lists = flat_lists(tokens, "context")
        if lists is None:
            return {"at": [], "of": [], "texts": [], "lengths": []}
        values, offsets = lists
        at = np.flatnonzero(np.diff(offsets))
        known: dict[tuple[str, ...], int] = {}
        each = max(16, CONTEXT // max(1, len(at)))
        of = [
            known.setdefault(tuple(values[offsets[row] : offsets[row + 1]]), len(known))
            for row in at
        ]
        return {
            "at": at.tolist(),
            "of": of,
            "texts": [[self.number(str(text)) for text in texts[-each:]] for texts in known],
            "lengths": [len(texts) for texts in known],
        }


def shown(text: str) -> str:
    """A token as a page holds it: harmless, and never longer than a line."""
    return visible(text) if len(text) <= LONGEST else visible(text[: LONGEST - 1]) + "…"


def _factorized(column: pd.Series[Any]) -> tuple[list[str], Ints]:
    """Its texts, each once, and which of them stands in every row, [A]."""
    import pandas as pd

    which, texts = pd.factorize(column.to_numpy(object))
    return [str(text) for text in texts], np.asarray(which, np.int64)


def _tops_of_worst(tokens: pd.DataFrame) -> tuple[int, int]:
    """How many tokens of largest |delta| there are, and how many have their likeliest outcomes."""
    worst = _worst(tokens["delta"].abs().to_numpy())
    ids = flat_lists(tokens, "top_ids")
    return len(worst), 0 if ids is None else int(np.count_nonzero(np.diff(ids[1])[worst]))


def _worst(size: Floats) -> Ints:
    """Rows of the largest |delta|, at most EXACT."""
    return np.asarray(np.argsort(-size, kind="stable")[:EXACT], np.int64)


def _exact(tokens: pd.DataFrame, values: dict[str, Floats], words: _Words) -> dict[str, Any]:
    """The worst tokens and those with both sides' likeliest outcomes, as they were measured."""
    size = np.abs(values["delta"])
    worst = _worst(size)
    ids = flat_lists(tokens, "top_ids")
    tops = np.flatnonzero(np.diff(ids[1])) if ids is not None else np.zeros(0, np.int64)
    others = np.setdiff1d(tops, worst)
    others = others[np.argsort(-size[others], kind="stable")][:EXACT]
    tops = np.union1d(np.intersect1d(tops, worst), others)
    rows = np.union1d(worst, tops)
    found: dict[str, Any] = {"at": rows.tolist()}
    for name, array in values.items():
        found[name] = [None if x != x else float(f"{x:.7g}") for x in array[rows].tolist()]
    if ids is None:
        return found
    columns = [flat_lists(tokens, f"top_{name}") for name in ("tokens", "rollout", "train")]
    found["top"] = {}
    for row in tops.tolist():
        texts, left, right = (
            column[0][ids[1][row] : ids[1][row + 1]].tolist() for column in columns if column
        )
        bounds = [_bound(side) for side in (left, right)]
        found["top"][row] = [
            [words.number(str(text)), *map(_outcome, pair, bounds)]
            for text, *pair in zip(texts, left, right, strict=True)
        ]
    return found


def _bound(side: list[float]) -> float:
    """What is above everything that a side did not name: the last of its likeliest."""
    named = sorted((x for x in side if not np.isnan(x)), reverse=True)
    return named[min(LIKELIEST, len(named)) - 1] if named else 0.0


def _outcome(logprob: float, bound: float) -> float | None:
    """As explorer.js reads it: null is p = 0, and what is only known to be below ``bound`` (the
    least likely of those that the side named) is 1 - bound, which no log-probability is."""
    if np.isnan(logprob):
        return round(1 - bound, 5) if np.isfinite(bound) else None
    return round(logprob, 5) if np.isfinite(logprob) else None
