"""Which cause a verdict is about: a confirmed one that carries the mismatch, and never a guess."""

from __future__ import annotations

from typing import Any

import pytest

from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.explained import lead_of, led, unled
from mismatch.analysis.levels import verdict
from mismatch.types import Check, Estimate

GAP = Check("implementation-gap-trainer", "failed", "0.4 nats")
RATIO = Check("importance-ratio", "failed", "mean ratio 0.8")
OTHER = Check("recorded-values", "failed", "3 NaN")


def caused(status: Any, share: float | None, **fields: Any) -> Causes:
    effect = None if share is None else Estimate(share, share, share, 9, 9, 9)
    cause = Cause("packing-leak", status, "trainer", effect, (), **fields)
    return Causes((cause,), (), (), (), 0.4, 0.0)


@pytest.mark.parametrize(
    ("causes", "checks", "leads"),
    [
        (caused("confirmed", 0.9), [RATIO, GAP], True),
        (caused("confirmed", None), [RATIO], True),
        (caused("suspected", 0.9), [RATIO, GAP], False),  # it would hide what failed
        (caused("confirmed", 0.4), [RATIO, GAP], False),  # more is left than it takes out
        (caused("confirmed", 0.9), [OTHER], False),  # it explains nothing that failed
        (None, [RATIO], False),
    ],
)
def test_a_cause_leads_where_it_is_confirmed_and_carries_what_failed(
    causes: Causes | None, checks: list[Check], leads: bool
) -> None:
    assert (lead_of(causes, checks) is not None) == leads


def test_the_reason_names_the_cause_and_what_it_does_not_explain() -> None:
    checks = [RATIO, OTHER, GAP]
    plain = verdict((), checks, None)
    lead = lead_of(caused("confirmed", 0.9), checks)
    told = led(plain, lead, checks)
    assert told.status == "broken"
    assert "packing-leak" in told.reason
    before, after = told.reason.split("failed as well: ")
    assert RATIO.id in before
    assert GAP.id in before
    assert after == OTHER.id
    assert unled(told, lead, checks) == plain
