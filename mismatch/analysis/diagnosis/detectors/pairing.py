"""Do the two sides speak of the same tokens? Shifts, swapped rows, padding that was scored."""

from __future__ import annotations

import numpy as np

from mismatch import keys
from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, Repair, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look, paired_anew
from mismatch.analysis.diagnosis.legs import farther
from mismatch.analysis.diagnosis.twins import Odd, odd_pairs, twins_of
from mismatch.types import Floats, Ints, NotTested

MAX_LAG = 64
MIN_TOKENS = 32
PARTNERS = 0.5  # share of the tokens with a partner, of lags that are tried first
UNLIKE = 0.9  # correlation at lag 0, below which rows are compared at other lags
MARGIN = 0.15  # of correlation, that another lag must win by
HEAD = 32  # tokens by which rows are compared
MIN_HEAD = 6
LOWEST = -12.0  # nats; log-probabilities are clipped to it, and to 0, where rows are compared
BETTER = 0.25  # distance to another row, as a share of that to the own one
CLOSER = 0.5  # of the distance to the own row, where one other row fits as rows do here
ALONE = 0.5  # of the distance to the next best row, that its distance may be
USUAL = 3.0  # times the typical distance of a row to its numbers
SUSPECTS = 512  # rows that are tried against all others
APART = 0.1  # nats of mean |delta|, from which a row is compared with others
CLEAR = 0.5  # share of the mismatch that a shift must remove
ALONE_FIRST = 10.0  # times the others, that first tokens are off where they alone are misplaced
PARTLY = 0.3  # share of the first tokens' difference that other rows in the batch change
FADES = 3.0  # times later tokens, that the second token may be off: what fades is no slice
OTHERS = 0.8  # share of misplaced rows, each of which has another row's place
LEAST = 0.05  # with a re-pairing of rows, each of which fits its new partner
POSITIVE = 1e-3  # nats above 0, that no rounding of a float32 log_softmax reaches
WRITTEN_AS_0 = -1e-4  # nats in float32, below which no side of a lower precision has exactly 0
NEAR_CERTAIN = float(np.log(0.99))
BEST_LAG, AT_BEST, AT_ZERO = "best lag", "correlation there", "correlation at lag 0"
ZEROS, ON_LAST = "log-probabilities of exactly 0", "of these, on a last token"
HALF = float(np.log(0.5))  # of what a cut distribution keeps: two sides may keep one token and two


def lag(case: Case) -> Look | NotTested:
    """Cross-correlation of the two sides inside rows, by FFT, at lags up to ±64."""
    if case.kept.sum() < MIN_TOKENS:
        return NotTested("lag", f"needs {MIN_TOKENS} tokens")
    correlations, partners = _correlations(case)
    at_zero = float(correlations[MAX_LAG])
    elsewhere = _heads_elsewhere(case) if at_zero < UNLIKE else None
    best = int(np.nanargmax(np.where(partners >= PARTNERS, correlations, np.nan))) - MAX_LAG
    if elsewhere is not None:
        best = elsewhere[0]
    elif correlations[best + MAX_LAG] < at_zero + MARGIN:  # perhaps by most of a row
        best = int(np.nanargmax(correlations)) - MAX_LAG
    at_best = float(correlations[best + MAX_LAG])
    evidence: tuple[Evidence, ...] = (
        Evidence(BEST_LAG, best, "0"),
        Evidence(AT_BEST, at_best),
        Evidence(AT_ZERO, at_zero, "> 0.9"),
    )
    if elsewhere is not None:
        evidence += (Evidence("rows whose first tokens fit there alone", elsewhere[1], "0"),)
    elif best == 0 or at_best < at_zero + MARGIN or at_best < 0.5:
        return Look(evidence)
    source = np.arange(len(case.right)) + best
    inside = (source >= 0) & (source < len(case.right))
    source = np.clip(source, 0, len(case.right) - 1)
    kept = inside & (case.sequence[source] == case.sequence)
    right = np.where(kept, case.right[source], case.left)
    least = CLEAR if elsewhere is None else None
    side = odd_pairs(case, twins_of(case)).side
    return paired_anew(case, right, kept, evidence, "misalignment", least=least, side=side)


