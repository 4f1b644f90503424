"""Every engine samples the same prompts under the same laws, each once, in a process of its own.

vLLM is never imported here: what the tests look at are the artefacts that the worker left, and a
float32 forward of plain transformers over the same token ids.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.models import EMBEDDED
from mismatch.processes.launch import engine_python, interpreter_environment, own_python
from mismatch.processes.tasks import EngineSession, ReadCache, Sample, Score, write_session
from mismatch.run import store
from mismatch.specs import EngineSpec, PromptSpec, RolloutSpec
from mismatch.types import Rollout, Sampling, Scoring
from tests.shared import once

MODEL = EMBEDDED["tiny-gpt-oss"]
PROMPTS = 12
PLAIN = Sampling(max_tokens=48, samples_per_prompt=3, seed=11)
LAWS = {
    "plain": PLAIN,
    "crowded": PLAIN,
    "chunked": PLAIN,
    "tempered": dataclasses.replace(PLAIN, temperature=0.7),
    "truncated": dataclasses.replace(PLAIN, temperature=0.9, top_p=0.8, top_k=20, min_p=0.1),
    "greedy": dataclasses.replace(PLAIN, temperature=0.0),
}
PENALISED = dataclasses.replace(PLAIN, temperature=0.8, repetition_penalty=1.3)
ALL = LAWS | {"penalised": PENALISED}  # one test alone runs the last
# Little room: requests wait, are preempted and forwarded again; prompts are cut into chunks.
ARGUMENTS: dict[tuple[str, str], tuple[tuple[str, Any], ...]] = {
    ("vllm", "crowded"): (("num_gpu_blocks_override", 40), ("block_size", 32)),
    ("vllm", "chunked"): (("max_num_batched_tokens", 64), ("max_num_seqs", 16)),
    ("sglang", "crowded"): (("max_total_tokens", 320), ("chunked_prefill_size", 32)),
    ("transformers", "crowded"): (("max_num_seqs", 3),),
}
MAKE = {"sglang": "make env-sglang"}
# SGLang takes logprobs before the cuts, and scores given tokens at T = 1 only.
UNTRUNCATED = frozenset({"sglang"})
PREFILL_AT_ONE = frozenset({"sglang"})


def installed(engine: str) -> bool:
    python = own_python(EngineSpec(engine))
    return python is not None or importlib.util.find_spec(engine) is not None


def reported(engine: str, sampling: Sampling) -> Sampling:
    """The law that an engine's decode logprobs are of."""
    if engine in UNTRUNCATED:
        return sampling.uncut()
    return sampling


def rescores(engine: str, sampling: Sampling) -> bool:
    """Whether an engine scores given tokens at a law's temperature."""
    return engine not in PREFILL_AT_ONE or sampling.temperature in (0.0, 1.0)


@dataclass
class Run:
    """One finished job of the engine's worker."""

    directory: Path
    engine: str
    sampling: Sampling

    @cached_property
    def rollout(self) -> Rollout:
        return store.load_rollout(self.directory)

    @cached_property
    def decode(self) -> Scoring:
        return store.load_scoring(self.directory, f"{self.engine}:decode")

    @cached_property
    def prefill(self) -> Scoring:
        return store.load_scoring(self.directory, f"{self.engine}:prefill")

    @property
    def scorings(self) -> list[Scoring]:
        both = rescores(self.engine, self.sampling)
        return [self.decode, self.prefill] if both else [self.decode]

    def responses(self) -> list[list[int]]:
        """Sampled ids of every sequence."""
        masks = np.split(self.rollout.action_mask, self.rollout.offsets[1:-1])
        pairs = zip(self.rollout.sequences(), masks, strict=True)
        return [ids[mask].tolist() for ids, mask in pairs]


def work(
    directory: Path, spec: RolloutSpec, *tasks: Score | ReadCache
) -> subprocess.CompletedProcess[str]:
    """Run the engine's worker to its end; default: it samples."""
    directory.mkdir(parents=True, exist_ok=True)
    job = write_session(EngineSession(directory, spec, tasks or (Sample(),)))
    return subprocess.run(
        [engine_python(spec.engine), "-m", "mismatch.processes.workers.session", str(job)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}
        | interpreter_environment(own_python(spec.engine)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Run]:
    """(engine, law) -> its run, made at most once."""
    runs: dict[tuple[str, str], Run] = {}

    def get(engine: str, law: str) -> Run:
        if not installed(engine):
            pytest.skip(f"engine: {engine} is not installed: {MAKE.get(engine, 'make env')}")
        if (engine, law) not in runs:
            args = ARGUMENTS.get((engine, law), ())
            sampling = ALL[law]
            spec = RolloutSpec(
                EngineSpec(engine, str(MODEL), dtype="fp32", args=args),
                PromptSpec(num_prompts=PROMPTS),
                sampling,
            )

            def make(directory: Path) -> None:
                done = work(directory, spec)
                assert done.returncode == 0, done.stdout[-3000:]

            directory = once(tmp_path_factory, f"{engine}-{law}", make)
            runs[engine, law] = Run(directory, engine, sampling)
        return runs[engine, law]

    return get


@dataclass
class Reference:
    """Plain transformers in float32: what the numbers should be."""

    model: Any

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """[T, V] float64."""
        return self._forward(ids).logits[0].double().numpy()

    def routers(self, ids: np.ndarray) -> np.ndarray:
        """[T, L, E] logits of every router."""
        layers = self._forward(ids).router_logits
        return np.stack([layer.double().numpy() for layer in layers], axis=1)

    def _forward(self, ids: np.ndarray) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.as_tensor(ids)[None], output_router_logits=True)


@pytest.fixture(scope="session")
def reference() -> Reference:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    return Reference(model.eval())
