"""Make what the README shows: saved runs under examples/, pictures under docs/images/, its table.

    make example
    python tools/make_pictures.py --redraw    # pages and pictures of the saved runs, nothing is run

Runs `mismatch check` on the embedded model as it is, with other precisions and with the planted
sink-less attention; keeps two of the reports, draws the terminal (SVG) and the HTML report (PNG,
where Chromium is installed), and writes the numbers between the README's markers.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mismatch.pipeline.document import report_from_json
from mismatch.reports.formatting import brief, percent, text
from mismatch.reports.markdown import show_table
from mismatch.reports.section import Cells, Column, Table
from mismatch.reports.sections import page
from mismatch.reports.terminal import print_page
from mismatch.run import store
from mismatch.types import Report

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
KEPT = ("report.html", "report.json", "report.md", "tokens.parquet")
FIXES = "attention-sinks,router-replay,fp32-lm-head"
RUNS = {
    "tiny-gpt-oss": [],
    "tiny-gpt-oss-no-sinks": ["--attention", "no-sinks", "--fix", FIXES],
}
MODEL = "tiny-gpt-oss"
TABLE = {
    "bf16 on both sides": [],
    "bf16 engine, fp32 trainer": ["--train-dtype", "fp32"],
    "fp32 on both sides": ["--dtype", "fp32", "--train-dtype", "fp32"],
    "fp8 KV cache in the engine": ["--engine-arg", "kv_cache_dtype=fp8"],
    "trainer without sinks (planted)": ["--attention", "no-sinks"],
}
MARKERS = ("<!-- numbers, written by `make example` -->", "<!-- end of numbers -->")
TERMINAL = 12  # lines of its picture
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
METRICS = ("logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max")
WIDTH, HEIGHT = 1100, 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="draw the saved runs; run nothing")
    redraw = parser.parse_args().redraw
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, flags in RUNS.items():
        folder = ROOT / "examples" / name
        report = redrawn(folder) if redraw else run_check(flags, folder)
        draw_terminal(report, IMAGES / f"terminal-{name}.svg", f"mismatch check {' '.join(flags)}")
        draw_page(folder / "report.html", IMAGES / f"report-{name}.png")
    if redraw:
        return
    write_table({name: run_check(flags) for name, flags in TABLE.items()})


def run_check(flags: list[str], keep: Path | None = None) -> Report:
    """Run a check in a temporary directory; keep its reports where that is asked."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "mismatch", "check", "--model", MODEL, *flags]
        done = subprocess.run([*command, "--out", "run"], cwd=scratch, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)} measured nothing")
        run = Path(scratch) / "run"
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            keep.mkdir(parents=True)
            for file in KEPT:
                shutil.copy(run / file, keep)
        return report_from_json(store.read_json(run / "report.json"))


def redrawn(folder: Path) -> Report:
    """Write the pages of a saved run again."""
    command = [sys.executable, "-m", "mismatch", "report", ".", "--quiet"]
    subprocess.run(command, cwd=folder, check=False)
    for name in {path.name for path in folder.iterdir()} - set(KEPT):
        (folder / name).unlink()
    return report_from_json(store.read_json(folder / "report.json"))


def write_table(reports: dict[str, Report]) -> None:
    """Put the headline numbers of these runs between the README's markers."""
    columns = (
        Column("vLLM against FSDP2", text),
        *(Column(title, brief) for title in ("mean |delta|", "k3 KL", "worst token")),
        Column("routing flips", percent),
        Column("verdict", text),
    )
    rows: list[Cells] = []
    for name, report in reports.items():
        comparison = report.comparisons[0]
        values = [comparison.metrics[metric].value for metric in METRICS]
        routing = comparison.routing["routing_disagree_layer"].value
        rows.append((name, *values, routing, report.verdict.status))
    lines = show_table(Table(columns, rows)).splitlines()
    sizes = [report.run["n_tokens"] for report in reports.values()]
    lines += [
        "",
        f"{min(sizes):,} to {max(sizes):,} tokens each, 64 prompts × 4 samples, on a CPU. Larger "
        "models show more mismatch: see “is this normal?” in a report.",
    ]
    lines += [
        f"{name}: {report.verdict.status.upper()}, because {report.verdict.reason}."
        for name, report in reports.items()
        if report.verdict.status == "tolerable"  # of the others the name says why
    ]
    path = ROOT / "README.md"
    before, _, rest = path.read_text().partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    table = "\n".join(lines)
    path.write_text(f"{before}{MARKERS[0]}\n{table}\n{MARKERS[1]}{after}")


def draw_terminal(report: Report, path: Path, title: str) -> None:
    """Its beginning and its verdict, TERMINAL lines in all."""
    whole = Console(width=88, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    print_page(page(report), whole, "runs/…", details=False)
    assert isinstance(whole.file, io.StringIO)
    lines = Text.from_ansi(whole.file.getvalue()).split()
    verdict = next(at for at, line in enumerate(lines) if line.plain.startswith("verdict:"))
    end = lines[verdict:]
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    for line in [*lines[: TERMINAL - 1 - len(end)], Text("…"), *end]:
        console.print(line)
    svg = console.export_svg(title=title)
    # Rich names a font on the web; the reader's own monospace will do, and nothing is fetched.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


def draw_page(page: Path, path: Path) -> None:
    browser = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if browser is None:
        print(f"no Chromium: {path.name} not drawn", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--disable-background-networking", "--no-first-run", "--disable-sync"]
        flags += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run(
            [browser, *flags, f"--screenshot={path}", page.as_uri()],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
