"""Does ``mismatch locate`` name planted faults, and nothing where there is none?

    PYTHONPATH=. python benchmarks/locate.py PLACE [--only 'fault;…']
        [--models tiny-gpt-oss,qwen3,qwen3_moe,gemma3,glm4]

Each model is checked once in bf16 (vLLM, FSDP2); its tokens serve every fault. Faults of weights
and settings are planted in a copy of the trainer's checkpoint, whose weights the reference holds:
there the engine is named. Faults of function are planted in the loaded model of one side
(``benchmarks/locate_planted.py``). Results go to PLACE/results.json as they come; what is there is
not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planted_checkpoint import plant
from mismatch.features.locate import recording as pipeline
from mismatch.features.locate.judge import judge
from mismatch.features.locate.recording import locate_in
from mismatch.features.locate.results import Location
from mismatch.models import resolve_model
from mismatch.run import store
from mismatch.run.directory import load_spec
from mismatch.specs import to_dict

MODELS = ("tiny-gpt-oss", "qwen3", "qwen3_moe")
NORMS = ("gemma3", "glm4")  # norms behind attention and MLP: clean runs alone
MOE = ("tiny-gpt-oss", "qwen3_moe")
GPT_OSS = ("tiny-gpt-oss",)
SEQUENCES, TOKENS = 4, 96
Change = Callable[[dict[str, Any]], None]


def _nothing(spec: dict[str, Any]) -> None:
    pass


def _float32(spec: dict[str, Any]) -> None:
    """Both sides compute in float32."""
    spec["rollout"]["engine"]["dtype"] = spec["train"]["dtype"] = "fp32"


def _bf16_head(spec: dict[str, Any]) -> None:
    _float32(spec)
    spec["train"]["head_dtype"] = "bf16"


def _fp8_cache(spec: dict[str, Any]) -> None:
    spec["rollout"]["engine"]["args"] = [["kv_cache_dtype", "fp8"]]


def _two_ranks(spec: dict[str, Any]) -> None:
    """On one NUMA node each rank has to be told its core."""
    bind = [["VLLM_CPU_OMP_THREADS_BIND", "0|1"]]
    spec["rollout"]["engine"] |= {"tensor_parallel_size": 2, "env": bind}


@dataclass(frozen=True)
class Fault:
    """One fault, planted at one place.

    Attributes:
        side: that must be named; "": none must.
        sites: of which the first source must be one; ``layer``: the first of its layers.
        checkpoint: name and size for ``planted_checkpoint.plant``; None: none is changed.
        planted: for ``MISMATCH_PLANT``.
    """

    name: str
    side: str
    sites: tuple[str, ...] = ()
    layer: int | None = None
    models: tuple[str, ...] = MODELS
    checkpoint: tuple[str, float] | None = None
    planted: str = ""
    spec: Change = _nothing


FAULTS = (
    Fault("clean, bf16", "", models=(*MODELS, *NORMS)),
    Fault("clean, float32", "", spec=_float32),
    Fault("one layer's weights 3 % off", "vllm", ("q",), 1, checkpoint=("layer-noise", 0.03)),
    Fault("two experts swapped in one layer", "vllm", ("mlp",), 1, MOE, ("swapped-experts", 1)),
    Fault("two experts swapped, two ranks of vLLM", "vllm", ("mlp",), 1, GPT_OSS,
          ("swapped-experts", 1), spec=_two_ranks),
    Fault("stale head, 10 % off", "vllm", ("head",), checkpoint=("stale-head", 0.1)),
    Fault("stale head, 1 % off, float32 run", "vllm", ("head",), checkpoint=("stale-head", 0.01),
          spec=_float32),
    Fault("norm eps x 100", "vllm", ("input_norm",), 0, GPT_OSS, ("norm-eps", 100)),
    Fault("window off by one", "vllm", ("attention",), 0, GPT_OSS, ("window", 31 / 32)),
    Fault("attention without sinks", "vllm", ("attention",), 0, GPT_OSS, ("no-sinks", 30)),
    Fault("window off by one in vLLM", "vllm", ("attention",), 0, GPT_OSS,
          planted="engine:window"),
    Fault("rope of one layer in vLLM", "vllm", ("rope_q",), 1, planted="engine:rope"),
    Fault("eps of one norm x 100 in vLLM, float32 run", "vllm", ("post_norm",), 1,
          planted="engine:eps", spec=_float32),
    Fault("rope theta of one layer", "fsdp", ("rope_q",), 1, planted="trainer:rope"),
    Fault("wrong activation clamp", "fsdp", ("mlp",), 0, GPT_OSS, planted="trainer:clamp"),
    Fault("router in bf16, float32 run", "fsdp", ("router",), 0, MOE, planted="trainer:router-bf16",
          spec=_float32),
    Fault("bf16 head, float32 run", "fsdp", ("head",), spec=_bf16_head),
    Fault("fp8 KV cache", "vllm", ("attention",), 0, spec=_fp8_cache),
)  # fmt: skip


class Quiet:
    """A narrator that prints titles."""

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[str], None]]:
        yield lambda line: None

    def note(self, text: str) -> None:
        print("   ", text, flush=True)


def checkpoint_of(model: str, place: Path) -> str:
    """Directory of a model: embedded, or made here with random weights."""
    if model == "tiny-gpt-oss":
        return resolve_model(model)
    from tests import checkpoints

    target = place / "models" / model
    if not (target / "config.json").exists():
        checkpoints.make(model, target, hidden_size=128, head_dim=32)  # vLLM's CPU kernels ask 32
    return str(target)


def prompts(place: Path) -> Path:
    """Prompts of random ids."""
    path = place / "prompts.jsonl"
    draw = np.random.default_rng(0)
    rows = [{"prompt_token_ids": draw.integers(3, 250, 24).tolist()} for _ in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_of(model: str, place: Path) -> Path:
    """Return a checked run of one model."""
    run = place / "runs" / model
    if not (run / "report.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "mismatch",
            "check",
            "--model",
            checkpoint_of(model, place),
        ]
        command += ["--num-prompts", "4", "--samples-per-prompt", "2", "--max-tokens", "48"]
        if model != "tiny-gpt-oss":  # no chat template
            command += ["--prompts", str(prompts(place))]
        subprocess.run(
            [*command, "--depth", "quick", "--fail-on", "broken", "--out", str(run)], check=False
        )
    return run


@contextmanager
def engine_shared(place: Path, model: str, planted: str) -> Iterator[None]:
    """Record what the same engine gives on the same tokens, once a model."""
    kind: Any = pipeline._Recording
    record = kind.engine

    def shared(self: Any) -> Any:
        engine = to_dict(self.spec.rollout)["engine"]
        tokens = [(one.index, one.tokens) for one in self.sequences]
        key = json.dumps([model, engine, planted if planted.startswith("engine") else "", tokens])
        kept = place / "engines" / hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = self._folder(f"{engine['engine']}:prefill")
        if kept.exists():
            shutil.copytree(kept, folder)
            return store.read_json(kept / "facts.json")
        facts = record(self)
        if isinstance(facts, dict):
            shutil.copytree(folder, kept)
        return facts

    kind.engine = shared
    try:
        yield
    finally:
        kind.engine = record


def measured(model: str, fault: Fault, place: Path) -> Location:
    """One fault in one model."""
    run = place / "work" / f"{model}-{FAULTS.index(fault)}"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(run_of(model, place), run)
    spec = store.read_json(run / "spec.json")
    fault.spec(spec)
    if fault.checkpoint is not None:
        target = run / "planted"
        plant(Path(spec["train"]["model"]), target, *fault.checkpoint)
        spec["train"]["model"] = str(target)
    if fault.spec is not _nothing:  # the run recorded other settings: nothing to be held to
        shutil.rmtree(run / "scores")
    store.write_json(run / "spec.json", spec)
    os.environ["MISMATCH_PLANT"] = fault.planted or ":"
    pipeline.WORKER = "benchmarks.locate_planted"
    try:
        with engine_shared(place, model, fault.planted):
            own = load_spec(run)
            return locate_in(run, own, Quiet(), sequences=SEQUENCES, tokens=TOKENS)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def row_of(model: str, fault: Fault, found: Location) -> dict[str, Any]:
    """Return what was named, and whether it is what was planted."""
    verdict = judge(found)
    named = [(side, side.source) for side in found.sides if side.source is not None]
    clean = max(
        (one.lowest_excess for side in found.sides for one in side.sites), default=float("nan")
    )
    row: dict[str, Any] = {"model": model, "fault": fault.name, "verdict": verdict.reason}
    row |= {"tokens": found.tokens, "largest excess": round(clean, 2)}
    row["not tested"] = [str(one) for one in found.not_tested]
    if not fault.side:
        return row | {
            "right": verdict.status == "none" and not found.not_tested,
            "named": "; ".join(s.name for s, _ in named),
        }
    side, group = named[0] if len(named) == 1 else (None, None)
    right = side is not None and side.name.startswith(fault.side) and group is not None
    right = right and group is not None and group.site in fault.sites
    right = right and (
        fault.layer is None or (group is not None and group.layers[:1] == (fault.layer,))
    )
    if side is not None and group is not None:
        row |= {
            "named": f"{side.name} {group.site} {list(group.layers)}",
            "explains": None if side.explained is None else round(side.explained, 3),
            "first alone": round(group.explains, 3),
            "goes": None if side.removed is None else round(side.removed, 3),
        }
    return row | {"right": bool(right)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--models", default=",".join((*MODELS, *NORMS)))
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    path = arguments.place / "results.json"
    arguments.place.mkdir(parents=True, exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["model"], row["fault"]) for row in rows}
    for model in arguments.models.split(","):
        for fault in FAULTS:
            wanted = not arguments.only or any(
                part in fault.name for part in arguments.only.split(";")
            )
            if model not in fault.models or (model, fault.name) in done or not wanted:
                continue
            row = row_of(model, fault, measured(model, fault, arguments.place))
            print(json.dumps(row), flush=True)
            rows.append(row)
            path.write_text(json.dumps(rows, indent=1))
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/evidence/locate.md: a row a fault, a column a model."""
    models = list(dict.fromkeys(row["model"] for row in rows if row.get("named")))
    lines = [f"| fault | named | {' | '.join(models)} |", "| --- " * (len(models) + 2) + "|"]
    for fault in dict.fromkeys(row["fault"] for row in rows if row.get("named")):
        found = {row["model"]: row for row in rows if row["fault"] == fault}
        named = ", ".join(dict.fromkeys(row["named"].replace(" []", "") for row in found.values()))
        cells = [cell(found.get(model)) for model in models]
        lines.append(f"| {fault} | {named} | {' | '.join(cells)} |")
    wrong = [f"{row['model']}, {row['fault']}" for row in rows if not row["right"]]
    return "\n".join([*lines, "", f"Wrong: {'; '.join(wrong) or 'none'}."])


def cell(row: dict[str, Any] | None) -> str:
    """Return how much the named source explains, and how much is gone without it."""
    shares = [row.get("explains"), row.get("goes")] if row else []
    return " / ".join("–" if share is None else f"{100 * share:.0f}" for share in shares) or "–"


if __name__ == "__main__":
    main()
