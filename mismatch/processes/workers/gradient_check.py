"""Gradients in a training world: after its scorings, with the weights that it has loaded.

Like an optional pass, one that cannot run leaves its reason in ``errors`` and the others go on.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mismatch.errors import MismatchError, OutOfMemory, first_line, named_line
from mismatch.experiments.gradients.files import (
    ALL_PASSES,
    failure_label,
    gradients_file,
    save_batch,
    save_gradients,
)
from mismatch.experiments.gradients.planning import (
    GradientPlan,
    GradientSchedule,
    Planned,
    ScheduledGradient,
)
from mismatch.experiments.gradients.types import LOSSES, GradientBatch, Gradients
from mismatch.run import store
from mismatch.run.manifest import is_current
from mismatch.run.messages import report_timing, write_error
from mismatch.run.store import load_scoring
from mismatch.specs import Pass, TrainSpec, spec_hash, to_dict
from mismatch.types import Rollout

if TYPE_CHECKING:
    from mismatch.training.distributed import World
    from mismatch.training.gradients import GradientSum
    from mismatch.training.load import LoadedModel
    from mismatch.training.routing.replay import ReplaySource


def routes_from(rollout: Rollout, spec: TrainSpec) -> str:
    """Name of the scoring whose routes a pass replays."""
    return spec.replay_source or f"{rollout.fingerprint['engine']}:decode"


def replay_source(run_dir: Path, rollout: Rollout, spec: TrainSpec) -> ReplaySource | None:
    """The routes that a pass replays, if it does: of the engine's decode, or of an earlier pass.

    Raises:
        MismatchError: no such scoring, no routes in it, or routes that cannot be true.
    """
    if spec.replay_routing is None:
        return None
    from mismatch.training.routing.replay import ReplaySource

    scoring = load_scoring(run_dir, routes_from(rollout, spec))
    return ReplaySource.of(scoring, spec.replay_routing, rollout)


class Passes(Protocol):
    """What the world's other passes share with these."""

    world: World
    job: dict[str, Any]
    loaded: LoadedModel | None
    seconds: list[float]

    def load(self, pass_: Pass) -> None:
        """Make ``loaded`` the model of this pass."""

    def late(self) -> bool:
        """Whether one more optional pass would exceed their time."""


def take_gradients(passes: Passes, plan: GradientPlan) -> None:
    """Take every gradient of a plan that is not there; all ranks call it.

    Raises:
        MismatchError: the ranks parted; nothing else, reasons are left in ``errors``.
    """
    run_dir = Path(passes.job["run_dir"])
    passes.world.barrier()  # rank 0 has saved the scorings
    try:
        rollout = store.load_rollout(run_dir)
        work = GradientSchedule.of(run_dir, rollout, plan)
    except MismatchError as error:
        if passes.world.rank == 0:
            write_error(run_dir, failure_label(ALL_PASSES), error)
        return
    _Taking(passes, plan, run_dir, rollout, work).all()


