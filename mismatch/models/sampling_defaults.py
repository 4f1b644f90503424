"""Sampling settings that a checkpoint carries: generation_config.json.

vLLM and SGLang apply them to every request that leaves a setting unset, so a framework that sends
temperature and top-p alone samples from another distribution than it scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.models.config import read_config
from mismatch.run.hub import cached_snapshot
from mismatch.types import NotTested, Sampling

FILE = "generation_config.json"
# Setting -> values that change nothing. These are what vLLM 0.32 takes from the file.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
}
# Framework -> settings that its requests leave to the engine. verl 0.9.1, TRL 1.16, SkyRL 0.3,
# slime and OpenRLHF 0.11 leave none: they pass a whole SamplingParams, fix generation_config to
# "vllm", or call SGLang's own API, which does not read the file.
# Sources: docs/reference/causes/implicit-generation-config.md.
LEFT_OPEN: dict[str, tuple[str, ...]] = {
    "prime-rl": ("repetition_penalty",),
    "nemo-rl": ("min_p", "repetition_penalty"),  # with its HTTP server (expose_http_server)
}


def stated(model: str, revision: str | None) -> dict[str, float]:
    """Return the settings of generation_config.json that change a distribution; {}: none."""
    directory = Path(model) if Path(model).is_dir() else cached_snapshot(model, revision)
    values = generation_config(directory) if directory else {}
    given = {name: values.get(name) for name in NEUTRAL}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) and value not in NEUTRAL[name]
    }


def generation_config(directory: Path) -> dict[str, Any]:
    """Return generation_config.json of a directory; {}: many models have none."""
    try:
        return read_config(directory, FILE)
    except MismatchError:
        return {}


def not_applied(model: str, revision: str | None, sampling: Sampling) -> Iterator[NotTested]:
    """Yield the checkpoint's settings that a run did not sample with."""
    other = {
        name: value
        for name, value in stated(model, revision).items()
        if not math.isclose(getattr(sampling, name), value)
    }
    if other:
        settings = ", ".join(f"{name} {value:g}" for name, value in other.items())
        appliers = [id for id, names in LEFT_OPEN.items() if other.keys() & set(names)]
        would = f"{' and '.join(appliers)} would" if appliers else "no framework known here does"
        flags = " ".join(f"--{name.replace('_', '-')} {other[name]:g}" for name in other)
        yield NotTested(
            f"{', '.join(other)} of {FILE}",
            f"the checkpoint sets {settings}, which this run does not sample with; {would}",
            f"{flags}; --framework NAME; docs/reference/causes/implicit-generation-config.md",
        )
