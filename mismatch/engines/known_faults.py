"""Faults of released engines that are known: refused in one line before anything is loaded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownFault:
    """One row of known_faults.toml.

    Attributes:
        engine: as ``--engine`` names it.
        versions: releases that have it.
        model_type: of config.json.
        stored: form of the checkpoint's experts that it needs: "bf16" or "mxfp4".
    """

    engine: str
    versions: tuple[str, ...]
    model_type: str
    stored: str
    what: str
    fix: str
    link: str


@lru_cache
def known_faults() -> tuple[KnownFault, ...]:
    """Return the table."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    return tuple(KnownFault(**row | {"versions": tuple(row["versions"])}) for row in rows)


def faults_of(engine: str, version: str, model_type: str, stored: str) -> Iterator[KnownFault]:
    """Yield the known faults that a version has with a checkpoint; local versions count too."""
    release = version.partition("+")[0]
    for fault in known_faults():
        same = (fault.engine, fault.model_type, fault.stored) == (engine, model_type, stored)
        if same and release in fault.versions:
            yield fault
