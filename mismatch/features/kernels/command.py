"""`mismatch kernels`: are the attention and expert kernels of this machine right for a model?"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import DTYPE_NAMES, Flags, Option, switch
from mismatch.cli.options import JSON, MODEL_FLAGS, TRUST_RUN
from mismatch.errors import MismatchError
from mismatch.specs import MODEL, OUTPUT, SEEDS, WEEK_S

if TYPE_CHECKING:
    from mismatch.features.kernels.isolation import AuditSpec
    from mismatch.features.kernels.results import AuditReport

AUDIT = "What to audit"
DEFAULT_MODEL = "tiny-gpt-oss"
DTYPES = ("fp64", "fp32", "bf16", "fp16")


AUDIT_FLAGS = (
    Option(
        "kernel",
        list[str] | None,
        AUDIT,
        "Attention of your own, package.module:function, with @eager, @sdpa, @flash or @none for "
        "the mask it takes; repeatable.",
    ),
    Option(
        "kernel_experts",
        list[str] | None,
        AUDIT,
        "Experts of your own, package.module:function; repeatable.",
    ),
    Option("only", Literal["attention", "experts"] | None, AUDIT, "Default: both."),
    Option(
        "name",
        list[str] | None,
        AUDIT,
        "Only this one, beside your own: eager, sink-sdpa …; repeatable.",
    ),
    Option(
        "dtype",
        list[str] | None,
        AUDIT,
        "fp64, fp32, bf16 or fp16; repeatable. Default: by device.",
    ),
    Option(
        "time_limit",
        float,
        AUDIT,
        "Seconds for one implementation; then it is ended.",
        default=900.0,
        range=WEEK_S,
    ),
    Option("seed", int, AUDIT, "Of the inputs.", default=0, range=SEEDS),
)
AUDIT_OUTPUT = (
    Option(
        "run",
        Path | None,
        MODEL,
        "Run whose model is audited; its report gets the result.",
    ),
    Option(
        "out", Path | None, OUTPUT, "Directory for kernels.html and kernels.json; default: none."
    ),
    switch("details", OUTPUT, "Also errors per dtype."),
    JSON,
)


@with_flags(MODEL_FLAGS, AUDIT_FLAGS, AUDIT_OUTPUT, TRUST_RUN)
def kernels(flags: Flags) -> int:
    """Audit attention and expert kernels, and your own.

    Every implementation on this machine, for one model, runs forward and backward and is compared
    with float64: sinks, window, packing, gradients.

    Exit code 0: nothing wrong with any that a run could use. 1: one of them, or one of your own,
    is wrong. 2: nothing was audited.

    Examples:
    mismatch kernels --model gpt-oss-20b
    """
    from rich.console import Console

    from mismatch.cli.session import ConsoleNarrator
    from mismatch.features.kernels.isolation import run_audit
    from mismatch.features.kernels.results import judge, kernels_to_json
    from mismatch.features.kernels.section import section
    from mismatch.reports.terminal import print_alone

    spec = audit_spec(flags)
    narrator = ConsoleNarrator(Console(stderr=flags["as_json"]))
    if flags["model"] is None and flags["run"] is None:
        narrator.note(f"no --model was given: the embedded {DEFAULT_MODEL} is taken")
    with _place(flags["out"], spec.model) as directory:
        with narrator.stage("audit of kernels") as progress:
            report = run_audit(spec, directory, progress)
        verdict = judge(report)
        if flags["out"] is not None:
            save(report, flags["out"])
    if flags["run"] is not None:
        save_in_run(report, flags["run"])
    if flags["as_json"]:
        typer.echo(json.dumps(kernels_to_json(report), indent=2, allow_nan=False))
    else:
        where = flags["out"] or flags["run"]
        print_alone(section(report), verdict, Console(), where, "kernels.html", flags["details"])
    return verdict.code


def audit_spec(flags: Flags) -> AuditSpec:
    """What the flags ask for, as far as that can be told without torch.

    Raises:
        MismatchError: an unknown model, dtype, length, or flags that exclude each other.
    """
    from mismatch.features.kernels.isolation import AuditSpec

    _require_sense(flags)
    model, revision, trust = _model(flags)
    return AuditSpec(
        model=model,
        revision=revision,
        trust_remote_code=trust,
        only=flags["only"],
        names=tuple(flags["name"] or ()),
        kernels=tuple(flags["kernel"] or ()),
        expert_kernels=tuple(flags["kernel_experts"] or ()),
        dtypes=_dtypes(flags["dtype"] or [], model, revision),
        seed=flags["seed"],
        limit_s=flags["time_limit"],
    )


def _require_sense(flags: Flags) -> None:
    only = flags["only"]
    for kind, name in (("experts", "kernel"), ("attention", "kernel_experts")):
        if only == kind and flags[name]:
            raise MismatchError(
                f"--only {kind} leaves nothing to do for --{name.replace('_', '-')}",
                "drop one of the two",
            )


def _model(flags: Flags) -> tuple[str, str | None, bool]:
    """Model, revision, whether its own code may run: of the flags, or of the run's trainer."""
    from mismatch.cli.session import trusted_code
    from mismatch.models import resolve_model
    from mismatch.run.directory import load_spec

    name = flags["model"]
    if flags["run"] is None:
        model = resolve_model(name or DEFAULT_MODEL)
        return model, flags["revision"], flags["trust_remote_code"]
    train = load_spec(flags["run"]).train
    try:
        model = resolve_model(name or train.model)
    except MismatchError as error:
        if name is not None:
            raise
        raise MismatchError(
            f"the model of {flags['run']} is not on this machine: {train.model}",
            "say where it is: --model MODEL",
        ) from error
    if Path(model).name != Path(train.model).name:  # a run may come from another machine
        raise MismatchError(
            f"--model {name} is not the model of {flags['run']}: {train.model}",
            "drop --model: the run's own is taken",
        )
    return model, train.revision, trusted_code(flags["run"], train, flags)


