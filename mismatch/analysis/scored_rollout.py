"""One rollout with what engine and trainer say of it: the pair that most comparisons are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch.analysis.comparison import (
    inputs,
    is_routing,
    is_sampling_law,
    paired_routing,
    routing_estimates,
)
from mismatch.analysis.diagnosis.pass_checks import enough_data
from mismatch.analysis.diagnosis.routes import routing_checks
from mismatch.analysis.diagnosis.semantics import input_checks, semantic_checks
from mismatch.analysis.levels import column_for, judge, verdict
from mismatch.analysis.thresholds import Thresholds
from mismatch.attempts import Attempts
from mismatch.errors import MismatchError
from mismatch.keys import Key
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.run import store
from mismatch.types import Check, Comparison, Pair, Rollout, Scoring, Verdict


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One rollout with what engine and trainer say of it."""

    rollout: Rollout
    decode: Scoring
    train: Scoring

    @classmethod
    def load(cls, directory: Path, engine: str, name: str) -> ScoredRollout:
        """Read them; MismatchError where one is missing, damaged, or not finite."""
        rollout = store.load_rollout(directory)
        sides = cls(
            rollout,
            store.load_scoring(directory, Key.of(engine, "decode")),
            store.load_scoring(directory, name),
        )
        Pair.of(rollout, sides.decode, sides.train)
        return sides

    @property
    def pair(self) -> Pair:
        return Pair.of(self.rollout, self.decode, self.train)

    def comparison(self, names: list[str], seed: int) -> Comparison:
        """Return some metrics, and what the routers disagree in unless their choice is replayed."""
        pair = self.pair
        estimator = Estimator(pair.sequence, pair.prompt, seed=seed)
        token = [METRICS[name] for name in names if not is_routing(METRICS[name])]
        replayed = self.train.fingerprint.get("replay")
        routes = None if replayed else paired_routing(self.rollout, self.decode, self.train)
        law = is_sampling_law(self.rollout, self.decode)
        return Comparison(
            self.decode.name,
            self.train.name,
            law,
            estimator.all(token, inputs(pair, self.decode, self.train)),
            routing_estimates(
                self.rollout, self.decode, self.train, routes, estimator, seed=seed,
                headline_only=True,
            ),
        )  # fmt: skip

    def verdict(
        self,
        comparison: Comparison,
        thresholds: Thresholds | None,
        more: Sequence[Check] | None = None,
        unmeasured: str = "",
    ) -> Verdict | None:
        """As a separate check would end; None where no level applies or a check raised.

        Args:
            more: checks of all passes and of the amount of data, which replace others of their id;
                None: of the amount alone.
            unmeasured: why there is no square; "": there is one, or it is judged elsewhere.
        """
        attempts = Attempts()
        checks = input_checks(self.rollout, self.decode, self.train)
        ratio = comparison.metrics["ratio_mean"]
        checks += semantic_checks(self.rollout, self.decode, self.train, ratio, attempts)
        checks += routing_checks(self.rollout, self.decode, self.train)
        more = [enough_data(self.rollout)] if more is None else more
        checks = [*(each for each in checks if each.id not in {new.id for new in more}), *more]
        if attempts.failed:
            return None
        try:
            column = column_for(self.decode.fingerprint, self.train.fingerprint)
            open_question = "" if column == "fp32" else unmeasured
            return verdict(judge(comparison, column, thresholds), checks, column, open_question)
        except MismatchError:
            return None