class _Taking:
    """Works through the items of a plan."""

    def __init__(
        self,
        passes: Passes,
        plan: GradientPlan,
        run_dir: Path,
        rollout: Rollout,
        work: GradientSchedule,
    ) -> None:
        self.passes, self.plan, self.run_dir = passes, plan, run_dir
        self.rollout, self.work, self.world = rollout, work, passes.world
        self.reference = plan.passes[0]
        self.totals: dict[str, GradientSum] = {}
        self.failed = False

    def all(self) -> None:
        pending = self.pending()
        self.note(finished=not pending)
        if not pending:
            return
        reference = [item for item in self.work.items if item.planned is self.reference]
        if not self.attempt(self.reference, reference, room=True):
            return
        order = list(dict.fromkeys(item.planned.trainer.name for item in pending))
        for name in order:
            own = [item for item in pending if item.planned.trainer.name == name]
            if own[0].planned is not self.reference:
                self.attempt(own[0].planned, own)
        self.note(finished=not self.failed)

    def pending(self) -> list[ScheduledGradient]:
        """What is not there yet; rank 0 looks, so that all ranks do the same."""
        import torch

        todo = [item for item in self.work.items if item.same_as is None]
        missing = torch.zeros(len(todo), dtype=torch.int64)
        if self.world.rank == 0:
            for number, item in enumerate(todo):
                file = gradients_file(item.planned.trainer.name, item.coefficients)
                missing[number] = not is_current(self.run_dir, file, self.made_by(item))
        return [i for i, m in zip(todo, self.world.sum(missing).tolist(), strict=True) if m]

    def made_by(self, item: ScheduledGradient) -> str:
        values = self.work.vectors.values[item.vector]
        specs = [spec_hash(item.planned.spec), spec_hash(self.reference.spec)]
        parts = [text.encode() for text in specs]
        parts += [values.tobytes(), self.work.batch.prompts.tobytes()]
        return hashlib.sha256(b"/".join(parts)).hexdigest()[:12]

    def attempt(self, planned: Planned, items: list[ScheduledGradient], room: bool = False) -> bool:
        """One pass with all its vectors. Where ranks fail at different places the world ends."""
        start, name, failed = time.monotonic(), planned.trainer.name, None
        budget = planned.trainer.kind == "fix"
        try:
            if budget and self.passes.late():
                raise MismatchError("not run, the budget is used up", "raise --budget-minutes")
            self.run(planned, items, room)
        except Exception as error:
            traceback.print_exc()
            failed = error
            self.leave_out(planned, error)
            self.passes.loaded = None  # what failed half way is loaded anew
        try:
            self.world.meet(f"gradient:{name}")
        except RuntimeError as lost:
            raise MismatchError(
                f"the ranks parted in the gradient of {name}", "see logs/train.log"
            ) from lost
        if budget:
            self.passes.seconds.append(time.monotonic() - start)
        if self.world.rank == 0:
            report_timing(f"gradient:{name}", time.monotonic() - start)
        return failed is None

    def run(self, planned: Planned, items: list[ScheduledGradient], room: bool) -> None:
        from mismatch.training.gradients import GradientJob, batch_gradient, require_memory

        self.passes.load(planned.pass_)
        loaded = self.passes.loaded
        assert loaded is not None
        if room:
            require_memory(self.world, loaded, len(LOSSES))
        source = replay_source(self.run_dir, self.rollout, planned.spec)
        for item in items:
            values, prompts = self.work.vectors.values[item.vector], self.work.batch.prompts
            job = GradientJob(item.coefficients, values, prompts, planned.pass_, source)
            loss = item.coefficients.partition(":")[0]
            result = batch_gradient(self.world, loaded, self.rollout, job, self.totals.get(loss))
            if planned is self.reference:
                self.totals[loss] = result.total.on_host()
            gradients = Gradients(
                name=planned.pass_.name,
                coefficients=item.coefficients,
                groups=result.groups,
                squared_norm=result.squared_norm,
                dot=result.dot,
                squared_norm_reference=result.squared_norm_reference,
                sketches=result.sketches,
                prompts=prompts,
                seconds=result.seconds,
                peak_bytes=result.peak_bytes,
            )
            facts = {
                "spec": to_dict(planned.spec),
                "loss": result.loss,
                "loss_scale": result.loss_scale,
                "attention": loaded.attention.label,
                "experts": loaded.experts,
                "world_size": self.world.size,
                "device": self.world.device.type,
            }
            if self.world.rank == 0:
                inputs = (store.ROLLOUT,)
                save_gradients(self.run_dir, gradients, self.made_by(item), inputs, facts)

    def leave_out(self, planned: Planned, error: Exception) -> None:
        """Note why a gradient is missing."""
        import torch

        self.failed = True
        if isinstance(error, torch.OutOfMemoryError):
            text = f"out of GPU memory: {first_line(error)}"
            fix = "lower --micro-batch-tokens, or use more GPUs: --nproc-per-node"
            error = OutOfMemory(text, fix)
        elif not isinstance(error, MismatchError):
            error = MismatchError(named_line(error), "see logs/train.log")
        if self.world.rank != 0 and not isinstance(error, OutOfMemory):
            return  # all ranks fail alike, but for memory
        whole = planned is self.reference
        label = failure_label(ALL_PASSES if whole else planned.trainer.name)
        if whole:
            message = f"the float32 reference has no gradient: {error.message}"
            kind = OutOfMemory if isinstance(error, OutOfMemory) else MismatchError
            error = kind(message, error.fix)
        write_error(self.run_dir, label, error)

    def note(self, *, finished: bool) -> None:
        """Say on disk what the gradients are of, and whether all are there."""
        if self.world.rank != 0:
            return
        plan, batch, work = self.plan, self.work.batch, self.work
        member = np.unique(self.rollout.sequence_of_token[self.rollout.actions][batch.member])
        from mismatch.training.gradients import SKETCH_SIZE

        facts = GradientBatch(
            trainers=tuple(planned.trainer for planned in plan.passes),
            prompts=tuple(int(prompt) for prompt in batch.prompts),
            deciding=batch.deciding,
            sequences=len(member),
            tokens=int(batch.member.sum()),
            advantages=batch.source,
            sketch_size=SKETCH_SIZE,
            clip=plan.clip,
            clipped=work.clipped,
            ratio_passes=None if plan.new is None else (plan.right, plan.new),
            not_tested=plan.not_tested,
        )
        entries = [item.entry(self.made_by(item)) for item in work.items]
        save_batch(self.run_dir, facts, entries, plan.made_by, work.inputs, finished=finished)
