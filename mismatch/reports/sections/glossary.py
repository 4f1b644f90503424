"""The words of a report; docs/reading-a-report.md has the same list."""

from __future__ import annotations

from mismatch.reports.formatting import text
from mismatch.reports.section import Column, Section, Table
from mismatch.types import Report

WORDS = (
    (
        "delta",
        "log-probability of a sampled token, trainer minus engine, in nats",
    ),
    ("ratio", "exp(delta): probability in training over probability in the rollout"),
    (
        "k1, k3",
        "means of −delta and of exp(delta) − 1 − delta: estimates of KL(rollout‖train)",
    ),
    (
        "clip fraction",
        "share of tokens of a ratio outside 0.8 to 1.2: PPO clips them",
    ),
    ("ESS", "effective sample size: the share of samples that importance weights leave in force"),
    ("TIS, MIS, IcePop", "weights that are capped, masked above a cap, masked outside a band"),
    (
        "flip",
        "in some layer the trainer's router picks other experts than the engine's did",
    ),
    ("near-tie", "a choice of experts whose margin lies within the router's own noise"),
    (
        "excess",
        "a side's distance from float32, over that of a plain forward in its dtype",
    ),
    ("heavy-tailed", "a few tokens carry the number, so its interval may be too narrow"),
    ("inconclusive", "the interval spans a bound: more prompts are needed"),
    (
        "healthy, tolerable, unfit",
        "within the first bound, between both, beyond the second",
    ),
    ("broken", "a check failed: the two sides do not compute the same thing"),
)


def of_report(report: Report) -> Section:
    """The same for every report."""
    table = Table((Column("word", text), Column("meaning", text)), WORDS)
    return Section("glossary", "Glossary", tables=(table,), page_only=True)
