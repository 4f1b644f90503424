"""mismatch: do the inference engine and the trainer give the same tokens the same probabilities?

``check``, ``load``, ``postmortem`` and ``score_pair`` are the commands as functions, see
:mod:`mismatch.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mismatch.version import __version__

if TYPE_CHECKING:
    from mismatch.api import Run, check, load, postmortem, score_pair

__all__ = ["Run", "__version__", "check", "load", "postmortem", "score_pair"]


def __getattr__(name: str) -> Any:
    """Import the functions when they are asked for: workers need none of them."""
    if name in __all__:
        from mismatch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
