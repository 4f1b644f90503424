"""Compare any two scorings of the same tokens, from one run or from two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mismatch.analysis.comparison import compare, is_sampling_law
from mismatch.analysis.diagnosis.semantics import input_checks
from mismatch.analysis.levels import column_for, incomplete, judge, verdict
from mismatch.analysis.plugins import RunArtefacts, analyses
from mismatch.analysis.thresholds import Thresholds
from mismatch.attempts import Attempts
from mismatch.errors import MismatchError
from mismatch.models import named
from mismatch.pipeline.build import facts
from mismatch.pipeline.tokens import token_table
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.types import NotTested, Pair, Report, Rollout

if TYPE_CHECKING:
    import pandas as pd


UNTESTED = NotTested(
    "sampling, alignment, special tokens and weights",
    "these checks need the engine that sampled",
    "each run's own report has them",
)


def build_pair(
    left_run: Path,
    right_run: Path,
    names: tuple[str, str],
    thresholds: Thresholds | None = None,
    command: str = "",
) -> tuple[Report, pd.DataFrame]:
    """``names[0]`` of one run against ``names[1]`` of another (or the same): delta = right - left.

    Raises:
        MismatchError: the runs hold different tokens, a scoring is missing or not finite.
    """
    rollout, other = store.load_rollout(left_run), store.load_rollout(right_run)
    require_same_tokens(rollout, other, left_run, right_run)
    left = store.load_scoring(left_run, names[0])
    right = store.load_scoring(right_run, names[1])
    Pair.of(rollout, left, right)
    if left_run != right_run:
        first, second = left_run.resolve().name, right_run.resolve().name
        if first == second:
            first, second = "A", "B"
        left = replace(left, name=f"{first}/{left.name}")
        right = replace(right, name=f"{second}/{right.name}")
    elif names[0] == names[1]:
        fault = f"--left and --right are the same scoring, {names[0]}"
        raise MismatchError(fault, f"choose two of: {', '.join(store.scoring_names(left_run))}")
    spec = load_spec(left_run)
    law = is_sampling_law(rollout, left)
    texts = store.load_vocabulary(left_run)
    comparison = compare(rollout, left, right, sampled_by_left=law, seed=spec.seed, texts=texts)
    checks = input_checks(rollout, left, right)
    column = column_for(left.fingerprint, right.fingerprint)
    judgements = judge(comparison, column, thresholds)
    usable = {left.name: left, right.name: right}
    run = RunArtefacts(rollout, left, right, comparison, usable, {})
    attempts = Attempts()
    measured = {
        each.id: attempts.make(each.id, each.call, "measure", run, spec, otherwise=None)
        for each in analyses()
        if each.of_pairs
    }
    results = {id: each for id, each in measured.items() if not isinstance(each, NotTested)}
    report = Report(
        model=named(spec.rollout.engine.model),
        verdict=verdict(judgements, checks, column),
        fingerprints=named({side.name: side.fingerprint for side in (left, right)}),
        comparisons=(comparison,),
        noise_floor=(),
        checks=tuple(checks),
        not_tested=(UNTESTED,),
        run=named(facts(spec, rollout, command)) | {"runs": [str(left_run), str(right_run)]},
    ).with_analyses(**results)
    return incomplete(report, attempts.failed), token_table(left_run, rollout, left, right)


def require_same_tokens(ours: Rollout, theirs: Rollout, first: Path, second: Path) -> None:
    """Only scorings of the same tokens can be compared.

    Raises:
        MismatchError: it says where the two rollouts part.
    """
    if ours.n_sequences != theirs.n_sequences:
        where = f"{ours.n_sequences} and {theirs.n_sequences} sequences"
    else:
        pairs = zip(ours.sequences(), theirs.sequences(), strict=True)
        parted = [n for n, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
        if not parted:
            if np.array_equal(ours.action_mask, theirs.action_mask):
                return
            where = "other tokens are marked as sampled"
        else:
            where = (
                f"{len(parted)} of {ours.n_sequences} sequences differ, the first is {parted[0]}"
            )
    raise MismatchError(
        f"two runs of different tokens: {first} and {second}: {where}",
        f"score one rollout twice: copy {first} and run `mismatch score COPY --name NAME`, or "
        "compare the numbers of the two reports instead",
    )
