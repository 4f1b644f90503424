"""Where and when two scorings differ: tables by position, turn, kind of token, length, boundary.

Every table is columns of equal length, and buckets without tokens are left out. ``mean_abs_delta``
and ``mean_delta`` are in nats, ``k3_share`` is the share of the whole k3 that the bucket's tokens
carry (None where it is 0 or too large for a number), ``count`` counts action tokens. Routing has
separate tables (:mod:`mismatch.analysis.routing_tables`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mismatch.facts import known
from mismatch.metrics.registry import floats
from mismatch.metrics.token import exp_minus_linear
from mismatch.types import CACHED, Bools, Floats, Ints, Pair, Rollout, Scoring, SideFacts

TOKEN_CLASSES = ("special", "whitespace", "digit", "word", "other", "unknown")
_SPECIAL = re.compile(r"<[|｜].*[|｜]>|</?s>|<(pad|unk|bos|eos|mask)>|\[(CLS|SEP|PAD|UNK|MASK)\]")


def special_ids(facts: SideFacts) -> set[int]:
    """Return ids that the engine says are special: its stop tokens and the BOS."""
    ids = [*(facts.get("stop_token_ids") or ()), facts.get("bos_token_id")]
    return {int(token) for token in ids if token is not None}


def token_class(text: str | None, special: bool = False) -> str:
    """Return special, whitespace, digit (no letter), word (a letter), punctuation or unknown.

    >>> [token_class(text) for text in (" the", "12", "\\n", "<|end|>", ").", None)]
    ['word', 'digit', 'whitespace', 'special', 'other', 'unknown']
    """
    if special or (text is not None and _SPECIAL.fullmatch(text.strip())):
        return "special"
    if not text:
        return "unknown"
    if text.isspace():
        return "whitespace"
    if any(character.isalpha() for character in text):
        return "word"
    return "digit" if any(character.isdigit() for character in text) else "other"


Table = dict[str, list[Any]]
POSITION_BUCKETS = 32
PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 4.0, math.inf)  # nats
TOP_TOKENS = 20
CONTEXT = 12  # tokens of text on either side
KV_BLOCKS = (16, 32)  # what vLLM and SGLang use by default, where the engine does not say


@dataclass(frozen=True, slots=True)
class Places:
    """What every table groups: one entry per action token, [A].

    Attributes:
        delta: train - rollout, nats.
        size: |delta|.
        k3: the token's term of k3.
        rank: place among the sequence's action tokens, from 0.
        index: place in the sequence, prompt included, from 0.
    """

    delta: Floats
    size: Floats
    k3: Floats
    sequence: Ints
    rank: Ints
    index: Ints
    turn: Ints
    token_id: Ints

    @classmethod
    def of(cls, rollout: Rollout, pair: Pair) -> Places:
        actions = rollout.actions
        with np.errstate(over="ignore"):
            k3 = exp_minus_linear(pair.delta)
        # Action tokens lie in order of sequence, so a token's rank is its distance from the first.
        lengths = np.bincount(pair.sequence)
        rank = np.arange(len(actions)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(
            delta=pair.delta,
            size=np.abs(pair.delta),
            k3=k3,
            sequence=pair.sequence,
            rank=rank,
            index=actions - rollout.offsets[pair.sequence],
            turn=rollout.turn[actions],
            token_id=rollout.token_ids[actions],
        )

    def chosen(self, chosen: Bools) -> Places:
        """Return some of the tokens."""
        return Places(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def grouped(self, bucket: Ints) -> tuple[Ints, Table]:
        """Return the buckets that hold tokens, in ascending order, and the four columns."""
        count = np.bincount(bucket)
        present = np.flatnonzero(count)
        means = [
            (np.bincount(bucket, weights=values)[present] / count[present]).tolist()
            for values in (self.size, self.delta)
        ]
        return present, {
            "mean_abs_delta": means[0],
            "mean_delta": means[1],
            "k3_share": _shares(floats(np.bincount(bucket, weights=self.k3))[present], self.k3),
            "count": count[present].tolist(),
        }


def _shares(parts: Floats, whole: Floats) -> list[float | None]:
    total = float(whole.sum())
    if not 0.0 < total < math.inf:
        return [None] * len(parts)
    return [float(part) / total for part in parts]


def breakdowns(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    pair: Pair,
    texts: Mapping[int, str] | None = None,
    disagree: Floats | None = None,
) -> dict[str, Table]:
    """Return all tables that the data allow.

    Args:
        disagree: [A] share of MoE layers whose experts differ, for a column along the response.
        texts: id -> text of the rollout's tokens; without it no classes of tokens, and the tokens
            that carry most are named by their ids.
    """
    places = Places.of(rollout, pair)
    texts = texts or {}
    tables = {
        "by_position": by_position(places, places.rank),
        "by_absolute_position": by_position(places, places.index),
        "by_turn": by_turn(places),
        "by_edge": by_edge(places),
        "by_cache": by_cache(places, left.extra.get(CACHED)),
        "by_probability": by_value(places, np.exp(pair.rollout), PROBABILITY_EDGES),
        "by_length": by_length(places),
        "by_block": by_block(places, left.fingerprint, right.fingerprint),
        "top_tokens": top_tokens(rollout, places, pair, texts),
    }
    if disagree is not None:
        bucket = places.rank // bucket_width(places.rank)
        count = np.bincount(bucket)
        mean = np.bincount(bucket, weights=disagree)[count > 0] / count[count > 0]
        tables["by_position"]["routing_disagree"] = mean.tolist()
    if texts:
        special = special_ids(left.fingerprint)
        tables["by_token_class"] = by_token_class(places, texts, special)
    if right.entropy is not None:
        tables["by_entropy"] = by_value(places, right.entropy.astype(np.float64), ENTROPY_EDGES)
    return {name: table for name, table in tables.items() if len(next(iter(table.values())))}


def bucket_width(position: Ints) -> int:
    """Return the power of two for at most 32 buckets: block boundaries stay bucket boundaries."""
    width = 1
    while position.max() // width >= POSITION_BUCKETS:
        width *= 2
    return width


def by_position(places: Places, position: Ints) -> Table:
    """By a position, in at most 32 equal buckets [start, end)."""
    width = bucket_width(position)
    present, table = places.grouped(position // width)
    edges = {
        "start": [int(bucket) * width for bucket in present],
        "end": [(int(bucket) + 1) * width for bucket in present],
    }
    return edges | table


def by_value(places: Places, values: Floats, edges: Sequence[float]) -> Table:
    """By a value per token, in the buckets [low, high) of ``edges``; the last holds its end."""
    bounds = np.array(edges)
    bucket = np.clip(np.searchsorted(bounds, values, "right") - 1, 0, len(bounds) - 2)
    present, table = places.grouped(bucket)
    high = [float(bounds[i + 1]) for i in present]
    limits: Table = {
        "low": [float(bounds[i]) for i in present],
        "high": [end if math.isfinite(end) else None for end in high],
    }
    return limits | table


def by_turn(places: Places) -> Table:
    """By assistant turn, from 1."""
    present, table = places.grouped(places.turn)
    return {"turn": present.tolist()} | table


def by_edge(places: Places) -> Table:
    """First, inner and last tokens of the turns that the policy wrote; "only": turns of one.

    The first token of a later turn is the one after an observation.
    """
    moved = (np.diff(places.sequence) != 0) | (np.diff(places.turn) != 0)
    first = np.concatenate([[True], moved])
    last = np.concatenate([moved, [True]])
    names = ("first", "after an observation", "inner", "last", "only")
    begins = np.where(places.turn > 1, 1, 0)
    bucket = np.where(first & last, 4, np.where(first, begins, np.where(last, 3, 2)))
    present, table = places.grouped(bucket)
    return {"edge": [names[i] for i in present]} | table


def by_cache(places: Places, cached: Floats | None) -> Table:
    """First and later turns, each by whether their context came from the prefix cache.

    ``mean_cached`` is what was read of it, in tokens, as the mean over the bucket's tokens; tokens
    of which the engine does not say it are left out.

    Args:
        cached: [A] tokens of the context of each token's turn that were read from the cache.
    """
    if cached is None or np.isnan(cached).all():
        return {"turns": []}
    stated = ~np.isnan(cached)
    names = ("first, cold", "first, hit", "later, cold", "later, hit")
    code = np.where(places.turn > 1, 2, 0) + (np.nan_to_num(cached) > 0)
    present, table = places.chosen(stated).grouped(code[stated])
    means = [float(cached[stated & (code == each)].mean()) for each in present]
    table |= {"mean_cached": means}
    return {"turns": [names[i] for i in present]} | table


def by_token_class(places: Places, texts: Mapping[int, str], special: set[int]) -> Table:
    """By what the sampled token is, judged by its text."""
    ids, at = np.unique(places.token_id, return_inverse=True)
    classes = [token_class(texts.get(token), token in special) for token in ids.tolist()]
    code = np.asarray([TOKEN_CLASSES.index(name) for name in classes], np.int64)
    present, table = places.grouped(code[at])
    return {"token_class": [TOKEN_CLASSES[i] for i in present]} | table


def by_length(places: Places) -> Table:
    """By the sequence's number of action tokens, in powers of two [start, end)."""
    lengths = np.bincount(places.sequence)
    exponent = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    present, table = places.grouped(exponent[places.sequence])
    total = np.abs(np.bincount(places.sequence, weights=places.delta))
    groups = [(exponent == power) & (lengths > 0) for power in present]
    return {
        "start": [2 ** int(power) for power in present],
        "end": [2 ** (int(power) + 1) for power in present],
        "sequences": [int(group.sum()) for group in groups],
        "mean_abs_seq_logratio": [float(total[group].mean()) for group in groups],
    } | table


