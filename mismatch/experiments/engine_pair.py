"""Two engines and the trainer: who stands apart, from what all three left in a run directory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mismatch.analysis.comparison import compare, is_sampling_law
from mismatch.analysis.diagnosis.declared import failed
from mismatch.analysis.diagnosis.pass_checks import not_finite
from mismatch.analysis.levels import default_thresholds, worse
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.experiments.fixes.base import SHOWN
from mismatch.metrics import METRICS
from mismatch.metrics.difference import paired
from mismatch.run import store
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec
from mismatch.types import (
    PREFILL,
    Answer,
    Estimate,
    Floats,
    NotTested,
    Pair,
    Report,
    Rollout,
    Scoring,
    SidePair,
    Verdict,
)

if TYPE_CHECKING:
    from mismatch.analysis.levels import Thresholds


DIRECTORY = "engines"


def other_spec(spec: CheckSpec) -> CheckSpec:
    """The second engine's own check: the same prompts and law, one pass of the trainer."""
    assert spec.other_engine is not None
    rollout = replace(spec.rollout, engine=spec.other_engine, exact_kl=0)
    return replace(
        spec,
        rollout=rollout,
        other_engine=None,
        noise_floor=False,
        two_passes=None,
        weights_effect=None,
        inject=(),
        gradients=False,
        fixes=(),
        budget_minutes=None,
        verdict="as-is",
    )


def other_folder(spec: CheckSpec) -> str:
    """Where the second engine's tokens lie inside the run directory."""
    assert spec.other_engine is not None
    return f"{DIRECTORY}/{spec.other_engine.engine}"


