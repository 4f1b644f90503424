"""Every fix there is, by id: texts, flags and settings come from guide-*.toml and probes.toml."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from mismatch.errors import MismatchError
from mismatch.experiments.fixes import applies
from mismatch.experiments.fixes.base import VALUE, Chosen, Fix, FixOutcome, Flags, Side
from mismatch.experiments.fixes.spec_edits import (
    Change,
    engine_argument,
    on_engine,
    train,
    with_argument,
    without_arguments,
)
from mismatch.metrics.importance_weights import OVERRIDE
from mismatch.specs import AS_STORED, CheckSpec, TrainSpec

GUIDES: dict[Side, str] = {
    "train": "guide-train.toml",
    "engine": "guide-engine.toml",
    "estimator": "guide-estimator.toml",
}
UNMOVED = "delta stays as it is; gradients are reweighted"
HIDES = "hides the mismatch: the ratio is 1 by construction"
FEW = 24  # prompts that `regenerate` samples again


def _replay(spec: CheckSpec, value: str) -> CheckSpec:
    if value not in ("ids", "ids+weights"):
        raise MismatchError(
            f"router-replay={value}: no such mode", "router-replay=ids or router-replay=ids+weights"
        )
    return train(replay_routing=value)(spec, value)


def _micro_batch(spec: CheckSpec, value: str) -> CheckSpec:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise MismatchError(
            f"micro-batch={value} is no number of tokens", "give one: micro-batch=1024"
        )
    return train(micro_batch_tokens=int(value))(spec, value)


def _no_truncation(spec: CheckSpec, value: str) -> CheckSpec:
    sampling = replace(spec.rollout.sampling, top_p=1.0, top_k=0)
    return replace(spec, rollout=replace(spec.rollout, sampling=sampling))


def _head_in_fp32(spec: CheckSpec, value: str) -> CheckSpec:
    overrides = engine_argument(spec, "hf_overrides")
    given = dict(overrides) if isinstance(overrides, dict) else {}
    return with_argument("hf_overrides", given | {"head_dtype": "float32"})(spec, value)


def _full_weights(spec: CheckSpec, value: str) -> CheckSpec:
    """Serve the trainer's own form of the experts, which is never quantised."""
    spec = without_arguments("quantization")(spec, value)
    rounded = spec.rollout.engine.weights == "mxfp4-rounded"
    return on_engine(spec, weights=AS_STORED if rounded else "bf16")


def _sampled_again(spec: CheckSpec, value: str) -> CheckSpec:
    rollout = spec.rollout
    prompts = replace(rollout.prompts, num_prompts=min(FEW, rollout.prompts.num_prompts))
    sampling = replace(rollout.sampling, seed=rollout.sampling.seed + 1)
    return replace(spec, rollout=replace(rollout, prompts=prompts, sampling=sampling))


CHANGES: dict[str, Change] = {
    "replay": _replay,
    "micro_batch": _micro_batch,
    "no_truncation": _no_truncation,
    "head_in_fp32": _head_in_fp32,
    "full_weights": _full_weights,
    "sampled_again": _sampled_again,
}


def _change(entry: dict[str, Any], env: tuple[tuple[str, str], ...]) -> Change:
    """Return what an entry does to a spec.

    Its keys: ``change`` names one of :data:`CHANGES`; else ``train`` and ``engine`` set fields,
    ``train_default`` resets fields, ``argument`` gives the engine arguments and ``drop`` takes
    them away, and variables of ``env`` are set for the engine.
    """
    if name := entry.get("change"):
        return CHANGES[name]
    resets = {name: getattr(TrainSpec(), name) for name in entry.get("train_default", ())}

    def apply(spec: CheckSpec, value: str) -> CheckSpec:
        fields = entry.get("train", {}) | resets
        fields = {name: value if given == VALUE else given for name, given in fields.items()}
        changed = train(**fields)(spec, value)
        for name, given in entry.get("argument", {}).items():
            changed = with_argument(name, given)(changed, value)
        changed = without_arguments(*entry.get("drop", ()))(changed, value)
        names = {name for name, _ in env}
        kept = tuple(pair for pair in changed.rollout.engine.env if pair[0] not in names)
        return on_engine(changed, env=(*kept, *env), **entry.get("engine", {}))

    return apply


def _pairs(rows: list[list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in rows)


def _fix(side: Side, id: str, entry: dict[str, Any]) -> Fix:
    hides, env = entry.get("hides", False), _pairs(entry.get("env", []))
    return Fix(
        id=id,
        side=side,
        summary=entry["summary"],
        effect=entry.get("effect", HIDES if hides else UNMOVED),
        cost=entry["cost"],
        flags=Flags(_pairs(entry.get("set", [])), tuple(entry.get("unset", ())), env),
        values=tuple(entry.get("values", ())),
        apply=_change(entry, env),
        applies=getattr(applies, entry.get("applies", "always")),
        corrects=entry.get("correction", OVERRIDE) if side == "estimator" else "",
        hides=hides,
    )


@cache
def read(name: str) -> dict[str, dict[str, Any]]:
    """Return one of the TOML files beside this one, by id of the fix."""
    text = resources.files("mismatch.experiments.fixes").joinpath(name).read_text("utf-8")
    return tomllib.loads(text)


def guides() -> dict[str, dict[str, Any]]:
    """Return what is written of every fix, by its id."""
    return {id: entry for name in GUIDES.values() for id, entry in read(name).items()}


FIXES = tuple(
    _fix(side, id, entry) for side, name in GUIDES.items() for id, entry in read(name).items()
)
PROBES = tuple(_fix(entry["side"], id, entry) for id, entry in read("probes.toml").items())


def fix_named(name: str) -> Fix:
    """Return the fix with this id.

    Raises:
        MismatchError: there is none.
    """
    for entry in (*FIXES, *PROBES):
        if entry.id == name:
            return entry
    raise MismatchError(f"no fix {name!r}", f"one of: {', '.join(fix.id for fix in FIXES)}")


def labels(name: str) -> list[str]:
    """Return the fixes of a combination, each with its value, which may hold a plus sign.

    >>> labels("router-replay=ids+weights+fp32-router")
    ['router-replay=ids+weights', 'fp32-router']
    """
    parts: list[str] = []
    ids = {fix.id for fix in FIXES}
    for part in name.split("+"):
        if parts and "=" in parts[-1] and part.partition("=")[0] not in ids:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def is_combination(row: FixOutcome) -> bool:
    """Return whether a row is of several fixes at once."""
    return len(labels(row.id)) > 1


__all__ = ["FIXES", "Chosen", "fix_named", "is_combination", "labels"]
