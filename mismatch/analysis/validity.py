"""Is the comparison valid? What has to be equal on both sides before a difference means anything.

Each point is *proven* by checks that passed, *refuted* by one that failed, or *not proven*, with
what would prove it. A refuted point makes every number of the comparison void: it is what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mismatch.errors import in_list
from mismatch.facts import was_read
from mismatch.types import Report

Standing = Literal["proven", "not proven", "refuted"]
GAPS = ("implementation-gap", "implementation-gap-trainer")
NAMED = 2  # points that one line names
IN_FLOAT32 = "a float32 pass of both sides, as mismatch check makes it"


@dataclass(frozen=True, slots=True)
class Point:
    """Something that both sides must have in common.

    Attributes:
        what: ends the sentence "both sides have the same …".
        refuted_by: checks; one that failed is enough.
        proven_by: groups of checks; one whose members all passed is enough.
        how: what would prove it.
    """

    what: str
    refuted_by: tuple[str, ...]
    proven_by: tuple[tuple[str, ...], ...]
    how: str


@dataclass(frozen=True, slots=True)
class Validity:
    """What a run knows of one point.

    Attributes:
        by: the checks that decide, in their order.
        how: what would prove it, where nothing decides.
    """

    what: str
    standing: Standing
    by: tuple[str, ...] = ()
    how: str = ""


POINTS = (
    Point(
        "token ids",
        ("same-token-ids", "passes-answered"),
        (("same-token-ids",),),
        "ids from both sides: record or return them next to the log-probabilities",
    ),
    Point(
        "prompts and positions",
        ("alignment", "turns"),
        (("alignment", "turns"), ("alignment", *GAPS)),
        "log-probabilities that follow each other from token to token, of more tokens",
    ),
    Point(
        "weights",
        ("weights-as-loaded",),
        (("weights-as-loaded",), GAPS),
        f"digests by value from both sides, or {IN_FLOAT32}",
    ),
    Point(
        "temperature, cuts and penalties",
        ("temperature", "truncation", "sampling-parameters", "sampling-law"),
        (
            ("temperature", "truncation", "sampling-parameters"),
            ("temperature", "truncation", *GAPS),
        ),
        "the sampling parameters of the run, and entropies of the trainer",
    ),
    Point(
        "vocabulary and its padding",
        ("whole-distributions",),
        (GAPS, ("whole-distributions",), ("exact-kl",)),
        f"{IN_FLOAT32}, or whole distributions: --exact-kl",
    ),
    Point(
        "tokens that count",
        ("special-tokens", "turns"),
        (("special-tokens", "turns"), ("sampling-parameters", "turns")),
        "the mask of the sampled tokens, with their end tokens",
    ),
)


def validity(report: Report) -> tuple[Validity, ...]:
    """Return what the checks of a report say of each point.

    Equal bits in every token are no proof where a side was read from a file: its numbers may be a
    copy of the other's.
    """
    status = {check.id: check.status for check in report.checks}
    found = [_judged(point, status) for point in POINTS]
    metrics = report.comparisons[0].metrics if report.comparisons else {}
    largest = metrics.get("logprob_abs_diff_max")
    trainer = report.fingerprints.get(report.comparisons[0].train, {}) if largest else {}
    if largest is not None and largest.value == 0.0 and was_read(trainer):
        how = "every token has equal bits on both sides: look whether one was copied"
        found.append(Validity("tokens computed twice", "not proven", how=how))
    return tuple(found)


def _judged(point: Point, status: Mapping[str, str]) -> Validity:
    failed = tuple(id for id in point.refuted_by if status.get(id) == "failed")
    if failed:
        return Validity(point.what, "refuted", failed)
    for group in point.proven_by:
        if all(status.get(id) == "passed" for id in group):
            return Validity(point.what, "proven", group)
    return Validity(point.what, "not proven", how=point.how)


def in_words(found: Sequence[Validity]) -> str:
    """Return one line: what is refuted, else what is not proven.

    >>> in_words([Validity("weights", "proven"), Validity("token ids", "refuted", ("x",))])
    'comparison: void, the sides do not have the same token ids'
    >>> in_words([Validity("weights", "proven"), Validity("token ids", "not proven")])
    'comparison: not proven to have the same token ids'
    >>> in_words([Validity("weights", "proven")])
    'comparable'
    """
    for standing, words in (("refuted", "void, the sides do not"), ("not proven", "not proven to")):
        if named := [each.what for each in found if each.standing == standing]:
            return f"comparison: {words} have the same {in_list(named, NAMED)}"
    return "comparable"