TRAINER = "trainer"
Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Edge:
    """Two of the three parties on the same tokens; ``delta`` is right minus left.

    Attributes:
        parties: left and right: an engine's name, or ``TRAINER``.
        tokens: the engine that sampled these tokens.
        kind: "prefill": both sides scored given tokens, so that the three edges are alike;
            "decode": the left side is what the engine said while it sampled.
        comparison: few metrics; None where it was not measured.
        reason: why not.
    """

    parties: tuple[str, str]
    tokens: str
    kind: Kind
    comparison: SidePair | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One of the two engines.

    Attributes:
        place: of its own tokens inside the run directory; "" for the run's own.
        verdict: its decode against the trainer, as a check of its own would end; None where no
            level applies.
    """

    engine: str
    version: str
    place: str
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """Mean |delta| of one edge at a party minus that of the edge it has no part in, same tokens.

    Attributes:
        party: at whose corner the edge is; ``edge`` is its other end.
        tokens: the engine that sampled them.
    """

    party: str
    edge: str
    tokens: str
    difference: Estimate


@dataclass(frozen=True, slots=True)
class Triangle:
    """Two engines and the trainer.

    Attributes:
        odd: the party that stands apart: on every set of tokens both its edges are longer than the
            third, by more than chance and more than ``WORTH``; None where none does, or where it
            could not be told.
        factor: how much longer its shorter edge is than the third, at least, over the token sets.
        reason: one sentence: what was decided and on what.
        not_tested: one sentence each.
    """

    sides: tuple[EngineRow, EngineRow]
    edges: tuple[Edge, ...]
    contrasts: tuple[Contrast, ...]
    odd: str | None
    factor: float | None
    reason: str
    not_tested: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.odd is not None and self.factor is None:  # the third edge is 0: null in a document
            object.__setattr__(self, "factor", math.inf)

    @property
    def parties(self) -> tuple[str, str, str]:
        return self.sides[0].engine, self.sides[1].engine, TRAINER

    def edge(self, party: str, other: str, tokens: str, kind: Kind) -> Edge | None:
        """The edge between two parties on one set of tokens, whichever stands left."""
        return next(
            (
                edge
                for edge in self.edges
                if set(edge.parties) == {party, other}
                and (edge.tokens, edge.kind) == (tokens, kind)
            ),
            None,
        )


MEASURE = "logprob_abs_diff_mean"  # the same from either end, unlike k3
WORTH = 0.1  # a party is odd only where its edges are longer by at least that share
# Nats; what levels.toml calls healthy for mean |delta| in float32: nearer is rounding.
FLOOR = 1e-5
FLOOR_TEXT = f"{FLOOR:.0e}".replace("e-0", "e-")


def contrasts(
    rollout: Rollout, logprobs: Mapping[str, Floats], tokens: str, seed: int = 0
) -> list[Contrast]:
    """Both edges of every party against the third edge, on one set of tokens.

    Args:
        logprobs: party -> [A]; three parties.
    """
    sequence = rollout.sequence_of_token[rollout.actions]
    sizes = {
        frozenset(pair): logprobs[pair[1]] - logprobs[pair[0]] for pair in combinations(logprobs, 2)
    }
    measured = []
    for party in logprobs:
        others = [name for name in logprobs if name != party]
        opposite = sizes[frozenset(others)]
        for other in others:
            estimate = paired(
                METRICS[MEASURE],
                {"delta": opposite},
                {"delta": sizes[frozenset((party, other))]},
                sequence=sequence,
                prompt=rollout.prompt_index,
                seed=seed,
            )
            measured.append(Contrast(party, other, tokens, estimate))
    return measured


def lengths(logprobs: Mapping[str, Floats]) -> dict[frozenset[str], float]:
    """Mean |delta| of every edge."""
    return {
        frozenset(pair): float(np.abs(logprobs[pair[1]] - logprobs[pair[0]]).mean())
        for pair in combinations(logprobs, 2)
    }


def outlier(
    measured: Sequence[Contrast], edges: Mapping[str, Mapping[frozenset[str], float]]
) -> tuple[str | None, float | None]:
    """The party that stands apart on every set of tokens, and by what factor at least.

    Args:
        edges: tokens -> lengths of their three edges.
    """
    if all_agree(edges):
        return None, None
    parties = list(dict.fromkeys(c.party for c in measured))
    for party in parties:
        own = [c for c in measured if c.party == party]
        apart = all(c.difference.low is not None and c.difference.low > 0 for c in own)
        factor = min(
            _factor(party, by_pair) for by_pair in edges.values()
        )  # of its shorter edge, on the tokens where that is shortest
        if apart and factor >= 1.0 + WORTH:
            return party, factor
    return None, None


def all_agree(edges: Mapping[str, Mapping[frozenset[str], float]]) -> bool:
    """Whether every edge on every set of tokens is too short to matter."""
    return bool(edges) and all(
        length < FLOOR for by_pair in edges.values() for length in by_pair.values()
    )


def _factor(party: str, by_pair: Mapping[frozenset[str], float]) -> float:
    own = [length for pair, length in by_pair.items() if party in pair]
    third = next(length for pair, length in by_pair.items() if party not in pair)
    return min(own) / third if third > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Corner:
    """One set of tokens with everything that was said of them.

    Attributes:
        sampler, other: names of the engines.
        prefill: engine -> its scoring of these tokens by prefill, or None.
        reasons: engine -> why it has none.
    """

    folder: str
    sampler: str
    other: str
    sides: ScoredRollout
    prefill: dict[str, Scoring | None]
    reasons: dict[str, str]

    @property
    def complete(self) -> dict[str, Floats] | None:
        """Party -> logprobs of these tokens, all scored as given; None where one is missing."""
        first, second = (self.prefill[name] for name in (self.sampler, self.other))
        if first is None or second is None:
            return None
        return {
            self.sampler: first.logprobs,
            self.other: second.logprobs,
            TRAINER: self.sides.train.logprobs,
        }


def with_engines(
    report: Report, run_dir: Path, spec: CheckSpec, thresholds: Thresholds | None = None
) -> Report:
    """The report with its triangle; the verdict is that of the worse engine.

    A value that is not finite in any of their scorings leaves no triangle: the run is broken.
    """
    if refused := _not_finite(run_dir, spec):
        return _broken(report, "; ".join(f"{name}: {text}" for name, text in refused.items()))
    result = triangle(run_dir, spec, thresholds)
    first, second = result.sides
    result = replace(result, sides=(replace(first, verdict=report.verdict), second))
    name = f"{second.engine}:decode"
    facts = store.scoring_header(run_dir / second.place, name)["fingerprint"]
    missing = [NotTested("two engines", reason) for reason in result.not_tested]
    reasons = {edge.reason for edge in result.edges}
    missing += [entry for entry in NotTested.of(facts) if entry.reason not in reasons]
    return replace(
        report,
        verdict=worse(report.verdict, second.verdict, second.engine),
        analyses=report.analyses | {"engines": result},
        fingerprints=report.fingerprints | {name: facts},
        not_tested=(*report.not_tested, *missing),
    )


def _not_finite(run_dir: Path, spec: CheckSpec) -> dict[str, str]:
    """Scorings of both engines' tokens with a value that is not finite, and what it is."""
    assert spec.other_engine is not None
    names = [spec.rollout.engine.engine, spec.other_engine.engine]
    wanted = {TRAIN, *(f"{name}:{mode}" for name in names for mode in ("decode", "prefill"))}
    held = [
        (folder, name)
        for folder in ("", other_folder(spec))
        for name in store.scoring_names(run_dir / folder)
        if name in wanted
    ]
    problems = {
        f"{folder}/{name}".lstrip("/"): not_finite(store.load_scoring(run_dir / folder, name))
        for folder, name in held
    }
    return {name: text for name, text in problems.items() if text}


