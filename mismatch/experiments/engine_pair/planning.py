"""Where and with which spec the second engine of a check runs."""

from __future__ import annotations

from dataclasses import replace

from mismatch.specs import CheckSpec

DIRECTORY = "engines"


def other_spec(spec: CheckSpec) -> CheckSpec:
    """The second engine's own check: the same prompts and law, one pass of the trainer."""
    assert spec.other_engine is not None
    rollout = replace(spec.rollout, engine=spec.other_engine, exact_kl=0)
    return replace(
        spec,
        rollout=rollout,
        other_engine=None,
        noise_floor=False,
        two_passes=None,
        weights_effect=None,
        inject=(),
        gradients=False,
        fixes=(),
        budget_minutes=None,
        verdict="as-is",
    )


def other_place(spec: CheckSpec) -> str:
    """Where the second engine's tokens lie inside the run directory."""
    assert spec.other_engine is not None
    return f"{DIRECTORY}/{spec.other_engine.engine}"
