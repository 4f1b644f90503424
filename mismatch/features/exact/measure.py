"""Compare the scorings of a run by their bits; numpy alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch.analysis.diagnosis.loaded_weights import Difference
from mismatch.analysis.plugins import RunArtefacts
from mismatch.facts import replay_of, was_read
from mismatch.features.exact.excluded import Stack, excluded
from mismatch.features.exact.results import Exactness, Pair, Place, Scope
from mismatch.keys import (
    ALONE,
    GRAD,
    REGROUPED,
    REPEATED,
    TRAIN,
    TRAINER_FLOAT32,
    Key,
)
from mismatch.metrics.registry import Array
from mismatch.specs import CheckSpec
from mismatch.types import Ints, Rollout, Routing, Scoring

# Passes of the trainer that repeat its first, in words.
ITSELF = {
    REPEATED: "trainer: repeated",
    REGROUPED: "trainer: regrouped",
    ALONE: "trainer: alone",
    GRAD: "trainer: gradients on",
}


def measure(run: RunArtefacts, spec: CheckSpec) -> Exactness:
    """Return every pair of scorings that should be equal, then routes, distributions, weights."""
    found = excluded(Stack.ran(spec, run.decode.fingerprint))
    return Exactness(tuple(scorings(run)), tuple(others(run)), found)


def scorings(run: RunArtefacts) -> Iterator[Pair]:
    """Yield pairs of log-probabilities, the headline first."""
    decode, train, usable = run.decode, run.train, run.usable
    engine = decode.key.side
    prefill = usable.get(Key.of(engine, "prefill"))
    # Two scorings that a user chose may be of one side.
    own = decode.fingerprint.get("mode") == "decode" and train.fingerprint.get("mode") == "train"
    what = "engine / trainer" if own else f"{decode.name} / {train.name}"
    yield logprobs(run.rollout, what, decode, train, "sides")
    if prefill is not None and prefill.name != decode.name:
        yield logprobs(run.rollout, "engine's prefill / trainer", prefill, train, "sides")
        yield logprobs(run.rollout, "engine: decode / prefill", decode, prefill, "one side")
    for name, words in ITSELF.items():
        if name in usable and train.name == TRAIN:
            yield logprobs(run.rollout, words, train, usable[name], "one side")
    exact, trained = usable.get(Key.of(engine, precision="fp32")), usable.get(TRAINER_FLOAT32)
    if exact is not None and trained is not None:
        yield logprobs(run.rollout, "both in float32", exact, trained, "further")
    for added in usable.values():  # by `mismatch score --name`
        named = added.name not in (decode.name, train.name) and added.key.side != TRAIN
        if named and added.fingerprint.get("mode") == "train":
            yield logprobs(run.rollout, f"engine / {added.name}", decode, added, "further")


def logprobs(rollout: Rollout, what: str, left: Scoring, right: Scoring, scope: Scope) -> Pair:
    """Compare two scorings token by token.

    In float32, where both sides' numbers are of it; a server may send others.
    """
    a, b = left.logprobs, right.logprobs
    single = all((each == each.astype(np.float32)).all() for each in (a, b))
    apart = ulps(a.astype(np.float32), b.astype(np.float32)) if single else ulps(a, b)
    unequal = np.flatnonzero(a != b)
    return Pair(
        what=what,
        left=left.name,
        right=right.name,
        scope=scope,
        unit="token",
        n=len(a),
        unequal=len(unequal),
        ulps=int(apart.max(initial=0)),
        dtype="float32" if single else "float64",
        first=place(rollout, int(unequal[0])) if len(unequal) else None,
        constructed=constructed(left, right),
    )


def ulps(left: Array, right: Array) -> Ints:
    """Return the distances of floats of one dtype in units in the last place.

    Floats of one sign are ordered as their bits are, so that neighbours differ by 1.

    >>> one = np.float32([1.0, 0.0, -1.0])
    >>> ulps(one, np.nextafter(one, np.float32(2))).tolist()
    [1, 1, 1]
    """
    width = left.dtype.itemsize

    def ordered(values: Array) -> Ints:
        bits = np.ascontiguousarray(values).view(f"i{width}").astype(np.int64)
        return np.where(bits < 0, -(2 ** (8 * width - 1)) - bits, bits)

    apart: Ints = np.abs(ordered(left) - ordered(right))
    return apart


def place(rollout: Rollout, action: int) -> Place:
    """Return where an action token is, from its index among the A."""
    row = int(rollout.actions[action])
    sequence = int(rollout.sequence_of_token[row])
    return Place(
        prompt=int(rollout.prompt_index[sequence]),
        sequence=sequence,
        position=row - int(rollout.offsets[sequence]),
        token=int(rollout.token_ids[row]),
    )


def constructed(left: Scoring, right: Scoring) -> str:
    """Return why equal numbers of two scorings prove nothing; "": both were computed here.

    Numbers that were read from a file may have been copied from the other side's.
    """
    if left.name == right.name:
        return "one scoring, twice"
    if was_read(right.fingerprint):
        return f"{right.name} comes from a file or a function: it may be a copy of {left.name}"
    return ""


# ---------------------------------------------------------------- routes, distributions, weights


def others(run: RunArtefacts) -> Iterator[Pair]:
    """Yield what else both sides gave: experts, whole distributions, weights."""
    left, right = run.decode, run.train
    if left.routing is not None and right.routing is not None:
        yield from routes(run.rollout, left, right, left.routing, right.routing)
    if left.distributions is not None and right.distributions is not None:
        a, b = left.distributions, right.distributions
        values = [a.logprobs, b.logprobs]
        if a.rest is not None and b.rest is not None:
            rests = a.rest, b.rest
            values = [np.column_stack(each) for each in zip(values, rests, strict=True)]
        if np.array_equal(a.positions, b.positions) and values[0].shape == values[1].shape:
            finite = [np.where(np.isfinite(each), each, np.float32(-3e38)) for each in values]
            apart = ulps(*(each.astype(np.float32) for each in finite))
            off = np.flatnonzero(apart.any(axis=1))
            first = place(run.rollout, int(a.positions[off[0]])) if len(off) else None
            yield Pair(
                "distributions", left.name, right.name, "sides", "position", len(apart), len(off),
                int(apart.max(initial=0)), "float32", first, constructed(left, right),
            )  # fmt: skip
    found = Difference.between(left.fingerprint, right.fingerprint)
    if found is not None and found.common:
        reason = ""
        if not left.fingerprint.get("weights_in_memory"):
            reason = "the engine's weights were digested as they were read, not as it holds them"
        yield Pair(
            "weights", left.name, right.name, "sides", "parameter", len(found.common),
            len(found.differ), constructed=reason,
        )  # fmt: skip


def routes(
    rollout: Rollout, left: Scoring, right: Scoring, ours: Routing, theirs: Routing
) -> Iterator[Pair]:
    """Compare the experts of the forward passes that predicted the tokens, then their weights.

    Experts of a token are a set: sides list them in different orders.
    """
    layers = [layer for layer in ours.layers if layer in theirs.layers]
    rows = rollout.actions - 1
    if not layers or ours.top_k != theirs.top_k:
        return
    picked = []
    for routing in (ours, theirs):
        at = np.ix_(rows, np.array([routing.layers.index(layer) for layer in layers]))
        ids = routing.ids[at].astype(np.int64)
        order = np.argsort(ids, axis=2, kind="stable")
        weights = None if routing.weights is None else routing.weights[at]
        weights = None if weights is None else np.take_along_axis(weights, order, 2)
        picked.append((np.take_along_axis(ids, order, 2), weights))
    (a, own), (b, other) = picked
    replayed = replay_of(right.fingerprint)
    reason = f"replayed: {replayed}" if replayed else constructed(left, right)
    differ = (a != b).any(axis=2)
    off = np.flatnonzero(differ.any(axis=1))
    first = place(rollout, int(off[0])) if len(off) else None
    yield Pair(
        "experts chosen", left.name, right.name, "sides", "choice", differ.size,
        int(differ.sum()), first=first, constructed=reason,
    )  # fmt: skip
    if own is None or other is None:
        return
    apart = ulps(own.astype(np.float32), other.astype(np.float32))
    wrong = apart.any(axis=2) | differ
    off = np.flatnonzero(wrong.any(axis=1))
    first = place(rollout, int(off[0])) if len(off) else None
    yield Pair(
        "experts' weights", left.name, right.name, "sides", "choice", differ.size,
        int(wrong.sum()), int(apart[~differ].max(initial=0)), "float32", first, reason,
    )  # fmt: skip
