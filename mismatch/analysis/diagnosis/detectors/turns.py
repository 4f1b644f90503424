"""Faults that later turns have and the first has not: shifts, masks, another context.

A response of a later turn follows an observation. A list that counts observations on one
side alone moves what follows, a mask that is off lets tokens count that nobody sampled, and text
that was encoded again, or a stale cache, gives the two sides other contexts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, Repair, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look, paired_anew
from mismatch.analysis.diagnosis.detectors.position import JUMP, change, size
from mismatch.analysis.diagnosis.legs import imbalance, legs_of
from mismatch.types import CACHED, Bools, Floats, Ints, NotTested

HITS = "turns from the prefix cache against others"
CONTEXT = "another context from a turn on"
ONE_TURN = "every sequence has one turn"
MAX_SHIFT = 256  # tokens of observations that a list may be off by
LEAST = 6  # tokens of a turn that moved
NEAR = 0.05  # nats, within which two log-probabilities are the same token's
OPEN = -0.05  # a log-probability below it says which token it belongs to
FITS = 0.6  # share of a turn's open tokens that have to fit elsewhere
CLEAR = 0.3  # share of the mismatch that a shift must remove
FEW = 3  # turns, or tokens
MOST = 0.95  # share of the turns that have to be alike
MOST_TRIED = 1000  # turns that are compared with other places
STRETCH = 4  # tokens, over whose mean a stretch is judged
UNLIKELY = -2.0  # nats of log p + entropy, on average over a stretch that nobody sampled
SURPLUS = 0.05  # nats below 0 of mean log p + entropy, from which a mask is suspected
ARMS = 1.5  # of its 95 % interval, by which it lies below 0: in 1,600 clean blocks 1.2 at most
OF_ROUNDING = 3.0  # times mean |delta|, by which it may move the mean below
MIN_TOKENS = 100  # whose distribution is looked at
# Tokens of the turns before, and of those that are off. Of 120 clean pairs drawn with 200 tokens
# before and 20 to 100 after, none was named; of 12 with another context 10 were at 60, 4 at 40.
LATER = 60


def several(case: Case) -> bool:
    """Return whether tokens of more than one turn are left."""
    return len(np.unique(case.turn[case.kept])) > 1


# ---------------------------------------------------------------- what was not sampled


def unsampled(case: Case) -> Look | NotTested:
    """Tokens that count as sampled and were not: what follows an end token inside a turn, and
    stretches that neither side would have sampled; and end tokens that do not count, where turns
    begin with the template's last token.

    For sampled tokens mean(log p + entropy) is 0; a tool's output lies far below.
    """
    after, stretches, early = _after_an_end(case), _stretches(case), _starts_early(case)
    bad = after | stretches | early
    evidence: tuple[Evidence, ...] = (
        Evidence("tokens that count behind an end token, inside a turn", int(after.sum()), "0"),
        Evidence("tokens that neither side sampled, in stretches", int(stretches.sum()), "0"),
        Evidence("turns that count from a token too early", int(early.sum()), "0"),
    )
    if bad.sum() < FEW:
        return Look(evidence)
    effect = case.share(np.where(bad, 0.0, case.delta))
    alike = () if after.any() else ("sampling-law", "appended-eos")
    finding = Finding("action-mask", "either", effect, evidence, confirmed=bool(after.any()),
                      alike=alike, repair=Repair(case.left, case.right, ~bad))  # fmt: skip
    return Look(evidence, (finding,))


def _ends(case: Case, ids: Ints) -> Bools:
    """Which of these ids end a response; none where the engine does not say."""
    return np.isin(ids, list(case.engine.fingerprint.get("stop_token_ids") or ()))


def _runs(case: Case) -> Ints:
    """First action token of every run of the mask."""
    return np.flatnonzero((np.diff(case.rollout.actions, prepend=-2) != 1) | (case.index == 0))


def _after_an_end(case: Case) -> Bools:
    """Return [A] tokens of a run of the mask behind a sampled end token of the same run."""
    ends = _ends(case, case.rollout.token_ids[case.rollout.actions]).astype(np.int64)
    before, starts = np.cumsum(ends) - ends, _runs(case)  # end tokens before each token
    return np.asarray(before > np.repeat(before[starts], np.diff(starts, append=len(before))))


def _starts_early(case: Case) -> Bools:
    """Return [A] first tokens of runs whose end token follows and does not count, if nearly all are
    so and begin with the same token: a mask that is shifted to the left."""
    rollout, early = case.rollout, np.zeros(len(case.left), bool)
    starts = _runs(case)
    last = rollout.actions[np.append(starts[1:], len(early)) - 1]
    behind = np.minimum(last + 1, len(rollout.token_ids) - 1)
    inside = rollout.sequence_of_token[behind] == rollout.sequence_of_token[last]
    missed = inside & _ends(case, rollout.token_ids[behind]) & ~rollout.action_mask[behind]
    ended = missed | _ends(case, rollout.token_ids[last])
    first = rollout.token_ids[rollout.actions[starts]][missed]
    same = np.unique(first, return_counts=True)[1].max(initial=0)
    if missed.sum() >= max(FEW, MOST * ended.sum()) and same >= MOST * len(first):
        early[starts[missed]] = True
    return early


def _stretches(case: Case) -> Bools:
    """Return [A] tokens of stretches far below what was sampled; none if entropy explains them."""
    none = np.zeros(len(case.left), bool)
    entropy = case.entropy
    if entropy is None or case.kept.sum() < MIN_TOKENS:
        return none
    surplus = np.maximum(case.left, case.right) + entropy
    whole = case.mean(surplus)
    bound = max(SURPLUS, OF_ROUNDING * float(np.abs(case.delta[case.kept]).mean()))
    if whole.high is None or whole.value > -bound:
        return none
    if whole.value + ARMS * (whole.high - whole.value) > 0:
        return none
    bad, cut = none.copy(), np.maximum(surplus, 2 * UNLIKELY)  # a token or two make no stretch
    for row in case.rows:
        if row.stop - row.start >= STRETCH:
            low = np.convolve(cut[row], np.full(STRETCH, 1 / STRETCH), "valid") < UNLIKELY
            bad[row] = np.convolve(low, np.ones(STRETCH))[: row.stop - row.start] > 0
    carried = float(-surplus[bad].sum()) / max(float(-surplus.sum()), 1e-9)
    return bad if carried > 0.5 else none


# ---------------------------------------------------------------- shifted from a turn on


def shifted(case: Case) -> Look | NotTested:
    """Look for turns whose numbers fit the other side some tokens away, and the first do not."""
    if not several(case):
        return NotTested("shifts from a turn on", ONE_TURN)
    right, kept = case.right.copy(), np.ones(len(case.right), bool)
    shifts: list[tuple[int, int]] = []
    tried = 0
    for turn, inside, row in _turns(case):
        if turn == 1 or not _apart(case.left[inside], case.right[inside]):
            continue
        tried += 1
        best = _best_shift(case.left, case.right, inside, row) if tried <= MOST_TRIED else None
        if best is None:
            kept[inside] = tried <= MOST_TRIED
            continue
        shift, fits = best
        shifts.append((turn, shift))
        right[inside.start + fits] = case.right[inside.start + fits + shift]
        kept[inside] = False
        kept[inside.start + fits] = True
    evidence: tuple[Evidence, ...] = (
        Evidence("later turns that fit some tokens away", len(shifts), "0"),
    )
    if len(shifts) < FEW:
        return Look(evidence)
    values, counts = np.unique([shift for _, shift in shifts], return_counts=True)
    evidence += (
        Evidence("first of these turns", min(turn for turn, _ in shifts)),
        Evidence("tokens that they are off by, mostly", int(values[counts.argmax()])),
    )
    return paired_anew(case, right, kept, evidence, "misalignment", "action-mask", "retokenisation",
                       least=CLEAR)  # fmt: skip


def _turns(case: Case) -> list[tuple[int, slice, slice]]:
    """(turn, its action tokens, its sequence's action tokens) of all turns."""
    moved = (np.diff(case.sequence) != 0) | (np.diff(case.turn) != 0)
    starts = np.flatnonzero(np.concatenate([[True], moved]))
    ends = np.append(starts[1:], len(case.turn))
    rows = np.searchsorted([row.stop for row in case.rows], starts, "right")
    return [(int(case.turn[a]), slice(int(a), int(b)), case.rows[row])
            for a, b, row in zip(starts, ends, rows, strict=True)]  # fmt: skip


def _apart(left: Floats, right: Floats) -> bool:
    """Whether few of a turn's tokens have the same log-probability on both sides."""
    telling = left < OPEN
    return bool(telling.sum() >= LEAST and _fit(left, right)[telling].mean() < FITS / 2)


def _best_shift(left: Floats, right: Floats, turn: slice, row: slice) -> tuple[int, Ints] | None:
    """(shift, tokens that fit there) of a turn that fits right[t + shift]; None: it does not."""
    here = left[turn]
    telling = here < OPEN
    best: tuple[int, int, Ints] | None = None
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        low = max(turn.start + shift, row.start) - shift - turn.start
        high = min(turn.stop + shift, row.stop) - shift - turn.start
        if shift == 0 or high - low < LEAST:
            continue
        a = turn.start + shift
        fits = np.flatnonzero(_fit(here[low:high], right[a + low : a + high])) + low
        count = int(telling[fits].sum())
        if best is None or count > best[0]:
            best = count, shift, fits
    if best is None or best[0] < max(LEAST, FITS * telling.sum()):
        return None
    return best[1], best[2]


def _fit(left: Floats, right: Floats) -> Bools:
    return np.asarray(np.abs(left - right) < NEAR + NEAR * np.abs(left))


# ---------------------------------------------------------------- another context


def context(case: Case) -> Look | NotTested:
    """Look for the turn from which |delta| is larger, if the turns before are calm and no position
    tells it better."""
    if not several(case):
        return NotTested(CONTEXT, ONE_TURN)
    u = size(case)
    counts = np.bincount(case.turn[case.kept])
    later_counts = counts.sum() - np.cumsum(counts)  # behind each turn
    judged = [
        turn
        for turn in range(2, len(counts))
        if min(later_counts[turn - 1], counts.sum() - later_counts[turn - 1]) >= LATER
    ]
    if not judged:
        has = f"there are {later_counts[1]} and {counts[1]}"
        return NotTested(CONTEXT, f"needs {LATER} tokens of later turns and of first turns, {has}")
    gains = {turn: _gain(case, u, case.turn >= turn) for turn in judged}
    turn = max(gains, key=lambda each: gains[each])
    later = case.turn >= turn
    before, after = (
        float(u[part & case.kept].mean()) if (part & case.kept).any() else 0.0
        for part in (~later, later)
    )
    evidence: tuple[Evidence, ...] = (
        Evidence("turn that differs most from those before", turn),
        Evidence("|delta| from it on over before", after / max(before, 1e-9), "1"),
    )
    rise = case.ratio(np.where(later, u, 0.0), np.where(later, before, 0.0) + 1e-12)
    place = change(case, u, case.position)
    placed = place is not None and _gain(case, u, case.position >= place.at) > gains[turn]
    off = None if placed or not above(rise, JUMP) else _off(case, later, ~later, before / after)
    if off is None:
        return Look(evidence)
    side = off.side
    cause = "prefix-cache-stale" if side == "engine" and _cached(case, later) else "turn-context"
    alike = ["turn-context", "template-drift", "retokenisation", "misalignment"]
    alike += [] if side == "trainer" else ["prefix-cache-stale"]
    others = tuple(each for each in alike if each != cause)
    return Look(evidence, (replace(off, cause=cause, evidence=evidence, alike=others),))


def _cached(case: Case, later: Bools) -> bool:
    """Whether the engine read the context of most of these tokens from its prefix cache.

    Where it does not say what it read: whether it has one.
    """
    read = case.engine.extra.get(CACHED)
    if read is None:
        return bool(case.engine.fingerprint.get("prefix_caching"))
    return bool((read[later & case.kept] > 0).mean() > 0.5)


def cache_hits(case: Case) -> Look | NotTested:
    """Compare turns whose context came from the prefix cache with computed turns: both among
    the later turns, or both among the first turns, so that no turn is taken for a cache."""
    read = case.engine.extra.get(CACHED)
    if read is None:
        return NotTested(HITS, "the engine does not say what it read from its prefix cache")
    for turns in (case.turn > 1, case.turn == 1):
        hit, cold = (turns & case.kept & part for part in (read > 0, read == 0))
        if min(hit.sum(), cold.sum()) >= LATER:
            break
    else:
        return NotTested(HITS, f"needs {LATER} tokens of turns that were read from the prefix "
                         "cache, and as many of turns that were computed")  # fmt: skip
    u = size(case)
    calm = float(u[cold].mean())
    rise = case.ratio(np.where(hit, u, 0.0), np.where(hit, calm, 0.0) + 1e-12)
    evidence = (Evidence("|delta| of turns read from the cache over others", rise.value, "1"),)
    off = _off(case, hit, cold, 1 / rise.value) if above(rise, JUMP) else None
    if off is None or off.side == "trainer":
        return Look(evidence)
    alike = ("decode-vs-prefill", "turn-context")
    return Look(evidence, (replace(off, evidence=evidence, alike=alike),))


def _gain(case: Case, u: Floats, later: Bools) -> float:
    """How far a split of the tokens in two raises the mean of the second part, in its spread."""
    kept = case.kept
    n, whole = float((~later & kept).sum()), float(kept.sum())
    if n in (0.0, whole):
        return -np.inf
    total, first = float(u[kept].sum()), float(u[~later & kept].sum())
    return (total * n / whole - first) / float(np.sqrt(n * (whole - n) / whole))


def _off(case: Case, later: Bools, calm: Bools, scale: float) -> Finding | None:
    """Return what differs in some tokens; None where rounding does, or in the calm tokens as well.

    The side that is far from float32 there is replaced by it; where neither is, delta is scaled.
    """
    if not case.beyond_rounding(later):
        return None
    if case.reference is not None and case.beyond_rounding(calm):
        return None  # what begins here leaves nothing in the others
    side: Side = "either"
    repair = Repair(case.left, case.left + np.where(later, case.delta * scale, case.delta),
                    exact=False)  # fmt: skip
    legs = legs_of(case)
    if legs is not None and imbalance(case, later) >= 1.5:
        engine, trainer = (float(np.abs(leg[later & case.kept]).mean()) for leg in legs[:2])
        side = "engine" if engine > trainer else "trainer"
        exact = case.by_float32(side)
        repair = Repair(np.where(later, exact.left, case.left),
                        np.where(later, exact.right, case.right))  # fmt: skip
    effect = case.gone(repair)
    found = Finding("prefix-cache-stale", side, effect, (), repair=repair)
    return found if above(effect, 0.2) else None


DETECTORS = (
    Detector("unsampled", "pairing", ("action-mask",), unsampled, order=9),
    Detector("turn-shift", "pairing", ("misalignment",), shifted, order=11),
    Detector("cache-hits", "engine", ("prefix-cache-stale",), cache_hits, order=22,
             needs="an engine that says what it read from its prefix cache"),
    Detector("by-turn", "position", ("turn-context", "prefix-cache-stale"), context, order=23),
)  # fmt: skip
