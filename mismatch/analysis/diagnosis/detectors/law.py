"""Are both sides' log-probabilities of one distribution? Temperature, truncation, what sampled.

For normalised distributions E[log p] is largest for the one that sampled (Gibbs), so that the sign
of mean delta names the other side: below 0 the trainer, above 0 the engine.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, Repair, above, below, correlation
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.twins import APART, UNTOLD, twins_of
from mismatch.analysis.levels import LEAST_ENTROPY
from mismatch.keys import REFERENCE, TRAINER_FLOAT32
from mismatch.types import Bools, Estimate, Floats, Ints, NotTested

KNOTS = 8
MIN_TOKENS = 200
SAME_LAW = 0.5  # correlation of the sides; another temperature or cut keeps their order
LEAST_SHARE = 0.1  # of mean |delta|, that a constant explains
MOST = 0.5  # of mean |delta|, that what confirms a cause removes
LEAST_SLOPE = 0.25  # of two temperatures that people sample at; values of other tokens give 0
SAME_TEMPERATURE = 0.1  # share by which a slope may miss the declared temperature; seen: 0.02
STEADY = 0.25  # of the constant, that near-certain tokens vary by
BEYOND_ROOM = 3.0  # times what near-certain tokens lack to certainty, that a constant moves them
ONE_LAW = 0.9  # correlation of the sides, where only a constant separates them
CERTAIN = float(np.log(0.99))
MIN_CERTAIN = 20  # tokens on which a constant shows: no healthy distribution moves them
BEYOND_CHANCE = 2.5  # 95 % arms: five standard errors, one run in 10^5 by chance
OF_ROUNDING = 3.0  # times mean |delta|, by which it may move mean log p + entropy
# Nats that tokens of a certain policy may lack which were too unlikely to be drawn in this run: no
# variance of what was drawn shows them. Three of e^-12 each.
UNSEEN = 36.0
SURPLUS = "mean log p + entropy of the trainer's distribution, nats"
ALLOWED = "the same over what chance and rounding allow"
LEAST_SEEN = "temperature of a sampler, over that of the run, from which on this would be seen"
ALLOWED_FLOAT32 = f"{ALLOWED}, in float32"
ENDS = "end tokens that were drawn, less the sum of their probabilities"
ENDS_ALLOWED = "end tokens too many or too few, over what chance and rounding allow"
SEEN = "drawn tokens that stood before, less the sum of their probabilities"
SEEN_ALLOWED = "repeated tokens too many or too few, over what chance and rounding allow"
EQUAL = "samples of a prompt that go on alike, less the chance of that"
EQUAL_ALLOWED = "samples that go on alike too often or too seldom, over what chance allows"
LEAST_CHANCE = float(np.log(2e5))  # of a sum beyond its bound in one of 10^5 runs, two-sided
SAID = (
    (ENDS, ENDS_ALLOWED, "end tokens"),
    (SEEN, SEEN_ALLOWED, "tokens that stood before"),
    (EQUAL, EQUAL_ALLOWED, "tokens that two samples of a prompt share"),
)
KEPT_MASS, ONE_SIDED = "mean kept mass, as mean exp(delta)", "one-sidedness of delta"
NEEDS = "the entropy of the trainer's distribution"


def temperature(case: Case) -> Look | NotTested:
    """Look for one side's distribution as a tempered version of the other's.

    log p_beta(x) = beta log p(x) - log sum p^beta: a slope on log p, and a term that depends on
    the distribution alone. It is known in float32, cancels between two tokens after the same
    context, or is taken as a function of the entropy (piecewise linear).
    """
    if case.kept.sum() < MIN_TOKENS:
        return NotTested("temperature", f"needs {MIN_TOKENS} tokens")
    settled = _by_float32(case)
    if settled is not None and settled.findings:
        return settled
    fitted, paired = _by_entropy(case), _by_pairs(case)
    of_pairs = () if paired is None else paired.findings
    if isinstance(fitted, Look) and any(finding.confirmed for finding in fitted.findings):
        (finding,) = fitted.findings  # by the trainer at T = 1, which says how much goes
        side = of_pairs[0].side if of_pairs and finding.side == "either" else finding.side
        return replace(fitted, findings=(replace(finding, side=side),))
    if paired is not None and of_pairs:
        return paired
    seen = settled or paired
    return seen if isinstance(fitted, NotTested) and seen is not None else fitted


def _by_float32(case: Case) -> Look | None:
    """Look whether one side comes near the other once float32's change from T = 1 to the sampling
    temperature is applied to it; None where the run has no float32 at both."""
    twin = case.others.get(REFERENCE)
    raw = None if twin is None else twin.extra.get("logprobs_untempered")
    own = case.trainer.extra.get("logprobs_untempered")  # says more: no other rounding comes in
    if raw is None or own is not None or case.reference is None:
        return None
    tempered = case.reference - raw  # what dividing the logits by T adds
    sides: tuple[Side, ...] = ("engine", "trainer")
    repairs = {
        side: case.moved(side, tempered if side == "engine" else -tempered) for side in sides
    }
    gone = {side: case.gone(repair) for side, repair in repairs.items()}
    evidence = tuple(
        Evidence(f"share gone once the {side} is divided by T, by float32", gone[side].value, "0")
        for side in sides
    )
    for side in sides:
        if above(gone[side], MOST):
            finding = Finding("temperature-semantics", side, gone[side], evidence, confirmed=True,
                              repair=repairs[side])  # fmt: skip
            return Look(evidence, (finding,))
    return Look(evidence)


def _by_pairs(case: Case) -> Look | None:
    """Look at two tokens that may follow the same tokens: the difference of their log-probabilities
    is divided by the temperature, and no constant is left in it.

    None where too few responses to one prompt part.
    """
    twins = twins_of(case)
    first, second = twins.first, twins.second
    part = ~twins.same & (np.abs(case.left[first] - case.left[second]) > APART)
    first, second = first[part], second[part]
    if len(np.unique(case.prompt[first])) < FEW_PROMPTS:
        return None
    x, y = np.zeros(len(case.left)), np.zeros(len(case.left))
    x[first] = case.left[first] - case.left[second]
    y[first] = case.right[first] - case.right[second]
    slope = case.ratio(x * y, x * x)
    explained = case.share(y - slope.value * x, y - x)
    evidence = (
        Evidence("pairs of tokens after the same tokens", len(first)),
        Evidence("temperature of the engine over that of the trainer, in pairs", slope.value, "1"),
        Evidence("share of the pairs' difference that it explains", explained.value),
    )
    wanted = case.rollout.sampling.temperature
    other = above(slope, 1.02) or below(slope, 0.98)
    tempered = LEAST_SLOPE < slope.value < 1 / LEAST_SLOPE and correlation(case) > SAME_LAW
    if not (other and tempered) or not above(explained, MOST):
        return Look(evidence)
    side, declared = off_law(case), wanted not in (0, 1)
    if declared and abs(slope.value / wanted - 1) < SAME_TEMPERATURE:
        side = "trainer"  # it is at T = 1
    elif declared and abs(slope.value * wanted - 1) < SAME_TEMPERATURE:
        side = "engine"
    else:
        declared = False
    alike = () if declared else ("logit-softcap",)
    finding = Finding(
        "temperature-semantics", side, None, evidence, confirmed=declared, alike=alike
    )
    return Look(evidence, (finding,))


def _by_entropy(case: Case) -> Look | NotTested:
    """Fit delta as a slope on log p and a curve in the entropy."""
    entropy = case.entropy
    if entropy is None:
        fix = "score with an entropy per token, or record several samples a prompt"
        return NotTested("temperature", f"needs {NEEDS}", fix)
    bumps = hats(entropy)
    slope = _slope_by_prompt(case, bumps)
    beta = 1 - float(slope[0])
    low, high = 1 - float(slope[2]), 1 - float(slope[1])
    whole = _fitted(case, np.column_stack([bumps, case.right]))
    of_entropy = _fitted(case, bumps)
    effect = case.share(case.delta - whole)
    beyond = case.share(case.delta - whole, case.delta - of_entropy)
    evidence = [
        Evidence("temperature of the trainer over that of the engine, fitted", beta, "1"),
        Evidence("its interval, low", low),
        Evidence("its interval, high", high),
        Evidence("share explained by the fit", effect.value, "0"),
    ]
    wanted = case.rollout.sampling.temperature
    if wanted > 0 and wanted != 1:
        evidence.append(Evidence("sampling temperature", wanted))
    remeasured, confirmed = gone_untempered(case), False
    # Farther from the trainer at T = 1: the sampling temperature is applied on both sides.
    refuted = remeasured is not None and below(remeasured, 0.0)
    # The curve in the entropy takes a part of the slope with it: the fit is short by some percent.
    fits = wanted not in (0, 1) and abs(abs(np.log(max(beta, 0.01)) / np.log(wanted)) - 1) < 0.4
    expected = fits and not refuted
    enough = above(effect, 0.3 if expected else 0.6) and above(beyond, 0.15)
    if not (low > 1.02 or high < 0.98) or not enough or correlation(case) < SAME_LAW:
        return Look(tuple(evidence))
    side: Side = "either" if refuted else off_law(case)
    repair = case.moved(side, whole, exact=False)
    if remeasured is not None:
        confirmed = above(remeasured, MOST)
        evidence.append(Evidence("share gone against the untempered trainer", remeasured.value))
        if confirmed:
            raw = case.trainer.extra["logprobs_untempered"]
            effect, repair = remeasured, _untempered(case, side, raw)
    finding = Finding(
        "temperature-semantics",
        side,
        effect,
        tuple(evidence),
        confirmed=confirmed,
        alike=() if expected else ("logit-softcap", "yarn-attention-factor"),
        repair=repair,
    )
    return Look(tuple(evidence), (finding,))


def gone_untempered(case: Case) -> Estimate | None:
    """Share of mean |delta| that goes against the trainer at T = 1; None without that pass."""
    raw = case.trainer.extra.get("logprobs_untempered")
    return None if raw is None else case.share(raw - case.left)


def _untempered(case: Case, side: Side, raw: Floats) -> Repair:
    """Both sides at T = 1, as distances from float32 at T = 1 where the run has those."""
    twin = case.others.get(REFERENCE)
    exact = None if twin is None else twin.extra.get("logprobs_untempered")
    if exact is None or case.reference is None or side != "engine":
        return case.moved(side, case.right - raw)
    moved = case.reference - exact
    return Repair(case.left + moved, raw + moved)


def off_law(case: Case) -> Side:
    """Return which side is not the distribution that sampled, by the sign of mean delta."""
    mean = case.mean(case.delta)
    if above(mean, 0.0):
        return "engine"
    return "trainer" if below(mean, 0.0) else "either"


def hats(values: Floats) -> Floats:
    """Piecewise linear functions of a value that sum to 1, [A, KNOTS] or fewer."""
    knots = np.unique(np.quantile(values, np.linspace(0, 1, KNOTS)))
    if len(knots) < 2:
        return np.ones((len(values), 1))
    identity = np.eye(len(knots))
    return np.column_stack([np.interp(values, knots, row) for row in identity])


def _fitted(case: Case, columns: Floats) -> Floats:
    """Least squares of delta on these columns over the tokens that count, [A]."""
    kept = case.kept
    limit = float(np.quantile(np.abs(case.delta[kept]), 0.995))
    target = np.clip(case.delta, -limit, limit)
    solution = np.linalg.lstsq(columns[kept], target[kept], rcond=None)[0]
    return np.asarray(columns @ solution)


def _slope_by_prompt(case: Case, bumps: Floats) -> tuple[float, float, float]:
    """Slope of delta on the trainer's log-probability, with an interval by prompt (jackknife).

    Both are first cleared of what the entropy explains, so that sums per prompt are enough.
    """
    kept = case.kept
    right = np.maximum(case.right, -15.0)
    x = right - bumps @ np.linalg.lstsq(bumps[kept], right[kept], rcond=None)[0]
    y = case.delta - _fitted(case, bumps)
    limit = float(np.quantile(np.abs(y[kept]), 0.995))
    y = np.clip(y, -limit, limit)
    ratio = case.ratio(x * y, x * x + 1e-12)
    low = ratio.value if ratio.low is None else ratio.low
    high = ratio.value if ratio.high is None else ratio.high
    return ratio.value, low, high


def truncation(case: Case) -> Look | NotTested:
    """Delta as the log of a kept mass: the engine renormalised over a part of the vocabulary.

    For the distribution that sampled mean(exp(delta)) is 1; renormalised over top-k or top-p it is
    the kept mass, and every delta is that of its position's.
    """
    if case.kept.sum() < MIN_TOKENS:
        return NotTested("truncation", f"needs {MIN_TOKENS} tokens")
    gap = 1 - np.exp(np.clip(case.delta, -30, 3))
    mass = case.mean(gap)
    sided = case.ratio(gap, np.abs(gap))
    evidence = [
        Evidence(KEPT_MASS, 1 - mass.value, "1"),
        Evidence(ONE_SIDED, sided.value, "0"),
    ]
    exact = case.reference
    if exact is not None:
        nearer = case.ratio(np.abs(case.left - exact), np.abs(case.right - exact))
        evidence.append(Evidence("distance from float32, engine over trainer", nearer.value))
        if below(nearer, 1.0):  # a cut distribution is not the near one
            return Look(tuple(evidence))
    if not (above(mass, 1e-3) and above(sided, 0.35)) or correlation(case) < SAME_LAW:
        return Look(tuple(evidence))
    features = hats(case.entropy if case.entropy is not None else case.right)
    kept_mass = case.trainer.extra.get("kept_mass")
    if kept_mass is not None:
        fitted = np.log(np.clip(kept_mass, 1e-6, 1))
    else:
        fitted = np.minimum(_fitted(case, features), 0)  # a curve: positions vary around it
    effect = case.share(case.delta - fitted)
    if not above(effect, 0.3) or not _of_its_place(case):
        return Look(tuple(evidence))
    confirmed = kept_mass is not None and above(effect, MOST)
    finding = Finding(
        "sampling-truncation",
        "engine",
        effect,
        tuple(evidence),
        confirmed=confirmed,
        alike=("implicit-generation-config",),
        repair=case.moved("engine", fitted, exact=kept_mass is not None),
    )
    return Look(tuple(evidence), (finding,))


def _of_its_place(case: Case) -> bool:
    """Return whether delta follows the engine's log-probability at all.

    A cut is of the position: tokens that the engine finds equally likely lose alike. Against the
    trainer's own log-probability any low value of it looks like a cut, whatever made it.
    """
    curve = np.minimum(_fitted(case, hats(case.left)), 0)
    return above(case.share(case.delta - curve), 0.0)


def constant(case: Case) -> Look | NotTested:
    """Judge whether one side's log-probabilities are off by a constant: it does not sum to 1.

    Near-certain tokens show it: there a normalised distribution has nothing to give away, so
    that a constant beyond what they lack to certainty is not part of it. It is confirmed where
    the side's own implementation does not have it in float32.
    """
    certain = (np.maximum(case.left, case.right) > CERTAIN) & case.kept
    if certain.sum() < MIN_CERTAIN:
        return NotTested("a constant in all tokens", f"needs {MIN_CERTAIN} near-certain tokens")
    offset = float(np.median(case.delta[certain]))
    effect = case.share(case.delta - offset)
    evidence = (
        Evidence("median delta of near-certain tokens, nats", offset, "0"),
        Evidence("share of mean |delta| gone without it", effect.value, "0"),
    )
    spread = float(np.median(np.abs(case.delta[certain] - offset)))
    room = float(np.quantile(-np.maximum(case.left, case.right)[certain], 0.25))
    steady = max(spread / STEADY, BEYOND_ROOM * room) < abs(offset) and correlation(case) > ONE_LAW
    if not above(effect, LEAST_SHARE) or not steady:
        return Look(evidence)
    exact = case.reference
    off = [0.0, 0.0] if exact is None else [
        abs(float(np.median((side - exact)[certain]))) for side in (case.left, case.right)
    ]  # fmt: skip
    side: Side = "either" if off[0] == off[1] else "engine" if off[0] > off[1] else "trainer"
    own = case.others.get(case.float32_name if side == "engine" else TRAINER_FLOAT32)
    confirmed = False
    if exact is not None and own is not None:  # its weights and its function do not do it
        left_over = float(np.median((own.logprobs - exact)[certain]))
        confirmed = abs(left_over) < STEADY * abs(offset) and max(off) > MOST * abs(offset)
    finding = Finding("unnormalised-law", side, effect, evidence, confirmed=confirmed,
                      repair=case.moved(side, np.full(len(case.delta), offset)))  # fmt: skip
    return Look(evidence, (finding,))


def sampling_law(case: Case) -> Look | NotTested:
    """Judge whether the tokens were drawn from what both sides score: mean(log p + H) is 0.

    Raw log-probabilities agree with the trainer's though tokens came from a sharper one (above 0)
    or a flatter one (below). Two that differ by delta move the mean by at most the covariance of
    delta and log p, which is of the size of delta; what lies beyond that and beyond chance is the
    sampler's.
    """
    entropy = case.entropy
    if entropy is None:
        return NotTested(
            "the distribution that sampled", f"needs {NEEDS}", "score with an entropy per token"
        )
    if float(entropy[case.kept].mean()) < LEAST_ENTROPY:
        reason = f"the policy is nearly certain (below {LEAST_ENTROPY:g} nats of entropy)"
        return NotTested("the distribution that sampled", reason)
    if case.kept.sum() < MIN_TOKENS or case.n_prompts < FEW_PROMPTS:
        reason = f"needs {MIN_TOKENS} tokens of {FEW_PROMPTS} prompts"
        return NotTested("the distribution that sampled", reason)
    surplus = case.mean(case.right + entropy)
    size = float(np.abs(case.delta[case.kept]).mean())

    def allowed(estimate: Estimate) -> float:
        ends = (estimate.low, estimate.high)
        half = max(0.0 if end is None else abs(end - estimate.value) for end in ends)
        unseen = UNSEEN / float(case.kept.sum())
        return max(BEYOND_CHANCE * half, OF_ROUNDING * size, unseen)

    def of_allowed(estimate: Estimate) -> float:
        return abs(estimate.value) / allowed(estimate)

    # A sampler at T moves the mean by (1/T - 1) x the variance of log p: no test sees it earlier.
    variance = float(((case.right + entropy)[case.kept] ** 2).mean())
    evidence: tuple[Evidence, ...] = (
        Evidence(SURPLUS, surplus.value, "0"),
        Evidence(ALLOWED, of_allowed(surplus), "below 1"),
        Evidence(LEAST_SEEN, 1 / (1 + allowed(surplus) / max(variance, 1e-12)), "near 1"),
    )
    beyond = of_allowed(surplus) >= 1.0
    looks = [look for find in COUNTED for look in [find(case)] if look is not None]
    evidence += tuple(item for look in looks for item in look.evidence)
    exact = case.others.get(REFERENCE)
    if exact is not None and exact.entropy is not None:  # the trainer may be the odd one
        other = case.mean(exact.logprobs + exact.entropy)
        evidence += (
            Evidence("the same in float32, nats", other.value, "0"),
            Evidence(ALLOWED_FLOAT32, of_allowed(other), "below 1"),
        )
        beyond &= of_allowed(other) >= 1.0
    beyond &= surplus.value > 0  # below 0: perhaps the tokens were not sampled at all
    if not beyond and max((float(look.evidence[1].value) for look in looks), default=0.0) < 1.0:
        return Look(evidence)
    finding = Finding("sampling-law", "engine", None, evidence,
                      alike=("implicit-generation-config", "sampling-truncation",
                             "temperature-semantics"))  # fmt: skip
    return Look(evidence, (finding,))


def _off(case: Case, total: float, chance: float, mass: float) -> float:
    """Return a sum of (0 or 1 less its probability) over what chance and rounding allow.

    By Bernstein's bound, chance alone is beyond it in one run of 10^5.

    Args:
        chance: its variance.
        mass: sum of the probabilities, which rounding moves as it moves the tokens'.
    """
    least = LEAST_CHANCE / 3
    size = float(np.abs(case.delta[case.kept]).mean())
    bound = least + float(np.sqrt(least**2 + 2 * LEAST_CHANCE * chance))
    return abs(total) / (bound + OF_ROUNDING * size * mass)


def _drawn_as_asked(case: Case) -> bool:
    """Whether nothing was cut or penalised on purpose, and no rows were chosen or doubled since."""
    sampling, recorded = case.rollout.sampling, case.engine.fingerprint.get("engine") == "recorded"
    as_asked = sampling.temperature != 0 and not (sampling.truncates or sampling.penalises)
    return as_asked and not recorded


def _of_mass(case: Case, drawn: Bools, mass_of: str, what: str, allowed: str) -> Look | None:
    """Compare how often a token of a set was drawn, [A], with the sum of the set's probability."""
    found = []
    for scoring in (case.trainer, case.others.get(REFERENCE)):
        mass = None if scoring is None else scoring.extra.get(mass_of)
        if mass is None or not _drawn_as_asked(case):
            continue
        off = np.where(case.kept, drawn - mass, 0.0)
        by_prompt = case.by_prompt(off)
        spread = float(((by_prompt - by_prompt.mean()) ** 2).sum())  # what all share is no chance
        chance = max(float((mass * (1 - mass))[case.kept].sum()), spread)
        total = float(off.sum())
        found.append((_off(case, total, chance, float(mass[case.kept].sum())), total))
    return _nearest(found, what, allowed)


