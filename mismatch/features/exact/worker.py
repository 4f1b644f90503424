"""Score the same tokens in several batches: ``python -m mismatch.features.exact.worker JOB.json``.

JOB: ``{"run_dir": RUN, "label": …, "sequences": indices, "engine": RolloutSpec}``, or "trainer",
a TrainSpec, for a training world. It leaves ``RUN/batch-probe/SIDE.npz`` of arrays "PHASE WAY N",
[tokens, 2]: position and log-probability of every token of sequence N; and ``SIDE.json``, what
could not be tested.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.engines.registry import engine_class, with_adapter_way
from mismatch.features.exact.probe import ALONE, FOLDER, cut, orders
from mismatch.models.derived import in_form
from mismatch.processes.workers.engine import reported
from mismatch.run import store
from mismatch.run.messages import exit_worker, report_ready
from mismatch.specs import Pass, RolloutSpec, TrainSpec
from mismatch.types import Floats, Ints, NotTested, Rollout

CONTINUED = 32  # tokens that are decoded behind each sequence
Score = Callable[[list[list[int]]], list[Floats]]


def main(arguments: list[str]) -> int:
    """Run one job; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))
    rank = os.environ.get("RANK", "0") if "trainer" in job else ""
    work = probe_trainer if "trainer" in job else probe_engine
    run_dir = Path(job["run_dir"])
    return reported(run_dir, job["label"], lambda: work(run_dir, job), rank, "batch probe")


def every_way(phase: str, sequences: list[list[int]], score: Score) -> dict[str, Floats]:
    """Score the sequences one at a time, together twice, and shuffled."""
    scores: dict[str, Floats] = {}
    for way, order in orders(len(sequences)).items():
        given = [sequences[n] for n in order]
        parts = [score([ids])[0] for ids in given] if way == ALONE else score(given)
        scores |= {f"{phase} {way} {n}": part for n, part in zip(order, parts, strict=True)}
    return scores


def with_positions(first: int, values: Any) -> Floats:
    """Return [tokens, 2] of log-probabilities of the tokens from ``first`` on."""
    array = np.asarray(values, np.float64)
    return np.column_stack((first + np.arange(len(array)), array))


def probe_engine(run_dir: Path, job: dict[str, Any]) -> None:
    """Ask an engine for its prefill and for what it decodes, as far as it can be told what."""
    spec = from_json(RolloutSpec, job["engine"])
    rollout = store.load_rollout(run_dir)
    sequences = cut(rollout, np.asarray(job["sequences"]))
    name, sampling = spec.engine.engine, spec.sampling.uncut()
    longest = max(map(len, sequences)) + CONTINUED
    kind, missing = engine_class(name), []
    reads = kind.capabilities(spec.engine, sampling).cache_reading
    scores: dict[str, Floats] = {}
    with kind(in_form(with_adapter_way(spec.engine)), sampling, longest) as engine:
        report_ready()

        def prefilled(given: list[list[int]]) -> list[Floats]:
            parts = engine.prefill(given, [1] * len(given), sampling.temperature, lambda *_: None)
            return [with_positions(1, part) for part in parts]

        def continued(given: list[list[int]]) -> list[Floats]:
            """Return the likeliest tokens behind each sequence; one that parts ends what counts."""
            made = engine.continue_greedily(given, CONTINUED, False, lambda *_: None)
            values = [
                [row[token] for token, row in zip(each.token_ids, each.likeliest, strict=True)]
                for each in made
            ]
            return [
                np.column_stack((with_positions(len(ids), part), each.token_ids))
                for ids, part, each in zip(given, values, made, strict=True)
            ]

        if name == "transformers":
            missing.append(NotTested("prefill in batches", "transformers scores one at a time"))
            scores |= every_way("decode", even(sequences), decoding(engine, sampling.temperature))
        else:
            scores |= every_way("prefill", sequences, prefilled)
        if reads:
            scores |= until_parted(every_way("decode", sequences, continued), len(sequences))
        elif name != "transformers":
            reason = f"{name} cannot be asked to leave its prefix cache unread"
            missing.append(NotTested("decoding in batches", reason))
    leave(run_dir, "engine", scores, missing)


