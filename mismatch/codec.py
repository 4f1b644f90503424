"""Dataclasses as JSON data and back, and their JSON Schema: the one codec of artefacts and reports.

A document has a dataclass's field names as keys, in their order. Numbers are finite or null: JSON
has no infinity and no NaN, and readers choke on them. Reading turns null in a ``float`` field into
NaN and in a ``float | None`` field into None; a class that separates infinity from a missing number
(:class:`mismatch.types.Estimate`, by its flag) does so when it is made. Unknown fields, missing
fields without a default, and values of another type are refused, with their place.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from mismatch.errors import MismatchError

T = TypeVar("T")
_SCALARS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


class Misfit(TypeError):
    """A value that does not fit its field; the message starts with the field's place."""


def to_json(value: Any) -> Any:
    """Any nesting of dataclasses, dicts, sequences, sets and numpy values as JSON data.

    >>> to_json({"low": float("inf"), 3: (1, 2)})
    {'low': None, '3': [1, 2]}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_json(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy
        return to_json(value.tolist())
    return str(value)


def from_json(cls: type[T], document: Any, path: str = "") -> T:
    """Return the inverse of :func:`to_json`: a value of this type.

    Args:
        cls: a dataclass, or any type that its fields may have.
        path: of the document in a larger one, for errors.

    Raises:
        Misfit: a field is missing, unknown or of another type.
        MismatchError: the dataclass itself refuses its values.
    """
    result: T = _read(cls, document, path or getattr(cls, "__name__", "value"))
    return result


def fields_of(document: Any, schema: str, *, command: str) -> dict[str, Any]:
    """Return the document without its schema's name, which must be the expected name."""
    name = document.get("schema") if isinstance(document, dict) else None
    if name != schema:
        fault = f"not a {schema} document: its schema is {name!r}"
        fix = f"read it with the version of mismatch that wrote it, or run `{command}` again"
        raise MismatchError(fault, fix)
    return {key: value for key, value in document.items() if key != "schema"}


@contextmanager
def refused(schema: str, *, command: str, page: str) -> Iterator[None]:
    """Turn a misfit (:class:`Misfit`, or what a part's reader raises of a value of another kind)
    into an error that says how to make a new document.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        fault = f"incomplete {schema} document: {error}"
        raise MismatchError(fault, f"run `{command}` again; {page} lists the fields") from error


def _read(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, value, path)
    if origin is Literal:
        return _require(value in arguments, value, path, f"one of {', '.join(map(str, arguments))}")
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, path)
    if origin is dict or typing.is_typeddict(kind):
        _require(isinstance(value, dict), value, path, "an object")
        keys, items = arguments or (str, Any)
        hints = {} if arguments else hints_of(kind)  # of another version it may hold more
        return {
            _key(keys, key): _read(hints.get(key, items), item, f"{path}.{key}")
            for key, item in value.items()
        }
    if origin in (tuple, list) or kind in (tuple, list):
        return _read_sequence(origin or kind, arguments, value, path)
    if kind is float:
        return _read_float(value, path)
    if kind is dict:
        return _require(isinstance(value, dict), value, path, "an object")
    if kind is Path:
        return Path(_require(isinstance(value, str), value, path, "a path"))
    if kind in _SCALARS:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        return _require(fits, value, path, f"a {_SCALARS[kind]}")
    return value  # object, or a type of which JSON knows nothing


def _read_union(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and types.NoneType in arguments:
        return None
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    for kind in kinds[:-1]:
        try:
            return _read(kind, value, path)
        except Misfit:
            continue
    return _read(kinds[-1], value, path)


def _read_dataclass(cls: type, value: Any, path: str) -> Any:
    _require(isinstance(value, dict), value, path, "an object")
    hints = hints_of(cls)
    unknown = [name for name in value if name not in hints]
    if unknown:
        raise Misfit(f"{path}: unknown field {unknown[0]!r}")
    for field in dataclasses.fields(cls):
        given = field.default is not dataclasses.MISSING
        if field.name not in value and not given and field.default_factory is dataclasses.MISSING:
            raise Misfit(f"{path}: field {field.name!r} is missing")
    return cls(**{name: _read(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _read_sequence(kind: type, arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    _require(isinstance(value, list | tuple), value, path, "an array")
    if not arguments:
        return kind(value)
    fixed = kind is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis)
    if fixed:
        _require(len(value) == len(arguments), value, path, f"{len(arguments)} entries")
    kinds = arguments if fixed else [arguments[0]] * len(value)
    return kind(
        _read(each, item, f"{path}[{index}]")
        for index, (each, item) in enumerate(zip(kinds, value, strict=True))
    )


def _read_float(value: Any, path: str) -> float:
    if value is None:
        return math.nan
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    fits = fits and abs(value) <= sys.float_info.max  # no NaN, no infinity, no whole number above
    number: float = _require(fits, value, path, "a finite number or null")
    return number  # a whole number stays one: the bytes that are written again are the same


def _key(kind: Any, key: str) -> Any:
    return int(key) if kind is int else key


def _require(fits: bool, value: Any, path: str, wanted: str) -> Any:
    if not fits:
        raise Misfit(f"{path}: {wanted} expected, not {value!r:.60}")
    return value


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass or a TypedDict, by name."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: hints[field.name] for field in fields} or hints


# ---------------------------------------------------------------- JSON Schema


def schema_of(cls: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a type; its dataclasses are added to ``definitions``."""
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if origin in (typing.Union, types.UnionType):
        return {
            "anyOf": [
                {"type": "null"} if kind is types.NoneType else schema_of(kind, definitions)
                for kind in arguments
            ]
        }
    if origin is Literal:
        return {"enum": list(arguments)}
    if dataclasses.is_dataclass(cls):
        name = typing.cast(type, cls).__name__
        if definitions.get(name, {}).get("$comment", cls.__module__) != cls.__module__:
            name = f"{cls.__module__.rpartition('.')[2]}.{name}"
        if name not in definitions:
            definitions[name] = {"$comment": cls.__module__}  # also ends the recursion
            definitions[name] |= object_schema(typing.cast(type, cls), definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], definitions)}
    if origin in (tuple, list) and arguments:
        if origin is tuple and arguments[-1] is not Ellipsis:
            items = [schema_of(kind, definitions) for kind in arguments]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        return {"type": "array", "items": schema_of(arguments[0], definitions)}
    if cls is float:
        return {"type": ["number", "null"]}
    return {"type": _SCALARS[cls]} if cls in _SCALARS else {}


def object_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one dataclass: every field is written, and no other."""
    properties = {name: schema_of(kind, definitions) for name, kind in hints_of(cls).items()}
    return {
        "type": "object",
        "description": (cls.__doc__ or "").partition("\n")[0],
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
