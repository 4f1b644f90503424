"""Draw planted faults: docs/evidence/gallery.md, and a small SVG per cause in docs/images/gallery.

    python benchmarks/gallery.py DIR [--again] && python tools/cause_page.py

DIR is that of benchmarks/known_issues.py, with its clean run and what it has recorded; faults that
it does not plant are planted in FSDP2 and scored (benchmarks/gallery_faults.py), once each. What
the page has is kept, unless --again is given and DIR has what it is drawn from.
Left: every token, the engine's probability against the trainer's. Right: mean |delta| along the
sampled tokens, on a logarithmic axis, next to the same block of the clean run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gallery_faults  # noqa: E402
from benchmarks import known_issue_runs as runs  # noqa: E402
from benchmarks.fault_blocks import measured  # noqa: E402
from benchmarks.known_faults import FAULTS, Fault  # noqa: E402
from benchmarks.known_issue_page import PLACES  # noqa: E402
from benchmarks.known_issues import judged  # noqa: E402
from mismatch.analysis.catalogue import title_of  # noqa: E402
from mismatch.analysis.diagnosis.case import Case  # noqa: E402
from mismatch.types import Floats  # noqa: E402

PAGE = ROOT / "docs" / "evidence" / "gallery.md"
IMAGES = ROOT / "docs" / "images" / "gallery"
NEXT = "**Next:** [how often causes are named](known-issues.md)."
HEALTHY = "healthy"
MODEL, SIZE = "gpt-oss", 2  # the model that faults are shown on, and the place of their strength
# Cause -> the planted fault that shows it.
SHOWN = {
    "misalignment": "shift",
    "row-pairing": "other rows",
    "row-lengths": "end counted on one side",
    "retokenisation": "turn encoded again",
    "appended-eos": "appended end, not sampled",
    "unnormalised-law": "fused cross-entropy",
    "bf16-logprobs": "16-bit log-softmax",
    "temperature-semantics": "raw-logprobs-0.6",
    "sampling-truncation": "top-k-20",
    "onset": "fp8 tile from a position on",
    "kv-block": "state lost at chunks",
    "fp8-kv": "fp8-kv",
    "stale-weights": "weights not refitted",
    "tied-head-stale": "head not carried",
    "experts-differ": "experts swapped",
    "lora-scale": "adapter scale",
    "attention-sinks": "sinks ignored",
    "yarn-attention-factor": "YaRN factor dropped",
    "rope-config": "other rope base",
    "sliding-window": "other window",
    "logit-softcap": "softcap on one side",
    "norm-eps": "norm epsilon",
    "packing-leak": "packed rows see each other",
    "template-drift": "template token lost",
}
WIDTH, HEIGHT, PANEL = 560, 220, 170  # pixels
CELLS, STEPS = 34, 20  # cells of a side of the grid; points of a line
LOWEST, HIGHEST = 1e-4, 10.0  # nats, of the logarithmic axis
INK, GREY, BLUE = "#333", "#999", "#2b6cb0"


@dataclass(frozen=True)
class Shown:
    """A case to draw: ``clean`` is the same tokens without what was ``planted``."""

    case: Case
    clean: Case
    planted: str


def cases(home: Path, wanted: set[str]) -> Iterator[tuple[str, Shown]]:
    """Cause and what is drawn of it, of those that are wanted and that DIR has the data of."""
    whole, spec = measured(home / "runs" / f"clean-{MODEL}")
    held = runs.blocks(whole)
    run = held[(2 * SIZE) % len(held)]
    clean = runs.undeclared(run)
    yield HEALTHY, Shown(clean, clean, "nothing")
    faults = {fault.name: fault for fault in FAULTS}
    engines = {engine.name: engine for engine in runs.ENGINES}
    for cause in wanted & SHOWN.keys():
        name = SHOWN[cause]
        if (place := home / "runs" / name / "report.json").is_file() and name in engines:
            case = runs.undeclared(runs.blocks(measured(place.parent)[0])[0])
            yield cause, Shown(case, clean, f"a run of vLLM with `{name}`")
        elif name in faults:
            fault, key = faults[name], f"{name}/{SIZE}/{MODEL}/0"
            strength = fault.strengths[SIZE]
            if fault.place == "recorded":
                case = fault.plant(clean, strength, np.random.default_rng([SIZE, 0, 0]))
            elif runs.stored(home, key).is_file():
                moved = runs.with_fault(home, None, run, spec.train, fault, strength, key)
                case = runs.undeclared(moved)
            else:
                continue
            yield cause, Shown(case, clean, _planted(fault))
    if wanted & gallery_faults.PLANTED.keys():
        gallery_faults.make(home / "gallery", run, spec.train)
        for cause, case, right, where in gallery_faults.cases(home / "gallery", run):
            if cause in wanted:
                yield cause, Shown(case, right, where)


def _planted(fault: Fault) -> str:
    place = "" if fault.place == "recorded" else f", {PLACES[fault.place]}"
    return f"{fault.name}{place}"


# ---------------------------------------------------------------- drawing


def picture(case: Case, clean: Case, title: str) -> str:
    """Return the SVG of one case next to the clean case."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="10" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_grid(case),
        *_lines(case, clean),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(case: Case) -> list[str]:
    """Tokens by the probability of either side; darker for more of them."""
    left, top = 34, 14
    p, q = (np.exp(np.clip(side, -50, 0)) for side in (case.left, case.right))
    counts = np.histogram2d(p, q, bins=CELLS, range=[[0, 1], [0, 1]])[0]
    shade = np.log1p(counts) / np.log1p(max(counts.max(), 1))
    step = PANEL / CELLS
    cells = [
        f'<rect x="{left + i * step:.1f}" y="{top + PANEL - (j + 1) * step:.1f}" '
        f'width="{step:.1f}" height="{step:.1f}" opacity="{max(shade[i, j], 0.08):.2f}"/>'
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]
    return [
        f'<g fill="{BLUE}">',
        *cells,
        "</g>",
        f'<path d="M{left} {top}v{PANEL}h{PANEL}M{left} {top + PANEL}L{left + PANEL} {top}" '
        f'stroke="{GREY}" fill="none" stroke-width=".7"/>',
        f'<text x="{left + PANEL / 2}" y="{top + PANEL + 26}" text-anchor="middle">'
        "probability, engine</text>",
        f'<text transform="translate(12 {top + PANEL / 2}) rotate(-90)" text-anchor="middle">'
        "probability, trainer</text>",
        *(f'<text x="{left + PANEL * v}" y="{top + PANEL + 12}" text-anchor="middle">{v:g}</text>'
          for v in (0, 0.5, 1)),
    ]  # fmt: skip


