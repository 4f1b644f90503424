"""Two scorings of the same tokens side by side, from one run or from two.

The first engine samples in the run itself, the second in ``engines/NAME``, a run directory of its
own; then the first is started once more for the second's tokens. One training world scores both.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.comparison import compare, is_sampling_law
from mismatch.analysis.corrections.preview import preview
from mismatch.analysis.diagnosis.semantics import input_checks
from mismatch.analysis.levels import column_for, judge, verdict
from mismatch.errors import MismatchError
from mismatch.experiments.engine_pair import DIRECTORY, other_folder, other_spec
from mismatch.experiments.scoring_passes import Job
from mismatch.models import named
from mismatch.pipeline.build import facts
from mismatch.pipeline.tokens import token_table
from mismatch.processes.launch import Worker
from mismatch.processes.stages import Stages
from mismatch.run import resume, store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, Pass
from mismatch.types import NotTested, Pair, Report, Rollout

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.analysis.levels import Thresholds


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
        first, second = _labels(left_run, right_run)
        left = replace(left, name=f"{first}/{left.name}")
        right = replace(right, name=f"{second}/{right.name}")
    elif names[0] == names[1]:
        raise MismatchError(
            f"--left and --right are the same scoring, {names[0]}",
            f"choose two of: {', '.join(store.scoring_names(left_run))}",
        )
    spec = load_spec(left_run)
    law = is_sampling_law(rollout, left)
    texts = store.load_vocabulary(left_run)
    comparison = compare(rollout, left, right, sampled_by_left=law, seed=spec.seed, texts=texts)
    checks = input_checks(rollout, left, right)
    column = column_for(left.fingerprint, right.fingerprint)
    judgements = judge(comparison, column, thresholds)
    report = Report(
        model=named(spec.rollout.engine.model),
        verdict=verdict(judgements, checks, column),
        fingerprints=named({side.name: side.fingerprint for side in (left, right)}),
        comparisons=(comparison,),
        noise_floor=(),
        checks=tuple(checks),
        not_tested=(UNTESTED,),
        run=named(facts(spec, rollout, command)) | {"runs": [str(left_run), str(right_run)]},
    ).with_analyses(
        corrections=preview(rollout, left, right, sampled_by_left=law, seed=spec.seed),
    )
    return report, token_table(left_run, rollout, left, right)


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


def _labels(left: Path, right: Path) -> tuple[str, str]:
    names = left.resolve().name, right.resolve().name
    return names if names[0] != names[1] else ("A", "B")


def measure_two(stages: Stages, passes: list[Pass]) -> None:
    """Everything that a check with two engines needs.

    Raises:
        MismatchError: an engine or the training world failed; what is there stays, to be resumed.
    """
    stages.measure(passes, extra=SecondEngine(stages))


class SecondEngine:
    """The second engine of a check; a :class:`mismatch.processes.stages.ExtraJobs`."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.spec = other_spec(stages.spec)
        self.directory = stages.run_dir / other_folder(stages.spec)
        train = self.spec.train
        done = resume.rollout_done(self.directory, self.spec.rollout)
        scored = done and resume.scoring_done(self.directory, TRAIN, train)
        self.jobs = [] if scored else [Job(self.directory, Pass(TRAIN, train))]

    def prepare(self, *world: Worker) -> dict[str, Any]:
        """Sample with the second engine, and have each rescore the other's tokens."""
        home, engine = self.stages.run_dir, self.spec.rollout.engine.engine
        self.directory.mkdir(parents=True, exist_ok=True)
        command = self.stages.journal.entry["command"]
        try:
            with at_work(self.directory, "check", self.spec, command) as journal:
                own = Stages(self.spec, self.directory, self.stages.narrator, journal)
                own.sample(*world, also=[home])
        except MismatchError as error:
            for worker in world:
                worker.ended()  # raises if it was the world that failed
            raise MismatchError(
                f"the second engine, {engine}: {error.message}",
                error.fix or f"its log is {Path(DIRECTORY) / engine / 'logs/engine.log'}",
            ) from error
        self.stages.sample(*world, also=[self.directory])
        return {}


def dry_run_lines(spec: CheckSpec) -> list[str]:
    """What ``--dry-run`` says about the second engine."""
    if spec.other_engine is None:
        return []
    first, second = spec.rollout.engine.engine, spec.other_engine.engine
    return [
        f"two engines: {first} samples, then {second}, and each rescores the other's tokens: "
        "three engine starts, and one more pass of the trainer; one engine at a time in memory"
    ]
