"""Read a recorded run's columns: what the weights changed, which labels are false, what drifts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mismatch.analysis.cause_results import Cause, Evidence
from mismatch.analysis.diagnosis.twins import STEP
from mismatch.analysis.drift import Drift, drift_of
from mismatch.analysis.row_scores import FEW, far_group, surprises
from mismatch.analysis.weight_versions import (
    LEAST_ROWS,
    LEAST_TOKENS,
    OLD,
    VERSION,
    Split,
    false_labels,
    lags_of,
    split_by_lag,
    split_by_old,
)
from mismatch.keys import TRAIN
from mismatch.reports.formatting import number, percent, plural
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Check, Pair, Scoring

DOCUMENT = "recorded.json"  # of the run, by the command that read a dump
UNSEEN = -1  # lag that no row claims
NAMED = 12  # rows of a false label that are named
UNDECIDED = (
    "two columns cannot separate staleness and mismatch: if the weights moved between sampling and "
    "the trainer's pass, delta holds both; if not, it is mismatch alone. To decide, write "
    "weight_version and step, or old_logprobs (the trainer's pass with the weights that sampled); "
    "or score the rows again with the checkpoint that sampled: mismatch read-rollouts DUMP "
    "--model CHECKPOINT"
)
PROXIMAL = (
    "old - rollout grows with the lag, so the old pass had newer weights than the sampler: its "
    "part holds staleness too, which the lags tell"
)


@dataclass(frozen=True)
class LabelledRows:
    """Rows whose distance does not fit their label."""

    claimed: str
    """Weight version that they claim."""
    fits: str
    """Version whose rows are so far apart; "": an older one than any row claims."""
    rows: tuple[str, ...]
    """The first of them, by their number in the file, from 0."""
    count: int

    def sentence(self) -> str:
        """Name the rows and both versions."""
        more = f" and {self.count - len(self.rows)} more" if self.count > len(self.rows) else ""
        fits = f"rows of version {self.fits}" if self.fits else "rows of older weights would be"
        rows = "row" if self.count == 1 else "rows"
        return (
            f"{rows} {', '.join(self.rows)}{more} claim weight version {self.claimed} and are as "
            f"far apart as {fits}"
        )


@dataclass(frozen=True)
class StalenessReport:
    """What a report says of staleness."""

    splits: tuple[Split, ...] = ()
    """Empty: the columns cannot tell."""
    labels: tuple[LabelledRows, ...] = ()
    checked: int = 0
    """Rows whose labels were compared with their distances."""
    proximal: bool = False
    """The third column was computed with newer weights than those that sampled."""

    def sentences(self) -> list[str]:
        """Say what each column holds."""
        said = [each.sentence() for each in self.labels]
        if not self.splits:
            return [*said, UNDECIDED]
        ways = {"lag": "by weight versions", "old": "by the trainer's earlier pass"}
        for each in self.splits:
            said.append(
                f"{ways[each.by]}: mismatch {number(each.mismatch.value)} nats (root mean square), "
                f"staleness {number(each.staleness.value)} nats: what the weights changed is "
                f"{percent(max(0.0, each.share.value), 0)} of the mean square"
            )
        return said + [PROXIMAL] * self.proximal


def _sides(run_dir: Path, spec: CheckSpec) -> tuple[Scoring, Pair] | None:
    """Return the sampler's scoring and the pair of a recorded run; None of other runs."""
    names = set(store.scoring_names(run_dir))
    if spec.rollout.engine.engine != "recorded" or not {TRAIN, "recorded:decode"} <= names:
        return None
    rollout, decode = store.load_rollout(run_dir), store.load_scoring(run_dir, "recorded:decode")
    return decode, Pair.of(rollout, decode, store.load_scoring(run_dir, TRAIN))


def staleness_of(run_dir: Path, spec: CheckSpec) -> StalenessReport | None:
    """Return what the columns of a recorded run say of staleness; None of other runs."""
    if (sides := _sides(run_dir, spec)) is None:
        return None
    decode, pair = sides
    known = store.load_document(run_dir, DOCUMENT)["attributes"]
    return staleness(pair, decode, known.get("row") or [])


