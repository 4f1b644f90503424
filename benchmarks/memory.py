"""Predicted against measured peak memory of the training world, on models small enough for a CPU.

    python benchmarks/memory.py [--only NAME] [--json FILE]

Each case runs the real worker (``mismatch.processes.workers.session``, torchrun) on a checkpoint
with random weights (or on tiny-gpt-oss) and compares its peak with ``mismatch.doctor.memory``.

What is measured: the kernel's own high-water mark of each rank's resident memory (VmHWM), set back
right before a pass begins, less what is mapped from files (libraries, checkpoints: the kernel can
drop it), above the anonymous memory right before the weights load. glibc is told to map every block
of 64 KiB or more separately (MALLOC_MMAP_THRESHOLD_), so that a freed tensor leaves the process at
once and the mark follows the tensors that are alive, not the allocator's leftovers.

What is not the model's is taken off: what the matmul libraries keep for good (touched before
anything is measured; oneDNN's cache of compiled kernels, up to 1 MiB for each shape that it meets,
is switched off), and Python objects and code data, measured by a run of the same family with hardly
any tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

MIB = 1 << 20
TOLERANCE = 0.15


@dataclass(frozen=True)
class Case:
    """One training world. ``sizes`` are fields of the family's configuration."""

    family: str  # of tests/checkpoints.py, or "tiny-gpt-oss"
    sizes: dict[str, Any]
    lengths: tuple[int, ...]  # tokens per sequence, prompt of 8 included
    world: int = 1
    spec: dict[str, Any] = field(default_factory=dict)


DENSE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
}
MOE = {
    **DENSE,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
}
GPT_OSS = {
    **DENSE,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
    "sliding_window": 128,
}
LONG = (2048,) * 2
CASES = {
    "tiny gpt-oss": Case("tiny-gpt-oss", {}, (2000,) * 4, spec={"micro_batch_tokens": 8192}),
    "tiny gpt-oss, 2 ranks, fp32": Case(
        "tiny-gpt-oss", {}, (1500,) * 4, 2, {"micro_batch_tokens": 4096, "dtype": "fp32"}
    ),
    "tiny gpt-oss, eager": Case("tiny-gpt-oss", {}, (2000,) * 2, spec={"attention": "eager"}),
    "tiny gpt-oss, grad": Case("tiny-gpt-oss", {}, (1500,) * 2, spec={"grad": True}),
    "dense": Case("qwen3", DENSE, LONG),
    "dense, 2 ranks": Case("qwen3", DENSE, LONG, 2),
    "dense, eager": Case("qwen3", DENSE, LONG, spec={"attention": "eager"}),
    "dense, grad": Case("qwen3", DENSE, LONG, spec={"grad": True}),
    "dense, fp32": Case("qwen3", DENSE, LONG, spec={"dtype": "fp32"}),
    "MoE, 2 ranks": Case("qwen3_moe", MOE, LONG, 2),
    "MoE, grad": Case("qwen3_moe", MOE, LONG, spec={"grad": True}),
    "MoE, batched_mm": Case("qwen3_moe", MOE, (128,) * 2, spec={"experts": "batched_mm"}),
    "MoE, bounded": Case("qwen3_moe", MOE, LONG, spec={"experts": "bounded"}),
    "gpt-oss": Case("gpt_oss", GPT_OSS, LONG),
    "gpt-oss, bounded": Case("gpt_oss", GPT_OSS, LONG, spec={"experts": "bounded"}),
    "gpt-oss, 2 ranks": Case("gpt_oss", GPT_OSS, LONG, 2),
    "gpt-oss, eager": Case("gpt_oss", GPT_OSS, LONG, spec={"attention": "eager"}),
    "gpt-oss, grad": Case("gpt_oss", GPT_OSS, LONG, spec={"grad": True}),
    "gpt-oss, packing": Case("gpt_oss", GPT_OSS, LONG, spec={"layout": "packing"}),
}

# MiB that were measured (two CPU cores, torch 2.13, transformers 5.19).
MEASURED = {
    "tiny gpt-oss": 102,
    "tiny gpt-oss, 2 ranks, fp32": 49,
    "tiny gpt-oss, eager": 421,
    "tiny gpt-oss, grad": 76,
    "dense": 428,
    "dense, 2 ranks": 352,
    "dense, eager": 917,
    "dense, grad": 515,
    "dense, fp32": 546,
    "MoE, 2 ranks": 268,
    "MoE, grad": 411,
    "MoE, batched_mm": 1337,
    "MoE, bounded": 324,
    "gpt-oss": 362,
    "gpt-oss, bounded": 299,
    "gpt-oss, 2 ranks": 321,
    "gpt-oss, eager": 629,
    "gpt-oss, grad": 388,
    "gpt-oss, packing": 363,
}


# ---------------------------------------------------------------- inside a rank


