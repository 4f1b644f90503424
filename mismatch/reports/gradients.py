"""A gradient check in words and rows, for every rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mismatch.experiments.gradients.sentences import (
    better,
    degrees,
    joined,
    quieter,
    share,
    silent,
    worse,
)
from mismatch.experiments.gradients.types import (
    LOSSES,
    REWARDS,
    GradientCheck,
    GradientRow,
    GroupError,
    Loss,
)
from mismatch.reports import gradients_figures
from mismatch.reports.quantities import MISSING, count, number, plural, times
from mismatch.reports.text import line
from mismatch.types import Estimate

TITLE = "Gradients"
LEAD = (
    "The policy gradient of one batch, taken by the trainer, its fixes and the corrections of the "
    "loss, beside that of the trainer in float32 on the same tokens."
)
LOSS_WORDS: dict[Loss, str] = {"token": "Token-level loss", "sequence": "Sequence-level loss"}
LOSS_REMARK: dict[Loss, str] = {
    "token": "every action token of the batch weighs the same",
    "sequence": "every sample weighs the same, its tokens share that",
}
AIM = (
    "A correction aims at another gradient than the plain one of the reference: how far off it is "
    "says how much it changes, not how wrong it is."
)
JACKKNIFE = "Intervals: jackknife over prompts, 95 % each, not adjusted for how many there are."


@dataclass(frozen=True, slots=True)
class GradientLine:
    """One gradient as a line of a table; all texts, "–" where there is nothing to say.

    Attributes:
        off, off_interval: the angle to the reference's gradient.
        length: norm over the reference's; ``error``: relative; ``times``: over the baseline's.
        bias: that part of the error which every prompt shares; ``noise``: the variance over
            prompts; ``noise_times``: over the baseline's.
        sign, tone, verdict: nearer or further than the baseline, beyond chance; "" for itself.
        remark: whose gradient it is by construction.
        took: seconds and memory; "" where not measured.
    """

    id: str
    label: str
    kind: str
    off: str
    off_interval: str
    cosine: str
    length: str
    length_interval: str
    error: str
    error_interval: str
    times: str
    bias: str
    bias_interval: str
    noise: str
    noise_times: str
    sign: str
    tone: str
    verdict: str
    remark: str
    took: str


@dataclass(frozen=True, slots=True)
class Part:
    """One loss.

    Attributes:
        lines: the gradients that were taken; ``same``: what the others are by construction.
        groups: names of the parameter groups; ``by_group``: line by line, (label, cells).
    """

    title: str
    remark: str
    lines: list[GradientLine]
    same: list[str]
    groups: list[str]
    by_group: list[tuple[str, list[tuple[str, str]]]]


def view(made: GradientCheck | None) -> dict[str, Any] | None:
    """What the HTML section shows; None where no gradient was taken."""
    if made is None:
        return None
    return {
        "lead": LEAD,
        "batch": batch(made),
        "sentences": sentences(made),
        "notes": notes(made),
        "parts": parts(made),
        "pictures": gradients_figures.pictures(made),
        "not_tested": [line(reason) for reason in made.not_tested],
    }


def sentences(made: GradientCheck) -> list[str]:
    """What the check comes to."""
    return [line(sentence) for sentence in made.summary]


def in_short(made: GradientCheck | None) -> str:
    """One sentence for a terminal."""
    return sentences(made)[0] if made is not None and made.summary else ""


def batch(made: GradientCheck) -> str:
    """What the gradients were taken of."""
    size = f"{plural(made.prompts, 'prompt')}, {plural(made.sequences, 'sample')}"
    return f"{size}, {plural(made.tokens, 'action token')}; advantages: {line(_advantages(made))}"


def _advantages(made: GradientCheck) -> str:
    if made.advantages == REWARDS:
        return "rewards, normalised within each prompt"
    return made.advantages


def notes(made: GradientCheck) -> list[str]:
    """What has to be known before the table is believed."""
    said = []
    if made.advantages != REWARDS:
        said.append(
            "No task steered this gradient: the rewards cannot, so signs stand in for advantages. "
            "How kernels and dtypes bend a gradient shows all the same."
        )
    elif made.deciding < made.prompts:
        said.append(
            f"{count(made.deciding)} of {plural(made.prompts, 'prompt')} have samples of different "
            "reward; the others have no gradient."
        )
    flags = {flag for row in made.rows for flag in _flags(row)}
    if "one-prompt" in flags:
        said.append("One prompt only: nothing can be told from chance.")
    elif "few-prompts" in flags:
        said.append("Few prompts: the intervals are rough. More: --gradient-prompts.")
    if any(row.kind == "correction" for row in made.rows):
        said.append(AIM)
    return [*said, JACKKNIFE]


def _flags(row: GradientRow) -> tuple[str, ...]:
    return () if row.whole.relative_error is None else row.whole.relative_error.flags


def parts(made: GradientCheck) -> list[Part]:
    """A table per loss, the one that the sentences speak of first."""
    return [_part(made, loss) for loss in LOSSES if any(row.loss == loss for row in made.rows)]


def _part(made: GradientCheck, loss: Loss) -> Part:
    rows = [row for row in made.rows if row.loss == loss]
    baseline = made.row("baseline", loss)
    own = [row for row in rows if not row.same_as]
    return Part(
        title=LOSS_WORDS[loss],
        remark=LOSS_REMARK[loss],
        # A trainer that is the reference itself keeps its line: it is what the check is about.
        lines=[_line(row, baseline) for row in rows if row is baseline or not row.same_as],
        same=_same([row for row in rows if row is not baseline]),
        groups=[one.group for one in rows[0].groups],
        by_group=[(line(row.id), [_cell(one) for one in row.groups]) for row in own],
    )


def _line(row: GradientRow, baseline: GradientRow | None) -> GradientLine:
    whole = row.whole
    sign, tone, verdict = _verdict(row, baseline)
    return GradientLine(
        id=line(row.id),
        label=line(row.label),
        kind=row.kind,
        off=MISSING if whole.cosine is None else degrees(whole.cosine.value),
        off_interval=_arc(whole.cosine),
        cosine=MISSING if whole.cosine is None else cosine(whole.cosine.value),
        length=_value(whole.norm_ratio, number),
        length_interval=_interval(whole.norm_ratio, number),
        error=_value(whole.relative_error, share),
        error_interval=_interval(whole.relative_error, share),
        times=_value(row.error_ratio, times),
        bias=_value(row.bias, share),
        bias_interval=_interval(row.bias, share),
        noise=_value(row.variance, number),
        noise_times=_value(row.variance_ratio, times),
        sign=sign,
        tone=tone,
        verdict=verdict,
        remark=_remark(row),
        took=_took(row),
    )


def _verdict(row: GradientRow, baseline: GradientRow | None) -> tuple[str, str, str]:
    if baseline is None or row.id == baseline.id:
        return "", "none", ""
    if better(row):
        return "✓", "healthy", "nearer"
    if worse(row):
        return "✕", "critical" if row.kind == "fix" else "warn", "further off"
    if row.kind == "correction" and quieter(row, baseline):
        return "✓", "healthy", "less noise"
    return "·", "none", "no clear change"


def _same(rows: list[GradientRow]) -> list[str]:
    """Rows whose gradient is another's, by whose it is."""
    sources = dict.fromkeys(row.same_as for row in rows if row.same_as)
    return [_equal(one, [line(row.id) for row in rows if row.same_as == one]) for one in sources]


