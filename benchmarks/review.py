"""Faults that a reader of the verdict planted: each ends with an exit code, a side and a cause.

    python benchmarks/review.py DIR [--faults NAME …]

The thirty faults move numbers but are small, rare, of rounding, of decoding or of the sampler: the
kinds that passed once. Every fault is one `mismatch check` of tiny-gpt-oss, as a user types it. One
of the trainer (planted in memory, in the training world) scores the clean check's own tokens again;
one of the engine is planted in vLLM. A check whose report is in DIR is not run again, so the
command goes on where it was stopped; docs/evidence/review.json and the page next to it are written
after each fault. `--write` runs nothing.

Goal: no exit code 0 but where REASONS says why. One to two minutes for each fault on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.calibration import plugin  # noqa: E402
from benchmarks.sides import CLEAN, forget, planted  # noqa: E402
from mismatch.models import resolve_model  # noqa: E402
from mismatch.run.store import load_rollout  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "review.json"
SMALL = ("--num-prompts", "16")
MANY = ("--num-prompts", "64")  # what a sampler does shows in many tokens
WITHOUT = ("--no-locate", "--no-explain")
# Without float32: at best inconclusive.
QUICK = ("--depth", "quick", "--no-noise-floor", "--context-length", "0")
REASONS = {
    "t-0.95": "chance alone moves the mean of 15,000 tokens as far (2 standard errors); the check "
    "says from which temperature on it would see a sampler",
}
_DECODED = (
    "open: over a tenth of the tokens differ, so that the rule for equal bits does not apply; "
    "without --depth quick not run"
)
OPEN = {"decoded-small": _DECODED, "head-off": _DECODED}
HEAD = """# Faults that a reader planted

{n} faults of the kinds that passed once: of rounding, of decoding, of rare inputs, of the sampler,
and of functions that differ little. Each is one `mismatch check` of tiny-gpt-oss (vLLM, CPU; 16
prompts × 4 samples; of the sampler 64 × 4, as of what decodes with `--depth quick`, whose exit code
is 1 from UNFIT on). Made by `benchmarks/review.py`, {date}; its JSON has the commands.

{passed} of {done} end with exit code 0. {sides} of {blamed} with a side blame the right one, or
either side.

| fault | side | verdict, exit code | failed | cause, side |
| --- | --- | --- | --- | --- |"""
END = """
**Next:** [planted faults on each side](sides.md).
"""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: in words.
        side: that has it.
        plant: of benchmarks/planted_sides.py (trainer), or NAME:STRENGTH of planted_fault.py
            (engine); "": the flags are the fault.
        flags: of the check.
        env: of its processes.
        tokens: how many sequences the token is in that PLANTED_IDS names; 0: none is named.
        size: flags that say how large the check is.
        locate: whether modules are compared: it decides of what only rounds.
    """

    what: str
    side: str
    plant: str = ""
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    tokens: int = 0
    size: tuple[str, ...] = SMALL
    locate: bool = False


def decoded(rows: int, steps: int, nats: str) -> Fault:
    words = f"{steps} decoded tokens of each of {rows} prompts off by {nats} nats"
    env = (("DECODED", f"{rows}:{steps}:{nats}"),)
    return Fault(words, "engine", "decoded-rows:8", env=env, size=(*SMALL, *QUICK))


def own(name: str, words: str) -> Fault:
    return Fault(words, "trainer", flags=("--attention", f"benchmarks.planted_attention:{name}"))


def of_trainer(plant: str, words: str, **rest: Any) -> Fault:
    return Fault(words, "trainer", plant, **rest)


def sampler(plant: str, words: str) -> Fault:
    return Fault(words, "engine", plant, size=(*MANY, *QUICK))


