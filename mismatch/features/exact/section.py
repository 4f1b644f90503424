"""The level EXACT: pairs of scorings by their bits, and what excludes equality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mismatch.features.exact.results import (
    NO_SETTING,
    BatchProbe,
    Exactness,
    Excluded,
    FixesByBits,
    Pair,
    said,
)
from mismatch.reports.formatting import capital, count, line, percent, plural, text, times
from mismatch.reports.section import Cell, Column, Section, Table, Tone, not_tested
from mismatch.types import Report

LEAD = (
    "Bits, not levels: how many tokens have unequal log-probabilities. EXACT is a word next to "
    "the verdict: engine and trainer are bitwise equal in every token, and so is each with itself. "
    "Numbers that may be copies prove nothing."
)
TONES: dict[str, Tone] = {"exact": "healthy", "not exact": "warn", "not proven": "dim"}


def _first(pair: Pair) -> str:
    at = pair.first
    if at is None:
        return ""
    return f"prompt {at.prompt}, sequence {at.sequence}, position {at.position}"


PAIRS = (
    Column("pair", text, of=lambda pair: Cell(pair.what, note=f"{pair.left} / {pair.right}")),
    Column("unequal", count, of="unequal"),
    Column("of", text, of=lambda pair: plural(pair.n, pair.unit)),
    Column("largest, ulps", count, of="ulps"),
    Column("first unequal", text, 1, of=_first),
    Column("word", text, of=lambda pair: Cell(pair.word, TONES[pair.word], pair.constructed)),
)
EXCLUDED = (
    Column("side", text, of="side"),
    Column("setting", text, of="what"),
    Column("equal bits", text, of=lambda row: "excluded" if row.certain else "not promised"),
    Column("removed by", text, of=lambda row: Cell(row.remove or NO_SETTING, "code")),
    Column("source", text, 2, of="source"),
)


def whole(result: Exactness, report: Report) -> Exactness:
    """Return a run's level with what a probe of its batches found."""
    probe: BatchProbe | None = report.result("batch_probe")
    return result if probe is None else replace(result, pairs=(*result.pairs, *probe.pairs))


def lacks(result: Exactness, report: Report) -> str:
    """Return why a run that must be exact is not; "": it is."""
    every = whole(result, report)
    return "" if every.word == "exact" else said(every)


def probed(result: BatchProbe, report: Report) -> Section:
    """Return the batches of each side, and how many bits depend on them."""
    off = [pair for pair in result.pairs if pair.unequal]
    says = "no token depends on its batch"
    if off:
        says = "; ".join(f"{pair.what}: {pair.unequal:,} of {pair.n:,} unequal" for pair in off)
    lead = (
        f"The same tokens of {plural(result.sequences, 'sequence')} alone, in one batch, and in "
        "another order. Transformers decodes the tokens of the run, vLLM the likeliest tokens."
    )
    return Section(
        "batch-probe",
        "Batches",
        lead,
        sentences=[f"{capital(line(says))}."],
        tables=[Table.of(PAIRS, result.pairs)],
        notes=not_tested(result.not_tested),
        short=says,
    )


def section(result: Exactness, report: Report) -> Section:
    """Return all pairs, then the settings with which they cannot be equal."""
    result = whole(result, report)
    further = [pair for pair in result.pairs if pair.scope == "further"]
    return Section(
        "exact-bits",
        "Exact",
        LEAD,
        sentences=[_sentence(result)],
        tables=[Table.of(PAIRS, [*result.counted, *result.others, *further])],
        parts=[settings(result.excluded)],
        short=said(result),
        first=True,
    )


TITLE = "Settings that exclude equal bits, or with which nobody promises them"


def settings(found: tuple[Excluded, ...]) -> Section:
    """Return the settings that exclude equality in one stack."""
    return Section(
        "exact-settings",
        TITLE,
        tables=[Table.of(EXCLUDED, found)],
        short=f"{plural(len(found), 'setting')} of this stack",
    )


def _sentence(result: Exactness) -> str:
    """Say the word, and of pairs that are equal in all their tokens how many there are."""
    equal = [line(pair.what) for pair in result.counted if pair.word == "exact"]
    tail = f" Bitwise equal: {', '.join(equal)}." if equal else ""
    return f"Exact: {said(result)}.{tail}"


# ---------------------------------------------------------------- fixes


def _count(pair: Pair) -> str:
    return f"{pair.unequal:,} of {pair.n:,}"


def _slower(seconds: tuple[float, float] | None) -> str:
    if seconds is None or not seconds[0]:
        return "as it was" if seconds is None else ""
    return times(seconds[1] / seconds[0])


FIXES = (
    Column("fix", text, of=lambda fix: Cell(fix.id, "code")),
    Column("unequal before", text, of=lambda fix: _count(fix.before)),
    Column("unequal after", text, of=lambda fix: Cell(
        _count(fix.after), "healthy" if fix.after.word == "exact" else "")),
    Column("engine's time", text, of=lambda fix: _slower(fix.engine_s), detail="of a token"),
    Column("trainer's time", text, of=lambda fix: _slower(fix.trainer_s), detail="of a token"),
)  # fmt: skip


def fixed(result: FixesByBits, report: Report) -> Section:
    """Return unequal tokens before and after each fix, with what it costs."""
    return Section(
        "exact-fixes",
        "Unequal bits with each fix",
        "Engine against trainer. Times are of this run, without starts: after over before.",
        sentences=[f"{each}." for each in _said_of(result)],
        tables=[Table.of(FIXES, result.fixes)],
        short=next(_said_of(result)),
    )


def _said_of(result: FixesByBits) -> Iterator[str]:
    best = result.fixes[0]
    share = percent(best.after.unequal / max(1, best.after.n))
    yield (
        f"Fewest with {line(best.id)}: {_count(best.after)} tokens ({share}), before "
        f"{_count(best.before)}"
    )
