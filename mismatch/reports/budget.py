"""The error budget of a run: which scorings form its chain, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.metrics.budget import Budget, Gap, Step, error_budget
from mismatch.pipeline.commands import REFERENCE, TRAIN
from mismatch.reports import quantities
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line
from mismatch.types import Estimate, Report, Rollout, Scoring

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec

BESIDE = {  # variant of the trainer's scoring -> what it is
    "repeated": "trainer repeated",
    "regrouped": "trainer regrouped",
    "grad": "trainer with gradients",
    "replayed": "trainer with replayed routing",
}
ENGINE_REPEATED = "engine decode repeated"


def budget_of(
    spec: CheckSpec,
    rollout: Rollout,
    scorings: Mapping[str, Scoring],
    refused: Mapping[str, str],
    seed: int = 0,
) -> Budget:
    """The error budget of what a run has scored, with a reason for every step it has not.

    Args:
        scorings: those that can be compared; the engine's decode and the trainer among them.
        refused: scorings that cannot, with the reason.

    Raises:
        EmptyComparison, MismatchError: see :func:`mismatch.metrics.budget.error_budget`.
    """
    engine = spec.rollout.engine.engine
    decode, prefill = scorings[f"{engine}:decode"], f"{engine}:prefill"
    reasons = {
        name: reason
        for name in (prefill, REFERENCE)
        if (reason := refused.get(name) or _off_chain(name, decode, scorings, spec))
    }
    chain = [decode.name, *(n for n in (prefill, REFERENCE) if n not in reasons), TRAIN]
    beside, gaps = _beside(spec, scorings, refused, engine)
    gaps = [Gap(_titles(prefill)[name == REFERENCE], why) for name, why in reasons.items()] + gaps
    actions = rollout.actions
    return error_budget(
        [(name, scorings[name].logprobs) for name in chain],
        [((a, scorings[a].logprobs), (b, scorings[b].logprobs)) for a, b in beside],
        sequence=rollout.sequence_of_token[actions],
        prompt=rollout.prompt_index,
        seed=seed,
        gaps=gaps,
        notes=_notes(chain, scorings),
    )


def _titles(prefill: str) -> tuple[str, str]:
    return f"step through {prefill}", f"step through {REFERENCE}"


def _off_chain(name: str, decode: Scoring, scorings: Mapping[str, Scoring], spec: CheckSpec) -> str:
    """Why a scoring is no link of the chain; empty where it is one."""
    found = scorings.get(name)
    if found is None:
        return _absent_reference(spec) if name == REFERENCE else _absent_prefill(decode, spec)
    asked, given = (s.fingerprint.get("logprobs_temperature") for s in (decode, found))
    if asked is not None and given is not None and not np.isclose(asked, given, rtol=1e-9):
        return f"it was scored at temperature {given:g}, the tokens were sampled at {asked:g}"
    return ""


def _absent_prefill(decode: Scoring, spec: CheckSpec) -> str:
    if not spec.rollout.engine.prefill:
        return "the prefill rescoring was switched off (--no-prefill)"
    if decode.fingerprint.get("prefill") is False:
        temperature = spec.rollout.sampling.temperature
        tempered = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        return f"this engine cannot rescore given tokens{tempered}"
    return "the run holds no prefill rescoring"


def _absent_reference(spec: CheckSpec) -> str:
    if not spec.noise_floor:
        return "the noise floor was switched off (--no-noise-floor)"
    if spec.train.dtype == "fp32":
        return "the trainer itself computes in float32: it is its own reference"
    return "the run holds no float32 reference"


def _beside(
    spec: CheckSpec, scorings: Mapping[str, Scoring], refused: Mapping[str, str], engine: str
) -> tuple[list[tuple[str, str]], list[Gap]]:
    pairs, gaps = [], []
    repeated = f"{engine}:repeated"
    if repeated in scorings:
        pairs.append((f"{engine}:decode", repeated))
    else:
        gaps.append(
            Gap(
                ENGINE_REPEATED,
                "sampling again gives other tokens from the first difference on, and this run "
                "does not make the engine decode given tokens",
            )
        )
    for variant, title in BESIDE.items():
        name = f"{TRAIN}:{variant}"
        if name in scorings:
            pairs.append((TRAIN, name))
        else:
            gaps.append(Gap(title, refused.get(name) or _absent_variant(variant, spec)))
    return pairs, gaps


def _absent_variant(variant: str, spec: CheckSpec) -> str:
    if variant == "replayed":
        return "the run holds no pass with replayed routing"
    if not spec.noise_floor:
        return "the noise floor was switched off (--no-noise-floor)"
    if variant == "grad" and spec.train.grad:
        return "the trainer's own pass has gradients on"
    return f"the run holds no scoring {TRAIN}:{variant}"


def _notes(chain: list[str], scorings: Mapping[str, Scoring]) -> list[str]:
    cut = [bool(scorings[name].fingerprint.get("logprobs_truncated")) for name in chain]
    if cut[0] and not all(cut):
        first = chain[cut.index(False)]
        return [
            "the engine's logprobs are renormalised over the tokens that top-p or top-k kept; the "
            f"step to {first} holds the logarithm of the kept mass as well"
        ]
    return []


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One step as texts; "–" where there is nothing to say.

    Attributes:
        label: at most 26 characters.
        pair: the two scorings.
        told: whether the step's mean can be told from 0.
    """

    label: str
    pair: str
    mean: str
    mean_interval: str
    size: str
    share: str
    share_interval: str
    told: bool


