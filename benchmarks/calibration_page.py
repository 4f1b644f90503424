"""docs/evidence/calibration.md and its figure, from what benchmarks/calibration.py has kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.analysis.displaced import LEVELS
from mismatch.keys import TRAIN

if TYPE_CHECKING:
    from benchmarks.calibration import Case

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evidence" / "calibration.md"
PICTURE = DOCS / "images" / "calibration.svg"
MARK = "<!-- measured -->"
PLANTED = (
    "Planted faults, with the excess of the side at fault and the gap, each in its lowest block. "
    "Bold: missed in a block."
)
PICTURED = (
    "Dots are values; a check fails by the lower end of the interval. Clean dots beyond a line "
    "have wide intervals and pass. A gap also has to exceed 50 times the rounding that is expected."
)
Result = dict[str, Any]  # of one case, see calibration.result


def write(state: dict[str, Result], cases: Sequence[Case]) -> None:
    """Return the measured part of the page, and its figure."""
    head = PAGE.read_text().partition(MARK)[0]
    sound = [case for case in cases if not case.fault and case.name in state]
    clean = {case.name: state[case.name] for case in sound if case.samples == 1}
    usual = {case.name: state[case.name] for case in sound if case.samples > 1}
    planted = [case for case in cases if case.fault and case.name in state]
    absent = [case.name for case in cases if case.name not in state]
    lines = [MARK, "", _summary(state, clean), ""]
    if planted:
        lines += [PLANTED, "", *_fault_table(planted, state), ""]
    lines += ["## Runs of default size", "", *_usual_table(usual), ""] if usual else []
    lines += [f"Not run: {', '.join(absent)}.", ""] if absent else []
    lines += ["![Excess and float32 gap of clean and faulty runs](../images/calibration.svg)", ""]
    lines += [PICTURED, ""]
    lines += ["**Next:** [faults planted on each side](sides.md).", ""]
    PAGE.write_text(head + "\n".join(lines))
    _draw(clean, {case.name: state[case.name] for case in planted})


def _summary(state: dict[str, Result], clean: dict[str, Result]) -> str:
    level = LEVELS["cpu"]
    dates = sorted(one["date"] for one in state.values())
    when = "–".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "not yet"
    blocks = [block for one in clean.values() for block in one["blocks"]]
    broken = sum(bool(block["failed"]) for block in blocks)
    lows = [low for block in blocks for name, low in block["low"].items() if "excess" in name]
    minutes = sum(one["seconds"] for one in state.values()) / 60
    bound = f" (at most {100 * 3 / len(blocks):.1f} %, one-sided 95 %)" if blocks else ""
    return (
        f"Measured {when} on a CPU with two FSDP2 ranks, {minutes:.0f} minutes of runs. Levels: "
        f"excess {level.excess:g}; float32 gap {level.gap:g} times the expected rounding and at "
        f"least {level.least_gap:g} nats. **{broken} of {len(blocks)} disjoint clean blocks of 64 "
        f"prompts were called broken**{'' if broken else bound}; the highest lower end of an "
        f"excess among them is {_number(max(lows, default=None))}. `calibration.json` has every "
        "block."
    )


def _usual_table(usual: dict[str, Result]) -> list[str]:
    """Count the verdicts of blocks that are as large as a default check."""
    kinds = Counter(block["verdict"] for one in usual.values() for block in one["blocks"])
    total = sum(kinds.values())
    counts = ", ".join(f"{count} {kind.upper()}" for kind, count in kinds.most_common())
    passed = kinds["healthy"] + kinds["tolerable"]
    names = {name: name.removeprefix("default-") for name in usual}
    rows = [
        f"64 prompts × 4 samples a run, of trained models ({', '.join(names.values())}): of "
        f"{total} clean runs {counts}; exit code 0 in {passed}. Exact KL and the long sequence are "
        "not in them.",
        "",
        "| clean run | tokens of a run | mean abs delta | not healthy |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, one in usual.items():
        blocks = one["blocks"]
        others = Counter(b["verdict"] for b in blocks if b["verdict"] != "healthy")
        if others:
            found = ", ".join(f"{count} {kind}" for kind, count in others.items())
            tokens, mean = one["tokens"] // len(blocks), _number(_mean(one))
            rows.append(f"| {names[name]} | {tokens:,} | {mean} | {found} |")
    return rows


def _fault_table(planted: Sequence[Case], state: dict[str, Result]) -> list[str]:
    rows = [
        "| planted | mean abs delta, of the clean run's | excess | float32 gap | found | by |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for case in sorted(planted, key=_kind_and_strength):
        one = state[case.name]
        times = f"{_mean(one) / _mean(state[case.of]):.2f}×" if case.of in state else "–"
        side = TRAINER if case.fault.startswith(TRAINER) else ENGINE
        excess, gap = (_values(one, *which) for which in (("excess", side), ("gap", ENGINE)))
        found, of = sum(bool(block["failed"]) for block in one["blocks"]), len(one["blocks"])
        label = case.name.removeprefix("fault-")
        label += f", against {case.yardstick}" if case.yardstick else ""
        rows.append(
            f"| {label} | {times} | {_number(min(excess, default=None))} | "
            f"{_number(min(gap, default=None))} | "
            f"{f'{found} of {of}' if found == of else f'**{found} of {of}**'} | "
            f"{_counted(one['blocks'], 'failed')} |"
        )
    return rows


def _kind_and_strength(case: Case) -> tuple[str, str, float]:
    kind, _, strength = case.fault.partition(":")
    return kind, case.model, float(strength or 0)


ENGINE, TRAINER = "engine", "trainer"


def _values(one: Result, evidence: str, side: str) -> list[float]:
    """Of all blocks and passes of a side."""
    return [
        value
        for block in one["blocks"]
        for name, value in block["values"].items()
        if name.startswith(f"{evidence} ")
        if (name.split()[1].partition(":")[0] == TRAIN) == (side == TRAINER)
    ]


def _mean(one: Result) -> float:
    """Mean |delta| over the tokens of all blocks."""
    total = sum(block["tokens"] for block in one["blocks"])
    return float(sum(block["mean"] * block["tokens"] for block in one["blocks"]) / total)


def _counted(blocks: Sequence[Result], key: str) -> str:
    counts = Counter(id for block in blocks for id in block[key])
    names = [f"{id} {count}" if count < len(blocks) else id for id, count in counts.items()]
    return ", ".join(names) or "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _draw(clean: dict[str, Result], faults: dict[str, Result]) -> None:
    """Every block of clean runs and of faults, by excess of the engine and float32 gap."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "mismatch", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    level = LEVELS["cpu"]
    figure, axes = plt.subplots(figsize=(8, 5))
    for results, style in ((clean, "o"), (faults, "s")):
        for name, one in results.items():
            points = [_point(block) for block in one["blocks"]]
            known = [point for point in points if point is not None]
            if not known:
                continue
            colour = "#2a6f97" if style == "o" else "#b23a48"
            axes.plot(*zip(*known, strict=True), style, ms=4, color=colour, alpha=0.5)
            if style == "s":
                axes.annotate(name.removeprefix("fault-"), known[0], fontsize=7,
                              xytext=(4, 3), textcoords="offset points")  # fmt: skip
    for style, colour, label in (
        ("o", "#2a6f97", "clean run, a block of 64 prompts"),
        ("s", "#b23a48", "planted fault, a block of 64 prompts"),
    ):
        axes.plot([], [], style, ms=4, color=colour, label=label)
    axes.plot([], [], "--", color="#555", lw=1, label="excess fails; least gap that can fail")
    axes.legend(loc="upper right", fontsize=8)
    axes.axvline(level.excess, color="#555", lw=1, ls="--")
    axes.axhline(level.least_gap, color="#555", lw=1, ls="--")
    axes.set(xscale="log", yscale="log", xlabel="excess of the engine over a plain forward")
    ticks = (0.6, 0.8, 1.0, level.excess, 1.6)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("engine against reference in float32, mean |delta|, nats")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


def _point(block: Result) -> tuple[float, float] | None:
    one = {"blocks": [block]}
    excess, gap = _values(one, "excess", ENGINE), _values(one, "gap", ENGINE)
    return (max(excess), gap[0]) if excess and gap else None
