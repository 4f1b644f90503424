"""Which engines there are: a folder and a line here, or an entry point of a third party.

Also here: what is known of an engine before it is imported, versions, files of a model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError, did_you_mean
from mismatch.facts import SideFacts
from mismatch.models.config import serves_mxfp4, unpacks_mxfp4
from mismatch.plugins import load
from mismatch.run import provenance
from mismatch.run.hub import cached_snapshot
from mismatch.specs import TORCH_NAMES, EngineSpec

if TYPE_CHECKING:
    from mismatch.engines.base import Engine


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's declaration; it lies in the engine's folder and imports nothing heavy.

    >>> EngineInfo("my_engine.engine:MyEngine", packages=("my-engine",)).own_environment
    False

    Attributes:
        engine: ``module:class`` of its :class:`mismatch.engines.base.Engine`.
        module: the Python module that has to be installed; None: nothing has to be.
        packages: distributions whose versions its numbers depend on; the first that is installed
            gives the engine's own version.
        install_hint: what to do where it is not installed.
        import_check: a statement that proves that it works; None: not tried.
        preflight: ``module:function`` that takes an EngineSpec and raises MismatchError where this
            machine cannot run it; None: nothing to check.
        own_environment: its pins clash with those of other engines: where it is not installed
            here, its interpreter is ``.venv-NAME/bin/python`` next to this environment.
        gives_routing_weights: it gives the ids of the experts that it used, and their weights.
        verl_name: its name in a verl config; None: the same.
        started: mismatch starts it (``--engine NAME``), in contrast to running servers.
        no_adapter: ``module:function`` that takes an EngineSpec and says why the engine cannot
            apply its LoRA adapter itself; "": it can. None: it gets merged weights.
        sync_driver: ``module:class`` of its :class:`mismatch.engines.sync_drivers.Driver`; None:
            its weight sync cannot be probed.
        weight_paths: ways to push weights into it -> what each calls; the first is the default.
    """

    engine: str
    module: str | None = None
    packages: tuple[str, ...] = ()
    install_hint: str = "install the package that provides it"
    import_check: str | None = None
    preflight: str | None = None
    own_environment: bool = False
    gives_routing_weights: bool = False
    verl_name: str | None = None
    started: bool = True
    no_adapter: str | None = None
    sync_driver: str | None = None
    weight_paths: Mapping[str, str] = field(default_factory=dict)


# Name -> ``module:attribute`` of its EngineInfo. An entry point names that, or an Engine class.
ENGINES = {
    "vllm": f"{__package__}.vllm:INFO",
    "sglang": f"{__package__}.sglang:INFO",
    "transformers": f"{__package__}.transformers:INFO",
    "server": f"{__package__}.servers:INFO",
}
PACKED = ("vllm", "sglang")  # compute MXFP4 experts as they are stored
ENTRY_POINT_GROUP = "mismatch.engines"


def engine_infos() -> dict[str, EngineInfo]:
    """Return declarations of the registered engines; those of entry points are read when asked."""
    return {name: engine_info(name) for name in ENGINES}


def probed_engines() -> list[str]:
    """Return engines into which weights can be pushed and read back."""
    return [name for name, info in engine_infos().items() if info.weight_paths]


def weight_givers() -> list[str]:
    """Return engines that give the weights of the experts that they used, with their ids."""
    return [name for name, info in engine_infos().items() if info.gives_routing_weights]


def startable_engines() -> list[str]:
    """Return the names that ``--engine`` takes, without third parties."""
    return [name for name, info in engine_infos().items() if info.started]


def engine_names() -> list[str]:
    """Return names of all engines, ours and those of installed third parties, sorted."""
    return sorted({*ENGINES, *(point.name for point in _entry_points())})


def engine_info(name: str) -> EngineInfo:
    """Return the declaration of an engine.

    Raises:
        MismatchError: unknown name (with near misses), or it cannot be imported.
    """
    if name in ENGINES:
        info: EngineInfo = load(ENGINES[name])
        return info
    for point in _entry_points():
        if point.name == name:
            hint = f"repair the package that provides {point.value}"
            if point.attr != "INFO":
                return EngineInfo(point.value, install_hint=hint)
            declared: EngineInfo = _load(name, point.value, hint)
            return declared
    hint = did_you_mean(name, engine_names())
    fault = f"unknown engine {name!r}"
    raise MismatchError(fault, f"{hint}known engines: {', '.join(engine_names())}")


