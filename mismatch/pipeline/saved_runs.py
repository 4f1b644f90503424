"""Read saved runs from their report.json and tokens.parquet alone.

A stored verdict is a claim: :func:`load_report` refuses what the numbers in it contradict, and what
reads it says :data:`UNVERIFIED`. Only ``mismatch compare RUN`` judges the scorings themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.explained import lead_of, led
from mismatch.analysis.levels import NO_COLUMN, column_for, judge, verdict
from mismatch.analysis.plugins import analyses
from mismatch.analysis.thresholds import Level, Thresholds
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.pipeline.document import COMPARISON, comparisons_from_json, report_from_json
from mismatch.run import store
from mismatch.run.manifest import damage_named
from mismatch.types import Comparison, Estimate, Report, SideFacts, Verdict

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.metrics.difference import Sample

REPORT = "report.json"
PLACES = ("engine", "trainer", "machine")
# Of a fingerprint: measured in every run, compared elsewhere, or a place on one machine.
NOT_SETTINGS = {
    "weights", "weights_parameters", "unmapped_weights", "seconds", "peak_bytes", "model",
    "not_tested",
}  # fmt: skip
LONGEST = 120  # characters of a value
ABSENT = "–"
UNVERIFIED = "unverified: read from report.json, not judged again; mismatch compare RUN does that"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One run, without its rollout and scorings.

    Attributes:
        tokens: its tokens table; None where it is not there.
    """

    path: Path
    report: Report
    tokens: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model(self) -> str:
        """The hub id, or the last part of a local path."""
        path = PurePath(self.report.model)
        return path.name if path.is_absolute() and path.name else self.report.model

    @property
    def created(self) -> str:
        """ISO time, or ""."""
        return str(self.report.run.get("created") or "")

    @property
    def engine(self) -> str:
        """Engine and version, "" where the report does not say."""
        facts = self.sides[0]
        return f"{facts.get('engine') or ''} {facts.get('version') or ''}".strip()

    @property
    def comparison(self) -> Comparison | None:
        """The headline; None where nothing could be compared."""
        return self.report.comparisons[0] if self.report.comparisons else None

    @property
    def values(self) -> dict[str, Estimate]:
        """metric -> estimate of the headline; no routing where the trainer replays the engine's."""
        first = self.comparison
        if first is None:
            return {}
        return first.metrics | ({} if self.sides[1].get("replay") else first.routing)

    @property
    def sides(self) -> tuple[SideFacts, SideFacts]:
        """What engine and trainer say of themselves."""
        first, prints = self.comparison, self.report.fingerprints
        if first is None:
            return {}, {}
        return prints.get(first.rollout, {}), prints.get(first.train, {})

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """What engine, trainer and machine say of themselves."""
        run = self.report.run
        own = (run.get("versions") or {}).get("train-infer-mismatch")
        machine = {key: run[key] for key in ("platform", "environment") if run.get(key)}
        machine |= {"mismatch": own} if own else {}
        return {"engine": self.sides[0], "trainer": self.sides[1], "machine": machine}

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Temperature, cuts and lengths of the rollout."""
        spec = self.report.run.get("spec") or {}
        return (spec.get("rollout") or {}).get("sampling") or {}

    @property
    def weights(self) -> str:
        """Digest of the parameters that the trainer loaded; "" where it says none to compare."""
        facts = self.sides[1]
        return str(facts.get("weights") or "") if facts.get("weights_comparable", True) else ""

    @property
    def files(self) -> Mapping[str, str]:
        """Checksums of the files of the model itself: its configuration and weights."""
        return {
            name: digest
            for name, digest in (self.sides[1].get("source_files") or {}).items()
            if name == "config.json" or name.endswith((".safetensors", ".bin"))
        }


def load_report(run: Path) -> Report:
    """Return the report of a run as it was stored.

    Raises:
        MismatchError: no report; one that is damaged, of another version, or that the manifest does
            not list; or a verdict or numbers that the run itself contradicts.
    """
    path = run / REPORT
    report = report_from_json(store.load_document(run, REPORT))
    with damage_named(path):
        stored = verdict_as_is(report)
        own = judged_again(report)
    if _statuses(own) != _statuses(stored):
        raise MismatchError(
            f"{path} says {stored.status}, and its numbers and checks say {own.status}: it was "
            "edited, or judged by another version",
            f"judge the scorings again: mismatch compare {run}",
        )
    if (run / COMPARISON).exists():
        with damage_named(run / COMPARISON):
            held = comparisons_from_json(store.load_document(run, COMPARISON))[0]
            for analysis in analyses() if held else ():
                if (result := report.result(analysis.id)) is not None:
                    of_all = analysis.call("measured", result, held[0].metrics) or held[0].metrics
                    held[0] = replace(held[0], metrics=of_all)
        if to_json(held) != to_json(list(report.comparisons)):
            fault = f"{path} holds other numbers than {COMPARISON}"
            raise MismatchError(fault, f"judge the scorings again: mismatch compare {run}")
    return report


def called_unverified(report: Report) -> Report:
    """Return the report whose verdict says in every format that nobody judged it here."""
    said = f"{report.verdict.reason}; {UNVERIFIED}"
    return replace(report, verdict=replace(report.verdict, reason=said))


def verdict_as_is(report: Report) -> Verdict:
    """Return the stored verdict without fixes, also where the report carries that after them."""
    table = report.result("fixes")
    before: Verdict | None = None if table is None else table.verdict_as_is
    return report.verdict if before is None else before


def judged_again(report: Report, thresholds: Thresholds | None = None) -> Verdict:
    """Judge the numbers and checks of a report.

    Args:
        thresholds: None: the levels that it was judged by, in their column.
    """
    stored = verdict_as_is(report)
    column = None if stored.levels == NO_COLUMN else stored.levels
    if thresholds is not None and report.comparisons:
        first, prints = report.comparisons[0], report.fingerprints
        column = column_for(prints.get(first.rollout, {}), prints.get(first.train, {}))
    if thresholds is None:
        thresholds = {
            each.metric: {stored.levels: Level(each.healthy, each.unfit, each.source)}
            for each in stored.judgements
        }
    unmeasured = "the run has no usable float32 pass"
    # The report of two scorings, and one that could compare nothing, ask for no square.
    if (
        column == "fp32"
        or report.result("square") is not None
        or "runs" in report.run
        or not report.comparisons
    ):
        unmeasured = ""
    judgements = judge(report.comparisons[0], column, thresholds) if report.comparisons else ()
    for analysis in analyses():
        if (result := report.result(analysis.id)) is not None:
            judgements = analysis.call("judged", result, judgements) or judgements
    judged = verdict(judgements, report.checks, column, unmeasured)
    return led(judged, lead_of(report.result("causes"), report.checks), report.checks)


def _statuses(judged: Verdict) -> tuple[Any, ...]:
    answers = [each.status for each in (judged.correctness, judged.fitness) if each is not None]
    return judged.status, answers, [(each.metric, each.status) for each in judged.judgements]


def load_run(run: Path) -> SavedRun:
    """Return a run from its report, and its tokens where they are there.

    Raises:
        MismatchError: no report, or one that is damaged or of another version.
    """
    report = load_report(run)
    table = store.load_tokens(run) if (run / store.TOKENS).exists() else None
    if table is not None:
        finite = np.isfinite(table["rollout_logprob"]) & np.isfinite(table["train_logprob"])
        table = table[finite] if finite.any() else None
    return SavedRun(run, report, table)


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings and versions of one place: dotted name, value as text."""
    for key, value in facts.items():
        if not prefix and key in NOT_SETTINGS:
            continue
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# ---------------------------------------------------------------- tokens as metrics ask for them


