"""`mismatch fixes`: what can be tried, what of it applies here, and how frameworks set it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch.cli.flags import Flags, with_flags
from mismatch.cli.options import (
    OUTPUT,
    ConfigFlags,
    EngineFlags,
    ForecastFlags,
    ModelFlags,
    PromptFlags,
    RoutingFlags,
    TrainFlags,
    TrainModelFlags,
    VerlFlags,
)

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.experiments.fixes.base import Fix
    from mismatch.specs import CheckSpec

SCHEMA = "mismatch.fixes/1"
NO_MODEL = (
    "Which apply depends on the check: give its flags, --model MODEL … . "
    "One fix in detail: mismatch fixes ID. Try them: mismatch check --fix all."
)


class FixArgument:
    fix: Annotated[str | None, typer.Argument(help="Id of one fix, to see it in detail.")] = None


class FixOutput:
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)] = (
        False
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One fix in the list.

    Attributes:
        applies: whether a check of the given flags could try it; None: no model was given.
        reason: why not; or of some of its values why not.
    """

    fix: Fix
    applies: bool | None = None
    reason: str = ""


@with_flags(
    FixArgument,
    ModelFlags,
    TrainModelFlags,
    PromptFlags,
    EngineFlags,
    RoutingFlags,
    TrainFlags,
    VerlFlags,
    ForecastFlags,
    ConfigFlags,
    FixOutput,
)
def fixes(flags: Flags) -> int:
    """List the fixes that a check can try, with what each needs, or show one of them.

    With --model and the other flags of your check it also says what applies there, or why not.
    Nothing is loaded and nothing is run.
    """
    from rich.console import Console

    from mismatch.experiments.fixes.catalogue import FIXES, fix_named

    wanted = (fix_named(flags["fix"]),) if flags["fix"] else FIXES
    model = flags["model"] or flags["verl_config"]
    known = entries(_spec(flags)) if model else [Entry(fix) for fix in FIXES]
    shown = [entry for entry in known if entry.fix in wanted]
    if flags["as_json"]:
        rows = [_plain(entry, detailed=flags["fix"] is not None) for entry in shown]
        typer.echo(json.dumps({"schema": SCHEMA, "model": flags["model"], "fixes": rows}, indent=2))
    elif flags["fix"]:
        _print_one(shown[0], Console())
    else:
        _print_list(shown, Console())
    return 0


def entries(spec: CheckSpec) -> list[Entry]:
    """Every fix, and whether this check could try it."""
    from mismatch.experiments.fixes.catalogue import FIXES
    from mismatch.experiments.fixes.environment import context_of
    from mismatch.experiments.fixes.planning import SIDES, plan_fixes

    asked = replace(spec, fixes=SIDES)
    planned = plan_fixes(asked, context_of(asked))
    possible = {variant.chosen[0].fix.id for variant in planned.variants}
    possible |= {fix.id for fix in planned.estimators}
    reasons: dict[str, list[str]] = {}
    for row in planned.refused:
        name, _, value = row.id.partition("=")
        why = f"{value}: {row.reason}" if value and name in possible else row.reason
        reasons.setdefault(name, []).append(why)
    return [
        Entry(fix, fix.id in possible, "; ".join(dict.fromkeys(reasons.get(fix.id, ()))))
        for fix in FIXES
    ]


def _spec(flags: Flags) -> CheckSpec:
    from mismatch.cli.to_spec import check_spec
    from mismatch.cli.trainer import with_trainer

    # The flag of the same name asks a check for fixes; here it is the argument.
    asked = Flags({name: value for name, value in flags.items() if name != "fix"})
    asked.given = flags.given - {"fix"}
    return with_trainer(check_spec(asked), asked)[0]


def _plain(entry: Entry, detailed: bool) -> dict[str, Any]:
    from mismatch.experiments.fixes.guides import guide_of

    fix = entry.fix
    row: dict[str, Any] = {
        "id": fix.id,
        "side": fix.side,
        "summary": fix.summary,
        "effect": fix.effect,
        "cost": fix.cost,
        "flags": fix.flags,
        "values": list(fix.values),
        "correction": fix.corrects or None,
        "hides": fix.hides,
        "applies": entry.applies,
        "reason": entry.reason,
    }
    if detailed:
        guide = guide_of(fix.id)
        row |= {
            "changes": guide.changes,
            "worse": guide.worse,
            "settings": [asdict(one) for one in guide.settings],
            "evidence": [asdict(one) for one in guide.evidence],
        }
    return row


def _print_list(shown: list[Entry], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from mismatch.experiments.fixes.pages import SIDES

    for side, title in SIDES.items():
        console.print(Text(title, "bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True, min_width=26)
        table.add_column()
        for entry in shown:
            if entry.fix.side == side:
                table.add_row(f"  {entry.fix.id}", _about(entry))
        console.print(table, highlight=False, markup=False)
        console.print()
    if any(entry.applies is None for entry in shown):
        console.print(NO_MODEL, highlight=False, markup=False)


def _about(entry: Entry) -> Any:
    """What it changes, what it costs, and whether it can be tried."""
    from rich.text import Text

    from mismatch.reports.text import line

    text = Text(entry.fix.summary)
    if entry.applies is not False:
        text.append(f"\ncost: {entry.fix.cost}", "dim")
    if entry.applies is not None:
        applies = "✓ applies here" if entry.applies else "– not here"
        more = f" ({line(entry.reason)})" if entry.applies else f": {line(entry.reason)}"
        style = "green" if entry.applies else "dim"
        text.append(f"\n{applies}{more if entry.reason else ''}", style)
    return text


def _print_one(entry: Entry, console: Console) -> None:
    """The essentials of its page."""
    from rich.text import Text

    from mismatch.experiments.fixes.guides import guide_of
    from mismatch.experiments.fixes.pages import SIDES, sentence, trials
    from mismatch.reports.text import line

    fix, guide = entry.fix, guide_of(entry.fix.id)

    def part(title: str, *paragraphs: str) -> None:
        console.print()
        console.print(Text(title, "bold"))
        for text in paragraphs:
            console.print(Text(text))

    title = Text(fix.id, "bold")
    title.append(f"  {SIDES[fix.side].partition(' (')[0].lower()}: {fix.summary}")
    console.print(title)
    if entry.applies is not None:
        said = "Applies here" if entry.applies else "Does not apply here"
        console.print(Text(f"{said}{': ' + line(entry.reason) if entry.reason else ''}."))
    part("What it changes", guide.changes)
    part("What to expect", sentence(fix.effect), sentence(f"cost: {fix.cost}"))
    part("When it makes things worse", guide.worse)
    part("How to try it", *(f"  {text}" for text in trials(fix)))
    part("How to set it")
    for one in guide.settings:
        remark = "; ".join(text for text in (one.remark, one.source) if text)
        console.print(Text(f"- {one.framework}: {remark}"))
        for text in one.lines:
            console.print(f"      {text}", highlight=False, markup=False, soft_wrap=True)
    part("Evidence")
    for fact in guide.evidence:
        source = fact.source if fact.read else f"{fact.source}; second-hand"
        console.print(Text(f"- {fact.text} ({source})"))