def rank_main(job_path: str) -> int:
    """Run the worker; leave the marks of this rank next to the job."""
    import mismatch.training.load as loading
    import mismatch.training.score as scoring
    from mismatch.processes.workers import session

    touch_libraries()
    marks: dict[str, int] = {}
    real_load, real_score = loading.load, scoring.score_pass

    def load(*args: Any, **kwargs: Any) -> Any:
        marks.setdefault("base", status("RssAnon"))
        loaded = real_load(*args, **kwargs)
        marks["load"] = loaded.peak_bytes or 0
        return loaded

    def score_pass(*args: Any, **kwargs: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
        result = real_score(*args, **kwargs)
        marks["peak"] = status("VmHWM") - status("RssFile") - status("RssShmem")
        return result

    loading.load, scoring.score_pass = load, score_pass
    code = session.main([job_path])
    out = Path(job_path).with_name(f"marks-{os.environ.get('RANK', '0')}.json")
    out.write_text(json.dumps(marks))
    return code


def touch_libraries() -> None:
    """Let the matmul libraries allocate what they keep for good before anything is measured."""
    import torch
    import torch.nn.functional as F

    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            rows, weight = torch.rand(4096, 512, dtype=dtype), torch.rand(4, 512, 1024, dtype=dtype)
            F.linear(rows, weight[0].T)
            F.grouped_mm(rows, weight, offs=torch.arange(1, 5, dtype=torch.int32) * 1024)
            torch.bmm(rows.view(4, 1024, 512), weight)


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


# ---------------------------------------------------------------- outside


def measure(case: Case, folder: Path) -> dict[str, int]:
    """Peak bytes above the base, the largest over the ranks: of the pass, and of the loading."""
    from mismatch.processes.tasks import TrainerSession, write_session
    from mismatch.run import store
    from mismatch.specs import Pass, TrainSpec
    from tests import checkpoints

    model = checkpoint(case, folder)
    config = json.loads((model / "config.json").read_text())
    rollout = checkpoints.rollout(
        tuple((8, length - 8) for length in case.lengths), vocabulary=config["vocab_size"]
    )
    store.save_rollout(folder, rollout)
    spec = TrainSpec(model=str(model), **case.spec)
    passes = (Pass("fsdp", spec),)
    path = write_session(TrainerSession(folder, passes, resident_report=True))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(case.world), __file__, "--rank", str(path)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
        "MALLOC_MMAP_MAX_": "1000000",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}: failed\n{done.stderr[-3000:]}")
    ranks = [json.loads(p.read_text()) for p in sorted(path.parent.glob("marks-*.json"))]
    return {
        "pass": max(marks["peak"] - marks["base"] for marks in ranks),
        "load": max(marks["load"] for marks in ranks),
    }


def checkpoint(case: Case, folder: Path) -> Path:
    from mismatch.models import EMBEDDED
    from tests import checkpoints

    if case.family in EMBEDDED:
        return EMBEDDED[case.family]
    return checkpoints.make(case.family, folder / "model", **case.sizes)


def predict(case: Case) -> Any:
    from mismatch.doctor.memory import Workload, predict_trainer
    from mismatch.models import EMBEDDED
    from mismatch.models.config import FoundConfig, find_config
    from mismatch.models.sizes import sized
    from mismatch.specs import TrainSpec
    from tests.checkpoints import configuration

    if case.family in EMBEDDED:
        shape = sized(find_config(str(EMBEDDED[case.family])))
    else:
        config = configuration(case.family, **case.sizes)
        shape = sized(FoundConfig(config.to_dict(), "made here", None))
    spec = TrainSpec(model="", **case.spec)
    work = Workload(len(case.lengths), max(case.lengths))
    return predict_trainer(shape, spec, case.world, work, "cpu")


def almost_empty(case: Case) -> Case:
    """Return the same family and settings with hardly any tensors: the framework is left."""
    small = {} if case.family == "tiny-gpt-oss" else {"max_position_embeddings": 4096}
    return replace(case, sizes=small, lengths=(24, 24))


def run(names: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    framework: dict[tuple[Any, ...], int] = {}
    for name in names:
        case = CASES[name]
        key = (case.family, case.world, json.dumps(case.spec, sort_keys=True))
        if key not in framework:
            with tempfile.TemporaryDirectory() as folder:
                empty = almost_empty(case)
                seen = measure(empty, Path(folder))["pass"]
                framework[key] = seen - predict(empty).peak_bytes
        with tempfile.TemporaryDirectory() as folder:
            seen_bytes = measure(case, Path(folder))
            predicted = predict(case)
        measured = seen_bytes["pass"] - framework[key]
        rows.append(
            {
                "case": name,
                "predicted_mib": predicted.peak_bytes / MIB,
                "measured_mib": measured / MIB,
                "framework_mib": framework[key] / MIB,
                "load_mib": seen_bytes["load"] / MIB,
                "ratio": predicted.peak_bytes / measured,
                "moment": predicted.moment,
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    off = "" if abs(row["ratio"] - 1) <= TOLERANCE else "  <- beyond 15 %"
    print(
        f"{row['case']:<30} predicted {row['predicted_mib']:8.1f} MiB   "
        f"measured {row['measured_mib']:8.1f} MiB   ratio {row['ratio']:.3f}   "
        f"(framework {row['framework_mib']:.0f}, loading {row['load_mib']:.0f} MiB; "
        f"at its highest: {row['moment']}){off}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=sorted(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return rank_main(arguments.rank)
    rows = run(arguments.only or list(CASES))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    worst = max(abs(row["ratio"] - 1) for row in rows)
    print(f"worst: {worst:.1%} off; wanted: {TOLERANCE:.0%}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
