"""The training world that takes gradients: ``torchrun -m mismatch.features.gradients.worker JOB``.

JOB: ``{"run_dir": …, "plan": GradientPlan as JSON, "taken": path of the result, "seconds": after
which no further fix is begun}``. The numerics are the trainer's: its dtypes, kernels, activation
checkpointing and reductions. Gradients of the whole batch add up in the parameters, as FSDP2 has
them; those of the reference are kept in host memory, sharded, and no other copy is held.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, first_line, named_line
from mismatch.features.gradients.plan import (
    BASELINE,
    REFERENCE,
    Batch,
    GradientPlan,
    Planned,
    choose_batch,
)
from mismatch.features.gradients.results import ID, Sums, Taken
from mismatch.processes.workers.engine import reported
from mismatch.processes.workers.train import free_memory, replay_source
from mismatch.run import store
from mismatch.run.messages import PROGRESS, exit_worker, report_ready, say
from mismatch.specs import Pass
from mismatch.training.backward import Backward, local_gradient
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel, load, switched
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.source import quieten
from mismatch.training.validate import prepare_pass
from mismatch.types import Rollout

# Groups of parameters, by their names in transformers.
GROUPS = ("attention", "sinks", "router", "experts", "mlp", "embeddings", "norms", "head", "other")

# A name is cut at its dots; the first rule that holds one of the parts wins.
_BEFORE_ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sinks", ("sinks", "sink", "attention_sink_bias")),
    ("head", ("lm_head", "embed_out")),
    (
        "embeddings",
        (
            *("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"),
            *("embed_tokens_per_layer", "embeddings"),
        ),
    ),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),  # Nemotron-H calls the layer "mixer"
)
_BEHIND_ATTENTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("router", ("router", "gate", "shared_expert_gate", "e_score_correction_bias")),
    ("experts", ("experts", "shared_expert", "shared_experts", "shared_mlp")),
    ("mlp", ("mlp", "feed_forward", "ffn", "block_sparse_moe")),
)


def group_of(name: str) -> str:
    """Return the group of a parameter, one of :data:`GROUPS`.

    A head that is tied to the embeddings is one parameter with them, and counts there.

    >>> group_of("model.layers.0.self_attn.sinks"), group_of("model.layers.0.mlp.router.weight")
    ('sinks', 'router')
    >>> group_of("model.layers.0.mlp.gate_proj.weight"), group_of("model.norm.weight")
    ('mlp', 'norms')
    """
    parts = name.split(".")
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norms"
    for group, words in _BEFORE_ATTENTION:
        if not set(parts).isdisjoint(words):
            return group
    if any(word in part for part in parts for word in ("attn", "attention")):
        return "attention"  # before the routers: some attention has a gate
    for group, words in _BEHIND_ATTENTION:
        if not set(parts).isdisjoint(words):
            return group
    return "other"


CHUNK = 1 << 20  # elements per step: bounds the float64 temporaries
Shards = dict[str, "torch.Tensor"]  # parameter -> this rank's part of its gradient, float32


def main(arguments: list[str]) -> int:
    """Run one job; 0, or 1 with the error left for the parent."""
    job = store.read_json(Path(arguments[0]))
    rank = os.environ.get("RANK", "0")
    return reported(Path(job["run_dir"]), ID, lambda: run(job), rank, "run of gradients")


def run(job: dict[str, Any]) -> None:
    """Take every gradient of a job; every rank calls it.

    Raises:
        MismatchError: the reference has no gradient, or the ranks parted.
    """
    quieten()
    run_dir, plan = Path(job["run_dir"]), from_json(GradientPlan, job["plan"])
    rollout = store.load_rollout(run_dir)
    batch = choose_batch(rollout, plan.prompts, plan.seed)
    world = World.start()
    taken = take(world, run_dir, rollout, plan, batch, job["seconds"])
    if world.rank == 0:
        store.write_json(Path(job["taken"]), to_json(taken))
    world.close()


def take(
    world: World,
    run_dir: Path,
    rollout: Rollout,
    plan: GradientPlan,
    batch: Batch,
    seconds: float | None = None,
) -> Taken:
    """Take the gradients of all passes; one that fails leaves its reason and the others go on.

    Args:
        seconds: after which no further fix is begun; None: no limit.

    Raises:
        MismatchError: the reference has no gradient, or the ranks parted.
    """
    loaded: LoadedModel | None = None
    reference: Shards = {}
    sums: dict[str, Sums] = {}
    failed: dict[str, str] = {}
    start = time.monotonic()
    for planned in plan.passes:
        if planned.id not in (REFERENCE, BASELINE) and seconds is not None:
            late = torch.tensor(int(world.rank == 0 and time.monotonic() - start > seconds))
            if world.sum(late):  # all ranks follow rank 0's clock
                failed[planned.id] = "the budget is used up: raise --budget-minutes"
                continue
        if world.rank == 0:
            say(f"{PROGRESS}{planned.id}")
        lost: Exception | None = None
        try:
            loaded = None if loaded is None else switched(loaded, planned.spec)
            if loaded is None:
                free_memory()  # the old weights must be gone before the new weights come
                loaded = load(planned.spec, world.mesh, world.device)
            report_ready()
            source = replay_source(run_dir, rollout, planned.spec)
            given = world, loaded, rollout, planned, batch, source, reference
            sums[planned.id] = accumulated(*given)
        except Exception as error:
            traceback.print_exc()
            lost, loaded = error, None  # what failed half way is loaded again
        try:
            world.meet(f"gradient:{planned.id}")
        except RuntimeError as error:
            fault = f"the ranks parted in the gradient of {planned.id}"
            raise MismatchError(fault, f"see logs/{ID}.log") from lost or error
        if lost is not None:
            failed[planned.id] = reason = in_words(lost)
            if planned.id == REFERENCE:
                fault = f"the float32 reference has no gradient: {reason}"
                raise MismatchError(fault, f"see logs/{ID}.log")
    return Taken(sums, failed)


def in_words(error: Exception) -> str:
    """Return why a pass has no gradient."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"out of GPU memory: {first_line(error)}; lower --micro-batch-tokens, or use more "
            "GPUs: --nproc-per-node"
        )
    return str(error) if isinstance(error, MismatchError) else named_line(error)


