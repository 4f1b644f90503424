"""Pages of the site about fixes, from the catalogue and guides of mismatch/experiments/fixes."""

from __future__ import annotations

import textwrap

from mismatch.experiments.fixes.base import Fix
from mismatch.experiments.fixes.catalogue import FIXES, trials
from mismatch.experiments.fixes.guides import SIDES, Evidence, guide_of, sentence
from mismatch.frameworks import Recipe

HEADINGS = (
    "What it changes",
    "What to expect",
    "When it makes things worse",
    "How to try it",
    "How to set it",
    "Evidence",
)
WIDTH = 110


def pages() -> dict[str, str]:
    """Return a page for each fix, by its path below docs."""
    return {f"reference/fixes/{fix.id}.md": page(fix) for fix in FIXES}


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
    head = f"# `{fix.id}`\n\n{SIDES[fix.side]}: {_plain(fix.summary)}."
    return "\n\n".join([head, *parts]) + "\n"


def _trial(fix: Fix) -> str:
    block = "```bash\n" + "\n".join(trials(fix)) + "\n```"
    if not fix.flags:
        return block
    flags = f"`{fix.flags}`" if fix.flags.set else fix.flags
    return f"{block}\n\nFlags that keep the fix in a check: {flags}"


def wrapped(text: str) -> str:
    """Return a paragraph of Markdown."""
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


def tables() -> str:
    """Return the fixes of each side as a table."""
    parts = []
    for side, title in SIDES.items():
        rows = [
            f"| [`{fix.id}`](fixes/{fix.id}.md) | {_plain(fix.summary)} | {_plain(fix.cost)} |"
            for fix in FIXES
            if fix.side == side
        ]
        table = "\n".join(["| id | what it changes | cost |", "| --- | --- | --- |", *rows])
        parts.append(f"## {title}\n\n{table}")
    return "\n\n".join(parts) + "\n"
