"""Do two sides round alike, and which private precisions are found?

    python benchmarks/precisions.py DIR [--families NAME …] [--faults NAME …] [--places NAME …]

Clean runs are those of benchmarks/calibration.py in DIR, as far as they are there, cut into blocks
of 16 prompts. A fault is one of ROUNDINGS in benchmarks/planted_sides.py: one side rounds where the
other does not, and in float32 both are right. It gets a `mismatch check` of 16 prompts with one
rank, and `locate`; one of the trainer scores the clean check's own tokens again. A check whose
report is in DIR is not run again, so the command goes on where it was stopped;
docs/evidence/precisions.json and the page next to it are written after each case. `--write` runs
nothing, but reads what is in DIR.

Goal: no fault that moves mean |delta| ends with exit code 0. Four minutes for each fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.calibration import CASES, DONE  # noqa: E402
from benchmarks.calibration_blocks import Recorded, blocks  # noqa: E402
from benchmarks.family_models import FAMILIES as CONFIGS  # noqa: E402
from benchmarks.family_models import trained  # noqa: E402
from benchmarks.planted_sides import ENGINES_KERNEL, ROUNDED, ROUNDINGS  # noqa: E402
from benchmarks.sides import CLEAN, anatomy, lacked, run  # noqa: E402
from mismatch.analysis.results import ALIKE, Square  # noqa: E402
from mismatch.analysis.square import measure  # noqa: E402

STATE = ROOT / "docs" / "evidence" / "precisions.json"
PLACES = ("trainer", "engine")
FAMILIES = ("qwen3", "olmoe")
SIZE = 16  # prompts of a block
SMALL = (
    *("--num-prompts", "16", "--nproc-per-node", "1", "--exact-kl", "0", "--context-length", "0"),
    "--no-explain",
)
MOVES = 1.1  # times the clean check's mean |delta|: the fault is seen in the numbers
HEAD = """# Private precisions

A side that rounds where the other does not is right in float32, and may round no more than a plain
forward. The correlation of both sides' roundings shows it, against that of the nearer side and the
plain forward: differences grow through the layers, so that in deep models both are small. Below a
ratio of {level:g} `locate` runs in the run's own precision and compares every module with that of
the plain forward, on the same input. Made by `benchmarks/precisions.py`, {date}.

## Clean runs

Blocks of {size} prompts. Share: mean \\|delta\\| over what the plain forward costs.

| clean run | blocks | tokens of a block | correlation | ratio | share |
| --- | ---: | ---: | --- | --- | --- |"""
PLANTED = """
## Planted

Of {all} faults {moving} move mean \\|delta\\| by more than a tenth. Of these {passed} end with exit
code 0, {sides} are on the right side, and of {named} `locate` names a module that the fault is in.

| family | side | fault | mean abs delta, of the clean check's | correlation | verdict | named |
| --- | --- | --- | ---: | ---: | --- | --- |"""
END = """
On a GPU kernels of two implementations are independent by nature (published: a correlation of 0.035
between vLLM and a trainer on an H200). There the correlation is a number without a level, no check
follows from it, and `mismatch locate RUN --details` shows how unlike each module is.

