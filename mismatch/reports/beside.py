"""The headline's tokens under other settings: replayed experts, weights in another form, and what
`mismatch score --name` has added."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch.analysis.two_passes import replay_phrase
from mismatch.reports import quantities
from mismatch.reports.text import line
from mismatch.specs import AS_STORED
from mismatch.types import Comparison, Estimate, Report

TITLE = "On the same tokens"
LEAD = "other settings, beside the trainer under test"
TITLES = ("mean |delta|", "k3 KL", "other experts")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison as a line; "–" where a number was not measured.

    Attributes:
        meaning: what is special about its right side, or "".
        experts: share of (token, layer) whose experts differ, or "replayed".
    """

    pair: str
    meaning: str
    mean: str
    k3: str
    experts: str


def rows(report: Report) -> list[Row]:
    """The headline first, for comparison; empty where there is nothing beside it.

    The engine's prefill against the trainer is left out: the noise and the budget show it.
    """
    others = [
        one
        for one in report.comparisons[1:]
        if report.fingerprints.get(one.rollout, {}).get("mode") != "prefill"
    ]
    if not others:
        return []
    return [_row(report, one) for one in (report.comparisons[0], *others)]


def _row(report: Report, one: Comparison) -> Row:
    facts = report.fingerprints.get(one.train, {})
    given = replay_phrase(facts)
    flips = one.routing.get("routing_disagree_layer")
    constructed = bool(given) and flips is not None and flips.value == 0
    return Row(
        pair=f"{line(one.rollout)} / {line(one.train)}",
        meaning=_meaning(facts.get("weights_form", AS_STORED), given),
        mean=_number(one.metrics.get("logprob_abs_diff_mean")),
        k3=_number(one.metrics.get("k3_kl")),
        experts="replayed"
        if constructed
        else quantities.MISSING
        if flips is None
        else quantities.percent(flips.value),
    )


def _meaning(form: str, given: str) -> str:
    parts = [f"replays the {line(given)}"] if given else []
    return "; ".join([*parts, *([f"experts {line(form)}"] if form != AS_STORED else [])])


def _number(estimate: Estimate | None) -> str:
    return quantities.MISSING if estimate is None else quantities.number(estimate.value)