def _equal(source: str, names: list[str]) -> str:
    if source == "reference":
        return f"{joined(names)}: the reference's gradient, of the same settings."
    return f"{joined(names)}: the gradient of {line(source)}, whose coefficients are the same here."


def _remark(row: GradientRow) -> str:
    return "the reference itself: the same settings" if row.same_as == "reference" else ""


def _took(row: GradientRow) -> str:
    if row.seconds is None:
        return ""
    memory = "" if row.peak_bytes is None else f", {number(row.peak_bytes / 2**20)} MiB"
    return f"{number(row.seconds)} s{memory}"


def _cell(one: GroupError) -> tuple[str, str]:
    """Relative error and angle of one parameter group."""
    if one.relative_error is None:
        return MISSING, ""
    if silent(one):
        return share(one.relative_error.value), "no gradient"
    off = "" if one.cosine is None else f"{degrees(one.cosine.value)} off"
    return share(one.relative_error.value), off


def cosine(value: float) -> str:
    """A cosine, with the digits that its distance from 1 needs.

    >>> cosine(0.8), cosine(0.99987), cosine(1.0), cosine(1 - 3e-9)
    ('0.800', '0.99987', '1', '1 - 3e-9')
    """
    gap = 1.0 - value
    if gap == 0.0:
        return "1"
    if gap < 1e-6:
        return f"1 - {gap:.0e}".replace("e-0", "e-")
    digits = 3
    while digits < 8 and gap < 10.0 ** (1 - digits):
        digits += 1
    return f"{value:.{digits}f}"


def _value(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    return MISSING if estimate is None else write(estimate.value)


def _interval(estimate: Estimate | None, write: Callable[[float], str]) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return MISSING
    return f"{write(estimate.low)} … {write(estimate.high)}"


def _arc(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return MISSING
    return f"{degrees(estimate.high)} … {degrees(estimate.low)}"
