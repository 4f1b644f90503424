"""What the tool has to know of an engine before it imports it."""

from __future__ import annotations

from dataclasses import dataclass


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
            here, its interpreter is ``.venv-NAME/bin/python`` beside this environment.
        gives_routing_weights: beside the ids of the experts that it used, it gives their weights.
        verl_name: its name in a verl config; None: the same.
        started: mismatch starts it (``--engine NAME``), in contrast to running servers.
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
