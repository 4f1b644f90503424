"""Write the demonstration of docs/evidence/loop.md and its figure from examples/loop/loop.json.

    python tools/loop_page.py [RUN ...]

RUN: runs of `mismatch loop`, finished or not, with the settings of the demonstration: their arms
and seeds are added to those that are there, or replace them. Everything in the document between
the markers comes from that file: whoever goes on with a run writes it again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.codec import from_json, to_json
from mismatch.features.loop.arms import gather, read_settings
from mismatch.features.loop.history import rows_of
from mismatch.features.loop.judge import (
    WINDOW,
    Arm,
    LoopReport,
    SeedRun,
    at_end,
    loop_to_json,
    reward_fall,
    running,
)
from mismatch.features.loop.section import PANELS, draw, page, section
from mismatch.features.loop.spec import Asked, LoopSpec, arm_of
from mismatch.reports.formatting import number
from mismatch.reports.html import show_page
from mismatch.reports.markdown import table
from mismatch.reports.svg import ACCENT, FAINT, GRID, INK, SECOND, drawing
from mismatch.run.resume import differences

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "loop"
DOCUMENT = ROOT / "docs" / "evidence" / "loop.md"
PICTURE = ROOT / "docs" / "images" / "loop.svg"
BEGIN = "<!-- the demonstration, written by tools/loop_page.py -->"
END = "<!-- end of the demonstration -->"
DIGITS = 5
STEPS, SEEDS = 45, (0, 1)
PLANNED = ("attention-sinks", "as-is", "seq-tis", "on-policy-ratio", "router-replay")
LEARNT = 0.9  # of the reward, as a mean of the last steps
COLOURS = {INK: "#222222", FAINT: "#777777", GRID: "#dddddd", ACCENT: "#2b5cc4", SECOND: "#c2570f"}


def take(runs: Sequence[Path]) -> None:
    """Keep the curves of these runs next to those that are there, shortened to some digits."""
    known = [read(EXAMPLE / "loop.json")] if (EXAMPLE / "loop.json").exists() else []
    report = merged([*known, *map(taken, runs)])
    (EXAMPLE / "loop.html").write_text(show_page(page(report)), "utf-8")
    text = json.dumps(short(loop_to_json(report)), allow_nan=False, separators=(",", ":"))
    (EXAMPLE / "loop.json").write_text(f"{text}\n", "utf-8")


def taken(run: Path) -> LoopReport:
    """All arms and seeds of a run directory."""
    base = read_settings(run).loop
    places = [path for path in sorted(run.glob("*/seed-*")) if rows_of(path)]
    arms = tuple(dict.fromkeys(path.parent.name for path in places))
    seeds = tuple(sorted({int(path.name.removeprefix("seed-")) for path in places}))
    report = gather(Asked(base, arms, seeds), run)
    return from_json(LoopReport, short(to_json(report)))


def merged(reports: Sequence[LoopReport]) -> LoopReport:
    """One report of several runs; of an arm and seed that several have, the longest.

    Raises:
        ValueError: other settings, or another reward at step 0 where the sampler is the same: the
            first weights sample before anything that separates the arms.
    """
    first = reports[0]
    longest: dict[tuple[str, int], SeedRun] = {}
    for report in reports:
        if other := differences(shared(first), shared(report)):
            raise ValueError("these runs have other settings: " + "; ".join(other))
        for arm in report.arms:
            for run in arm.runs:
                before = longest.get((arm.name, run.seed))
                if before is None or run.steps >= before.steps:
                    longest[arm.name, run.seed] = run
    base = from_json(LoopSpec, first.settings)
    starts: dict[int, float] = {}
    for (name, seed), run in longest.items():
        if arm_of(base, name).check.rollout == base.check.rollout:
            reward = float(run.curve("reward")[0])
            if starts.setdefault(seed, reward) != reward:
                raise ValueError(f"{name}, seed {seed}, begins with another reward: {reward}")
    names = sorted(dict.fromkeys(name for name, _ in longest), key=in_order)
    seeds = sorted({seed for _, seed in longest})
    arms = (
        Arm(name, tuple(longest[name, seed] for seed in seeds if (name, seed) in longest))
        for name in names
    )
    steps = max(run.steps for run in longest.values())
    return replace(first, arms=tuple(arms), settings={**first.settings, "steps": steps})


def shared(report: LoopReport) -> dict[str, Any]:
    """Return the settings that runs of one demonstration have in common."""
    own = ("arm", "seed", "steps", "checkpoint_every")
    return {name: value for name, value in report.settings.items() if name not in own}


def in_order(arm: str) -> tuple[int, str]:
    """As planned; others behind."""
    return (PLANNED.index(arm) if arm in PLANNED else len(PLANNED), arm)


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
    return from_json(LoopReport, {key: document[key] for key in known if key in document})


def learnt(run: SeedRun) -> str:
    """Return the first step whose mean over the last steps reaches :data:`LEARNT`."""
    high = running(run.curve("reward")) >= LEARNT
    high[: WINDOW - 1] = False
    return str(int(high.argmax())) if high.any() else "–"


def rows(report: LoopReport) -> Iterator[list[str]]:
    for arm in report.arms:
        for run in arm.runs:
            ends = [
                f"{number(at_end(run, name, WINDOW))} → {number(at_end(run, name))}"
                for name in ("reward", "k3_kl", "ess_seq")
            ]
            norm = number(float(max(run.curve("grad_norm"))))
            falls = reward_fall(run)
            told = learnt(run), "–" if falls is None else str(falls)
            yield [f"`{arm.name}`", str(run.seed), str(run.steps), *ends, norm, *told]


def missing(report: LoopReport) -> Iterator[str]:
    """Return what of the plan is not measured to its end, one sentence an arm."""
    steps = {(arm.name, run.seed): run.steps for arm in report.arms for run in arm.runs}
    for name in PLANNED:
        at = {seed: steps.get((name, seed), 0) for seed in SEEDS}
        if min(at.values()) < STEPS:
            parts = (f"{done} of {STEPS} steps with seed {seed}" for seed, done in at.items())
            yield f"`{name}`: {', '.join(parts)}."


def text(report: LoopReport) -> str:
    """Return the text between the markers."""
    titles = [
        *("arm", "seed:", "steps:", "reward", "k3 KL, nats", "ESS of sequences"),
        *("largest gradient norm:", f"reward {LEARNT:g} at step:"),
        "reward falls at:",
    ]
    lines = [f"Means of the first and of the last {WINDOW} steps, and first step of each event:"]
    lines += ["", table(titles, rows(report))]
    warnings = [f"- {line}" for line in section(report).warnings]
    lines += ["", *warnings] if warnings else []
    absent = [f"- {line}" for line in missing(report)]
    lines += ["", "Not measured to its end:", "", *absent] if absent else []
    return "\n".join(lines)


def picture(report: LoopReport) -> None:
    """Six panels, one file."""
    with drawing(9.0, 8.0) as (figure, first):
        first.remove()
        for axes, name in zip(figure.subplots(3, 2).flat, PANELS, strict=True):
            draw(report, name, axes)
            axes.set_title(PANELS[name].label, fontsize="medium", loc="left")
        figure.savefig(PICTURE, format="svg", facecolor="white", metadata={"Date": None})
    document = PICTURE.read_text("utf-8")
    for sentinel, colour in COLOURS.items():
        document = document.replace(sentinel, colour)
    PICTURE.write_text(document, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    asked = parser.parse_args()
    if asked.runs:
        take(asked.runs)
    report = read(EXAMPLE / "loop.json")
    picture(report)
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text(report)}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
