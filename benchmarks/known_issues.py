"""Known issues of the field, planted: is the cause named first, and the side right?

    python benchmarks/known_issues.py DIR [--engines] [--calibration DIR] [--write]

Clean runs of `mismatch check` (vLLM or transformers against FSDP2) lie in DIR/runs/clean-*; those
that are missing are made. Faults of a trainer are planted in the model that FSDP2 has loaded (a
world of one rank) and score the tokens that the engine sampled in a clean run; faults of an engine
are planted in vLLM (benchmarks/planted_fault.py, or a setting) in runs of their own, which
`--engines` makes; faults of pairing are planted in recorded numbers. Nothing is declared: both
sides' fingerprints are taken away but for the dtype. A cell (fault, strength, model, seed) that has
been measured is not measured again.

Cells are cut in two halves by the sum of their places in the lists of strengths, models and seeds:
detectors are tuned on the even half and reported on the odd one. `--write` writes
docs/known-issues.md from what DIR holds. `--calibration` adds the clean runs that levels were set
on, each cut into disjoint blocks, to those in which nothing may be named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import known_faults  # noqa: E402
from benchmarks.calibration import model_of, plugin, prompts_of  # noqa: E402
from benchmarks.fault_blocks import BLOCK, measured, of_prompts  # noqa: E402
from benchmarks.known_faults import FAULTS, Fault  # noqa: E402
from mismatch.analysis.diagnosis.case import Case  # noqa: E402
from mismatch.analysis.diagnosis.detector import detectors  # noqa: E402
from mismatch.analysis.diagnosis.detectors.displacement import tellable  # noqa: E402
from mismatch.analysis.diagnosis.ranking import Causes, diagnose  # noqa: E402
from mismatch.analysis.plugins import RunArtefacts  # noqa: E402
from mismatch.types import Rollout, Scoring  # noqa: E402

PAGE = ROOT / "docs" / "known-issues.md"
MARK = "<!-- measured -->"
MODELS = ("gpt-oss", "llama", "mixtral")  # that faults are planted in, by their clean runs
SEEDS = 2  # blocks of 64 prompts of a clean run
PLACES = {
    "recorded": "in the numbers of a run of vLLM and FSDP2",
    "trainer": "in the model that FSDP2 loaded",
    "weights": "in the weights that FSDP2 loaded, both dtypes: the engine's are older",
    "packing": "in the packing of FSDP2's pass",
    "template": "in the prompts that FSDP2 scored",
    "engine": "in the engine (vLLM; SGLang where named)",
}


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
    EngineFault("window-16", (), ("sliding-window", "onset", "grows-with-position",
                "function-differs"), "", ("--engine-arg", 'hf_overrides={"sliding_window": 16}')),
    EngineFault("yarn-factor", ("PrimeIntellect-ai/prime-rl#2802",),
                ("yarn-attention-factor", "function-differs", "first-token"), "yarn-factor:1"),
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
                ("attention-sinks", "function-differs", "first-token"), "",
                ("--attention", "no-sinks"), "trainer"),
    EngineFault("raw-and-fp8-kv", (), ("temperature-semantics",), "", RAW + FP8_KV,
                second=("fp8-kv", *DIFFERS), half="tuning"),
    EngineFault("sglang-no-sinks", ("volcengine/verl#3794",),
                ("attention-sinks", "function-differs", "first-token"), "",
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


# ---------------------------------------------------------------- runs


def check(home: Path, name: str, model: str, flags: tuple[str, ...], plant: str = "") -> Path:
    """The run directory of one check, made if it is not there."""
    place = home / "runs" / name
    if (place / "report.json").is_file():
        return place
    env = dict(os.environ)
    if plant:
        paths = [str(plugin(home)), str(ROOT), env.get("PYTHONPATH", "")]
        env |= {"PLANTED_FAULT": plant, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "mismatch", "check", "--model", model, *SMALL, *flags]
    print(" ".join(command), flush=True)
    log = home / f"{name}.log"
    with log.open("w") as file:
        subprocess.run([*command, "--out", str(place)], env=env, stdout=file, stderr=file,
                       check=False)  # fmt: skip
    return place


def clean_runs(home: Path, make: bool) -> dict[str, Path]:
    """Name -> run directory of those that are there; missing ones are made where asked."""
    places = {}
    for name, (model, flags) in CLEAN.items():
        place = home / "runs" / f"clean-{name}"
        if make and not (place / "report.json").is_file():
            held: Any = argparse.Namespace(model=model)
            if model != "tiny-gpt-oss":  # its tokenizer has no chat template
                flags = (*flags, "--prompts", str(prompts_of(home, int(flags[1]))))
            check(home, f"clean-{name}", model_of(held, home, None), flags)
        if (place / "report.json").is_file():
            places[name] = place
    return places


def calibration_runs(place: Path) -> dict[str, Path]:
    """Clean runs of benchmarks/calibration.py that are complete."""
    found = {f"calibration {p.name}": p for p in sorted(place.iterdir())
             if (p / "scores" / "fsdp.parquet").is_file()}  # fmt: skip
    return {name: p for name, p in found.items() if not p.name.startswith("fault-")}


def blocks(run: RunArtefacts, drawn: int = 0) -> list[RunArtefacts]:
    """Disjoint blocks of 64 prompts, then drawn ones; the whole where it is no longer."""
    prompts = np.unique(run.rollout.prompt_index)
    order = np.random.default_rng(0)
    shuffled = order.permutation(prompts)
    apart = [shuffled[i : i + BLOCK] for i in range(0, len(prompts) - BLOCK + 1, BLOCK)]
    several = drawn if len(prompts) > BLOCK else 0
    taken = [order.choice(prompts, BLOCK, replace=False) for _ in range(several)]
    return [of_prompts(run, block) for block in [*(apart or [prompts]), *taken]]


# ---------------------------------------------------------------- what the detectors say


def undeclared(run: RunArtefacts) -> Case:
    """The case of a run with nothing stated by either side but its dtype.

    The trainer's log-probabilities at T = 1 stay: they are measured, not declared.
    """
    others = {
        name: _bare(scoring)
        for name, scoring in run.usable.items()
        if name not in (run.decode.name, run.train.name)
    }
    return Case.of(run.rollout, _bare(run.decode), _bare(run.train), others)


def _bare(scoring: Scoring) -> Scoring:
    kept = ("dtype", "device", "mode")
    facts = {key: value for key, value in scoring.fingerprint.items() if key in kept}
    raw = {key: value for key, value in scoring.extra.items() if key == "logprobs_untempered"}
    return replace(scoring, fingerprint=facts, extra=raw)


def judged(case: Case) -> Causes:
    """Every cause; a detector that raised ends the benchmark."""
    found = diagnose(case, detectors())
    assert not found.failures, found.failures
    return found


def cell(fault: Any, strength: float, model: str, seed: int, half: str, case: Case) -> dict:
    """What was planted and what was named."""
    ranked = judged(case).ranked
    named = [cause.id for cause in ranked]
    lead = ranked[0] if ranked else None
    expected = set(fault.expected)
    if not tellable(case):  # then this is all that can be said of one side
        expected.add("side-off")
    return {
        "fault": fault.name,
        "strength": strength,
        "model": model,
        "seed": seed,
        "half": half,
        "mean": float(np.abs(case.delta).mean()),
        "named": named,
        "side": lead.side if lead else "",
        "alike": list(lead.alike) if lead else [],
        "first": bool(lead and lead.id in expected),
        "right side": None if not fault.side else bool(lead and lead.side == fault.side),
    }


def half_of(*places: int) -> str:
    """Which half a cell belongs to, by its places in the lists."""
    return "reported" if sum(places) % 2 else "tuning"


# ---------------------------------------------------------------- faults of a trainer


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
        from mismatch.training.score import prepare_pass, score_pass

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
                made = score_pass(self.world, loaded, rollout, Pass(name, spec))
        else:
            made = score_pass(self.world, loaded, rollout, Pass(name, spec))
        assert made is not None
        return replace(made, routing=None)


def here(model: str, home: Path) -> str:
    """The model's place on this machine; a recorded run may name another checkout's, or a family
    that is written with the same random weights."""
    from mismatch.models import resolve_model

    if Path(model).is_dir():
        return model
    held: Any = argparse.Namespace(model=Path(model).name)
    return resolve_model(model_of(held, home, None))


def without(rollout: Rollout, count: int) -> Rollout:
    """The same actions after prompts that lack so many tokens of their template."""
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
    """The run with the trainer's side (and its float32 twin) scored by a model with the fault."""
    path = stored(home, key)
    names = ["fsdp", *(["reference:fp32"] if fault.place == "weights" else [])]
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        arrays = {}
        for name in names:
            mine = spec if name == "fsdp" else replace(spec, dtype="fp32", attention="eager")
            assert trainer is not None
            made = trainer.score(run, mine, name, fault, strength)
            arrays[name], arrays[f"{name} H"] = made.logprobs, made.entropy
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


