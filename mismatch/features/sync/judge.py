"""What happened to each parameter of a push, from what the engine held and what it should hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from mismatch.codec import to_json
from mismatch.errors import in_list
from mismatch.features.sync.report import (
    BACK,
    CacheRow,
    Outcome,
    Parameter,
    ScoreRow,
    Status,
    SyncReport,
)
from mismatch.models.digests import UNORDERED, Digest, combine
from mismatch.models.weight_states import Prints
from mismatch.types import Floats, Judged, NotTested

States = Mapping[str, Prints]
# From the least to the worst: what a parameter is said to be over all pushes.
SEVERITY: tuple[Status, ...] = (
    "not_compared", "arrived", "scaled", "partly", "altered", "rearranged", "twice", "stale",
    "alias_lost", "missing", "uninitialised",
)  # fmt: skip
ROUNDING = 0.25  # of the update's size: what rounding to 8 bits may leave
WHOLE = 0.1  # of a factor: how near to 0, 1 or 2 it has to be
RESCALED = 0.05  # of a parameter's size: what may be left apart from its factor
MAGNITUDE = 100.0  # times the parameter's size, or a part of it: no values of it
APART = 3.0  # times the distance of both sides before any push
APART_NATS = 0.02
NUMBERED = re.compile(r"^.*layers\.\d+\.|(?<=experts)\.\d+")
MODULE = re.compile(r"(?<=\.experts)\..*|\.(weight|bias)$")
WARM_NATS = 1e-3  # that a prompt's first logprob may differ between a warm and a cold cache


def outcome(push: int, expected: Sequence[Prints], held: Prints) -> Outcome:
    """Judge one parameter after a push.

    Args:
        expected: the parameter in the states up to this push; the last one is what should be held.
    """
    now, earlier = expected[-1], expected[:-1]
    if held.shape != now.shape:
        return Outcome(push, "rearranged", {"transposed": ("all",)})
    parts: dict[str, list[str]] = {}
    for label in now.cells:
        status, other = _part(label, now, earlier, held)
        parts.setdefault(status, []).append(f"{label} holds {other}" if other else label)
    arrived = parts.pop("arrived", [])
    if not parts:
        return Outcome(push, "arrived")
    named = {status: tuple(labels) for status, labels in parts.items()}
    whole = _whole(push, now, earlier, held)
    if not arrived and set(parts) != {"stale"} and whole is not None:
        return whole
    if not arrived and len(parts) == 1:
        (status,) = parts
        return Outcome(push, "rearranged" if status == "exchanged" else cast(Status, status))
    if not arrived and set(parts) <= {"exchanged", "rearranged"}:
        return Outcome(push, "rearranged", named)
    return Outcome(push, "partly", named)


def _part(label: str, now: Prints, earlier: Sequence[Prints], held: Prints) -> tuple[str, str]:
    """Status of one part, and the other part whose values it holds."""
    digest = held.cells[label]
    if _same(digest, now.cells[label]):
        return "arrived", ""
    if any(_same(digest, state.cells[label]) for state in earlier):
        return "stale", ""
    if not any(digest):
        return "uninitialised", ""
    other = next((name for name, cell in now.cells.items() if _same(digest, cell)), "")
    if other:
        return "exchanged", other
    if digest[:UNORDERED] == now.cells[label][:UNORDERED]:
        return "rearranged", ""
    return "altered", ""


def _same(ours: Digest, theirs: Digest) -> bool:
    return all(a == b for a, b in zip(ours, theirs, strict=False))


def _whole(push: int, now: Prints, earlier: Sequence[Prints], held: Prints) -> Outcome | None:
    """Return what all parts have in common, where no part arrived bit for bit."""
    if now.turned and now.turned == held.cells:
        return Outcome(push, "rearranged", {"transposed": ("all",)})
    target, before = np.asarray(now.values), np.asarray(earlier[-1].values if earlier else ())
    values = np.asarray(held.values, np.float64)
    if _foreign(values, target):
        return Outcome(push, "uninitialised")
    if combine(held.cells.values())[:UNORDERED] == combine(now.cells.values())[:UNORDERED]:
        return Outcome(push, "rearranged")
    if not len(before):
        return None
    factor, rest = _fit(values - before, target - before)
    if rest < ROUNDING:
        if abs(factor - 1) < WHOLE:
            return Outcome(push, "arrived", rounded=True)
        if abs(factor) < WHOLE:
            return Outcome(push, "stale")
        return Outcome(push, "twice" if abs(factor - 2) < 2 * WHOLE else "scaled", {}, factor)
    factor, rest = _fit(values, target)
    if rest < RESCALED:
        return Outcome(push, "scaled", {}, factor)
    return None


def _foreign(values: Floats, target: Floats) -> bool:
    """Whether these can be no values of the parameter."""
    if not np.isfinite(values).all():
        return True
    size, own = np.abs(values).max(initial=0), np.abs(target).max(initial=0)
    return bool(own > 0 and not own / MAGNITUDE < size < own * MAGNITUDE)


def _fit(values: Floats, direction: Floats) -> tuple[float, float]:
    """(factor, what is left relative to the direction) of ``values = factor x direction``."""
    square = float(direction @ direction)
    if not square:
        return 0.0, np.inf
    factor = float(values @ direction) / square
    return factor, float(np.linalg.norm(values - factor * direction)) / square**0.5


def parameter(
    name: str, expected: Sequence[Prints], held: Sequence[Prints | None], reason: str = ""
) -> Parameter:
    """Judge one parameter over all pushes.

    Args:
        expected: in state 0 (before any push) and after each push.
        held: the same, as the engine held it; None: it could not be read.
        reason: why that is, or why it cannot be compared.
    """
    before = held[0]
    if before is None or any(prints is None for prints in held):
        return Parameter(name, "not_compared", reason=reason or "the engine does not show it")
    start = outcome(0, expected[:1], before)
    if start.status != "arrived":
        how = "it differs from the checkpoint before any push; its layout is not understood"
        return Parameter(name, "not_compared", reason=reason or how)
    outcomes = tuple(
        outcome(push, expected[: push + 1], prints)
        for push, prints in enumerate(held)
        if push and prints is not None
    )
    return Parameter(name, _worst(outcomes), outcomes)


def _worst(outcomes: Sequence[Outcome]) -> Status:
    return max((o.status for o in outcomes), key=SEVERITY.index, default="not_compared")


def unread(reasons: Mapping[str, str]) -> list[NotTested]:
    """Return why parameters could not be read back, each reason once, with their number."""
    counts = Counter(reasons.values())
    return [NotTested(f"{n} parameters as held", reason) for reason, n in counts.items()]


def parameters(
    expected: Sequence[States],
    held: Sequence[States],
    reasons: Mapping[str, str],
    tied: Mapping[str, str],
) -> tuple[Parameter, ...]:
    """All parameters of the checkpoint, and tied parameters that the engine holds by themselves.

    Args:
        expected: per state, by checkpoint name.
        held: per state, by checkpoint name.
        reasons: name -> why it could not be read.
        tied: name of a tied parameter -> the one whose values it has.
    """
    results = []
    for name in dict.fromkeys([*expected[0], *(n for n in tied if n in held[0])]):
        source = tied.get(name, name)
        states = [state[source] for state in expected]
        prints = [state.get(name) for state in held]
        if source != name:  # sampled in other places, under another name
            states = [replace(state, values=()) for state in states]
            prints = [p and replace(p, values=()) for p in prints]
        results.append(parameter(name, states, prints, reasons.get(name, "")))
    # A tied parameter that is stale while its source arrived lost its tie.
    arrived = {result.name for result in results if result.arrived}
    return tuple(
        replace(result, status="alias_lost")
        if result.status == "stale" and tied.get(result.name) in arrived
        else result
        for result in results
    )


def of_adapters(compared: Sequence[Parameter], held: Sequence[States]) -> tuple[Parameter, ...]:
    """Return matrices of adapters, whose state 0 is none: zeros are missing, twice is a factor.

    Args:
        held: per state, as the engine had them.
    """
    results = []
    for result in compared:
        outcomes = []
        for row in result.outcomes:
            cells = held[row.push][result.name].cells.values()
            status = row.status
            if status != "arrived" and not any(any(cell) for cell in cells):
                status = "missing"
            outcomes.append(replace(row, status="scaled" if status == "twice" else status))
        worst = _worst(outcomes) if outcomes else result.status
        results.append(replace(result, status=worst, outcomes=tuple(outcomes)))
    return tuple(results)


# ---------------------------------------------------------------- logprobs, caches


def score_rows(engine: Sequence[Floats], trainer: Sequence[Floats] | None) -> tuple[ScoreRow, ...]:
    """Per state: how far both sides are apart, and how far each has moved.

    Args:
        engine, trainer: logprobs [tokens] of each state; the trainer knows states 0 to 2.
    """

    def mean(delta: Floats) -> float:
        return float(np.abs(delta).mean())

    rows = []
    for push, scores in enumerate(engine):
        apart = trainer_moved = None
        if trainer is not None:
            beside = trainer[0 if push == BACK else push]
            apart, trainer_moved = mean(scores - beside), mean(beside - trainer[0])
        moved = mean(scores - engine[0])
        rows.append(ScoreRow(push, len(scores), apart, trainer_moved, moved))
    return tuple(rows)


def parted(report: SyncReport) -> tuple[ScoreRow, ...]:
    """Return states in which the two sides are further apart than before any push."""
    rows = [row for row in report.scores if row.apart is not None]
    if not rows:
        return ()
    level = APART * (rows[0].apart or 0.0) + APART_NATS
    return tuple(row for row in rows[1:] if (row.apart or 0.0) > level)


def cache_row(push: int, warm: Sequence[float], cold: Sequence[float], noise: float) -> CacheRow:
    """Compare the same prompts answered warm and cold.

    Args:
        warm, cold: logprob of the likeliest first token, per prompt.
        noise: nats, the largest difference without any push.
    """
    apart = np.abs(np.asarray(warm) - np.asarray(cold))
    level = APART * noise + WARM_NATS
    return CacheRow(push, len(apart), int((apart > level).sum()), float(apart.max(initial=0)))


def kept_caches(report: SyncReport) -> tuple[CacheRow, ...]:
    """Pushes after which prompts were answered out of the old weights' cache."""
    return tuple(row for row in report.caches if row.push and row.differ)


