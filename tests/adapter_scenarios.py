"""Faults of a LoRA adapter's way into one vLLM: ``python -m tests.adapter_scenarios DIR``.

One engine with a tiny dense model serves all of them. Writes ``DIR/NAME.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.engines.vllm.sync_driver import VllmDriver
from mismatch.features.sync.judge import score_rows, sync_to_json
from mismatch.features.sync.report import ADAPTER_PATH, SyncSpec
from mismatch.features.sync.worker import Probe, loaded
from mismatch.models.weight_states import ALPHA, PUSHES, Adapters, write_adapter
from mismatch.run.messages import exit_worker
from mismatch.run.store import write_json
from mismatch.specs import EngineSpec
from tests.checkpoints import make

LEFT_OUT = "model.layers.1.self_attn.o_proj."
Write = Callable[[Adapters, int, Path], Path]


def halved(adapters: Adapters, push: int, target: Path) -> Path:
    """The adapter's configuration says half of alpha."""
    return write_adapter(dict(adapters.tensors(push)), target, lora_alpha=ALPHA // 2)


def left_out(adapters: Adapters, push: int, target: Path) -> Path:
    """One layer's matrices are not in the file."""
    weights = {n: t for n, t in adapters.tensors(push) if not n.startswith(LEFT_OUT)}
    return write_adapter(weights, target)


class Forgetful(VllmDriver):
    """Never loads an adapter, as verl#7495 reports it."""

    def push(self, path: str, push: int) -> None:
        pass


class SameNumber(VllmDriver):
    """Loads every adapter under one number and does not ask vLLM to load it again."""

    reloads = False


def main() -> int:
    folder = Path(sys.argv[1])
    model = make("llama", folder / "llama", head_dim=32)
    engine = EngineSpec(engine="vllm", model=str(model), dtype="bf16", routing=False)
    spec = SyncSpec(engine, path=ADAPTER_PATH)
    with loaded(VllmDriver.prepared(spec.engine, spec.path), spec) as (
        running,
        sequences,
        checkpoint,
    ):
        expected = [checkpoint.prints(push) for push in range(PUSHES)]

        def probe(name: str, driver: type[VllmDriver] = VllmDriver, **changes: Any) -> None:
            sync_driver = driver(running, checkpoint, folder / "states")
            own = replace(spec, **changes)
            looked = Probe(sync_driver, running, sequences, own, checkpoint)
            report = looked.run(None, expected)
            report = replace(report, scores=score_rows(looked.scores, None))
            write_json(folder / f"{name}.json", sync_to_json(report))
            VllmDriver(running, checkpoint, folder / "states").push(ADAPTER_PATH, 0)
            sync_driver.drop_caches()

        probe("clean")
        probe("kept-cache", keep_caches=True)
        probe("not-loaded", Forgetful)
        probe("same-number", SameNumber)
        patched: Any = Adapters
        right = patched.write
        for name, write in (("halved", halved), ("left-out", left_out)):
            patched.write = write
            probe(name)
        patched.write = right
    return 0


if __name__ == "__main__":
    exit_worker(main())