def same_tokens(first: SavedRun, second: SavedRun) -> bool:
    """Return whether both hold the same tokens in the same places."""
    a, b = first.tokens, second.tokens
    if a is None or b is None or len(a) != len(b):
        return False
    return all(np.array_equal(a[name], b[name]) for name in ("sequence", "position", "token_id"))


def samples(left: SavedRun, right: SavedRun) -> tuple[Sample, Sample] | None:
    """Return the tokens of two runs, prompts numbered alike; None without the tokens of either.

    Prompts whose texts the tables do not hold are taken as different, unless all tokens are the
    same. How many layers of a token chose other experts is an array where both runs say it.
    """
    from mismatch.metrics.difference import Sample  # of several runs alone

    if left.tokens is None or right.tokens is None:
        return None
    alike = same_tokens(left, right)
    routed = all(map(_routed_layers, (left, right)))
    numbers: dict[Any, int] = {}
    found = []
    for side, run in enumerate((left, right)):
        table = run.tokens
        assert table is not None
        _, first, sequence = np.unique(table["sequence"], return_index=True, return_inverse=True)
        rows = table.iloc[first]
        texts = rows["context"] if "context" in table else [None] * len(rows)
        keys: list[Any] = [
            (0 if alike else side, prompt) if text is None or len(text) == 0 else tuple(text)
            for prompt, text in zip(rows["prompt"].tolist(), texts, strict=True)
        ]
        prompt = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        rollout, train = (
            table[name].to_numpy(np.float64) for name in ("rollout_logprob", "train_logprob")
        )
        arrays: dict[str, Any] = {
            "rollout": rollout, "train": train, "delta": train - rollout, "sequence": sequence,
        }  # fmt: skip
        if routed:  # which layers is not kept: as many places as the token has flips, [A, L]
            flips = table["routing_flips"].to_numpy(np.int64)
            arrays["differs"] = np.arange(_routed_layers(run)) < flips[:, None]
        found.append(Sample(arrays, sequence, prompt))
    return found[0], found[1]


def _routed_layers(run: SavedRun) -> int:
    """Count the MoE layers, 0 where the tokens do not say in how many their experts differ."""
    table, first = run.tokens, run.comparison
    if table is None or first is None or "routing_flips" not in table:
        return 0
    known = table["routing_flips"].notna().all()
    return len(first.breakdowns.get("routing_by_layer", {}).get("layer", ())) if known else 0
