"""Shell blocks of the documentation, line by line, as a reader copies them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^( *)```(?:bash|sh|shell|console)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
# At the end of a line, or alone: then for the rest of its block. The reason follows.
MARK = re.compile(r"#.*\bnot run by the tests: (?P<reason>\S.*)")


@dataclass(frozen=True)
class Line:
    """A command of a page; what goes on behind a backslash is joined.

    Attributes:
        not_run: the reason that the page gives; "": the tests run it.
    """

    page: str
    text: str
    not_run: str = ""


def shell_lines(page: Path) -> list[Line]:
    """Return the commands and comments of a page's shell blocks."""
    found = []
    for _, block in BLOCK.findall(page.read_text("utf-8")):
        rest = ""
        for text in textwrap.dedent(block).replace("\\\n", " ").splitlines():
            mark = MARK.search(text)
            reason = mark["reason"] if mark else rest
            if text.startswith("#") and mark:
                rest = reason
            elif text.strip():
                found.append(Line(page.relative_to(ROOT).as_posix(), text, reason))
    return found