**Next:** [the smallest faults that are seen](smallest.md).
"""


@dataclass(frozen=True)
class Clean:
    """One clean run, by block: correlation of the roundings, its ratio to that of the nearer side
    and the plain forward, and mean |delta| over cost."""

    name: str
    tokens: int
    correlations: tuple[float, ...]
    ratios: tuple[float, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """What a check said of one fault.

    Attributes:
        times: mean |delta|, of the clean check's.
        correlation: of both roundings; None: no such number.
        failed: checks.
        located: sites of the sources on the fault's side.
    """

    family: str
    fault: str
    place: str
    verdict: str
    exit_code: int
    times: float
    correlation: float | None
    failed: tuple[str, ...]
    cause: str
    side: str
    located: tuple[str, ...]

    @property
    def moves(self) -> bool:
        return self.times > MOVES

    @property
    def named(self) -> bool:
        """Whether a source is a module that the fault is in."""
        return not {*ROUNDED[self.fault]}.isdisjoint(self.located)


def clean(place: Path) -> Clean:
    """Read a clean run of benchmarks/calibration.py."""
    correlations, ratios, shares, tokens = [], [], [], 0
    for block in blocks(Recorded.load(place), SIZE):
        held = block.measured()
        square = measure(held, block.spec)
        assert isinstance(square, Square)
        assert square.correlation is not None
        engine, trainer = (
            next(leg for leg in square.legs if leg.side == side) for side in ("engine", "trainer")
        )
        cost = abs(held.usable[trainer.plain].logprobs - held.usable["reference:fp32"].logprobs)
        delta = held.usable[trainer.scoring].logprobs - held.usable[engine.scoring].logprobs
        assert square.nearest is not None
        correlations.append(round(square.correlation.value, 3))
        ratios.append(round(square.correlation.value / square.nearest.value, 3))
        shares.append(round(float(abs(delta).mean() / cost.mean()), 3))
        tokens += len(delta)
    name = place.name.removeprefix("default-")
    return Clean(name, tokens // len(shares), tuple(correlations), tuple(ratios), tuple(shares))


def row(family: str, fault: str, place: str, home: Path, flags: tuple[str, ...]) -> Row:
    """Run a check with a fault, if it is not there, and read it."""
    of, planted = (run(*what, home, flags) for what in ((CLEAN, ""), (fault, place)))
    before, report = (json.loads((each / "report.json").read_text()) for each in (of, planted))
    size, own = (
        each["comparisons"][0]["metrics"]["logprob_abs_diff_mean"]["value"]
        for each in (before, report)
    )
    square: dict[str, Any] = report.get("square") or {}
    ranked = (report.get("causes") or {}).get("ranked") or [{"id": "", "side": ""}]
    sources = [
        group["site"]
        for side in (report.get("locate") or {}).get("sides", ())
        if side["role"] == place
        for group in side["groups"]
    ]
    return Row(
        family,
        fault,
        place,
        report["verdict"]["status"],
        int(report["verdict"]["status"] not in ("healthy", "tolerable")),
        round(own / size, 3),
        (square.get("correlation") or {}).get("value"),
        tuple(check["id"] for check in report["checks"] if check["status"] == "failed"),
        ranked[0]["id"],
        ranked[0]["side"],
        tuple(dict.fromkeys(sources)),
    )


def page(cleans: list[Clean], rows: list[Row], made: str) -> str:
    """Write both tables."""
    lines = [HEAD.format(level=ALIKE, date=made, size=SIZE)]
    for one in cleans:
        spans = [
            f"{min(v):.2f} to {max(v):.2f}" for v in (one.correlations, one.ratios, one.shares)
        ]
        lines.append(f"| {one.name} | {len(one.shares)} | {one.tokens:,} | {' | '.join(spans)} |")
    moving = [each for each in rows if each.moves]
    numbers = {
        "all": len(rows),
        "moving": len(moving),
        "passed": sum(not each.exit_code for each in moving),
        "sides": sum(each.side == each.place for each in moving),
        "named": sum(each.named for each in moving),
    }
    lines.append(PLANTED.format(**numbers))
    for each in rows:
        seen = "–" if each.correlation is None else f"{each.correlation:.2f}"
        why = ", ".join(f"`{id}`" for id in each.failed)
        verdict = each.verdict.upper() + (f": {why}" if why else "")
        named = ", ".join(each.located) or "–"
        lines.append(
            f"| `{each.family}` | {each.place} | `{each.fault}` | {each.times:.2f}× | {seen} | "
            f"{verdict} | {named} |"
        )
    return "\n".join(lines) + "\n" + END


def stored() -> tuple[dict[str, Clean], dict[tuple[str, str, str], Row]]:
    """Return what precisions.json holds."""
    state = json.loads(STATE.read_text()) if STATE.is_file() else {"clean": [], "rows": []}
    cleans = [Clean(**each) for each in state["clean"]]
    rows = [Row(**each) for each in state["rows"]]
    return {each.name: each for each in cleans}, {(r.family, r.fault, r.place): r for r in rows}


def write(new: list[Clean | Row]) -> list[Row]:
    """Put rows into precisions.json, write the page, and return all rows."""
    cleans, rows = stored()
    for each in new:
        if isinstance(each, Clean):
            cleans[each.name] = each
        else:
            rows[each.family, each.fault, each.place] = each
    names, faults = [case.name.removeprefix("default-") for case in CASES], list(ROUNDINGS)
    ordered = sorted(rows.values(), key=lambda r: (r.family, faults.index(r.fault), r.place))
    order = sorted(cleans.values(), key=lambda each: (each.name not in names, each.name))
    made = date.today().isoformat()
    kept = [asdict(one) for one in order], [asdict(one) for one in ordered]
    state = {"date": made, "clean": kept[0], "rows": kept[1]}
    STATE.write_text(json.dumps(state, indent=1) + "\n")
    STATE.with_suffix(".md").write_text(page(order, ordered, made))
    return ordered


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("home", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=CONFIGS)
    parser.add_argument("--faults", nargs="+", default=list(ROUNDINGS), choices=list(ROUNDINGS))
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=PLACES)
    parser.add_argument("--write", action="store_true", help="only read what is in DIR")
    asked = parser.parse_args()
    runs = sorted(asked.home.glob(f"*/{DONE}"))
    rows = write([clean(done.parent) for done in runs if not done.parent.name.startswith("fault")])
    for place in asked.places:
        for family in asked.families:
            model = asked.home / "models" / f"trained-{family}"
            trained(family, model, 75)
            about, home = anatomy(model), asked.home / "planted" / family
            home.mkdir(parents=True, exist_ok=True)
            for fault in asked.faults:
                if lacked(fault, about) or (place == "engine" and fault in ENGINES_KERNEL):
                    continue
                if asked.write and not (home / f"{place}-{fault}" / "report.json").is_file():
                    continue
                found = row(family, fault, place, home, ("--model", str(model), *SMALL))
                print(found, flush=True)
                rows = write([found])
    return int(any(each.moves and not each.exit_code for each in rows))


if __name__ == "__main__":
    sys.exit(main())
