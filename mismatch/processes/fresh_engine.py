"""A fresh engine next to a check, for --explain: its scores, and its prefix cache read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch.captures import CachePair
from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.experiments.probes import CACHE, CACHE_FILE, FRESH, RESCORING
from mismatch.processes.stages import Stages
from mismatch.processes.tasks import ReadCache, Score
from mismatch.run import manifest, store
from mismatch.run.messages import error_path
from mismatch.specs import RolloutSpec, spec_hash

LABEL = "fresh-engine"


@dataclass(frozen=True)
class Cache:
    """What the engine gave with its prefix cache and without, or the reason why it gave nothing."""

    pairs: tuple[CachePair, ...]
    reason: str
    seconds: float


def fresh(spec: RolloutSpec) -> RolloutSpec:
    """Return the same engine, which captures nothing.

    Raises:
        MismatchError: servers, which run as they were started.
    """
    if spec.engine.servers:
        fault = "servers run as they were started"
        raise MismatchError(fault, "check a local engine of the same version")
    engine = replace(spec.engine, routing=False, prefill=True)
    return replace(spec, engine=engine, exact_kl=0)


def ask_fresh_engine(stages: Stages, ids: Sequence[str]) -> None:
    """Rescore the run's tokens, read the prefix cache, or both; what is there is not made again.

    Raises:
        MismatchError: the engine cannot, or failed.
    """
    run_dir, spec = stages.run_dir, fresh(stages.spec.rollout)
    tasks: list[Score | ReadCache] = []
    current = manifest.is_current(run_dir, store.scoring_file(FRESH), spec_hash(spec))
    if RESCORING in ids and not current:
        tasks.append(Score(FRESH))
    if CACHE in ids and not (run_dir / CACHE_FILE).exists():
        tasks.append(ReadCache(CACHE_FILE))
    if not tasks:
        return
    error_path(run_dir, LABEL).unlink(missing_ok=True)
    title = f"rollout: a fresh {spec.engine.engine}: {', '.join(ids)}"
    with stages.engine(spec, LABEL, *tasks) as worker:
        stages.wait(worker, LABEL, title)


def cache_of(stages: Stages) -> Cache:
    """Return what :func:`ask_fresh_engine` left of the prefix cache.

    Raises:
        MismatchError: nothing, or damaged.
    """
    document: dict[str, Any] = store.load_document(stages.run_dir, CACHE_FILE)
    pairs = from_json(list[CachePair], document["pairs"])
    return Cache(tuple(pairs), document["reason"], float(document["seconds"]))
