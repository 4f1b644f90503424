"""Known issues of the field, planted: is the cause named first, and the side right?

    python benchmarks/known_issues.py DIR [--engines] [--calibration DIR] [--write]

Clean runs of `mismatch check` (vLLM or transformers against FSDP2) lie in DIR/runs/clean-*; those
that are missing are made. Faults of a trainer are planted in the model that FSDP2 has loaded (a
world of one rank) and score the tokens that the engine sampled in a clean run; faults of an engine
are planted in vLLM (benchmarks/planted_fault.py, or a setting) in separate runs, which
`--engines` makes; faults of pairing are planted in recorded numbers. Nothing is declared: both
sides' fingerprints are taken away but for the dtype. A cell (fault, strength, model, seed) that has
been measured is not measured again.

Cells are cut in two halves by the sum of their places in the lists of strengths, models and seeds:
detectors are tuned on the even half and reported on the odd one. `--write` writes
docs/evidence/known-issues.md from what DIR holds. `--calibration` adds the clean runs that levels
were set on, each cut into disjoint blocks, to those in which nothing may be named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


from benchmarks.fault_blocks import BLOCK, measured  # noqa: E402
from benchmarks.known_faults import FAULTS  # noqa: E402
from benchmarks.known_issue_page import MARK, PAGE, page  # noqa: E402
from benchmarks.known_issue_runs import (  # noqa: E402
    ENGINES,
    Trainer,
    blocks,
    calibration_runs,
    check,
    clean_runs,
    stored,
    undeclared,
    with_fault,
)
from mismatch.analysis.cause_results import Causes  # noqa: E402
from mismatch.analysis.diagnosis.case import Case  # noqa: E402
from mismatch.analysis.diagnosis.detector import detectors  # noqa: E402
from mismatch.analysis.diagnosis.ranking import diagnose  # noqa: E402

MODELS = ("gpt-oss", "llama", "mixtral")  # that faults are planted in, by their clean runs
GENERIC = {"function-differs", "weights-differ", "side-off"}  # kinds: no cause is named
SEEDS = 2  # blocks of 64 prompts of a clean run


def judged(case: Case) -> Causes:
    """Every cause; a detector that raised ends the benchmark."""
    causes = diagnose(case, detectors())
    assert not causes.failures, causes.failures
    return causes


def cell(
    fault: Any, strength: float, model: str, seed: int, half: str, case: Case
) -> dict[str, Any]:
    """Return what was planted and what was named."""
    ranked = judged(case).ranked
    named = [cause.id for cause in ranked]
    lead = ranked[0] if ranked else None
    expected = {*fault.expected, *(("side-off",) if GENERIC & set(fault.expected) else ())}
    # The reference holds the trainer's weights: which side's are the checkpoint's cannot be told.
    sides = (fault.side, "either") if getattr(fault, "place", "") == "weights" else (fault.side,)
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
        "exact": bool(lead and lead.id in set(fault.expected) - GENERIC),
        "right side": None if not fault.side else bool(lead and lead.side in sides),
    }


def half_of(*places: int) -> str:
    """Which half a cell belongs to, by its places in the lists."""
    return "reported" if sum(places) % 2 else "tuning"


def planted(
    home: Path, runs: dict[str, Path], done: set[str], make: bool
) -> Iterator[dict[str, Any]]:
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


def engine_cells(home: Path, done: set[str]) -> Iterator[dict[str, Any]]:
    """Faults of an engine: each separate run that is there."""
    for n, fault in enumerate(ENGINES):
        run_dir = home / "runs" / fault.name
        if fault.name in done or not (run_dir / "report.json").is_file():
            continue
        run, _ = measured(run_dir)
        run = blocks(run)[0]
        neutral = replace(run.rollout.sampling, top_k=0, top_p=1.0)
        run = replace(run, rollout=replace(run.rollout, sampling=neutral))
        judged_cell = cell(fault, 0.0, "gpt-oss", n, fault.half or half_of(n), undeclared(run))
        if fault.second:
            judged_cell["pair"] = bool(
                set(judged_cell["named"][:3]) & set(fault.expected)
                and set(judged_cell["named"][:3]) & set(fault.second)
            )
        yield {"key": fault.name, "engine": True} | judged_cell


def clean_cells(runs: dict[str, Path], done: set[str], drawn: int) -> Iterator[dict[str, Any]]:
    """Clean blocks, disjoint and drawn: nothing may be named."""
    for name, run_dir in runs.items():
        if f"clean/{name}" in done:
            continue
        run, _ = measured(run_dir)
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


def pair_cells(home: Path, runs: dict[str, Path], done: set[str]) -> Iterator[dict[str, Any]]:
    """Two faults at once: one of pairing on numbers that a second one has changed already."""
    by_name = {fault.name: fault for fault in FAULTS}
    whole, spec = measured(runs["gpt-oss"])
    held = blocks(whole)
    for n, (first, second) in enumerate(PAIRS):
        pairing, other = by_name[first], by_name[second]
        for s in (0, 1, 2):
            key = f"{other.name}/{s}/gpt-oss/0"
            if f"pair/{n}/{s}" in done or not stored(home, key).is_file():
                continue
            run = held[(2 * s) % len(held)]
            # The scoring is there already: no trainer is started.
            run = with_fault(home, None, run, spec.train, other, other.strengths[s], key)
            rng = np.random.default_rng(n)
            case = pairing.plant(undeclared(run), pairing.strengths[s], rng)
            named = [cause.id for cause in judged(case).ranked]
            both = set(named[:3]) & set(pairing.expected) and set(named[:3]) & set(other.expected)
            yield {"key": f"pair/{n}/{s}", "faults": [first, second], "named": named,
                   "half": half_of(n, s), "pair": bool(both)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engines", action="store_true", help="make the runs that are missing")
    parser.add_argument("--drawn", type=int, default=24, help="blocks drawn from each clean run")
    parser.add_argument("--calibration", type=Path, help="clean runs of benchmarks/calibration.py")
    parser.add_argument("--again", action="store_true", help="judge all cells again")
    parser.add_argument("--stored", action="store_true", help="score nothing anew")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/known-issues.md")
    options = parser.parse_args()
    home = options.directory
    (home / "runs").mkdir(parents=True, exist_ok=True)
    results = home / "cells.jsonl"
    if options.again:
        results.unlink(missing_ok=True)
    cells = [json.loads(line) for line in results.open()] if results.is_file() else []
    done = {cell["key"] for cell in cells}
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
        for cell in source:
            cells.append(cell)
            with results.open("a") as file:
                file.write(json.dumps(cell) + "\n")
            print(json.dumps(cell), flush=True)
    if options.write:
        head = PAGE.read_text().partition(MARK)[0] + MARK + "\n\n"
        PAGE.write_text(head + page(cells))


if __name__ == "__main__":
    main()
