"""The tables of docs/evidence/gpu-results.md, from the proofs in docs/evidence/gpu-proofs.

    python tools/gpu_page.py              print the tables
    python tools/gpu_page.py proof.json   check a proof that was sent, and take it in

A proof is what `make test-gpu` leaves. There is one of each card; a newer one replaces it. The
packages of the newest run whose main command was HEALTHY become constraints/cuda.txt, which `make`
installs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_proof import SCHEMA, STEPS  # noqa: E402
from mismatch.doctor.machine import Gpu, kind_of  # noqa: E402
from tools.site_pages import escaped, table  # noqa: E402

PROOFS = ROOT / "docs" / "evidence" / "gpu-proofs"
STATES = ("passed", "failed", "unfinished", "left out")
CONSTRAINTS = ROOT / "constraints" / "cuda.txt"
# What these steps cannot have passed without.
VERDICTS = {"A": "healthy", "B": "broken"}
PRIVATE = re.compile(r"(?:/home|/root|/Users|/mnt|/data)/[^\s\"]+")
GIB = 1 << 30
METRICS = ("logprob_abs_diff_mean", "k3_kl", "clip_fraction")


class Unfit(ValueError):
    """Why a file is no proof."""


@dataclass(frozen=True)
class Proof:
    """A proof that was checked.

    Attributes:
        card: count and kind, as `--gpus` takes them: "H100-80GB", "8xH100-80GB".
    """

    card: str
    document: dict[str, Any]

    @property
    def file(self) -> str:
        return f"{self.document['date']}-{self.card.lower()}.json"

    @property
    def steps(self) -> dict[str, dict[str, Any]]:
        steps: dict[str, dict[str, Any]] = self.document["steps"]
        return steps


@dataclass(frozen=True)
class Measured:
    """One number of a step next to the plan's; None: the plan has none."""

    what: str
    value: float
    planned: float | None


def read(path: Path) -> Proof:
    """Return the proof of a file.

    Raises:
        Unfit: it is none, or was not made on a GPU, or does not hold what its states claim.
    """
    text = path.read_text("utf-8")
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise Unfit(f"{path.name}: {document['schema']}, not {SCHEMA}")
        if document["rehearsal"] or not document["machine"]["gpus"]:
            raise Unfit(f"{path.name}: a rehearsal, or no GPU")
        date.fromisoformat(document["date"])
        card = card_of(document["machine"]["gpus"])
        faults = [*faults_of(document, text)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Unfit):
            raise
        raise Unfit(f"{path.name}: {type(error).__name__}: {error}") from error
    if faults:
        raise Unfit(f"{path.name}: {'; '.join(faults)}")
    return Proof(card, document)


def faults_of(document: dict[str, Any], text: str) -> Iterator[str]:
    """Yield what is wrong with the content of a proof."""
    if not re.fullmatch("[0-9a-f]{40}", str(document["commit"])):
        yield "no commit"
    if found := PRIVATE.search(text):
        yield f"a path of the machine: {found[0]}"
    if not document["steps"]:
        yield "no step"
    for name, step in document["steps"].items():
        if name not in STEPS or step["state"] not in STATES:
            yield f"step {name} is unknown, or its state: {step['state']}"
        elif step["state"] == "passed":
            verdict = step["numbers"].get("verdict")
            if verdict != VERDICTS.get(name, verdict):
                yield f"step {name} passed with the verdict {verdict}"
        if step["state"] in ("failed", "left out") and not step["reason"]:
            yield f"step {name} {step['state']} without a reason"


def card_of(gpus: list[dict[str, Any]]) -> str:
    """Return count and kind of a machine's GPUs.

    >>> card_of([{"name": "NVIDIA H100 80GB HBM3", "mib": 81559}] * 2)
    '2xH100-80GB'
    """
    first = Gpu(gpus[0]["name"], int(gpus[0]["mib"]) << 20, 0, "")
    kind = kind_of(first) or re.sub(r"[^\w.]+", "-", first.name)
    return f"{len(gpus)}x{kind}" if len(gpus) > 1 else kind


def proofs(folder: Path = PROOFS) -> list[Proof]:
    """Return the proofs of a folder, one of each card, in the order of the cards' names.

    Raises:
        Unfit: a file is no proof or has a wrong name, or two are of the same card.
    """
    found: dict[str, Proof] = {}
    for path in sorted(folder.glob("*.json")):
        proof = read(path)
        if proof.file != path.name:
            raise Unfit(f"{path.name} should be named {proof.file}")
        if proof.card in found:
            raise Unfit(f"two proofs of {proof.card}: delete {found[proof.card].file}")
        found[proof.card] = proof
    return [found[card] for card in sorted(found)]


def take_in(path: Path, folder: Path = PROOFS) -> Path:
    """Copy a checked proof into the folder in place of an older one of its card."""
    proof = read(path)
    for old in proofs(folder):
        if old.card == proof.card:
            (folder / old.file).unlink()
    target = folder / proof.file
    target.write_text(json.dumps(proof.document, indent=1) + "\n", "utf-8")
    return target


