"""Measuring fixes: beside the check, in its own training world where that is possible.

Engines that fixes need sample one after the other once the check's own tokens are there; then one
training world scores everything. A fix that fails is a row with its reason; the others go on.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.experiments.fixes.planning import DIRECTORY, FixPlan, Variant, plan_fixes, plan_pairs
from mismatch.experiments.fixes.results import STATE, STATE_SCHEMA, table_of
from mismatch.experiments.fixes.spec_edits import context_of
from mismatch.experiments.scoring_passes import Job
from mismatch.processes.launch import Worker
from mismatch.processes.stages import Stages
from mismatch.run import resume, store
from mismatch.run.directory import at_work, invocations
from mismatch.run.messages import error_path, pass_label, read_error
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, Pass

ATTEMPTS = 3  # of a training world that a fix took down with it
REFUSED = ("id", "side", "summary", "flags", "applies", "reason")  # what is kept of a refused fix
ENGINE_SHARE = 0.5  # of the budget: the rest is for the trainer


def measure_with_fixes(stages: Stages, passes: list[Pass]) -> None:
    """The check's own rollout and passes, and all that its fixes need.

    Raises:
        MismatchError: the check itself failed; what fails with a fix is noted in its row.
    """
    context = context_of(stages.spec)
    plan = plan_fixes(stages.spec, context)
    for line in plan.lines(stages.spec.budget_minutes):
        stages.narrator.note(line)
    run = FixRun(stages, plan)
    run.measure(passes)
    if plan.pairs:
        run.pairs(context)
    run.save()


class FixRun:
    """The fixes of one check; a :class:`mismatch.processes.stages.ExtraJobs`."""

    def __init__(self, stages: Stages, plan: FixPlan) -> None:
        self.stages, self.plan = stages, plan
        self.run_dir = stages.run_dir
        self.variants = list(plan.variants)
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self.spent_s = 0.0
        self.jobs: list[Job] = []

    def measure(self, passes: list[Pass], sample: bool = True) -> None:
        """Everything that is not there yet, in one world if none of it takes that down."""
        for attempt in range(ATTEMPTS):
            pending = self.pending()
            self.jobs = [self.job(variant) for variant in pending]
            for job in self.jobs:
                error_path(self.run_dir, pass_label(job.pass_.name)).unlink(missing_ok=True)
            try:
                self.stages.measure(passes, sample, extra=self)
                break
            except MismatchError as error:
                if not self.dropped(pending, error) or attempt == ATTEMPTS - 1:
                    raise
        self.collect()

    def pending(self) -> list[Variant]:
        """Variants without a scoring."""
        return [
            variant
            for variant in self.variants
            if variant.id not in self.failed and not self.scored(variant)
        ]

    def scored(self, variant: Variant) -> bool:
        directory, pass_ = self.run_dir / variant.folder, variant.scoring
        fresh = not variant.folder or resume.rollout_done(directory, sampling_spec(variant).rollout)
        return fresh and resume.scoring_done(directory, pass_.name, pass_.spec)

    def job(self, variant: Variant) -> Job:
        return Job(self.run_dir / variant.folder, variant.scoring, optional=True)

    def dropped(self, pending: list[Variant], error: MismatchError) -> bool:
        """Give up on the fix that the world ended at; False if it ended for another reason."""
        if not resume.scoring_done(self.run_dir, TRAIN, self.stages.spec.train):
            return False
        self.refusals(pending)
        by_name = {v.scoring.name: v for v in pending}
        order = [by_name[job.pass_.name] for job in self.jobs]  # of the world that ended
        left = [v for v in order if v.id not in self.failed and not self.scored(v)]
        if not left:
            return False
        self.failed[left[0].id] = _first_line(error)
        self.stages.narrator.note(f"fix {left[0].id} failed: {self.failed[left[0].id]}")
        return True

    def refusals(self, variants: list[Variant]) -> None:
        """What the world said about passes that could not run."""
        for variant in variants:
            error = read_error(self.run_dir, pass_label(variant.scoring.name))
            if error is not None and variant.id not in self.failed:
                self.failed[variant.id] = error.message

    def prepare(self, *world: Worker) -> dict[str, Any]:
        """Sample with every engine that is needed; how long the passes of fixes may take."""
        start = time.monotonic()
        needed = {variant.folder: variant for variant in self.pending() if variant.folder}
        longest = self.stages.journal.seconds.get("rollout", 0.0)
        for folder, variant in needed.items():
            spent = self.spent_s + time.monotonic() - start
            if self.over(spent + longest, ENGINE_SHARE):
                self.leave_out(folder, "the engine's time in the budget")
                continue
            began = time.monotonic()
            self.sample(variant, world)
            longest = max(longest, time.monotonic() - began)
        allowed = self.allowed_s()
        if allowed is None:
            return {}
        return {"optional_s": max(0.0, allowed - self.spent_s - (time.monotonic() - start))}

    def sample(self, variant: Variant, world: tuple[Worker, ...]) -> None:
        """Tokens of its own for a variant; its failure is noted."""
        directory, spec = self.run_dir / variant.folder, sampling_spec(variant)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with at_work(directory, "fix", spec, self.stages.journal.entry["command"]) as journal:
                Stages(spec, directory, self.stages.narrator, journal).sample(*world)
        except MismatchError as error:
            for worker in world:
                worker.ended()  # raises if it was the world that failed
            reason = _first_line(error)
            if len(error.message.splitlines()) > 1:
                reason += f"; see {variant.folder}/logs/engine.log"
            self.stages.narrator.note(f"fix {variant.id} failed: {reason}")
            for other in self.variants:
                if other.folder == variant.folder:
                    self.failed[other.id] = reason

    def allowed_s(self) -> float | None:
        minutes = self.stages.spec.budget_minutes
        return None if minutes is None else 60.0 * minutes

    def over(self, seconds: float, share: float = 1.0) -> bool:
        allowed = self.allowed_s()
        return allowed is not None and seconds > share * allowed

    def leave_out(self, folder: str, what: str) -> None:
        for variant in [variant for variant in self.variants if variant.folder == folder]:
            self.variants.remove(variant)
            self.left_out.append(f"{variant.id}: not run, {what} is used up")

    def collect(self) -> None:
        """After a world: what failed in it, what it had no time for, and what it took."""
        missing = self.pending()
        self.refusals(missing)
        for variant in missing:
            if variant.id not in self.failed:
                self.variants.remove(variant)
                self.left_out.append(f"{variant.id}: not run, the budget is used up")
        self.spent_s = self.cost_s()

    def cost_s(self) -> float:
        """Seconds of the engines and of the forward passes that fixes took, earlier runs too."""
        places = {variant.folder for variant in self.variants if variant.folder}
        total = sum(self.engine_seconds(folder) for folder in places)
        for variant in self.variants:
            if self.scored(variant):
                header = store.scoring_header(self.run_dir / variant.folder, variant.scoring.name)
                total += header["fingerprint"].get("seconds", 0.0)
        return total

    def engine_seconds(self, folder: str) -> float:
        past = invocations(self.run_dir / folder)
        return max((entry.get("seconds", {}).get("rollout", 0.0) for entry in past), default=0.0)

    def pairs(self, context: Context) -> None:
        """Second round: pairs of the best fixes that help."""
        self.save()
        with suppress(MismatchError):  # the run itself cannot be compared: its report says why
            table = table_of(self.run_dir, self.stages.spec)
            best = [r.id for r in table.outcomes if r.outcome == "better" and not is_combination(r)]
            more, left = plan_pairs(self.stages.spec, context, self.variants, best)
            self.left_out += left
            if more and self.over(self.spent_s):
                names = ", ".join(v.id for v in more)
                self.left_out.append(f"pairs {names}: not run, the budget is used up")
            elif more:
                self.variants += more
                self.stages.narrator.note(f"fixes: pairs: {', '.join(v.id for v in more)}")
                self.measure([], sample=False)

    def save(self) -> None:
        """What the table is made of later."""
        document = {
            "schema": STATE_SCHEMA,
            "variants": [
                {"id": v.id, "place": v.folder, "failed": self.failed.get(v.id, "")}
                for v in self.variants
            ],
            "refused": [
                {name: getattr(row, name) for name in REFUSED} for row in self.plan.refused
            ],
            "estimators": [fix.id for fix in self.plan.estimators],
            "left_out": self.left_out,
            "seconds": round(self.spent_s, 2),
        }
        (self.run_dir / DIRECTORY).mkdir(exist_ok=True)
        store.save_document(self.run_dir, STATE, document, schema=STATE_SCHEMA)


def sampling_spec(variant: Variant) -> CheckSpec:
    """What the engine is asked for: tokens and logprobs, no rescoring, no whole distributions."""
    rollout = variant.spec.rollout
    engine = replace(rollout.engine, prefill=False)
    return replace(variant.spec, rollout=replace(rollout, engine=engine, exact_kl=0))


def _first_line(error: MismatchError) -> str:
    """Of an error that goes on with the last lines of a log."""
    return error.headline.splitlines()[0]


def dry_run_lines(spec: CheckSpec) -> list[str]:
    """What ``--dry-run`` says about fixes."""
    return plan_fixes(spec, context_of(spec)).lines(spec.budget_minutes) if spec.fixes else []
