"""From numbers to a verdict: which column of the levels table applies, and the rule that reads it.

The table itself is :mod:`mismatch.analysis.thresholds`; the rule is in docs/explain/verdict.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mismatch.analysis.thresholds import Level, Thresholds, default_thresholds
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.inference import KINDS_SEEN, prompts_needed
from mismatch.types import (
    Answer,
    Check,
    Comparison,
    Estimate,
    Judgement,
    NotTested,
    Report,
    Rollout,
    SideFacts,
    Status,
    Verdict,
)

NO_COLUMN = "not judged"
TAILS = {"heavy-tail", "heavy-prompts"}
# Metrics whose intervals are too short where few prompts or tokens carry them.
UNEVEN = ("k3_kl", "token_mult_prob_error")
ARMS = 2.0
EXACT = "exact_kl"
MORE_TOKENS = 4  # times the exact KL's positions: k3 of one token varies more than the KL there
LEAST_LENGTH = 0.25  # of the planned response length, that responses have on average: our judgement
MOST_PROMPTS = 10_000  # advice beyond this is none
FAIL_ON = ("tolerable", "inconclusive", "unfit", "broken")
SEVERITY: dict[str, int] = {
    status: rank
    for rank, status in enumerate(("healthy", "tolerable", "inconclusive", "unfit", "broken"))
}
INCOMPLETE = "incomplete-report"  # the check that names parts of a report that raised
ENTROPY = "policy-entropy"  # a check that leaves fitness open, and says nothing of correctness
LEAST_ENTROPY = 0.05  # nats per token; our judgement: 99 % of the mass on one token has 0.06
MORE_PROMPTS = "measure more: --num-prompts"  # the fix of a check of the square
MORE = "measure more: --num-prompts, --max-tokens"
AS_LOADED = "weights-as-loaded"
ONE_FORM = "train and sample in one form"
TOO_LITTLE = ("enough-data",)  # checks whose warning leaves both questions open
PRECISION = ("fp32", "fp16", "bf16")  # falling: 24, 11 and 8 significant bits
LONG_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
AS_STORED = "as-stored"
NOT_QUANTISED = frozenset((None, "", "auto", "none", AS_STORED, *PRECISION, *LONG_NAMES))
# Stored so, and dequantised by the trainer as it loads them: both sides hold the same values. vLLM
# calls GPT-OSS's MXFP4 "gpt_oss_mxfp4" (ModelConfig.quantization); config.json says "mxfp4".
DEQUANTISED = frozenset(("mxfp4", "gpt_oss_mxfp4"))


def column_for(rollout: SideFacts, train: SideFacts) -> str | None:
    """Return the column of the levels table: the class of the less precise side.

    "quantised" where the two sides compute with other values: a quantised KV cache, or weights that
    one side alone holds quantised. A checkpoint that is stored quantised and that the trainer
    dequantised holds the same values on both sides. Otherwise the lowest precision that either
    computes in (autocast counts), bf16 split into dense and MoE.

    Returns:
        None: a side does not say what it computes in, or names something that the table does not
            know, so that no level applies.
    """
    sides = (rollout, train)
    if _other_values(rollout, train):
        return "quantised"
    if not all(facts.get("dtype") for facts in sides):
        return None
    stated = (kind for each in sides for kind in (each.get("dtype"), each.get("autocast")))
    names = [name for name in map(short_name, stated) if name is not None]
    if not set(names) <= set(PRECISION):
        return None
    dtype = max(names, key=PRECISION.index)
    if dtype != "bf16":
        return dtype
    return "bf16 MoE" if any(facts.get("moe") for facts in sides) else "bf16 dense"


def _other_values(rollout: SideFacts, train: SideFacts) -> bool:
    """Whether one side alone rounds weights or KV cache to a quantised format."""
    sides = (rollout, train)
    if any(short_name(side.get("kv_cache_dtype")) not in NOT_QUANTISED for side in sides):
        return True
    forms = [short_name(side.get("weights_form")) or AS_STORED for side in sides]
    if forms[0] != forms[1]:
        return any(form not in NOT_QUANTISED for form in forms)
    same = NOT_QUANTISED | DEQUANTISED
    return any(short_name(side.get("quantization")) not in same for side in sides)


def short_name(value: Any) -> str | None:
    """Return a dtype or format as reports name it; None where nothing is stated."""
    if not value:
        return None
    name = str(value).removeprefix("torch.").lower()
    return LONG_NAMES.get(name, name)


def judge(
    comparison: Comparison, column: str | None, thresholds: Thresholds | None = None
) -> tuple[Judgement, ...]:
    """Every metric of the comparison that has a level in the column, in the table's order."""
    table = default_thresholds() if thresholds is None else thresholds
    measured = {**comparison.metrics, **comparison.routing}
    judgements = []
    for metric, columns in table.items():
        if column is not None and column in columns and metric in measured:
            judged = judge_one(metric, measured[metric], columns[column])
            if metric == EXACT and judged.inconclusive and _k3_decides(comparison, columns[column]):
                judged = replace(judged, status="healthy", deciding_prompts=None)
            judgements.append(judged)
    return tuple(judgements)


