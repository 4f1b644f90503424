"""All arms and seeds of a loop, one after the other, in one run directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.experiments.loop.history import Row
from mismatch.experiments.loop.types import LoopSpec, arm_of, place_of
from mismatch.processes.loop import resume_from, run_arm
from mismatch.processes.stages import Narrator
from mismatch.run import store
from mismatch.run.directory import at_work

SCHEMA = "mismatch.loop/1"
SPEC, POOL = "loop.json", "pool.json"


def run_loop(
    base: LoopSpec,
    arms: Sequence[str],
    seeds: Sequence[int],
    run_dir: Path,
    narrator: Narrator,
    command: str = "",
) -> dict[tuple[str, int], list[Row]]:
    """Every step that is not there; seeds outermost, so that all arms have as many of them.

    Raises:
        MismatchError: an arm that means nothing or changes nothing, settings other than those the
            run began with, or an engine or trainer that failed: what was measured is kept.
    """
    planned = [arm_of(replace(base, seed=seed), arm) for seed in seeds for arm in arms]
    with at_work(run_dir, "loop", base.check, command):
        require_same_settings(base, run_dir)
        rows = {}
        for number, one in enumerate(planned, 1):
            place = run_dir / place_of(one.arm, one.seed)
            place.mkdir(parents=True, exist_ok=True)
            done = resume_from(place)
            title = f"{one.arm}, seed {one.seed} ({number} of {len(planned)})"
            title += f", from step {done}" if done else ""
            with narrator.stage(title) as progress:
                rows[one.arm, one.seed] = run_arm(place, one, run_dir / POOL, progress)
    return rows


def require_same_settings(base: LoopSpec, run_dir: Path) -> None:
    """A run goes on as it began; more steps, arms and seeds may be asked of it.

    Raises:
        MismatchError: other settings.
    """
    plain = to_json(replace(base, steps=1, checkpoint_every=1))
    path = run_dir / SPEC
    if not path.exists():
        store.write_json(path, {"schema": SCHEMA, "loop": plain})
    earlier = store.read_json(path)["loop"]
    other = sorted(name for name in plain if plain[name] != earlier.get(name))
    if other:
        raise MismatchError(
            f"{run_dir} was begun with another {', '.join(other)}", "the same flags, or a new --out"
        )
