"""A run made of rollouts that were recorded elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mismatch.models.tokenizers import load_tokenizer, stop_ids, token_texts
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.recorded import ENGINE, Recorded, as_rollout
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, Sampling, TrainSpec


def recorded_spec(engine: EngineSpec, sampling: Sampling) -> CheckSpec:
    """What is known of the engine that sampled; the trainer takes the same checkpoint."""
    engine = replace(engine, engine=ENGINE, routing=False, prefill=False)
    train = TrainSpec(
        model=engine.model, revision=engine.revision, trust_remote_code=engine.trust_remote_code
    )
    return CheckSpec(rollout=RolloutSpec(engine, sampling=sampling, exact_kl=0), train=train)


def keep_recorded(
    spec: CheckSpec, run_dir: Path, file: Path, form: str, found: Recorded, command: str
) -> None:
    """Write rollout, texts of its tokens and the sampler's scoring into a new run.

    Raises:
        MismatchError: the model has no tokenizer, or an id is outside its vocabulary.
    """
    engine = spec.rollout.engine
    tokenizer = load_tokenizer(engine.model, engine.revision, engine.trust_remote_code)
    texts = sorted({token for row in found.sequences for token in row.token_ids})
    responses = [int(np.sum(row.sampled)) for row in found.sequences]
    sampling = replace(spec.rollout.sampling, max_tokens=max(responses), samples_per_prompt=1)
    fingerprint = {
        "engine": ENGINE,
        "mode": "decode",
        "model": engine.model,
        "dtype": engine.dtype,
        "file": file.name,
        "format": form,
        # Of another law than T = 1 nobody says whether the logprobs are before or after it.
        "logprobs_temperature": 1.0 if sampling.temperature == 1 else None,
        "stop_token_ids": list(stop_ids(engine.model, engine.revision, tokenizer)),
        "bos_token_id": tokenizer.bos_token_id,
        "not_tested": [
            *(f"{ENGINE}: {what}: the file does not have it" for what in NOT_IN_A_FILE),
            *(f"{ENGINE}: {remark}: {count}" for remark, count in found.remarks.items()),
        ],
    }
    rollout, decode = as_rollout(found, sampling, fingerprint)
    prompts = PromptSpec(num_prompts=rollout.n_prompts)
    spec = replace(spec, rollout=replace(spec.rollout, prompts=prompts, sampling=sampling))
    with at_work(run_dir, "read-rollouts", spec, command):
        store.save_rollout(run_dir, rollout, made_by=spec.rollout)
        store.save_vocabulary(run_dir, token_texts(tokenizer, texts))
        store.save_scoring(run_dir, decode, rollout, made_by=spec.rollout)


NOT_IN_A_FILE = ("routed experts", "weights as the engine holds them")
