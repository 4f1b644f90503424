"""What the square says, as semantic checks: a side beyond its level has failed."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch.analysis.displaced import Displaced, Standing
from mismatch.analysis.square import Finding, Square, check_id
from mismatch.types import Check, CheckStatus

STATUS: dict[Standing, CheckStatus] = {
    "within": "passed",
    "wide": "warning",
    "undecided": "inconclusive",
    "beyond": "failed",
}
UNSEEN = "let the missing passes run: more memory, a local engine, a dtype that has a yardstick"
ORDER: tuple[Standing, ...] = ("within", "wide", "undecided", "beyond")
FIXES = {
    "engine": "look at the engine's kernels, KV cache and quantisation: mismatch fixes",
    "trainer": "look at the trainer's attention and experts: mismatch kernels",
    "other-engine": "look at the second engine's kernels, KV cache and quantisation",
    "either": (
        "compare what both sides loaded: files, parameters, rope, window, norm; the reference "
        "shares the trainer's loader, so that the engine may be the side that is right"
    ),
}


def square_checks(square: Square | None) -> list[Check]:
    """One check for each side's rounding and one for each gap; none without a square.

    Of several passes of a side the worst counts. What has no number warns: a fault could hide
    there.
    """
    if square is None:
        return []
    worst: dict[str, Finding] = {}
    for finding in square.findings:
        id = check_id(finding)
        if id not in worst or ORDER.index(finding.standing) > ORDER.index(worst[id].standing):
            worst[id] = finding
    reasons = "; ".join(f"{entry.what}: {entry.reason}" for entry in square.not_judged)
    unseen = [
        Check(id, "warning", f"could not be measured ({reasons})", UNSEEN)
        for id in square.unmeasured
    ]
    checks = [
        Check(id, STATUS[finding.standing], detail(finding), _fix(finding))
        for id, finding in worst.items()
    ]
    return unseen + checks + _displacement_checks(square.displaced)


def _displacement_checks(displaced: Sequence[Displaced]) -> list[Check]:
    """One for each side: of its passes and kinds the worst, and of equals the least by chance."""
    worst: dict[str, Displaced] = {}
    for worse in sorted(displaced, key=lambda worse: (-ORDER.index(worse.standing), worse.chance)):
        worst.setdefault(f"displaced-{worse.side}", worse)
    return [
        Check(id, STATUS[worse.standing], displacement(worse), _fix(worse))
        for id, worse in worst.items()
    ]


SAID = {
    "rare": "have a token",
    "shift": "have a mean",
    "response": "have a response whose median token is",
}


def displacement(finding: Displaced) -> str:
    """How many prompts are how far from float32, and how many a plain forward has."""
    return (
        f"{finding.scoring}: {finding.beyond} of {finding.n_prompts} prompts {SAID[finding.kind]} "
        f"more than {finding.nats:.3g} nats from its float32, {finding.plain_beyond} in a plain "
        f"forward by {finding.nats / finding.factor:.3g} (chance {finding.chance:.2g})"
    )


def _fix(finding: Finding | Displaced) -> str:
    if finding.standing in ("wide", "undecided"):
        return "measure more: --num-prompts"
    return FIXES[finding.side] if finding.standing == "beyond" else ""


def detail(finding: Finding) -> str:
    """The number, its interval and its level."""
    value = finding.value
    shown = f"{value.value:.3g}"
    if value.low is not None and value.high is not None:
        shown += f" [{value.low:.3g}, {value.high:.3g}]"
    level = f"level {finding.level:g}"
    if finding.evidence == "excess":
        return f"{finding.scoring} rounds {shown} times as much as a plain forward ({level})"
    return f"{finding.scoring} is {shown} nats from the float32 reference ({level})"