def end_tokens(case: Case) -> Look | None:
    """Compare the end tokens that were drawn with the sum of their probabilities.

    A least length, a masked or a damped end token leaves every log-probability right and shows
    here. The nearer of trainer and float32 reference counts.
    """
    stops = case.engine.fingerprint.get("stop_token_ids") or ()
    drawn = np.isin(case.rollout.token_ids[case.rollout.actions], list(stops))
    return _of_mass(case, drawn, "end_mass", ENDS, ENDS_ALLOWED)


def seen_tokens(case: Case) -> Look | None:
    """Compare how often a token was drawn that stood before it with the probability of that.

    A repetition penalty, or a ban of repeated phrases, leaves every log-probability right and shows
    here. The nearer of trainer and float32 reference counts.
    """
    rollout = case.rollout
    ids = rollout.token_ids.astype(np.int64)
    own = rollout.sequence_of_token * (int(ids.max(initial=0)) + 1) + ids  # of its sequence alone
    again = np.ones(len(ids), bool)
    again[np.unique(own, return_index=True)[1]] = False
    return _of_mass(case, again[rollout.actions], "earlier_mass", SEEN, SEEN_ALLOWED)


def equal_tokens(case: Case) -> Look | None:
    """Compare how often two samples of a prompt go on alike with the chance of that.

    After the same tokens two draws are equal in sum p^2 of the cases, which is the mean of the
    drawn token's own p. A forced beginning, or one seed for all samples, leaves every
    log-probability right and shows here. Each sample is in one pair; the nearer of both sides
    counts.
    """
    if not _drawn_as_asked(case):
        return None
    rollout, ids = case.rollout, case.rollout.token_ids
    place = np.full(len(ids), -1, np.int64)
    place[rollout.actions] = np.where(case.kept, np.arange(len(case.kept)), -1)
    first: list[Ints] = []
    second: list[Ints] = []
    waiting: dict[int, int] = {}
    for row, prompt in enumerate(rollout.distinct_prompts.tolist()):
        if (partner := waiting.pop(prompt, None)) is None:
            waiting[prompt] = row
            continue
        a, b = (np.arange(*rollout.offsets[each : each + 2]) for each in (partner, row))
        a, b = a[: len(b)], b[: len(a)]
        until = int(np.argmax(np.append(ids[a] != ids[b], True))) + 1  # with the first that differs
        both = (place[a[:until]] >= 0) & (place[b[:until]] >= 0)
        first.append(a[:until][both])
        second.append(b[:until][both])
    if not sum(map(len, first)):
        return None
    one, other = np.concatenate(first), np.concatenate(second)
    if case.entropy is not None:
        apart = np.abs(case.entropy[place[one]] - case.entropy[place[other]]) > APART
        if apart.mean() > UNTOLD:
            return None  # what came before differs in more than its tokens, as images do
    alike, found = ids[one] == ids[other], []
    for side in (case.left, case.right):
        mass = (np.exp(side[place[one]]) + np.exp(side[place[other]])) / 2
        off = alike - mass
        chance = max(float((off**2).sum()), float(mass.sum()))
        total = float(off.sum())
        found.append((_off(case, total, chance, float(mass.sum())), total))
    return _nearest(found, EQUAL, EQUAL_ALLOWED)


