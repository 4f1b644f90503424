"""`mismatch sync-probe`: do the weights arrive that a trainer pushes into the engine?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, flags_of
from mismatch.cli.options import JSON, MODEL_FLAGS
from mismatch.errors import MismatchError
from mismatch.specs import ENGINE, OUTPUT, SEEDS, EngineSpec

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.experiments.sync.types import SyncReport, SyncSpec

PROBE = "What to probe"
DEFAULT_MODEL = "tiny-gpt-oss"
PROBE_FLAGS = (
    Option("engine", str, PROBE, "vllm or transformers.", default="vllm"),
    Option(
        "path",
        str | None,
        PROBE,
        "How weights are pushed: vllm reload, load or rpc; transformers load. Default: the first.",
    ),
    Option(
        "push",
        str | None,
        PROBE,
        "Your own push, package.module:function; it gets a state dict and the engine.",
    ),
    Option("seed", int, PROBE, "Of the updates and of the tokens.", default=0, range=SEEDS),
    Option(
        "keep_caches",
        bool,
        PROBE,
        "Leave the prefix cache to the path; without this it is reset after a push by --path.",
        default=False,
        switch=True,
    ),
    Option("trainer", bool, PROBE, "Score with transformers too.", default=True),
)
ENGINE_OPTIONS = (
    Option("vllm_python", str | None, ENGINE, "Interpreter of the environment that holds vLLM."),
    *flags_of(EngineSpec, "dtype gpu_memory_utilization max_model_len args"),
)
PROBE_OUTPUT = (
    Option("out", Path | None, OUTPUT, "Directory of the probe; default: runs/TIME-MODEL."),
    Option("details", bool, OUTPUT, "Also scores and caches.", default=False, switch=True),
    JSON,
)
FIRST_PATHS = {"vllm": "reload", "transformers": "load"}


@with_flags(MODEL_FLAGS, PROBE_FLAGS, ENGINE_OPTIONS, PROBE_OUTPUT)
def sync_probe(flags: Flags) -> int:
    """Push known updates into an engine and say which parameters arrived.

    Every parameter is updated by seed and pushed by the engine's own path, twice, then the first
    weights again; after each push it is read back as the kernels hold it.

    Exit code 0: every parameter arrived. 1: one did not, or could not be compared. 2: no verdict.
    """
    from rich.console import Console

    from mismatch.cli.session import ConsoleNarrator
    from mismatch.experiments.sync.document import sync_to_json
    from mismatch.experiments.sync.judge import judge
    from mismatch.processes.sync_probe import run_probe
    from mismatch.run.directory import new_directory

    spec = probe_spec(flags)
    narrator = ConsoleNarrator(Console(stderr=flags["as_json"]))
    if flags["model"] is None:
        narrator.note(f"no --model was given: the embedded {DEFAULT_MODEL} is taken")
    place = new_directory(flags["out"], spec.engine.model)
    with narrator.stage("probe of the weight sync") as progress:
        report = run_probe(place, spec, progress)
    save(report, place)
    if flags["as_json"]:
        typer.echo(json.dumps(sync_to_json(report), indent=2, allow_nan=False))
    else:
        show(report, Console(), place, details=flags["details"])
    return judge(report).code


def probe_spec(flags: Flags) -> SyncSpec:
    """What the flags ask for.

    Raises:
        MismatchError: an unknown model or engine, or --path beside --push.
    """
    from dataclasses import replace

    from mismatch.cli.to_spec import engine_spec
    from mismatch.experiments.sync.types import SyncSpec
    from mismatch.models import resolve_model

    engine = flags["engine"]
    if engine not in FIRST_PATHS:
        raise MismatchError(
            f"--engine {engine}: its weight sync cannot be probed",
            f"one of {', '.join(FIRST_PATHS)}",
        )
    if flags["path"] and flags["push"]:
        raise MismatchError("--path and --push are two ways to push", "drop one of the two")
    model = resolve_model(flags["model"] or DEFAULT_MODEL)
    spec = engine_spec(flags, model, engine, flags["engine_arg"])
    return SyncSpec(
        engine=replace(spec, routing=False),
        path=flags["path"] or FIRST_PATHS[engine],
        push=flags["push"],
        seed=flags["seed"],
        keep_caches=flags["keep_caches"],
        trainer=flags["trainer"],
    )


def show(report: SyncReport, console: Console, place: Path, *, details: bool) -> None:
    """Print the probe; the last line is the verdict."""
    from mismatch.experiments.sync.judge import judge
    from mismatch.reports.sections.sync_probe import section
    from mismatch.reports.terminal import print_section, say

    verdict = judge(report)
    print_section(section(report), console, details)
    say(console, f"\nEverything is in {place} (open sync-probe.html)")
    say(console, verdict.line, "bold red" if verdict.code else "green")


def save(report: SyncReport, place: Path) -> None:
    """Write sync-probe.json and sync-probe.html."""
    from mismatch.experiments.sync.document import FILE, SCHEMA, sync_to_json
    from mismatch.reports.html import show_page
    from mismatch.reports.sections.sync_probe import page
    from mismatch.run import store

    store.save_document(place, FILE, sync_to_json(report), schema=SCHEMA)
    store.write_text(place / "sync-probe.html", show_page(page(report)))