def _k3_decides(comparison: Comparison, level: Level) -> bool:
    """Return whether k3 over all tokens shows that an exact KL that spans a bound is healthy.

    Both estimate one KL(rollout‖train). A few positions with a large KL make the exact KL's
    interval wide, and k3 has far more tokens. But k3 hardly sees tokens that the engine rarely
    samples: what that may cost is known from the distributions. k3 never decides against the exact
    KL's value or lower end.
    """
    metrics = comparison.metrics
    exact, k3, spread = (metrics.get(name) for name in (EXACT, "k3_kl", "k3_spread_at_exact"))
    if not comparison.sampled_by_left or exact is None or k3 is None or spread is None:
        return False
    if exact.low is None or k3.high is None or k3.n_tokens < MORE_TOKENS * exact.n_tokens:
        return False
    chance = ARMS * spread.value / math.sqrt(k3.n_tokens)
    return (
        exact.value <= level.healthy
        and exact.low <= k3.high
        and k3.value + chance <= level.healthy
        and judge_one("k3_kl", k3, level).status == "healthy"
    )


def without_short(
    judgements: Sequence[Judgement], rollout: Rollout
) -> tuple[tuple[Judgement, ...], list[NotTested]]:
    """Leave out what is judged of whole sequences where responses are far shorter than planned.

    The spread of a sequence's log-ratio grows with its length, so that weights of short responses
    say nothing of long responses.
    """
    mean, planned = rollout.n_actions / rollout.n_sequences, rollout.sampling.max_tokens
    if mean >= LEAST_LENGTH * planned:
        return tuple(judgements), []
    kept = tuple(each for each in judgements if METRICS[each.metric].reduction == "token")
    reason = f"responses have {mean:.0f} tokens on average, and {planned} are planned"
    missing = NotTested(f"sequence weights at {planned} tokens", reason, "let responses be longer")
    return kept, [missing] if len(kept) < len(judgements) else []


def require_applied(
    comparison: Comparison, column: str | None, thresholds: Thresholds | None
) -> None:
    """Every metric that the user gave levels for was judged by one of them.

    Raises:
        MismatchError: a metric that this run could not measure, or with levels for other classes
            of stack only.
    """
    measured = {**comparison.metrics, **comparison.routing}
    lost = []
    for metric, columns in (thresholds or {}).items():
        yours = [name for name, level in columns.items() if level.yours]
        if not yours:
            continue
        if column is None:
            lost.append(f"{metric}: a side does not say its dtype, so no column applies")
        elif column not in yours:
            given = ", ".join(f'"{name}"' for name in yours)
            lost.append(f'{metric}: given for {given}, this run is "{column}"')
        elif metric not in measured:
            lost.append(f"{metric}: not measured in this run")
    if lost:
        fault = f"{len(lost)} of your levels could not be applied: {'; '.join(lost)}"
        fix = "correct or drop them in the file, then: mismatch compare RUN --thresholds …"
        raise MismatchError(fault, fix)


def judge_one(metric: str, estimate: Estimate, level: Level) -> Judgement:
    """Judge one metric against one cell.

    Unfit if the whole interval is beyond the unfit bound, or the value is infinite; inconclusive
    if the interval spans that bound, or if few prompts or tokens carry it and it would not hold
    when widened; healthy if all of it is within the healthy bound; otherwise
    tolerable. ``inconclusive`` says of any status that the interval spans a bound, with the number
    of prompts that would decide. A maximum has no interval: its value stands for it. Where one
    exists in principle but not from this run, the metric is inconclusive.
    """
    # A metric that is good when high is judged mirrored, so that "above" always means worse.
    sign = -1.0 if METRICS[metric].good == "high" else 1.0
    ends = [estimate.value if end is None else end for end in (estimate.low, estimate.high)]
    low, high = sorted(sign * end for end in ends)
    healthy, unfit = sign * level.healthy, sign * level.unfit
    spanned = [bound for bound in (level.healthy, level.unfit) if low <= sign * bound < high]
    bounded = estimate.low is not None and not math.isnan(low) and not math.isnan(high)
    whole = "whole-dump" in estimate.flags  # its value is of all there is
    blind = not bounded and METRICS[metric].kind != "extreme" and not whole
    status: Status = "tolerable"
    if not math.isfinite(estimate.value) or (low > unfit and not blind):
        status, blind = "unfit", False
    elif blind or level.unfit in spanned:
        status = "inconclusive"
    elif high <= healthy:
        status = "healthy"
    if status in ("healthy", "tolerable") and metric in UNEVEN and TAILS & set(estimate.flags):
        bound = healthy if status == "healthy" else unfit
        # Twice its arm covers as it says (benchmarks/coverage.py). From few prompts the interval
        # itself reaches to what was not drawn, and is not widened once more.
        if estimate.n_prompts >= KINDS_SEEN:
            high = estimate.value + ARMS * (high - estimate.value)
        if high > bound:
            status, blind = "inconclusive", True
    return Judgement(
        metric,
        status,
        estimate.value,
        level.healthy,
        level.unfit,
        level.source,
        inconclusive=bool(spanned) or blind,
        deciding_prompts=_deciding(estimate, level, sign, spanned),
    )


