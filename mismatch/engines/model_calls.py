"""Functions of features that run next to an engine's model, in the engine's process."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


class ModelCalls:
    """A part of what is called next to the model of vLLM or SGLang."""

    def mismatch_with_model(self, function: str, *args: Any) -> Any:
        """Call a function, named by its import string, with the model; it returns plain data."""
        return resolve_name(function)(self._mismatch_model(), *args)

    def _mismatch_model(self) -> Any:
        raise NotImplementedError
