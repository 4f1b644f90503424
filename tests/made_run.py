"""A run directory as the stages leave it, made of invented numbers: no engine, no trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from mismatch.types import Rollout, Sampling, Scoring

PROMPTS, SAMPLES, PROMPT, RESPONSE = 8, 2, 3, 6
MODEL = "tiny-gpt-oss"


def spec() -> CheckSpec:
    rollout = RolloutSpec(engine=EngineSpec(engine="transformers", model=MODEL, prefill=False))
    return CheckSpec(rollout=rollout, train=TrainSpec(model=MODEL), noise_floor=False)


def rollout(seed: int = 0) -> Rollout:
    n = PROMPTS * SAMPLES
    ids = np.random.default_rng(seed).integers(5, 500, n * (PROMPT + RESPONSE))
    mask = np.tile(np.arange(PROMPT + RESPONSE) >= PROMPT, n)
    return Rollout(
        token_ids=ids,
        offsets=np.arange(n + 1) * (PROMPT + RESPONSE),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=Sampling(max_tokens=RESPONSE, samples_per_prompt=SAMPLES),
        fingerprint={"engine": "transformers"},
    )


def scoring(name: str, samples: Rollout, shift: float = 0.0, seed: int = 1) -> Scoring:
    ids = samples.token_ids[samples.actions]
    noise = np.random.default_rng(seed).exponential(1.0, len(ids))
    mode = "decode" if name.endswith(":decode") else "train"
    facts = {"mode": mode, "engine": "transformers", "dtype": "bf16", "logprobs_temperature": 1.0}
    if mode == "train":
        facts = {"mode": mode, "backend": "fsdp2", "dtype": "bf16", "logprobs_temperature": 1.0}
    return Scoring(name, ids, -0.1 - noise + shift, facts)


def make_run(directory: Path, seed: int = 0, shift: float = 0.01) -> Path:
    """spec.json, rollout, the engine's scoring and the trainer's, ``shift`` apart everywhere."""
    directory.mkdir(parents=True)
    samples = rollout(seed)
    store.write_json(directory / "spec.json", to_dict(spec()))
    store.save_rollout(directory, samples, made_by=spec().rollout)
    store.save_vocabulary(directory, {int(i): f"t{i}" for i in np.unique(samples.token_ids)})
    decode = scoring("transformers:decode", samples)
    store.save_scoring(directory, decode, samples, made_by=spec().rollout)
    store.save_scoring(directory, scoring("fsdp", samples, shift), samples, made_by=spec().train)
    return directory
