"""How every part of the terminal report writes: headings, paragraphs, aligned columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def say(console: Console, text: str, style: str = "") -> None:
    """One line as it is: no markup in foreign text, no wrapping that breaks a path."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def heading(console: Console, title: str, remark: str = "") -> None:
    from rich.text import Text

    say(console, "")
    text = Text(title, "bold")
    text.append(f"  {remark}" if remark else "", "dim")
    console.print(text, highlight=False)


def paragraph(console: Console, text: str, indent: int = 2, style: str = "") -> None:
    """Wrapped text; a list's mark ("- ") stays left of the following lines."""
    mark = text[:2] if text[:2] in {"- ", "✕ ", "! "} else ""
    wrapped = textwrap.fill(
        text,
        width=console.width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + len(mark)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    say(console, wrapped, style)


def columns(*specs: tuple[str, bool, int]) -> Table:
    """A table of (title, right-aligned, minimum width); only the first column may wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, (title, right, width) in enumerate(specs):
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(title, justify=justify, min_width=width, no_wrap=index > 0)
    return table
