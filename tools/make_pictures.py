"""Make the README's example and pictures: a saved run under examples/, images under docs/images/.

    make example

Runs `mismatch check` twice on the embedded model (as it is, and with the planted sink-less
attention), keeps the reports, and draws the terminal (SVG) and the HTML report (PNG, where Chromium
is installed).
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from mismatch import store
from mismatch.reports.document import report_from_json
from mismatch.reports.terminal import print_report
from mismatch.types import Report

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
KEPT = ("report.html", "report.json", "report.md", "tokens.parquet")
RUNS = {"tiny-gpt-oss": [], "tiny-gpt-oss-no-sinks": ["--attention", "no-sinks"]}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 900


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, flags in RUNS.items():
        folder = ROOT / "examples" / name
        run_check(folder, flags)
        report = report_from_json(store.read_json(folder / "report.json"))
        draw_terminal(report, IMAGES / f"terminal-{name}.svg", f"mismatch check {' '.join(flags)}")
        draw_page(folder / "report.html", IMAGES / f"report-{name}.png")


def run_check(folder: Path, flags: list[str]) -> None:
    """Run a check in a temporary directory and keep its reports."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "mismatch", "check", "--model", "tiny-gpt-oss", *flags]
        done = subprocess.run([*command, "--out", "run"], cwd=scratch, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)} measured nothing")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in KEPT:
            shutil.copy(Path(scratch) / "run" / file, folder)


def draw_terminal(report: Report, path: Path, title: str) -> None:
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    print_report(report, console, "runs/…")
    path.write_text(console.export_svg(title=title))


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