def _correlations(case: Case) -> tuple[Floats, Floats]:
    """Pearson correlation of left[t] with right[t + lag] over all rows, [2 * MAX_LAG + 1], and the
    share of the tokens that have a partner there.
    """
    left, right = np.clip(case.left, LOWEST, 0.0), np.clip(case.right, LOWEST, 0.0)
    left, right = left - left.mean(), right - right.mean()
    longest = max(row.stop - row.start for row in case.rows)
    size = 1 << int(np.ceil(np.log2(longest + MAX_LAG + 1)))
    lags = np.arange(-MAX_LAG, MAX_LAG + 1)
    sums = np.zeros((6, len(lags)))
    block = max(1, (1 << 20) // size)
    for start in range(0, len(case.rows), block):
        rows = case.rows[start : start + block]
        a, b, here = np.zeros((3, len(rows), size))
        for line, row in enumerate(rows):
            width = row.stop - row.start
            a[line, :width], b[line, :width], here[line, :width] = left[row], right[row], 1.0
        f = {name: np.fft.rfft(value, axis=1) for name, value in
             (("a", a), ("b", b), ("aa", a * a), ("bb", b * b), ("1", here))}  # fmt: skip
        for line, (x, y) in enumerate(
            (("1", "1"), ("a", "1"), ("1", "b"), ("aa", "1"), ("1", "bb"), ("a", "b"))
        ):
            sums[line] += np.fft.irfft((np.conj(f[x]) * f[y]).sum(axis=0), size)[lags]
    n, a1, b1, aa, bb, ab = sums
    with np.errstate(all="ignore"):
        spread = (aa - a1**2 / n) * (bb - b1**2 / n)
        values = (ab - a1 * b1 / n) / np.sqrt(spread)
    values[(n < MIN_TOKENS - 0.5) | ~(spread > 1e-12)] = np.nan
    values[MAX_LAG] = np.nan_to_num(values[MAX_LAG])
    return np.asarray(values), np.asarray(n / n[MAX_LAG])


def _heads_elsewhere(case: Case) -> tuple[int, int] | None:
    """Return a lag at which rows' first tokens fit and none do at 0, and how many rows; None
    if there is none.

    Behind a shift a second fault may spoil most rows, so that no correlation is left: the rows
    that it spares tell the shift, each by its first tokens alone.
    """
    long_enough = [row for row in case.rows if row.stop - row.start >= HEAD // 2][:SUSPECTS]
    heads = np.stack([_heads(v, long_enough, MAX_LAG + HEAD) for v in (case.left, case.right)])
    own = _gaps(heads, 0)[0]
    telling = np.abs(heads[0] - np.nanmean(heads[0], axis=1, keepdims=True))
    telling = np.nanmean(telling, axis=1) > APART  # else any tokens fit
    if not len(own) or (telling & (own <= APART)).any():
        return None
    fits = {}
    for lag in range(-MAX_LAG, MAX_LAG + 1):
        whole, first = _gaps(heads, lag)
        fits[lag] = int((telling & (whole < BETTER * own) & (first < BETTER * own)).sum())
    second, best = sorted(fits, key=lambda lag: fits[lag])[-2:]
    return (best, fits[best]) if fits[best] >= max(2, 2 * fits[second] + 1) else None


def _gaps(heads: Floats, lag: int) -> tuple[Floats, Floats]:
    """Mean |left[t] - right[t + lag]| of each row's first HEAD and MIN_HEAD tokens, [R] each;
    infinite where fewer than half of HEAD have a partner.
    """
    left, right = heads[0, :, max(0, -lag) :], heads[1, :, max(0, lag) :]
    width = min(HEAD, left.shape[1], right.shape[1])
    gap = np.abs(left[:, :width] - right[:, :width])
    count = np.isfinite(gap).sum(axis=1)
    mean = np.nansum(gap, axis=1) / np.maximum(count, 1)
    few = count < HEAD // 2
    return np.where(few, np.inf, mean), np.where(few, np.inf, gap[:, :MIN_HEAD].mean(axis=1))


def rows(case: Case) -> Look | NotTested:
    """Judge whether a row is fit far better by another row's log-probabilities."""
    long_enough = [row for row in case.rows if row.stop - row.start >= MIN_HEAD]
    if len(long_enough) < 4:
        return NotTested("row pairing", f"needs 4 rows of {MIN_HEAD} tokens")
    left, other_heads = (_heads(values, long_enough, HEAD) for values in (case.left, case.right))
    own = _distance(left, other_heads)
    order = np.argsort(-own, kind="stable")
    typical = float(np.median(own))
    tried = [row for row in order[:SUSPECTS] if own[row] > APART]
    partner: dict[int, int] = {}
    alone = 0
    ids = _heads_of_ids(case, long_enough)
    for row in tried:
        distances = _distance(left[row], other_heads)
        # A row that begins with the same tokens, e.g. of a prompt that is replayed, fits anyway.
        distances[(ids[:, :MIN_HEAD] == ids[row, :MIN_HEAD]).all(axis=1)] = np.inf
        best = int(distances.argmin())
        near, lone = _fits(distances, float(own[row]), typical)
        if near:
            partner[int(row)] = best
            alone += lone
    share = len(partner) / len(order)
    evidence = (
        Evidence("rows that another row fits better", len(partner), "0"),
        Evidence("of rows that are far off", len(tried)),
        Evidence("typical distance of a row, nats", typical),
    )
    # Where most tokens are certain, many rows are near to each other.
    if alone < max(2, len(partner) / 2) or (share < 0.02 and len(partner) < 3):
        return Look(evidence)
    distinct = len(set(partner.values()))
    if distinct < OTHERS * len(partner):  # no order of rows gives one of them to several
        return Look(evidence)
    right, kept = case.right.copy(), np.ones(len(case.right), bool)
    for row, other in partner.items():
        span, origin = long_enough[row], long_enough[other]
        length = min(span.stop - span.start, origin.stop - origin.start)
        right[span.start : span.start + length] = case.right[origin.start : origin.start + length]
        kept[span.start + length : span.stop] = False
    repair = Repair(case.left, right, kept)
    effect = case.gone(repair)
    if effect.value < LEAST:  # a few prompts carry it: their rows are certain, no interval is
        return Look(evidence)
    side = odd_pairs(case, twins_of(case)).side
    # Rows that take each other's places are exchanged, however little of the mismatch that is.
    exchanged = len(partner.keys() & partner.values()) >= OTHERS * len(partner)
    sure = exchanged or effect.value >= CLEAR
    finding = Finding("row-pairing", side, effect, evidence, confirmed=sure, repair=repair)
    return Look(evidence, (finding,))


def _fits(distances: Floats, own: float, typical: float) -> tuple[bool, bool]:
    """Whether the nearest of the other rows is this row's own, and whether no other is as near: far
    nearer, or alone as near as rows are to their numbers here (where rounding is large).
    """
    best, second = np.partition(distances, 1)[:2]
    alone = bool(best < ALONE * second)
    usual = alone and best < CLOSER * own and best < USUAL * typical
    return bool(best < BETTER * own or usual), alone


def _heads(values: Floats, rows: list[slice], length: int) -> Floats:
    """Return the first log-probabilities of these rows, [R, length]; NaN behind a row's end."""
    heads = np.full((len(rows), length), np.nan)
    for line, row in enumerate(rows):
        head = np.clip(values[row][:length], LOWEST, 0.0)
        heads[line, : len(head)] = head
    return heads


def _heads_of_ids(case: Case, rows: list[slice]) -> Ints:
    """Return the first token ids of these rows, [R, MIN_HEAD]; each has as many."""
    ids = case.rollout.token_ids[case.rollout.actions]
    return np.stack([ids[row][:MIN_HEAD] for row in rows])


def _distance(left: Floats, right: Floats) -> Floats:
    """Mean |difference| over the tokens that both have; infinite where those are few."""
    gap = np.abs(right - left)
    common = np.isfinite(gap).sum(axis=1)
    return np.where(common >= MIN_HEAD, np.nansum(gap, axis=1) / np.maximum(common, 1), np.inf)


def first_tokens(case: Case) -> Look | NotTested:
    """Look whether the first token of each response is off and nothing behind it.

    A context that differs, or another function, fades over the tokens that follow; a slice that
    begins at another place moves one token.
    """
    turn = case.turn
    begins = (np.diff(case.sequence, prepend=-1) != 0) | (np.diff(turn, prepend=-1) != 0)
    second = np.concatenate([[False], begins[:-1]]) & ~begins & case.kept
    later = ~begins & ~second & case.kept
    begins &= case.kept
    prompts = len(np.unique(case.prompt[begins]))
    if prompts < FEW_PROMPTS or not second.any() or not later.any():
        return NotTested("first tokens of responses", f"needs responses to {FEW_PROMPTS} prompts")
    sizes = [float(np.abs(case.delta[where]).mean()) for where in (begins, second, later)]
    effect = case.share(np.where(begins, 0.0, case.delta))
    evidence = (
        Evidence("mean |delta| of the first token of each response, nats", sizes[0]),
        Evidence("the same of the second token", sizes[1]),
        Evidence("the same of all later tokens", sizes[2]),
        Evidence("share of mean |delta| in first tokens", effect.value),
    )
    alone = sizes[0] > ALONE_FIRST * max(sizes[1:]) and sizes[1] < FADES * sizes[2]
    if not alone or not above(effect, CLEAR) or not case.beyond_rounding(begins):
        return Look(evidence)
    twins = twins_of(case)
    odd = odd_pairs(case, twins)
    other = case.others.get(keys.ALONE)
    moves = other is not None and float(np.abs(other.logprobs - case.right)[begins].mean())
    # What depends on the other rows of a batch is most off where the context is shortest.
    if Odd(odd.engine & twins.same, odd.trainer & twins.same).side != "either" or (
        moves > PARTLY * sizes[0]
    ):
        return Look(evidence)
    parts = begins[twins.first] & ~twins.same
    told = Odd(odd.engine & parts, odd.trainer & parts).side
    side = farther(case, begins) if told == "either" else told
    alike = () if told != "either" else ("template-drift", "position-ids")
    repair = Repair(case.left, case.right, ~begins)
    finding = Finding("first-token", side, effect, evidence, told != "either", alike, repair)
    return Look(evidence, (finding,))


def padding(case: Case) -> Look:
    """Look for log-probabilities of exactly 0 where the other side is not certain."""
    certain = np.full(len(case.right), NEAR_CERTAIN)
    if case.rollout.sampling.truncates:  # cut to one token it is exactly 0
        certain += HALF + np.log(case.trainer.extra.get("kept_mass", np.ones(len(certain))))
    open_ = [case.kept & (case.right < certain), case.kept & (case.left < NEAR_CERTAIN)]
    if case.reference is not None:  # a certain distribution rounds to 0
        open_ = [tokens & (case.reference < WRITTEN_AS_0) for tokens in open_]
    at_left, at_right = open_[0] & (case.left == 0), open_[1] & (case.right == 0)
    bad = at_left | at_right
    last = np.zeros(len(bad), bool)
    last[[row.stop - 1 for row in case.rows]] = True
    evidence = (
        Evidence(ZEROS, int(bad.sum()), "0"),
        Evidence(ON_LAST, int((bad & last).sum())),
    )
    side: Side = "engine" if at_left.sum() >= at_right.sum() else "trainer"
    values, tokens = (case.left, open_[0]) if side == "engine" else (case.right, open_[1])
    near = int(((values < 0) & (values > NEAR_CERTAIN) & tokens).sum())
    # A distribution that is wrongly certain has values near 0 there, more than exact zeros.
    if bad.sum() <= near and (bad & last).sum() <= bad.sum() / 2:
        return Look(evidence)
    first = bad & ~last & (case.index == 0)
    if first.sum() > bad.sum() / 2:  # of the prompt's last token, which its template makes certain
        return Look(evidence)
    effect = case.share(np.where(bad, 0.0, case.delta))
    at_ends = bool((bad & last).sum() > bad.sum() / 2)
    if not at_ends and bad.any() and effect.value < LEAST:  # what the name means is not there
        return Look(evidence)
    repair = Repair(case.left, case.right, ~bad)
    inner = case.turn.max() > 1 and (bad & last).sum() < bad.sum() / 2
    cause = "action-mask" if inner else "appended-eos"
    # Where the other side is wrong about much more, it does not tell who is certain.
    told = case.reference is not None or effect.value >= CLEAR
    side = side if told else "either"
    sure = told and (at_ends or effect.value >= CLEAR)
    finding = Finding(cause, side, effect, evidence, confirmed=sure, repair=repair)
    return Look(evidence, (finding,))


def largest(case: Case) -> tuple[Side, float]:
    """Return the side with the largest log-probability, and that."""
    left, right = float(case.left.max()), float(case.right.max())
    return ("engine", left) if left >= right else ("trainer", right)


def positive(case: Case) -> Look:
    """Look for probabilities above one: that side is not normalised."""
    side, highest = largest(case)
    evidence = (Evidence("largest log-probability", highest, "0"),)
    if highest <= POSITIVE:
        return Look(evidence)
    values = case.left if side == "engine" else case.right
    effect = case.share(np.where(values > POSITIVE, 0.0, case.delta))
    repair = Repair(case.left, case.right, values <= POSITIVE)
    if case.reference is not None:  # its other tokens are of the same distribution
        repair = case.by_float32(side)
        effect = case.gone(repair)
    finding = Finding("unnormalised-law", side, effect, evidence, alike=("bf16-lm-head",),
                      repair=repair)  # fmt: skip
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("first-tokens", "pairing", ("first-token",), first_tokens, order=9),
    Detector("lag", "pairing", ("misalignment",), lag, order=10),
    Detector("rows", "pairing", ("row-pairing",), rows, order=11),
    Detector("padding", "pairing", ("appended-eos", "action-mask"), padding, order=12),
    Detector("positive", "semantics", ("unnormalised-law",), positive, order=13),
)
