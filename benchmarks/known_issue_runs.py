"""Runs of benchmarks/known_issues.py: clean runs, faults of engines, a trainer with a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import known_faults
from benchmarks.calibration import model_of, plugin, prompts_of
from benchmarks.fault_blocks import BLOCK, of_prompts
from benchmarks.known_faults import Fault
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.plugins import RunArtefacts
from mismatch.types import Rollout, Scoring, SideFacts

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class EngineFault:
    """One run of `mismatch check` with a fault in an engine.

    Attributes:
        plant: as ``PLANTED_FAULT`` has it; "": the flags are the fault.
        second: causes of which one must be among the first three as well: a pair of faults.
        half: where detectors were tuned on this run, whatever its place.
    """

    name: str
    issues: tuple[str, ...]
    expected: tuple[str, ...]
    plant: str = ""
    flags: tuple[str, ...] = ()
    side: str = "engine"
    second: tuple[str, ...] = ()
    half: str = ""


DIFFERS = ("function-differs", "weights-differ", "side-off")
RAW = ("--temperature", "0.6", "--engine-arg", "logprobs_mode=raw_logprobs")
FP8_KV = ("--engine-arg", "kv_cache_dtype=fp8")
ENGINES = (
    EngineFault("raw-logprobs-0.6", ("huggingface/trl#4159", "PrimeIntellect-ai/prime-rl#697"),
                ("temperature-semantics",), "", RAW),
    EngineFault("top-k-20", ("huggingface/trl#6789", "NVIDIA-NeMo/RL#3497"),
                ("sampling-truncation", "implicit-generation-config"), "", ("--top-k", "20")),
    EngineFault("window-16", (), ("sliding-window", "onset",
                "function-differs"), "", ("--engine-arg", 'hf_overrides={"sliding_window": 16}')),
    EngineFault("yarn-factor", ("PrimeIntellect-ai/prime-rl#2802",),
                ("yarn-attention-factor", "function-differs"), "yarn-factor:1"),
    EngineFault("softcap-15", ("unslothai/unsloth-zoo#593",),
                ("logit-softcap", "function-differs", "temperature-semantics"), "softcap:15"),
    EngineFault("fp8-kv", ("vllm-project/vllm#54035",), ("fp8-kv", *DIFFERS), "", FP8_KV),
    EngineFault("swapped-experts", ("NovaSky-AI/SkyRL#1680", "vllm-project/vllm#42821"),
                ("experts-differ", "weights-differ", "function-differs"), "swapped-experts:1"),
    EngineFault("head-noise", ("pytorch/torchtitan#2402",),
                ("tied-head-stale", "weights-differ"), "head-noise:0.05"),
    EngineFault("query-scale", ("UniRL/UniRL#155",), ("lora-scale", "stale-weights", *DIFFERS),
                "query-scale:1.3"),
    EngineFault("epsilon-100", (), ("norm-eps", *DIFFERS), "epsilon:100"),
    EngineFault("layer-noise-0.03", ("huggingface/trl#5312",), ("stale-weights", *DIFFERS),
                "layer-noise:0.03"),
    EngineFault("layer-noise-0.003", ("huggingface/trl#5312",), ("stale-weights", *DIFFERS),
                "layer-noise:0.003"),
    EngineFault("trainer-no-sinks", ("volcengine/verl#3794",),
                ("attention-sinks", "function-differs"), "",
                ("--attention", "no-sinks"), "trainer"),
    EngineFault("raw-and-fp8-kv", (), ("temperature-semantics",), "", RAW + FP8_KV,
                second=("fp8-kv", *DIFFERS), half="tuning"),
    EngineFault("sglang-no-sinks", ("volcengine/verl#3794",),
                ("attention-sinks", "function-differs"), "",
                ("--engine", "sglang", "--attention", "no-sinks"), "trainer"),
    EngineFault("sglang-top-k-20", ("huggingface/trl#6789", "NVIDIA-NeMo/RL#3497"),
                ("sampling-truncation", "implicit-generation-config", "sampling-law"), "",
                ("--engine", "sglang", "--top-k", "20")),
    EngineFault("sglang-top-k-20-seed1", ("huggingface/trl#6789", "NVIDIA-NeMo/RL#3497"),
                ("sampling-truncation", "implicit-generation-config", "sampling-law"), "",
                ("--engine", "sglang", "--top-k", "20", "--seed", "1"), half="reported"),
)  # fmt: skip
CLEAN = {
    "gpt-oss": ("tiny-gpt-oss", ("--num-prompts", "512")),
    "gpt-oss-seed0": ("tiny-gpt-oss", ("--num-prompts", "128")),
    "gpt-oss-fp16": ("tiny-gpt-oss", ("--num-prompts", "128", "--dtype", "fp16",
                                      "--train-dtype", "fp16")),
    "llama": ("llama", ("--num-prompts", "128")),
    "mixtral": ("mixtral", ("--num-prompts", "128")),
    "gpt-oss-transformers": ("tiny-gpt-oss", ("--num-prompts", "128", "--engine",
                                              "transformers")),
}  # fmt: skip
SMALL = ("--samples-per-prompt", "2", "--max-tokens", "64", "--exact-kl", "0")


def check(home: Path, name: str, model: str, flags: tuple[str, ...], plant: str = "") -> Path:
    """Return the run directory of one check, made if it is not there."""
    run_dir = home / "runs" / name
    if (run_dir / "report.json").is_file():
        return run_dir
    env = dict(os.environ)
    if plant:
        paths = [str(plugin(home)), str(ROOT), env.get("PYTHONPATH", "")]
        env |= {"PLANTED_FAULT": plant, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mismatch", "check", "--model", model, *SMALL, *flags]
    print(" ".join(command), flush=True)
    log = home / f"{name}.log"
    with log.open("w") as file:
        subprocess.run([*command, "--out", str(run_dir)], env=env, stdout=file, stderr=file,
                       check=False)  # fmt: skip
    return run_dir


def clean_runs(home: Path, make: bool) -> dict[str, Path]:
    """Name -> run directory of those that are there; missing runs are made where asked."""
    places = {}
    for name, (model, flags) in CLEAN.items():
        run_dir = home / "runs" / f"clean-{name}"
        if make and not (run_dir / "report.json").is_file():
            if model != "tiny-gpt-oss":  # its tokenizer has no chat template
                flags = (*flags, "--prompts", str(prompts_of(home, int(flags[1]))))
            check(home, f"clean-{name}", model_of(model, home), flags)
        if (run_dir / "report.json").is_file():
            places[name] = run_dir
    return places


def calibration_runs(folder: Path) -> dict[str, Path]:
    """Clean runs of benchmarks/calibration.py that are complete."""
    complete = {f"calibration {p.name}": p for p in sorted(folder.iterdir())
             if (p / "scores" / "fsdp.parquet").is_file()}  # fmt: skip
    return {name: p for name, p in complete.items() if not p.name.startswith("fault-")}


def blocks(run: RunArtefacts, drawn: int = 0) -> list[RunArtefacts]:
    """Disjoint blocks of 64 prompts, then drawn blocks; the whole where it is no longer."""
    prompts = np.unique(run.rollout.prompt_index)
    order = np.random.default_rng(0)
    shuffled = order.permutation(prompts)
    apart = [shuffled[i : i + BLOCK] for i in range(0, len(prompts) - BLOCK + 1, BLOCK)]
    several = drawn if len(prompts) > BLOCK else 0
    taken = [order.choice(prompts, BLOCK, replace=False) for _ in range(several)]
    return [of_prompts(run, block) for block in [*(apart or [prompts]), *taken]]


def undeclared(run: RunArtefacts) -> Case:
    """Return the case of a run with nothing stated by either side but its dtype.

    The trainer's log-probabilities at T = 1 stay: they are measured, not declared.
    """
    others = {
        name: _bare(scoring)
        for name, scoring in run.usable.items()
        if name not in (run.decode.name, run.train.name)
    }
    return Case.of(run.rollout, _bare(run.decode), _bare(run.train), others)


def _bare(scoring: Scoring) -> Scoring:
    given = scoring.fingerprint
    facts: SideFacts = {"dtype": given.get("dtype")}
    if device := given.get("device"):
        facts["device"] = device
    if mode := given.get("mode"):
        facts["mode"] = mode
    raw = {key: value for key, value in scoring.extra.items() if key == "logprobs_untempered"}
    return replace(scoring, fingerprint=facts, extra=raw)


class Trainer:
    """FSDP2 in a world of one rank."""

    def __init__(self, home: Path) -> None:
        from mismatch.training.distributed import World

        self.home, self.world = home, World.start()

    def score(
        self, run: RunArtefacts, spec: Any, name: str, fault: Fault, strength: float
    ) -> Scoring:
        """One pass over the run's tokens by a model that holds the fault."""
        from mismatch.specs import Pass
        from mismatch.training.load import load
        from mismatch.training.score import score_pass
        from mismatch.training.validate import prepare_pass

        rollout: Rollout = run.rollout
        spec = replace(spec, model=here(spec.model, self.home))
        if fault.place == "packing":
            spec = replace(spec, layout="packing")
        if fault.place == "template":
            rollout = without(rollout, int(strength))
        loaded = load(spec, self.world.mesh, self.world.device)
        fault.plant(loaded.scorer, strength)
        if fault.place == "packing":
            prepare_pass(self.world, loaded, rollout, spec, None)  # its guard would refuse it
            with known_faults.packed_without_bounds():
                scoring = score_pass(self.world, loaded, rollout, Pass(name, spec))
        else:
            scoring = score_pass(self.world, loaded, rollout, Pass(name, spec))
        assert scoring is not None
        return replace(scoring, routing=None)