def accumulated(
    world: World,
    loaded: LoadedModel,
    rollout: Rollout,
    planned: Planned,
    batch: Batch,
    source: ReplaySource | None,
    reference: Shards,
) -> Sums:
    """Return |g|² and g · reference by group of parameters, summed in float64 over all ranks.

    Args:
        reference: this rank's shards of the reference's gradient; where the pass is the reference
            they are filled in.

    Raises:
        MismatchError: what cannot be scored, or a gradient that is not finite.
        torch.OutOfMemoryError: it does not fit on this rank's GPU.
    """
    options, _ = prepare_pass(world, loaded, rollout, planned.spec, source)
    sequence = rollout.sequence_of_token[rollout.actions]
    rows = [int(row) for row in np.unique(sequence[batch.coefficients != 0.0])]
    backward = Backward(
        world,
        loaded,
        rollout,
        Pass(planned.id, planned.spec),
        options,
        lambda actions, _: batch.coefficients[actions],
        source,
    )
    named = [(n, p) for n, p in loaded.scorer.named_parameters() if p.requires_grad]
    present = sorted({group_of(name) for name, _ in named}, key=GROUPS.index)
    sums = torch.zeros(2, len(present), dtype=torch.float64)
    try:
        with torch.enable_grad(), backward.installed():
            if backward.until_finite(rows) is None:
                fault = f"the gradient of {planned.id} is not finite"
                raise MismatchError(fault, "look for overflow: another --train-dtype")
        for name, parameter in named:
            gradient = local_gradient(parameter)
            if gradient is None:
                continue
            own = gradient.reshape(-1)
            if planned.id == REFERENCE:
                reference[name] = (own.float() * backward.factor).cpu()
            group, theirs = present.index(group_of(name)), reference.get(name)
            parts = torch.split(own, CHUNK)
            others = parts if theirs is None else torch.split(theirs, CHUNK)
            for part, other in zip(parts, others, strict=True):
                values = (part.float() * backward.factor).double()
                sums[0, group] += float(values @ values)
                if theirs is not None:
                    sums[1, group] += float(values @ other.to(values.device, torch.float64))
    finally:
        backward.clear()
    squared, dot = world.sum(sums).tolist()
    return {name: (squared[g], dot[g]) for g, name in enumerate(present)}


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
