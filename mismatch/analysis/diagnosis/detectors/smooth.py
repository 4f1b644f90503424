"""Is a side's own error a smooth function of its own law? Rounding is not; another function is.

A softcap, a temperature or a scale of the logits moves each log-probability by an amount that
log p and the entropy of the position tell; rounding moves it at random. So a small one of these is
seen though the side is hardly farther from float32 than rounding alone would have it, and told
from other weights where it is far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, above, correlation
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.analysis.diagnosis.detectors.displacement import (
    COARSER,
    EXACT_FLOOR,
    FAR,
    FUNCTIONS,
    NO_ROUNDING,
    WEIGHTS,
    agree_in_float32,
    exact_side,
    kind,
    of_two_precisions,
)
from mismatch.analysis.diagnosis.detectors.law import MIN_TOKENS, hats
from mismatch.analysis.diagnosis.ranking import SMALL
from mismatch.metrics.inference import jackknife_error, student
from mismatch.run.store import PLAIN, REFERENCE
from mismatch.types import Estimate, Floats, NotTested

WHAT = "error that follows a side's own law"
FOLDS = 4  # of prompts: what is predicted was not fitted on
LEAST_LOGPROB = -15.0
# What moves logits as a whole, first.
ALIKE = tuple(dict.fromkeys(("logit-softcap", "temperature-semantics", *FUNCTIONS, *WEIGHTS)))
TAIL = 0.995  # of |error|; the rest is cut to it
# Of the squared error of a far side, from which it is a function of the logits. More where the
# sides hardly correlate: the tokens that one side chose are likelier there than elsewhere.
MOST = 0.5


@dataclass(frozen=True)
class Predicted:
    """Squared error of one pass per prompt, [P]: with entropy alone, and with log p as well."""

    of_entropy: Floats
    of_both: Floats

    def share(self, without: int | None = None) -> float:
        """Of the squared error, that log p explains beyond the entropy; without one prompt."""
        rest = np.ones(len(self.of_both), bool)
        if without is not None:
            rest[without] = False
        whole = float(self.of_entropy[rest].sum())
        return 1 - float(self.of_both[rest].sum()) / whole if whole > 0 else 0.0


def predicted(case: Case, error: Floats, law: Floats, entropy: Floats) -> Predicted:
    """Cross-validated over prompts: piecewise linear in the entropy, and in log p beside it.

    Args:
        error: [A] log-probabilities minus those of float32.
        law, entropy: [A] log-probabilities and entropies in float32.
    """
    kept = case.kept
    limit = float(np.quantile(np.abs(error[kept]), TAIL))
    target = np.where(kept, np.clip(error, -limit, limit), 0.0)
    entropies = hats(entropy)
    both = np.column_stack([entropies, hats(np.maximum(law, LEAST_LOGPROB))])
    sums = [case.by_prompt((target - _held_out(case, x, target)) ** 2) for x in (entropies, both)]
    return Predicted(*sums)


def _held_out(case: Case, columns: Floats, target: Floats) -> Floats:
    """Least squares on the prompts of the other folds, [A]."""
    fold = case.prompt % FOLDS
    squares, products = [], []
    for n in range(FOLDS):
        x = columns[(fold == n) & case.kept]
        squares.append(x.T @ x)
        products.append(x.T @ target[(fold == n) & case.kept])
    guess = np.zeros(len(target))
    for n in range(FOLDS):
        own = sum(squares) - squares[n], sum(products) - products[n]
        guess[fold == n] = columns[fold == n] @ np.linalg.lstsq(*own, rcond=1e-9)[0]
    return guess


def by_sampling(case: Case, error: Floats) -> float:
    """Share of a squared error that may follow log p because the engine sampled by its own error.

    A token that is drawn by p exp(e) has e higher by its variance where p is small, and not where
    p is 1; another side's error goes along by its covariance with e.
    """
    assert case.reference is not None
    own = (case.left - case.reference)[case.kept]
    other = error[case.kept]
    limits = (float(np.quantile(np.abs(e), TAIL)) for e in (own, other))
    own, other = (np.clip(e, -m, m) for e, m in zip((own, other), limits, strict=True))
    size = float((other**2).mean())
    return float((own * other).mean()) ** 2 / size if size > 0 else 0.0


def beyond(case: Case, side: Predicted, plain: Predicted) -> Estimate:
    """A side's share minus that of a plain forward at its precision, with its 95 % interval
    (jackknife over prompts)."""
    present = np.flatnonzero(side.of_entropy + plain.of_entropy > 0)
    value = side.share() - plain.share()
    without = np.array([side.share(n) - plain.share(n) for n in present])
    arm = student(len(present) - 1) * jackknife_error(without)
    n_sequences = len(np.unique(case.sequence[case.kept]))
    count = int(case.kept.sum())
    return Estimate(value, value - arm, value + arm, count, n_sequences, len(present))


def followed(case: Case, side: Side) -> tuple[Estimate, float, Evidence] | None:
    """Share of one side's squared error that its own law explains beyond a plain forward's, and
    what healthy sides stay below; None without float32 and such a forward, or of few tokens."""
    left = side == "engine"
    scoring, logprobs = (case.engine, case.left) if left else (case.trainer, case.right)
    reference = case.others.get(REFERENCE)
    plain = case.others.get(f"{PLAIN}:{scoring.fingerprint.get('dtype')}")
    few = case.kept.sum() < MIN_TOKENS or case.n_prompts < FEW_PROMPTS
    if few or plain is None or reference is None or reference.entropy is None:
        return None
    law, entropy = reference.logprobs.astype(np.float64), reference.entropy.astype(np.float64)
    errors = logprobs - law, plain.logprobs - law
    if np.abs(errors[1]).mean() < NO_ROUNDING or not np.isfinite(entropy).all():
        return None
    share = beyond(case, *(predicted(case, e, law, entropy) for e in errors))
    chosen, as_much = (by_sampling(case, error) for error in errors)
    bound = SMALL + max(0.0, chosen - as_much)
    what = f"squared error of the {side} that its own law explains, beyond a plain forward's"
    return share, bound, Evidence(what, share.value, f"below {bound:.2g}")


def kind_of(case: Case, side: Side) -> tuple[str, tuple[str, ...], tuple[Evidence, ...]]:
    """As :func:`displacement.kind`; a function of the logits where its own law explains most."""
    cause, alike, numbers = kind(case)
    own = followed(case, side)
    if own is None or not above(own[0], MOST + 1 - correlation(case)):
        return cause, alike, numbers
    return "function-differs", ALIKE, (*numbers, own[2])


def smooth(case: Case) -> Look | NotTested:
    """Both sides' errors against their own laws; the yardstick is a plain forward's error."""
    sides: tuple[Side, ...] = ("engine", "trainer")
    looked = [(side, *own) for side in sides if (own := followed(case, side)) is not None]
    if not looked:
        what = f"{REFERENCE} with its entropy, {PLAIN}:<dtype of a side>"
        reason = f"needs {what}, and {MIN_TOKENS} tokens of {FEW_PROMPTS} prompts"
        return NotTested(WHAT, reason, "drop --no-noise-floor")
    evidence = tuple(row[3] for row in looked)
    side, share, bound, _ = max(looked, key=lambda row: row[1].value - row[2])
    finding = Finding("function-differs", side, None, evidence, alike=ALIKE)
    return Look(evidence, (finding,) if above(share, bound) else ())


def far_side(case: Case) -> Look | NotTested:
    """Which side stands far from float32, and whether its weights or its function differ."""
    precisions = of_two_precisions(case)
    if precisions is None:
        return NotTested(
            "distance from float32",
            f"needs {REFERENCE}, and {PLAIN}:<dtype> where the sides' dtypes differ",
            "drop --no-noise-floor",
        )
    legs, times = precisions[:2], precisions[2]
    limits = [float(np.quantile(np.abs(leg[case.kept]), 0.995)) for leg in legs]
    engine, trainer = (
        np.minimum(np.abs(leg), limit) for leg, limit in zip(legs, limits, strict=True)
    )
    ratios = {
        "engine": case.ratio(engine, times * trainer + EXACT_FLOOR),
        "trainer": case.ratio(times * trainer, engine + EXACT_FLOOR),
    }
    side: Side = "engine" if ratios["engine"].value >= 1 else "trainer"
    reference = case.reference
    assert reference is not None
    alone = (case.left, reference) if side == "engine" else (reference, case.right)
    cause, alike, numbers = kind_of(case if times == 1 else case.repaired(*alone), side)
    distance = f"distance of the {side} from float32 over the other side's"
    distance += "" if times == 1 else ", over that of their precisions"
    evidence = (Evidence(distance, ratios[side].value, "0.9 to 1.1"), *numbers)
    if not above(ratios[side], FAR):
        return Look(evidence)
    # The side at fault replaced by float32: what remains is the other side's own rounding.
    good = legs[1] if side == "engine" else -legs[0]
    effect = case.share(good)
    if not above(effect, 0.1):
        return Look(evidence)
    repaired = (reference, case.right) if side == "engine" else (case.left, reference)
    if side == "engine" and agree_in_float32(case):
        cause = "side-off"
    if exact_side(case) is not None:
        # A side that rounds where the other one does not moves all tokens alike, as weights do.
        cause = cause if cause == "function-differs" else "side-off"
        alike = tuple(dict.fromkeys((*alike, *COARSER)))
    finding = Finding(cause, side, effect, evidence, alike=alike, repair=Repair(*repaired))
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("far-side", "function", ("function-differs", "weights-differ", "side-off"), far_side,
             f"the pass {REFERENCE}", 51),
    Detector("own-law", "function", ("function-differs",), smooth,
             f"the passes {REFERENCE} and {PLAIN}:<dtype>", 52),
)  # fmt: skip
