"""Attention with sinks on long sequences: eager against our blocked kernel, memory and time.

    python benchmarks/long_sequences.py [--tokens 512 1024 2048 4096] [--alone 8192 16384]
                                        [--dtypes bf16 fp32] [--json FILE]

A two-layer gpt-oss with random weights (one sliding layer, one full; 8 heads of 64, 1 key head, 8
experts) runs its decoder on one sequence, no gradients. Extra memory is the kernel's high-water
mark of resident memory (VmHWM); glibc maps every tensor apart, so that the mark follows the tensors
that are alive. Time is the processor's. Eager holds [heads, T, T] and is left out where that is
hopeless.

Goals: at the largest common length ours takes at most a quarter of eager's memory and no more time;
from the first to the last length its memory grows no faster than the length (within 15 %). Exit
code 1 if one is missed. With the defaults: about a minute on one core, at most 3 GiB.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mismatch.training.attention.resolve import OUR_KERNELS, register_kernels  # noqa: E402
from mismatch.training.scorer import torch_dtype  # noqa: E402
from tests.checkpoints import configuration  # noqa: E402

M_MMAP_THRESHOLD = -3
KERNELS = {"eager": "eager", "sink-sdpa": OUR_KERNELS["sink-sdpa"]}
MEMORY_GOAL, TIME_GOAL, GROWTH_GOAL = 0.25, 1.0, 1.15


@dataclass(frozen=True)
class Row:
    dtype: str
    kernel: str
    tokens: int
    extra_mib: float
    seconds: float


def build(dtype: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = configuration(
        "gpt_oss",
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=131072,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    return model.eval()


def measure(model: Any, dtype: str, kernel: str, tokens: int) -> Row:
    model.set_attn_implementation(KERNELS[kernel])
    ids = (torch.arange(tokens) * 7 % 300)[None]
    with torch.no_grad():
        model.model(input_ids=ids[:, :64], use_cache=False)  # first use touches additional memory
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        before, started = _status("VmRSS"), time.process_time()
        model.model(input_ids=ids, use_cache=False)
        took = time.process_time() - started
        return Row(dtype, kernel, tokens, (_status("VmHWM") - before) / 1024, took)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is met."""
    ours = {row.tokens: row for row in rows if row.kernel != "eager"}
    eager = {row.tokens: row for row in rows if row.kernel == "eager"}
    common = max(eager)
    memory = ours[common].extra_mib / eager[common].extra_mib
    seconds = ours[common].seconds / eager[common].seconds
    low, high = min(ours), max(ours)
    growth = (ours[high].extra_mib / ours[low].extra_mib) / (high / low)
    return [
        (f"memory at {common}: {memory:.1%} of eager's", memory <= MEMORY_GOAL),
        (f"time at {common}: {seconds:.2f} of eager's", seconds <= TIME_GOAL),
        (f"memory from {low} to {high}: {growth:.2f} x the length's growth", growth <= GROWTH_GOAL),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--alone", type=int, nargs="*", default=[8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    register_kernels()
    rows, passed = [], True
    for dtype in options.dtypes:
        model = build(dtype)
        print(f"{dtype}\n{'kernel':<10} {'tokens':>7} {'extra MiB':>10} {'seconds':>8}")
        for tokens in [*options.tokens, *options.alone]:
            for kernel in KERNELS:
                if kernel == "eager" and tokens in options.alone:
                    continue
                rows.append(measure(model, dtype, kernel, tokens))
                row = rows[-1]
                line = f"{row.extra_mib:10.1f} {row.seconds:8.2f}"
                print(f"{kernel:<10} {tokens:7} {line}", flush=True)
        for words, met in judge([row for row in rows if row.dtype == dtype]):
            print(f"  {'PASS' if met else 'FAIL'}  {words}", flush=True)
            passed = passed and met
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
