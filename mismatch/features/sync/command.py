"""`mismatch sync-probe`: do the weights arrive that a trainer pushes into the engine?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option, flags_of, switch
from mismatch.cli.options import DRY_RUN, MODEL_FLAGS, PYTHON, WEIGHTS
from mismatch.engines.registry import engine_info, model_directory, probed_engines
from mismatch.errors import MismatchError, require_packages
from mismatch.specs import OUTPUT, SEEDS, EngineSpec

if TYPE_CHECKING:
    from mismatch.features.sync.report import SyncSpec

PROBE = "What to probe"
DEFAULT_MODEL = "tiny-gpt-oss"
UPDATE_BYTES = 8  # of an element of a weight update: its float32 value, and the noise added to it
PUSH_HELP = "Your own push, package.module:function; it gets a state dict and the engine."
PROBE_FLAGS = (
    Option("engine", str, PROBE, "vllm, sglang or transformers.", default="vllm"),
    Option(
        "path",
        str | None,
        PROBE,
        "How weights are pushed: vllm reload, load, rpc, sleep-1, sleep-2 or lora; sglang disk or "
        "tensor; transformers load. Default: the first.",
    ),
    Option("push", str | None, PROBE, PUSH_HELP),
    Option("seed", int, PROBE, "Seed of updates and tokens.", default=0, range=SEEDS),
    switch("keep_caches", PROBE, "Do not reset the prefix cache after a push by --path."),
    Option("trainer", bool, PROBE, "Score with transformers too.", default=True),
)
ENGINE_OPTIONS = (
    replace(PYTHON, help="Python of the environment that holds the engine."),
    *flags_of(EngineSpec, "dtype tensor_parallel_size gpu_memory_utilization max_model_len args"),
    replace(WEIGHTS, help="engine=bf16: serve quantised weights dequantised."),
)
PROBE_OUTPUT = (
    Option("out", Path | None, OUTPUT, "Directory of the probe; default: runs/TIME-MODEL."),
    switch("details", OUTPUT, "Also print scores and caches."),
    replace(DRY_RUN, help="Show what would be pushed; start nothing."),
    JSON,
)
ON_DISK = ("reload", "sleep-1", "sleep-2", "disk")  # paths that read a checkpoint
PROBED_FORMS = ("as-stored", "bf16")
FUNCTION = re.compile(r"[\w.]+:[\w.]+")


@with_flags(MODEL_FLAGS, PROBE_FLAGS, ENGINE_OPTIONS, PROBE_OUTPUT)
def sync_probe(flags: Flags) -> int:
    """Push known weight updates into an engine and check which parameters arrive.

    Every parameter gets two known updates, pushed by the engine's own path, then its first values;
    after each push it is read back as the kernels use it.

    Exit code 0: every parameter arrived. 1: some did not, or were not compared. 2: no verdict.

    Examples:
    mismatch sync-probe --model MODEL
    mismatch sync-probe --model MODEL --engine sglang
    """
    from mismatch.cli import output, session
    from mismatch.features.sync.judge import FILE, SCHEMA, judge, sync_to_json
    from mismatch.features.sync.processes import run_probe
    from mismatch.features.sync.section import page, section
    from mismatch.pipeline.preflight import require_engine_names
    from mismatch.reports.html import show_page
    from mismatch.run import store
    from mismatch.run.directory import new_directory

    spec = probe_spec(flags)
    require_engine_names(spec.engine)
    if flags["dry_run"] or spec.trainer:
        require_packages("torch", "transformers")
    if flags["dry_run"]:
        return plan(spec)
    narrator = session.narrator_of(flags, DEFAULT_MODEL)
    out = new_directory(flags["out"], spec.engine.model)
    with narrator.stage("probe of the weight sync") as progress:
        report = run_probe(out, spec, progress)
    document, file = sync_to_json(report), "sync-probe.html"
    store.save_document(out, FILE, document, schema=SCHEMA)
    store.write_text(out / file, show_page(page(report)))
    return output.conclude_alone(section(report), judge(report), document, out, file, flags)


def probe_spec(flags: Flags) -> SyncSpec:
    """Return what the flags ask for.

    Raises:
        MismatchError: an unknown model, engine, path or push, or --path with --push.
    """
    from mismatch.cli.to_spec import engine_spec, refuse_sides
    from mismatch.features.sync.report import SyncSpec
    from mismatch.models import resolve_model

    engine = flags["engine"]
    paths = tuple(engine_info(engine).weight_paths)
    if not paths:
        fault = f"--engine {engine}: its weight sync cannot be probed"
        raise MismatchError(fault, f"one of {', '.join(probed_engines())}")
    path, push = flags["path"] or paths[0], flags["push"]
    if path not in paths:
        fault = f"--path {path}: {engine} has no such path"
        raise MismatchError(fault, f"one of {', '.join(paths)}")
    if push is not None and not FUNCTION.fullmatch(push):
        raise MismatchError(f"--push {push!r} names no function", "write package.module:function")
    if flags["path"] and flags["push"]:
        raise MismatchError("--path and --push are two ways to push", "drop one of the two")
    model = resolve_model(flags["model"] or DEFAULT_MODEL)
    refuse_sides(flags, ("train", "effect"), "is for a trainer, and only an engine is probed")
    spec = engine_spec(flags, model, engine, flags["engine_arg"])
    if spec.weights not in PROBED_FORMS:
        fault = f"--weights engine={spec.weights}: its updates cannot be probed"
        raise MismatchError(fault, f"one of {', '.join(PROBED_FORMS)}")
    return SyncSpec(
        engine=replace(spec, routing=False),
        path=path,
        **flags.pick("push seed keep_caches trainer"),
    )


def plan(spec: SyncSpec) -> int:
    """Print what a probe would do and take; of a model that is not here, by its config.json."""
    import psutil

    from mismatch.doctor.memory import BYTES
    from mismatch.models.config import find_config, serves_mxfp4
    from mismatch.models.sizes import sized
    from mismatch.models.weight_states import Checkpoint
    from mismatch.reports.formatting import memory

    engine, directory = spec.engine, model_directory(spec.engine)
    shape = sized(find_config(engine.model, engine.revision))
    packed = serves_mxfp4(engine)
    size = shape.stored_bytes(BYTES[engine.dtype], keeps_packed=packed)
    trainer = shape.stored_bytes(BYTES[engine.dtype], keeps_packed=False) * spec.trainer
    here = directory is not None and any(directory.glob("*.safetensors"))
    names = len(Checkpoint(directory, spec.seed).names()) if here else 0  # type: ignore[arg-type]
    typer.echo(f"model    {engine.model}: {f'{names} tensors' if here else 'weights not here'}")
    typer.echo(f"push     3 times by {spec.push or spec.path} of {engine.engine}")
    pushed = shape.parameters - shape.packed_parameters * packed
    rest = f"; {shape.packed_parameters:,} in MXFP4 stay: --weights engine=bf16" if packed else ""
    typer.echo(f"numbers  {pushed:,} parameters{rest}")
    if spec.path in ON_DISK and spec.push is None:
        typer.echo(f"disk     {memory(size)}, one state at a time")
    beside = {"trainer": trainer, "largest tensor": shape.largest_tensor * UPDATE_BYTES}
    parts = " and ".join(f"{name} {memory(part)}" for name, part in beside.items() if part)
    needed, free = memory(sum(beside.values())), memory(psutil.virtual_memory().available)
    typer.echo(f"memory   the engine's, and {needed} ({parts}); {free} are free")
    return 0
