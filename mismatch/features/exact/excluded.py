"""What excludes equal bits in a stack, read before anything runs: a table and its conditions."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mismatch.experiments.fixes.context import context_of
from mismatch.experiments.fixes.spec_edits import ABSENT, VLLM_INVARIANT, engine_argument
from mismatch.facts import SideFacts
from mismatch.features.exact.results import Excluded
from mismatch.features.exact.section import TITLE
from mismatch.reports.section import Section
from mismatch.specs import OWN_SCORER, CheckSpec

OFF = (ABSENT, None, False, "auto")
DETERMINISTIC = ("flashinfer", "fa3", "triton")  # SGLang's attention backends that can be
TEXTS = ("side", "what", "remove", "source")
FA3 = (ABSENT, "fa3")  # what it chooses on Hopper
INVARIANT, SAMPLER = dict(VLLM_INVARIANT)  # names of variables


@dataclass(frozen=True, slots=True)
class Stack:
    """What decides which rows of the table apply.

    Attributes:
        gpu: the engine runs on one.
        experts: the model has some.
        version: of vLLM, (major, minor); None: another engine, or not known.
        prefix_caching: as the engine said; None: it has not run.
        environment: of the engine's process.
    """

    spec: CheckSpec
    gpu: bool
    experts: bool
    version: tuple[int, int] | None = None
    prefix_caching: bool | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def planned(cls, spec: CheckSpec) -> Stack:
        """Return what is known before anything runs."""
        context, engine = context_of(spec), spec.rollout.engine
        here = {name: os.environ[name] for name in (INVARIANT, SAMPLER) if name in os.environ}
        environment = here | dict(engine.env)
        gpu, experts = bool(context.machine.gpus), bool(context.model.experts)
        return cls(spec, gpu, experts, context.machine.vllm, None, tuple(environment.items()))

    @classmethod
    def ran(cls, spec: CheckSpec, engine: SideFacts) -> Stack:
        """Return what is known of a run, wherever it is read."""
        device, parts = engine.get("device"), str(engine.get("version") or "").split(".")
        numbers = [int(part) for part in parts[:2] if part.isdecimal()]
        version = (numbers[0], numbers[1]) if len(numbers) == 2 else None
        caching = engine.get("prefix_caching")
        gpu = bool(device) and not str(device).startswith("cpu")
        return cls(spec, gpu, bool(engine.get("moe")), version, caching, spec.rollout.engine.env)

    def argument(self, name: str) -> Any:
        """Return a further argument of the engine; ABSENT without one."""
        return engine_argument(self.spec, name)

    @property
    def invariant(self) -> bool:
        """Whether the engine's kernels were asked not to depend on the batch."""
        engine = self.spec.rollout.engine.engine
        if engine == "sglang":
            names = ("enable_deterministic_inference", "rl_on_policy_target")
            return any(self.argument(name) not in OFF for name in names)
        return engine == "vllm" and dict(self.environment).get(INVARIANT) == "1"


def _async_tp(stack: Stack) -> bool:
    given = stack.argument("compilation_config")
    passes = given.get("pass_config") if isinstance(given, dict) else None
    names = ("enable_sp", "fuse_gemm_comms", "enable_async_tp")
    return isinstance(passes, dict) and any(passes.get(name) for name in names)


def _prefix_cache(stack: Stack) -> bool:
    if stack.prefix_caching is not None:
        return stack.prefix_caching
    return stack.argument("enable_prefix_caching") is not False


def _engine(name: str) -> Callable[[Stack], bool]:
    return lambda stack: stack.spec.rollout.engine.engine == name


