"""Functions of features that run next to an engine's model, in the engine's process."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from mismatch.errors import MismatchError


def attribute(holder: Any, path: str, *default: Any) -> Any:
    """Return what an engine's object holds under a (dotted) name, else the default.

    Raises:
        MismatchError: there is neither; what needs it is not tested.
    """
    for name in path.split("."):
        if not hasattr(holder, name):
            if default:
                return default[0]
            raise MismatchError(f"this version has no {type(holder).__name__}.{name}")
        holder = getattr(holder, name)
    return holder


class ModelCalls:
    """A part of what is called next to the model of vLLM or SGLang."""

    def mismatch_with_model(self, function: str, *args: Any) -> Any:
        """Call a function, named by its import string, with the model; it returns plain data."""
        return resolve_name(function)(self._mismatch_model(), *args)

    def _mismatch_model(self) -> Any:
        raise NotImplementedError
