"""How often a 95 % interval holds the truth, where the truth is known.

    python benchmarks/coverage.py                      # the table of docs/metrics.md, minutes
    python benchmarks/coverage.py --prompts 64 --repeat 200

Deltas have a scale that the tokens of a prompt share and one that those of a sample share, as real
ones do: four samples of a prompt are worth far less than four prompts. "light" tails are Gaussian
given these scales; "heavy" ones add a log-normal jump to 1.5 tokens in 1,000. Each repetition draws
new tokens and makes the interval that a report would print. Truths are closed forms.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, excludes_zero, paired
from mismatch.metrics.estimator import Estimator
from mismatch.types import Estimate

SCALE, BY_PROMPT, BY_SAMPLE = 0.05, 0.3, 0.2
SAMPLES, TOKENS = 4, 20
JUMPS, JUMP_MEDIAN, JUMP_SIGMA = 0.0015, 0.5, 1.0  # "heavy": share of tokens; their |delta|
BETTER = 0.9  # what a fix does to delta in the differences


@dataclass(frozen=True)
class Case:
    """One kind of interval: how it is made from drawn tokens, and the truth it should hold."""

    name: str
    truth: Callable[[bool], float]
    made: Callable[[np.random.Generator, int, bool, int], Estimate | None]


@dataclass(frozen=True)
class Coverage:
    """What many repetitions gave.

    Attributes:
        held: share of the intervals that hold the truth.
        flagged: share that warn of heavy tails or few prompts.
        width: mean width over the truth (or over the metric's own size, for differences).
    """

    held: float
    flagged: float
    width: float
    repetitions: int


def of_prompts(rng: np.random.Generator, prompts: int) -> np.ndarray:
    """The scale that the tokens of a prompt share, [P, 1, 1]."""
    return np.exp(BY_PROMPT * rng.normal(size=(prompts, 1, 1)))


def of_samples(rng: np.random.Generator, by_prompt: np.ndarray) -> np.ndarray:
    """With the one that the tokens of a sample share, [P, S, 1]."""
    return by_prompt * np.exp(BY_SAMPLE * rng.normal(size=(len(by_prompt), SAMPLES, 1)))


def draw(rng: np.random.Generator, scale: np.ndarray, heavy: bool) -> np.ndarray:
    """Deltas of prompts x samples x tokens, flat."""
    shape = len(scale), SAMPLES, TOKENS
    delta = SCALE * scale * rng.normal(size=shape)
    if heavy:
        jump = JUMP_MEDIAN * np.exp(JUMP_SIGMA * rng.normal(size=shape))
        signed = np.where(rng.random(shape) < 0.5, jump, -jump)
        delta = np.where(rng.random(shape) < JUMPS, signed, delta)
    return delta.ravel()


def layout(prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence of each token, prompt of each sequence)."""
    sequences = prompts * SAMPLES
    return np.repeat(np.arange(sequences), TOKENS), np.arange(sequences) // SAMPLES


def mean_size(heavy: bool) -> float:
    """E |delta|: half-normal of log-normal scale; log-normal jumps."""
    light = SCALE * math.exp((BY_PROMPT**2 + BY_SAMPLE**2) / 2) * math.sqrt(2 / math.pi)
    jump = JUMP_MEDIAN * math.exp(JUMP_SIGMA**2 / 2)
    return (1 - JUMPS) * light + JUMPS * jump if heavy else light


def mean_square(heavy: bool) -> float:
    """E delta² / 2."""
    light = SCALE**2 * math.exp(2 * (BY_PROMPT**2 + BY_SAMPLE**2)) / 2
    jump = JUMP_MEDIAN**2 * math.exp(2 * JUMP_SIGMA**2) / 2
    return (1 - JUMPS) * light + JUMPS * jump if heavy else light


def single(name: str) -> Callable[[np.random.Generator, int, bool, int], Estimate | None]:
    """The interval of one metric."""

    def made(rng: np.random.Generator, prompts: int, heavy: bool, seed: int) -> Estimate | None:
        sequence, prompt = layout(prompts)
        delta = draw(rng, of_samples(rng, of_prompts(rng, prompts)), heavy)
        arrays = {"delta": delta, "sequence": sequence}
        return Estimator(sequence, prompt, seed=seed).one(METRICS[name], arrays)

    return made


def on_same_tokens(name: str) -> Callable[[np.random.Generator, int, bool, int], Estimate | None]:
    """Before and after a fix that redraws every other token and shrinks all, on the same tokens."""

    def made(rng: np.random.Generator, prompts: int, heavy: bool, seed: int) -> Estimate | None:
        sequence, prompt = layout(prompts)
        scale = of_samples(rng, of_prompts(rng, prompts))
        before, again = draw(rng, scale, heavy), draw(rng, scale, heavy)
        after = BETTER * np.where(rng.random(len(before)) < 0.5, before, again)
        arrays = [{"delta": d, "sequence": sequence} for d in (before, after)]
        return paired(METRICS[name], *arrays, sequence=sequence, prompt=prompt, seed=seed)

    return made


def by_prompt(
    name: str, shared: bool
) -> Callable[[np.random.Generator, int, bool, int], Estimate | None]:
    """Two runs with tokens of their own, on the same prompts or on others."""

    def made(rng: np.random.Generator, prompts: int, heavy: bool, seed: int) -> Estimate | None:
        sequence, prompt = layout(prompts)
        own = of_prompts(rng, prompts)
        others = own if shared else of_prompts(rng, prompts)
        before = draw(rng, of_samples(rng, own), heavy)
        after = BETTER * draw(rng, of_samples(rng, others), heavy)
        runs = [
            Sample({"delta": d, "sequence": sequence}, sequence, prompt + shift)
            for d, shift in ((before, 0), (after, 0 if shared else prompts))
        ]
        return difference(METRICS[name], *runs, seed=seed)

    return made


CASES = (
    Case("mean |delta|", mean_size, single("logprob_abs_diff_mean")),
    Case("k2", mean_square, single("k2_kl")),
    Case(
        "mean |delta|, paired",
        lambda heavy: (BETTER - 1) * mean_size(heavy),
        on_same_tokens("logprob_abs_diff_mean"),
    ),
    Case("k2, paired", lambda heavy: (BETTER**2 - 1) * mean_square(heavy), on_same_tokens("k2_kl")),
    Case(
        "mean |delta|, by prompt",
        lambda heavy: (BETTER - 1) * mean_size(heavy),
        by_prompt("logprob_abs_diff_mean", shared=True),
    ),
    Case(
        "mean |delta|, other prompts",
        lambda heavy: (BETTER - 1) * mean_size(heavy),
        by_prompt("logprob_abs_diff_mean", shared=False),
    ),
)


def coverage(
    case: Case, prompts: int, heavy: bool = False, repetitions: int = 1000, seed: int = 0
) -> Coverage:
    """Repeat draw and interval; count those that hold the truth."""
    truth = case.truth(heavy)
    held = flagged = 0
    widths = 0.0
    for number in range(repetitions):
        rng = np.random.default_rng([seed, number])
        made = case.made(rng, prompts, heavy, number)
        assert made is not None
        assert made.low is not None
        assert made.high is not None
        held += made.low <= truth <= made.high
        flagged += bool({"heavy-tail", "few-prompts"} & set(made.flags))
        widths += (made.high - made.low) / abs(truth)
    return Coverage(held / repetitions, flagged / repetitions, widths / repetitions, repetitions)


def power(case: Case, prompts: int, repetitions: int = 200, seed: int = 0) -> float:
    """Share of the repetitions in which a true difference is told from none."""
    told = 0
    for number in range(repetitions):
        made = case.made(np.random.default_rng([seed, number]), prompts, False, number)
        assert made is not None
        told += bool(excludes_zero(made))
    return told / repetitions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 36, 64, 128, 256, 512])
    parser.add_argument("--repeat", type=int, default=1000)
    parser.add_argument(
        "--tails", choices=("light", "heavy"), nargs="+", default=["light", "heavy"]
    )
    args = parser.parse_args()
    print(f"{SAMPLES} samples x {TOKENS} tokens per prompt; {args.repeat} repetitions")
    print("coverage, in brackets the share that carries a warning\n")
    columns = "".join(f" {f'{prompts} prompts':>17} |" for prompts in args.prompts)
    print(f"| {'interval':29} | tails |{columns}")
    print("| --- | --- |" + " ---: |" * len(args.prompts))
    start = time.monotonic()
    for tails in args.tails:
        for case in CASES:
            cells = []
            for prompts in args.prompts:
                got = coverage(case, prompts, tails == "heavy", args.repeat)
                cells.append(f"{100 * got.held:.1f} % ({100 * got.flagged:.0f} %)")
            print(f"| {case.name:29} | {tails} |" + "".join(f" {c:>17} |" for c in cells))
    print(f"\n{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
