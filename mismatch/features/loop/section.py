"""A training loop: six curves, arms in fixed colours, and what they say."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mismatch.features.loop.judge import FALL, WINDOW, Arm, LoopReport, at_end, claims, reward_fall
from mismatch.features.loop.spec import Checked
from mismatch.reports.formatting import capital, count, number, plural, text
from mismatch.reports.section import Column, Figure, Page, Section, Table
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = "Every arm trains from the same weights, with the same prompts and seeds."


class Panel(NamedTuple):
    """One picture; its unit is "" for plain numbers."""

    label: str
    unit: str = ""
    log: bool = False


PANELS = {
    "k3_kl": Panel("k3 KL", "nats", log=True),
    "entropy": Panel("entropy", "nats"),
    "reward": Panel("reward, mean"),
    "grad_norm": Panel("gradient norm before clipping", log=True),
    "log_ppl_diff_max": Panel("largest |log-perplexity difference|", "nats", log=True),
    "ratio_max": Panel("largest PPO ratio", log=True),
}
STRONG = (ACCENT, SECOND, INK)  # of the first arms, whose story the page tells; the others are grey
DASHES = ("-", "--", ":", "-.")  # of the grey arms, in turn
GAP = 0.09  # between two names, as a share of the height


def _ends(arm: Arm, name: str) -> str:
    """Return a column's mean over the last steps of an arm's seeds, and from where to where."""
    values = [at_end(run, name) for run in arm.runs]
    low, high, mean = number(min(values)), number(max(values)), number(float(np.mean(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _falls(arm: Arm) -> list[int | None]:
    """Return the step at which the reward falls, of every seed."""
    return [reward_fall(run) for run in arm.runs]


def _steps(arm: Arm) -> str:
    falls = _falls(arm)
    at = [str(step) for step in falls if step is not None]
    few = f" ({len(at)} of {len(falls)} seeds)" if len(at) < len(falls) else ""
    return f"{', '.join(at)}{few}" if at else "never"


ARMS = (
    Column("arm", text, of="name", tone="code"),
    Column("seeds", count, 1, of=lambda arm: len(arm.runs)),
    Column("reward", text, detail="last 5 steps, range of seeds", of=partial(_ends, name="reward")),
    Column("reward falls", text, detail="at step", of=_steps),
    Column("k3 KL", text, 1, detail="nats, last 5 steps", of=partial(_ends, name="k3_kl")),
    Column("entropy", text, 2, detail="nats, last 5 steps", of=partial(_ends, name="entropy")),
    Column("gradient norm", text, 3, detail="last 5 steps", of=partial(_ends, name="grad_norm")),
)
CLAIMS = (
    Column("higher", text, of="better", tone="code"),
    Column("lower", text, of="worse", tone="code"),
    Column(
        "difference of reward by seed, ± standard error",
        text,
        detail=f"last {WINDOW} steps",
        of=lambda claim: ", ".join(
            f"{number(gap)} ± {number(error)}"
            for gap, error in zip(claim.differences, claim.errors, strict=True)
        ),
    ),
    Column("claimed", text, of=lambda claim: "yes" if claim.agree else "no"),
)


def section(result: LoopReport) -> Section:
    """Return arms and seeds, the pictures, and every two arms below."""
    rows = [(arm.name, run) for arm in result.arms for run in arm.runs]
    checked = result.checked or Checked(0, 0, {})
    before = Column(
        "check before",
        text,
        detail=f"{checked.prompts} prompts × {checked.samples}",
        of=lambda arm: checked.verdicts.get(arm.name, "–").upper(),
    )
    columns = (*ARMS[:2], *([before] if result.checked else ()), *ARMS[2:])
    return Section(
        "loop",
        "Training loop",
        LEAD,
        warnings=[f"{arm}, seed {run.seed}: {run.stopped}" for arm, run in rows if run.stopped],
        tables=[Table.of(columns, result.arms)],
        figures=[
            Figure(
                f"loop-{name.replace('_', '-')}",
                capital(panel.label),
                f"{panel.label}{f', {panel.unit}' if panel.unit else ''}, by step.",
                partial(draw, result, name),
            )
            for name, panel in PANELS.items()
        ],
        notes=[
            f"The reward falls where the mean of {WINDOW} steps lies {FALL:g} below the best one "
            "so far. A difference of rewards is claimed where several seeds agree, each by more "
            "than twice the standard error over its steps. Bands reach from the lowest to the "
            "highest seed."
        ],
        parts=[Section("loop-claims", "Every two arms", tables=[Table.of(CLAIMS, claims(result))])],
    )


def story(result: LoopReport) -> str:
    """Say in which arms the reward falls, and in which it does not, with every seed.

    An arm whose seeds disagree is named with how many of them fall. An arm of one seed says nothing
    next to arms of several.
    """
    least = 2 if any(len(arm.runs) > 1 for arm in result.arms) else 1
    falling, never = [], []
    for arm in (arm for arm in result.arms if len(arm.runs) >= least):
        falls = _falls(arm)
        at = [str(step) for step in falls if step is not None]
        few = f" ({len(at)} of {len(falls)} seeds)" if len(at) < len(falls) else ""
        if at:
            falling.append(f"{arm.name} at step{'s' * (len(at) > 1)} {' and '.join(at)}{few}")
        else:
            never.append(arm.name)
    if not falling:
        return "The reward falls in no arm."
    fine = f"; with {', '.join(never)} it does not" if never else ""
    return f"The reward falls in {'; in '.join(falling)}{fine}."


def draw(result: LoopReport, name: str, axes: Axes) -> str:
    """Draw curves and bands of every arm, as far as every seed goes; return what they say.

    A logarithmic axis leaves out what is 0.
    """
    panel, said = PANELS[name], []
    named: list[tuple[float, str, str]] = []  # last value, arm and colour
    for place, arm in reversed(list(enumerate(result.arms))):  # the first on top
        length = min(run.steps for run in arm.runs)
        seeds = np.stack([run.curve(name)[:length] for run in arm.runs])
        steps = np.flatnonzero(np.isfinite(seeds).any(axis=0))
        if not len(steps):
            continue
        means = (of(seeds[:, steps], axis=0) for of in (np.nanmin, np.nanmean, np.nanmax))
        low, middle, high = (np.where(m > 0, m, np.nan) if panel.log else m for m in means)
        if place < len(STRONG):
            axes.fill_between(steps, low, high, color=STRONG[place], alpha=0.15, lw=0)
            axes.plot(steps, middle, color=STRONG[place], lw=2.0)
        else:
            dashes = DASHES[(place - len(STRONG)) % len(DASHES)]
            axes.plot(steps, middle, color=FAINT, lw=1.2, ls=dashes)
        if len(shown := middle[np.isfinite(middle)]):
            colour = STRONG[place] if place < len(STRONG) else FAINT
            named.append((float(shown[-1]), arm.name, colour))
        ends = [f"{number(float(middle[at]))} at step {int(steps[at])}" for at in (0, -1)]
        said.append(f"{arm.name} {' to '.join(ends)}")
    runs = [run for arm in result.arms for run in arm.runs]
    if panel.log and any((run.curve(name) > 0).any() for run in runs):
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="step", ylabel=panel.unit)
    axes.set_xlim(0, max(run.steps for run in runs) - 1)
    _name_ends(axes, sorted(named))
    return f"{panel.label}: {'; '.join(said)}"


def _name_ends(axes: Axes, named: list[tuple[float, str, str]]) -> None:
    """Write each arm's name at the end of its line; names that would touch move up or down."""
    axes.get_ylim()  # brings the limits up to date with the lines
    to_axes = axes.transData + axes.transAxes.inverted()
    places: list[float] = []
    for value, *_ in named:
        wanted = float(to_axes.transform((0.0, value))[1])
        places.append(max([wanted, *(place + GAP for place in places[-1:])]))
    for at, top in enumerate(1.0 - GAP * np.arange(len(places))[::-1]):
        place, (_, arm, colour) = min(places[at], top), named[at]
        axes.annotate(arm, (1.0, place), xycoords="axes fraction", xytext=(4, 0), va="center",
                      textcoords="offset points", color=colour, fontsize=9)  # fmt: skip


def page(result: LoopReport) -> Page:
    """Return the loop as a separate page."""
    runs = [run for arm in result.arms for run in arm.runs]
    falls = any(arm.runs and None not in _falls(arm) for arm in result.arms)
    steps = max((run.steps for run in runs), default=0)
    return Page(
        kind="training loop",
        word="reward falls" if falls else "reward holds",
        lead=story(result),
        tone="warn" if falls else "healthy",
        reason=f"{plural(len(result.arms), 'arm')} with the same weights, prompts and seeds",
        title=Path(result.model).name,
        facts=(f"{result.engine} and FSDP2; {plural(steps, 'step')}",),
        sections=(section(result),),
        file="loop",
    )
