"""What the square says, as semantic checks: a side beyond its level has failed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mismatch.analysis.levels import MORE_PROMPTS
from mismatch.analysis.results import (
    ALIKE,
    LATER_LAYERS,
    ORDER,
    Displaced,
    Finding,
    Side,
    Square,
    Standing,
    check_id,
    displacement,
    rounds_alike,
    shared,
    short,
)
from mismatch.analysis.square import FP8_KV
from mismatch.keys import FIRST, Key
from mismatch.types import Check, CheckStatus

STATUS: dict[Standing, CheckStatus] = {
    "within": "passed",
    "wide": "warning",
    "undecided": "inconclusive",
    "beyond": "failed",
}
UNSEEN = (
    "let the missing passes run: a local engine, a dtype that has a yardstick; "
    "mismatch check --dry-run says what this machine's memory allows, and by which settings; "
    "--fail-on unfit where what was measured is enough"
)
# By evidence: float32 excludes what only a lower precision does (a cache, quantisation).
FIXES: dict[tuple[str, Side], str] = {
    ("excess", "engine"): "look at the engine's kernels, KV cache and quantisation: mismatch fixes",
    ("excess", "trainer"): "look at the trainer's attention and experts: mismatch kernels",
    ("excess", "other-engine"): "look at the second engine's kernels, KV cache and quantisation",
    ("excess", "either"): (
        "a float32 pass of the engine says whose fault it is; where memory lacks room, one of its "
        "first layers: --layers 2"
    ),
    ("gap", "either"): (
        "the engine's implementation or the trainer's model code: mismatch locate names the module"
    ),
    ("gap", "engine"): "the engine's implementation: mismatch locate names the module",
    ("gap", "trainer"): (
        "look at the trainer's kernels, packing, adapters and weights: mismatch locate, "
        "mismatch kernels"
    ),
}
# Of a trainer whose modules nobody can run one by one: a user's own code, or a framework's.
OTHERS: dict[tuple[str, Side], str] = {
    ("excess", "trainer"): "look for what the trainer's code computes in a lower precision",
    ("gap", "trainer"): (
        "compare the trainer's code with transformers' own model: its attention, head, masks and "
        "positions; a check without --scorer says whether the model itself agrees"
    ),
}
IN_FLOAT32 = (
    "let the trainer score in float32 too: a class can (docs/how-to/your-trainer.md); "
    "--fail-on unfit where what was measured is enough"
)


def square_checks(
    square: Square | None,
    places: Mapping[str, str] = MappingProxyType({}),
    own_trainer: bool = True,
) -> list[Check]:
    """Return one check for each side's rounding and one for each gap; none without a square.

    Of several passes of a side the worst counts. What has no number decides nothing: a
    fault could hide there.

    Args:
        places: "engine" or "trainer" -> the first module of it that was found to differ.
        own_trainer: the trainer is mismatch's own loop, whose modules and kernels can be run alone.
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
        Check(
            id,
            "inconclusive",
            f"could not be measured ({reasons})",
            UNSEEN if own_trainer or not id.endswith("-trainer") else IN_FLOAT32,
        )
        for id in square.unmeasured
    ]
    part = [f"; {each.reason}" for each in square.not_judged if each.what == LATER_LAYERS]
    checks = [
        Check(id, STATUS[finding.standing], said, _fix(square, finding, places, own_trainer))
        for id, finding in worst.items()
        for said in [detail(finding, square) + "".join(part * (Key(finding.scoring).kind == FIRST))]
    ]
    # Of a side's passes and kinds of displacement the worst, and of equals the least by chance.
    farthest: dict[str, Displaced] = {}
    for worse in sorted(square.displaced, key=lambda d: (-ORDER.index(d.standing), d.chance)):
        farthest.setdefault(f"displaced-{worse.side}", worse)
    moved = [
        Check(
            id,
            STATUS[worse.standing],
            displacement(worse),
            _fix(square, worse, places, own_trainer),
        )
        for id, worse in farthest.items()
    ]
    return unseen + checks + moved + _alike(square, places)


def _alike(square: Square, places: Mapping[str, str]) -> list[Check]:
    """Check that both sides round alike, as the excess says only how much each of them does.

    Where they do not, the module that rounds otherwise decides.
    """
    alike, found = rounds_alike(square), square.correlation
    if alike is None or found is None or square.nearest is None:
        return []
    level = ALIKE * square.nearest.value
    detail = f"the roundings of both sides correlate by {found.value:.2g} (level {level:.2g})"
    if alike:
        return [Check("rounding-alike", "passed", detail)]
    if places:
        named = " and ".join(f"the {side}'s {place}" for side, place in sorted(places.items()))
        return [Check("rounding-alike", "failed", f"{detail}: {named}", "see Causes")]
    fix = (
        "look for what one side rounds and the other does not: norms, softmax, residuals, head; "
        "mismatch locate compares the modules"
    )
    sure = found.high is not None and found.high < level
    return [Check("rounding-alike", "inconclusive" if sure else "warning", detail, fix)]


def _fix(
    square: Square, finding: Finding | Displaced, places: Mapping[str, str], own_trainer: bool
) -> str:
    if finding.standing in ("wide", "undecided"):
        return MORE_PROMPTS
    if finding.standing == "within":
        return ""
    if place := places.get("trainer" if finding.side == "trainer" else "engine"):
        return f"look at {place}: see Causes"
    kind = finding.evidence if isinstance(finding, Finding) else "excess"
    side: Side = "either" if shared(square, finding) else finding.side
    return FIXES[kind, side] if own_trainer else (FIXES | OTHERS)[kind, side]


def detail(finding: Finding, square: Square) -> str:
    """Return the number, its interval and its level."""
    value = finding.value
    shown = short(value.value)
    if value.low is not None and value.high is not None:
        shown += f" [{short(value.low)}, {short(value.high)}]"
    level = f"level {short(finding.level)}"
    if finding.evidence == "excess":
        plain = next((leg.plain for leg in square.legs if leg.scoring == finding.scoring), "")
        cost = "bf16 with an fp8 KV cache" if FP8_KV in plain else "precision"
        return f"the error of {finding.scoring} is {shown} times what {cost} costs ({level})"
    far = f"; {finding.far}" if finding.far else ""
    return f"{finding.scoring} is {shown} nats from the float32 reference ({level}){far}"
