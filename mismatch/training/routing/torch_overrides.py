"""Torch function modes with one hook."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class OverrideMode(TorchFunctionMode):
    """While it is entered, :meth:`override` is called in place of torch's functions."""

    def override(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call; ``func(*args, **kwargs)`` is torch's own."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.override(func, args, kwargs or {})
