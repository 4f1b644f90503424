"""Write docs/fixes/ from the catalogue and the guides of mismatch/experiments/fixes."""

from __future__ import annotations

import textwrap
from pathlib import Path

from mismatch.experiments.fixes.base import Fix
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.experiments.fixes.guides import SIDES, Evidence, Recipe, guide_of, sentence, trials

FOLDER = Path(__file__).parent.parent / "docs" / "fixes"

HEADINGS = (
    "What it changes",
    "What to expect",
    "When it makes things worse",
    "How to try it",
    "How to set it",
    "Evidence",
)
MADE = "<!-- Made by tools/fix_pages.py; edit mismatch/experiments/fixes/guide-*.toml. -->"
WIDTH = 110
INTRO = """\
A fix is one change of a setting. `mismatch check --fix ID[,ID…]` applies it for real and measures
the mismatch again; `--fix all` tries each that applies, then pairs of those that help. The report
ranks what was measured by uncorrected k3, with the share of the mismatch that each removes (under
5 % is negligible), confirms the best on prompts that had no part in choosing it, and says which to
use and how frameworks set it. `mismatch fixes` lists them, and with `--model MODEL` says what
applies; `mismatch fixes ID` prints the essentials of a page.

Fixes of the loss change weights and no log-probability. They are previewed among the
[corrections](../corrections.md), never ranked as fixes, and never improve the verdict.
"""


def pages() -> dict[str, str]:
    """File name -> Markdown, of the whole folder."""
    return {"README.md": _index(), **{f"{fix.id}.md": page(fix) for fix in FIXES}}


def page(fix: Fix) -> str:
    """One fix."""
    guide = guide_of(fix.id)
    bodies = (
        wrapped(guide.changes),
        f"{wrapped(sentence(fix.effect))}\n\n{wrapped('Cost: ' + fix.cost + '.')}",
        wrapped(guide.worse),
        _trial(fix),
        "\n\n".join(_setting(one) for one in guide.settings),
        "\n".join(_evidence(one) for one in guide.evidence),
    )
    parts = [f"## {title}\n\n{body}" for title, body in zip(HEADINGS, bodies, strict=True)]
    head = f"# `{fix.id}`\n\n{MADE}\n\n{SIDES[fix.side]}: {_plain(fix.summary)}."
    return "\n\n".join([head, *parts]) + "\n"


def _trial(fix: Fix) -> str:
    block = "```bash\n" + "\n".join(trials(fix)) + "\n```"
    if not fix.flags:
        return block
    flags = f"`{fix.flags}`" if fix.flags.set else fix.flags
    return f"{block}\n\nA check with it for good: {flags}"


def wrapped(text: str) -> str:
    """A paragraph of Markdown."""
    return textwrap.fill(_plain(text), WIDTH, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _setting(one: Recipe) -> str:
    block = "\n\n```\n" + "\n".join(one.lines) + "\n```" if one.lines else ""
    remark = sentence(one.remark) + " " if one.remark else ""
    return f"### {one.framework}{block}\n\n{wrapped(f'{remark}Read in: {one.source}.')}"


def _evidence(one: Evidence) -> str:
    source = one.source if one.read else f"{one.source}; second-hand, not read there"
    text = f"- {one.text} ({source})"
    return textwrap.fill(
        _plain(text), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _index() -> str:
    parts = [f"# Fixes\n\n{MADE}\n\n{INTRO.rstrip()}"]
    for side, title in SIDES.items():
        rows = [
            f"| [`{fix.id}`]({fix.id}.md) | {_plain(fix.summary)} | {_plain(fix.cost)} |"
            for fix in FIXES
            if fix.side == side
        ]
        table = "\n".join(["| id | what it changes | cost |", "| --- | --- | --- |", *rows])
        parts.append(f"## {title}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    made = pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for known in FOLDER.glob("*.md"):
        if known.name not in made:
            known.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {FOLDER}")


if __name__ == "__main__":
    main()