_LABELS = {
    ("decode", "prefill"): "engine: decode → prefill",
    ("decode", "reference"): "engine decode → float32",
    ("decode", "train"): "engine decode → trainer",
    ("prefill", "reference"): "engine prefill → float32",
    ("prefill", "train"): "engine prefill → trainer",
    ("reference", "train"): "float32 → trainer",
}


def steps(report: Report) -> list[BudgetRow]:
    """The chain, in order; then what it adds up to."""
    budget = report.analyses.get("budget")
    if budget is None:
        return []
    whole = BudgetRow(
        "together",
        f"{line(budget.left)} / {line(budget.right)}",
        quantities.number(budget.mean.value),
        _interval(budget.mean, quantities.number),
        quantities.MISSING,
        "100.0 %" if budget.spread.value > 0 else quantities.MISSING,
        quantities.MISSING,
        _told(budget.mean),
    )
    return [*(_row(step, _label(step)) for step in budget.steps), whole]


def beside(report: Report) -> list[BudgetRow]:
    """What was measured beside the chain."""
    if report.analyses.get("budget") is None:
        return []
    return [_row(step, _beside_label(step)) for step in report.analyses.get("budget").beside]


def remarks(report: Report) -> list[str]:
    """What was not run and why, and what else a reader must know; one sentence each."""
    if report.analyses.get("budget") is None:
        return []
    gaps = [
        f"{line(gap.step)}: not run, because {line(gap.reason)}"
        for gap in report.analyses.get("budget").gaps
    ]
    carried = [
        f"{_label(step)}: a few tokens carry it, so the interval of its share may be too narrow"
        for step in report.analyses.get("budget").steps
        if step.share is not None and "heavy-tail" in step.share.flags
    ]
    return gaps + carried + [line(note) for note in report.analyses.get("budget").notes]


def largest(report: Report) -> str:
    """Which step carries most of the spread, as a sentence; empty without a choice."""
    budget = report.analyses.get("budget")
    if budget is None or len(budget.steps) < 2:
        return ""
    known = [step for step in budget.steps if step.share is not None]
    if not known:
        return "Every step is exactly 0."
    step = max(known, key=lambda one: one.share.value if one.share else 0.0)
    assert step.share is not None
    return (
        f"{_label(step)} carries {_percent(step.share.value)} of the spread of delta "
        f"({_interval(step.share, _percent)})."
    )


def _row(step: Step, label: str) -> BudgetRow:
    share = step.share
    return BudgetRow(
        label,
        f"{line(step.left)} / {line(step.right)}",
        quantities.number(step.mean.value),
        _interval(step.mean, quantities.number),
        quantities.number(step.size.value),
        _percent(share.value) if share else quantities.MISSING,
        _interval(share, _percent) if share else quantities.MISSING,
        _told(step.mean),
    )


