"""How often intervals of a gradient check hold the number over all batches: docs/gradients.md.

    python benchmarks/gradient_intervals.py

Prompts of uneven size; gradients that are off by noise alone, and by a shift besides.
"""

from __future__ import annotations

import numpy as np

from mismatch.experiments.gradients.coefficients import Sketched, fisher
from mismatch.metrics.inference import jackknife

DIMENSION, REPETITIONS = 60, 1500
NAMES = ("length", "cosine")


def main() -> None:
    """Print one line per number of prompts and size of the shift."""
    print(f"{'prompts':>8}{'bias':>6}", *(f"{name:>15}" for name in NAMES))
    for prompts in (6, 12, 24):
        for shift in (0.0, 0.3):
            shares = covered(prompts, shift)
            print(f"{prompts:8}{shift:6}", *(f"{share:15.1%}" for share in shares))


def covered(prompts: int, size: float) -> list[float]:
    """Coverage of every number's interval, in the order of NAMES."""
    draw = np.random.default_rng(5)
    common, shift = draw.normal(size=(2, DIMENSION))
    values: list[list[float]] = [[] for _ in NAMES]
    ends: list[list[tuple[float, float]]] = [[] for _ in NAMES]
    for _ in range(REPETITIONS):
        scale = draw.gamma(2.0, 0.5, (prompts, 1))
        reference = scale * (0.3 * common + draw.normal(size=(prompts, DIMENSION)))
        noise = 0.3 * draw.normal(size=(prompts, DIMENSION))
        made = Sketched.of(reference + scale * (size * shift + noise), reference)
        w = made.weights
        numbers = (made.log_norm(w), fisher(made.gap(w)))
        for index, one in enumerate(numbers):
            values[index].append(float(one[0]))
            ends[index].append(jackknife(one, float(one[0]), float) or (0.0, 0.0))
    truths = [float(np.mean(one)) for one in values]
    return [
        float(np.mean([low <= truth <= high for low, high in found]))
        for found, truth in zip(ends, truths, strict=True)
    ]


if __name__ == "__main__":
    main()