# ---------------------------------------------------------------- cells


def stored(home: Path, key: str) -> Path:
    """Where the scores of a fault of a trainer are kept."""
    return home / "scores" / f"{key.replace('/', '-')}.npz"


def planted(home: Path, runs: dict[str, Path], done: set[str], make: bool) -> Iterator[dict]:
    """Faults of recorded numbers and of a trainer, on blocks of clean runs."""
    trainer: Trainer | None = None
    for m, model in enumerate(name for name in MODELS if name in runs):
        whole, spec = measured(runs[model])
        held = blocks(whole)
        for s in (1, 2, 0):  # every fault once before any is repeated
            for fault in FAULTS:
                strength = fault.strengths[s]
                for seed in range(min(SEEDS, len(held))):
                    key = f"{fault.name}/{s}/{model}/{seed}"
                    if key in done or (fault.models and model not in fault.models):
                        continue
                    if fault.place != "recorded" and seed:  # a pass each: models split them
                        continue
                    if fault.place != "recorded" and not (make or stored(home, key).is_file()):
                        continue
                    run = held[(2 * s + seed) % len(held)]
                    if fault.place == "recorded":
                        rng = np.random.default_rng([s, m, seed])
                        case = fault.plant(undeclared(run), strength, rng)
                    else:
                        if trainer is None and not stored(home, key).is_file():
                            trainer = Trainer(home)
                        case = undeclared(
                            with_fault(home, trainer, run, spec.train, fault, strength, key)
                        )
                    yield {"key": key} | cell(
                        fault, strength, model, seed, half_of(s, m, seed), case
                    )


