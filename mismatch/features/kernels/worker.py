"""Audits implementations one by one, in a process that any of them may end.

Started by :mod:`mismatch.features.kernels.isolation`::

    python -m mismatch.features.kernels.worker JOB.json

JOB.json: ``{"place": DIR, "spec": {…AuditSpec…}}``. What there is to do goes to
``DIR/kernels/plan.json``, the result of each step to a file beside it; ``now.json`` holds the step
that is at work, ``done.json`` appears at the end. Started again, it goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels.cases import PLANTED, Candidate, names_here
from mismatch.features.kernels.geometry import ModelGeometry, Options, config_of, geometry_of
from mismatch.features.kernels.isolation import DONE, LABEL, NOW, PLAN, AuditSpec, Step
from mismatch.features.kernels.results import Audit, Kind, Origin
from mismatch.run.messages import PROGRESS, exit_worker, report_ready, say, write_error
from mismatch.run.store import read_json, write_json

DTYPES = {"cpu": ("fp64", "fp32", "bf16"), "cuda": ("fp64", "fp32", "bf16", "fp16")}
NO_WEIGHTS = "they are not on this machine; its shapes are from the config that ships with mismatch"
NO_GPU = "GPU kernels: this machine has no GPU; flash kernels and their errors show only there"


@dataclass
class AuditPlan:
    """One audit.

    Attributes:
        attention: the selected implementations, including those that cannot run here.
        experts: names of the experts implementations, and of the user's own.
        shipped: whether the configuration is the package's: the model is not on this machine.
    """

    spec: AuditSpec
    geometry: ModelGeometry
    options: Options
    attention: list[Candidate]
    experts: list[str]
    shipped: bool = False

    @classmethod
    def of(cls, spec: AuditSpec) -> AuditPlan:
        """Read the model's configuration and select the implementations.

        Raises:
            MismatchError: an unknown model or implementation, a function that is not there, or
                nothing to audit.
        """
        _quiet()
        name = Path(spec.model).name if Path(spec.model).is_dir() else spec.model
        config, shipped = config_of(spec.model, spec.revision, spec.trust_remote_code)
        geometry = geometry_of(config, name, spec.trust_remote_code)
        options = options_of(spec)
        attention, experts = _selected(spec, geometry, options.device)
        if not attention and not experts:
            raise MismatchError(
                f"there is nothing to audit: {name} is dense", "drop --only experts"
            )
        return cls(spec, geometry, options, attention, experts, shipped)

    def plan(self) -> dict[str, Any]:
        """The steps, and what cannot run here; JSON data."""
        able = [candidate for candidate in self.attention if not candidate.unavailable]
        todo: list[tuple[str, Kind, Origin]] = [(c.name, "attention", c.origin) for c in able]
        todo += [(name, "experts", self._origin(name)) for name in self.experts]
        return {
            "model": self.geometry.model,
            "device": self.options.device,
            "geometry": to_json(self.geometry.facts()),
            "facts": self._facts(),
            "not_tested": list(self._not_tested()),
            "unavailable": [
                to_json(Audit(c.name, "attention", c.origin, "unusable", c.unavailable, False))
                for c in self.attention
                if c.unavailable
            ],
            "steps": [asdict(Step(number, *entry)) for number, entry in enumerate(todo)],
        }

    def _not_tested(self) -> Iterator[str]:
        if self.options.device == "cpu":
            yield NO_GPU
        if self.shipped:
            yield f"the weights of {self.geometry.model}: {NO_WEIGHTS}"
        if self.geometry.unlike:
            yield self.geometry.unlike
        if self.experts:
            yield from reduced_to(self.geometry)

    def audit(self, step: Step) -> dict[str, Any]:
        """One implementation by itself."""
        start = time.monotonic()
        audit = self._attention(step) if step.kind == "attention" else self._experts(step)
        document: dict[str, Any] = to_json(
            replace(audit, seconds=round(time.monotonic() - start, 2))
        )
        return document

    def _attention(self, step: Step) -> Audit:
        from mismatch.features.kernels.attention import audit_attention

        return audit_attention(self.geometry, self.options, self._candidate(step.name))

    def _experts(self, step: Step) -> Audit:
        from mismatch.features.kernels.experts import audit_experts

        return audit_experts(self.geometry, self.options, step.name)

    def _candidate(self, name: str) -> Candidate:
        return next(candidate for candidate in self.attention if candidate.name == name)

    def _origin(self, name: str) -> Origin:
        from mismatch.training.experts import NAME

        if name in self.spec.expert_kernels:
            return "yours"
        return "ours" if name == NAME else "transformers"

    def _facts(self) -> dict[str, Any]:
        from mismatch.run.provenance import now, versions

        return {
            "created": now(),
            "versions": versions(),
            "device": _device_name(self.options.device),
            "threads": torch.get_num_threads(),
            "dtypes": list(self.options.dtypes),
            "seed": self.options.seed,
        }


def reduced_to(geometry: ModelGeometry) -> Iterator[str]:
    """A sentence on the reduced size of the experts; none where it is the model's."""
    from mismatch.features.kernels.expert_layer import sizes_of

    try:
        full = sizes_of(geometry)
    except MismatchError:  # they are not measured
        return
    small = full.reduced()
    if small != full:
        yield (
            f"experts of the model's size ({full.experts} of {full.hidden} x {full.width}): errors "
            f"are those of {small.experts} of {small.hidden} x {small.width}"
        )


