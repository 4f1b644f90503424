"""What fixes give, and what experiments say that confirm a cause or rule it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.errors import MismatchError
from mismatch.types import Estimate, Verdict

Outcome = Literal["confirmed", "ruled out", "of little weight", "undecided", "not run"]
GONE, STAYS = 0.3, 0.1  # share of mean |delta| that goes: at least, for yes; at most, for no


Effect = Literal["better", "worse", "mixed", "negligible", "none"]
RANKED_BY = ("k3_kl", "logprob_abs_diff_mean")  # a reduction of these is what a fix is for


@dataclass(frozen=True, slots=True)
class Taken:
    """What goes when a fix is applied.

    Attributes:
        side: whose fault it shows.
        own: what is true of every mismatch that it removes: the setting that it changes, and
            marks in the data.
        wide: causes that it removes too, and does not separate.
    """

    side: Side
    own: tuple[str, ...]
    wide: tuple[str, ...] = ()


KERNEL = Taken(
    "trainer",
    ("function-differs", "side-off", "onset"),
    ("attention-sinks", "sliding-window", "packing-leak", "yarn-attention-factor"),
)
TESTS = {
    "attention-sinks": Taken("trainer", ("attention-sinks",)),
    "no-sinks": Taken("engine", ("attention-sinks",)),
    "no-packing": Taken("trainer", ("packing-leak",)),
    "plain-attention": KERNEL,
    "fp32-lm-head": Taken("trainer", ("bf16-lm-head",)),
    "fp32-router": Taken("trainer", ("router-precision",)),
    "no-autocast": Taken("trainer", ("trainer-autocast", "precision")),
    "fp32": Taken(
        "trainer",
        ("precision",),
        (
            "bf16-lm-head",
            "router-precision",
            "trainer-autocast",
            "fsdp-cast-inputs",
            "microbatch-dependence",
        ),
    ),
    "processed-logprobs": Taken("engine", (), ("temperature-semantics", "sampling-truncation")),
    "explicit-generation-config": Taken("engine", ("implicit-generation-config", "sampling-law")),
    "sampling-mask": Taken("engine", ("sampling-truncation", "sampling-law")),
    "bf16-kv-cache": Taken("engine", ("fp8-kv", "decode-vs-prefill"), ("fp8-kv-tile",)),
    "rollout-bf16-weights": Taken("engine", ("quantised-rollout",), ("quantised-module-list",)),
    "no-prefix-cache": Taken("engine", ("prefix-cache-stale", "kv-block", "decode-vs-prefill")),
    "no-cascade-attention": Taken("engine", ("decode-vs-prefill", "onset", "kv-block")),
    "engine-fp32-lm-head": Taken("engine", ("bf16-lm-head",)),
    "engine-fp32": Taken("engine", ("precision", "decode-vs-prefill"), ("bf16-lm-head", "fp8-kv")),
    "regenerate": Taken("engine", (), ("sleep-level-2", "double-load")),
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, with what it said where it was made."""

    id: str
    """Of its fix."""
    side: Side
    """Whose fault it would show."""
    tests: tuple[str, ...]
    """Causes that it takes out."""
    outcome: Outcome = "not run"
    seconds: float | None = None
    """Of its passes and of its engine; None where it was not made."""
    gone: Estimate | None = None
    """Share of mean |delta| that disappears with the cause."""
    same_tokens: bool = True
    """On the tokens of the run; False: the engine samples again."""
    reason: str = ""
    """Why it was not made, or failed."""
    evidence: tuple[Evidence, ...] = ()
    """What it measured, where that is no share of mean |delta|."""
    names: str = ""
    """The cause that it names where it confirms and no detector suspected one."""
    wide: tuple[str, ...] = ()
    """Those of ``tests`` that it cannot separate: it confirms one of them only where
    no other of ``tests`` is left."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the experiments of one run said."""

    experiments: tuple[Experiment, ...]
    confirmed: tuple[str, ...]
    """Causes that they confirm."""
    ruled_out: tuple[str, ...]
    seconds: float
    """That they took together, with the starts of processes and passes left out before."""


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