def _deciding(
    estimate: Estimate, level: Level, sign: float, spanned: Iterable[float]
) -> int | None:
    """Prompts that would put every bound that matters outside the interval; None: no number would.

    Beyond one outer bound the other is settled with it: a value in the healthy zone only has to
    clear the healthy bound, one in the unfit zone the unfit bound. Where few tokens or
    prompts carry the value, its interval does not shrink with the root of the prompts.
    """
    if sign * estimate.value <= sign * level.healthy:
        spanned = [bound for bound in spanned if bound == level.healthy]
    elif sign * estimate.value > sign * level.unfit:
        spanned = [bound for bound in spanned if bound == level.unfit]
    if TAILS & set(estimate.flags):
        return None
    needed = [prompts_needed(estimate, bound) for bound in spanned]
    counts = [count for count in needed if count is not None and count <= MOST_PROMPTS]
    return max(counts) if counts and len(counts) == len(needed) else None


def verdict(
    judgements: Sequence[Judgement],
    checks: Sequence[Check],
    column: str | None,
    unmeasured: str = "",
) -> Verdict:
    """Return the run's verdict: the worse of correctness (checks) and fitness (levels).

    Args:
        unmeasured: why correctness could not be measured by the square; "": it was, or nobody
            asks here.

    Raises:
        MismatchError: nothing was judged and no check failed; nothing measured never passes.
    """
    correct = _correctness(checks, unmeasured)
    if not judgements and column is not None and correct.status != "broken":
        fault = "nothing measured: no metric has a level for this run, so there is no verdict"
        fix = f'set levels for the column "{column}" with --thresholds FILE.toml'
        raise MismatchError(fault, fix)
    fit = _fitness(judgements, checks, column)
    status, reason = correct.status, correct.reason
    if SEVERITY[fit.status] > SEVERITY[status] or status == "healthy":
        status, reason = fit.status, fit.reason
    elif status == "broken" and fit.status == "unfit":
        beyond = sum(item.status == "unfit" for item in judgements)
        reason += f"; {beyond} of {len(judgements)} metrics are unfit, too"
    return Verdict(status, reason, column or NO_COLUMN, tuple(judgements), correct, fit)


def _correctness(checks: Sequence[Check], unmeasured: str) -> Answer:
    """Is something broken?"""
    failed = [check for check in checks if check.status == "failed"]
    warned = [check for check in checks if check.status == "warning"]
    little = [check for check in warned if check.id in TOO_LITTLE]
    undecided = [
        check for check in checks if check.status == "inconclusive" and check.id != ENTROPY
    ]
    if failed:
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        return Answer("broken", f"check {failed[0].id} failed{more}: {failed[0].detail}")
    if little:
        return Answer("inconclusive", little[0].detail)
    if undecided:
        more = f" (and {len(undecided) - 1} more)" if len(undecided) > 1 else ""
        detail = f"check {undecided[0].id} does not decide{more}: {undecided[0].detail}"
        return Answer("inconclusive", detail)
    if unmeasured:
        return Answer("inconclusive", f"not measured whether a side is broken: {unmeasured}")
    if warned:
        more = f" (and {len(warned) - 1} more)" if len(warned) > 1 else ""
        return Answer("tolerable", f"check {warned[0].id} warns{more}: {warned[0].detail}")
    passed = sum(check.status == "passed" for check in checks)
    return Answer("healthy", f"{passed} checks passed")


def _fitness(
    judgements: Sequence[Judgement], checks: Sequence[Check], column: str | None
) -> Answer:
    """Can training tolerate it?"""
    if column is None:
        known = ", ".join(PRECISION)
        reason = f"not judged: a side does not state its dtype ({known})"
        return Answer("inconclusive", reason)
    if not judgements:
        return Answer("inconclusive", "nothing could be compared")
    status = max((item.status for item in judgements), key=SEVERITY.__getitem__)
    deciding = [item for item in judgements if item.status == status]
    deciding.sort(key=lambda item: item.inconclusive)  # what is certain comes first
    little = [check for check in checks if check.id in TOO_LITTLE and check.status == "warning"]
    little += [check for check in checks if check.id == ENTROPY]
    if little and SEVERITY[status] < SEVERITY["inconclusive"]:
        return Answer("inconclusive", little[0].detail)
    if status == "healthy" and column == "quantised":
        reason = "within the levels of a quantised rollout, which changes what is sampled"
        return Answer("tolerable", reason)
    return Answer(status, _reason(status, deciding, len(judgements)))


