"""How often a 95 % interval holds the truth, where the truth is known.

    python benchmarks/coverage.py --write              # docs/evidence/intervals.md, minutes
    python benchmarks/coverage.py --prompts 64 --repeat 200
    python benchmarks/coverage.py --differences        # of means, before and after a fix

The designs are in benchmarks/coverage_designs.py. For differences, deltas have a scale that the
tokens of a prompt share and one that those of a sample share, as real deltas do: four samples of a
prompt are worth far less than four prompts. "light" tails are Gaussian given these scales; "heavy"
tails add a log-normal jump to 1.5 tokens in 1,000. Each repetition draws new tokens and makes the
interval that a report would print. Truths are closed forms there, and large draws for the rest.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import coverage_designs as designs  # noqa: E402
from mismatch.metrics import METRICS  # noqa: E402
from mismatch.metrics.difference import Sample, difference, excludes_zero, paired  # noqa: E402
from mismatch.metrics.estimator import Estimator  # noqa: E402
from mismatch.types import Estimate  # noqa: E402

AS_EVEN = "common part"  # its cells differ from those of "even" by 4 points at most
MOSTLY_WITHHELD = "logprob_abs_diff_p999"
PAGE = ROOT / "docs" / "evidence" / "intervals.md"
ENDLESS = ("k3_kl", "token_mult_prob_error")  # means of exponentials
MARKS = ("<!-- coverage -->", "<!-- end of coverage -->")
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
    """Return the scale that the tokens of a prompt share, [P, 1, 1]."""
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
    """Return the interval of one metric."""

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
        sides = [
            Sample({"delta": d, "sequence": sequence}, sequence, prompt) for d in (before, after)
        ]
        return paired(METRICS[name], *sides, seed=seed)

    return made


def by_prompt(
    name: str, shared: bool
) -> Callable[[np.random.Generator, int, bool, int], Estimate | None]:
    """Two runs with different tokens, on the same prompts or on others."""

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
    """Share of the repetitions in which a true difference is found."""
    told = 0
    for number in range(repetitions):
        made = case.made(np.random.default_rng([seed, number]), prompts, False, number)
        assert made is not None
        told += bool(excludes_zero(made))
    return told / repetitions


# ---------------------------------------------------------------- one run's numbers


@dataclass(frozen=True)
class Held:
    """What repetitions of one design at one number of prompts gave for one number.

    Attributes:
        held: of the intervals, those that hold the truth.
        made: repetitions with an interval; of the others it was withheld.
        bare: of the intervals, those without a warning.
    """

    held: int
    made: int
    bare: int
    repetitions: int

    @property
    def share(self) -> str:
        """Percent of the intervals that hold the truth."""
        return f"{100 * self.held / max(self.made, 1):.0f}"

    def cell(self) -> str:
        """Of the intervals: percent that hold the truth, and that warn if not all do; withheld."""
        withheld = 100 * (1.0 - self.made / self.repetitions)
        if not self.made:
            return "none"
        held, warn = 100 * self.held / self.made, 100 * (1.0 - self.bare / self.made)
        shares = (warn if self.bare else 0.0, "w"), (withheld, "–")
        notes = ", ".join(f"{share:.0f} {what}" for share, what in shares if share)
        return f"{held:.0f}" + ("" if self.bare else "\\*") + (f" ({notes})" if notes else "")


WARN = {"heavy-tail", "heavy-prompts", "few-prompts", "few-tokens"}


def numbers(
    design: designs.Design, prompts: int, repetitions: int, truth: dict[str, float]
) -> dict[str, Held]:
    """Every number of one design."""
    counts = {name: [0, 0, 0, 0] for name in truth}
    for number in range(repetitions):
        made = designs.estimates(design, prompts, [7, prompts, number])
        for name, value in truth.items():
            counts[name][3] += 1
            estimate = made.get(name)
            if estimate is None or estimate.low is None or estimate.high is None:
                continue
            held = estimate.low <= value <= estimate.high
            bare = not WARN & set(estimate.flags)
            for place, seen in enumerate((held, True, bare)):
                counts[name][place] += seen
    return {name: Held(*found) for name, found in counts.items()}


def write(lines: list[str]) -> None:
    """Return the part of docs/evidence/intervals.md between the marks."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text("\n".join([before + MARKS[0], "", *lines, "", MARKS[1]]) + after)


