"""Metrics that frameworks log at each step, for a run without a dump: curves and findings."""

from mismatch.plugins import Feature

FEATURE = Feature("logs", files="mismatch.features.logs.command:postmortem")
