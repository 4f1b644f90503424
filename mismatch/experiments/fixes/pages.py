"""The pages of docs/fixes/, made of the catalogue and the guides: one source for docs and command.

``python tools/fix_pages.py`` writes them; a test compares.
"""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mismatch.analysis.corrections.recipes import Recipe, recipes
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Fix
from mismatch.experiments.fixes.catalogue import FIXES
from mismatch.metrics.corrections import Settings


@dataclass(frozen=True, slots=True)
class Evidence:
    """One published or measured fact.

    Attributes:
        read: it was read in the source; False: second-hand.
    """

    text: str
    source: str
    read: bool = True


@dataclass(frozen=True, slots=True)
class Guide:
    """The page of one fix.

    Attributes:
        changes: what it changes, and why that removes mismatch.
        worse: when it makes things worse, or hides something.
        settings: how each framework is told.
    """

    id: str
    changes: str
    worse: str
    settings: tuple[Recipe, ...]
    evidence: tuple[Evidence, ...]


VERSIONS = {  # what the keys were read from; a source without a path names itself
    "verl": "verl 0.9.1",
    "TRL": "TRL 1.16.0",
    "SkyRL": "SkyRL 0.3.0",
    "NeMo-RL": "NeMo-RL main (2026)",
    "prime-rl": "prime-rl main (2026)",
    "slime": "slime main (2026)",
    "miles": "miles main (2026)",
}
FILES = ("guide-train.toml", "guide-engine.toml", "guide-estimator.toml")


def guide_of(name: str) -> Guide:
    """The guide of a fix.

    Raises:
        MismatchError: there is none.
    """
    found = guides().get(name)
    if found is None:
        raise MismatchError(f"no guide to the fix {name!r}", f"one of: {', '.join(guides())}")
    return found


def settings_of(name: str) -> tuple[Recipe, ...]:
    """How frameworks set a fix; empty where nothing is known of it."""
    found = guides().get(name)
    return found.settings if found else ()


@cache
def guides() -> dict[str, Guide]:
    """All of them, by id of the fix."""
    found = {}
    for name in FILES:
        text = resources.files("mismatch.experiments.fixes").joinpath(name).read_text("utf-8")
        for id, entry in tomllib.loads(text).items():
            found[id] = _guide(id, entry)
    return found


def _source(framework: str, source: str) -> str:
    version = VERSIONS.get(framework)
    return source if version is None or "#" in source.partition(";")[0] else f"{version}, {source}"


def _guide(id: str, entry: dict[str, Any]) -> Guide:
    settings = [
        Recipe(
            one["framework"],
            tuple(one.get("lines", "").strip("\n").splitlines()),
            one.get("remark", ""),
            _source(one["framework"], one["source"]),
        )
        for one in entry.get("settings", ())
    ]
    if correction := entry.get("correction"):
        settings = [*recipes(correction, Settings()), *settings]
    return Guide(
        id,
        " ".join(entry["changes"].split()),
        " ".join(entry["worse"].split()),
        tuple(settings),
        tuple(Evidence(**one) for one in entry["evidence"]),
    )


HEADINGS = (
    "What it changes",
    "What to expect",
    "When it makes things worse",
    "How to try it",
    "How to set it",
    "Evidence",
)
SIDES = {
    "train": "Trainer",
    "engine": "Engine",
    "estimator": "Loss (changes weights, removes nothing)",
}
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


def trials(fix: Fix) -> list[str]:
    """The commands that try it."""
    asked = [Chosen(fix, value).label for value in fix.values] or [fix.id]
    lines = [f"mismatch check --model MODEL --fix {name}" for name in asked]
    return [*lines, "mismatch corrections RUN"] if fix.side == "estimator" else lines


def _trial(fix: Fix) -> str:
    block = "```bash\n" + "\n".join(trials(fix)) + "\n```"
    if not fix.flags:
        return block
    flags = f"`{fix.flags}`" if fix.flags.set else fix.flags
    return f"{block}\n\nA check with it for good: {flags}"


def sentence(text: str) -> str:
    """A phrase as a sentence; a first word that is a setting's name stays as it is."""
    first = text.partition(" ")[0]
    start = text[:1] if set(first) & set("_=.") else text[:1].upper()
    return f"{start}{text[1:]}."


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
