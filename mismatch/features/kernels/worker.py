"""Audits implementations one by one, in a process that any of them may end.

Started by :mod:`mismatch.features.kernels.isolation`::

    python -m mismatch.features.kernels.worker JOB.json

JOB.json: ``{"place": DIR, "spec": {…AuditSpec…}}``. What there is to do goes to
``DIR/kernels/plan.json``, each result to a file next to it; ``now.json`` holds the number at
work, ``done.json`` appears at the end. Started again, it goes on where it stopped.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels.attention import audit_attention
from mismatch.features.kernels.candidates import PLANTED, Candidate, names_here
from mismatch.features.kernels.experts import audit_experts, origin_of
from mismatch.features.kernels.findings import Options
from mismatch.features.kernels.geometry import ModelGeometry, config_of, geometry_of
from mismatch.features.kernels.isolation import DONE, LABEL, NOW, PLAN, AuditSpec, result_file
from mismatch.features.kernels.results import Audit, AuditReport
from mismatch.run.messages import PROGRESS, exit_worker, report_ready, say, write_error
from mismatch.run.provenance import now, versions
from mismatch.run.store import read_json, write_json
from mismatch.training.experts import implementations_for
from mismatch.training.source import quieten
from mismatch.training.user_kernels import load_function

DTYPES = {"cpu": ("fp64", "fp32", "bf16"), "cuda": ("fp64", "fp32", "bf16", "fp16")}
NO_WEIGHTS = "they are not on this machine; its shapes are from the config that ships with mismatch"
NO_GPU = "GPU kernels: this machine has no GPU; flash kernels and their errors show only there"
UNEVEN = "layers whose shapes differ from the first layer's"
REDUCED = "experts of the model's size: errors are those of a layer of at most 8 experts of 64 x 48"
EXIT_FAILED = 2


@dataclass
class AuditPlan:
    """The audits of one spec."""

    spec: AuditSpec
    geometry: ModelGeometry
    options: Options
    attention: list[Candidate]
    """The selected implementations, including those that cannot run here."""
    experts: list[str]
    shipped: bool = False
    """Whether the configuration is the package's: the model is not on this machine."""

    @classmethod
    def of(cls, spec: AuditSpec) -> AuditPlan:
        """Read the model's configuration and select the implementations.

        Raises:
            MismatchError: something is not there, or there is nothing to audit.
        """
        quieten()
        name = Path(spec.model).name if Path(spec.model).is_dir() else spec.model
        config, shipped = config_of(spec.model, spec.revision, spec.trust_remote_code)
        geometry = geometry_of(config, name, spec.trust_remote_code)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = Options(device, spec.dtypes or DTYPES[device], spec.seed)
        attention = [] if spec.only == "experts" else names_here(geometry, spec.kernels, device)
        experts = [] if spec.only == "attention" else implementations_for(geometry.bare)
        known = dict.fromkeys([*(c.name for c in attention if c.origin != "yours"), *experts])
        for unknown in (each for each in spec.names if each not in known):
            fault = f"there is no implementation {unknown!r} here"
            raise MismatchError(fault, f"one of {', '.join(known)}")
        chosen = spec.names or known.keys() - {PLANTED}
        for text in spec.expert_kernels:
            load_function(text)
            if not geometry.sizes.experts:
                fault = f"{name} has no experts for {text} to run"
                raise MismatchError(fault, "drop --kernel-experts")
        attention = [each for each in attention if each.name in chosen or each.origin == "yours"]
        experts = [each for each in experts if each in chosen] + list(spec.expert_kernels)
        if not attention and not experts:
            fault = f"there is nothing to audit: {name} is dense"
            raise MismatchError(fault, "drop --only experts")
        return cls(spec, geometry, options, attention, experts, shipped)

    def report(self) -> AuditReport:
        """Return the report before any result: an audit with a reason cannot run here."""
        device = self.options.device
        audits = [
            Audit(each.name, "attention", each.origin, "unusable", each.unavailable, False)
            for each in sorted(self.attention, key=lambda each: not each.unavailable)
        ]
        audits += [
            Audit(name, "experts", origin_of(name), "unusable", "", False) for name in self.experts
        ]
        facts = {
            "created": now(),
            "versions": versions(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtypes": list(self.options.dtypes),
            "seed": self.options.seed,
        }
        untested = [NO_GPU] if device == "cpu" else []
        untested += [f"the weights of {self.geometry.model}: {NO_WEIGHTS}"] if self.shipped else []
        untested += [UNEVEN] if self.geometry.uneven else []
        untested += [REDUCED] if self.experts else []
        shapes = self.geometry.facts()
        return AuditReport(
            self.geometry.model, device, shapes, tuple(audits), facts, tuple(untested)
        )

    def audit(self, planned: Audit) -> Audit:
        """Audit one implementation."""
        if planned.kind == "experts":
            return audit_experts(self.geometry, self.options, planned.name)
        named = (candidate for candidate in self.attention if candidate.name == planned.name)
        return audit_attention(self.geometry, self.options, next(named))


def main(arguments: list[str]) -> int:
    job = read_json(Path(arguments[0]))
    try:
        run(from_json(AuditSpec, job["spec"]), Path(job["place"]) / LABEL)
    except MismatchError as error:
        write_error(job["place"], LABEL, error)
        return EXIT_FAILED
    return 0


def run(spec: AuditSpec, folder: Path) -> None:
    """Plan, if that is not done, and then run everything that has no result."""
    work = AuditPlan.of(spec)
    if not (folder / PLAN).exists():
        write_json(folder / PLAN, to_json(work.report()))
    report_ready()
    plan = from_json(AuditReport, read_json(folder / PLAN))
    todo = [(number, audit) for number, audit in enumerate(plan.audits) if not audit.reason]
    for count, (number, audit) in enumerate(todo, start=1):
        say(f"{PROGRESS}{count}/{len(todo)} {audit.name}")
        file = result_file(folder, number)
        if file.exists():
            continue
        write_json(folder / NOW, number)
        try:
            result = work.audit(audit)
        except KeyboardInterrupt:
            raise
        except MismatchError as error:
            result = replace(audit, reason=error.message)
        except BaseException as error:  # a kernel may raise anything, SystemExit too
            traceback.print_exc()
            result = replace(audit, reason=f"crashed: {named_line(error)}", crashed=True)
        write_json(file, to_json(result))
        (folder / NOW).unlink()
    write_json(folder / DONE, {})


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