def options_of(spec: AuditSpec) -> Options:
    """Options of the spec, with defaults by the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = spec.dtypes or DTYPES[device]
    return Options(device=device, dtypes=dtypes, seed=spec.seed)


def _selected(
    spec: AuditSpec, geometry: ModelGeometry, device: str
) -> tuple[list[Candidate], list[str]]:
    """The implementations of both kinds that the spec selects.

    Raises:
        MismatchError: a name that neither kind has; a function that cannot be imported.
    """
    from mismatch.training.experts import implementations_for
    from mismatch.training.user_kernels import load_function

    attention = [] if spec.only == "experts" else names_here(geometry, spec.kernels, (), device)
    experts = [] if spec.only == "attention" else implementations_for(geometry.bare)
    if spec.names:
        names = [c.name for c in attention if c.origin != "yours"]
        _require_known(spec.names, names, experts)
        if PLANTED in spec.names and names:
            attention += names_here(geometry, (), (PLANTED,), device)
        attention = [c for c in attention if c.name in spec.names or c.origin == "yours"]
        experts = [name for name in experts if name in spec.names]
    for text in spec.expert_kernels:
        load_function(text)
        if geometry.experts is None:
            raise MismatchError(
                f"{geometry.model} has no experts for {text} to run", "drop --kernel-experts"
            )
    return attention, [*experts, *spec.expert_kernels]


def _require_known(names: Sequence[str], attention: Sequence[str], experts: Sequence[str]) -> None:
    both = [*dict.fromkeys([*attention, *experts])]
    for name in names:
        if name not in both and not (name == PLANTED and attention):
            raise MismatchError(
                f"there is no implementation {name!r} here", f"one of {', '.join(both)}"
            )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _quiet() -> None:
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


EXIT_FAILED = 2


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mismatch.features.kernels.worker JOB.json", file=sys.stderr)
        return EXIT_FAILED
    job = read_json(Path(arguments[0]))
    try:
        run(from_json(AuditSpec, job["spec"]), Path(job["place"]) / LABEL)
    except MismatchError as error:
        write_error(job["place"], LABEL, error)
        return EXIT_FAILED
    return 0


def run(spec: AuditSpec, folder: Path) -> None:
    """Plan, if that is not done, and then every step that has no result.

    Raises:
        MismatchError: there is nothing to audit, or no way to begin.
    """
    work = AuditPlan.of(spec)
    if not (folder / PLAN).exists():
        write_json(folder / PLAN, work.plan())
    report_ready()
    steps = [Step(**entry) for entry in read_json(folder / PLAN)["steps"]]
    for count, step in enumerate(steps, start=1):
        say(f"{PROGRESS}{count}/{len(steps)} {step.name}")
        _do(step, folder, partial(work.audit, step))
    write_json(folder / DONE, {})


def _do(step: Step, folder: Path, work: Callable[[], Any]) -> None:
    """One step with a result of its own, whatever happens in it."""
    if (folder / step.file).exists():
        return
    write_json(folder / NOW, asdict(step))
    try:
        result = work()
    except KeyboardInterrupt:
        raise
    except MismatchError as error:
        result = {"failed": error.message}
    except BaseException as error:  # a kernel may raise anything, SystemExit too
        traceback.print_exc()
        result = {"failed": f"crashed: {named_line(error)}", "crashed": True}
    write_json(folder / step.file, result)
    (folder / NOW).unlink()


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