CONDITIONS: dict[str, Callable[[Stack], object]] = {
    "vllm": _engine("vllm"),
    "sglang": _engine("sglang"),
    "serving-engine": lambda s: s.spec.rollout.engine.engine not in ("transformers", "recorded"),
    "transformers": _engine("transformers"),
    "fused-attention": lambda s: {s.argument("attention"), s.spec.train.attention} != {"eager"},
    "gpu": lambda s: s.gpu,
    "cpu": lambda s: not s.gpu,
    "experts": lambda s: s.experts,
    "invariance": lambda s: s.invariant,
    "no-invariance": lambda s: not s.invariant,
    "determinism": lambda s: s.invariant,
    "no-determinism": lambda s: not s.invariant,
    "batch-dependent": lambda s: not s.invariant,
    "several-in-a-batch": lambda s: s.spec.train.micro_batch_tokens > 1,
    "packing": lambda s: s.spec.train.layout == "packing",
    "sequence-parallel": lambda s: s.spec.train.sequence_parallel > 1,
    "tensor-parallel": lambda s: s.spec.rollout.engine.tensor_parallel_size > 1,
    "two-ranks": lambda s: s.spec.rollout.engine.tensor_parallel_size == 2,
    "flashinfer-sampler": lambda s: dict(s.environment).get(SAMPLER) != "0",
    "vllm-async-tp": _async_tp,
    "before-0.32": lambda s: s.version is not None and s.version < (0, 32),
    "cascade": lambda s: (
        (s.version or (0, 0)) < (0, 32) and s.argument("disable_cascade_attn") is not True
    ),
    "prefix-cache": _prefix_cache,
    "chunked-prefill": lambda s: s.argument("enable_chunked_prefill") is not False,
    "graphs": lambda s: s.argument("enforce_eager") is not True,
    "radix-cache": lambda s: s.argument("disable_radix_cache") is not True,
    "sglang-other-attention": lambda s: (
        s.argument("attention_backend") not in (ABSENT, *DETERMINISTIC)
    ),
    "sglang-fa3": lambda s: s.argument("attention_backend") in FA3,
    "other-dtype": lambda s: (
        s.spec.rollout.engine.dtype != (s.spec.train.autocast or s.spec.train.dtype)
    ),
    "autocast": lambda s: s.spec.train.autocast,
    "float32-trainer": lambda s: s.spec.train.dtype == "fp32",
    "head-dtype": lambda s: s.spec.train.head_dtype not in (None, s.spec.rollout.engine.dtype),
    "router-dtype": lambda s: s.spec.train.router_dtype,
    "logprobs-dtype": lambda s: s.spec.train.logprobs_dtype not in (None, "fp32"),
    "temperature-in": lambda s: (
        s.spec.rollout.sampling.temperature not in (0.0, 1.0)
        and s.spec.train.temperature_in != "fp32"
    ),
    "truncation": lambda s: s.spec.rollout.sampling.truncates,
    "small-kv": lambda s: s.argument("kv_cache_dtype") not in (*OFF, "bfloat16"),
    "other-weights": lambda s: (
        s.spec.rollout.engine.weights != s.spec.train.weights
        or s.argument("quantization") not in OFF
    ),
    "own-adapter": lambda s: (
        s.spec.rollout.engine.adapter is not None and s.spec.rollout.engine.adapter_as != "merged"
    ),
    "speculative": lambda s: any(
        s.argument(name) not in OFF for name in ("speculative_config", "speculative_algorithm")
    ),
    "own-framework": lambda s: s.spec.train.scorer != OWN_SCORER,
}


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the rows of excluded.toml by id."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def excluded(stack: Stack) -> tuple[Excluded, ...]:
    """Return the rows that hold in a stack; none of a recorded run, whose settings are unknown."""
    if stack.spec.rollout.engine.engine == "recorded":
        return ()
    return tuple(
        Excluded(id=id, **{name: row[name] for name in TEXTS}, certain=row.get("certain", False))
        for id, row in table().items()
        if all(CONDITIONS[name](stack) for name in row["when"])
    )


def planned(spec: CheckSpec) -> Section:
    """Return what a dry run shows of equal bits: a line for each setting, which 80 columns hold."""
    notes = []
    for row in excluded(Stack.planned(spec)):
        word = "excluded" if row.certain else "not promised"
        by = f"; removed by {row.remove}" if row.remove else ""
        notes.append(f"{word}, {row.side}: {row.what}{by}")
    return Section("exact-settings", TITLE, notes=notes)