def _reason(status: Status, deciding: list[Judgement], total: int) -> str:
    if status == "healthy":
        other = f" ({EXACT} by k3_kl, which estimates it)" if deciding[-1].inconclusive else ""
        return f"all {total} judged metrics are within their healthy bounds{other}"
    names = ", ".join(_label(item) for item in deciding[1:])
    first = deciding[0]
    text = f"{_label(first)}: {_written(first, first.value)}"
    if status == "unfit":
        more = f"; also beyond their limits: {names}" if names else ""
        return f"{text}, limit {_written(first, first.unfit)}{more}"
    if status == "inconclusive" or first.inconclusive:
        text += _spans(first, deciding)
    else:
        text += f", beyond its healthy bound {_written(first, first.healthy)}"
    return text + (f"; also not healthy: {names}" if names else "")


def _label(item: Judgement) -> str:
    """Return a metric's name as tables have it."""
    metric = METRICS.get(item.metric)
    return metric.label.partition(",")[0] if metric and metric.label else item.metric


def _written(item: Judgement, value: float) -> str:
    """Return a value or bound of a metric: a share in percent."""
    share = (metric := METRICS.get(item.metric)) is not None and metric.unit == "share"
    return f"{100 * value:.3g} %" if share else f"{value:.3g}"


def prompts_to_decide(deciding: Sequence[Judgement]) -> int | None:
    """Return how many prompts would settle every metric that is open; None: no number would."""
    wanted = [item.deciding_prompts for item in deciding if item.inconclusive]
    known = [each for each in wanted if each]
    return max(known) if known and len(known) == len(wanted) else None


def _spans(item: Judgement, deciding: Sequence[Judgement]) -> str:
    """Say what the interval of a metric allows, and how many prompts would settle the verdict."""
    sign = -1.0 if item.healthy > item.unfit else 1.0
    undecided = item.status == "inconclusive"  # else no value that the interval allows is unfit
    name, bound = ("unfit", item.unfit) if undecided else ("healthy", item.healthy)
    written = _written(item, bound)
    if sign * item.value <= sign * bound:
        text = f", within its {name} bound {written}, but its interval reaches beyond it"
    else:
        text = f", beyond its {name} bound {written}, but its interval includes it"
    if (wanted := prompts_to_decide(deciding)) is not None:
        text += f" (about {wanted:,} prompts would settle it)"
    return text


def incomplete(report: Report, failed: Sequence[NotTested]) -> Report:
    """Return the report with what could not be made; then no verdict passes."""
    if not failed:
        return report
    before = [check.detail for check in report.checks if check.id == INCOMPLETE]
    said = "; ".join([*before, *(f"{entry.what}: {entry.reason}" for entry in failed)])
    check = Check(INCOMPLETE, "inconclusive", said, failed[0].how)
    answer = Answer("inconclusive", f"the report is incomplete: {said}")
    verdict, least = report.verdict, SEVERITY["inconclusive"]
    if verdict.correctness is None or SEVERITY[verdict.correctness.status] <= least:
        verdict = replace(verdict, correctness=answer)
    if SEVERITY[verdict.status] <= least:
        verdict = replace(verdict, status=answer.status, reason=answer.reason)
    return replace(
        report,
        verdict=verdict,
        checks=(*(each for each in report.checks if each.id != INCOMPLETE), check),
        not_tested=(*failed, *report.not_tested),
    )


def exit_code(result: Verdict, fail_on: str = "inconclusive", checks: Sequence[Check] = ()) -> int:
    """0 where the verdict passes, 1 where it is ``fail_on`` or worse, 2 of an incomplete report.

    Args:
        checks: of the report.

    Raises:
        MismatchError: another ``fail_on``.
    """
    if fail_on not in FAIL_ON:
        fault = f"--fail-on {fail_on}: no such status"
        raise MismatchError(fault, f"use one of {', '.join(FAIL_ON)}")
    if any(check.id == INCOMPLETE for check in checks):
        return 2
    return int(SEVERITY[result.status] >= SEVERITY[fail_on])


def fails_on(asked: str | None, quick: bool) -> str:
    """Return the status from which a command fails: what was asked; by itself "inconclusive", and
    after ``--depth quick``, which leaves correctness open, "unfit"."""
    return asked or ("unfit" if quick else "inconclusive")
