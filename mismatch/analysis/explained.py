"""Which checks follow from a cause; and the confirmed cause that a verdict is about, if any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mismatch.analysis.catalogue import title_of
from mismatch.analysis.cause_results import LEADS, Cause, Causes
from mismatch.types import Check, Verdict

# Of how far a side is off: they fail with any cause on that side that carries the mismatch.
DISTANCES = ("excess", "displaced", "implementation-gap", "long-sequence", "importance-ratio")
FUNCTIONS = ("implementation-gap", "long-sequence")  # of these, those that float32 shows
# Of how the mismatch looks: their warnings follow from any cause that carries it.
LOOKS = ("alignment", "which-rows", "causes")
WRONG = ("failed", "inconclusive", "warning")
# The plain forward that these checks compare with does what these causes do (square.precision_of).
IN_YARDSTICK, BY_YARDSTICK = ("fp8-kv",), ("excess", "displaced")
CARRIES = 0.1  # share of mean |delta|
# Checks of one kind of fault, and the causes that are of this kind.
KINDS = {
    "alignment": ("misalignment", "row-pairing", "row-lengths", "retokenisation"),
    "temperature": ("temperature-semantics", "implicit-generation-config", "sampling-law"),
    "truncation": ("sampling-truncation", "implicit-generation-config", "sampling-law"),
    "sampling-law": (
        *("action-mask", "temperature-semantics", "sampling-truncation"),
        "implicit-generation-config",
    ),
    "turns": ("action-mask", "turn-context", "retokenisation", "misalignment", "template-drift"),
    "trainer-self-agreement": (
        *("nondeterminism", "microbatch-dependence", "train-eval-paths", "packing-leak"),
    ),
    "routes-agree": ("router-config", "corrupt-route-capture", "shifted-route-capture"),
    "zero-logprobs": ("appended-eos", "action-mask", "first-token"),
    "positive-logprobs": ("unnormalised-law", "bf16-lm-head"),
    "attention-softcap": ("logit-softcap",),
    "rounding-alike": ("rounding-differs", "bf16-lm-head", "router-precision"),
    "weights-as-loaded": (
        *("weights-differ", "stale-weights", "tied-head-stale", "experts-differ", "double-load"),
        *("sleep-level-2", "lora-scale", "quantised-rollout", "quantised-module-list"),
    ),
}


def explains(cause: Cause, check: Check) -> bool:
    """Return whether a check fails or warns because of a cause."""
    if of_kind(cause, check):
        return True
    what, _, side = check.id.removesuffix("-rounding").rpartition("-")
    if cause.id in IN_YARDSTICK and what in BY_YARDSTICK:
        return False
    if check.id == "implementation-gap":
        what, side = check.id, "engine"
    same = side == cause.side or "either" in (side, cause.side)
    if cause.located and what in FUNCTIONS and same:
        return True  # rounding may drown the share of what float32 shows
    if cause.effect is not None and cause.effect.value < CARRIES:
        return False
    if check.id in LOOKS:
        return check.status == "warning"
    return check.id in DISTANCES or (what in DISTANCES and same)


def of_kind(cause: Cause, check: Check) -> bool:
    """Return whether a check looks for this kind of fault."""
    names = {cause.id, *cause.alike}
    return check.id in names or not names.isdisjoint(KINDS.get(check.id, ()))


def leads(cause: Cause) -> bool:
    """Return whether a cause is worth the headline: its share is half, or was not measured."""
    return cause.fact or cause.effect is None or cause.effect.value >= LEADS


@dataclass(frozen=True, slots=True)
class Lead:
    """The confirmed cause that a verdict is about, and what failed or warned because of it."""

    cause: Cause
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed because of it."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def reason(self) -> str:
        """Say what it is, how sure that is, and which checks failed because of it."""
        cause = self.cause
        how = "made by what ran in place of a setting" if cause.made_here else "confirmed"
        side = "side not known" if cause.side == "either" else f"in the {cause.side}"
        text = f"{title_of(cause.id).rstrip('.')} ({cause.id}, {how}, {side})"
        names = [check.id for check in self.failed]
        if names:
            text += f"; checks that failed because of it: {', '.join(names)}"
        return text


def lead_of(causes: Causes | None, checks: Sequence[Check]) -> Lead | None:
    """Return the first confirmed cause that carries at least half of the mismatch, or that is of
    the kind that a failed check looks for.

    None where there is none, or where checks failed and it explains none of them. A suspected cause
    never leads: it would hide the check that failed.
    """
    failed = any(check.status == "failed" for check in checks)
    for cause in causes.ranked if causes else ():
        if cause.decided:
            wrong = [check for check in checks if check.status in WRONG]
            lead = Lead(cause, tuple(check for check in wrong if explains(cause, check)))
            own = any(of_kind(cause, check) for check in lead.failed)
            if own or (leads(cause) and (lead.failed or not failed)):
                return lead
    return None


def led(verdict: Verdict, lead: Lead | None, checks: Sequence[Check]) -> Verdict:
    """Return a broken or unfit verdict whose reason is its confirmed cause."""
    old, new = _reasons(verdict, lead, checks)
    return replace(verdict, reason=verdict.reason.replace(old, new, 1)) if new else verdict


def unled(verdict: Verdict, lead: Lead | None, checks: Sequence[Check]) -> Verdict:
    """Return the verdict with the reason that it had before :func:`led`."""
    old, new = _reasons(verdict, lead, checks)
    return replace(verdict, reason=verdict.reason.replace(new, old, 1)) if new else verdict


def _reasons(verdict: Verdict, lead: Lead | None, checks: Sequence[Check]) -> tuple[str, str]:
    """Return the reason of the numbers and the one of the cause; "" twice where none leads."""
    if lead is None:
        return "", ""
    if verdict.status == "broken" and verdict.correctness is not None:
        other = [c.id for c in checks if c.status == "failed" and c not in lead.checks]
        also = f"; failed as well: {', '.join(other)}" if other else ""
        return verdict.correctness.reason, lead.reason + also
    if verdict.status == "unfit" and verdict.fitness is not None:
        return verdict.fitness.reason, f"{lead.reason}; {verdict.fitness.reason}"
    return "", ""
