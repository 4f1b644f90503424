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
)
from mismatch.experiments.gradients.types import GradientBatch, Gradients
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
        work = GradientSchedule.of(rollout, plan)
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
        self.total: GradientSum | None = None  # the reference's
        self.failed = False

    def all(self) -> None:
        pending = self.pending()
        self.note(finished=not pending)
        if not pending:
            return
        if not self.attempt(self.reference, room=True):
            return
        for planned in pending:
            if planned is not self.reference:
                self.attempt(planned)
        self.note(finished=not self.failed)

    def pending(self) -> list[Planned]:
        """What is not there yet; rank 0 looks, so that all ranks do the same."""
        import torch

        todo = [each for each in self.work.passes if each.trainer.name not in self.work.same_as]
        missing = torch.zeros(len(todo), dtype=torch.int64)
        if self.world.rank == 0:
            for number, planned in enumerate(todo):
                file = gradients_file(planned.trainer.name)
                missing[number] = not is_current(self.run_dir, file, self.made_by(planned))
        return [i for i, m in zip(todo, self.world.sum(missing).tolist(), strict=True) if m]

    def made_by(self, planned: Planned) -> str:
        specs = [spec_hash(planned.spec), spec_hash(self.reference.spec)]
        parts = [text.encode() for text in specs]
        parts += [self.work.coefficients.tobytes(), self.work.batch.prompts.tobytes()]
        return hashlib.sha256(b"/".join(parts)).hexdigest()[:12]

    def attempt(self, planned: Planned, room: bool = False) -> bool:
        """Take one pass. Where ranks fail at different places the world ends."""
        start, name, failed = time.monotonic(), planned.trainer.name, None
        budget = planned.trainer.kind == "fix"
        try:
            if budget and self.passes.late():
                raise MismatchError("not run, the budget is used up", "raise --budget-minutes")
            self.run(planned, room)
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

    def run(self, planned: Planned, room: bool) -> None:
        from mismatch.training.gradients import GradientJob, batch_gradient, require_memory

        self.passes.load(planned.pass_)
        loaded = self.passes.loaded
        assert loaded is not None
        if room:
            require_memory(self.world, loaded)
        source = replay_source(self.run_dir, self.rollout, planned.spec)
        prompts = self.work.batch.prompts
        job = GradientJob(self.work.coefficients, prompts, planned.pass_, source)
        result = batch_gradient(self.world, loaded, self.rollout, job, self.total)
        if planned is self.reference:
            self.total = result.total.on_host()
        if self.world.rank != 0:
            return
        gradients = Gradients(
            name=planned.pass_.name,
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
        save_gradients(self.run_dir, gradients, self.made_by(planned), (store.ROLLOUT,), facts)

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
            not_tested=plan.not_tested,
        )
        entries = []
        for planned in work.passes:
            name = planned.trainer.name
            source = work.same_as.get(name)
            how = {"made_by": self.made_by(planned)} if source is None else {"same_as": source}
            entries.append({"name": name, **how})
        save_batch(self.run_dir, facts, entries, plan.made_by, (store.ROLLOUT,), finished=finished)
