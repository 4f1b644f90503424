"""What the numbers of the steps show: crossings, an idle clip, NaN, metrics that are lost."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from mismatch.analysis.thresholds import default_thresholds
from mismatch.features.logs.read import History
from mismatch.metrics.framework_names import Alias, aliases, anchors
from mismatch.reports.formatting import number, percent, plural

COLUMN = "bf16 dense"  # of the levels; a log does not say which one it is
ROLES = ("clip", "ppo_kl", "entropy", "grad_norm", "reward", "loss")
OURS = {"mismatch/k3_kl": "k3_kl", "mismatch/logprob_abs_diff_mean": "logprob_abs_diff_mean",
        "mismatch/ess_seq": "ess_seq"}  # fmt: skip
LEAST = 5  # steps, of which a clip that does nothing is said to be idle
IDLE = 1e-3  # share of clipped tokens, up to which a clip does nothing
GROWS = 4.0  # times the first steps' KL; times the root of it of mean |delta|
LOST = 3  # last steps without a metric that most steps before had
DISTANCES = ("k3_kl", "kl", "logprob_abs_diff_mean")


@dataclass(frozen=True)
class Curve:
    """One number over the steps."""

    name: str
    """As the framework logs it."""
    what: str
    """Our metric, or what it is in the loss."""
    remark: str
    """How it differs from our metric; "" where it does not."""
    steps: tuple[int, ...]
    values: tuple[float, ...]
    healthy: int | None = None
    """First step beyond the healthy level; None: no level, or never."""
    unfit: int | None = None
    measured: bool = False
    """It compares the trainer with the sampler."""

    @property
    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class LogFinding:
    """One thing that a log shows."""

    kind: str
    """``idle-clip``, ``unfit``, ``not-healthy``, ``not-finite`` or ``lost``."""
    name: str
    """As the framework logs it."""
    step: int | None
    """The first, or the last that has it; None: of all steps."""
    text: str


@dataclass(frozen=True)
class LogReport:
    """What a log shows."""

    framework: str
    """Id; "": only our own monitor's names."""
    curves: tuple[Curve, ...]
    findings: tuple[LogFinding, ...] = ()
    """What is wrong, the worst first."""
    remarks: tuple[str, ...] = ()
    steps: int = 0
    dump: str = ""
    """How this framework writes a dump."""
    anchor: str = ""
    schema: str = field(default="mismatch.log/1")