def engine_cells(home: Path, done: set[str]) -> Iterator[dict]:
    """Faults of an engine: each run of its own that is there."""
    for n, fault in enumerate(ENGINES):
        place = home / "runs" / fault.name
        if fault.name in done or not (place / "report.json").is_file():
            continue
        run, _ = measured(place)
        run = blocks(run)[0]
        neutral = replace(run.rollout.sampling, top_k=0, top_p=1.0)
        run = replace(run, rollout=replace(run.rollout, sampling=neutral))
        found = cell(fault, 0.0, "gpt-oss", n, fault.half or half_of(n), undeclared(run))
        if fault.second:
            found["pair"] = bool(
                set(found["named"][:3]) & set(fault.expected)
                and set(found["named"][:3]) & set(fault.second)
            )
        yield {"key": fault.name, "engine": True} | found


def clean_cells(runs: dict[str, Path], done: set[str], drawn: int) -> Iterator[dict]:
    """Clean blocks, disjoint and drawn: nothing may be named."""
    for name, place in runs.items():
        if f"clean/{name}" in done:
            continue
        run, _ = measured(place)
        alarms, whole = [], blocks(run, drawn)
        for block in whole:
            others = {n: s for n, s in block.usable.items()
                      if n not in (block.decode.name, block.train.name)}  # fmt: skip
            full = Case.of(block.rollout, block.decode, block.train, others)
            for case in (undeclared(block), full):
                alarms += [cause.id for cause in judged(case).ranked]
        apart = len(blocks(run))
        yield {"key": f"clean/{name}", "clean": name, "blocks": [apart, len(whole) - apart],
               "alarms": alarms, "dtype": run.decode.fingerprint["dtype"],
               "engine": run.decode.name.partition(":")[0]}  # fmt: skip


PAIRS = (
    ("shift", "weights not refitted"),
    ("appended end at 0.0", "sinks ignored"),
    ("other rows", "weights not refitted"),
    ("appended end at 0.0", "head not carried"),
    ("shift", "sinks ignored"),
    ("turn encoded again", "weights not refitted"),
    ("end counted on one side", "other rope base"),
    ("fused cross-entropy", "experts swapped"),
)


def pair_cells(home: Path, runs: dict[str, Path], done: set[str]) -> Iterator[dict]:
    """Two faults at once: one of pairing on numbers that a second one has changed already."""
    by_name = {fault.name: fault for fault in FAULTS}
    whole, spec = measured(runs["gpt-oss"])
    held = blocks(whole)
    for n, (first, second) in enumerate(PAIRS):
        one, other = by_name[first], by_name[second]
        for s in (0, 1, 2):
            key = f"{other.name}/{s}/gpt-oss/0"
            if f"pair/{n}/{s}" in done or not stored(home, key).is_file():
                continue
            run = held[(2 * s) % len(held)]
            # The scoring is there already: no trainer is started.
            run = with_fault(home, None, run, spec.train, other, other.strengths[s], key)
            rng = np.random.default_rng(n)
            case = one.plant(undeclared(run), one.strengths[s], rng)
            named = [cause.id for cause in judged(case).ranked]
            both = set(named[:3]) & set(one.expected) and set(named[:3]) & set(other.expected)
            yield {"key": f"pair/{n}/{s}", "faults": [first, second], "named": named,
                   "half": half_of(n, s), "pair": bool(both)}  # fmt: skip


