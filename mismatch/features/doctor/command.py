"""`mismatch doctor`: what is installed here, what it could measure, and whether a model fits."""

from __future__ import annotations

import json
from dataclasses import replace

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, flags_of
from mismatch.cli.options import JSON
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, Sampling, TrainSpec

AS_OF_CHECK = (
    *flags_of(CheckSpec, "nproc_per_node"),
    *flags_of(EngineSpec, "tensor_parallel_size"),
    replace(
        flags_of(PromptSpec, "num_prompts")[0],
        kind=int,
        help="Prompts of the check.",
        default=PromptSpec().num_prompts,
    ),
    *flags_of(Sampling, "samples_per_prompt max_tokens"),
    *flags_of(TrainSpec, "micro_batch_tokens"),
)


@with_flags(
    Option("model", str | None, "", "Also: does it fit on both sides, offline."),
    Option("engine", str, "", "The engine that the check would use.", default="vllm"),
    tuple(replace(option, panel="") for option in AS_OF_CHECK),
    replace(JSON, panel=""),
)
def doctor(flags: Flags) -> int:
    """What this machine can measure, and whether a model fits.

    Engines, kernels and GPUs, and what is missing. Exit code 0: `mismatch check` could run here
    (for the model, if given). 2: it could not; the fix is printed.

    Examples:
    mismatch doctor
    mismatch doctor --model gpt-oss-20b
    """
    from rich.console import Console

    from mismatch.features.doctor.examine import examine, print_diagnosis

    examination = examine(_spec(flags), with_model=flags["model"] is not None)
    if flags["as_json"]:
        typer.echo(json.dumps(examination.to_dict(), indent=2))
    else:
        print_diagnosis(examination, Console())
    return 0 if examination.ready else 2


def _spec(flags: Flags) -> CheckSpec:
    """A check with the defaults of the command line."""
    from mismatch.models import resolve_model
    from mismatch.run.machine import local_gpus

    model = "" if flags["model"] is None else resolve_model(flags["model"])
    engine = EngineSpec(engine=flags["engine"], model=model, **flags.pick("tensor_parallel_size"))
    return CheckSpec(
        rollout=RolloutSpec(
            engine=engine,
            prompts=PromptSpec(**flags.pick("num_prompts")),
            sampling=Sampling(**flags.pick("samples_per_prompt max_tokens")),
        ),
        train=TrainSpec(model=model, **flags.pick("micro_batch_tokens")),
        nproc_per_node=flags["nproc_per_node"] or local_gpus() or 2,
    )