def staleness(pair: Pair, decode: Scoring, names: list[str]) -> StalenessReport:
    """Return splits of delta and false labels.

    Args:
        decode: its ``extra`` holds step, version and old, per token, where the dump has them.
        names: of the rows, in the file.
    """
    version, old = decode.extra.get(VERSION), decode.extra.get(OLD)
    prompt, splits, proximal = pair.prompt[pair.sequence], list[Split](), False
    engine = None if old is None else old - pair.rollout
    if engine is not None and np.any(engine) and np.any(engine != pair.delta):
        splits.append(split_by_old(pair.delta, engine, prompt))
    if version is None:
        return StalenessReport(tuple(splits))
    lag = lags_of(version, decode.extra.get(STEP))
    if splits and engine is not None:
        by_engine = split_by_lag(engine, pair.rollout, lag, prompt)
        proximal = by_engine is not None and by_engine.stale
    by_lag = split_by_lag(pair.delta, pair.rollout, lag, prompt)
    splits += [by_lag] if by_lag is not None else []
    rows = len(pair.prompt)
    tokens = np.bincount(pair.sequence, minlength=rows)
    first = np.searchsorted(pair.sequence, np.arange(rows))
    held = np.flatnonzero(tokens >= LEAST_TOKENS)
    one = np.array([np.ptp(lag[first[row] : first[row] + tokens[row]]) == 0 for row in held], bool)
    held = held[one] if len(held) else held  # rows that one version sampled
    score = np.bincount(pair.sequence, surprises(pair), rows)[held] / tokens[held]
    score, of_row = np.log(np.maximum(score, 1e-6)), lag[first[held]]
    found = [
        (each.claimed, each.fits, each.rows) for each in false_labels(score, tokens[held], of_row)
    ]
    kinds, count = np.unique(of_row[of_row >= 0], return_counts=True)
    if len(kinds) == 1 and count[0] >= LEAST_ROWS:  # nothing older to compare with
        far = far_group(score)
        if far is not None and FEW <= far.sum() < len(far) / 2:
            found = [(int(kinds[0]), UNSEEN, tuple(np.flatnonzero(far).tolist()))]
    labels = [
        LabelledRows(
            f"{version[first[held[members[0]]]]:.0f}",
            "" if fits == UNSEEN else f"{version[first[held[members[0]]]] + claimed - fits:.0f}",
            tuple(names[held[at]] if names else str(held[at]) for at in members[:NAMED]),
            len(members),
        )
        for claimed, fits, rows_of in found
        for members in _by_version(rows_of, version[first[held]])
    ]
    return StalenessReport(tuple(splits), tuple(labels), int((of_row >= 0).sum()), proximal)


def _by_version(rows: tuple[int, ...], version: np.ndarray) -> list[list[int]]:
    """Return rows by the version that they claim."""
    return [[at for at in rows if version[at] == each] for each in np.unique(version[list(rows)])]


def staleness_checks(result: StalenessReport) -> tuple[Check, ...]:
    """Return whether labels fit what the rows show."""
    if result.labels:
        said = "; ".join(each.sentence() for each in result.labels)
        fix = (
            "read the version from the weights that an engine holds, not from a counter: mismatch "
        )
        fix += "sync-probe; a restarted engine has to get the newest weights before it serves"
        return (Check("version-labels", "warning", said, fix),)
    if result.checked >= LEAST_ROWS:
        rows = plural(result.checked, "row")
        return (Check("version-labels", "passed", f"{rows} are as far apart as their labels say"),)
    return ()


def told(result: StalenessReport) -> tuple[Cause, ...]:
    """Return the cause that false labels show."""
    if not result.labels:
        return ()
    rows = Evidence("rows that do not fit their label", sum(each.count for each in result.labels))
    return (Cause("stale-weights", "suspected", "engine", None, (rows,), ("prefix-cache-stale",)),)


def drift_of_run(run_dir: Path, spec: CheckSpec) -> Drift | None:
    """Return what of delta drifts in a recorded run; None of other runs."""
    if (sides := _sides(run_dir, spec)) is None:
        return None
    decode, pair = sides
    return drift_of(pair.delta, pair.sequence, pair.prompt, decode.extra.get(STEP))


def drift_sentences(result: Drift) -> list[str]:
    """Say what is signed, from what length on it matters, and how the log-ratio grows."""
    said = []
    if result.biased:
        held = [each for each in result.steps if each.mean.value * result.bias > 0]
        steps = (
            f", of this sign in {len(held)} of {len(result.steps)} steps" if result.steps else ""
        )
        said.append(
            f"delta has a bias of {number(result.bias, sign=True)} nats per token that independent "
            f"noise does not make{steps}: from {result.crossing:,.0f} tokens on it moves a "
            "sequence's log-ratio by more than the noise does"
        )
    if result.exponent is not None and result.steep:
        said.append(
            f"the log-ratio grows with length to the power {number(result.exponent.value, 2)} up "
            f"to {result.length} tokens (independent tokens: 0.5, a persistent bias: 1)"
        )
    return said


def drift_checks(result: Drift) -> tuple[Check, ...]:
    """Return whether delta adds up along a response."""
    if said := drift_sentences(result):
        fix = "a bias adds up where noise averages out: compare temperature, truncation and "
        fix += "normalisation of both sides first, then weights; longer responses are hit harder"
        return (Check("drift", "warning", "; ".join(said), fix),)
    mean = number(result.mean.value, sign=True)
    return (Check("drift", "passed", f"the signed mean, {mean} nats per token, is that of noise"),)
