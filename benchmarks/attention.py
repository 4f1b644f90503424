"""One attention layer with sinks, forward and backward: sink-sdpa against eager, memory and time.

    python benchmarks/attention.py [--tokens 4096 16384] [--dtypes bf16 fp32] [--json FILE]

An eighth of gpt-oss-20b's layer, so that a CPU can do it: 8 of its 64 query heads of 64, 1 of its 8
key heads, as in its tensor-parallel shard of 8; a full layer and one with its window of 128. Only
the attention itself runs, from q, k, v and sinks to their gradients; its memory and time grow with
the number of heads. Every measurement is a separate process.

Memory is the most that is taken above the inputs and their gradients, by the kernel's high-water
mark of resident memory (benchmarks/memory.py says how). Time is the processor's, on one thread.
Eager holds [heads, T, T] several times; where that would be more than what is free, by what it took
at the length before, it does not run and the table says so.

Goals: at 4,096 tokens ``sink-sdpa`` takes at most a third of eager's memory, in both kinds of
layers; its memory from the first to the last length grows no faster than the length (within 15 %).
Exit code 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.memory import status  # noqa: E402

MIB = 1 << 20
HEADS, KV_HEADS, SIZE, WINDOW = 8, 1, 64, 128
KERNELS = ("eager", "sink-sdpa")
LAYERS = ("full", "window")
DTYPES = ("bf16", "fp32")
FREE_SHARE = 0.7  # of the free memory that a measurement may take
MEMORY_GOAL, GROWTH_GOAL = 1 / 3, 1.15


@dataclass(frozen=True)
class Row:
    """One measurement; None where it did not run, and ``note`` says why."""

    dtype: str
    layer: str
    tokens: int
    kernel: str
    mib: float | None
    seconds: float | None
    note: str = ""


# ---------------------------------------------------------------- inside a child


def child(job: dict[str, Any]) -> dict[str, float]:
    """Run one kernel forward and backward once, after a short run that touches its code."""
    import torch

    from mismatch.training.scorer import torch_dtype

    torch.set_num_threads(1)
    dtype = torch_dtype(job["dtype"])
    run(job, inputs(256, dtype), 256)
    leaves = inputs(job["tokens"], dtype)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)  # its place is not the kernel's memory
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before, started = status("VmRSS"), time.process_time()
    run(job, leaves, job["tokens"])
    took = time.process_time() - started
    return {"mib": (status("VmHWM") - before) / MIB, "seconds": took}


def inputs(tokens: int, dtype: Any) -> list[Any]:
    """q, k, v and sinks as leaves."""
    import torch

    draw = torch.Generator().manual_seed(0)
    shapes = [
        (1, HEADS, tokens, SIZE),
        (1, KV_HEADS, tokens, SIZE),
        (1, KV_HEADS, tokens, SIZE),
        (HEADS,),
    ]
    return [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]


def run(job: dict[str, Any], leaves: list[Any], tokens: int) -> None:
    """Compute the layer's attention and its gradients, with the mask that transformers makes."""
    import torch
    from transformers.masking_utils import (
        causal_mask_function,
        eager_mask,
        sliding_window_causal_mask_function,
    )
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    from mismatch.training.attention.sink_sdpa import BlockedMask, sink_attention

    query, key, value, sinks = leaves
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.sinks = HEADS // KV_HEADS, sinks
    looks = causal_mask_function
    if job["layer"] == "window":
        looks = sliding_window_causal_mask_function(WINDOW)
    eager = job["kernel"] == "eager"
    build, attend = (
        (eager_mask, eager_attention_forward) if eager else (BlockedMask, sink_attention)
    )
    mask: Any = build(
        batch_size=1, q_length=tokens, kv_length=tokens, mask_function=looks, dtype=query.dtype
    )
    out = attend(module, query, key, value, mask, SIZE**-0.5, s_aux=sinks)[0]
    out.sum().backward()


# ---------------------------------------------------------------- the parent


def measure(dtype: str, layer: str, tokens: int, kernel: str, before: Row | None = None) -> Row:
    """In a separate process; glibc maps every tensor apart, so that the mark follows them.

    Args:
        before: the same kernel at a shorter length, where its memory grows with the square.
    """
    if before is not None and before.mib is not None:
        needed, free = before.mib * (tokens / before.tokens) ** 2, available_mib()
        if needed > FREE_SHARE * free:
            note = f"not run: about {needed:,.0f} MiB needed, {free:,} MiB free"
            return Row(dtype, layer, tokens, kernel, None, None, note)
    job = {"dtype": dtype, "layer": layer, "tokens": tokens, "kernel": kernel}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(job)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Row(dtype, layer, tokens, kernel, None, None, f"failed: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Row(dtype, layer, tokens, kernel, found["mib"], found["seconds"])


def available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def judge(rows: list[Row], tokens: list[int]) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is met; what was not measured meets none."""
    by_key = {(r.dtype, r.layer, r.tokens, r.kernel): r.mib for r in rows}
    goals = []
    for dtype, layer in sorted({(row.dtype, row.layer) for row in rows}):
        label, low, high = f"{dtype}, {layer}", min(tokens), max(tokens)
        ours, eager = (by_key.get((dtype, layer, low, kernel)) for kernel in KERNELS[::-1])
        if ours is None or eager is None:
            goals.append((f"{label}: not measured at {low}", False))
            continue
        said = f"{label}: {ours / eager:.1%} of eager's memory at {low}"
        goals.append((said, ours <= MEMORY_GOAL * eager))
        most = by_key.get((dtype, layer, high, "sink-sdpa"))
        if most is not None and high > low:
            growth = most / ours / (high / low)
            said = f"{label}: memory from {low} to {high} {growth:.2f} x the length's growth"
            goals.append((said, growth <= GROWTH_GOAL))
    return goals


def show(row: Row) -> str:
    head = f"{row.dtype:<5} {row.layer:<7} {row.tokens:>7} {row.kernel:<10}"
    if row.mib is None or row.seconds is None:
        return f"{head} {row.note}"
    return f"{head} {row.mib:>8.0f} MiB {row.seconds:>7.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(json.loads(arguments.child))))
        return 0
    rows = []
    for dtype in arguments.dtypes:
        for layer in LAYERS:
            eager: Row | None = None
            for tokens in sorted(arguments.tokens):
                eager = measure(dtype, layer, tokens, "eager", eager)
                rows += [eager, measure(dtype, layer, tokens, "sink-sdpa")]
                print(*map(show, rows[-2:]), sep="\n", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    goals = judge(rows, arguments.tokens)
    for said, met in goals:
        print(f"{'ok' if met else 'MISSED'}: {said}")
    return 0 if all(met for _, met in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
