"""Semantic checks: are the two sides speaking of the same thing at all?

They come before any KL. A wrong temperature or a shifted row makes a large KL that no kernel can
fix, so a failed check is reported as itself. Where data is missing a check is ``not_tested``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.columns import log_scale
from mismatch.analysis.diagnosis.declared import (
    attention_sinks,
    attention_softcap,
    failed,
    sampling_parameters,
    source_files,
    special_tokens,
    whole_model,
)
from mismatch.analysis.diagnosis.detector import Look
from mismatch.analysis.diagnosis.detectors import law
from mismatch.analysis.diagnosis.detectors.pairing import (
    AT_BEST,
    AT_ZERO,
    BEST_LAG,
    MIN_TOKENS,
    ON_LAST,
    POSITIVE,
    ZEROS,
    lag,
    largest,
    padding,
)
from mismatch.analysis.diagnosis.detectors.stated import NOTHING_CUT
from mismatch.analysis.diagnosis.loaded_weights import weights_as_loaded
from mismatch.analysis.diagnosis.ranking import seen_by
from mismatch.analysis.levels import MORE_PROMPTS
from mismatch.attempts import Attempts
from mismatch.types import Check, Estimate, NotTested, Rollout, Scoring

WEAK = 0.5  # two scorings of the same tokens correlate above this, or something is wrong
UNRELATED, FAR_APART = 0.2, 0.5  # below that correlation, beyond that mean |delta| in nats
POSSIBLE = 0.75  # of what chance allows; beyond it at least three standard errors: 1 run in 300
ONE_SIDED = 0.99  # of |delta|: no token is likelier on the side that kept the whole distribution
ROUNDING = 1e-6  # a float32 log_softmax may end this far above zero


def input_checks(rollout: Rollout, left: Scoring, right: Scoring) -> list[Check]:
    """Return checks that a comparison rests on; if one fails no metric can be computed."""
    return [
        same_token_ids(rollout, left, right),
        missing_logprobs(rollout, left, right),
        log_scale(left, right),
    ]


def semantic_checks(
    rollout: Rollout,
    left: Scoring,
    right: Scoring,
    ratio_mean: Estimate,
    attempts: Attempts,
    others: Mapping[str, Scoring] | None = None,
) -> list[Check]:
    """Return all other checks, on scorings that passed :func:`input_checks`.

    Args:
        left: the rollout side, as sampled.
        right: the train side.
        ratio_mean: mean importance ratio of this pair, with its interval.
        others: further passes of the run by name; None: there are none.
    """
    sides, prints = (rollout, left, right), (left.fingerprint, right.fingerprint)
    declared = whole_model(left.fingerprint) + attention_softcap(right.fingerprint)
    return declared + attempts.checks(
        (attention_sinks, right.fingerprint),
        (alignment, *sides),
        (temperature, *sides, others),
        (truncation, *sides),
        (sampling_law, *sides, others),
        (importance_ratio, *sides, ratio_mean),
        (zero_logprobs, *sides),
        (positive_logprobs, *sides),
        (sampling_parameters, rollout, left),
        (special_tokens, *sides),
        (source_files, *prints),
        (weights_as_loaded, *prints),
    )


def same_token_ids(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Check that both sides scored exactly the sampled ids."""
    expected = rollout.token_ids[rollout.actions]
    for scoring in (left, right):
        if len(scoring.token_ids) != len(expected):
            detail = f"{scoring.name} scored {len(scoring.token_ids):,} tokens of {len(expected):,}"
            return failed("same-token-ids", detail, _TOKEN_FIX)
        differ = scoring.token_ids != expected
        if differ.any():
            first = int(np.flatnonzero(differ)[0])
            sequence = rollout.sequence_of_token[rollout.actions[first]]
            detail = (
                f"{scoring.name} scored other ids than were sampled for {int(differ.sum()):,} of "
                f"{len(expected):,} tokens, the first in sequence {sequence}"
            )
            return failed("same-token-ids", detail, _TOKEN_FIX)
    return Check("same-token-ids", "passed", f"{len(expected):,} token ids equal on both sides")