def here(model: str, home: Path) -> str:
    """Return the model's local place; a recorded run may name another checkout's, or a family
    that is written with the same random weights."""
    from mismatch.models import resolve_model

    if Path(model).is_dir():
        return model
    return resolve_model(model_of(Path(model).name, home))


def without(rollout: Rollout, count: int) -> Rollout:
    """Return the same actions after prompts that lack so many tokens of their template."""
    keep = np.ones(len(rollout.token_ids), bool)
    for start in rollout.offsets[:-1]:
        keep[start + 1 : start + 1 + count] = False
    lengths = np.diff(rollout.offsets) - count
    return replace(
        rollout,
        token_ids=rollout.token_ids[keep],
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        action_mask=rollout.action_mask[keep],
        turn=rollout.turn[keep],
    )


def with_fault(
    home: Path,
    trainer: Trainer | None,
    run: RunArtefacts,
    spec: Any,
    fault: Fault,
    strength: float,
    key: str,
) -> RunArtefacts:
    """Return the run with the trainer's side (and its float32) scored by a model with the fault."""
    path = stored(home, key)
    names = ["fsdp", *(["reference:fp32"] if fault.place == "weights" else [])]
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        arrays: dict[str, Any] = {}
        for name in names:
            pass_spec = spec if name == "fsdp" else replace(spec, dtype="fp32", attention="eager")
            assert trainer is not None
            scoring = trainer.score(run, pass_spec, name, fault, strength)
            arrays[name], arrays[f"{name} H"] = scoring.logprobs, scoring.entropy
        np.savez(path, **arrays)
    held = np.load(path)
    passes = {"fsdp": run.train} | run.usable
    moved = {
        name: replace(passes[name], logprobs=held[name], entropy=held[f"{name} H"], extra={})
        for name in names
    }
    # The trainer's other passes did not have the fault; a plain forward is right where float32 is.
    stale = ("fsdp:", "plain:") if fault.place == "weights" else ("fsdp:",)
    usable = {n: s for n, s in run.usable.items() if not n.startswith(stale)} | moved
    return replace(run, usable=usable, train=moved["fsdp"])


def stored(home: Path, key: str) -> Path:
    """Where the scores of a fault of a trainer are kept."""
    return home / "scores" / f"{key.replace('/', '-')}.npz"
