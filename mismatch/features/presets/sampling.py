"""``--sample-as NAME``: sample as a framework does, generation_config.json included."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, get_args

from mismatch.cli.configuration import Configured
from mismatch.specs import CheckSpec, Sampling

Name = Literal["verl", "trl", "skyrl", "openrlhf", "slime", "nemo-rl", "prime-rl"]
NAMES: tuple[str, ...] = get_args(Name)


def sample_as(name: str, spec: CheckSpec, explicit: Collection[str]) -> Configured:
    """Return the check with a framework's sampling where the user's own flags leave it open.

    All frameworks here sample at temperature 1 from the whole vocabulary unless their user says
    otherwise. They differ in what they leave to the engine, which takes it from the checkpoint.
    """
    from mismatch.models.sampling_defaults import FILE, LEFT_OPEN, stated  # numpy: not for a help

    engine = spec.rollout.engine
    taken = {
        key: value
        for key, value in stated(engine.model, engine.revision).items()
        if key in LEFT_OPEN.get(name, ())
    }
    fields = ("temperature", "top_p", "top_k")
    plain = Sampling()
    values: dict[str, Any] = {
        field: taken.pop(field, getattr(plain, field)) for field in fields if field not in explicit
    }
    missing = tuple(
        f"{name}: {key} is left to the engine, which takes {value:g} from {FILE}; "
        "here it is not applied"
        for key, value in taken.items()
    )
    sampling = replace(spec.rollout.sampling, **values)
    spec = replace(
        spec,
        rollout=replace(spec.rollout, sampling=sampling),
        not_reproduced=(*spec.not_reproduced, *missing),
    )
    note = ", ".join(f"{field} {value:g}" for field, value in values.items())
    return Configured(spec, (f"sampling as {name}: {note}", *(f"  {text}" for text in missing)))
