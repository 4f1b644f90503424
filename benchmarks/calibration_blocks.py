"""Blocks of prompts cut from a recorded run, each judged by the verdict's own code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.analysis.comparison import inputs, is_routing, is_sampling_law
from mismatch.analysis.diagnosis.pass_checks import not_finite
from mismatch.analysis.diagnosis.semantics import input_checks
from mismatch.analysis.levels import column_for, judge, verdict
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import Square
from mismatch.analysis.square import measure, precision_of
from mismatch.analysis.square_checks import square_checks
from mismatch.analysis.thresholds import default_thresholds
from mismatch.attempts import Attempts
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.pipeline.build import Artefacts, checks_of, without_square
from mismatch.run.directory import load_spec
from mismatch.specs import CheckSpec
from mismatch.types import Comparison, Pair, Rollout, Routing, Scoring

BLOCK = 64  # prompts
DIGITS = 4  # of the numbers that are kept


@dataclass(frozen=True)
class Recorded:
    """What the stages of one check left, as a report reads it.

    Attributes:
        yardstick: of the engine, where another plain pass is to be it: "plain:<precision>".
    """

    found: Artefacts
    spec: CheckSpec
    yardstick: str = ""

    @classmethod
    def load(cls, place: Path, yardstick: str = "") -> Recorded:
        spec = load_spec(place)
        return cls(Artefacts.load(place, spec), spec, yardstick)

    def of_prompts(self, prompts: np.ndarray) -> Recorded:
        """Return the same run with some of its prompts only."""
        old = self.found
        scorings = {
            name: cut_scoring(scoring, old.rollout, prompts)
            for name, scoring in old.scorings.items()
        }
        prefill = None if old.prefill is None else scorings[old.prefill.name]
        made = Artefacts(
            old.rollout.only(np.flatnonzero(np.isin(old.rollout.prompt_index, prompts))),
            scorings,
            scorings[old.decode.name],
            scorings[old.train.name],
            prefill,
        )
        return replace(self, found=made)

    def measured(self) -> RunArtefacts:
        """Return what analyses read, without a comparison; the engine's yardstick as asked for."""
        usable = {name: one for name, one in self.found.scorings.items() if not not_finite(one)}
        decode, dtype = self.found.decode, self.yardstick.partition(":")[2]
        if dtype not in ("", precision_of(decode.fingerprint)):
            usable = {
                name: replace(one, fingerprint=one.fingerprint | {"kv_cache_dtype": dtype})
                if "kv_cache_dtype" in one.fingerprint and not name.endswith(":fp32")
                else one
                for name, one in usable.items()
            }
            decode = usable[decode.name]
        nothing: Any = None
        return RunArtefacts(self.found.rollout, decode, self.found.train, nothing, usable, {})


def cut_scoring(old: Scoring, rollout: Rollout, prompts: np.ndarray) -> Scoring:
    """Without whole distributions: those are of a sample of positions of the whole run."""
    tokens = np.isin(rollout.prompt_index, prompts)[rollout.sequence_of_token]
    keep = tokens[rollout.actions]
    return replace(
        old,
        token_ids=old.token_ids[keep],
        logprobs=old.logprobs[keep],
        entropy=None if old.entropy is None else old.entropy[keep],
        top1=None if old.top1 is None else old.top1[keep],
        routing=None if old.routing is None else _cut_routing(old.routing, tokens),
        extra={name: values[keep] for name, values in old.extra.items()},
        distributions=None,
    )


def _cut_routing(old: Routing, tokens: np.ndarray) -> Routing:
    return replace(
        old,
        ids=old.ids[tokens],
        present=old.present[tokens],
        weights=None if old.weights is None else old.weights[tokens],
        margin=None if old.margin is None else old.margin[tokens],
    )


def blocks(run: Recorded, size: int = BLOCK) -> Iterator[Recorded]:
    """Disjoint blocks of prompts in a random order; all prompts where they make but one."""
    prompts = np.random.default_rng(0).permutation(np.unique(run.found.rollout.prompt_index))
    for start in range(0, max(len(prompts) - size + 1, 1), size):
        yield run.of_prompts(prompts[start : start + size])


def headline(found: Artefacts, seed: int) -> Comparison:
    """Return the metrics that checks and levels read; whole comparisons take minutes."""
    pair = Pair.of(found.rollout, found.decode, found.train)
    names = ["ratio_mean", *(name for name in default_thresholds() if name in METRICS)]
    metrics = [METRICS[name] for name in names if not is_routing(METRICS[name])]
    made = Estimator(pair.sequence, pair.prompt, seed=seed).all(
        metrics, inputs(pair, found.decode, found.train)
    )
    law = is_sampling_law(found.rollout, found.decode)
    return Comparison(found.decode.name, found.train.name, law, made)


def judged(run: Recorded) -> dict[str, Any]:
    """All tests of the verdict on one run, as plain numbers.

    Returns:
        verdict: their worse one. correctness, fitness: status of the two answers. failed, warned:
        checks. values, low: of every finding of the square. chance: least of its sign tests. floor:
        of the gap. mean: |delta|.
    """
    found, spec, measured = run.found, run.spec, run.measured()
    sides = found.rollout, found.decode, found.train
    comparison = headline(found, spec.seed)
    square = measure(measured, spec)
    results = {"square": square} if isinstance(square, Square) else {}
    attempts = Attempts()
    checks = input_checks(*sides) + checks_of(spec, found, comparison, attempts)
    assert not attempts.failed
    checks += square_checks(results.get("square"))
    column = column_for(measured.decode.fingerprint, found.train.fingerprint)
    reason = "" if column == "fp32" else without_square(spec, [comparison], results)
    answer = verdict(judge(comparison, column), checks, column, reason)
    findings = square.findings if isinstance(square, Square) else ()
    displaced = square.displaced if isinstance(square, Square) else ()
    gaps = square.gaps if isinstance(square, Square) else ()
    assert answer.correctness is not None
    assert answer.fitness is not None
    return {
        "verdict": answer.status,
        "correctness": answer.correctness.status,
        "fitness": answer.fitness.status,
        "failed": sorted(check.id for check in checks if check.status == "failed"),
        "warned": sorted(check.id for check in checks if check.status == "warning"),
        "values": {f"{f.evidence} {f.scoring}": _short(f.value.value) for f in findings},
        "low": {f"{f.evidence} {f.scoring}": _short(f.value.low) for f in findings},
        "chance": _short(min((one.chance for one in displaced), default=None)),
        "floor": _short(gaps[0].floor) if gaps else None,
        "mean": _short(comparison.metrics["logprob_abs_diff_mean"].value),
        "tokens": found.rollout.n_actions,
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