def _dtypes(texts: list[str], model: str, revision: str | None) -> tuple[str, ...]:
    """Names of ``--dtype``, separated by commas or repeated; vLLM's names will do."""
    from mismatch.cli.to_spec import checkpoint_dtype

    dtypes = []
    for name in (name for text in texts for name in text.split(",")):
        dtype = DTYPE_NAMES.get(name, name)
        dtype = checkpoint_dtype(model, revision) if dtype == "auto" else dtype
        if dtype not in DTYPES:
            raise MismatchError(f"--dtype {name!r} is unknown", f"one of {', '.join(DTYPES)}")
        dtypes.append(dtype)
    return tuple(dict.fromkeys(dtypes))


@contextmanager
def _place(out: Path | None, model: str) -> Iterator[Path]:
    """Where the audit works: the user's directory, or one that is gone afterwards."""
    if out is not None:
        from mismatch.features.kernels.isolation import LABEL, PLAN
        from mismatch.run.directory import new_directory

        directory = new_directory(out, model)
        try:
            yield directory
        except MismatchError:
            if not (directory / LABEL / PLAN).exists():  # nothing began: the command may come again
                shutil.rmtree(directory)  # it was new or empty
            raise
        return
    with tempfile.TemporaryDirectory(prefix="mismatch-kernels-") as scratch:
        yield Path(scratch)


def save(report: AuditReport, out: Path) -> None:
    """Write kernels.json and kernels.html."""
    from mismatch.features.kernels.results import FILE, kernels_to_json
    from mismatch.features.kernels.section import page
    from mismatch.reports.html import show_page
    from mismatch.run import store

    store.write_json(out / FILE, kernels_to_json(report))
    store.write_text(out / "kernels.html", show_page(page(report)))


def save_in_run(report: AuditReport, run: Path) -> None:
    """Leave the audit in a run, and write the run's report again if it has one.

    Raises:
        MismatchError: the run cannot be written, or its artefacts are damaged.
    """

    from mismatch.cli.session import command
    from mismatch.features.kernels.results import FILE, SCHEMA, kernels_to_json
    from mismatch.pipeline.document import report_from_json
    from mismatch.reports.files import write_report
    from mismatch.run import store
    from mismatch.run.directory import at_work, load_spec

    with at_work(run, "kernels", load_spec(run), command()):
        store.save_document(run, FILE, kernels_to_json(report), schema=SCHEMA)
        if (run / "report.json").exists():
            stored = report_from_json(store.load_document(run, "report.json"))
            write_report(run, stored.with_analyses(kernels=report), store.load_tokens(run))
