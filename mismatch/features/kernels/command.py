"""`mismatch kernels`: are the attention and expert kernels of this machine right for a model?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option, flag_of, switch
from mismatch.cli.options import MODEL_FLAGS
from mismatch.errors import MismatchError, require_packages
from mismatch.specs import OUTPUT, SEEDS, WEEK_S

if TYPE_CHECKING:
    from mismatch.features.kernels.isolation import AuditSpec

AUDIT = "What to audit"
DEFAULT_MODEL = "tiny-gpt-oss"
DTYPES = ("fp64", "fp32", "bf16", "fp16")
OWN = (
    "Your own attention, package.module:function, with @eager, @sdpa, @flash or @none for the "
    "mask it takes; repeatable."
)
OWN_EXPERTS = "Your own experts, package.module:function; repeatable."
NAMES = "Only this kernel and yours: eager, sink-sdpa …; repeatable."
DTYPE = "fp64, fp32, bf16 or fp16; repeatable. Default: by device."
LIMIT = "Seconds after which an implementation is stopped."
WHERE = "Directory for kernels.json and the log; default: none."

AUDIT_FLAGS = (
    Option("kernel", list[str] | None, AUDIT, OWN),
    Option("kernel_experts", list[str] | None, AUDIT, OWN_EXPERTS),
    Option("only", Literal["attention", "experts"] | None, AUDIT, "Default: both."),
    Option("name", list[str] | None, AUDIT, NAMES),
    Option("dtype", list[str] | None, AUDIT, DTYPE),
    Option("time_limit", float, AUDIT, LIMIT, default=900.0, range=WEEK_S),
    Option("seed", int, AUDIT, "Seed of the inputs.", default=0, range=SEEDS),
    Option("out", Path | None, OUTPUT, WHERE),
    switch("details", OUTPUT, "Also print errors per dtype."),
)


@with_flags(MODEL_FLAGS, AUDIT_FLAGS, JSON)
def kernels(flags: Flags) -> int:
    """Audit attention and expert kernels, and your own.

    Every implementation on this machine, for one model, runs forward and backward and is compared
    with float64: sinks, window, packing, gradients.

    Exit code 0: every kernel that a run could use is right. 1: one of them, or your kernel, is
    wrong. 2: nothing was audited.

    Examples:
    mismatch kernels --model gpt-oss-20b
    """
    from mismatch.cli import output, session
    from mismatch.features.kernels.isolation import LABEL, PLAN, run_audit
    from mismatch.features.kernels.results import judge, kernels_to_json
    from mismatch.features.kernels.section import section
    from mismatch.run.directory import new_directory
    from mismatch.run.store import write_json

    require_packages("torch")
    spec, out = audit_spec(flags), flags["out"]
    narrator = session.narrator_of(flags, DEFAULT_MODEL)
    with tempfile.TemporaryDirectory(prefix="mismatch-kernels-") as scratch:
        directory = Path(scratch) if out is None else new_directory(out, spec.model)
        try:
            with narrator.stage("audit of kernels") as progress:
                report = run_audit(spec, directory, progress)
        except MismatchError:
            if out is not None and not (out / LABEL / PLAN).exists():
                shutil.rmtree(out)  # nothing began: the same command may come again
            raise
    verdict, document, file = judge(report), kernels_to_json(report), "kernels.json"
    if out is not None:
        write_json(out / file, document)
    return output.conclude_alone(section(report), verdict, document, out, file, flags)


def audit_spec(flags: Flags) -> AuditSpec:
    """Return what the flags ask for, checked as far as that needs no torch."""
    from mismatch.features.kernels.isolation import AuditSpec
    from mismatch.models import resolve_model

    for kind, name in (("experts", "kernel"), ("attention", "kernel_experts")):
        if flags["only"] == kind and flags[name]:
            fault = f"--only {kind} leaves nothing to do for {flag_of(name)}"
            raise MismatchError(fault, "drop one of the two")
    dtypes = tuple(name for text in flags["dtype"] or () for name in text.split(","))
    for name in dtypes:
        if name not in DTYPES:
            raise MismatchError(f"--dtype {name!r} is unknown", f"one of {', '.join(DTYPES)}")
    return AuditSpec(
        model=resolve_model(flags["model"] or DEFAULT_MODEL),
        **flags.pick("revision trust_remote_code only seed"),
        names=tuple(flags["name"] or ()),
        kernels=tuple(flags["kernel"] or ()),
        expert_kernels=tuple(flags["kernel_experts"] or ()),
        dtypes=dtypes,
        limit_s=flags["time_limit"],
    )
