"""What a fix is, and what measuring one gives. Pure data: no engine, no torch.

A fix changes the spec of a check and nothing else, so that a run with it is an ordinary run. Fixes
of the trainer and of the engine change what is measured. A fix of the estimator (a weight in the
loss) changes no log-probability: it is listed with what it keeps and costs, and never ranked.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec
from mismatch.types import Estimate, Verdict

Side = Literal["engine", "train", "estimator"]
Effect = Literal["better", "worse", "mixed", "negligible", "none"]
RANKED_BY = ("k3_kl", "logprob_abs_diff_mean")  # a reduction of these is what a fix is for
SHOWN = (*RANKED_BY, "logprob_abs_diff_p999", "routing_disagree_layer")
VALUE = "VALUE"  # in the flags of a fix that takes a value: where the value goes
# Of kernels with sinks: eager has 3 copies of the scores of 64 heads in bf16.
KERNEL_COSTS = {
    "flex_attention": "keeps no scores, needs a GPU",
    "eager": "keeps every score: 98 GB for one sequence of 16,000 tokens",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """How a check is made with a fix.

    >>> str(Flags(set=(("--rollout-weights", "bf16"),), unset=("--engine-arg quantization",)))
    '--rollout-weights bf16 (without --engine-arg quantization)'

    Attributes:
        set: (flag, value) of ``mismatch check``; the value may be :data:`VALUE`.
        unset: flags that must not be given, with the name of the setting for ``--engine-arg``.
        env: (variable, value) of the environment.
    """

    set: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.set or self.unset or self.env)

    def __str__(self) -> str:
        words = [*(f"environment {setting}" for setting in self.settings), *self.arguments]
        dropped = " ".join(f"without {flag}" for flag in self.unset)
        if dropped:
            words.append(f"({dropped})" if words else dropped)
        return " ".join(words)

    @property
    def settings(self) -> list[str]:
        """Of the environment, as a shell takes them."""
        return [f"{name}={shlex.quote(value)}" for name, value in self.env]

    @property
    def arguments(self) -> list[str]:
        """Of the command, as a shell takes them."""
        return [f"{flag} {shlex.quote(value)}" for flag, value in self.set]


def check_command(parts: Iterable[Flags]) -> str:
    """Return the command that makes a check with several fixes.

    >>> check_command([Flags(env=(("A", "1"),)), Flags(set=(("--dtype", "fp32"),))])
    'A=1 mismatch check … --dtype fp32'
    >>> check_command([Flags(unset=("--autocast",)), Flags(set=(("--dtype", "fp32"),))])
    'mismatch check … --dtype fp32, without --autocast'
    """
    flags = list(parts)
    settings = [text for part in flags for text in part.settings]
    arguments = [text for part in flags for text in part.arguments]
    dropped = [flag for part in flags for flag in part.unset]
    command = " ".join([*settings, "mismatch check …", *arguments])
    return f"{command}, without {' and '.join(dropped)}" if dropped else command


@dataclass(frozen=True, slots=True)
class Fix:
    """One thing to try.

    >>> Fix("fp32", "train", "the trainer computes in fp32", "…", "…").id
    'fp32'

    Attributes:
        id: as in ``--fix ID``; one that takes a value is asked for as ``ID=VALUE``.
        summary: one line: what it changes.
        effect: what is expected of it, one line.
        cost: what it costs in training, one line.
        flags: how a check is made with it.
        values: of a fix that takes one: the values that ``--fix all`` tries, the first by default.
        apply: (spec, value) -> spec. Pure. Raises MismatchError for a value that means nothing.
        needs: what a check has to have, by names of :data:`.applies.NEEDS`.
        corrects: of an estimator fix: its name in the corrections table.
        hides: of an estimator fix: makes the mismatch invisible and does not weigh it.
    """

    id: str
    side: Side
    summary: str
    effect: str
    cost: str
    flags: Flags = Flags()
    values: tuple[str, ...] = ()
    apply: Callable[[CheckSpec, str], CheckSpec] = lambda spec, value: spec
    needs: tuple[str, ...] = ()
    corrects: str = ""
    hides: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """A fix with the value that it is tried with.

    >>> Chosen(Fix("micro-batch", "train", "", "", "", values=("512",)), "256").label
    'micro-batch=256'
    """

    fix: Fix
    value: str = ""

    @property
    def label(self) -> str:
        return f"{self.fix.id}={self.value}" if self.value else self.fix.id

    @property
    def flags(self) -> Flags:
        """The flags that set it, with its value."""
        given = tuple((k, self.value if v == VALUE else v) for k, v in self.fix.flags.set)
        return replace(self.fix.flags, set=given)

    def apply(self, spec: CheckSpec) -> CheckSpec:
        return self.fix.apply(spec, self.value)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write into one framework's configuration."""

    framework: str
    lines: tuple[str, ...]
    """The setting, as lines of its file; empty where the framework lacks it."""
    remark: str
    """What to know about it, or why there is none."""
    source: str
    """What the keys were read from."""
    selects: str = ""
    """What the lines select, where that may be another thing than what the fix sets."""

    def proof(self, ran: tuple[str, ...], *, in_trainer: bool) -> str:
        """Return whether the lines set what was measured; "" of an engine's own setting.

        Args:
            ran: the attention kernel that ran with the fix, and the fix's value.
            in_trainer: the fix is one of the trainer, which is another program in a framework.
        """
        cost = f", {KERNEL_COSTS[self.selects]}" if self.selects in KERNEL_COSTS else ""
        if self.selects and self.selects not in ran:
            return f"equivalent, not measured: {self.selects}{cost}"
        if self.selects and self.selects == ran[0]:
            return f"measured: {self.selects}{cost}"
        return "the same setting, not measured in this framework" if in_trainer else ""


