"""What all documents share: values as JSON data and back, their schemas, and how one is refused.

Numbers are finite or null: JSON has no NaN, and readers choke on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from mismatch.errors import MismatchError
from mismatch.types import Comparison, Estimate, Judgement, Verdict

T = TypeVar("T")


def packaged_schema(name: str) -> dict[str, Any]:
    """A JSON schema as shipped in the package, by the name of its file."""
    text = resources.files("mismatch.reports").joinpath("schema", name).read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def read_document(
    document: Any, schema: str, read: Callable[[dict[str, Any]], T], *, command: str, page: str
) -> T:
    """What ``read`` makes of a document of that schema.

    Args:
        command: makes such a document anew.
        page: of the documentation, where its fields are listed.

    Raises:
        MismatchError: no such document, a schema of another version, or a missing field (named).
    """
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise MismatchError(
            f"not a {schema} document: its schema is {found!r}",
            f"read it with the version of mismatch that wrote it, or run `{command}` again",
        )
    try:
        return read(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"incomplete {schema} document: {type(error).__name__}: {error}",
            f"run `{command}` again; {page} lists the fields",
        ) from error


def finite(value: float | None) -> float | None:
    """A number, or null."""
    return float(value) if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Any nesting of dicts, sequences, numpy scalars and arrays as JSON data."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return str(value)


def estimate_to_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "value": finite(estimate.value),
        "low": finite(estimate.low),
        "high": finite(estimate.high),
        "n_tokens": estimate.n_tokens,
        "n_sequences": estimate.n_sequences,
        "n_prompts": estimate.n_prompts,
        "flags": list(estimate.flags),
    }


def estimate_from_json(entry: dict[str, Any]) -> Estimate:
    """The inverse; a null value is infinity where it is flagged as overflow, else NaN."""
    value = entry["value"]
    if value is None:
        value = math.inf if "overflow" in entry["flags"] else math.nan
    return Estimate(**{**entry, "value": float(value), "flags": tuple(entry["flags"])})


def estimates_to_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    return {name: estimate_to_json(estimate) for name, estimate in estimates.items()}


def estimates_from_json(entries: dict[str, Any]) -> dict[str, Estimate]:
    return {name: estimate_from_json(entry) for name, entry in entries.items()}


def pair_to_json(pair: Comparison) -> dict[str, Any]:
    """Two scorings of which neither is "rollout" or "train", hence left and right."""
    return {
        "left": pair.rollout,
        "right": pair.train,
        "sampled_by_left": pair.sampled_by_left,
        "metrics": estimates_to_json(pair.metrics),
        "routing": estimates_to_json(pair.routing),
    }


def pair_from_json(entry: dict[str, Any]) -> Comparison:
    """The inverse."""
    return Comparison(
        rollout=entry["left"],
        train=entry["right"],
        sampled_by_left=entry["sampled_by_left"],
        metrics=estimates_from_json(entry["metrics"]),
        routing=estimates_from_json(entry["routing"]),
    )


def verdict_from_json(entry: dict[str, Any]) -> Verdict:
    """The inverse of what ``dataclasses.asdict`` and :func:`plain` make of a verdict."""
    judgements = tuple(
        Judgement(**{**one, "value": math.nan if one["value"] is None else float(one["value"])})
        for one in entry["judgements"]
    )
    return Verdict(**{**entry, "judgements": judgements})