# ---------------------------------------------------------------- page


def share(cells: list[dict], what: str) -> str:
    """ "9 of 10 (90 %)" of the cells where it applies."""
    values = [one[what] for one in cells if one.get(what) is not None]
    return f"{sum(values)} of {len(values)} ({sum(values) / len(values):.0%})" if values else "–"


def link(issue: str) -> str:
    """A Markdown link of owner/repo#number."""
    repository, _, number = issue.partition("#")
    return f"[{issue}](https://github.com/{repository}/issues/{number})"


def page(cells: list[dict]) -> str:
    """The measured part of the page."""
    faults = [one for one in cells if "fault" in one]
    clean = [one for one in cells if "clean" in one]
    pairs = [one for one in cells if "pair" in one]
    lines = [
        f"Measured {date.today().isoformat()} on a CPU.", "",
        "| | named first | right side | pairs in the first three |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for half in ("tuning", "reported"):
        mine = [one for one in faults if one["half"] == half]
        two = [one for one in pairs if one["half"] == half]
        lines.append(f"| {half} half | {share(mine, 'first')} | {share(mine, 'right side')} | "
                     f"{share(two, 'pair')} |")  # fmt: skip
    apart, drawn = (sum(one["blocks"][n] for one in clean) for n in (0, 1))
    alarms = sum(len(one["alarms"]) for one in clean)
    where = ", ".join(f"{one['clean']} ({one['engine']}, {one['dtype']})" for one in clean)
    lines += ["", f"Clean blocks of {BLOCK} prompts: {apart} disjoint, {drawn} drawn from the same "
              f"runs, each with and without what the sides state; {alarms} false alarms. "
              f"Runs: {where}.", "",
              "| planted | issues | where | expected | reported: first | side | "
              "tuning: first | named instead |", "| --- " * 8 + "|"]  # fmt: skip
    for fault in (*FAULTS, *ENGINES):
        mine = [one for one in faults if one["fault"] == fault.name]
        halves = {h: [one for one in mine if one["half"] == h] for h in ("reported", "tuning")}
        instead = sorted({(one["named"] or ["nothing"])[0] for one in mine if not one["first"]})
        place = PLACES[getattr(fault, "place", "engine")]
        issues = ", ".join(map(link, fault.issues)) or "–"
        lines.append(
            f"| {fault.name} | {issues} | {place} | {', '.join(fault.expected)} | "
            f"{share(halves['reported'], 'first')} | {share(halves['reported'], 'right side')} | "
            f"{share(halves['tuning'], 'first')} | {', '.join(instead) or '–'} |"
        )
    lines += ["", "| two at once | strength | named | both in the first three |",
              "| --- | --- | --- | --- |"]  # fmt: skip
    for one in pairs:
        names = " and ".join(one.get("faults", [one.get("fault", "")]))
        strong = one["key"].rpartition("/")[2] if "faults" in one else "–"
        yes = "yes" if one["pair"] else "no"
        lines.append(f"| {names} | {strong} | {', '.join(one['named'][:3]) or 'nothing'} | {yes} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engines", action="store_true", help="make the runs that are missing")
    parser.add_argument("--drawn", type=int, default=24, help="blocks drawn from each clean run")
    parser.add_argument("--calibration", type=Path, help="clean runs of benchmarks/calibration.py")
    parser.add_argument("--again", action="store_true", help="judge all cells again")
    parser.add_argument("--stored", action="store_true", help="score nothing anew")
    parser.add_argument("--write", action="store_true", help="write docs/known-issues.md")
    options = parser.parse_args()
    home = options.directory
    (home / "runs").mkdir(parents=True, exist_ok=True)
    results = home / "cells.jsonl"
    if options.again:
        results.unlink(missing_ok=True)
    cells = [json.loads(line) for line in results.open()] if results.is_file() else []
    done = {one["key"] for one in cells}
    runs = clean_runs(home, options.engines)
    clean = runs | (calibration_runs(options.calibration) if options.calibration else {})
    if options.engines:
        for fault in ENGINES:
            flags = ("--num-prompts", str(BLOCK), *fault.flags)
            check(home, fault.name, "tiny-gpt-oss", flags, fault.plant)
    for source in (
        engine_cells(home, done),
        clean_cells(clean, done, options.drawn),
        planted(home, runs, done, not options.stored),
        pair_cells(home, runs, done),
    ):
        for found in source:
            cells.append(found)
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    if options.write:
        head = PAGE.read_text().partition(MARK)[0] + MARK + "\n\n"
        PAGE.write_text(head + page(cells))


if __name__ == "__main__":
    main()