def constraints(folder: Path = PROOFS) -> str:
    """Return the packages of the newest run that proved the main command; "": none says them."""
    able = [
        proof
        for proof in proofs(folder)
        if proof.steps.get("A", {}).get("state") == "passed"
        and proof.document["machine"].get("packages")
    ]
    if not able:
        return ""
    newest = max(able, key=lambda proof: str(proof.document["date"]))
    held = {**newest.document["machine"]["packages"]}
    lines = [f"{name}=={held[name]}" for name in sorted(held, key=str.lower) if name != "mismatch"]
    return f"# Of the proof {newest.file}, by tools/gpu_page.py.\n" + "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the tables


def tables(folder: Path = PROOFS) -> str:
    """Return everything that the page takes from the proofs."""
    parts = []
    for proof in proofs(folder):
        machine = proof.document["machine"]
        held = machine["versions"]
        packages = [f"{name} {held[name]}" for name in held if name not in ("python", "triton")]
        facts = [
            f"[{proof.document['date']}](gpu-proofs/{proof.file})",
            f"driver {machine['driver']}",
            *packages,
            f"{proof.document['weights']} weights",
            f"commit {proof.document['commit'][:8]}",
        ]
        parts += [f"### {proof.card}", escaped(", ".join(facts)), steps_table(proof)]
        if rows := list(numbers_rows(proof)):
            parts.append(table(("step", "measured", "value", "plan of that commit"), rows))
    return "\n\n".join(parts)


def steps_table(proof: Proof) -> str:
    """Return a row for every step of the proof, in its order; those that did not run too."""
    rows = []
    for name, (title, expected, _, _) in STEPS.items():
        step = proof.steps.get(name, {"state": "not run", "numbers": {}})
        verdict = step["numbers"].get("verdict", "–")
        seconds = f"{step['seconds']:.0f}" if "seconds" in step else "–"
        state = step["state"]
        if state in ("failed", "left out"):
            state = f"{state}: {escaped(step['reason'])}"
        rows.append((name, title, expected, state, str(verdict), seconds))
    return table(("step", "what", "expected", "state", "verdict", "seconds"), rows)


def numbers_rows(proof: Proof) -> Iterator[tuple[str, str, str, str]]:
    """Yield what steps measured: the headline, passes of one side, gaps, times, memory."""
    for name, step in proof.steps.items():
        numbers = step["numbers"]
        compared = {"headline": numbers.get("headline") or {}, **(numbers.get("noise") or {})}
        estimates = {
            f"{metric}, {pair}": values.get(metric)
            for pair, values in compared.items()
            for metric in METRICS
        }
        estimates |= {f"excess, {side}": v for side, v in (numbers.get("excess") or {}).items()}
        for what, value in estimates.items():
            if value:
                yield name, what, f"{value[0]:.3g} [{value[1]:.3g}, {value[2]:.3g}]", "–"
        for pair, value in (numbers.get("gaps") or {}).items():
            yield name, f"float32 gap, {pair}, nats", f"{value[0]:.2g}", "–"
        for row in times_of(step):
            planned = "–" if row.planned is None else f"{row.planned:.0f}"
            yield name, f"{row.what}, seconds", f"{row.value:.0f}", planned
        planned_bytes = (step.get("plan") or {}).get("bytes", {})
        for side, peak in (numbers.get("peak_bytes") or {}).items():
            planned = f"{planned_bytes[side][0] / GIB:.1f}" if side in planned_bytes else "–"
            yield name, f"{side}, peak GiB", f"{peak / GIB:.1f}", planned


def times_of(step: dict[str, Any]) -> Iterator[Measured]:
    """Yield the seconds of a step's engines and of the trainer's passes."""
    plan: dict[str, float] = (step.get("plan") or {}).get("seconds", {})
    timings: dict[str, dict[str, float]] = step["numbers"].get("timings") or {}

    def planned(*stages: str) -> float | None:
        held = [plan[stage] for stage in stages if stage in plan]
        return sum(held) if held else None

    exact = next((name.partition(":")[0] for name in plan if " in float32:" in name), "float32")
    parts = (
        ("engine", "sampled", "engine until it had sampled", ("start", "weights", "samples")),
        ("engine", "prefill", "engine rescores", ("rescores",)),
        ("float32-engine", "ready", f"{exact} until it stood", ("start", "weights")),
        ("float32-engine", "prefill", f"{exact} scores", ("rescores",)),
    )
    for worker, timing, what, stages in parts:
        if timing in timings.get(worker, {}):
            label = "engine" if worker == "engine" else exact
            names = (f"{label}: {stage}" for stage in stages)
            yield Measured(what, timings[worker][timing], planned(*names))
    for name, seconds in timings.get("train", {}).items():
        if name in plan:
            yield Measured(name, seconds, plan[name])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("proofs", type=Path, nargs="*", help="proof.json, as make test-gpu left it")
    asked = parser.parse_args()
    try:
        for given in asked.proofs:
            print(f"taken in: {take_in(given).relative_to(ROOT)}")
        if text := constraints():
            CONSTRAINTS.write_text(text, "utf-8")
        print(tables())
    except (Unfit, OSError) as reason:
        sys.exit(str(reason))
