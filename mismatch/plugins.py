"""Registration of features: what a folder or another package adds to the core.

A feature is a folder ``mismatch/features/NAME/`` whose ``__init__.py`` holds
``FEATURE = Feature(…)``, or the same object in another package, named by an entry point of the
group ``mismatch.features``. The core asks :func:`features` and imports no feature by name.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mismatch.codec import from_json, schema_of, to_json
from mismatch.errors import MismatchError

BUILT_IN = "mismatch.features"
ENTRY_POINT_GROUP = "mismatch.features"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, imported when it is run.

    >>> Command("locate", "Name the first module that differs.", "package.module:locate").name
    'locate'
    """

    name: str
    summary: str
    """One line for ``mismatch --help``."""
    function: str
    """Import string ``module:function`` of a function made by ``cli.command.with_flags``."""
    group: str = "Dig deeper"
    """Heading in ``mismatch --help``."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """One analysis: how its result is measured, and where it stands in a report.

    The functions and the result are import strings ``module:name``, so that a report imports the
    types and sections of the results that it holds, and nothing that measures them.
    """

    id: str
    """Its key in report.json."""
    result: str
    """A frozen dataclass, written and read by :mod:`mismatch.codec`."""
    measure: str = ""
    """``measure(RunArtefacts, CheckSpec)``, pure; None where the run does not ask for it, NotTested
    where it could not be measured."""
    section: str = ""
    """``section(result, report)``, which shows it."""
    unseen: str = ""
    """Attribute of the result that lists what it could not see, for what was not tested."""
    order: int = 100
    """Of its key in report.json."""
    from_run: str = ""
    """``from_run(run_dir, CheckSpec)`` reads the result from artefacts that a command of the
    feature left in a run directory; it is in the report whether or not anything was compared."""
    checks: str = ""
    """``checks(result)``: what it adds to the checks that the verdict reads."""
    causes: str = ""
    """``causes(result)``: what a result that ``from_run`` read found to be wrong by running parts
    of both sides; only digests and resolved settings come before it."""
    excluded: str = ""
    """``excluded(result)``: what running parts of both sides shows that a side's cause cannot be, a
    :class:`mismatch.analysis.cause_results.Excluded` a side."""
    told: str = ""
    """``told(result)``: causes that a result that ``from_run`` read shows without running anything,
    from what no pair of scorings holds."""
    measured: str = ""
    """``measured(result, metrics)``: the metrics, where it has their values of more tokens than
    were compared."""
    judged: str = ""
    """``judged(result, judgements)``: the judgements, where a part of the run decides."""
    reason: str = ""
    """``reason(result)``: what is said behind the verdict's reason; "": nothing."""
    lacks: str = ""
    """``lacks(result, report)``: why ``--require ID`` makes the exit code 1; "": it does not."""
    chapter: str = "more"
    """Id of the chapter of the page that shows the section (``reports/sections``)."""
    of_pairs: bool = False
    """It is also measured where ``mismatch compare`` takes any two scorings."""

    def call(self, part: str, *given: Any) -> Any:
        """Return what the function that a field names gives; None where the field names none."""
        name = getattr(self, part)
        return load(name)(*given) if name else None

    def not_seen(self, result: Any) -> tuple[Any, ...]:
        """Return what a result could not see, each a sentence or a NotTested."""
        return tuple(getattr(result, self.unseen)) if self.unseen else ()

    def write(self, result: Any) -> dict[str, Any]:
        """Return the keys of report.json that hold it."""
        return {self.id: to_json(result)}

    def read(self, document: dict[str, Any]) -> Any:
        """Return the inverse; None where the report does not have it."""
        entry = document.get(self.id)
        return None if entry is None else from_json(load(self.result), entry)

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON Schema of its keys."""
        return {self.id: schema_of(load(self.result), definitions)}


@dataclass(frozen=True, slots=True)
class Scorer:
    """A framework's own code as the trainer, for ``--scorer NAME``, in the user's interpreter."""

    name: str
    adapter: str
    """Import string of a class, see mismatch/trainers/protocol.py; its modules import what
    ``modules`` names, numpy and the standard library."""
    modules: tuple[str, ...]
    """What the user's environment must hold."""
    require: str = ""
    """``require(TrainSpec, ranks)``: refuses, before anything starts, what it cannot score."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Everything that one feature adds. Import strings keep the start of a command fast."""

    name: str
    commands: tuple[Command, ...] = ()
    analyses: tuple[Analysis, ...] = ()
    """What it adds to a report."""
    scorers: tuple[Scorer, ...] = ()
    """Trainers that it adds to ``--scorer``."""
    configuration: str = ""
    """Import string of a :class:`mismatch.cli.configuration.Configuration`: flags of a check."""
    check_flags: str = ""
    """Import string of a tuple of :class:`mismatch.cli.flags.Option`: flags of ``check``, whose
    values its spec keeps in ``extras``."""
    check_step: str = ""
    """Import string of ``step(stages)``, which a check calls once it has its scorings. A
    MismatchError that it raises is reported as not tested."""
    files: str = ""
    """Import string of ``postmortem(flags)``, which ``mismatch postmortem`` asks first: the exit
    code for a file that this feature reads, None for other files."""
    plan: str = ""
    """Import string of ``section(spec)``, what a dry run of a check shows of it."""


def features() -> tuple[Feature, ...]:
    """Return the built-in features by name, then those of other packages.

    Raises:
        MismatchError: the entry point of another package cannot be loaded.
    """
    return built_in() + of_other_packages()


@cache
def built_in() -> tuple[Feature, ...]:
    """Return the feature of every folder below ``mismatch/features``, by name."""
    spec = find_spec(BUILT_IN)
    places = spec.submodule_search_locations if spec is not None else None
    names = sorted(info.name for info in pkgutil.iter_modules(places or []) if info.ispkg)
    return tuple(import_module(f"{BUILT_IN}.{name}").FEATURE for name in names)


@cache
def of_other_packages() -> tuple[Feature, ...]:
    """Return the features that installed packages name by an entry point.

    Raises:
        MismatchError: one of them cannot be loaded.
    """
    from importlib.metadata import entry_points  # 40 ms, which a command of our own need not pay

    found: list[Feature] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            found.append(point.load())
        except Exception as error:
            raise MismatchError(
                f"the feature {point.name!r} of another package cannot be loaded: "
                f"{type(error).__name__}: {error}",
                f"repair or uninstall the package that provides {point.value}",
            ) from error
    return tuple(found)


def step_label(feature: Feature) -> str:
    """Return under which name a run keeps the error of a feature's step."""
    return f"step-{feature.name}"


def load(name: str) -> Any:
    """Return the object that an import string ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def scorers() -> dict[str, Scorer]:
    """Return the trainers of all features, by their names for ``--scorer``."""
    return {scorer.name: scorer for feature in features() for scorer in feature.scorers}


def find_command(name: str) -> Command | None:
    """Return a feature's command; None where no feature has it."""
    for source in (built_in, of_other_packages):  # lazily: see of_other_packages
        for feature in source():
            for command in feature.commands:
                if command.name == name:
                    return command
    return None
