"""Deltas whose tokens, samples and prompts are alike in known ways, and what is true of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.analysis.displaced import EXCESS, excess_terms
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.types import Estimate

SCALE = 0.05
SAMPLES, TOKENS = 4, 128
NAMES = (
    "logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_p99", "logprob_abs_diff_p999",
    "clip_fraction", "ess_token", "ess_seq", "token_mult_prob_error",
)  # fmt: skip
EXCESS_RATIO = "excess"
LARGE, PARTS = 2_000, 12  # prompts drawn for a truth, how often


@dataclass(frozen=True)
class Design:
    """How deltas are drawn: Gaussian, given scales that prompts and samples share.

    Attributes:
        by_prompt, by_sample: standard deviations of the logarithm of these scales.
        spikes: share of tokens with a jump of N(0, 1) nats more.
        odd: share of prompts whose scale is ``times`` as large.
        common: standard deviation of what all tokens of a sample have in common, over SCALE.
        shared: the same of all tokens of a prompt.
        odd_samples: share of responses whose scale is ``times`` as large.
        freedom: of Student's t, instead of the Gaussian, that tokens are drawn from; 0: Gaussian.
        spike_freedom: the same of the jumps.
        rises: scale of the last token over that of the first.
    """

    name: str
    by_prompt: float = 0.4
    by_sample: float = 0.3
    spikes: float = 0.0
    odd: float = 0.0
    times: float = 8.0
    common: float = 0.0
    shared: float = 0.0
    odd_samples: float = 0.0
    freedom: float = 0.0
    spike_freedom: float = 0.0
    rises: float = 1.0

    def scales(self, rng: np.random.Generator, prompts: int) -> np.ndarray:
        """[P, S, 1]."""
        scale = np.exp(self.by_prompt * rng.normal(size=(prompts, 1, 1)))
        scale = scale * np.where(rng.random((prompts, 1, 1)) < self.odd, self.times, 1.0)
        scale = scale * np.exp(self.by_sample * rng.normal(size=(prompts, SAMPLES, 1)))
        odd = rng.random((prompts, SAMPLES, 1)) < self.odd_samples
        return scale * np.where(odd, self.times, 1.0)

    def draw(self, rng: np.random.Generator, scale: np.ndarray) -> np.ndarray:
        """Of prompts x samples x tokens, flat."""
        shape = len(scale), SAMPLES, TOKENS
        delta = SCALE * scale * noise(rng, shape, self.freedom)
        delta *= np.linspace(1.0, self.rises, TOKENS)
        if self.common:
            delta += SCALE * self.common * rng.normal(size=(len(scale), SAMPLES, 1))
        if self.spikes:
            jumps = noise(rng, shape, self.spike_freedom)
            delta += np.where(rng.random(shape) < self.spikes, jumps, 0.0)
        if self.shared:
            delta += SCALE * self.shared * rng.normal(size=(len(scale), 1, 1))
        return delta.ravel()


DESIGNS = (
    Design("even"),
    Design("uneven prompts", by_prompt=0.8),
    Design("spikes", spikes=1.5e-3),
    Design("two kinds of prompts", odd=1 / 12),
    Design("common part", common=0.05),
)


def noise(rng: np.random.Generator, shape: tuple[int, ...], freedom: float) -> np.ndarray:
    """Draw standard normal numbers, or Student's t of ``freedom``."""
    return rng.standard_t(freedom, shape) if freedom else rng.normal(size=shape)


# Of a reader who looked for what the rules do not cover; then seven that were drawn once the rules
# were fixed.
OTHERS = (
    Design("lognormal by prompt and sample", by_prompt=0.5, by_sample=0.5),
    Design("spikes (t 2.5) in 2 tokens of 1,000", spikes=2e-3, spike_freedom=2.5),
    Design("tails of t 2.2", freedom=2.2),
    Design("1 prompt in 12 is 8 x", odd=1 / 12),
    Design("1 response in 40 is 10 x", odd_samples=1 / 40, times=10.0),
    Design("1 prompt in 50 is 10 x", odd=1 / 50, times=10.0),
    Design("prompts share a part", shared=0.5),
    Design("tails of t 3, uneven prompts", freedom=3.0, by_prompt=0.6),
    Design("1 prompt in 30 is 5 x", odd=1 / 30, times=5.0),
    Design("1 prompt in 6 is 3 x", odd=1 / 6, times=3.0),
    Design("1 response in 100 is 20 x", odd_samples=1 / 100, times=20.0),
    Design("grows fourfold along a response", rises=4.0),
    Design("spikes in 1 token of 100", spikes=1e-2),
    Design("responses share a part, 1 in 20 is 4 x", common=0.5, odd_samples=1 / 20, times=4.0),
)


def layout(prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence of each token, prompt of each sequence)."""
    sequences = prompts * SAMPLES
    return np.repeat(np.arange(sequences), TOKENS), np.arange(sequences) // SAMPLES


def truths(design: Design) -> dict[str, float]:
    """Of every number: means over large draws."""
    rng = np.random.default_rng(20)
    sequence, _ = layout(LARGE)
    parts: dict[str, list[float]] = {name: [] for name in (*NAMES, EXCESS_RATIO)}
    for _ in range(PARTS):
        scale = design.scales(rng, LARGE)
        delta, plain = design.draw(rng, scale), design.draw(rng, scale)
        arrays = {"delta": delta, "sequence": sequence}
        for name in NAMES:
            metric = METRICS[name]
            parts[name].append(metric(*(arrays[need] for need in metric.needs)))
        terms = excess_terms(delta, plain)
        parts[EXCESS_RATIO].append(float(EXCESS.of_means(terms.mean(axis=0))))
    return {name: float(np.mean(values)) for name, values in parts.items()}


def estimates(design: Design, prompts: int, seed: list[int]) -> dict[str, Estimate]:
    """Every number of one drawn run, as a report would have it."""
    rng = np.random.default_rng(seed)
    sequence, prompt = layout(prompts)
    scale = design.scales(rng, prompts)
    delta, plain = design.draw(rng, scale), design.draw(rng, scale)
    estimator = Estimator(sequence, prompt, seed=seed[-1])
    made = estimator.all([METRICS[name] for name in NAMES], {"delta": delta, "sequence": sequence})
    ratio = estimator.one(EXCESS, {"terms": excess_terms(delta, plain)})
    if ratio is not None:
        made[EXCESS_RATIO] = ratio
    return made