def _broken(report: Report, detail: str) -> Report:
    """The report of a run whose engines cannot be compared, because a value is not finite."""
    check = failed("engines-finite", detail, "a NaN is often overflow: look at that engine's log")
    answer = Answer("broken", f"check {check.id} failed: {detail}")
    verdict = report.verdict
    if verdict.status != "broken":
        verdict = replace(verdict, status="broken", reason=answer.reason, correctness=answer)
    entry = NotTested("two engines", detail)
    return replace(
        report,
        verdict=verdict,
        checks=(*report.checks, check),
        not_tested=(*report.not_tested, entry),
    )


def triangle(run_dir: Path, spec: CheckSpec, thresholds: Thresholds | None = None) -> Triangle:
    """Compare all three parties on both sets of tokens.

    Raises:
        MismatchError: artefacts missing, damaged, or of other tokens.
    """
    corners = list(_corners(run_dir, spec))
    edges = [edge for corner in corners for edge in _edges(corner, spec.seed)]
    measured: list[Contrast] = []
    sizes = {}
    for corner in corners:
        logprobs = corner.complete
        if logprobs is not None:
            measured += contrasts(corner.sides.rollout, logprobs, corner.sampler, spec.seed)
            sizes[corner.sampler] = lengths(logprobs)
    odd, factor = outlier(measured, sizes) if measured else (None, None)
    rows = [_row(corner, spec.seed, thresholds) for corner in corners]
    return Triangle(
        sides=(rows[0], rows[1]),
        edges=tuple(edges),
        contrasts=tuple(measured),
        odd=odd,
        factor=factor,
        reason=reason_of(
            odd, factor, list(sizes), [corner.sampler for corner in corners], agree=all_agree(sizes)
        ),
        not_tested=tuple(_missing(edges)),
    )


def _missing(edges: list[Edge]) -> Iterator[str]:
    """One sentence for each reason, with the edges that it keeps from being measured."""
    by_reason: dict[str, list[str]] = {}
    for edge in edges:
        if edge.comparison is None:
            name = f"{edge.parties[0]} against {edge.parties[1]} on {edge.tokens}'s tokens"
            by_reason.setdefault(edge.reason, []).append(f"{name} ({edge.kind})")
    for reason, names in by_reason.items():
        yield f"{', '.join(names)}: {reason}"


