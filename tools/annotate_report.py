"""Draw the numbered pictures of docs/start/read-report.md from the saved run of a fault.

    python tools/annotate_report.py

The page is rendered by the present code, opened in Chromium, and gets a numbered disc at each place
that the documentation explains. The numbers of a picture are those of the list below it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.chromium import find_chromium, started  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Page

IMAGES = ROOT / "docs" / "images"
EXAMPLE = ROOT / "examples" / "tiny-gpt-oss-no-sinks"
WIDTH, MARGIN = 1000, 4  # pixels


@dataclass(frozen=True)
class Picture:
    """A part of the page, from the top of ``first`` to the bottom of ``last``, and its numbers.

    All are CSS selectors of one element each; Playwright's ``:has-text`` finds an element by its
    words.
    """

    name: str
    first: str
    last: str
    places: tuple[str, ...]


def answer(title: str) -> str:
    """Return the selector of one row of the first screen."""
    return f"dl.answers > dt:text-is('{title}')"


PICTURES = (
    Picture(
        "read-1-first-screen",
        "p.brand",
        "dl.answers",
        (
            "div.verdict",
            *map(answer, ("Best fix", "Cause", "Side at fault", "In training", "How sure")),
            *map(answer, ("Not tested", "Next")),
        ),
    ),
    Picture(
        "read-2-numbers",
        "#normal-or-not",
        "#tokens > .figures",
        (
            "#headline > .said",
            "#headline > .scroll thead",
            "#headline > .scroll tr:has-text('k3 KL')",
            "#noise",
            "#histogram",
            "#by-position",
        ),
    ),
    Picture(
        "read-3-causes-and-fixes",
        "#why",
        "#fixes > .beside",
        (
            "#causes > .said",
            "#causes-evidence",
            "#square > .beside",
            "#locate",
            "#fixes > .beside",
            "#fixes > .beside .scroll",
        ),
    ),
)
DISC = """([x, y, number]) => {
  const disc = document.createElement("div");
  disc.textContent = number;
  Object.assign(disc.style, {
    position: "absolute", left: `${x}px`, top: `${y}px`, width: "22px", height: "22px",
    borderRadius: "50%", background: "#b3261e", color: "#fff", font: "bold 13px/22px sans-serif",
    textAlign: "center", boxShadow: "0 0 0 2px #fff", zIndex: 9,
  });
  document.body.append(disc);
}"""


def main() -> None:
    import mismatch

    binary = find_chromium()
    if binary is None:
        print("no Chromium: the numbered pictures are not drawn", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as scratch, started(binary) as browser:
        page = Path(scratch) / "report.html"
        page.write_text(mismatch.load(EXAMPLE).to_html(), "utf-8")
        for picture in PICTURES:
            browser.open(page.as_uri(), width=WIDTH)
            draw(browser.page, picture, IMAGES / f"{picture.name}.png")


def draw(page: Page, picture: Picture, path: Path) -> None:
    """Put numbers on the places of one picture and save this part of the page."""
    for number, place in enumerate(picture.places, 1):
        box = page.locator(place).bounding_box()
        assert box is not None, f"{place}: not visible"
        page.evaluate(DISC, [max(box["x"] - 26, 2), box["y"] + 2, number])
    top, end = (page.locator(place).bounding_box() for place in (picture.first, picture.last))
    assert top is not None
    assert end is not None
    height = end["y"] + end["height"] - top["y"] + 2 * MARGIN
    clip = {"x": 0.0, "y": max(top["y"] - MARGIN, 0), "width": float(WIDTH), "height": height}
    page.screenshot(path=path, clip=clip, full_page=True)  # type: ignore[arg-type]
    with Image.open(path) as drawn:  # a page has few colours: a third of the bytes
        drawn.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
