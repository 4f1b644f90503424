"""``report.json``: the report as plain data, schema ``mismatch.report/3``.

docs/reference/report-json.md describes it; :func:`schema` returns the JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch.analysis.levels import exit_code, fails_on
from mismatch.analysis.plugins import analyses
from mismatch.analysis.results import sides_at_fault
from mismatch.analysis.validity import Validity, validity
from mismatch.codec import Misfit, fields_of, from_json, refused, schema_of, to_json
from mismatch.metrics import METRICS
from mismatch.types import Check, Comparison, NotTested, Report, SidePair, Status, Verdict

SCHEMA = "mismatch.report/3"
COMPARISON = "comparison.json"
COMPARISON_SCHEMA = "mismatch.comparison/1"
JQ_NAMES = {"kl": "k1_kl"}  # and an underscore for the dot of "ratio_outside_1.02"
COMMAND, PAGE = "mismatch compare RUN", "docs/reference/report-json.md"

# The fields of every report: key -> type, in their order; those of analyses follow.
FIELDS: dict[str, Any] = {
    "verdict": Verdict,
    "model": str,
    "fingerprints": dict[str, dict[str, Any]],
    "comparisons": tuple[Comparison, ...],
    "noise_floor": tuple[SidePair, ...],
    "checks": tuple[Check, ...],
    "not_tested": tuple[NotTested, ...],
    "run": dict[str, Any],
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the document."""
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
        "properties": {
            "schema": {"const": SCHEMA},
            "headline": schema_of(Headline, definitions),
            "next": {"type": "array", "items": {"type": "string"}},
            "validity": schema_of(tuple[Validity, ...], definitions),
            **properties,
        },
        "required": ["schema", "headline", *FIELDS],
        "$defs": _open(definitions),
    }


def _open(schema: Any) -> Any:
    """Return a schema under which objects may hold more than it names: readers stay valid."""
    if isinstance(schema, dict):
        return {
            key: _open(value)
            for key, value in schema.items()
            if not (key == "additionalProperties" and value is False)
        }
    return [_open(item) for item in schema] if isinstance(schema, list) else schema


@dataclass(frozen=True, slots=True)
class Headline:
    """The report in one flat object, for logs and one-liners.

    Attributes:
        side_at_fault: "engine", "trainer", or "either" where that cannot be told: which the square,
            the long sequence or the digests of a broken run show.
        best_fix: id of the best fix or combination; None where none helped or was tried.
        exit_code: of `mismatch check` without --fail-on.
    """

    model: str
    status: Status
    correctness: Status | None
    fitness: Status | None
    reason: str
    side_at_fault: str | None
    k3_kl: float | None
    k3_kl_low: float | None
    k3_kl_high: float | None
    logprob_abs_diff_mean: float | None
    routing_disagree_any: float | None
    n_tokens: int | None
    n_prompts: int | None
    best_fix: str | None
    exit_code: int


def headline_of(report: Report) -> Headline:
    """Return what most readers look up."""
    first = report.comparisons[0] if report.comparisons else None
    metrics = {} if first is None else {**first.metrics, **first.routing}
    k3, verdict = metrics.get("k3_kl"), report.verdict
    square, fixes = report.result("square"), report.result("fixes")
    faults: list[str] = [*sides_at_fault(square)] if square else []
    causes = report.result("causes")
    known = [c.side for c in causes.ranked if c.fact and c.side != "either"] if causes else []
    if long := report.result("long_sequence"):
        faults += [gap.side for gap in long.gaps if gap.status == "failed"]
    broken = verdict.correctness is not None and verdict.correctness.status == "broken"
    if broken and known and faults[:1] in ([], ["either"]):  # digests of the checkpoint decide
        faults = known
    quick = bool((report.run.get("spec") or {}).get("quick"))

    def value(name: str) -> float | None:
        return metrics[name].value if name in metrics else None

    return Headline(
        model=report.model,
        status=verdict.status,
        correctness=verdict.correctness.status if verdict.correctness else None,
        fitness=verdict.fitness.status if verdict.fitness else None,
        reason=verdict.reason,
        side_at_fault=faults[0] if faults else None,
        k3_kl=value("k3_kl"),
        k3_kl_low=k3.low if k3 else None,
        k3_kl_high=k3.high if k3 else None,
        logprob_abs_diff_mean=value("logprob_abs_diff_mean"),
        routing_disagree_any=value("routing_disagree_any"),
        n_tokens=k3.n_tokens if k3 else None,
        n_prompts=k3.n_prompts if k3 else None,
        best_fix=fixes.best_together if fixes else None,
        exit_code=exit_code(verdict, fails_on(None, quick), report.checks),
    )


