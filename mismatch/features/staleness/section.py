"""Staleness, false labels and drift as sections of a report."""

from __future__ import annotations

from mismatch.analysis.drift import Drift
from mismatch.features.staleness.results import StalenessReport, drift_sentences
from mismatch.reports.formatting import capital, count, number, percent, text
from mismatch.reports.section import Column, Section, Table
from mismatch.types import Report

SPLITS = (
    Column("told by", text, of=lambda each: {"lag": "weight versions", "old": "old pass"}[each.by]),
    Column("mismatch", number, detail="rms, nats", interval=2, of="mismatch"),
    Column("staleness", number, detail="rms, nats", interval=2, of="staleness"),
    Column("staleness's share", percent, interval=1, detail="of the mean square", of="share"),
)
LAGS = (
    Column("versions behind", count, of="lag"),
    Column("tokens", count, 1, of="tokens"),
    Column("mismatch", number, detail="rms, nats, at equal weights", of="mismatch"),
    Column("staleness", number, detail="rms, nats", of="staleness"),
)
LABELS = (
    Column("claimed version", text, of="claimed"),
    Column("as far apart as", text, of=lambda each: each.fits or "older weights"),
    Column("rows", count, of="count"),
    Column("first rows", text, of=lambda each: ", ".join(each.rows)),
)
DRIFTING = (
    Column("tokens of", text, of="what"),
    Column("signed mean", number, interval=1, detail="nats per token", of="mean"),
)


def staleness(result: StalenessReport, report: Report) -> Section:
    """Show what the weights changed, what the sides disagree on, and labels that do not hold."""
    said = [capital(sentence) for sentence in result.sentences()]
    warned = [capital(each.sentence()) for each in result.labels]
    return Section(
        "staleness",
        "Staleness and mismatch",
        "delta holds what the weights changed between sampling and the trainer's pass, and what "
        "engine and trainer disagree on at equal weights. A lag counts from the newest weights "
        "that sampled in a step: if these were behind too, that counts as mismatch.",
        warnings=warned,
        sentences=[f"{each}." for each in said if each not in warned],
        tables=[
            Table.of(SPLITS, result.splits),
            Table.of(LAGS, [lag for each in result.splits for lag in each.lags]),
            Table.of(LABELS, result.labels),
        ],
        short=warned[0] if warned else said[0].partition(":")[0] if not result.splits else said[0],
        first=True,
    )


def drift(result: Drift, report: Report) -> Section:
    """Show the signed mean, by place and step, and how the log-ratio grows with length."""
    found = [capital(each) for each in drift_sentences(result)]
    said = []
    if result.exponent is not None and not result.steep:
        said = [
            f"The log-ratio of {result.length} tokens grows with length to the power "
            f"{number(result.exponent.value, 2)}; independent tokens give 0.5, a bias 1."
        ]
    if not found:
        said.insert(0, "Nothing adds up along a response beyond what independent noise makes.")
    return Section(
        "drift",
        "Bias against noise",
        "Noise averages out along a response, a bias adds up. Noise of a normalised distribution "
        "has a small negative mean, and exp(delta) the mean 1: a bias moves both to one side.",
        warnings=found,
        sentences=said,
        tables=[Table.of(DRIFTING, result.places), Table.of(DRIFTING, result.steps)],
        short=found[0] if found else said[0].rstrip("."),
        first=bool(found),
    )
