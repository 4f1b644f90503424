"""Refuse ``facts.get("a name")`` of a name that is no key: a mypy plugin.

By itself mypy refuses unknown names in ``facts["a name"]`` and in literals alone. Nothing refuses
them in ``"a name" in facts``, so write ``get`` there.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.errorcodes import TYPEDDICT_UNKNOWN_KEY
from mypy.plugin import MethodContext, Plugin
from mypy.plugins.default import typed_dict_get_callback
from mypy.typeops import try_getting_str_literals
from mypy.types import Type, TypedDictType


class KnownKeys(Plugin):
    """Looks at ``get`` of every TypedDict."""

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        return get if fullname == "typing.Mapping.get" else None


def get(context: MethodContext) -> Type:
    """Report names that are no keys; return what mypy infers."""
    if isinstance(context.type, TypedDictType):
        asked = try_getting_str_literals(context.args[0][0], context.arg_types[0][0])
        for name in [name for name in asked or () if name not in context.type.items]:
            fault = f'{context.type.fallback.type.name} has no key "{name}"'
            context.api.fail(fault, context.context, code=TYPEDDICT_UNKNOWN_KEY)
    return typed_dict_get_callback(context)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this."""
    return KnownKeys