def _lines(case: Case, clean: Case) -> list[str]:
    """Mean |delta| along the sampled tokens, of the fault and of the clean run."""
    left, top, width = 270, 14, 275
    longest = int(max(case.index.max(), clean.index.max())) + 1

    def line(one: Case, colour: str) -> str:
        mean = along(one, longest)
        points = " ".join(
            f"{left + width * (n + 0.5) / STEPS:.1f},{top + PANEL * (1 - _height(value)):.1f}"
            for n, value in enumerate(mean)
            if np.isfinite(value)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'

    decades = [10.0**n for n in range(-4, 2)]
    highest = float(np.nanmax(along(case, longest)))
    beyond = f"off the scale: up to {highest:.3g}" if highest > HIGHEST else ""
    return [
        *(f'<path d="M{left} {top + PANEL * (1 - _height(v)):.1f}h{width}" stroke="#ddd" '
          f'stroke-width=".7"/><text x="{left - 4}" y="{top + PANEL * (1 - _height(v)) + 3:.1f}" '
          f'text-anchor="end">{v:g}</text>' for v in decades),
        line(clean, GREY),
        line(case, BLUE),
        f'<text x="{left + width}" y="{top - 4}" text-anchor="end" fill="{BLUE}">{beyond}</text>'
        if beyond else "",
        f'<text x="{left}" y="{top + PANEL + 12}">1</text>',
        f'<text x="{left + width}" y="{top + PANEL + 12}" text-anchor="end">{longest}</text>',
        f'<text x="{left + width / 2}" y="{top + PANEL + 26}" text-anchor="middle">'
        "sampled token; mean |delta|, nats; grey: without the fault</text>",
    ]  # fmt: skip


def along(case: Case, longest: int) -> Floats:
    """Mean |delta| of so many parts of the longest response, [STEPS]; NaN where there is none."""
    part = np.minimum(case.index * STEPS // longest, STEPS - 1)
    count = np.bincount(part, minlength=STEPS)
    total = np.bincount(part, np.abs(case.delta), STEPS)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _height(nats: float) -> float:
    """Place on the logarithmic axis, 0 to 1."""
    low, high = np.log10(LOWEST), np.log10(HIGHEST)
    return float(np.clip((np.log10(max(nats, LOWEST)) - low) / (high - low), 0, 1))


# ---------------------------------------------------------------- page


def sections(page: str) -> dict[str, str]:
    """Cause -> its section of the page."""
    found = {}
    for part in page.removesuffix(f"{NEXT}\n").split("\n## ")[1:]:
        link = re.search(r"causes/([a-z0-9-]+)\.md\)", part.partition("\n")[0])
        found[link.group(1) if link else HEALTHY] = f"## {part.strip()}"
    return found


def section(cause: str, shown: Shown) -> str:
    """Return the text of one picture, which is drawn."""
    title = "A healthy pair" if cause == HEALTHY else title_of(cause)
    drawn = picture(shown.case, shown.clean, title)
    (IMAGES / f"{cause}.svg").write_text(drawn, "utf-8")
    mean = f"{np.abs(shown.case.delta).mean():.3g}"
    image = f"![{cause}](../images/gallery/{cause}.svg)"
    if cause == HEALTHY:
        return f"## {title}\n\n{image}\n\nMean |delta| {mean}."
    found = ", ".join(cause.id for cause in judged(shown.case).ranked) or "nothing"
    named = "" if found == cause else f", named {found}"
    return (
        f"## [{title}](../reference/causes/{cause}.md)\n\n{image}\n\n"
        f"{shown.planted[0].upper()}{shown.planted[1:]}: {mean}{named}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--again", action="store_true", help="also draw what the page has")
    options = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    every = [HEALTHY, *SHOWN, *gallery_faults.PLANTED]
    held = sections(PAGE.read_text("utf-8"))
    held = {cause: text for cause, text in held.items() if cause in every}
    wanted = set(every) - (set() if options.again else held.keys())
    for cause, shown in cases(options.directory, wanted):
        if cause in wanted:
            held[cause] = section(cause, shown)
            print(cause, flush=True)
    intro = PAGE.read_text("utf-8").partition("\n## ")[0].rstrip()
    parts = [intro, *(held[cause] for cause in every if cause in held), NEXT]
    PAGE.write_text("\n\n".join(parts) + "\n", "utf-8")
    for old in IMAGES.glob("*.svg"):
        if old.stem not in held:
            old.unlink()
    size = sum(path.stat().st_size for path in IMAGES.glob("*.svg"))
    print(f"{len(held)} pictures, {size:,} bytes")


if __name__ == "__main__":
    main()
