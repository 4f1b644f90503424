"""Which engines there are: a folder and a line here, or an entry point of a third party."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mismatch.engines.info import EngineInfo
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.engines.base import Engine
    from mismatch.specs import EngineSpec

# Name -> ``module:attribute`` of its EngineInfo. An entry point names that, or an Engine class.
ENGINES = {
    "vllm": f"{__package__}.vllm:INFO",
    "sglang": f"{__package__}.sglang:INFO",
    "transformers": f"{__package__}.transformers:INFO",
    "server": f"{__package__}.servers:INFO",
}
ENTRY_POINT_GROUP = "mismatch.engines"


def engine_infos() -> dict[str, EngineInfo]:
    """Declarations of the registered engines; those of entry points are read when asked for."""
    return {name: engine_info(name) for name in ENGINES}


def weight_givers() -> list[str]:
    """Engines that give the weights of the experts that they used, beside their ids."""
    return [name for name, info in engine_infos().items() if info.gives_routing_weights]


def engine_packages() -> tuple[str, ...]:
    """Distributions of all registered engines."""
    packages = (package for info in engine_infos().values() for package in info.packages)
    return tuple(dict.fromkeys(packages))


def startable_engines() -> list[str]:
    """Names that ``--engine`` takes, without third parties."""
    return [name for name, info in engine_infos().items() if info.started]


def engine_names() -> list[str]:
    """Names of all engines, our own and those of installed third parties, sorted."""
    return sorted({*ENGINES, *(point.name for point in _entry_points())})


def engine_info(name: str) -> EngineInfo:
    """The declaration of an engine.

    Raises:
        MismatchError: unknown name (with near misses), or it cannot be imported.
    """
    if name in ENGINES:
        return _registered(ENGINES[name])
    for point in _entry_points():
        if point.name == name:
            hint = f"repair the package that provides {point.value}"
            if point.attr != "INFO":
                return EngineInfo(point.value, install_hint=hint)
            declared: EngineInfo = _load(name, point.value, hint)
            return declared
    near = difflib.get_close_matches(name.lower(), engine_names(), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise MismatchError(
        f"unknown engine {name!r}", f"{hint}known engines: {', '.join(engine_names())}"
    )


def require_engine(name: str) -> None:
    """Check, without importing it, that an engine is known and installed.

    Raises:
        MismatchError: as :func:`engine_info`, or not installed (with the command).
    """
    info = engine_info(name)
    if info.module is not None and importlib.util.find_spec(info.module) is None:
        raise MismatchError(f"the engine {name!r} is not installed here", info.install_hint)


def engine_class(name: str) -> type[Engine]:
    """The class of an engine.

    Raises:
        MismatchError: as :func:`require_engine`, or the engine's own package fails to import.
    """
    require_engine(name)
    info = engine_info(name)
    engine: type[Engine] = _load(name, info.engine, info.install_hint)
    return engine


def check_machine(spec: EngineSpec) -> None:
    """Run the own preflight of a spec's engine, if it has one.

    Raises:
        MismatchError: this machine cannot run it as ``spec`` asks.
    """
    info = engine_info(spec.engine)
    if info.preflight is not None:
        _load(spec.engine, info.preflight, info.install_hint)(spec)


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)


@lru_cache
def _registered(target: str) -> EngineInfo:
    module, _, attribute = target.partition(":")
    info: EngineInfo = getattr(importlib.import_module(module), attribute)
    return info


def _load(name: str, target: str, fix: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise MismatchError(
            f"the engine {name!r} cannot be imported ({target}): {error}", fix
        ) from error
