"""Faults of few tokens, planted into the log-probabilities of a recorded clean run.

    python benchmarks/planted_arrays.py RUN [RUN …]

RUN: a run directory of `mismatch check`, or of benchmarks/calibration.py. Every fault is planted
into all passes of the engine at the run's precision (a pass in float32 stays right), and the run is
judged again. Prints Markdown: what becomes of each fault over the whole run, and for rare faults of
several shares and sizes in how many of its blocks of 64 prompts they are found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.calibration_blocks import Recorded, blocks, judged
from mismatch.keys import FLOAT32, REFERENCE
from mismatch.types import Floats, Ints

SHARES, SIZES = (0.05, 0.02, 0.01, 0.005, 0.002), (1.0, 0.3, 0.1, 0.05)


@dataclass(frozen=True)
class Tokens:
    """[A] arrays of a run's action tokens.

    Attributes:
        noise: the engine's own rounding.
    """

    logprobs: Floats
    noise: Floats
    sequence: Ints
    prompt: Ints


def every(step: int, size: float) -> Callable[[Tokens], Floats]:
    return lambda t: np.where(np.arange(len(t.logprobs)) % step == 0, t.logprobs - size, t.logprobs)


def shift(size: float) -> Callable[[Tokens], Floats]:
    return lambda t: t.logprobs - size


def wrong_sequence(t: Tokens) -> Floats:
    """One response scored as another text."""
    rows = np.flatnonzero(t.sequence == t.sequence[len(t.sequence) // 2])
    return _with(t, rows, np.random.default_rng(0).permutation(t.logprobs)[: len(rows)] - 2.0)


def one_prompt(t: Tokens) -> Floats:
    return np.where(t.prompt == t.prompt[len(t.prompt) // 2], t.logprobs - 0.3, t.logprobs)


def last_token(t: Tokens) -> Floats:
    return np.where(np.diff(t.sequence, append=-1) != 0, t.logprobs - 2.0, t.logprobs)


def first_token(t: Tokens) -> Floats:
    return np.where(np.diff(t.sequence, prepend=-1) != 0, t.logprobs - 2.0, t.logprobs)


def louder(t: Tokens) -> Floats:
    """One token of a hundred rounds ten times as much."""
    rows = np.random.default_rng(0).random(len(t.noise)) < 0.01
    return np.where(rows, t.logprobs + 9.0 * t.noise, t.logprobs)


def one_token(t: Tokens) -> Floats:
    return _with(t, np.array([len(t.logprobs) // 2]), t.logprobs[len(t.logprobs) // 2] - 8.0)


def half_the_prompts(t: Tokens) -> Floats:
    return np.where(t.prompt % 2 == 1, t.logprobs + 0.01, t.logprobs - 0.01)


def sign_flip(t: Tokens) -> Floats:
    """One token of two hundred with the sign of its log-probability turned."""
    return np.where(np.arange(len(t.logprobs)) % 200 == 0, -t.logprobs, t.logprobs)


def shifted_by_a_token(t: Tokens) -> Floats:
    """Every twentieth response holds each token's value at the next one."""
    changed = t.logprobs.copy()
    for number in np.unique(t.sequence)[::20]:
        rows = np.flatnonzero(t.sequence == number)
        changed[rows] = np.roll(t.logprobs[rows], 1)
    return changed


def one_rank(t: Tokens) -> Floats:
    """Change a quarter of the prompts, as one rank of four has them."""
    return np.where(t.prompt % 4 == 0, t.logprobs + t.noise, t.logprobs)


def truncated_to_bf16(t: Tokens) -> Floats:
    bits = t.logprobs.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def _with(t: Tokens, rows: Ints, values: Floats) -> Floats:
    changed = t.logprobs.copy()
    changed[rows] = values
    return changed


FAULTS: dict[str, Callable[[Tokens], Floats]] = {
    "none": lambda t: t.logprobs,
    "every 200th token off by 1 nat": every(200, 1.0),
    "every 200th token off by 0.3 nats": every(200, 0.3),
    "all tokens off by 0.005 nats": shift(0.005),
    "all tokens off by 0.002 nats": shift(0.002),
    "half of the prompts 0.01 nats up, half down": half_the_prompts,
    "one response wholly wrong": wrong_sequence,
    "one prompt's tokens off by 0.3 nats": one_prompt,
    "last token of each response off by 2 nats": last_token,
    "first token of each response off by 2 nats": first_token,
    "1 % of the tokens round 10 times as much": louder,
    "every 200th logprob with its sign turned": sign_flip,
    "one token off by 8 nats": one_token,
    "5 % of the responses shifted by a token": shifted_by_a_token,
    "clamped at -5": lambda t: np.maximum(t.logprobs, -5.0),
    "times 1.002": lambda t: t.logprobs * 1.002,
    "tokens under e^-3 times 1.02": lambda t: np.where(t.logprobs < -3, 1.02, 1.0) * t.logprobs,
    "all round 1.3 times as much": lambda t: t.logprobs + 0.3 * t.noise,
    "one rank of four rounds twice as much": one_rank,
    "stored in bf16, cut off": truncated_to_bf16,
    "stored with 2 decimals": lambda t: np.round(t.logprobs, 2),
}


def planted(run: Recorded, fault: Callable[[Tokens], Floats]) -> Recorded:
    """Return the run with the fault in the engine's passes at the engine's precision."""
    found = run.found
    sequence = found.rollout.sequence_of_token[found.rollout.actions]
    prompt = found.rollout.prompt_index[sequence]
    engine = found.decode.name.partition(":")[0]
    exact = found.scorings.get(f"{engine}:{FLOAT32}", found.scorings[REFERENCE]).logprobs
    scorings = {
        name: replace(one, logprobs=fault(Tokens(one.logprobs, one.logprobs - exact,
                                                 sequence, prompt)))
        if name.startswith(f"{engine}:") and not name.endswith(FLOAT32)
        else one
        for name, one in found.scorings.items()
    }  # fmt: skip
    prefill = None if found.prefill is None else scorings[found.prefill.name]
    made = replace(found, scorings=scorings, decode=scorings[found.decode.name], prefill=prefill)
    return replace(run, found=made)


def whole(run: Recorded) -> list[str]:
    rows = ["| fault | correctness | fitness | checks |", "| --- | --- | --- | --- |"]
    for name, fault in FAULTS.items():
        said = judged(planted(run, fault))
        checks = [*said["failed"], *(f"{id} (warns)" for id in said["warned"])]
        rows.append(
            f"| {name} | {said['correctness']} | {said['fitness']} | {', '.join(checks) or '–'} |"
        )
    return rows


def grid(run: Recorded) -> list[str]:
    """Blocks in which one check or more fails, of all, by share of the tokens and nats."""
    parts = list(blocks(run))
    rows = [f"| share | {' | '.join(f'{size:g} nats' for size in SIZES)} |",
            "| ---: |" + " ---: |" * len(SIZES)]  # fmt: skip
    for share in SHARES:
        cells = []
        for size in SIZES:
            hit = [planted(part, every(round(1 / share), size)) for part in parts]
            found = sum(judged(part)["correctness"] in ("broken", "inconclusive") for part in hit)
            cells.append(f"{found} of {len(parts)}")
        rows.append(f"| {100 * share:g} % | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for place in parser.parse_args().runs:
        run = Recorded.load(place)
        rollout = run.found.rollout
        print(f"\n{place}: {rollout.n_prompts} prompts, {rollout.n_actions:,} tokens\n")
        print("\n".join([*whole(run), "", *grid(run)]), flush=True)


if __name__ == "__main__":
    main()
