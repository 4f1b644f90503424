"""MXFP4 experts of gpt-oss-20b's width to bf16: seconds per expert, next to transformers.

    python benchmarks/mxfp4.py [--runs 5]

Every trainer that reads gpt-oss does this to 24 layers of 32 experts, and the engine in float32
once more. Goal: a quarter of transformers' time, and the same numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from mismatch.models.mxfp4 import dequantise

EXPERTS, OUTPUTS, GROUPS = 4, 5760, 90  # gate_up_proj; of 32 experts
GOAL = 0.25


def seconds(work: Callable[[], torch.Tensor], times: int) -> float:
    """Return the shortest time of one expert."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken) / EXPERTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUTPUTS, GROUPS, 16), dtype=torch.uint8)
    scales = torch.randint(110, 128, (EXPERTS, OUTPUTS, GROUPS), dtype=torch.uint8)
    theirs = partial(convert_moe_packed_tensors, blocks, scales, dtype=torch.bfloat16)
    ours = partial(dequantise, blocks, scales, torch.bfloat16)
    assert torch.equal(theirs(), ours())
    took, peer = seconds(ours, runs), seconds(theirs, runs)
    print(f"{1000 * took:.0f} ms per expert, transformers {1000 * peer:.0f}: {took / peer:.2f} x")
    raise SystemExit(took / peer > GOAL)


if __name__ == "__main__":
    main()