@dataclass(frozen=True, slots=True)
class FixCost:
    """What running with a fix took.

    Attributes:
        seconds: of the forward passes or the engine's process; None if not measured.
        peak_bytes: highest memory of the process; None where it was not measured.
    """

    seconds: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FixOutcome:
    """What measuring one fix, or several together, gave.

    Attributes:
        id: labels of its fixes joined by "+": ``router-replay=ids+fp32-router``.
        side: where it changes something: "train", "engine", or "both".
        summary: of its fixes, joined by "; ".
        flags: the text of its fixes' :class:`Flags`.
        applies: it could be tried.
        reason: why it does not apply, or what failed while it ran; "" where it was measured.
        before: metric -> estimate without it, on the headline's tokens; empty if not measured.
        after: metric -> estimate with it.
        paired: change of k3 (after - before) on the same tokens; None if the engine sampled again.
        difference: change of k3 by prompt, if the engine sampled again; else None.
        changes: metric -> change of every metric of RANKED_BY; the k3 is also in one of the above.
        p_values: metric -> probability of this change by chance, adjusted for all that were tried
            (Holm), see mismatch/experiments/fixes/significance.py.
        removed: metric -> share of the mismatch that it removes, 1 - after / before, for every
            metric of RANKED_BY: its practical size.
        significant: beyond chance; None if not measured.
        outcome: "better": it lowers k3 or mean |delta| significantly, by 5 % or more, and raises
            neither; "worse": the reverse; "mixed": both; "negligible": significant, and less than
            5 %; "none": no significant difference. None: not measured.
        kernel: the attention kernel that the trainer ran with it; "" if not measured.
        verdict_after: of a run with it; None if not measured. Its correctness is that of the run's
            own float32 passes where the fix scored the same tokens, else inconclusive; the trainer
            is scored in float32 again where the fix changes more than precision.
    """

    id: str
    side: str
    summary: str
    flags: str = ""
    applies: bool = True
    reason: str = ""
    before: dict[str, Estimate] = field(default_factory=dict)
    after: dict[str, Estimate] = field(default_factory=dict)
    paired: Estimate | None = None
    difference: Estimate | None = None
    changes: dict[str, Estimate] = field(default_factory=dict)
    removed: dict[str, Estimate] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    significant: bool | None = None
    outcome: Effect | None = None
    kernel: str = ""
    verdict_after: Verdict | None = None
    cost: FixCost = field(default_factory=FixCost)

    @property
    def heals(self) -> bool:
        """Whether a run with it is HEALTHY."""
        return self.verdict_after is not None and self.verdict_after.status == "healthy"

    @property
    def measured(self) -> bool:
        return bool(self.after)


@dataclass(frozen=True, slots=True)
class EstimatorFix:
    """A correction of the loss that was asked for: it changes no log-probability.

    Attributes:
        correction: its name in the report's corrections; None where those were not computed.
        hides: it makes the ratio 1 by construction and says nothing of the mismatch.
        reason: why it was not computed; "" where it was.
    """

    id: str
    summary: str
    correction: str | None
    hides: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The best fix, chosen again on half of the prompts and measured on the others.

    Attributes:
        id: the best on all prompts.
        chosen: the best on the half that chose; None where that finds none.
        chosen_on, measured_on: prompts of the two halves.
        removed: metric -> share of the mismatch that ``chosen`` removes on the held-out half.
        p_values: metric -> probability of this change by chance, on that half (Holm over both).
        confirmed: both halves agree: the same fix, and it helps where it was not chosen.
        reason: why nothing was measured; "" where it was.
    """

    id: str
    chosen: str | None
    chosen_on: int
    measured_on: int
    removed: dict[str, Estimate] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    confirmed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FixTable:
    """All that was tried, best first.

    Attributes:
        outcomes: significant improvements by k3 after (mean |delta| breaks ties), then those
            without a difference that is significant and matters, then what made it worse, then
            what was not measured.
        estimators: fixes of the loss that were asked for; never ranked.
        best: id of the best single fix, or None where none helps significantly.
        best_together: id of the best of all; a combination only where it leaves a tenth less than
            the best single fix, not by chance, and where the single fix leaves the run less than
            HEALTHY. None likewise.
        left_out: what was planned and not run, one sentence each: over the budget …
        method: how significance was decided, one sentence.
        verdict: which verdict the run ends with: "as-is" or "after-fixes".
        seconds: that the fixes took, all together.
        verdict_as_is: the verdict without any fix, where the report carries that after fixes.
        held_out: ``best_together`` on prompts that had no part in choosing it; None without one.
    """

    outcomes: tuple[FixOutcome, ...]
    best: str | None = None
    best_together: str | None = None
    left_out: tuple[str, ...] = ()
    method: str = ""
    verdict: Literal["as-is", "after-fixes"] = "as-is"
    seconds: float | None = None
    estimators: tuple[EstimatorFix, ...] = ()
    verdict_as_is: Verdict | None = None
    held_out: HeldOut | None = None

    def outcome(self, name: str) -> FixOutcome:
        """Return the row with this id.

        Raises:
            MismatchError: there is none.
        """
        for row in self.outcomes:
            if row.id == name:
                return row
        raise MismatchError(
            f"no fix {name!r} was tried", f"tried: {', '.join(row.id for row in self.outcomes)}"
        )
