"""Read saved runs from their report.json and tokens.parquet alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.metrics.difference import Sample
from mismatch.pipeline.document import report_from_json
from mismatch.run import store
from mismatch.types import Comparison, Estimate, Ints, Report

if TYPE_CHECKING:
    import pandas as pd


REPORT = "report.json"
NEEDED = ("sequence", "prompt", "position", "token_id", "rollout_logprob", "train_logprob")


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One run, without its rollout and scorings.

    Attributes:
        tokens: its tokens table; None where it was not read, is not there, or is too old to say
            which prompt a token belongs to.
    """

    path: Path
    report: Report
    tokens: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def created(self) -> str:
        """ISO time, or ""."""
        return str(self.report.run.get("created") or "")

    @property
    def engine(self) -> str:
        """Engine and version, "" where the report does not say."""
        facts = self.facts["engine"]
        return f"{facts.get('engine') or ''} {facts.get('version') or ''}".strip()

    @property
    def comparison(self) -> Comparison | None:
        """The headline; None where nothing could be compared."""
        return self.report.comparisons[0] if self.report.comparisons else None

    @property
    def values(self) -> dict[str, Estimate]:
        """metric -> estimate of the headline."""
        first = self.comparison
        return {} if first is None else first.metrics | first.routing

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """What engine, trainer and machine say of themselves."""
        first, prints = self.comparison, self.report.fingerprints
        run = self.report.run
        return {
            "engine": {} if first is None else prints.get(first.rollout, {}),
            "trainer": {} if first is None else prints.get(first.train, {}),
            "machine": {key: run[key] for key in ("platform", "environment") if run.get(key)},
        }

    @property
    def weights(self) -> str:
        """Digest of the parameters that the trainer loaded, "" where it gave none."""
        return str(self.facts["trainer"].get("weights") or "")


def load_run(run: Path, tokens: bool = True) -> SavedRun:
    """A run from its report, and its tokens where they are there.

    Raises:
        MismatchError: no report, or one that is damaged or of another version.
    """
    report = report_from_json(store.load_document(run, REPORT))
    table = store.load_tokens(run) if tokens and (run / store.TOKENS).exists() else None
    if table is not None and not set(NEEDED) <= set(table.columns):
        table = None
    if table is not None:
        finite = np.isfinite(table["rollout_logprob"]) & np.isfinite(table["train_logprob"])
        table = table[finite] if finite.any() else None
    return SavedRun(run, report, table)


# ---------------------------------------------------------------- tokens as metrics ask for them


def same_tokens(first: SavedRun, second: SavedRun) -> bool:
    """Both hold the same tokens in the same places."""
    a, b = first.tokens, second.tokens
    if a is None or b is None or len(a) != len(b):
        return False
    return all(np.array_equal(a[name], b[name]) for name in ("sequence", "position", "token_id"))


def samples(left: SavedRun, right: SavedRun) -> tuple[Sample, Sample] | None:
    """The tokens of two runs, prompts numbered alike; None without the tokens of either.

    Prompts whose texts the tables do not hold are taken as different.
    """
    a, b = left.tokens, right.tokens
    if a is None or b is None:
        return None
    if same_tokens(left, right):
        return _sample(a, _first_of_sequences(a, "prompt")), _sample(
            b, _first_of_sequences(a, "prompt")
        )
    numbers: dict[Any, int] = {}
    first, second = (
        np.array([numbers.setdefault(key, len(numbers)) for key in _prompts(table, side)])
        for side, table in enumerate((a, b))
    )
    return _sample(a, first), _sample(b, second)


def routed(run: SavedRun) -> bool:
    """Whether the tokens say in how many of the model's MoE layers their experts differ."""
    return (
        run.tokens is not None
        and "routing_flips" in run.tokens
        and bool(run.tokens["routing_flips"].notna().all())
        and _layers(run) > 0
    )


def flips(run: SavedRun) -> np.ndarray:
    """Which of L places differ, [A, L]: as many as the token has; which layers is not kept."""
    assert run.tokens is not None
    counts = run.tokens["routing_flips"].to_numpy(dtype=np.int64)
    return np.arange(_layers(run)) < counts[:, None]


def _layers(run: SavedRun) -> int:
    first = run.comparison
    return (
        0 if first is None else len(first.breakdowns.get("routing_by_layer", {}).get("layer", ()))
    )


def _sample(table: pd.DataFrame, prompt: Ints) -> Sample:
    _, sequence = np.unique(table["sequence"], return_inverse=True)
    rollout, train = (
        table[name].to_numpy(dtype=np.float64) for name in ("rollout_logprob", "train_logprob")
    )
    arrays = {"rollout": rollout, "train": train, "delta": train - rollout, "sequence": sequence}
    return Sample(arrays, sequence, prompt)


def _first_of_sequences(table: pd.DataFrame, column: str) -> Any:
    _, first = np.unique(table["sequence"], return_index=True)
    return table[column].iloc[first].to_numpy()


def _prompts(table: pd.DataFrame, side: int) -> list[Any]:
    """A key for the prompt of each sequence: its text, else a number that no other run has."""
    own = [(side, int(number)) for number in _first_of_sequences(table, "prompt")]
    if "context" not in table:
        return own
    texts = _first_of_sequences(table, "context")
    return [key if text is None or len(text) == 0 else tuple(text)
            for key, text in zip(own, texts, strict=True)]  # fmt: skip
