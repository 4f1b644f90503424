"""`mismatch check`: generate, score again, compare, judge."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec


class DtypeName(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Layout(StrEnum):
    padding = "padding"
    packing = "packing"


class FailOn(StrEnum):
    critical = "critical"
    warn = "warn"


MODEL, PROMPTS, ENGINE, TRAIN, OUTPUT = (
    "Model",
    "Prompts and sampling",
    "Engine (rollout side)",
    "Trainer (FSDP2 side)",
    "Verdict and output",
)


def check(
    model: Annotated[
        str,
        typer.Option(help="Embedded model, hub id or directory.", rich_help_panel=MODEL),
    ],
    revision: Annotated[
        str | None, typer.Option(help="Revision of a hub model.", rich_help_panel=MODEL)
    ] = None,
    train_model: Annotated[
        str | None,
        typer.Option(help="Another checkpoint for the trainer.", rich_help_panel=MODEL),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run code that comes with the model.", rich_help_panel=MODEL)
    ] = False,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSONL file: prompt, messages or prompt_token_ids per line. "
            "Default: built-in arithmetic.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Default: 64, or the whole file.", rich_help_panel=PROMPTS),
    ] = None,
    samples_per_prompt: Annotated[
        int, typer.Option(help="Samples of each prompt.", rich_help_panel=PROMPTS)
    ] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="Longest response.", rich_help_panel=PROMPTS)
    ] = 128,
    temperature: Annotated[float, typer.Option(rich_help_panel=PROMPTS)] = 1.0,
    top_p: Annotated[float, typer.Option(help="1: off.", rich_help_panel=PROMPTS)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.", rich_help_panel=PROMPTS)] = 0,
    seed: Annotated[
        int,
        typer.Option(help="Of prompts, sampling and intervals.", rich_help_panel=PROMPTS),
    ] = 0,
    engine: Annotated[
        str, typer.Option(help="vllm or transformers.", rich_help_panel=ENGINE)
    ] = "vllm",
    dtype: Annotated[
        DtypeName, typer.Option(help="Of the engine.", rich_help_panel=ENGINE)
    ] = DtypeName.bf16,
    tensor_parallel_size: Annotated[int, typer.Option(rich_help_panel=ENGINE)] = 1,
    max_model_len: Annotated[int | None, typer.Option(rich_help_panel=ENGINE)] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(rich_help_panel=ENGINE)] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            help="Any other engine argument, key=value (JSON values); repeatable.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    prefill: Annotated[
        bool,
        typer.Option(help="Rescore by the engine's prefill.", rich_help_panel=ENGINE),
    ] = True,
    routing: Annotated[
        bool, typer.Option(help="Capture routed experts.", rich_help_panel=ENGINE)
    ] = True,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks; default: GPUs, or 2 on a CPU.", rich_help_panel=TRAIN),
    ] = None,
    train_dtype: Annotated[
        DtypeName, typer.Option(help="Of the computation.", rich_help_panel=TRAIN)
    ] = DtypeName.bf16,
    master_dtype: Annotated[
        DtypeName, typer.Option(help="Of the sharded parameters.", rich_help_panel=TRAIN)
    ] = DtypeName.fp32,
    autocast: Annotated[
        DtypeName | None,
        typer.Option(help="Run under torch.autocast, as verl does.", rich_help_panel=TRAIN),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="auto, eager, sdpa, sink-sdpa …; no-sinks is a planted fault.",
            rich_help_panel=TRAIN,
        ),
    ] = "auto",
    experts_implementation: Annotated[
        str,
        typer.Option(help="auto, eager, grouped_mm, batched_mm.", rich_help_panel=TRAIN),
    ] = "auto",
    head_dtype: Annotated[
        DtypeName | None, typer.Option(help="Of the LM head.", rich_help_panel=TRAIN)
    ] = None,
    micro_batch_tokens: Annotated[int, typer.Option(rich_help_panel=TRAIN)] = 4096,
    layout: Annotated[
        Layout, typer.Option(help="One sequence per row, or several.", rich_help_panel=TRAIN)
    ] = Layout.padding,
    noise_floor: Annotated[
        bool,
        typer.Option(help="Also measure what noise alone does.", rich_help_panel=TRAIN),
    ] = True,
    thresholds: Annotated[
        Path | None,
        typer.Option(help="TOML file that overrides levels.", rich_help_panel=OUTPUT),
    ] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="Verdict from which the exit code is 1.", rich_help_panel=OUTPUT)
    ] = FailOn.critical,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory; default: runs/TIME-MODEL.", rich_help_panel=OUTPUT),
    ] = None,
) -> int:
    """Pre-flight check: sample, score the same tokens under FSDP2, compare, judge.

    Exit code 0: healthy or warn. 1: critical, or a failed semantic check. 2: nothing measured.
    """
    from rich.console import Console

    from mismatch.cli.narrator import ConsoleNarrator
    from mismatch.levels import exit_code, load_thresholds
    from mismatch.pipeline import preflight, run_check
    from mismatch.reports.terminal import print_report

    spec = _spec(dict(locals()))
    levels = load_thresholds(thresholds) if thresholds else None
    preflight(spec)
    run_dir = _run_directory(out, model)
    console = Console()
    narrator = ConsoleNarrator(console)
    command = shlex.join(["mismatch", *sys.argv[1:]])
    report = run_check(spec, run_dir, narrator, levels, command)
    print_report(report, console, run_dir)
    code: int = exit_code(report.verdict, fail_on.value)
    return code


def _spec(flags: dict[str, Any]) -> CheckSpec:
    """The spec that a set of flags means."""
    from mismatch.models import resolve_model
    from mismatch.pipeline import local_gpus
    from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, TrainSpec
    from mismatch.types import Sampling

    model = resolve_model(flags["model"])
    train_model = resolve_model(flags["train_model"]) if flags["train_model"] else model
    shared = _pick(flags, "revision trust_remote_code routing")
    engine = EngineSpec(
        engine=flags["engine"],
        model=model,
        dtype=flags["dtype"].value,
        args=tuple(_engine_arg(text) for text in flags["engine_arg"] or ()),
        **_pick(flags, "tensor_parallel_size max_model_len gpu_memory_utilization prefill"),
        **shared,
    )
    default_prompts = 64 if flags["prompts"] is None else 10**9  # a file: all of it
    prompts = PromptSpec(
        path=flags["prompts"],
        num_prompts=default_prompts if flags["num_prompts"] is None else flags["num_prompts"],
        seed=flags["seed"],
    )
    law = _pick(flags, "temperature top_p top_k max_tokens samples_per_prompt seed")
    train = TrainSpec(
        model=train_model,
        dtype=flags["train_dtype"].value,
        master_dtype=flags["master_dtype"].value,
        autocast=flags["autocast"] and flags["autocast"].value,
        head_dtype=flags["head_dtype"] and flags["head_dtype"].value,
        experts=flags["experts_implementation"],
        layout=flags["layout"].value,
        **_pick(flags, "attention micro_batch_tokens"),
        **shared,
    )
    return CheckSpec(
        rollout=RolloutSpec(engine=engine, prompts=prompts, sampling=Sampling(**law)),
        train=train,
        nproc_per_node=flags["nproc_per_node"] or local_gpus() or 2,
        noise_floor=flags["noise_floor"],
        seed=flags["seed"],
    )


def _pick(flags: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: flags[name] for name in names.split()}


def _engine_arg(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON, else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise MismatchError(f"--engine-arg {text!r} is not key=value", "--engine-arg seed=1")
    try:
        return key.strip().replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return key.strip().replace("-", "_"), value


def _run_directory(out: Path | None, model: str) -> Path:
    """A new, empty directory."""
    if out is None:
        name = Path(model).name or "model"
        stem = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
        out, number = stem, 1
        while out.exists():
            number += 1
            out = stem.with_name(f"{stem.name}-{number}")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MismatchError(f"{out} exists and is not empty", "choose another --out, or delete it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MismatchError(
            f"cannot create {out}: {error.strerror}", "choose a writable directory: --out DIR"
        ) from error
    return out