def report_to_json(report: Report, next_steps: Sequence[str] = ()) -> dict[str, Any]:
    """Return the report as JSON data: dicts, lists, strings, finite numbers, booleans and null.

    Args:
        next_steps: what to do now, as the renderings have it.
    """
    document = {
        "schema": SCHEMA,
        "headline": to_json(headline_of(report)),
        "next": list(next_steps),
        "validity": to_json(list(validity(report))),
        **{key: to_json(getattr(report, key)) for key in FIELDS},
    }
    document["fingerprints"] = {
        name: _with_one_digest(side) for name, side in document["fingerprints"].items()
    }
    pairs = comparisons_to_json(report.comparisons, report.noise_floor)
    document |= {key: _renamed(held, jq_name) for key, held in pairs.items()}
    for analysis in analyses():
        if (result := report.result(analysis.id)) is not None:
            document |= analysis.write(result)
    return document


def report_from_json(document: Any) -> Report:
    """Return the inverse of :func:`report_to_json`; a null value becomes NaN again.

    Raises:
        MismatchError: not a report, a schema of another version, or a field that does not fit the
            schema.
    """
    fields = fields_of(document, SCHEMA, command=COMMAND)
    with refused(SCHEMA, command=COMMAND, page=PAGE):
        missing = [key for key in FIELDS if key not in fields]
        if missing:
            raise Misfit(f"field {missing[0]!r} is missing")
        own = {
            key: _renamed(
                from_json(list[dict[str, Any]], fields[key], key), lambda n: _OWN.get(n, n)
            )
            for key in ("comparisons", "noise_floor")
        }
        comparisons, noise_floor = comparisons_from_json(own)
        values = {
            key: from_json(kind, fields[key], key)
            for key, kind in FIELDS.items()
            if key not in ("comparisons", "noise_floor")
        }
        if "headline" not in fields:
            raise Misfit("field 'headline' is missing")
        from_json(Headline, fields["headline"], "headline")  # computed again, but it must be right
        from_json(list[str], fields.get("next", []), "next")
        from_json(list[Validity], fields.get("validity", []), "validity")
        results = {analysis.id: analysis.read(fields) for analysis in analyses()}
        return Report(
            **values,
            comparisons=tuple(comparisons),
            noise_floor=tuple(noise_floor),
            analyses={id: result for id, result in results.items() if result is not None},
        )


def _with_one_digest(side: dict[str, Any]) -> dict[str, Any]:
    """Return a fingerprint with one digest of all its parameters, as text: they are int64, which
    readers of JSON round, and thousands."""
    if not isinstance(side.get("weights"), dict):
        return side
    text = json.dumps(side["weights"], sort_keys=True)
    return side | {
        "weights": hashlib.sha256(text.encode()).hexdigest(),
        "weights_parameters": len(side["weights"]),
    }


def _renamed(pairs: list[dict[str, Any]], rename: Callable[[str], str]) -> list[dict[str, Any]]:
    """Comparisons with other names of their metrics."""
    return [
        pair
        | {
            key: {rename(name): value for name, value in pair[key].items()}
            for key in ("metrics", "routing")
            if key in pair
        }
        for pair in pairs
    ]


def jq_name(name: str) -> str:
    """Return a metric's name as report.json has it.

    >>> jq_name("ratio_outside_1.02"), jq_name("kl")
    ('ratio_outside_1_02', 'k1_kl')
    """
    return JQ_NAMES.get(name, name).replace(".", "_")


_OWN = {jq_name(name): name for name in METRICS}


def comparisons_to_json(
    comparisons: Sequence[Comparison], noise_floor: Sequence[SidePair]
) -> dict[str, Any]:
    """Return the part of a report that is measured, not judged, as ``comparison.json`` holds it."""
    return {
        "comparisons": to_json(list(comparisons)),
        "noise_floor": [
            {"id": f"{pair.left} / {pair.right}", **to_json(pair)} for pair in noise_floor
        ],
    }


