"""`mismatch fixes`: what can be tried, what of it applies here, and how frameworks set it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from mismatch.cli.command import project_config, read_config, with_flags
from mismatch.cli.configuration import configured, configured_model
from mismatch.cli.flags import JSON, Flags, Option
from mismatch.cli.options import CHECK, CONFIG
from mismatch.errors import MismatchError
from mismatch.specs import MODEL, CheckSpec

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.experiments.fixes.base import Fix

SCHEMA = "mismatch.fixes/1"
NO_MODEL = (
    "Which apply depends on the check: name its run, --like RUN, or its flags, --model MODEL and "
    "--config FILE. One fix in detail: mismatch fixes ID. Try them: mismatch check --fix all."
)
ID = Option("id", str | None, "", "Id of one fix, to see it in detail.", argument=True)
LIKE = Option("like", Path | None, MODEL, "A run of the check that they would be tried in.")
MODEL_FLAG = next(option for option in CHECK if option.name == "model")


class Entry(NamedTuple):
    """One fix in the list.

    Attributes:
        applies: whether a check of the given flags could try it; None: no model was given.
        reason: why not; or of some of its values why not.
    """

    fix: Fix
    applies: bool | None = None
    reason: str = ""

    @property
    def answer(self) -> str:
        """Whether a check could try it, and why not."""
        from mismatch.reports.formatting import line

        answer = "✓ applies here" if self.applies else "– not here"
        return f"{answer}: {line(self.reason)}" if self.reason else answer


@with_flags(ID, MODEL_FLAG, LIKE, CONFIG, JSON)
def fixes(flags: Flags) -> int:
    """List the fixes that a check can try, or show one of them.

    With a run of your check, or its flags, it also says which fixes apply, or why not. Nothing is
    loaded and nothing is run.

    Examples:
    mismatch fixes
    mismatch fixes attention-sinks
    mismatch fixes --like RUN
    """
    from rich.console import Console

    from mismatch.experiments.fixes.catalogue import FIXES, fix_named
    from mismatch.experiments.fixes.context import context_of
    from mismatch.experiments.fixes.planning import SIDES, plan_fixes

    asked = flags["id"]
    chosen = (fix_named(asked),) if asked else FIXES
    shown = [Entry(fix) for fix in chosen]
    asked_of = of_check(flags)
    if asked_of is not None:
        spec = replace(asked_of, fixes=SIDES)
        planned = plan_fixes(spec, context_of(spec))
        possible = {variant.chosen[0].id for variant in planned.variants}
        possible |= {fix.id for fix in planned.estimators}
        reasons: dict[str, dict[str, None]] = {fix.id: {} for fix in FIXES}
        for row in planned.refused:
            name, _, value = row.id.partition("=")
            why = f"{value}: {row.reason}" if value and name in possible else row.reason
            reasons[name][why] = None
        shown = [Entry(fix, fix.id in possible, "; ".join(reasons[fix.id])) for fix in chosen]
    if flags.as_json:
        model = flags["model"] or (asked_of.train.model if asked_of else None)
        rows = [_plain(entry, detailed=asked is not None) for entry in shown]
        typer.echo(json.dumps({"schema": SCHEMA, "model": model, "fixes": rows}, indent=2))
    elif asked:
        _print_fix(shown[0], Console())
    else:
        _print_list(shown, Console())
    return 0


def of_check(flags: Flags) -> CheckSpec | None:
    """Return the check that a run, or a model and a file of flags, name; None: none is named."""
    from mismatch.cli.to_spec import check_spec
    from mismatch.run.directory import load_spec

    if flags["like"] is not None:
        if flags["model"] or flags["config"]:
            fault = "--like RUN has all flags of its check"
            raise MismatchError(fault, "drop --model and --config")
        return load_spec(flags["like"])  # nothing of it is run
    given = read_config(flags["config"], CHECK) if flags["config"] else project_config(CHECK)
    values = Flags({option.name: option.default for option in CHECK} | given)
    values["model"] = flags["model"] or values["model"]
    values.explicit = frozenset(given)
    if not values["model"] and not configured_model(values):
        return None
    return configured(check_spec(values), values)[0]


def _plain(entry: Entry, detailed: bool) -> dict[str, Any]:
    from mismatch.experiments.fixes.guides import guide_of

    fix = entry.fix
    row: dict[str, Any] = {
        **{name: getattr(fix, name) for name in ("id", "side", "summary", "effect", "cost")},
        "flags": str(fix.flags),
        "values": list(fix.values),
        "correction": fix.corrects or None,
        "hides": fix.hides,
        "applies": entry.applies,
        "reason": entry.reason,
    }
    if detailed:
        row |= asdict(guide_of(fix.id))
    return row


def _print_list(shown: list[Entry], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from mismatch.experiments.fixes.guides import SIDES

    for side, title in SIDES.items():
        console.print(Text(title, "bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True, min_width=26)
        table.add_column()
        for entry in shown:
            if entry.fix.side == side:
                about = Text(entry.fix.summary)
                if entry.applies is not False:
                    about.append(f"\ncost: {entry.fix.cost}", "dim")
                if entry.applies is not None:
                    about.append(f"\n{entry.answer}", "green" if entry.applies else "dim")
                table.add_row(f"  {entry.fix.id}", about)
        console.print(table, highlight=False, markup=False)
        console.print()
    if any(entry.applies is None for entry in shown):
        console.print(NO_MODEL, highlight=False, markup=False)


def _print_fix(entry: Entry, console: Console) -> None:
    """Print the essentials of its page."""
    from rich.text import Text

    from mismatch.experiments.fixes.catalogue import trials
    from mismatch.experiments.fixes.guides import SIDES, guide_of, sentence

    fix, guide = entry.fix, guide_of(entry.fix.id)
    settings = []
    for setting in guide.settings:
        about = "; ".join(filter(None, (setting.remark, setting.source)))
        settings.append(f"- {setting.framework}: {about}")
        settings += [f"      {line}" for line in setting.lines]
    evidence = [
        f"- {fact.text} ({fact.source}{'' if fact.read else '; second-hand'})"
        for fact in guide.evidence
    ]
    parts = {
        "What it changes": [guide.changes],
        "What to expect": [sentence(fix.effect), sentence(f"cost: {fix.cost}")],
        "When it makes things worse": [guide.worse],
        "How to try it": [f"  {text}" for text in trials(fix)],
        "How to set it": settings,
        "Evidence": evidence,
    }
    side = SIDES[fix.side].partition(" (")[0].lower()
    console.print(Text.assemble((fix.id, "bold"), f"  {side}: {fix.summary}"))
    if entry.applies is not None:
        console.print(Text(entry.answer))
    for title, lines in parts.items():
        console.print()
        console.print(Text(title, "bold"))
        for text in lines:
            # A setting is copied: no line of it is broken.
            console.print(Text(text), soft_wrap=text.startswith("      "))
