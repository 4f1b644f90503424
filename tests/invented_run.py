"""Runs of invented numbers, written as the stages leave them, and what is held against them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.pipeline.build import build_report
from mismatch.run import store
from mismatch.specs import CheckSpec, to_dict
from mismatch.types import Report, Rollout, Sampling, Scoring
from tests.made_run import spec

SERIOUS = ("failed", "warning")


def sampled(prompts: int = 64, samples: int = 4, response: int = 60, **changes: Any) -> Rollout:
    """Prompts of three tokens, responses of the same length."""
    length, n = response + 3, prompts * samples
    mask = np.tile(np.arange(length) >= 3, n)
    rollout = Rollout(
        token_ids=np.random.default_rng(0).integers(5, 500, n * length),
        offsets=np.arange(n + 1) * length,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(prompts), samples),
        finish_reason=("length",) * n,
        sampling=Sampling(max_tokens=response, samples_per_prompt=samples),
        fingerprint={"engine": "transformers"},
    )
    return replace(rollout, **changes)


def facts(mode: str, **changes: Any) -> dict[str, Any]:
    side = {"engine": "transformers"} if mode == "decode" else {"backend": "fsdp2"}
    base = {"mode": mode, "dtype": "bf16", "logprobs_temperature": 1.0, "world_size": 2}
    return base | side | changes


def likely(rollout: Rollout, seed: int = 1) -> np.ndarray:
    return -2.0 - np.random.default_rng(seed).exponential(1.5, rollout.n_actions)


def noise(rollout: Rollout, size: float, seed: int = 2) -> np.ndarray:
    return size * np.random.default_rng(seed).normal(size=rollout.n_actions)


def saved(
    folder: Path,
    rollout: Rollout,
    left: np.ndarray,
    right: np.ndarray,
    others: dict[str, np.ndarray] | None = None,
    engine: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    settings: CheckSpec | None = None,
    **sides: dict[str, Any],
) -> Path:
    """A run directory; ``others``: logprobs of further passes of the trainer by name."""
    settings = settings or spec()
    folder.mkdir()
    ids = rollout.token_ids[rollout.actions]
    store.write_json(folder / "spec.json", to_dict(settings))
    store.save_rollout(folder, rollout, made_by=settings.rollout)
    store.save_vocabulary(folder, {int(i): f"t{i}" for i in np.unique(rollout.token_ids)})
    scorings = [
        Scoring("transformers:decode", ids, left, facts("decode") | (engine or {}),
                **sides.get("one", {})),
        Scoring("fsdp", ids, right, facts("train") | (trainer or {}), **sides.get("two", {})),
        *(Scoring(name, ids, values, facts("train")) for name, values in (others or {}).items()),
    ]  # fmt: skip
    for scoring in scorings:
        made_by = settings.rollout if scoring.name.endswith("decode") else settings.train
        store.save_scoring(folder, scoring, rollout, made_by=made_by)
    return folder


def report_of(folder: Path, **how: Any) -> Report:
    from mismatch.run.directory import load_spec

    return build_report(folder, load_spec(folder), **how)[0]


def serious(report: Report) -> set[str]:
    return {check.id for check in report.checks if check.status in SERIOUS}


def passes(report: Report) -> bool:
    """Nothing is held against it; whether a side is broken is left to the square, not made here."""
    verdict = report.verdict
    return verdict.fitness.status == "healthy" and not serious(report)