def comparisons_from_json(document: Any) -> tuple[list[Comparison], list[SidePair]]:
    """Return the inverse of :func:`comparisons_to_json`."""
    entries = from_json(list[dict[str, Any]], document["noise_floor"], "noise_floor")
    for entry in entries:
        from_json(str, entry["id"], "noise_floor.id")
    pairs = [{key: value for key, value in entry.items() if key != "id"} for entry in entries]
    comparisons = from_json(list[Comparison], document["comparisons"], "comparisons")
    for number, comparison in enumerate(comparisons):
        require_columns(comparison.breakdowns, f"comparisons[{number}].breakdowns")
    return comparisons, from_json(list[SidePair], pairs, "noise_floor")


# ---------------------------------------------------------------- breakdowns

# What every reader may rely on in a breakdown, a table as columns. Analyses add tables freely, and
# reports of earlier versions hold some that nothing writes now: of a table or a column that is not
# listed here, only the length and plain values are asked for.
GROUP = "mean_abs_delta mean_delta count"
# Table -> the columns that it must have.
REQUIRED = {
    "by_turn": f"turn {GROUP}",
    "by_edge": f"edge {GROUP}",
    "by_cache": f"turns mean_cached {GROUP}",
    "by_token_class": f"token_class {GROUP}",
    "by_probability": f"low high {GROUP}",
    "by_entropy": f"low high {GROUP}",
    "by_length": f"start end sequences {GROUP}",
    "by_position": f"start end {GROUP}",
    "by_absolute_position": f"start end {GROUP}",
    "by_block": "boundary size at at_count elsewhere elsewhere_count",
    "routing_notes": "fact value",
    "routing_by_layer": "layer",
    "routing_by_position": "count",
    "routing_layer_position": "layer start end disagree",
    "routing_by_margin": "from count disagree low high",
}


# A column of these names -> what its values are.
KINDS = {
    "a text": "edge turns token_class boundary token before after fact value",
    "a count": "start end count sequences size at_count elsewhere_count",
    "a number": "mean_abs_delta mean_delta at elsewhere from",
    "a number or null": "k3_share high disagree margin margin_flipped near_tie weight_l1 load_tv "
    "mean_cached",
}
KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
# Columns that only these tables never leave empty.
OF_TABLE = {
    ("by_probability", "low"): "a number",
    ("by_entropy", "low"): "a number",
    ("routing_by_layer", "low"): "a number or null",
    ("routing_by_layer", "layer"): "a count",
    ("routing_by_margin", "low"): "a number or null",
    ("routing_layer_position", "layer"): "a count",
    ("routing_layer_position", "disagree"): "a number",
}


def _fits(value: Any, kind: str) -> bool:
    """Tell whether a cell is of a kind; "a plain value" is any of the others."""
    if value is None:
        return kind in ("a number or null", "a plain value")
    if isinstance(value, str):
        return kind in ("a text", "a plain value")
    if kind == "a count":
        return type(value) is int and 0 <= value < 2**63
    number = type(value) in (int, float) and abs(value) < 1e300  # a float, and room to add some
    return number and kind != "a text"


def require_columns(breakdowns: Mapping[str, Mapping[str, list[Any]]], path: str) -> None:
    """Refuse tables that nothing could show.

    Raises:
        Misfit: columns of different lengths, a column that is missing, or a value of another kind.
    """
    for name, table in breakdowns.items():
        lengths = {len(column) for column in table.values()}
        if len(lengths) > 1:
            raise Misfit(f"{path}.{name}: columns of different lengths")
        for column in REQUIRED.get(name, "").split():
            if column not in table:
                raise Misfit(f"{path}.{name}: column {column!r} is missing")
        for column, values in table.items():
            known = KIND_OF.get(column) if name in REQUIRED or name == "top_tokens" else None
            kind = OF_TABLE.get((name, column)) or known or "a plain value"
            for value in values:
                if not _fits(value, kind):
                    raise Misfit(f"{path}.{name}.{column}: {kind} expected, not {value!r:.60}")
    cells = breakdowns.get("routing_layer_position", {}).get("layer", [])
    if cells and len(cells) % len(set(cells)):
        raise Misfit(f"{path}.routing_layer_position: layers of different lengths")
