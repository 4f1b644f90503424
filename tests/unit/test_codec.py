"""Every dataclass of every document survives JSON, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch.analysis.plugins import analyses
from mismatch.codec import Misfit, from_json, hints_of, schema_of, to_json
from mismatch.errors import MismatchError
from mismatch.features.gradients.plan import GradientPlan
from mismatch.features.kernels.isolation import AuditSpec
from mismatch.metrics.importance_weights import Settings
from mismatch.pipeline.document import FIELDS
from mismatch.pipeline.run_comparison import RunComparison
from mismatch.plugins import load
from mismatch.specs import CheckSpec
from mismatch.types import Estimate, Report

RESULTS = [load(analysis.result) for analysis in analyses()]
DOCUMENTS = [*FIELDS.values(), *RESULTS, RunComparison, CheckSpec, AuditSpec, GradientPlan]


def reachable(kind: Any, classes: dict[type, None]) -> dict[type, None]:
    """Every dataclass inside a type."""
    for argument in typing.get_args(kind):
        reachable(argument, classes)
    if dataclasses.is_dataclass(kind) and kind not in classes:
        classes[typing.cast(type, kind)] = None
        for hint in hints_of(typing.cast(type, kind)).values():
            reachable(hint, classes)
    return classes


CLASSES: dict[type, None] = {}
for document in DOCUMENTS:
    reachable(document, CLASSES)

SCALARS: dict[Any, Any] = {
    str: st.text(max_size=5),
    bool: st.booleans(),
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    Any: st.none() | st.integers() | st.text(max_size=3) | st.lists(st.booleans(), max_size=2),
    object: st.none() | st.integers(),
    types.NoneType: st.none(),
}


def instances(kind: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a type; every float field may be NaN, an overflow is infinite and says so."""
    if kind in SCALARS:
        return SCALARS[kind] | st.just(math.nan) if kind is float else SCALARS[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        if depth > 4 and types.NoneType in arguments:
            return st.none()
        plain = [SCALARS[float] if a is float else instances(a, depth + 1) for a in arguments]
        return st.one_of(*plain)
    if origin is dict:
        keys, values = (instances(argument, depth + 1) for argument in arguments)
        return st.dictionaries(keys, values, max_size=2)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(instances(argument, depth + 1) for argument in arguments))
    if origin in (list, tuple):
        size = 0 if depth > 5 else 2
        return st.lists(instances(arguments[0], depth + 1), max_size=size).map(origin)
    if kind is Estimate:
        return estimates()
    if kind is Settings:
        return st.just(Settings())  # refuses most bounds
    fields = {name: instances(hint, depth + 1) for name, hint in hints_of(kind).items()}
    return st.builds(kind, **fields)


def estimates() -> st.SearchStrategy[Estimate]:
    bound, size = st.none() | st.floats(-9, 9), st.integers(1, 99)
    finite = st.builds(Estimate, st.floats(-9, 9) | st.just(math.nan), bound, bound, size, size,
                       size, st.just(("heavy-tail",)))  # fmt: skip
    infinite = st.builds(Estimate, st.just(math.inf), st.none(), st.none(), size, size, size,
                         st.just(("overflow",)))  # fmt: skip
    return finite | infinite


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_instances_survive_strict_json(cls: type) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(instances(cls))
    def round_trip(value: Any) -> None:
        text = json.dumps(to_json(value), allow_nan=False)
        again = from_json(cls, json.loads(text))
        assert repr(again) == repr(value)  # unlike ==, it holds NaN equal to NaN
        assert json.dumps(to_json(again), allow_nan=False) == text

    round_trip()


def test_every_class_of_a_report_is_looked_at() -> None:
    assert len(CLASSES) > 30
    assert {field.name for field in dataclasses.fields(Report)} == {*FIELDS, "analyses"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"value": "0.1"}, r"Estimate\.value: .*number"),
        ({"n_tokens": 1.5}, r"Estimate\.n_tokens: .*integer"),
        ({"n_tokens": True}, r"Estimate\.n_tokens: .*integer"),
        ({"flags": "few"}, r"Estimate\.flags: .*array"),
        ({"flags": [1]}, r"Estimate\.flags\[0\]: .*string"),
        ({"surprise": 1}, "Estimate: .*'surprise'"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], path: str) -> None:
    document = to_json(Estimate(0.1, None, None, 8, 4, 2)) | change
    with pytest.raises(Misfit, match=path):
        from_json(Estimate, document)


def test_a_missing_field_is_named_and_a_default_stands_in() -> None:
    document = to_json(Estimate(0.1, None, None, 8, 4, 2))
    del document["flags"]
    assert from_json(Estimate, document).flags == ()
    del document["value"]
    with pytest.raises(Misfit, match="'value' is missing"):
        from_json(Estimate, document)


def test_a_class_may_refuse_its_values() -> None:
    with pytest.raises(MismatchError):
        from_json(Settings, {"cap": 0.5})


def test_null_is_infinity_where_an_estimate_overflowed() -> None:
    document = to_json(Estimate(math.inf, None, None, 8, 4, 2, ("overflow",)))
    assert document["value"] is None
    assert from_json(Estimate, document).value == math.inf
    assert math.isnan(from_json(Estimate, document | {"flags": []}).value)


def test_a_schema_says_the_types() -> None:
    definitions: dict[str, Any] = {}
    assert schema_of(tuple[Estimate, ...], definitions)["items"] == {"$ref": "#/$defs/Estimate"}
    assert definitions["Estimate"]["properties"]["value"] == {"type": ["number", "null"]}
    assert schema_of(float | None, {})["anyOf"][1] == {"type": "null"}