def table_of_numbers(sizes: list[int], repetitions: int) -> Iterator[str]:
    """Yield a row per design and number."""
    yield "| design | number |" + "".join(f" {prompts} prompts |" for prompts in sizes)
    yield "| --- | --- |" + " ---: |" * len(sizes)
    for design in designs.DESIGNS:
        if design.name == AS_EVEN:
            continue
        truth = designs.truths(design)
        found = {n: numbers(design, n, repetitions, truth) for n in sizes}
        for place, name in enumerate(each for each in truth if each != MOSTLY_WITHHELD):
            cells = "".join(f" {found[n][name].cell()} |" for n in sizes)
            yield f"| {'' if place else design.name + ' '}| {name} |{cells}"


def table_of_others(sizes: list[int], repetitions: int) -> Iterator[str]:
    """Yield a row per design of readers: percent held at each number of prompts, by number."""
    names = [name for name in (*designs.NAMES, designs.EXCESS_RATIO) if "_p99" not in name]
    yield "| design |" + "".join(f" {name} |" for name in names)
    yield "| --- |" + " ---: |" * len(names)
    for design in designs.OTHERS:
        truth = designs.truths(design)
        found = [numbers(design, n, repetitions, truth) for n in sizes]
        endless = design.freedom or design.spike_freedom  # E exp |delta| is infinite
        cells = [
            "–" if endless and name in ENDLESS else "/".join(each[name].share for each in found)
            for name in names
        ]
        yield f"| {design.name} |" + "".join(f" {cell} |" for cell in cells)


def table_of_differences(sizes: list[int], repetitions: int) -> Iterator[str]:
    """Yield a row per interval and kind of tails: means, and differences of means."""
    yield f"| {'interval':29} | tails |" + "".join(f" {prompts} prompts |" for prompts in sizes)
    yield "| --- | --- |" + " ---: |" * len(sizes)
    for tails in ("light", "heavy"):
        for case in CASES:
            cells = []
            for prompts in sizes:
                got = coverage(case, prompts, tails == "heavy", repetitions)
                cells.append(f"{100 * got.held:.1f} % ({100 * got.flagged:.0f} %)")
            yield f"| {case.name:29} | {tails} |" + "".join(f" {c:>17} |" for c in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 16, 64, 256])
    parser.add_argument("--repeat", type=int, default=400)
    parser.add_argument("--differences", action="store_true", help="their table, printed alone")
    parser.add_argument("--others", action="store_true", help="designs of readers, printed alone")
    parser.add_argument(
        "--write", action="store_true", help="replace the table of docs/evidence/intervals.md"
    )
    args = parser.parse_args()
    start = time.monotonic()
    lines = [
        f"Percent of the intervals that contain the truth; {args.repeat} repetitions, "
        f"{designs.SAMPLES} samples × {designs.TOKENS} tokens. In brackets: the percentage with a "
        "warning (w; \\*: all), and of the runs in which the interval is withheld (–). "
        "Where all tokens of a sample share 5 % of a scale, cells are those of *even*.",
        "",
    ]
    table = table_of_differences if args.differences else table_of_numbers
    table = table_of_others if args.others else table
    for row in table(args.prompts, args.repeat):
        print(row, flush=True)
        lines.append(row)
    print(f"\n{time.monotonic() - start:.0f} s")
    if args.write and not args.differences and not args.others:
        write(lines)


if __name__ == "__main__":
    main()