def _nearest(found: list[tuple[float, float]], what: str, allowed: str) -> Look | None:
    if not found:
        return None
    times, off_by = min(found)
    return Look((Evidence(what, off_by, "0"), Evidence(allowed, times, "below 1")))


COUNTED = (end_tokens, seen_tokens, equal_tokens)


def penalty(case: Case) -> Look | NotTested:
    """Judge how much of delta is gone against the engine's prefill, which has no penalty."""
    sampling = case.rollout.sampling
    if not sampling.penalises:
        return Look((), looked_for=())
    evidence = [Evidence("repetition penalty of the sampler", sampling.repetition_penalty, "1")]
    prefill, effect, repair = case.prefill, None, None
    if prefill is not None and case.engine.fingerprint.get("logprobs_penalised"):
        repair = case.moved("engine", prefill.logprobs - case.engine.logprobs)
        effect = case.gone(repair)
        evidence.append(Evidence("share gone against the engine's prefill", effect.value, "0"))
    finding = Finding("sampling-law", "engine", effect, tuple(evidence), repair=repair,
                      stated=True, fact=True)  # fmt: skip
    return Look(tuple(evidence), (finding,))


DETECTORS = (
    Detector("constant", "semantics", ("unnormalised-law",), constant, order=15),
    Detector("temperature", "semantics", ("temperature-semantics",), temperature, NEEDS, 20),
    Detector("truncation", "semantics", ("sampling-truncation",), truncation, order=21),
    Detector("sampling-law", "semantics", ("sampling-law",), sampling_law, NEEDS, 22),
    Detector("penalty", "semantics", ("sampling-law",), penalty, order=14),
)