_TOKEN_FIX = "pass token ids between engine and trainer, never text: re-tokenising changes them"


def missing_logprobs(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Check that every action token has a finite logprob on both sides."""
    for scoring in (left, right):
        bad = ~np.isfinite(scoring.logprobs)
        if bad.any():
            detail = (
                f"{scoring.name}: {int(bad.sum()):,} of {len(bad):,} logprobs missing or not finite"
            )
            turn = rollout.turn[rollout.actions]
            if turn.max() > 1:
                detail += f", the first in turn {turn[bad].min()}"
            fix = "a NaN on the train side is often fp16 overflow: try --train-dtype bf16 or fp32"
            return failed("missing-logprobs", detail, fix)
    return Check("missing-logprobs", "passed", "every action token has a logprob on both sides")


def _seen(
    find: Callable[[Case], Look | NotTested], rollout: Rollout, left: Scoring, right: Scoring
) -> Look | NotTested:
    """Return what a detector sees of the two sides."""
    return seen_by(find, Case.of(rollout, left, right, {}))


def alignment(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Logprobs correlate best at lag 0, of lags up to ±64: no shift between the two sides."""
    look = _seen(lag, rollout, left, right)
    if isinstance(look, NotTested) or not (left.logprobs.std() and right.logprobs.std()):
        return Check("alignment", "not_tested", f"needs {MIN_TOKENS} tokens that are not all alike")
    best, at_best, at_zero = (look.number(what) for what in (BEST_LAG, AT_BEST, AT_ZERO))
    if look.findings:
        detail = (
            f"best lag is {best:+.0f} (correlation {at_best:.3f}), at lag 0 it is {at_zero:.3f}"
        )
        return failed("alignment", detail, "logits at t - 1 predict token t: fix the index")
    if at_zero < WEAK:
        detail = f"correlation only {at_zero:.3f} at lag 0, and no better at another lag"
        if at_zero < UNRELATED and float(np.abs(right.logprobs - left.logprobs).mean()) > FAR_APART:
            said = f"the sides do not score the same tokens after the same context: {detail}"
            return failed("alignment", said, "look for cut inputs, shuffled rows or other weights")
        return Check("alignment", "warning", detail, "look for shuffled rows or other weights")
    return Check("alignment", "passed", f"best lag 0 (correlation {at_zero:.4f})")


def temperature(
    rollout: Rollout, left: Scoring, right: Scoring, others: Mapping[str, Scoring] | None = None
) -> Check:
    """Check that both logprobs are at the sampling temperature: by declaration, and by the data."""
    wanted = rollout.sampling.temperature
    if wanted == 0:
        detail = "greedy sampling (T = 0): the numbers are divergence scores, no KL"
        return Check("temperature", "warning", detail, "sample at the temperature of training")
    claims = {s.name: s.fingerprint.get("logprobs_temperature") for s in (left, right)}
    wrong = {name: t for name, t in claims.items() if t is not None and abs(t - wanted) > 1e-9}
    gone = law.gone_untempered(Case.of(rollout, left, right, {}))
    evidence = ""
    if gone is not None:
        evidence = f"; {100 * gone.value:.0f} % of mean |delta| goes against the trainer at T = 1"
        if gone.value > law.MOST and not wrong:
            wrong = {left.name: 1.0}
    seen = seen_by(law.temperature, Case.of(rollout, left, right, {**(others or {})}))
    for finding in seen.findings if isinstance(seen, Look) and gone is None and not wrong else ():
        if finding.confirmed:  # by float32 at both temperatures, or by pairs of tokens
            wrong = {(left if finding.side == "engine" else right).name: 1.0}
    if wrong:
        which = ", ".join(f"{name} is at T = {t:g}" for name, t in wrong.items())
        detail = f"sampled at T = {wanted:g} but {which}{evidence}"
        fix = (
            "vLLM: logprobs_mode=processed_logprobs; trainer: divide the logits by T before the "
            "softmax (dividing logprobs by T is wrong)"
        )
        return failed("temperature", detail, fix)
    if None in claims.values() and not evidence:
        return Check("temperature", "not_tested", "a side does not say at which temperature it is")
    return Check("temperature", "passed", f"both sides at T = {wanted:g}{evidence}")


def truncation(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Check that both sides normalise over the same set of tokens."""
    sampling = rollout.sampling
    cut = sampling.cut
    if sampling.truncates:
        kept = right.extra.get("kept_mass")
        mass = "" if kept is None else f"; the trainer's mean kept mass is {float(kept.mean()):.4f}"
        if kept is not None and float(kept.min()) > NOTHING_CUT:
            return Check("truncation", "passed", f"{cut}: nothing was cut off in this run")
        if left.fingerprint.get("logprobs_truncated"):
            detail = f"{cut}: the engine renormalised over what it kept, the trainer did not{mass}"
        else:
            detail = (
                f"{cut}: drawn from a truncated distribution, but logprobs are of all tokens{mass}"
            )
        fix = "sample with top_p 1, top_k and min_p off, or replay the sampling mask in the trainer"
        return failed("truncation", detail, fix)
    if left.fingerprint.get("logprobs_truncated") is None:
        return Check("truncation", "not_tested", "the engine does not say how it normalises")
    look = _seen(law.truncation, rollout, left, right)
    if isinstance(look, Look) and look.findings and look.number(law.ONE_SIDED) > ONE_SIDED:
        left_over = look.number(law.KEPT_MASS)
        detail = f"delta is as if one side cut its tail: the kept mass would be {left_over:.4f}"
        fix = "send every sampling parameter explicitly; look into generation_config.json"
        return failed("truncation", detail, fix)
    return Check("truncation", "passed", "no truncation, full vocabulary on both sides")


def sampling_law(
    rollout: Rollout, left: Scoring, right: Scoring, others: Mapping[str, Scoring] | None = None
) -> Check:
    """Tokens were drawn from the distribution that both sides report: mean(log p + entropy) is 0.

    It shows a sampler that no log-probability shows: a temperature, a cut of the vocabulary, a
    penalty or a least length that were applied and not declared.
    """
    sampling = rollout.sampling
    if sampling.temperature == 0 or sampling.truncates or sampling.penalises:
        return Check("sampling-law", "not_tested", "the run declares another distribution")
    if left.fingerprint.get("engine") == "recorded":
        return Check("sampling-law", "not_tested", "weights may have moved since the sampling")
    look = seen_by(law.sampling_law, Case.of(rollout, left, right, {**(others or {})}))
    if isinstance(look, NotTested):
        return Check("sampling-law", "not_tested", look.reason)
    surplus, of_allowed = look.number(law.SURPLUS), look.number(law.ALLOWED)
    detail = (
        f"mean log p + entropy is {surplus:+.2g} nats, {of_allowed:.2g} times what chance and "
        "rounding allow"
    )
    exact = look.value(law.ALLOWED_FLOAT32, of_allowed)
    counted = [(look.value(a, 0.0), look.value(b, 0.0), c) for a, b, c in law.SAID]
    of_chance = max(times for _, times, _ in counted)
    faults = []
    if min(of_allowed, exact) >= 1.0:
        drawn = "sharper" if surplus > 0 else "flatter"
        faults.append(f"{detail}: tokens are drawn from a {drawn} one")
    faults += [
        f"{abs(off):.0f} {what} too {'many' if off > 0 else 'few'} were drawn, "
        f"{times:.2g} times what chance and rounding allow"
        for off, times, what in counted
        if times >= 1.0
    ]
    if faults:
        fix = (
            "look at what the sampler adds: temperature, top_k, top_p, penalties, min_tokens, a "
            "forced beginning, one seed for all samples"
        )
        return failed("sampling-law", "; ".join(faults), fix)
    if of_allowed >= 1.0:  # the float32 reference is within
        fix = "look at the trainer's entropies and log-probabilities: mismatch locate"
        return Check("sampling-law", "warning", f"{detail}, by the trainer alone", fix)
    if max(of_allowed, of_chance) >= POSSIBLE:
        return Check("sampling-law", "inconclusive", detail, MORE_PROMPTS)
    seen = f"a sampler at {look.number(law.LEAST_SEEN):.2f} of the temperature would be seen"
    return Check("sampling-law", "passed", f"{detail}; {seen}")


def importance_ratio(
    rollout: Rollout, left: Scoring, right: Scoring, ratio_mean: Estimate
) -> Check:
    """mean(exp(delta)) must be 1 if the left side sampled (or the kept mass)."""
    if rollout.sampling.temperature == 0:
        return Check("importance-ratio", "not_tested", "greedy sampling has no importance ratio")
    if not np.isfinite(ratio_mean.value):
        detail = "the mean ratio is too large for a number: a token is e^700 times likelier there"
        return failed("importance-ratio", detail, "look for overflow, masked or padded tokens")
    if ratio_mean.low is None or ratio_mean.high is None:
        return Check("importance-ratio", "not_tested", "needs at least two prompts")
    kept = right.extra.get("kept_mass")
    renormalised = bool(left.fingerprint.get("logprobs_truncated"))
    expected = float(kept.mean()) if kept is not None and renormalised else 1.0
    gap = abs(ratio_mean.value - expected)
    half = (ratio_mean.high - ratio_mean.low) / 2
    name = "1" if expected == 1.0 else f"the kept mass {expected:.4f}"
    ratio_text = f"mean ratio {ratio_mean.value:.4f} [{ratio_mean.low:.4f}, {ratio_mean.high:.4f}]"
    if gap <= max(1.5 * half, 1e-6):  # about three standard errors
        return Check("importance-ratio", "passed", f"{ratio_text} agrees with {name}")
    heavy = "heavy-tail" in ratio_mean.flags
    # A wrong distribution moves all ratios one way. A large mismatch spreads them both ways, and
    # lacks the mass of tokens that were too unlikely to be sampled: its mean is below 1 as well.
    ratio = np.exp(right.logprobs - left.logprobs) / expected
    one_sided = abs(float(ratio.mean()) - 1) > 0.5 * float(np.abs(ratio - 1).mean())
    if gap > max(3 * half, 0.01) and one_sided and not heavy:
        detail = f"{ratio_text} excludes {name}: the left distribution did not sample these tokens"
        fix = "look at temperature, truncation and penalties of the engine; then at alignment"
        return failed("importance-ratio", detail, fix)
    if heavy:
        reason, fix = "a few tokens decide", "look at the worst tokens"
    elif one_sided:
        reason, fix = "only weakly", "fix the mismatch first; then: --num-prompts"
    else:
        reason, fix = "which follows from a large mismatch", ""
    return Check("importance-ratio", "warning", f"{ratio_text} excludes {name}, {reason}", fix)


def zero_logprobs(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """Look for padding: a logprob of exactly 0 where the other side is not certain."""
    look = _seen(padding, rollout, left, right)
    if not isinstance(look, Look):
        return Check("zero-logprobs", "not_tested", str(look))
    for finding in look.findings:
        name = left.name if finding.side == "engine" else right.name
        count, last = look.number(ZEROS), look.number(ON_LAST)
        detail = (
            f"{name}: {count:.0f} logprobs are exactly 0 and not certain, {last:.0f} on a last "
            "token"
        )
        fix = "mask tokens that the policy did not sample (an appended EOS, padding with 0.0)"
        return failed("zero-logprobs", detail, fix)
    return Check("zero-logprobs", "passed", "no logprob is exactly 0 without being certain")


def positive_logprobs(rollout: Rollout, left: Scoring, right: Scoring) -> Check:
    """No probability above one: that is a low-precision head or a missing normalisation."""
    side, highest = largest(Case.of(rollout, left, right, {}))
    name = left.name if side == "engine" else right.name
    if highest > POSITIVE:
        detail = f"a log-probability above 0 in {name}: {highest:+.4g}"
        return failed("positive-logprobs", detail, "compute the head and log_softmax in float32")
    if highest > ROUNDING:
        detail = f"a log-probability of {highest:+.2g} in {name}, more than float32 rounding"
        return Check("positive-logprobs", "warning", detail, "compute the log_softmax in float32")
    return Check("positive-logprobs", "passed", "no logprob above 0")