def _percent(share: float) -> str:
    """One decimal: shares below that decide nothing."""
    if not np.isfinite(share):
        return quantities.MISSING
    text = f"{100.0 * share:.1f}"
    return f"{'0' if text in ('-0.0', '0.0') else text} %"


def _interval(estimate: Estimate, write: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{write(estimate.low)} … {write(estimate.high)}"


def _told(estimate: Estimate) -> bool:
    low, high = estimate.low, estimate.high
    return low is not None and high is not None and (low > 0 or high < 0)


def _label(step: Step) -> str:
    kinds = _kind(step.left), _kind(step.right)
    return _LABELS.get(kinds, f"{line(step.left)} → {line(step.right)}")


def _kind(name: str) -> str:
    engine, _, variant = name.partition(":")
    return "reference" if engine == "reference" else variant or "train"


def _beside_label(step: Step) -> str:
    variant = _kind(step.right)
    if not step.right.startswith(TRAIN):
        return ENGINE_REPEATED
    return BESIDE.get(variant, line(step.right))


def pictures(report: Report) -> list[Picture]:
    """Waterfalls of the spread and of mean delta; none for a chain of one step."""
    budget = report.analyses.get("budget")
    if budget is None or len(budget.steps) < 2:
        return []
    shares = [step.share for step in budget.steps if step.share is not None]
    labels = [_short(step) for step in budget.steps]
    made = []
    if len(shares) == len(budget.steps):
        made.append(
            Picture(
                "budget-spread",
                "Which step makes delta vary",
                "Each bar starts where the one before ended; a step that undoes part of another "
                "goes down. The shares add up to 100 %. Lines: 95 % intervals of the step.",
                _waterfall("budget-spread", labels, shares, 100.0, "share of the spread, %"),
            )
        )
    made.append(
        Picture(
            "budget-mean",
            "Which step moves the mean",
            "Mean delta is the one number that adds up exactly along the chain. A bar whose line "
            "crosses its own start cannot be told from 0.",
            _waterfall(
                "budget-mean", labels, [s.mean for s in budget.steps], 1.0, "mean delta, nats"
            ),
        )
    )
    return made


def _short(step: Step) -> str:
    names = {"reference": "float32", "train": "trainer"}
    left, right = (names.get(kind, kind) for kind in (_kind(step.left), _kind(step.right)))
    return f"{left} →\n{right}"


def _waterfall(name: str, labels: list[str], parts: list[Estimate], scale: float, axis: str) -> str:
    values = np.array([part.value for part in parts]) * scale
    tops = np.cumsum(values)
    starts = tops - values
    with drawing() as (figure, axes):
        x = np.arange(len(parts) + 1)
        colors = [ACCENT if value >= 0 else SECOND for value in values]
        axes.bar(x[:-1], values, bottom=starts, color=colors, width=0.6)
        axes.bar(x[-1:], tops[-1:], color=FAINT, width=0.6)
        for index, part in enumerate(parts):
            axes.plot([x[index] - 0.3, x[index] + 1.3], [tops[index]] * 2, color=INK, lw=0.8)
            if part.low is not None and part.high is not None:
                ends = [starts[index] + scale * end for end in (part.low, part.high)]
                axes.plot([x[index]] * 2, ends, color=INK, lw=1.2)
        axes.axhline(0.0, color=INK, lw=0.8)
        axes.set_xticks(x, [*labels, "together"])
        axes.margins(y=0.12)
        axes.set_ylabel(axis)
        return to_svg(figure, name, f"Waterfall: {axis} per step")


def view(report: Report) -> dict[str, Any] | None:
    """What the HTML section shows; None without a budget."""
    if report.analyses.get("budget") is None:
        return None
    return {
        "steps": steps(report),
        "beside": beside(report),
        "remarks": remarks(report),
        "largest": largest(report),
        "pictures": pictures(report),
    }