def by_block(places: Places, left: SideFacts, right: SideFacts) -> Table:
    """Return tokens whose forward opens a block (or lies beyond the window) against all others.

    A token at index i is predicted by the forward of row i - 1: row 0 opens nothing. The chunks of
    a prefill start at multiples of the budget only where a request has the batch to itself.
    """
    row = places.index - 1
    names = ("boundary", "size", "at", "at_count", "elsewhere", "elsewhere_count")
    table: Table = {name: [] for name in names}
    for name, size in boundaries(left, right):
        at = row >= size if name == "beyond sliding window" else (row % size == 0) & (row > 0)
        if at.any() and not at.all():
            parts = (places.size[at], places.size[~at])
            means = [entry for part in parts for entry in (float(part.mean()), len(part))]
            for column, entry in zip(table.values(), (name, size, *means), strict=True):
                column.append(entry)
    return table


def boundaries(left: SideFacts, right: SideFacts) -> list[tuple[str, int]]:
    """Return the boundaries that both sides' facts name, each with its size in tokens."""
    facts = right | known(left)
    block = facts.get("block_size")
    blocks = map(int, [block] if block else KV_BLOCKS)
    sizes = [("KV block", size) for size in blocks if size > 1]  # SGLang's pages have one token
    if facts.get("chunked_prefill") and (chunk := facts.get("max_num_batched_tokens")):
        sizes.append(("prefill chunk", chunk))
    if window := facts.get("sliding_window"):
        sizes.append(("beyond sliding window", window))
    return sizes


