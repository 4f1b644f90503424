"""An engine's session: sample and rescore, score tokens, read the prefix cache.

Sampling leaves ``rollout.parquet``, the texts of its tokens and the scoring ``<engine>:decode``
(with the routed experts), then the engine's own rescoring as ``<engine>:prefill``. What is there
already is not made again.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.captures import LIKELIEST
from mismatch.codec import to_json
from mismatch.engines import artefacts
from mismatch.engines.artefacts import prefill_scoring
from mismatch.engines.base import Capabilities, Engine
from mismatch.engines.model_info import CauseInLog
from mismatch.engines.registry import engine_class, with_adapter_way
from mismatch.errors import MismatchError, first_line, named_line
from mismatch.models.derived import in_form, in_form_while
from mismatch.processes.tasks import (
    FLOAT32_ENGINE,
    EngineSession,
    ReadCache,
    Sample,
    Score,
    ScoreLong,
)
from mismatch.processes.workers.sampling import (
    Ready,
    ready_for,
    sampled,
    save_texts,
    timed,
    wants_prefill,
    with_routes,
)
from mismatch.run import resume, store
from mismatch.run.long_rollout import FOLDER, leave
from mismatch.run.messages import (
    SAMPLED,
    Reporter,
    error_path,
    pass_label,
    report_ready,
    report_timing,
    write_error,
)
from mismatch.specs import RolloutSpec

CACHE_SCHEMA = "mismatch.cache/1"
MOST_PROMPTS = 16  # of which the prefix cache is read
LOG_DELAY_S = 1.0  # for the lines on their way to the log


def work(session: EngineSession) -> int:
    """Run one session; 0, or 1 with the error left for the parent."""
    run_dir, spec, tasks = session.run_dir, session.rollout, session.tasks

    def tasks_done() -> None:
        if Sample() in tasks:
            run(run_dir, spec, next((task for task in tasks if isinstance(task, ScoreLong)), None))
        else:
            cache = next((task.file for task in tasks if isinstance(task, ReadCache)), None)
            scored = [task for task in tasks if isinstance(task, Score)]
            score(run_dir, spec, scored, cache, brief=session.label == FLOAT32_ENGINE)

    return reported(run_dir, session.label, tasks_done)


def reported(
    run_dir: Path, label: str, work: Callable[[], None], rank: str = "", side: str = "engine"
) -> int:
    """Do a process's work; 0, or 1 with the error left for the parent.

    Args:
        label: of its log; ``rank`` separates its error from those of other ranks.
    """
    name = f"{label}-rank{rank}" if rank else label
    try:
        work()
    except MismatchError as error:
        traceback.print_exc()
        if isinstance(error, CauseInLog):
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(LOG_DELAY_S)
            # What this process and its children have said so far; the parent writes it down.
            log = run_dir / "logs" / f"{label}.log"
            error = error.explained(log.read_text("utf-8", "replace") if log.exists() else "")
        write_error(run_dir, name, error)
        return 1
    except Exception as error:
        traceback.print_exc()
        what = f"the {side} failed: {type(error).__name__}: {first_line(error)}"
        log = run_dir / "logs" / f"{label}.log"
        write_error(run_dir, name, MismatchError(what, f"the whole story is in {log}"))
        return 1
    return 0


def run(run_dir: Path, spec: RolloutSpec, long: ScoreLong | None = None) -> None:
    """Sample, rescore, and write every artefact of the rollout stage that is not there yet."""
    start = time.monotonic()
    kind, ready = engine_class(spec.engine.engine), ready_for(spec)
    rescores = wants_prefill(spec, ready.capabilities)
    if long is not None:
        most = spec.engine.max_model_len or ready.capabilities.context or ready.info.context
        context = most or long.tokens
        room = context - getattr(kind, "spare_tokens", 0)
        long = replace(long, tokens=min(long.tokens, room)) if rescores else None
    longest = max(ready.longest, long.tokens if long else 0)
    made = kind(in_form(with_adapter_way(spec.engine)), spec.sampling, longest)
    made.sequences = len(ready.ids) * spec.sampling.samples_per_prompt
    with made as engine:
        stop_at(engine, ready)
        report_ready()
        if not resume.rollout_done(run_dir, spec):
            sample(run_dir, spec, engine, ready)
        report_timing(SAMPLED, time.monotonic() - start)
        if not rescores or engine.fingerprint("prefill").get("prefill") is False:
            return
        if not resume.rescored(run_dir, spec):
            rescore(run_dir, spec, engine)
        if long is not None:
            score_long(run_dir, spec, engine, long)


def score_long(run_dir: Path, spec: RolloutSpec, engine: Engine, task: ScoreLong) -> None:
    """Score one long sequence of what was sampled; a failure leaves its reason."""
    leave(run_dir, task.tokens)
    folder = run_dir / FOLDER
    if not (folder / store.ROLLOUT).exists():
        return
    error_path(run_dir, pass_label(task.name)).unlink(missing_ok=True)
    try:
        rollout = store.load_rollout(folder)
        scoring = replace(prefill_scoring(engine, rollout, Reporter("long")), name=task.name)
        scoring.fingerprint["model"] = spec.engine.model
        store.save_scoring(folder, scoring, rollout, made_by=spec)
    except Exception as error:  # of many kinds; the run's own tokens are there
        traceback.print_exc()
        if not isinstance(error, MismatchError):
            error = MismatchError(named_line(error), "see logs/engine.log")
        write_error(run_dir, pass_label(task.name), error)


def stop_at(engine: Engine, ready: Ready) -> None:
    """Have the engine end responses at the texts that the environment names.

    Raises:
        MismatchError: it cannot.
    """
    texts = getattr(ready.environment, "stop", ())
    if texts:
        engine.stop_at(texts)


def score(
    run_dir: Path,
    spec: RolloutSpec,
    tasks: Sequence[Score],
    cache: str | None = None,
    brief: bool = False,
) -> None:
    """Score the tokens of a run by prefill, with an engine that need not have sampled them.

    Args:
        cache: document for what the engine gives with its prefix cache and without.
        brief: a copy of the weights in another form is deleted afterwards.

    Raises:
        MismatchError: an engine that cannot rescore as it sampled, or runs in another
            dtype than was asked for.
    """
    start = time.monotonic()
    kind = engine_class(spec.engine.engine)
    capabilities = kind.capabilities(spec.engine, spec.sampling)
    if tasks and not wants_prefill(spec, capabilities):
        reason = capabilities.reasons.get("prefill", "it cannot rescore these tokens")
        raise MismatchError(f"{spec.engine.engine}: {reason}")
    rollouts = [store.load_rollout(run_dir / task.folder) for task in tasks]
    longest = max((int(np.diff(rollout.offsets).max()) for rollout in rollouts), default=0)
    if cache is not None:
        own = store.load_rollout(run_dir)
        sequences, masks = own.sequences(), np.split(own.action_mask, own.offsets[1:-1])
        rows = np.unique(own.prompt_index, return_index=True)[1][:MOST_PROMPTS]
        prompts = [sequences[row][: int(np.flatnonzero(masks[row])[0])].tolist() for row in rows]
        longest = max(longest, artefacts.context_of(max(map(len, prompts))))
    in_its_form = in_form_while if brief else lambda spec: nullcontext(in_form(spec))
    with (
        in_its_form(with_adapter_way(spec.engine)) as served,
        kind(served, spec.sampling, longest) as engine,
    ):
        report_ready()
        # Whether it holds what the engine that sampled did; tasks do not change it.
        held = {label: list(digest) for label, digest in engine.weights().digests.items()}
        for task, rollout in zip(tasks, rollouts, strict=True):
            with timed("prefill"):
                scoring = prefill_scoring(engine, rollout, Reporter("prefill"))
            facts = scoring.fingerprint
            if facts["dtype"] != spec.engine.dtype:
                dtype = facts["dtype"]
                raise MismatchError(f"{engine.name} runs in {dtype}, not in {spec.engine.dtype}")
            facts |= {"model": spec.engine.model, "seconds": round(time.monotonic() - start, 3)}
            facts["weights"] = held
            named = replace(scoring, name=task.name)
            store.save_scoring(run_dir / task.folder, named, rollout, made_by=spec)
        if cache is not None:
            with timed("cache"):
                document = read_cache(engine, capabilities, prompts)
            document |= {"seconds": round(time.monotonic() - start, 3)}
            store.save_document(run_dir, cache, document, schema=CACHE_SCHEMA)


def read_cache(
    engine: Engine, capabilities: Capabilities, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Continuations with the prefix cache and without, or the reason why there are none."""
    try:
        if not capabilities.cache_reading:
            raise MismatchError(f"{engine.name} cannot be asked to leave its prefix cache unread")
        facts = engine.fingerprint("decode")
        block = int(facts.get("block_size") or 0)
        pairs = artefacts.measure(engine, prompts, block, Reporter("cache"))
    except MismatchError as error:
        return {"pairs": [], "reason": error.message}
    return {"pairs": to_json(pairs), "reason": ""}


def rescore(run_dir: Path, spec: RolloutSpec, engine: Engine) -> None:
    """Score the tokens of a run, whoever sampled them, by prefill."""
    rollout = store.load_rollout(run_dir)
    with timed("prefill"):
        scoring = prefill_scoring(engine, rollout, Reporter("prefill"))
    scoring.fingerprint["model"] = spec.engine.model
    store.save_scoring(run_dir, scoring, rollout, made_by=spec)


def sample(run_dir: Path, spec: RolloutSpec, engine: Engine, ready: Ready) -> None:
    """Sample and save; the decode scoring last, which marks the rollout as complete.

    Routed experts that cannot be true cost the routes alone: the scoring says why it has none.
    """
    engine.likeliest = LIKELIEST
    rollout, trajectories, decode = sampled(spec, engine, ready, Reporter("rollout"))
    store.save_rollout(run_dir, rollout, made_by=spec)
    save_texts(run_dir, rollout, decode, ready)
    if ready.capabilities.routed_experts:
        decode = with_routes(engine, trajectories, decode, rollout)
    store.save_scoring(run_dir, decode, rollout, made_by=spec)