def reason_of(
    odd: str | None, factor: float | None, decided: list[str], asked: list[str], *, agree: bool
) -> str:
    """What was decided, in one sentence.

    Args:
        decided, asked: sets of tokens, by who sampled them: with all three scorings, and all.
        agree: every edge is shorter than ``FLOOR``.
    """
    if not decided:
        return "not tested: no set of tokens was rescored by both engines"
    on = "on both sets of tokens" if len(decided) == len(asked) else f"on {decided[0]}'s tokens"
    if agree:
        return f"all three agree: {on}, mean |delta| of every edge is below {FLOOR_TEXT} nats"
    if odd is None or factor is None:
        apart = "no party is clearly farther from both others than these are from each other"
        return f"none stands out: {on}, {apart}"
    name = "the trainer" if odd == TRAINER else odd
    times = f"at least {factor:.2g} times " if factor < 1000 else "over 1000 times "
    return f"{name} is the odd one out: {on}, {times}as far from both others as they are apart"


def _corners(run_dir: Path, spec: CheckSpec) -> Iterator[Corner]:
    assert spec.other_engine is not None
    first, second = spec.rollout.engine.engine, spec.other_engine.engine
    at = other_folder(spec)
    homes = {first: run_dir, second: run_dir / at}
    unable = {name: _unable(home, name) for name, home in homes.items()}
    for sampler, other in ((first, second), (second, first)):
        home = homes[sampler]
        sides = ScoredRollout.load(home, sampler, TRAIN)
        prefill = {
            name: None if unable[name] else store.load_scoring(home, f"{name}:prefill")
            for name in homes
        }
        for scoring in prefill.values():
            if scoring is not None:
                Pair.of(sides.rollout, sides.decode, scoring)
        yield Corner("" if sampler == first else at, sampler, other, sides, prefill, unable)


def _unable(home: Path, engine: str) -> str:
    """Why an engine has rescored nothing, as it said itself; "" where it could."""
    facts = store.scoring_header(home, f"{engine}:decode")["fingerprint"]
    if facts.get("prefill") is not False:
        return ""
    reasons = [entry.reason for entry in NotTested.of(facts) if entry.what == PREFILL]
    return reasons[0] if reasons else f"{engine} cannot score given tokens at this temperature"


def _edges(corner: Corner, seed: int) -> Iterator[Edge]:
    """What the sampler said against both others, then the three alike."""
    sides, sampler, other = corner.sides, corner.sampler, corner.other
    own, foreign = corner.prefill[sampler], corner.prefill[other]
    wanted: list[tuple[tuple[str, str], Kind, Scoring | None, Scoring | None]] = [
        ((sampler, other), "decode", sides.decode, foreign),
        ((sampler, TRAINER), "decode", sides.decode, sides.train),
        ((sampler, other), "prefill", own, foreign),
        ((sampler, TRAINER), "prefill", own, sides.train),
        ((other, TRAINER), "prefill", foreign, sides.train),
    ]
    for parties, kind, left, right in wanted:
        if left is None or right is None:
            silent = sampler if left is None and parties[0] == sampler else other
            yield Edge(parties, sampler, kind, None, corner.reasons[silent])
            continue
        law = is_sampling_law(sides.rollout, left)
        comparison = compare(
            sides.rollout, left, right, sampled_by_left=law, seed=seed, headline_only=True
        )
        yield Edge(parties, sampler, kind, SidePair.of(comparison))


def _row(corner: Corner, seed: int, thresholds: Thresholds | None) -> EngineRow:
    facts = corner.sides.decode.fingerprint
    judged_by = default_thresholds() if thresholds is None else thresholds
    names = list(dict.fromkeys([*SHOWN, *judged_by, "ratio_mean"]))
    comparison = corner.sides.comparison(names, seed)
    return EngineRow(
        engine=corner.sampler,
        version=str(facts.get("version", "")),
        place=corner.folder,
        verdict=corner.sides.verdict(comparison, thresholds),
    )
