"""`mismatch doctor`: what is installed here, what it could measure, and whether a model fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Also: does it fit on both sides, offline.")
    ] = None,
    engine: Annotated[str, typer.Option(help="The engine that the check would use.")] = "vllm",
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks; default: GPUs, or 2 on a CPU.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Of the engine.")] = 1,
    num_prompts: Annotated[int, typer.Option(help="As of `check`.")] = 64,
    samples_per_prompt: Annotated[int, typer.Option(help="As of `check`.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="As of `check`.")] = 128,
    micro_batch_tokens: Annotated[int, typer.Option(help="As of `check`.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Engines, kernels and GPUs of this machine, what they can measure, what is missing.

    Exit code 0: `mismatch check` could run here (for the model, if given). 2: it could not; the
    fix is printed.
    """
    from rich.console import Console

    from mismatch.doctor.examine import examine
    from mismatch.doctor.show import print_diagnosis

    sizes = (num_prompts, samples_per_prompt, max_tokens)
    spec = _spec(model, engine, nproc_per_node, tensor_parallel_size, sizes, micro_batch_tokens)
    found = examine(spec, with_model=model is not None)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_diagnosis(found, Console())
    return 0 if found.ready else 2


def _spec(
    model: str | None,
    engine: str,
    ranks: int | None,
    split: int,
    sizes: tuple[int, int, int],
    micro_batch_tokens: int,
) -> CheckSpec:
    """A check with the defaults of the command line."""
    from mismatch.models import resolve_model
    from mismatch.run.machine import local_gpus
    from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, TrainSpec
    from mismatch.types import Sampling

    name = resolve_model(model) if model is not None else ""
    prompts, samples, tokens = sizes
    return CheckSpec(
        rollout=RolloutSpec(
            engine=EngineSpec(engine=engine, model=name, tensor_parallel_size=split),
            prompts=PromptSpec(num_prompts=prompts),
            sampling=Sampling(samples_per_prompt=samples, max_tokens=tokens),
        ),
        train=TrainSpec(model=name, micro_batch_tokens=micro_batch_tokens),
        nproc_per_node=ranks or local_gpus() or 2,
    )
