"""Measuring fixes: with the check, in the check's training world where that is possible.

Engines that fixes need sample one after the other once the check's own tokens are there; then one
training world scores everything. A fix that fails is a row with its reason; the others go on.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import is_combination
from mismatch.experiments.fixes.context import Context, context_of
from mismatch.experiments.fixes.planning import (
    DIRECTORY,
    PAIRED_SINGLES,
    FixPlan,
    Variant,
    pairs_of,
    plan_fixes,
)
from mismatch.experiments.fixes.results import STATE, STATE_SCHEMA, engine_seconds, table_of
from mismatch.keys import TRAIN
from mismatch.processes.launch import Worker, own_python
from mismatch.processes.stages import Stages, scored
from mismatch.run import resume, store
from mismatch.run.directory import at_work
from mismatch.run.messages import error_path, pass_label, read_error
from mismatch.specs import CheckSpec, Pass

ATTEMPTS = 3  # of a training world that a fix took down with it
REFUSED = ("id", "side", "summary", "flags", "applies", "reason")  # what is kept of a refused fix
ENGINE_SHARE = 0.5  # of the budget: the rest is for the trainer
BUDGET = "the budget"


def measure_with_fixes(stages: Stages, passes: list[Pass]) -> None:
    """Measure the check's own rollout and passes, and all that its fixes need.

    Raises:
        MismatchError: the check itself failed; what fails with a fix is noted in its row.
    """
    context = context_of(stages.spec)
    plan = plan_fixes(stages.spec, context)
    for line in plan.lines(stages.spec):
        stages.narrator.note(line)
    run = FixRun(stages, plan)
    run.measure(passes)
    if plan.pairs:
        run.pairs(context)
    run.save()


class FixRun:
    """The fixes of one check."""

    def __init__(self, stages: Stages, plan: FixPlan) -> None:
        self.stages, self.plan = stages, plan
        self.run_dir = stages.run_dir
        minutes = stages.spec.budget_minutes
        self.allowed_s = float("inf") if minutes is None else 60.0 * minutes
        self.variants = list(plan.variants)
        self.failed: dict[str, str] = {}
        self.left_out: list[str] = []
        self.spent_s = 0.0
        self.not_exact: set[str] = set()  # of these passes, those that took the world down

    def measure(self, passes: list[Pass], sample: bool = True) -> None:
        """Measure everything that is not there yet, in one world if no fix takes that down."""
        for attempt in range(ATTEMPTS):
            pending = self.pending()
            missing = self.missing()
            for pass_ in missing:
                error_path(self.run_dir, pass_label(pass_.name)).unlink(missing_ok=True)
            self.stages.count.total += len({variant.folder for variant in pending} - {""})
            try:
                self.stages.measure(passes, sample, missing, self.prepare)
                break
            except MismatchError as error:
                if not self.dropped(pending, error) or attempt == ATTEMPTS - 1:
                    raise
        unmeasured = self.pending()
        self.refusals(unmeasured)
        for variant in unmeasured:
            if variant.id not in self.failed:
                self.leave_out(variant, BUDGET)
        # Of engines and forward passes of fixes, of earlier runs too.
        places = {variant.folder for variant in self.variants} - {""}
        self.spent_s = sum(engine_seconds(self.run_dir / folder) for folder in places)
        for variant in filter(self.scored, self.variants):
            header = store.scoring_header(self.run_dir / variant.folder, variant.key)
            self.spent_s += header["fingerprint"].get("seconds", 0.0)

    def pending(self) -> list[Variant]:
        """Return the variants without a scoring."""
        return [v for v in self.variants if v.id not in self.failed and not self.scored(v)]

    def missing(self) -> list[Pass]:
        """Return the passes that are not there: of each variant the trainer as it runs, then those
        that verdicts after fixes need."""
        spec = self.stages.spec
        variants = [variant for variant in self.variants if variant.id not in self.failed]
        others = [pass_ for variant in variants for pass_ in variant.passes(spec)[1:]]
        return [variant.passes(spec)[0] for variant in self.pending()] + [
            pass_
            for pass_ in others
            if pass_.name not in self.not_exact
            and not scored(spec, self.run_dir / pass_.folder, pass_)
        ]

    def scored(self, variant: Variant) -> bool:
        """Return whether the scoring of a variant is there, and of the variant's tokens."""
        directory, spec = self.run_dir / variant.folder, sampling_spec(variant).rollout
        fresh = not variant.folder or resume.rollout_done(directory, spec, own_python(spec.engine))
        pass_ = variant.passes(self.stages.spec)[0]
        return fresh and scored(self.stages.spec, directory, pass_)

    def dropped(self, pending: list[Variant], error: MismatchError) -> bool:
        """Give up on the fix that the world ended at; False if it ended for another reason."""
        if not scored(self.stages.spec, self.run_dir, Pass(TRAIN, self.stages.spec.train)):
            return False
        self.refusals(pending)
        by_name: dict[str, Variant] = {variant.key: variant for variant in pending}
        missing = {pass_.name for pass_ in self.missing()}
        for pass_ in self.stages.order:
            if pass_.name not in missing:
                continue
            if variant := by_name.get(pass_.name):
                self.fail(variant, error.headline.splitlines()[0])
                return True
            if read_error(self.run_dir, pass_label(pass_.name)) is None:  # it was not refused
                self.not_exact.add(pass_.name)
                return True
        return False

    def refusals(self, variants: list[Variant]) -> None:
        """Note what the world said about passes that could not run."""
        for variant in variants:
            error = read_error(self.run_dir, pass_label(variant.key))
            if error is not None:
                self.failed.setdefault(variant.id, error.message)

    def fail(self, variant: Variant, reason: str) -> None:
        """Note that a fix failed, and say so."""
        self.failed[variant.id] = reason
        self.stages.narrator.note(f"fix {variant.id} failed: {reason}")

    def leave_out(self, variant: Variant, what: str) -> None:
        """Note that a variant is not run because ``what`` is used up."""
        self.variants.remove(variant)
        self.left_out.append(f"{variant.id}: not run, {what} is used up")

    def prepare(self, *world: Worker) -> float | None:
        """Sample with every engine that is needed; return how long the passes may take."""
        start = time.monotonic()
        longest = self.stages.journal.seconds.get("rollout", 0.0)
        for folder in dict.fromkeys(variant.folder for variant in self.pending()):
            if not folder:
                continue
            began = time.monotonic()
            sharing = [variant for variant in self.variants if variant.folder == folder]
            if self.spent_s + began - start + longest > ENGINE_SHARE * self.allowed_s:
                for variant in sharing:
                    self.leave_out(variant, "the engine's time in the budget")
                continue
            self.sample(sharing, world)
            longest = max(longest, time.monotonic() - began)
        if math.isinf(self.allowed_s):
            return None
        return max(0.0, self.allowed_s - self.spent_s - time.monotonic() + start)

    def sample(self, variants: list[Variant], world: tuple[Worker, ...]) -> None:
        """Sample the tokens that some variants share; a failure is noted for all of them."""
        folder = variants[0].folder
        directory, spec = self.run_dir / folder, sampling_spec(variants[0])
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with at_work(directory, "fix", spec, self.stages.journal.entry["command"]) as journal:
                engine = Stages(
                    spec, directory, self.stages.narrator, journal, count=self.stages.count
                )
                engine.sample(*world)
        except MismatchError as error:
            for worker in world:
                worker.ended()  # raises if it was the world that failed
            reason = error.headline.splitlines()[0]
            if len(error.message.splitlines()) > 1:
                reason += f"; see {folder}/logs/engine.log"
            for variant in variants:
                self.fail(variant, reason)

    def pairs(self, context: Context) -> None:
        """Measure a second round: pairs of the best fixes that help."""
        self.save()
        with suppress(MismatchError):  # the run itself cannot be compared: its report says why
            table = table_of(self.run_dir, self.stages.spec)
            best = [r.id for r in table.outcomes if r.outcome == "better" and not is_combination(r)]
            spec = replace(self.stages.spec, fixes=pairs_of(best))
            more = plan_fixes(spec, context, self.variants).variants
            if others := ", ".join(best[PAIRED_SINGLES:]):
                why = f"only the best {PAIRED_SINGLES} are paired"
                self.left_out.append(f"pairs with {others}: {why}")
            names = ", ".join(variant.id for variant in more)
            if more and self.spent_s > self.allowed_s:
                self.left_out.append(f"pairs {names}: not run, {BUDGET} is used up")
            elif more:
                self.variants += more
                self.stages.narrator.note(f"fixes: pairs: {names}")
                self.measure([], sample=False)

    def save(self) -> None:
        """Write what the table is made of later."""
        refused = self.plan.refused
        document = {
            "schema": STATE_SCHEMA,
            "variants": [
                {"id": v.id, "place": v.folder, "failed": self.failed.get(v.id, "")}
                for v in self.variants
            ],
            "refused": [{name: getattr(row, name) for name in REFUSED} for row in refused],
            "estimators": [fix.id for fix in self.plan.estimators],
            "left_out": self.left_out,
            "seconds": round(self.spent_s, 2),
        }
        (self.run_dir / DIRECTORY).mkdir(exist_ok=True)
        store.save_document(self.run_dir, STATE, document, schema=STATE_SCHEMA)


def sampling_spec(variant: Variant) -> CheckSpec:
    """Return what the engine is asked for: tokens and logprobs, no rescoring, no distributions."""
    rollout = variant.spec.rollout
    engine = replace(rollout.engine, prefill=False)
    return replace(variant.spec, rollout=replace(rollout, engine=engine, exact_kl=0))