def require_engine(name: str) -> None:
    """Check, without importing it, that an engine is known and installed.

    Raises:
        MismatchError: as :func:`engine_info`, or not installed (with the command).
    """
    info = engine_info(name)
    if info.module is not None and importlib.util.find_spec(info.module) is None:
        raise MismatchError(f"the engine {name!r} is not installed here", info.install_hint)


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine.

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
    if spec.dtype == "fp32" and spec.engine in PACKED and serves_mxfp4(spec):
        raise MismatchError(
            f"--dtype fp32: {spec.engine} computes MXFP4 experts in bf16 whatever it is asked for",
            "serve the same values unpacked: --weights engine=bf16",
        )
    if info.preflight is not None:
        _load(spec.engine, info.preflight, info.install_hint)(spec)


def with_adapter_way(spec: EngineSpec) -> EngineSpec:
    """Return the spec with ``adapter_as`` decided, by what its engine can in this environment.

    Raises:
        MismatchError: the engine is to apply the adapter itself and cannot.
    """
    if spec.adapter is None or spec.adapter_as == "merged":
        return spec
    info = engine_info(spec.engine)
    why = f"mismatch gives {spec.engine} merged weights alone"
    if info.no_adapter is not None:
        why = _load(spec.engine, info.no_adapter, info.install_hint)(spec)
    if why and spec.adapter_as == "own":
        raise MismatchError(f"--adapter-as own: {why}", "--adapter-as merged")
    return replace(spec, adapter_as="merged" if why else "own")


def _entry_points() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)


def _load(name: str, target: str, fix: str) -> Any:
    try:
        return load(target)
    except (ImportError, AttributeError) as error:
        fault = f"the engine {name!r} cannot be imported ({target}): {error}"
        raise MismatchError(fault, fix) from error


PACKAGES = ("torch", "transformers", "numpy")  # in addition to those of the engines


def short_dtype(dtype: Any) -> str:
    """ "bf16" of torch.bfloat16 or "bfloat16"; other names as they are."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, long in TORCH_NAMES.items() if long == name), name)


def versions() -> dict[str, str]:
    """Return versions of what the numbers depend on, of the packages that are installed."""
    named = (package for info in engine_infos().values() for package in info.packages)
    engines = [package for package in named if package not in PACKAGES]
    return provenance.versions((*engines, *PACKAGES))


def model_facts(spec: EngineSpec) -> SideFacts:
    """Return model, versions and hashes of the source files."""
    from mismatch.models.adapters import adapter_facts, adapter_files
    from mismatch.models.derived import form_name, layers_held
    from mismatch.models.digests import source_hashes

    directory = model_directory(spec)
    files = adapter_files(spec.adapter.path) if spec.adapter else {}
    installed, packages = versions(), engine_info(spec.engine).packages
    return {
        "model": spec.model,
        "revision": spec.revision,
        "weights_form": form_name(spec.weights, directory),
        **layers_held(directory),
        "versions": installed,
        "version": next((installed[name] for name in packages if name in installed), "unknown"),
        "source_files": source_hashes(str(directory)) | files if directory else {},
        **adapter_facts(spec.adapter, spec.adapter_as),
    }


def model_directory(spec: EngineSpec) -> Path | None:
    """Return where the model's files are on this machine, also for a hub id that was downloaded."""
    if Path(spec.model).is_dir():
        return Path(spec.model)
    return cached_snapshot(spec.model, spec.revision)


def checkpoint_names(spec: EngineSpec) -> list[str]:
    """Return names of all tensors in the model's safetensors files, from their headers.

    Experts that the engine dequantises while it loads them have one name, not two.
    """
    from safetensors import safe_open

    from mismatch.models.derived import unpacked_names

    directory = model_directory(spec)
    names: list[str] = []
    for path in sorted(directory.glob("*.safetensors")) if directory else []:
        with safe_open(path, framework="numpy") as file:
            names.extend(file.keys())
    return unpacked_names(names) if unpacks_mxfp4(spec) else names
