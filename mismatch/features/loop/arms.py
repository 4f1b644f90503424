"""All arms and seeds of a loop, one after the other, in one run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mismatch.codec import from_json, refused
from mismatch.errors import MismatchError
from mismatch.features.loop.arm import resume_from, run_arm
from mismatch.features.loop.history import COLUMNS, PATH, rows_of
from mismatch.features.loop.judge import FILE, SCHEMA, Arm, LoopReport, SeedRun, loop_to_json
from mismatch.features.loop.spec import LoopSpec, arm_of, place_of, settings
from mismatch.processes.stages import Narrator
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.resume import differences
from mismatch.specs import portable

SETTINGS, POOL, STOPPED = "settings.json", "pool.json", "stopped.json"


def run_loop(
    base: LoopSpec,
    arms: Sequence[str],
    seeds: Sequence[int],
    run_dir: Path,
    narrator: Narrator,
    command: str,
    write: Callable[[Path, LoopReport], None],
) -> LoopReport:
    """Run every step that is not there; seeds outermost, so that all arms have as many of them.

    Args:
        write: called with the run directory and what it holds, however the run ends.

    Raises:
        MismatchError: an arm that means nothing or changes nothing, settings other than those the
            run began with, or an engine or trainer that failed: what was measured is kept.
    """
    planned = [arm_of(replace(base, seed=seed), arm) for seed in seeds for arm in arms]
    failed: MismatchError | None = None
    with at_work(run_dir, "loop", base.check, command):
        asked = require_same_settings(base, arms, seeds, run_dir)
        try:
            for number, loop in enumerate(planned, 1):
                folder = run_dir / place_of(loop.arm, loop.seed)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / STOPPED).unlink(missing_ok=True)
                title = f"{loop.arm}, seed {loop.seed} ({number} of {len(planned)})"
                title += f", from step {done}" if (done := resume_from(folder)) else ""
                try:
                    with narrator.stage(title) as progress:
                        run_arm(folder, loop, run_dir / POOL, progress)
                except MismatchError as error:
                    if not rows_of(folder):  # nothing was measured: the others would fail too
                        raise
                    store.write_json(folder / STOPPED, {"message": error.headline})
                    narrator.note(f"{loop.arm}, seed {loop.seed}, stopped: {error.headline}")
                    failed = error
        finally:
            report = gather(base, run_dir, *asked)
            if report.arms:
                store.write_json(run_dir / FILE, loop_to_json(report))
                write(run_dir, report)
    if failed is not None:
        raise failed
    return report


def gather(base: LoopSpec, run_dir: Path, arms: Sequence[str], seeds: Sequence[int]) -> LoopReport:
    """Collect what lies in the run directory, of these arms and seeds."""
    gathered = []
    for arm in arms:
        runs = [_run(run_dir / place_of(arm, seed), seed) for seed in seeds]
        gathered.append(Arm(arm, tuple(run for run in runs if run.steps)))
    return LoopReport(
        model=base.check.rollout.engine.model,
        engine=base.check.rollout.engine.engine,
        arms=tuple(arm for arm in gathered if arm.runs),
        settings=settings(base),
    )


def _run(directory: Path, seed: int) -> SeedRun:
    rows, stopped, path = rows_of(directory), directory / STOPPED, directory / PATH
    return SeedRun(
        seed=seed,
        curves={name: tuple(row.get(name) for row in rows) for name in COLUMNS},
        path=store.read_json(path)["path"] if path.exists() else "",
        stopped=store.read_json(stopped)["message"] if stopped.exists() else "",
    )


def require_same_settings(
    base: LoopSpec, arms: Sequence[str], seeds: Sequence[int], run_dir: Path
) -> tuple[list[str], list[int]]:
    """A run goes on as it began; more steps, arms and seeds may be asked of it.

    Returns:
        All arms and seeds that it was ever asked.

    Raises:
        MismatchError: other settings, by name.
    """
    path, every = run_dir / SETTINGS, (list(arms), list(seeds))
    if path.exists():
        earlier, before, used = read_settings(run_dir)
        every = list(dict.fromkeys([*before, *arms])), list(dict.fromkeys([*used, *seeds]))
        free = {"steps": base.steps, "checkpoint_every": base.checkpoint_every}
        other = differences(settings(replace(earlier, **free)), settings(base))  # type: ignore[arg-type]
        if other:
            raise MismatchError(
                f"{run_dir} was begun with other settings:\n    " + "\n    ".join(other),
                "the same flags, or none but --resume RUN; or a new --out",
            )
    asked = {"arms": every[0], "seeds": every[1]}
    store.write_json(path, {"schema": SCHEMA, "loop": settings(base), **asked})
    return every


def read_settings(run_dir: Path) -> tuple[LoopSpec, list[str], list[int]]:
    """What a run was asked: settings as of the last time, all arms and seeds.

    Raises:
        MismatchError: no run of a loop, or of another version.
    """
    path = run_dir / SETTINGS
    if not path.exists():
        raise MismatchError(f"{run_dir} holds no loop", "a folder that `mismatch loop` made")
    settings = store.read_json(path)
    with refused(SCHEMA, command="mismatch loop", page="docs/loop.md"):
        loop = from_json(LoopSpec, portable(settings["loop"]))
    return loop, settings.get("arms", []), settings.get("seeds", [])