def even(sequences: list[list[int]]) -> list[list[int]]:
    """Cut sequences to the length of the shortest: transformers decodes rows of one length."""
    shortest = min(map(len, sequences))
    return [ids[:shortest] for ids in sequences]


def decoding(engine: Any, temperature: float) -> Score:
    """Return what decodes the second half of rows of one length, token by token, with a cache."""
    import torch
    from transformers import DynamicCache

    def decode(given: list[list[int]]) -> list[Floats]:
        ids = torch.tensor(given, device=engine.device)
        start = max(1, ids.shape[1] // 2)
        cache: Any = DynamicCache(config=engine.model.config)
        columns = []
        with torch.inference_mode():
            for part in (ids[:, :start], *torch.split(ids[:, start:-1], 1, dim=1)):
                options = {"use_cache": True, "logits_to_keep": 1}
                logits = engine.model(input_ids=part, past_key_values=cache, **options).logits
                columns.append((logits[:, -1].float() / (temperature or 1.0)).log_softmax(-1))
        picked = torch.stack(columns, 1).gather(2, ids[:, start:, None])[..., 0]
        return [with_positions(start, row) for row in picked.double().cpu().numpy()]

    return decode


def until_parted(scores: dict[str, Floats], count: int) -> dict[str, Floats]:
    """Cut greedy continuations behind the first token that is not the same in every way."""
    ends = {}
    for n in range(count):
        ways = [values[:, 2] for key, values in scores.items() if key.endswith(f" {n}")]
        same = np.all([way == ways[0] for way in ways], axis=0)
        ends[n] = int(np.argmin(same)) + 1 if not same.all() else len(same)
    return {key: values[: ends[int(key.split()[-1])]] for key, values in scores.items()}


def probe_trainer(run_dir: Path, job: dict[str, Any]) -> None:
    """Score with mismatch's trainer, one sequence per micro-batch, and all in one."""
    from mismatch.training.distributed import World
    from mismatch.training.load import load
    from mismatch.training.score import score_pass
    from mismatch.training.source import quieten

    quieten()
    spec, rollout = from_json(TrainSpec, job["trainer"]), store.load_rollout(run_dir)
    sequences = cut(rollout, np.asarray(job["sequences"]))
    world = World.start()
    loaded = load(spec, world.mesh, world.device)
    report_ready()

    def scored(given: list[list[int]]) -> list[Floats]:
        made = made_of(rollout, given)
        size = replace(spec, micro_batch_tokens=max(1, len(given) * max(map(len, given))))
        scoring = score_pass(world, loaded, made, Pass("fsdp", size))
        if scoring is None:  # another rank has it
            return [with_positions(1, []) for _ in given]
        ends = np.cumsum([len(ids) - 1 for ids in given])[:-1]
        return [with_positions(1, part) for part in np.split(scoring.logprobs, ends)]

    scores = every_way("scoring", sequences, scored)
    if world.rank == 0:
        leave(run_dir, "trainer", scores, [])
    world.close()


def made_of(rollout: Rollout, given: list[list[int]]) -> Rollout:
    """Return a rollout of these sequences, of which every token but the first counts."""
    lengths = np.array([len(ids) for ids in given])
    offsets: Ints = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    return replace(
        rollout,
        token_ids=np.concatenate(given).astype(np.int64),
        offsets=offsets,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.arange(len(given)),
        finish_reason=("length",) * len(given),
        sampling=rollout.sampling.uncut(),
        rewards=None,
    )


def leave(run_dir: Path, side: str, scores: dict[str, Floats], missing: list[NotTested]) -> None:
    """Write what a side gave, and what could not be tested."""
    folder = run_dir / FOLDER
    np.savez(folder / f"{side}.npz", **scores)  # type: ignore[arg-type]
    store.write_json(folder / f"{side}.json", to_json(missing))


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
