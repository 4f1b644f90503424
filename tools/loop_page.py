"""Write the demonstration of docs/loop.md and its figure from examples/loop/loop.json.

    python tools/loop_page.py [RUN]

RUN: a run of `mismatch loop`, finished or not, whose curves and page are taken first. Everything in
the document between the markers comes from that file: whoever goes on with the run writes it anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.cli.loop import save_page
from mismatch.codec import from_json
from mismatch.experiments.loop.history import COLUMNS, ROWS
from mismatch.experiments.loop.judge import (
    WINDOW,
    LoopReport,
    SeedRun,
    at_end,
    fired,
    loop_to_json,
    reward_fall,
    running,
)
from mismatch.experiments.loop.types import LoopSpec
from mismatch.pipeline.loop import SETTINGS, gather
from mismatch.reports.formatting import number
from mismatch.reports.markdown import show_table, table
from mismatch.reports.sections.loop import PANELS, draw, section
from mismatch.reports.svg import ACCENT, FAINT, GRID, INK, SECOND, drawing
from mismatch.run import store

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "loop"
DOCUMENT = ROOT / "docs" / "loop.md"
PICTURE = ROOT / "docs" / "images" / "loop.svg"
BEGIN = "<!-- the demonstration, written by tools/loop_page.py -->"
END = "<!-- end of the demonstration -->"
DIGITS = 5
STEPS, SEEDS = 45, (0, 1)
PLANNED = (
    *("attention-sinks", "as-is", "seq-tis", "on-policy-ratio", "router-replay"),
    "attention-sinks+fp8-kv-cache",
)
LEARNT = 0.9  # of the reward, as a mean of the last steps
COLOURS = {INK: "#222222", FAINT: "#777777", GRID: "#dddddd", ACCENT: "#2b5cc4", SECOND: "#c2570f"}


def take(run: Path) -> None:
    """Keep a run's curves, shortened to some digits, and its page."""
    EXAMPLE.mkdir(parents=True, exist_ok=True)
    base = from_json(LoopSpec, store.read_json(run / SETTINGS)["loop"])
    first = {path: (path / ROWS / "000000.json") for path in run.glob("*/seed-*")}
    begun = sorted((row.stat().st_mtime, path) for path, row in first.items() if row.exists())
    arms = dict.fromkeys(path.parent.name for _, path in begun)
    seeds = sorted({int(path.name.removeprefix("seed-")) for _, path in begun})
    report = gather(base, run, [*arms], seeds)
    report = replace(report, model=Path(report.model).name)
    save_page(EXAMPLE, report)
    document = short(loop_to_json(report))
    for arm in document["arms"]:
        for seed in arm["runs"]:
            for verdict in filter(None, (seed["first"], seed["last"])):
                verdict["place"] = f"steps/{verdict['step']:06d}"
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    (EXAMPLE / "loop.json").write_text(f"{text}\n", "utf-8")


def short(value: Any) -> Any:
    """Numbers of a document with few digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: short(part) for key, part in value.items()}
    return [short(part) for part in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> LoopReport:
    document = json.loads(path.read_text("utf-8"))
    known = LoopReport.__dataclass_fields__
    return from_json(LoopReport, {key: document[key] for key in known})


def learnt(run: SeedRun) -> str:
    """The first step whose mean over the last ones reaches :data:`LEARNT`."""
    high = running(run.curve("reward")) >= LEARNT
    high[: WINDOW - 1] = False
    return str(int(high.argmax())) if high.any() else "–"


def rows(report: LoopReport) -> Iterator[list[str]]:
    for arm in report.arms:
        for run in arm.runs:
            ends = [
                f"{number(at_end(run, name, WINDOW))} → {number(at_end(run, name))}"
                for name in ("reward", "k3_kl", "entropy", "ess_seq")
            ]
            norm = number(float(max(run.curve("grad_norm"))))
            first = "–" if run.first is None else run.first.status
            falls, at = reward_fall(run), fired(run)["grad_norm"]
            told = (learnt(run), *("–" if step is None else str(step) for step in (at, falls)))
            yield [f"`{arm.name}`", str(run.seed), str(run.steps), first, *ends, norm, *told]


def missing(report: LoopReport) -> Iterator[str]:
    """What of the plan is not measured to its end, one sentence an arm."""
    steps = {(arm.name, run.seed): run.steps for arm in report.arms for run in arm.runs}
    for name in PLANNED:
        at = {seed: steps.get((name, seed), 0) for seed in SEEDS}
        if min(at.values()) < STEPS:
            parts = (f"{done} of {STEPS} steps with seed {seed}" for seed, done in at.items())
            yield f"`{name}`: {', '.join(parts)}."


def text(report: LoopReport) -> str:
    """What stands between the markers."""
    titles = ("arm", "seed:", "steps:", "check at step 0", "reward", "k3 KL, nats", "entropy")
    more = ("ESS of sequences", "largest gradient norm:", f"reward {LEARNT:g} at step:")
    more += ("gradient norm warns at:", "reward falls at:")
    shown = section(report)
    claims = next(part for part in shown.parts if part.id == "loop-claims")
    lines = [
        f"Means of the first and of the last {WINDOW} steps; a warning and a fall of the reward as "
        "defined above, the step at which each came first:"
    ]
    lines += ["", table([*titles, *more], rows(report)), ""]
    lines += [f"- {line}" for line in (*shown.warnings, *shown.sentences)]
    lines += ["", "Every two arms; a difference is claimed where several seeds agree:", ""]
    lines += [show_table(claims.tables[0])]
    absent = [f"- {line}" for line in missing(report)]
    lines += ["", "Not measured to its end:", "", *absent] if absent else []
    return "\n".join(lines)


def picture(report: LoopReport) -> None:
    """Six panels, one file."""
    with drawing(9.0, 8.0) as (figure, first):
        first.remove()
        for axes, (name, log) in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            unit = COLUMNS[name].unit
            draw(report, name, log, COLUMNS[name].label + (f", {unit}" if unit else ""), axes)
            axes.get_legend().remove()
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(PICTURE, format="svg", facecolor="white", metadata={"Date": None})
    document = PICTURE.read_text("utf-8")
    for sentinel, colour in COLOURS.items():
        document = document.replace(sentinel, colour)
    PICTURE.write_text(document, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    asked = parser.parse_args()
    if asked.run is not None:
        take(asked.run)
    report = read(EXAMPLE / "loop.json")
    picture(report)
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text(report)}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