FAULTS = {
    "final-norm": of_trainer("final-norm-rounds", "final norm without its upcast", locate=True),
    "all-norms": of_trainer("norms-round", "all norms without their upcast", locate=True),
    "rare-row-1": of_trainer("rare-rows-1.3", "embedding of a token in 1 sequence × 1.3", tokens=1),
    "rare-row-4": of_trainer(
        "rare-rows-1.3", "embedding of a token in 4 sequences × 1.3", tokens=4
    ),
    "every-12th": of_trainer("every-12th-from-200", "every 12th position from 200 on is wrong"),
    "every-16th": of_trainer("every-16th-from-200", "every 16th position from 200 on is wrong"),
    "sink-turned": own("sink_turned", "own attention: the sink of one head with the other sign"),
    "heads-tiled": own("heads_tiled", "own attention: key heads tiled, not repeated"),
    "drops": own("drops", "own attention: dropout of 0.01 on its weights"),
    "late": of_trainer("positions-one-late", "positions from 80 on are one late"),
    "padded-rows": of_trainer("64-padded-rows", "softmax over 64 padded rows"),
    "logits-0.99": of_trainer("logits-over-0.99", "logits / 0.99"),
    "logits-unit": of_trainer("logits-in-another-unit", "logits rounded to bf16 at another scale"),
    "capacity": of_trainer("capacity-2", "expert capacity of 2, the rest dropped"),
    "dropout": of_trainer("dropout-on-rank-1", "dropout of 0.02 on one rank of two"),
    "swiglu": of_trainer("swiglu-1.7", "constant of SwiGLU 1.7 for 1.702"),
    "shard": of_trainer("shard-a-step-behind", "one rank's part of a layer is a step behind"),
    "t-0.9": sampler("sampler-temperature:0.9", "tokens drawn at T = 0.9"),
    "t-0.95": sampler("sampler-temperature:0.95", "tokens drawn at T = 0.95"),
    "no-end": sampler("late-end:30", "no end token is drawn"),
    "top-k": sampler("sampler-top-k:8", "top-k of 8, not declared"),
    "top-p": sampler("sampler-top-p:0.97", "top-p of 0.97, not declared"),
    "penalty": sampler("repetition-penalty:1.1", "repetition penalty of 1.1, not declared"),
    "prefix": sampler("forced-prefix:3", "three tokens forced in front of each response"),
    "decoded-3": decoded(3, 1, "1"),
    "decoded-9": decoded(9, 10, "0.3"),
    "decoded-small": decoded(5, 60, "0.03"),
    "head-off": Fault(
        "a head gives nothing at each 32nd decoded position", "engine", "head-off:32",
        size=(*SMALL, *QUICK),
    ),
    "weights": Fault(
        "weights of a layer change in the engine's memory", "engine", "layer-noise:0.003"
    ),
    "two-faults": Fault(
        "one value of a norm off by a bit, and sinks left out", "trainer",
        flags=("--attention", "no-sinks", "--train-model", "OTHER"), locate=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a check said of one fault."""

    fault: str
    verdict: str
    exit_code: int
    failed: tuple[str, ...]
    cause: str
    side: str
    said: str
    command: str
    made: str

    @property
    def right_side(self) -> bool:
        return self.side in (FAULTS[self.fault].side, "either")


def other_model(home: Path) -> Path:
    """Return a copy of the model in which one value of the last norm is a bit larger."""
    from safetensors.torch import load_file, save_file

    other = home / "other"
    if not other.is_dir():
        shutil.copytree(resolve_model("tiny-gpt-oss"), other)
        (file,) = other.glob("*.safetensors")
        held = load_file(file)
        held["model.norm.weight"][0] *= 1 + 2**-7
        save_file(held, file, {"format": "pt"})
    return other


def in_sequences(run_dir: Path, count: int) -> str:
    """Return an id that occurs in so many sequences of a run."""
    rollout = load_rollout(run_dir)
    bounds = zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True)
    of = Counter(token for a, b in bounds for token in {*rollout.token_ids[a:b].tolist()})
    return str(min(token for token, sequences in of.items() if sequences == count))


def run(name: str, home: Path) -> Row:
    """Run a check with a fault, if it is not there, and read it."""
    target, log = home / name, home / f"{name}.log"
    fault = FAULTS.get(name, Fault("nothing", ""))
    flags = [str(other_model(home)) if flag == "OTHER" else flag for flag in fault.flags]
    flags += [*fault.size, *(() if fault.locate else WITHOUT)]
    command = ["check", "--model", "tiny-gpt-oss", *flags, "--out", str(target)]
    resumed = fault.side == "trainer" and bool(fault.plant)
    if resumed:
        command = ["check", "--resume", str(target), "--trust-run", *flags[len(SMALL) :]]
    if not log.is_file() or "\nexit code " not in log.read_text():
        shutil.rmtree(target, ignore_errors=True)
        paths, env = [str(ROOT)], os.environ | {"OMP_NUM_THREADS": "1"} | dict(fault.env)
        if resumed:
            shutil.copytree(home / CLEAN, target)
            forget(target, ("vllm", "transformers", "reference", "plain"))
            paths.insert(0, str(planted(home)))
            env["PLANTED_SIDE"] = f"{fault.plant}@trainer"
        elif fault.plant:
            paths.insert(0, str(plugin(home)))
            env["PLANTED_FAULT"] = fault.plant
        if fault.tokens:
            env["PLANTED_IDS"] = in_sequences(home / CLEAN, fault.tokens)
        env["PYTHONPATH"] = os.pathsep.join(paths)
        whole = [sys.executable, "-m", "mismatch", *command]
        done = subprocess.run(whole, env=env, capture_output=True, text=True, check=False)
        log.write_text(f"{done.stdout}{done.stderr}\nexit code {done.returncode}\n")
    text = log.read_text()
    code = int(text.rsplit("\nexit code ", 1)[1])
    said = f"PLANTED {fault.plant}: " * bool(fault.plant) + "mismatch " + " ".join(command)
    said = said.replace(str(home), "DIR")
    made = date.fromtimestamp(log.stat().st_mtime).isoformat()
    if not (target / "report.json").is_file():
        refused = next((line for line in text.splitlines() if "error:" in line), "")
        return Row(name, "refused", code, (), "", fault.side, refused[:300], said, made)
    report: dict[str, Any] = json.loads((target / "report.json").read_text())
    ranked = (report.get("causes") or {}).get("ranked") or [{"id": "", "side": ""}]
    failed = tuple(check["id"] for check in report["checks"] if check["status"] == "failed")
    reason = report["verdict"]["reason"]
    return Row(name, report["verdict"]["status"], code, failed, ranked[0]["id"],
               ranked[0]["side"] or (report.get("headline") or {}).get("side_at_fault") or "",
               reason, said, made)  # fmt: skip


def page(rows: list[Row], made: str) -> str:
    """Write the table."""
    blamed = [row for row in rows if row.side]
    numbers = {
        "n": len(FAULTS),
        "done": len(rows),
        "passed": sum(not row.exit_code for row in rows),
        "sides": sum(row.right_side for row in blamed),
        "blamed": len(blamed),
    }
    lines = [HEAD.format(date=made, **numbers)]
    for row in rows:
        failed = ", ".join(f"`{each}`" for each in row.failed) or "–"
        cause = f"`{row.cause}`, {row.side}" if row.cause else row.side or "–"
        fault = FAULTS[row.fault]
        lines.append(
            f"| {fault.what} | {fault.side} | {row.verdict.upper()}, {row.exit_code} | {failed} | "
            f"{cause} |"
        )
    missing = [FAULTS[name].what for name in FAULTS if name not in {row.fault for row in rows}]
    told = REASONS | OPEN
    notes = [f"- {FAULTS[row.fault].what}: {told[row.fault]}" for row in rows
             if not row.exit_code and row.fault in told]  # fmt: skip
    if missing:
        notes.append(f"- Not run on this date: {'; '.join(missing)}.")
    return "\n".join([*lines, *[""] * bool(notes), *notes]) + "\n" + END


def write(new: list[Row]) -> list[Row]:
    """Put rows into review.json, write the page, and return all rows."""
    held = json.loads(STATE.read_text())["rows"] if STATE.is_file() else []
    rows = {row["fault"]: Row(**row | {"failed": tuple(row["failed"])}) for row in held}
    rows |= {row.fault: row for row in new}
    ordered = [rows[name] for name in FAULTS if name in rows]
    made = max((row.made for row in ordered), default=date.today().isoformat())
    state = {"date": made, "rows": [asdict(row) for row in ordered]}
    STATE.write_text(json.dumps(state, indent=1) + "\n")
    STATE.with_suffix(".md").write_text(page(ordered, made))
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--write", action="store_true", help="only read what is in DIR")
    asked = parser.parse_args()
    asked.home.mkdir(parents=True, exist_ok=True)
    rows = write([])
    for name in () if asked.write else (CLEAN, *asked.faults):
        row = run(name, asked.home)
        print(f"{name}: {row.verdict}, exit {row.exit_code}, {row.cause} {row.side}", flush=True)
        rows = write([row] if name in FAULTS else [])
    return int(any(not row.exit_code and row.fault not in REASONS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
