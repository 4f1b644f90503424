"""Is a side's own error a smooth function of its own law? Rounding is not; another function is.

A softcap, a temperature or a scale of the logits moves each log-probability by an amount that
log p and the entropy of the position tell; rounding moves it at random. So a small one of these is
seen though the side is hardly farther from float32 than rounding alone would have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, above
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Side
from mismatch.analysis.diagnosis.detectors.displacement import FUNCTIONS, NO_ROUNDING, WEIGHTS
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


def smooth(case: Case) -> Look | NotTested:
    """Both sides' errors against their own laws; the yardstick is a plain forward's error."""
    reference = case.others.get(REFERENCE)
    if reference is None or reference.entropy is None or not np.isfinite(reference.entropy).all():
        return NotTested(WHAT, f"needs {REFERENCE} with its entropy", "drop --no-noise-floor")
    if case.kept.sum() < MIN_TOKENS or case.n_prompts < FEW_PROMPTS:
        return NotTested(WHAT, f"needs {MIN_TOKENS} tokens of {FEW_PROMPTS} prompts")
    law, entropy = reference.logprobs.astype(np.float64), reference.entropy.astype(np.float64)
    looked: list[tuple[Side, Estimate, float]] = []
    sides: tuple[tuple[Side, Floats, str], ...] = (
        ("engine", case.left, str(case.engine.fingerprint.get("dtype"))),
        ("trainer", case.right, str(case.trainer.fingerprint.get("dtype"))),
    )
    for side, logprobs, dtype in sides:
        plain = case.others.get(f"{PLAIN}:{dtype}")
        if plain is None or np.abs(plain.logprobs - law).mean() < NO_ROUNDING:
            continue
        errors = logprobs - law, plain.logprobs - law
        share = beyond(case, *(predicted(case, e, law, entropy) for e in errors))
        chosen, as_much = (by_sampling(case, error) for error in errors)
        looked.append((side, share, SMALL + max(0.0, chosen - as_much)))
    if not looked:
        return NotTested(WHAT, f"needs {PLAIN}:<dtype of a side>", "drop --no-noise-floor")
    what = "squared error of the {} that its own law explains, beyond a plain forward's"
    evidence = tuple(
        Evidence(what.format(side), share.value, f"below {bound:.2g}")
        for side, share, bound in looked
    )
    side, share, bound = max(looked, key=lambda row: row[1].value - row[2])
    if not above(share, bound):
        return Look(evidence)
    finding = Finding("function-differs", side, None, evidence, alike=ALIKE)
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("own-law", "function", ("function-differs",), smooth,
             f"the passes {REFERENCE} and {PLAIN}:<dtype>", 52),
)  # fmt: skip
