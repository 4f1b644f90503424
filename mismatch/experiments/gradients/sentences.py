"""What a gradient check comes to, in sentences. What is claimed is decided by intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mismatch.experiments.gradients.types import (
    LOSSES,
    PPO_OVERRIDE,
    PPO_RATIO,
    GradientCheck,
    GradientRow,
    GroupError,
    Loss,
)
from mismatch.types import Check, Estimate

CHECK = "gradients"
SMALL = 0.01  # of the reference's size: under that an error is called small
EQUAL = "The trainer's policy gradient equals the float32 reference's to the last bit."
GROUP_WORDS = {
    "attention": "the attention",
    "sinks": "the attention sinks",
    "router": "the router",
    "experts": "the experts",
    "mlp": "the MLP",
    "embeddings": "the embeddings",
    "norms": "the norms",
    "head": "the LM head",
    "other": "the other parameters",
}


def summary(check: GradientCheck) -> tuple[str, ...]:
    """What the mismatch does to the gradient, what helps, and what PPO's ratio does."""
    loss = main_loss(check)
    baseline = check.row("baseline", loss)
    if baseline is None:
        return ("The trainer's own gradient could not be taken, so nothing is said about it.",)
    rows = [row for row in check.rows if row.loss == loss]
    sentences = [
        _baseline(check, baseline),
        _groups(baseline),
        _fixes([row for row in rows if row.kind == "fix"], baseline),
        _corrections([row for row in rows if row.kind == "correction"], baseline),
        _ppo(check, loss),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def gradient_checks(check: GradientCheck | None) -> list[Check]:
    """Fails where a group of parameters gets none in the trainer and one in the reference.

    Such a trainer can have all log-probabilities right: it never trains these parameters. No
    interval is needed, since a sum over a batch is 0 to the last bit only where nothing was added.
    """
    baseline = None if check is None else check.row("baseline", main_loss(check))
    if baseline is None:
        return []
    dead = [group.group for group in baseline.groups[1:] if silent(group)]
    if not dead:
        return [Check(CHECK, "passed", "no group of parameters is without one")]
    words = joined([GROUP_WORDS.get(group, group) for group in dead])
    detail = f"the trainer gives no gradient to {words}; the float32 reference does"
    fix = "a kernel that differentiates them, e.g. --attention eager; mismatch kernels tests one"
    return [Check(CHECK, "failed", detail, fix)]


def main_loss(check: GradientCheck) -> Loss:
    """The loss that sentences speak of: the token-level one, where it was taken."""
    return next(loss for loss in LOSSES if any(row.loss == loss for row in check.rows))


def better(row: GradientRow) -> bool:
    """Nearer to the reference than the baseline, beyond chance."""
    ratio = row.error_ratio
    return ratio is not None and ratio.high is not None and ratio.high < 1.0


def worse(row: GradientRow) -> bool:
    """Further off than the baseline, beyond chance."""
    ratio = row.error_ratio
    return ratio is not None and ratio.low is not None and ratio.low > 1.0


def quieter(row: GradientRow, baseline: GradientRow) -> bool:
    """Less noise between prompts than the baseline, beyond chance and beyond being shorter."""
    ratio = row.variance_ratio
    if ratio is None or ratio.high is None or baseline.whole.norm == 0.0:
        return False
    return ratio.high < min(1.0, (row.whole.norm / baseline.whole.norm) ** 2)


def silent(group: GroupError) -> bool:
    """No gradient where the reference has one."""
    return group.norm == 0.0 and group.norm_ratio is not None


def angle(cosine: float) -> float:
    """Degrees.

    >>> angle(0.0), angle(1.0)
    (90.0, 0.0)
    """
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def degrees(cosine: float) -> str:
    """An angle in words.

    >>> degrees(0.8), degrees(1.0)
    ('37°', '0°')
    """
    value = angle(cosine)
    if value == 0.0:
        return "0°"
    if value < 1e-3:
        return "under 0.001°"
    return f"{value:.0f}°" if value >= 9.95 else f"{float(f'{value:.2g}'):g}°"


def share(value: float) -> str:
    """A relative size as percent.

    >>> share(0.0342), share(1.0), share(0.0)
    ('3.4 %', '100 %', '0 %')
    """
    percent = 100.0 * value
    if percent == 0.0 or percent >= 1e-3:
        return f"{percent:,.0f} %" if percent >= 99.5 else f"{float(f'{percent:.2g}'):g} %"
    return f"{percent:.1e} %"


def _baseline(check: GradientCheck, row: GradientRow) -> str:
    whole = row.whole
    error = whole.relative_error
    assert error is not None  # the whole reference is not 0
    if row.same_as == "reference":
        return "The trainer is the float32 reference itself, and so is its policy gradient."
    if error.value == 0.0:
        return EQUAL
    if whole.cosine is None:
        return "The trainer's policy gradient is 0 where the float32 reference's is not."
    off = f"{degrees(whole.cosine.value)} off the float32 reference's"
    if error.value < SMALL and (error.high is None or error.high < SMALL):
        return (
            f"The trainer's policy gradient is that of the float32 reference but for "
            f"{share(error.value)} of its size ({off.partition(' off')[0]} in direction)."
        )
    other = next((r for r in check.rows if r.id == row.id and r.loss != row.loss), None)
    beside = ""
    if other is not None and other.whole.cosine is not None:
        beside = f"; {degrees(other.whole.cosine.value)} with the {other.loss}-level one"
    return (
        f"The trainer's policy gradient points {off}{_arc(whole.cosine)} and is "
        f"{_length(whole.norm_ratio)} ({row.loss}-level loss{beside})."
    )


def _arc(cosine: Estimate) -> str:
    if cosine.low is None or cosine.high is None:
        return ""
    ends = degrees(cosine.high), degrees(cosine.low)
    return "" if ends[0] == ends[1] else f" ({ends[0]} to {ends[1]})"


def _length(ratio: Estimate | None) -> str:
    assert ratio is not None
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 <= ratio.high:
        return "about as long"
    text = f"{float(f'{ratio.value:.2g}'):g}"
    return "about as long" if text == "1" else f"{text} times as long"


def _groups(row: GradientRow) -> str:
    parts = [part for part in row.groups[1:] if part.relative_error is not None]
    none = [part for part in parts if silent(part)]
    if none:
        words = joined([GROUP_WORDS.get(part.group, part.group) for part in none])
        verb = "get" if len(none) > 1 or words.endswith("s") else "gets"
        return f"{words[:1].upper()}{words[1:]} {verb} no gradient at all."
    whole = row.whole.relative_error
    measured = [(part, part.relative_error) for part in parts if part.relative_error is not None]
    if whole is None or not measured or row.same_as:
        return ""
    worst, error = max(measured, key=lambda pair: pair[1].value)
    clear = error.low is not None and error.low > 1.5 * whole.value and error.value >= SMALL
    if not clear:
        return ""
    words = GROUP_WORDS.get(worst.group, worst.group)
    off = "" if worst.cosine is None else f", {degrees(worst.cosine.value)} off"
    return f"The gradient of {words} suffers most: relative error {share(error.value)}{off}."


def _fixes(rows: Sequence[GradientRow], baseline: GradientRow) -> str:
    if not rows or baseline.same_as == "reference":
        return ""
    # A fix that makes the trainer the reference is right by construction: nothing was found out.
    trivial = [row.id for row in rows if row.same_as == "reference"]
    real = [row for row in rows if row.same_as != "reference"]
    helpful = sorted((row for row in real if better(row)), key=error_of)
    parts = []
    if helpful:
        parts.append(_best(helpful))
    elif real:
        fixes = (
            "no fix brings" if len(real) > 1 else f"the fix tried, {real[0].id}, has not brought"
        )
        parts.append(f"{fixes} it measurably nearer to the reference")
    if trivial:
        parts.append(f"{joined(trivial)} {_be(trivial)} the reference itself")
    if bad := [row for row in real if worse(row)]:
        named = joined([f"{row.id} ({_off(row)})" for row in bad])
        parts.append(f"further off with {named}")
    return _sentence(parts)


def _best(helpful: Sequence[GradientRow]) -> str:
    first = helpful[0]
    assert first.error_ratio is not None
    left = f"{_off(first)}, {_times(first.error_ratio)} the relative error"
    sentence = f"of the fixes, {first.id} brings it nearest: {left}"
    most = first.error_ratio.high or first.error_ratio.value
    tied = [
        row.id
        for row in helpful[1:]
        if row.error_ratio is not None
        and (row.error_ratio.low if row.error_ratio.low is not None else math.inf) <= most
    ]
    if tied:
        sentence += f"; {joined(tied)} {_be(tied)} as near, within chance"
    return sentence


def _corrections(rows: Sequence[GradientRow], baseline: GradientRow) -> str:
    changed = [row for row in rows if not row.same_as]
    if not rows:
        return ""
    if not changed:
        return "No correction of the loss changes the gradient of these tokens."
    parts = []
    near = sorted((row for row in changed if better(row)), key=error_of)
    if near:
        best = near[0]
        assert best.error_ratio is not None
        left = f"{_off(best)}, {_times(best.error_ratio)} the relative error"
        parts.append(f"of the corrections, {best.id} comes nearest to the reference: {left}")
    else:
        parts.append("no correction brings the gradient measurably nearer to the reference")
    quiet = sorted((row for row in changed if quieter(row, baseline)), key=_noise)
    if quiet:
        ratio = quiet[0].variance_ratio
        assert ratio is not None
        who = "it" if near and near[0] is quiet[0] else quiet[0].id
        parts.append(f"{who} leaves {_times(ratio)} the variance between prompts")
    else:
        parts.append("none measurably lowers the noise between prompts but by being shorter")
    return _sentence(parts)


def _ppo(check: GradientCheck, loss: Loss) -> str:
    row = check.row(PPO_RATIO, loss)
    if row is None:
        return ""
    plain = check.row(PPO_OVERRIDE, loss) or check.row("baseline", loss)
    clipped, ratio = check.clipped, row.error_ratio
    cut = "" if clipped is None else f"; its clip removes {share(clipped)} of the tokens"
    if row.same_as:
        return f"PPO's ratio of two passes is 1, and changes nothing{cut}."
    if ratio is not None and abs(ratio.value - 1.0) < SMALL:
        return f"PPO's ratio of two passes hardly changes the gradient, {_off(row)}{cut}."
    word = "further off" if worse(row) else "nearer" if better(row) else "as far off, within chance"
    than = ""
    if plain is not None and ratio is not None:
        than = f": {_off(row)}, {_times(ratio)} the relative error that a ratio set to 1 has"
    return f"PPO with the ratio of two passes gives a gradient {word}{than}{cut}."


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _be(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _off(row: GradientRow) -> str:
    cosine = row.whole.cosine
    return "no gradient" if cosine is None else f"{degrees(cosine.value)} off"


def _times(ratio: Estimate) -> str:
    digits = 3 if 0.9 < ratio.value < 1.1 else 2
    return f"{float(f'{ratio.value:.{digits}g}'):g} times"


def error_of(row: GradientRow) -> float:
    return math.inf if row.error_ratio is None else row.error_ratio.value


def _noise(row: GradientRow) -> float:
    return math.inf if row.variance_ratio is None else row.variance_ratio.value


def joined(names: Sequence[str]) -> str:
    """Names as a sentence has them.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
