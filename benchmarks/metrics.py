"""Every token and sequence metric with its interval, against k3 alone: time per token and growth.

    python benchmarks/metrics.py [--tokens 100000 1000000 10000000] [--repeat 3]

Synthetic scorings: 500 tokens per sequence on average, 8 samples per prompt, heavy-tailed deltas
whose scale differs between sequences. The floor is one float64 pass of numpy that computes k3 and
nothing else: no other metric, no interval. Both are timed by the processor's time on one thread, in
one run, the least of alternating repeats. Exit code 1 where the largest run takes over 60 floors,
or where time per token grows by over a quarter from a smaller run to a larger.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: one thread for both

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator

RATIO, GROWTH = 60.0, 1.25
LENGTH, SAMPLES = 500, 8


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(tokens: int, repeat: int) -> tuple[int, float, float]:
    """(metrics, seconds of k3 alone, seconds of all)."""
    rng = np.random.default_rng(0)
    sequences = max(tokens // LENGTH, SAMPLES)
    length = rng.multinomial(tokens - sequences, np.full(sequences, 1 / sequences)) + 1
    scale = 0.02 * np.exp(rng.normal(0.0, 0.4, sequences))
    rollout = -rng.exponential(1.0, tokens) * rng.random(tokens) ** 2
    train = rollout + rng.standard_t(4, tokens) * np.repeat(scale, length)
    sequence = np.repeat(np.arange(sequences), length)
    prompt = np.arange(sequences) // SAMPLES
    arrays = {"rollout": rollout, "train": train, "sequence": sequence}

    def floor() -> float:
        delta = train - rollout
        return float(np.mean(np.expm1(delta) - delta))

    def ours() -> int:
        return len(Estimator(sequence, prompt).all(METRICS.values(), arrays))

    floor()
    metrics = ours()
    rounds = [(seconds(floor), seconds(ours)) for _ in range(repeat)]
    alone, everything = (min(side) for side in zip(*rounds, strict=True))
    return metrics, alone, everything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"{'tokens':>11} {'metrics':>7} {'k3 s':>8} {'ours s':>8} {'ratio':>6} {'ns/token':>8}")
    ratio, pace = 0.0, np.inf
    linear = True
    for tokens in sorted(options.tokens):
        metrics, alone, everything = measure(tokens, options.repeat)
        ratio = everything / alone
        linear = linear and everything / tokens <= GROWTH * pace
        pace = min(pace, everything / tokens)
        print(
            f"{tokens:11,} {metrics:7} {alone:8.4f} {everything:8.3f} {ratio:6.1f} "
            f"{everything / tokens * 1e9:8.0f}",
            flush=True,
        )
    print(f"  {'PASS' if ratio <= RATIO else 'FAIL'}  {ratio:.1f} x k3 alone")
    print(f"  {'PASS' if linear else 'FAIL'}  time per token grows by at most {GROWTH} x")
    return 0 if ratio <= RATIO and linear else 1


if __name__ == "__main__":
    sys.exit(main())
