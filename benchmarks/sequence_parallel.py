"""Sequence parallelism: memory of each rank and time, by the number of ranks that share a sequence.

    python benchmarks/sequence_parallel.py [--tokens 4096 8192 16384] [--ranks 1 2 4] [--json FILE]

A two-layer gpt-oss with random weights (sinks; one sliding layer, one full; 8 heads of 64, 1 key
head, 8 experts) runs its decoder on one sequence in float32, forward alone and forward with
backward (layers recomputed), on ranks that share it. Extra memory is the most that any rank's
resident memory rose (VmHWM); time is the wall clock of the slowest rank: ranks of one machine share
its cores, so it says what the exchange costs, not what is gained.

Goals: at the last length N ranks need at most 1 / N + 0.15 of one rank's memory each, and from the
first to the last length memory grows no faster than the length (within 15 %). Exit code 1 if a goal
is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.long_sequences import KERNELS, M_MMAP_THRESHOLD, _status, build  # noqa: E402
from mismatch.training.attention.resolve import register_kernels  # noqa: E402
from mismatch.training.distributed import World  # noqa: E402
from mismatch.training.packing import collate  # noqa: E402
from mismatch.training.scorer import Scorer  # noqa: E402
from mismatch.training.sequence_parallel import SequenceParallel  # noqa: E402

SHARE_MARGIN, GROWTH_GOAL = 0.15, 1.15


@dataclass(frozen=True)
class Row:
    ranks: int
    backward: bool
    tokens: int
    extra_mib: float
    seconds: float


def measured(world: World, scorer: Scorer, tokens: int, backward: bool) -> tuple[float, float]:
    """Extra MiB of this rank, and its seconds."""
    parallel = SequenceParallel.of(world, world.size)
    kernel = KERNELS["sink-sdpa"]
    with parallel.installed(kernel), torch.set_grad_enabled(backward):
        for length in (64, tokens):  # first use touches additional memory
            batch = parallel.split(collate([torch.arange(length).numpy() % 300], "padding", "cpu"))
            world.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
            before, started = _status("VmRSS"), time.perf_counter()
            hidden = scorer.hidden(batch)
            if backward:
                hidden.square().mean().backward()
            del hidden
    return (_status("VmHWM") - before) / 1024, time.perf_counter() - started


def rank_main(lengths: list[int]) -> None:
    """One rank of a world; rank 0 prints a row of JSON for each length and kind of pass."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    world = World.start()
    register_kernels()
    model = build("fp32")
    model.set_attn_implementation(KERNELS["sink-sdpa"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = Scorer(model)
    for backward in (False, True):
        scorer.train(backward)
        for tokens in lengths:
            every = world.gather(measured(world, scorer, tokens, backward))
            if every is not None:
                most = [max(column) for column in zip(*every, strict=True)]
                print(json.dumps(asdict(Row(world.size, backward, tokens, *most))), flush=True)
    world.close()


def world_of(ranks: int, lengths: list[int]) -> list[Row]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, "--as-rank", "--tokens"]
    done = subprocess.run(
        [*command, *map(str, lengths)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        kind = "forward + backward" if row.backward else "forward"
        print(f"{row.ranks:5} {kind:<19} {row.tokens:7} {row.extra_mib:10.1f} {row.seconds:8.2f}")
    return rows


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is met."""
    goals = []
    for backward in (False, True):
        mib = {(row.ranks, row.tokens): row.extra_mib for row in rows if row.backward == backward}
        counts, lengths = ({key[place] for key in mib} for place in (0, 1))
        low, high = min(lengths), max(lengths)
        kind = "forward + backward" if backward else "forward"
        for ranks in sorted(counts - {1}):
            share = mib[ranks, high] / mib[1, high]
            words = f"{kind}, {high} tokens: {ranks} ranks need {share:.0%} of one rank's each"
            goals.append((words, share <= 1 / ranks + SHARE_MARGIN))
        for ranks in sorted(counts):
            growth = mib[ranks, high] / mib[ranks, low] / (high / low)
            words = f"{kind}, {ranks} ranks: {growth:.2f} x the growth from {low} to {high} tokens"
            goals.append((words, growth <= GROWTH_GOAL))
    return goals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        rank_main(options.tokens)
        return 0
    print(f"{'ranks':>5} {'pass':<19} {'tokens':>7} {'extra MiB':>10} {'seconds':>8}")
    rows = [row for ranks in options.ranks for row in world_of(ranks, options.tokens)]
    passed = True
    for words, met in judge(rows):
        print(f"{'PASS' if met else 'FAIL'}  {words}")
        passed = passed and met
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