def top_tokens(rollout: Rollout, places: Places, pair: Pair, texts: Mapping[int, str]) -> Table:
    """Return the tokens of the largest terms of k3, with the text around them."""
    most = min(TOP_TOKENS, len(places.k3))
    candidates = np.flatnonzero(places.k3 >= np.partition(places.k3, -most)[-most])  # with ties
    order = candidates[np.argsort(-places.k3[candidates], kind="stable")][:most]
    order = order[places.size[order] > 0]

    def text(ids: Ints) -> str:
        return "".join(texts.get(int(token), f"<{token}>") for token in ids)

    columns = {"sequence": places.sequence, "position": places.index, "turn": places.turn}
    columns |= {"token_id": places.token_id}
    table: Table = {name: values[order].tolist() for name, values in columns.items()}
    table |= {"token": [], "before": [], "after": []}
    for token in order:
        start, end = rollout.offsets[places.sequence[token] : places.sequence[token] + 2]
        at = start + places.index[token]
        table["token"].append(text(rollout.token_ids[at : at + 1]))
        table["before"].append(text(rollout.token_ids[max(start, at - CONTEXT) : at]))
        table["after"].append(text(rollout.token_ids[at + 1 : min(end, at + 1 + CONTEXT)]))
    table["rollout_logprob"] = pair.rollout[order].tolist()
    table["train_logprob"] = pair.train[order].tolist()
    table["delta"] = places.delta[order].tolist()
    return table | {"k3_share": _shares(places.k3[order], places.k3)}