def judge(report: SyncReport) -> Judged:
    """Broken by any fault; inconclusive where something could not be compared."""
    reasons = [
        f"{len(group)} {WORDS[status]}: {_kinds(group)}"
        for status in reversed(SEVERITY[2:])
        if (group := report.of_status(status))
    ]
    reasons += [f"push {push} failed: {why}" for push, why in report.push_failed.items()]
    if rows := kept_caches(report):
        reasons.append(
            f"the prefix cache outlives the push: {rows[0].differ} of {rows[0].prompts} prompts"
        )
    if not reasons and (scores := parted(report)):
        row, first = scores[0], report.scores[0]
        reasons.append(
            f"after push {row.push} engine and trainer are {row.apart:.3g} nats apart, "
            f"{first.apart:.3g} before, though every compared parameter arrived"
        )
    if reasons:
        return Judged("broken", "; ".join(reasons[:3]), 1)
    missed = report.of_status("not_compared")
    compared = len(report.parameters) - len(missed)
    if missed or not compared:
        reason = f"{len(missed)} of {len(report.parameters)} parameters could not be compared"
        return Judged("inconclusive", f"{reason}: {_kinds(missed)}" if missed else reason, 1)
    return Judged("healthy", f"all {compared} parameters arrived, in every push", 0)


