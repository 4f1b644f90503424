"""From numbers to a verdict: which column of the levels table applies, and the rule that reads it.

The table itself is :mod:`mismatch.analysis.thresholds`; the rule is written out in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mismatch.analysis.published_values import REFERENCES, Reference, references_for
from mismatch.analysis.thresholds import (
    COLUMNS,
    Level,
    Thresholds,
    default_thresholds,
    load_thresholds,
)
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.inference import prompts_needed
from mismatch.types import Check, Comparison, Estimate, Fingerprint, Judgement, Status, Verdict

__all__ = [
    "COLUMNS",
    "REFERENCES",
    "Level",
    "Reference",
    "Thresholds",
    "column_for",
    "default_thresholds",
    "exit_code",
    "judge",
    "load_thresholds",
    "references_for",
    "verdict",
]

FAIL_ON = ("critical", "warn")
SEVERITY: dict[Status, int] = {"healthy": 0, "warn": 1, "critical": 2}
PRECISION = ("fp32", "fp16", "bf16")  # falling: 24, 11 and 8 significant bits
LONG_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
NOT_QUANTISED = {None, "", "auto", "none", "as-stored", *PRECISION, *LONG_NAMES}


def column_for(rollout: Fingerprint, train: Fingerprint) -> str:
    """The column of the levels table: the class of the less precise side.

    "quantised" where either side has quantised weights or KV cache; otherwise the lowest precision
    that either computes in (autocast counts), bf16 split into dense and MoE.

    Raises:
        MismatchError: a dtype that the table does not know.
    """
    sides = (rollout, train)
    for facts in sides:
        if any(_name(facts.get(key)) not in NOT_QUANTISED for key in _QUANTISABLE):
            return "quantised"
    dtypes = [_name(facts.get(key)) for facts in sides for key in ("dtype", "autocast")]
    lowest = max((_precision(name) for name in dtypes if name is not None), default=None)
    if lowest is None:
        raise MismatchError(
            "neither side's fingerprint says its dtype: no levels apply",
            "score again with this version of mismatch",
        )
    dtype = PRECISION[lowest]
    if dtype != "bf16":
        return dtype
    return "bf16 MoE" if any(facts.get("moe") for facts in sides) else "bf16 dense"


_QUANTISABLE = ("quantization", "kv_cache_dtype", "weights_form")


def _name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.").lower()


def _precision(name: str) -> int:
    short = LONG_NAMES.get(name, name)
    if short not in PRECISION:
        raise MismatchError(
            f"no levels for computation in {name!r}", f"use one of {', '.join(PRECISION)}"
        )
    return PRECISION.index(short)


def judge(
    comparison: Comparison, column: str, thresholds: Thresholds | None = None
) -> tuple[Judgement, ...]:
    """Every metric of the comparison that has a level in the column, in the table's order."""
    table = default_thresholds() if thresholds is None else thresholds
    measured = {**comparison.metrics, **comparison.routing}
    return tuple(
        judge_one(metric, measured[metric], columns[column])
        for metric, columns in table.items()
        if column in columns and metric in measured
    )


def judge_one(metric: str, estimate: Estimate, level: Level) -> Judgement:
    """One metric against one cell.

    Critical if the whole interval is beyond the critical bound, or the value is no number; healthy
    if all of it is within the healthy bound, otherwise warn. An interval that spans a bound is also
    inconclusive, with the number of prompts that would decide. Without an interval the value stands
    for it.
    """
    # A metric that is good when high is judged mirrored, so that "above" always means worse.
    sign = -1.0 if METRICS[metric].good == "high" else 1.0
    ends = [estimate.value if end is None else end for end in (estimate.low, estimate.high)]
    low, high = sorted(sign * end for end in ends)
    healthy, critical = sign * level.healthy, sign * level.critical
    status: Status = "warn"
    if low > critical or math.isnan(estimate.value):
        status = "critical"
    elif high <= healthy:
        status = "healthy"
    spanned = [bound for bound in (level.healthy, level.critical) if low <= sign * bound < high]
    blind = "one-prompt" in estimate.flags  # an interval exists in principle, not from this run
    return Judgement(
        metric,
        status,
        estimate.value,
        level.healthy,
        level.critical,
        level.source,
        inconclusive=bool(spanned) or blind,
        deciding_prompts=_deciding(estimate, level, sign, spanned),
    )


def _deciding(
    estimate: Estimate, level: Level, sign: float, spanned: Iterable[float]
) -> int | None:
    """Prompts that would put every bound that matters outside the interval.

    Beyond one outer bound the other is settled with it: a value in the healthy zone only has to
    clear the healthy bound, one in the critical zone the critical bound.
    """
    if sign * estimate.value <= sign * level.healthy:
        spanned = [bound for bound in spanned if bound == level.healthy]
    elif sign * estimate.value > sign * level.critical:
        spanned = [bound for bound in spanned if bound == level.critical]
    needed = [prompts_needed(estimate, bound) for bound in spanned]
    known = [count for count in needed if count is not None]
    return max(known) if known and len(known) == len(needed) else None


def verdict(judgements: Sequence[Judgement], checks: Sequence[Check], column: str) -> Verdict:
    """The run's verdict: a failed check is critical, otherwise the worst judgement counts.

    Raises:
        MismatchError: nothing was judged and no check failed; nothing measured never passes.
    """
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        reason = f"check {failed[0].id} failed{more}: {failed[0].detail}"
        beyond = sum(item.status == "critical" for item in judgements)
        if beyond:
            reason += f"; {beyond} of {len(judgements)} judged metrics are critical as well"
        return Verdict("critical", reason, column, tuple(judgements))
    if not judgements:
        raise MismatchError(
            "nothing measured: no metric has a level for this run, so there is no verdict",
            f'set levels for the column "{column}" with --thresholds FILE.toml',
        )
    status = max((item.status for item in judgements), key=SEVERITY.__getitem__)
    deciding = [item for item in judgements if item.status == status]
    deciding.sort(key=lambda item: item.inconclusive)  # what is certain comes first
    return Verdict(status, _reason(status, deciding, len(judgements)), column, tuple(judgements))


def _reason(status: Status, deciding: list[Judgement], total: int) -> str:
    if status == "healthy":
        return f"all {total} judged metrics are within their healthy bounds"
    names = ", ".join(item.metric for item in deciding[1:])
    more = f"; so {'is' if len(deciding) == 2 else 'are'} {names}" if names else ""
    first = deciding[0]
    if status == "critical":
        text = f"{first.metric} {first.value:.3g} is beyond its critical bound {first.critical:g}"
    elif first.inconclusive:
        text = f"{first.metric} {first.value:.3g}: its interval does not decide"
        if first.deciding_prompts is not None:
            text += f" (about {first.deciding_prompts} prompts would decide)"
        more = f"; not healthy either: {names}" if names else ""
    else:
        text = f"{first.metric} {first.value:.3g} is beyond its healthy bound {first.healthy:g}"
        more = f"; not healthy either: {names}" if names else ""
    return text + more


def exit_code(result: Verdict, fail_on: str = "critical") -> int:
    """0 where the verdict passes, 1 where it does not. ``fail_on``: "critical" or "warn".

    Raises:
        MismatchError: another ``fail_on``.
    """
    if fail_on not in FAIL_ON:
        raise MismatchError(
            f"--fail-on {fail_on}: no such status", f"use one of {', '.join(FAIL_ON)}"
        )
    failing = SEVERITY["warn" if fail_on == "warn" else "critical"]
    return int(SEVERITY[result.status] >= failing)
