"""Measure large dumps, runs and folders of runs: ``python -m benchmarks.load --place DIR``.

Each command runs in a separate process; seconds and the largest resident memory are the kernel's.
The dumps are drawn: two sides that differ by normal noise. What is there from an earlier call is
not made again. The output is the table of docs/evidence/load.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIMIT_S = 1800
FLOOR = (  # reading the two columns of log-probabilities, as arrays, and nothing else
    "import sys, pyarrow.parquet as pq\n"
    "sides = dict(columns=['logprobs', 'train_logprobs'], use_threads=False)\n"
    "for batch in pq.ParquetFile(sys.argv[1], pre_buffer=False).iter_batches(**sides):\n"
    "    [column.flatten().to_numpy() for column in batch.columns]"
)
JSON_FLOOR = (
    "import sys, pyarrow.json as pj\n"
    "pj.read_json(sys.argv[1], read_options=pj.ReadOptions(block_size=32 << 20))"
)
READ = (  # the dump as `mismatch postmortem --workers 1` reads it, without the report
    "import sys\n"
    "from pathlib import Path\n"
    "from mismatch.features.recorded.dumps import read_recorded\n"
    "from mismatch.processes.spread import Where\n"
    "if __name__ == '__main__':\n"
    "    read_recorded(Path(sys.argv[1]), most=1_000_000, on=Where(1))"
)


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    code: int
    seconds: float
    processor_s: float
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the largest dump")
    asked = parser.parse_args()
    place = asked.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    print("| what | seconds | of a core | peak memory |\n| --- | ---: | ---: | ---: |")
    for name, arguments in cases(place, asked.tokens, asked.only):
        cost = measured(arguments, place / "log")
        words = "" if cost.code in (0, 1) else f" (exit code {cost.code})"
        print(
            f"| {name}{words} | {cost.seconds:.1f} | {cost.processor_s:.1f} "
            f"| {cost.peak_bytes / 1e9:.2f} GB |",
            flush=True,
        )
    return 0


def cases(place: Path, largest: int, only: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of every case; a dump is made when its case comes."""
    module = ["-m", "mismatch"]
    for tokens in dict.fromkeys((1_000_000, 10_000_000, largest)):
        size = f"{tokens // 1_000_000}M"
        for kind in ("jsonl", "parquet"):
            if only in (name := f"postmortem, {size} tokens, {kind}"):
                dump = drawn(place / f"{size}.{kind}", tokens // 500, 500)
                out = place / f"run-{size}-{kind}"
                shutil.rmtree(out, ignore_errors=True)
                yield name, [*module, "postmortem", str(dump), "--out", str(out), "--workers", "1"]
                yield f"of that, reading, {size} tokens, {kind}", ["-c", READ, str(dump)]
                floor = FLOOR if kind == "parquet" else JSON_FLOOR
                yield f"pyarrow alone, {size} tokens, {kind}", ["-c", floor, str(dump)]
    for tokens in (1_000_000, 10_000_000, largest):
        if only in (name := f"watch --once, {tokens // 1_000_000}M tokens, jsonl"):
            folder = place / f"watch-{tokens}"
            folder.mkdir(exist_ok=True)
            drawn(folder / "step_1.jsonl", tokens // 500, 500)
            yield name, [*module, "watch", str(folder), "--once"]
    for command in ("compare", "report"):
        if only in (name := f"{command}, 1M tokens"):
            yield name, [*module, command, str(place / "run-1M-jsonl")]
    if only in (name := "postmortem, 100,000 prompts of 8 tokens"):
        dump, out = drawn(place / "prompts.jsonl", 100_000, 8), place / "run-prompts"
        shutil.rmtree(out, ignore_errors=True)
        yield name, [*module, "postmortem", str(dump), "--out", str(out)]
    if only in (name := "report, 500 saved runs"):
        out = place / "page"
        yield name, [*module, "report", *saved(place, 500), "--out", str(out)]


def drawn(path: Path, rows: int, tokens: int) -> Path:
    """Write a dump of rows of so many tokens."""
    if path.exists():
        return path
    random = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        writer, block = None, 2000
        for first in range(0, rows, block):
            count = min(block, rows - first) * tokens
            rollout = -random.exponential(0.5, count)
            columns = {
                "response_token_ids": random.integers(5, 50_000, count),
                "logprobs": rollout,
                "train_logprobs": rollout + random.normal(0, 0.01, count),
            }
            ends = np.arange(0, count + 1, tokens, np.int32)
            ids = np.stack([np.arange(first, first + len(ends) - 1), np.ones(len(ends) - 1)], 1)
            prompts = pa.array(ids.astype(np.int64).tolist())
            lists = {key: pa.ListArray.from_arrays(ends, held) for key, held in columns.items()}
            table = pa.table({"prompt_token_ids": prompts} | lists)
            writer = writer or pq.ParquetWriter(partial, table.schema)
            writer.write_table(table)
        assert writer is not None
        writer.close()
        return partial.rename(path)
    with partial.open("w") as file:
        for number in range(rows):
            ids = random.integers(5, 50_000, tokens)
            rollout = -random.exponential(0.5, tokens)
            train = rollout + random.normal(0, 0.01, tokens)
            sides = (",".join(f"{value:.5f}" for value in side) for side in (rollout, train))
            left, right = sides
            file.write(
                f'{{"prompt_token_ids": [{number}, 1], "response_token_ids": {ids.tolist()}, '
                f'"logprobs": [{left}], "train_logprobs": [{right}]}}\n'
            )
    return partial.rename(path)


def saved(place: Path, count: int) -> list[str]:
    """Make one run of 32 prompts, and copies of it."""
    first = place / "saved" / "run-000"
    if not first.exists():
        dump = drawn(place / "small.jsonl", 32, 50)
        measured(["-m", "mismatch", "postmortem", str(dump), "--out", str(first)], place / "log")
    runs = [first.with_name(f"run-{number:03d}") for number in range(count)]
    for run in runs[1:]:
        if not run.exists():
            shutil.copytree(first, run)
    return list(map(str, runs))


def measured(arguments: list[str], log: Path) -> Cost:
    """Run Python with these arguments; its output goes to ``log``."""
    command = ["timeout", str(LIMIT_S), sys.executable, *arguments]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    took = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    return Cost(process.returncode, *took, usage.ru_maxrss * 1024)


if __name__ == "__main__":
    raise SystemExit(main())
