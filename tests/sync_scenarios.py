"""Faults planted in the pushes of one engine: ``python -m tests.sync_scenarios DIR ENGINE``.

One engine serves all of them; every probe ends with the first weights, brought back the right way.
Writes ``DIR/NAME.json``, as ``mismatch sync-probe`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.engines.sync_drivers import driver_class
from mismatch.features.sync.in_framework import probe as library_call
from mismatch.features.sync.judge import sync_to_json
from mismatch.features.sync.report import SyncSpec
from mismatch.features.sync.worker import Probe, loaded
from mismatch.models import EMBEDDED
from mismatch.models.weight_states import PUSHES, Checkpoint, state_of, updated
from mismatch.run.messages import exit_worker
from mismatch.run.store import write_json
from mismatch.specs import EngineSpec

Weights = dict[str, Any]
SKIPPED = "model.layers.1.self_attn.o_proj.weight"
EXPERTS = "model.layers.2.mlp.experts.gate_up_proj"
SQUARE = "model.layers.0.mlp.experts.down_proj"


def skip(weights: Weights, push: int) -> Weights:
    """One parameter keeps the checkpoint's values."""
    return {**weights, SKIPPED: BASE[SKIPPED]}


def exchange(weights: Weights, push: int) -> Weights:
    """Two experts of one layer change places."""
    return {**weights, EXPERTS: weights[EXPERTS][[0, 2, 1, *range(3, 8)]]}


def transpose(weights: Weights, push: int) -> Weights:
    return {**weights, SQUARE: weights[SQUARE].transpose(1, 2).contiguous()}


def double(weights: Weights, push: int) -> Weights:
    """The first update is added twice."""
    if push != 1:
        return weights
    base, now = BASE[SKIPPED].float(), weights[SKIPPED].float()
    return {**weights, SKIPPED: (2 * now - base).bfloat16()}


FAULTS: dict[str, Callable[[Weights, int], Weights]] = {
    "skip": skip,
    "exchange": exchange,
    "transpose": transpose,
    "double": double,
}
BASE: Weights = {}
PATHS = {"vllm": ("rpc", "reload"), "sglang": ("tensor", "disk")}  # the faults go the first way


def main() -> int:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    engine = EngineSpec(
        engine=kind, model=str(EMBEDDED["tiny-gpt-oss"]), dtype="bf16", routing=False
    )
    path, other = PATHS[kind]
    spec = SyncSpec(engine, path=path)
    with loaded(engine, spec) as (running, sequences, checkpoint):
        driver = driver_class(kind)(running, checkpoint, folder / "states")
        expected = [checkpoint.prints(push) for push in range(PUSHES)]
        BASE.update(checkpoint.tensors(0))

        def probe(name: str, spec: SyncSpec, function: Callable[..., Any] | None) -> None:
            looked = Probe(driver, running, sequences, spec, checkpoint)
            report = looked.run(function, expected)
            write_json(folder / f"{name}.json", sync_to_json(report))
            driver.push(path, 0)
            driver.drop_caches()

        probe("clean", spec, None)
        probe("kept-cache", replace(spec, keep_caches=True), None)
        for name, fault in FAULTS.items():
            with planted(fault):
                probe(name, spec, None)
        probe(other, replace(spec, path=other), None)
        parameters = {name: tensor.clone() for name, tensor in BASE.items()}
        own = running.llm if kind == "vllm" else running.engine
        with planted(lambda weights, push: parameters):
            report = library_call(own, parameters, lambda: driver.push(path, 1))
        write_json(folder / "library.json", sync_to_json(report))
    return 0


@contextmanager
def planted(fault: Callable[[Weights, int], Weights]) -> Iterator[None]:
    """The worker pushes tensors with the fault."""
    patched: Any = Checkpoint
    right = patched.tensors

    def tensors(checkpoint: Checkpoint, push: int) -> Iterator[tuple[str, Any]]:
        weights = {n: updated(n, t, checkpoint.seed, state_of(push)) for n, t in BASE.items()}
        yield from (fault(weights, push) if push else weights).items()

    patched.tensors = tensors
    try:
        yield
    finally:
        patched.tensors = right


if __name__ == "__main__":
    exit_worker(main())
