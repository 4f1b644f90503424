"""Which engines there are. A new one is a line here, or an entry point of a third party."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from importlib.metadata import entry_points

from mismatch.engines.base import Engine
from mismatch.errors import MismatchError

ENGINES = {
    "vllm": "mismatch.engines.vllm.engine:VllmEngine",
    "sglang": "mismatch.engines.sglang.engine:SglangEngine",
    "transformers": "mismatch.engines.transformers.engine:TransformersEngine",
    "server": "mismatch.engines.servers.engine:ServerEngine",
}
PACKAGELESS = frozenset({"server"})  # what runs is elsewhere
ENTRY_POINT_GROUP = "mismatch.engines"
INSTALL = {
    "vllm": "on a GPU machine: pip install 'train-infer-mismatch[vllm]'; on a CPU: `make env` in a "
    "clone (vLLM's CPU build needs torch's CPU companions), or another engine: "
    "--engine transformers",
    "sglang": "in an environment of its own, for its pins clash with vLLM's: `make env-sglang` in "
    "a clone; elsewhere pip install 'train-infer-mismatch[sglang]' there and name its interpreter: "
    "--sglang-python ENV/bin/python",
    "transformers": "pip install 'train-infer-mismatch[score]'",
}


def engine_names() -> list[str]:
    """Names of all engines, our own and those of installed third parties, sorted."""
    return sorted({*ENGINES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def require_engine(name: str) -> None:
    """Check, without importing it, that an engine is known and installed.

    Raises:
        MismatchError: unknown name (with near misses) or not installed (with the command).
    """
    if name not in engine_names():
        near = difflib.get_close_matches(name.lower(), engine_names(), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise MismatchError(
            f"unknown engine {name!r}", f"{hint}known engines: {', '.join(engine_names())}"
        )
    if name in PACKAGELESS:
        return
    if name in ENGINES and importlib.util.find_spec(name) is None:
        raise MismatchError(f"the engine {name!r} is not installed here", INSTALL[name])


def engine_class(name: str) -> type[Engine]:
    """The class of an engine.

    Raises:
        MismatchError: as :func:`require_engine`, or the engine's own package fails to import.
    """
    require_engine(name)
    target = ENGINES.get(name)
    if target is None:
        (point, *_) = entry_points(group=ENTRY_POINT_GROUP, name=name)
        target = point.value
    module, _, attribute = target.partition(":")
    try:
        found: type[Engine] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MismatchError(
            f"the engine {name!r} cannot be imported ({target}): {error}",
            INSTALL.get(name, f"repair the package that provides {target}"),
        ) from error
    return found
