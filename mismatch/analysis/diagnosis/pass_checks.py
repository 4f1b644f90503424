"""Checks of the passes other than the headline: enough data, finite values, sides that agree with
themselves.

The headline compares one pass of the engine with one of the trainer. Training runs others (with
gradients, in other batches), and their faults are as real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.declared import failed
from mismatch.analysis.diagnosis.detector import Look
from mismatch.analysis.diagnosis.detectors import turns
from mismatch.analysis.diagnosis.ranking import seen_by
from mismatch.analysis.levels import ENTROPY, LEAST_ENTROPY, MORE, column_for
from mismatch.analysis.thresholds import default_thresholds
from mismatch.attempts import Attempts
from mismatch.errors import MismatchError
from mismatch.keys import ALONE, GRAD, NEW, REGROUPED, REPEATED, TRAIN
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.types import Check, Comparison, Estimate, NotTested, Pair, Rollout, Scoring

# Under these a run says nothing about a training run of thousands of prompts.
LEAST_PROMPTS, LEAST_SEQUENCES, LEAST_TOKENS = 4, 8, 256
MOST_EMPTY = 0.1  # share of sequences without an action token
# The trainer's passes that should agree with it.
SELF = (REPEATED, REGROUPED, ALONE, GRAD, NEW)
# Other micro-batches move a GPU trainer's own values by as much as the headline: batch-logprob-gap
# (verl#6280) has 5.6 % of Qwen3-1.7B's tokens outside [0.9, 1.1] between batches of 1 and of 8.
CLIPPED = (1e-3, 1e-2)  # share of tokens that PPO would clip: no warning, no failure below it
APART = 2.0  # times the headline's share
# Times the headline's mean |delta|. Random noise is in the headline once, and twice in the distance
# of two passes of one side: that distance reaches 1.41 times the headline, and never twice.
FARTHER = 1.1
NEAR, FAR = 1e-4, 0.08  # nats under which that is no warning, no failure (unfit, by levels.toml)
AGREEMENT = "trainer-self-agreement"
DISTRIBUTIONS = "whole-distributions"
OTHER_SUM = (
    "cut padding of the head from the logits before the softmax, mask no id, and look for overflow "
    "(fp16) in the logits"
)
# Where decode and prefill give equal bits (46,831 of 46,831 tokens of three clean runs on CPUs), a
# token in which they do not is a fault: of the cache, a batch's slot, a request that was resumed.
# Other batches can move some by rounding: of these, one in a hundred is as far apart as the worst
# hundredth of what engine and trainer differ by.
MOST_UNEQUAL, FAR_QUANTILE, FAR_SHARE = 0.1, 0.99, 0.5
FEW_TOKENS, FEW_PROMPTS = 3, 2  # from which on they fail
# Where they differ everywhere: times the largest distance that rounding makes in a token; times as
# many tokens beyond its hundredth, where chance makes as many in one run of 10^5. Our judgement, so
# that they warn: in few tokens, experts that change places by rounding are as far.
MOST_TIMES, MOST_OFTEN, CHANCE = 3.0, 2.0, 1e-5
CERTAIN = -1e-4  # nats, above which a log-probability has no digits to differ in
IN_OTHERS = {"regrouped": ", in other micro-batches", "grad": ", with gradients"}
ORDER = ("passed", "warning", "failed")
MEAN = "logprob_abs_diff_mean"


def pass_checks(
    rollout: Rollout,
    decode: Scoring,
    train: Scoring,
    scorings: Mapping[str, Scoring],
    attempts: Attempts,
) -> list[Check]:
    """Return all of them, on scorings of which ``decode`` and ``train`` passed the input checks."""
    sound, _ = by_finiteness(scorings)
    prefill = sound.get(decode.name.replace(":decode", ":prefill"))
    again = decode, prefill, train, sound.get(REGROUPED)
    whole = any(each.distributions and each.distributions.whole for each in (decode, train))
    return attempts.checks(
        (enough_data, rollout),
        (passes_finite, decode, scorings),
        (turns_agree, rollout, decode, train, sound),
        (trainer_agreement, rollout, decode, train, sound),
        *([] if prefill is None else [(engine_agreement, rollout, *again)]),
        *([(distributions, decode, train)] if whole else []),
    )


def distributions(decode: Scoring, train: Scoring) -> Check:
    """Check that each side's whole distributions sum to 1 over one vocabulary.

    A head with padding in its softmax, or masked ids, takes probability from the others.
    """
    laws = {each.name: each.distributions for each in (decode, train) if each.distributions}
    laws = {name: each for name, each in laws.items() if each.whole}  # of others, the rest is made
    faults = []
    for name, law in laws.items():
        try:
            law.law(name)
        except MismatchError as error:
            faults.append(error.message)
    if faults:
        return failed(DISTRIBUTIONS, "; ".join(faults), OTHER_SUM)
    sizes = {law.vocabulary for law in laws.values()}
    if len(sizes) > 1:
        detail = ", ".join(f"{name} has {law.vocabulary:,} ids" for name, law in laws.items())
        return failed(DISTRIBUTIONS, detail, OTHER_SUM)
    if len(laws) < 2:
        return Check(DISTRIBUTIONS, "not_tested", "one side gave none")
    counted = ", ".join(f"{len(law.positions):,} of {name}" for name, law in laws.items())
    return Check(DISTRIBUTIONS, "passed", f"{counted} sum to 1, over {max(sizes):,} ids")


def not_finite(scoring: Scoring) -> str:
    """Return how many logprobs or entropies of a scoring are no numbers, as a phrase; "": none."""
    for what, values in (("logprobs", scoring.logprobs), ("entropies", scoring.entropy)):
        if values is not None and not np.isfinite(values).all():
            return f"{int((~np.isfinite(values)).sum()):,} of {len(values):,} {what} are not finite"
    return ""


def by_finiteness(scorings: Mapping[str, Scoring]) -> tuple[dict[str, Scoring], dict[str, str]]:
    """Scorings whose values are all numbers; and name -> :func:`not_finite` of the others."""
    refused = {name: text for name, s in scorings.items() if (text := not_finite(s))}
    return {name: s for name, s in scorings.items() if name not in refused}, refused


def enough_data(rollout: Rollout) -> Check:
    """Prompts, sequences and tokens suffice to say anything; few sequences are empty."""
    actions = rollout.actions
    sequences = np.unique(rollout.sequence_of_token[actions])
    sizes = {
        "prompts": (len(np.unique(rollout.distinct_prompts[sequences])), LEAST_PROMPTS),
        "sequences": (len(sequences), LEAST_SEQUENCES),
        "action tokens": (len(actions), LEAST_TOKENS),
    }
    short = [f"{have} {what}, at least {least}" for what, (have, least) in sizes.items()
             if have < least]  # fmt: skip
    empty = rollout.n_sequences - len(sequences)
    if short:
        return Check("enough-data", "warning", f"too little: {'; '.join(short)}", MORE)
    reason = f"{empty} of {rollout.n_sequences} sequences hold no action token"
    if empty > MOST_EMPTY * rollout.n_sequences:
        return Check("enough-data", "warning", reason, "look at the action mask and the prompts")
    detail = ", ".join(f"{have:,} {what}" for what, (have, _) in sizes.items())
    return Check("enough-data", "passed", detail + (f"; {reason}" if empty else ""))


def policy_entropy(headline: Comparison) -> list[Check]:
    """Check that the policy has an entropy: what is certain cannot be moved, and says little."""
    entropy = headline.metrics.get("entropy_train")
    if entropy is None or entropy.value >= LEAST_ENTROPY:
        return []
    detail = (
        f"the policy is nearly deterministic ({entropy.value:.2g} nats of entropy per token): the "
        "effect on training is not tested"
    )
    fix = "measure a policy that is not certain: other prompts, an earlier checkpoint"
    return [Check(ENTROPY, "inconclusive", detail, fix)]


def turns_agree(
    rollout: Rollout, decode: Scoring, train: Scoring, sound: Mapping[str, Scoring]
) -> Check:
    """Check that what counts was sampled, and later turns are paired and read as the first."""
    others = {name: s for name, s in sound.items() if name not in (decode.name, train.name)}
    case = Case.of(rollout, decode, train, others)
    missing = ""
    for look, fix in ((turns.unsampled, COUNTED), (turns.shifted, PAIRED), (turns.context, READ)):
        seen = seen_by(look, case)
        if isinstance(seen, NotTested) and seen.reason != turns.ONE_TURN:
            missing += f"; {seen.what}: not tested, {seen.reason}"
        if isinstance(seen, Look) and seen.findings:
            finding = seen.findings[0]
            detail = "; ".join(f"{item.what}: {item.value}" for item in finding.evidence)
            certain = finding.confirmed or case.reference is not None
            return Check("turns", "failed" if certain else "warning", detail, fix)
    last = int(case.turn.max())
    return Check(
        "turns", "passed", f"{last} turn{'s' if last > 1 else ''}, of sampled tokens alone{missing}"
    )


COUNTED = "count only what the policy sampled: mask observations and the template's own tokens"
PAIRED = "count observations in both sides' lists or in neither; join by position"
READ = "pass token ids from turn to turn, never text; reset the prefix cache"


def passes_finite(decode: Scoring, scorings: Mapping[str, Scoring]) -> Check:
    """No pass other than the headline has a NaN."""
    beside = {name: s for name, s in scorings.items() if name not in (decode.name, TRAIN)}
    _, broken = by_finiteness(beside)
    if not beside:
        return Check("passes-finite", "not_tested", "nothing to check: no other pass")
    if not broken:
        return Check("passes-finite", "passed", f"{len(beside)} other passes, all values finite")
    detail = "; ".join(f"{name}: {text}" for name, text in broken.items())
    fix = "a NaN is often overflow: try --train-dtype bf16 or fp32"
    return failed("passes-finite", detail, fix)


def trainer_agreement(
    rollout: Rollout, decode: Scoring, train: Scoring, scorings: Mapping[str, Scoring]
) -> Check:
    """Each of the trainer's own passes agrees with the judged one; the worst of them counts.

    :func:`_clips` judges passes in other micro-batches relative to the headline.
    """
    again = [
        scoring
        for name in SELF
        if (scoring := scorings.get(name)) is not None and not scoring.fingerprint.get("injected")
    ]
    if not again:
        detail = "nothing to check: the trainer made one pass"
        return Check(AGREEMENT, "not_tested", detail)
    column = column_for(train.fingerprint, train.fingerprint) or ""  # an engine's own is no excuse
    level = default_thresholds()["clip_fraction"].get(column)
    share, mean = (each.value for each in _apart(rollout, decode, train))
    sizes = max(FARTHER * mean, NEAR), max(FARTHER * mean, FAR)
    checks = [
        _agreement(
            rollout, train, each, _clips(each.name, share, level.unfit if level else 0.0), sizes
        )
        for each in again
    ]
    worst = max(checks, key=lambda check: ORDER.index(check.status))
    if worst.status == "passed":
        return replace(worst, detail=f"{len(checks)} passes agree; {worst.detail}")
    beside = [check for check in checks if check is not worst and check.status != "passed"]
    return replace(worst, detail="; ".join(check.detail for check in (worst, *beside)))


def _clips(name: str, share: float, unfit: float) -> tuple[float, float]:
    """Return the shares beyond PPO's clip range that warn and that fail.

    On a GPU other micro-batches move values by as much as engine and trainer differ; the same batch
    again moves nothing, and a sequence alone shows what leaks between sequences.

    Args:
        share: of the headline.
        unfit: the level of ``clip_fraction`` for the trainer's precision.
    """
    if name.endswith((":regrouped", ":grad")):
        return max(CLIPPED[0], share), max(CLIPPED[1], APART * share, unfit)
    if name.endswith(":alone"):
        return CLIPPED[0], max(CLIPPED[1], min(APART * share, unfit))
    return CLIPPED


def _agreement(
    rollout: Rollout,
    train: Scoring,
    again: Scoring,
    clips: tuple[float, float],
    sizes: tuple[float, float],
) -> Check:
    """Compare one pass of the trainer with the judged one.

    Args:
        clips: share of tokens beyond PPO's clip range that warns, and that fails.
        sizes: mean |delta| likewise, nats.
    """
    clipped, mean = _apart(rollout, train, again)
    share, size = (e.value if e.low is None else e.low for e in (clipped, mean))
    detail = (
        f"{again.name} against {train.name}{IN_OTHERS.get(again.name.partition(':')[2], '')}: "
        f"{100 * clipped.value:.3g} % of the tokens lie beyond PPO's clip range (level "
        f"{100 * clips[0]:.3g} %), "
        f"mean |delta| {mean.value:.3g} nats (level {sizes[0]:.3g})"
    )
    fix = "find out what the passes do differently: batch, gradients, dropout, kernels, overflow"
    if share > clips[1] or size > sizes[1]:
        return failed(AGREEMENT, detail, fix)
    if share > clips[0] or size > sizes[0]:
        return Check(AGREEMENT, "warning", detail, fix)
    return Check(AGREEMENT, "passed", detail)


def engine_agreement(
    rollout: Rollout,
    decode: Scoring,
    prefill: Scoring,
    train: Scoring,
    regrouped: Scoring | None = None,
) -> Check:
    """Compare what the engine said while sampling with what it says of the tokens read at once.

    Args:
        train: whose distance from ``prefill`` is the measure of what rounding moves.
        regrouped: the trainer in other micro-batches: a second measure of it.
    """
    if decode.fingerprint.get("logprobs_penalised"):
        return Check("engine-self-agreement", "not_tested", "prefill has no repetition penalty")
    moved = np.abs(prefill.logprobs - decode.logprobs)
    open_ = np.minimum(decode.logprobs, prefill.logprobs) < CERTAIN
    apart = np.abs(train.logprobs - prefill.logprobs)[open_]
    bound = max(NEAR, float(np.quantile(apart, FAR_QUANTILE)) if len(apart) else 0.0)
    unequal, far = np.count_nonzero(moved[open_]), rollout.actions[open_ & (moved > bound)]
    few_unequal = open_.sum() >= LEAST_TOKENS and unequal <= MOST_UNEQUAL * open_.sum()
    if few_unequal and len(far) >= max(1.0, FAR_SHARE * unequal):
        rows = rollout.sequence_of_token[far]
        few = len(far) < FEW_TOKENS and len(np.unique(rollout.prompt_index[rows])) < FEW_PROMPTS
        places = zip(rows[:3].tolist(), (far - rollout.offsets[rows])[:3].tolist(), strict=True)
        detail = (
            f"decode and prefill are equal in all but {unequal} of {open_.sum():,} tokens, and "
            f"up to {moved.max():.2g} nats apart in {len(far)}: "
            + ", ".join(f"sequence {row}, position {position}" for row, position in places)
            + (" …" if len(far) > 3 else "")
        )
        fix = "look at the KV cache, prefix caching, and requests that are preempted and resumed"
        return Check("engine-self-agreement", "warning" if few else "failed", detail, fix)
    clipped, mean = _apart(rollout, decode, prefill)
    detail = (
        f"decode against prefill: {100 * clipped.value:.3g} % of the tokens lie beyond PPO's clip "
        "range, "
        f"mean |delta| {mean.value:.3g} nats"
    )
    if not few_unequal and len(apart) >= LEAST_TOKENS:
        from scipy.stats import binom

        # Rounding moves all of them: by how much, token by token?
        other = regrouped or train
        usual = np.maximum(apart, np.abs(other.logprobs - train.logprobs)[open_])
        beyond = rollout.actions[open_ & (moved > max(NEAR, MOST_TIMES * float(usual.max())))]
        level = max(NEAR, float(np.quantile(usual, FAR_QUANTILE)))
        decoded, usually = (int((sizes > level).sum()) for sizes in (moved[open_], usual))
        often = decoded >= MOST_OFTEN * max(1, usually)
        more = f"; {decoded} tokens lie beyond {level:.2g} nats, by rounding alone {usually}"
        fix = "look at the KV cache, prefix caching, and requests that are preempted and resumed"
        if len(beyond) >= FEW_TOKENS:
            where = int(rollout.sequence_of_token[beyond[0]])
            said = (
                f"{detail}{more}; {len(beyond)} far beyond all of these, from sequence {where} on"
            )
            return Check("engine-self-agreement", "warning", said, fix)
        if often and binom.sf(decoded - 1, decoded + usually, 0.5) <= CHANCE:
            return Check("engine-self-agreement", "warning", detail + more, fix)
    if (clipped.value if clipped.low is None else clipped.low) > CLIPPED[1]:
        fix = "look at the KV cache's dtype, prefix caching and the engine's batch invariance"
        return Check("engine-self-agreement", "warning", detail, fix)
    return Check("engine-self-agreement", "passed", detail)


def _apart(rollout: Rollout, left: Scoring, right: Scoring) -> tuple[Estimate, Estimate]:
    """Share of tokens that PPO would clip, and mean |delta|."""
    pair = Pair.of(rollout, left, right)
    estimates = Estimator(pair.sequence, pair.prompt).all(
        [METRICS["clip_fraction"], METRICS[MEAN]], {"delta": pair.delta}
    )
    return estimates["clip_fraction"], estimates[MEAN]
