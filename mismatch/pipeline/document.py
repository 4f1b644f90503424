"""``report.json``: the report as plain data, schema ``mismatch.report/1``.

The field list with meanings is docs/report-json.md; the JSON Schema is generated (:func:`schema`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch.analysis.registry import analyses
from mismatch.codec import Misfit, fields_of, from_json, refused, schema_of, to_json
from mismatch.types import Check, Comparison, Report, SidePair, Verdict

SCHEMA = "mismatch.report/1"
COMMAND, PAGE = "mismatch check", "docs/report-json.md"

# The fields of every report: key -> type, in their order; those of analyses follow.
FIELDS: dict[str, Any] = {
    "verdict": Verdict,
    "model": str,
    "fingerprints": dict[str, dict[str, Any]],
    "comparisons": tuple[Comparison, ...],
    "noise_floor": tuple[SidePair, ...],
    "checks": tuple[Check, ...],
    "not_tested": tuple[str, ...],
    "run": dict[str, Any],
}


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    properties = {key: schema_of(kind, definitions) for key, kind in FIELDS.items()}
    pair = definitions["SidePair"]
    pair_of_floor = {**pair, "properties": {"id": {"type": "string"}, **pair["properties"]}}
    definitions["NoisePair"] = pair_of_floor | {"required": ["id", *pair["required"]]}
    properties["noise_floor"] = {"type": "array", "items": {"$ref": "#/$defs/NoisePair"}}
    for analysis in analyses():
        properties |= analysis.schema(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "type": "object",
        "properties": {"schema": {"const": SCHEMA}, **properties},
        "required": ["schema", *FIELDS],
        "additionalProperties": False,
        "$defs": definitions,
    }


def report_to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data: dicts, lists, strings, finite numbers, booleans and null."""
    document = {"schema": SCHEMA, **{key: to_json(getattr(report, key)) for key in FIELDS}}
    document |= comparisons_to_json(report.comparisons, report.noise_floor)
    for analysis in analyses():
        if (result := report.result(analysis.id)) is not None:
            document |= analysis.write(result)
    return document


def report_from_json(document: Any) -> Report:
    """The inverse of :func:`report_to_json`; a null value becomes NaN again.

    Raises:
        MismatchError: not a report, a schema of another version, or a field that does not fit.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        missing = [key for key in FIELDS if key not in fields]
        if missing:
            raise Misfit(f"field {missing[0]!r} is missing")
        comparisons, noise_floor = comparisons_from_json(fields)
        values = {
            key: from_json(kind, fields[key], key)
            for key, kind in FIELDS.items()
            if key not in ("comparisons", "noise_floor")
        }
        results = {analysis.id: analysis.read(fields) for analysis in analyses()}
        return Report(
            **values,
            comparisons=tuple(comparisons),
            noise_floor=tuple(noise_floor),
            analyses={id: result for id, result in results.items() if result is not None},
        )


def comparisons_to_json(
    comparisons: Sequence[Comparison], noise_floor: Sequence[SidePair]
) -> dict[str, Any]:
    """The part of a report that is measured and not judged, as ``comparison.json`` holds it."""
    return {
        "comparisons": to_json(list(comparisons)),
        "noise_floor": [
            {"id": f"{pair.left} / {pair.right}", **to_json(pair)} for pair in noise_floor
        ],
    }


def comparisons_from_json(document: Any) -> tuple[list[Comparison], list[SidePair]]:
    """The inverse of :func:`comparisons_to_json`."""
    pairs = [
        {key: value for key, value in entry.items() if key != "id"}
        for entry in document["noise_floor"]
    ]
    comparisons = from_json(list[Comparison], document["comparisons"], "comparisons")
    return comparisons, from_json(list[SidePair], pairs, "noise_floor")