WORDS: dict[Status, str] = {
    "stale": "stale",
    "partly": "arrived in part only",
    "twice": "applied twice",
    "scaled": "scaled by another factor",
    "rearranged": "rearranged",
    "uninitialised": "uninitialised",
    "alias_lost": "without its tie",
    "missing": "missing",
    "altered": "holding values of no push",
    "arrived": "arrived",
    "not_compared": "not compared",
}


def _kinds(parameters: Sequence[Parameter]) -> str:
    """Modules and how many parameters of each; a page has the parameters."""
    counted = Counter(MODULE.sub("", kind_of(p.name)) for p in parameters)
    named = [f"{name} ({count})" for name, count in counted.items()]
    return in_list(named, most=5)


def kind_of(name: str) -> str:
    """Return a parameter's name without its layer and the number of its expert.

    >>> kind_of("model.layers.3.self_attn.sinks"), kind_of("mlp.experts.7.up_proj.weight")
    ('self_attn.sinks', 'mlp.experts.up_proj.weight')
    """
    return NUMBERED.sub("", name)


SCHEMA = "mismatch.sync-probe/1"
FILE = "sync-probe.json"


def sync_to_json(report: SyncReport) -> dict[str, Any]:
    """Return the report as JSON data, with its verdict."""
    verdict = judge(report)
    head = {"word": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(report)}