@cache
def tables() -> dict[str, Any]:
    """Return framework -> its names, as names.toml has them."""
    text = resources.files("mismatch.features.logs").joinpath("names.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def known(framework: str) -> dict[str, tuple[str, Alias | None]]:
    """Return name in a log -> what it is, of one framework; also of our monitor."""
    found: dict[str, tuple[str, Alias | None]] = {name: (what, None) for name, what in OURS.items()}
    for metric, of in aliases().items():
        for alias in of:
            same = {"miles": "slime"}.get(alias.framework, alias.framework)
            if same == framework:
                found.setdefault(alias.name.removeprefix("train/"), (metric, alias))
    table = tables()[framework]
    found |= {name: (role, None) for role in ROLES for name in table.get(role, ())}
    return found


def judge_log(history: History) -> LogReport | None:
    """Return what a log shows; None where no framework's names are in it."""
    names = Counter(name for of in history.steps.values() for name in of)
    scored = {}
    for each in tables():
        labels = tables()[each].get("labels", {})
        held = {name for name in names if labels.get(name, name) in known(each)}
        scored[each] = (
            len(held),
            sum(known(each)[labels.get(name, name)][1] is not None for name in held),
        )
    framework = max(scored, key=lambda each: (scored[each][1], scored[each][0]))
    if not scored[framework][0]:
        return None
    labels, table = tables()[framework].get("labels", {}), known(framework)
    thresholds = default_thresholds()
    curves, what_of = list[Curve](), dict[str, Curve]()
    for name in sorted(names):
        what, alias = table.get(labels.get(name, name), ("", None))
        if not what:
            continue
        steps, values = history.series(name)
        level = thresholds.get(what, {}).get(COLUMN)
        sign = -1 if alias is not None and alias.sign == "opposite" else 1
        worse = 1 if level is None or level.healthy <= level.unfit else -1  # which way
        above = [
            next(
                (s for s, v in zip(steps, values, strict=True) if worse * v * sign > worse * bound),
                None,
            )
            for bound in ((level.healthy, level.unfit) if level is not None else ())
        ]
        remark = alias.remark if alias is not None else ""
        healthy, unfit = above or (None, None)
        compares = what in thresholds or what in DISTANCES
        curve = Curve(name, what, remark, tuple(steps), tuple(values), healthy, unfit, compares)
        curves.append(curve)
        what_of.setdefault(what, curve)
    found = [
        *_idle(what_of),
        *_crossings(curves),
        *_not_numbers(curves),
        *_lost(history, [curve.name for curve in curves]),
    ]
    dump, anchor = tables()[framework]["dump"], anchors().get(framework, "")
    said, remarks = tuple(found), tuple(history.remarks)
    return LogReport(framework, tuple(curves), said, remarks, len(history.steps), dump, anchor)


def _crossings(curves: list[Curve]) -> list[LogFinding]:
    said = []
    for curve in sorted(curves, key=lambda each: each.unfit is None):
        for step, kind, verb in (
            (curve.unfit, "unfit", "is first beyond the unfit level"),
            (curve.healthy, "not-healthy", "first leaves the healthy level"),
        ):
            if step is not None:
                value = number(curve.values[curve.steps.index(step)])
                text = f"{curve.name} {verb} at step {step}: {value}"
                said.append(LogFinding(kind, curve.name, step, text))
                break
    return said


def _idle(what_of: dict[str, Curve]) -> list[LogFinding]:
    """Say that the clip acts on nothing while the sampler's distance grows."""
    clip = what_of.get("clip")
    distance = next((what_of[each] for each in DISTANCES if each in what_of), None)
    if clip is None or distance is None or len(distance.finite) < LEAST or not clip.finite:
        return []
    part = max(1, len(distance.finite) // 5)
    before = float(np.median(np.abs(distance.finite[:part])))
    after = float(np.median(np.abs(distance.finite[-part:])))
    needed = GROWS**0.5 if distance.what == "logprob_abs_diff_mean" else GROWS
    if max(clip.finite) > IDLE or not after > needed * before:
        return []
    text = (
        f"idle clip: {clip.name} is at most {percent(max(clip.finite))} in all steps, while "
        f"{distance.name} grows from {number(before)} to {number(after)}: the ratio compares the "
        "trainer with itself, and clipping does not see the sampler"
    )
    return [LogFinding("idle-clip", clip.name, None, text)]


def _not_numbers(curves: list[Curve]) -> list[LogFinding]:
    said = []
    for curve in curves:
        both = zip(curve.steps, curve.values, strict=True)
        bad = [step for step, value in both if not math.isfinite(value)]
        if bad:
            more = f" and {plural(len(bad) - 1, 'later step')}" if len(bad) > 1 else ""
            text = f"{curve.name} is no finite number at step {bad[0]}{more}"
            said.append(LogFinding("not-finite", curve.name, bad[0], text))
    return said


def _lost(history: History, names: list[str]) -> list[LogFinding]:
    """Say which metrics most steps had, and the last steps have not."""
    order = sorted(history.steps)
    before, last = order[:-LOST], order[-LOST:]
    if len(before) < LEAST:
        return []
    said = []
    for name in names:
        held = [step for step in before if name in history.steps[step]]
        gone = not any(name in history.steps[step] for step in last)
        if gone and len(held) >= 0.8 * (before.index(held[-1]) + 1) and len(held) >= LEAST:
            text = f"{name} is lost after step {held[-1]}"
            said.append(LogFinding("lost", name, held[-1], text))
    return said
