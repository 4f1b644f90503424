"""A probe of the weight sync: what became of every parameter, push by push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mismatch.errors import in_list
from mismatch.features.sync.judge import WORDS, judge, kept_caches, kind_of
from mismatch.features.sync.report import BACK, Parameter, Status, SyncReport
from mismatch.reports.formatting import Tone, count, number, text
from mismatch.reports.section import Cell, Column, Page, Section, Table, named, not_tested

LEAD = (
    "Known updates of every parameter, two of them, then the first weights again; after each push "
    "read back as the engine's kernels hold it."
)
TONES: dict[str, Tone] = {"healthy": "healthy", "inconclusive": "warn", "broken": "critical"}
STATES = {0: "before", 1: "push 1", 2: "push 2", BACK: "back"}
MOST_PARTS = 3  # that are named in a cell
Group = tuple[str, Sequence[Parameter]]  # a name, and the parameters that it stands for


def _push(push: int, group: Group) -> Cell:
    """Return what became of the parameters in a push."""
    outcomes = [each for parameter in group[1] for each in parameter.outcomes if each.push == push]
    statuses: list[Status] = list(dict.fromkeys(each.status for each in outcomes))
    if not statuses:
        missing = group[1][0].status == "not_compared"
        return Cell(WORDS["not_compared"] if missing else "–", "warn")
    words = [WORDS[status] for status in statuses]
    words += [f"x {number(each.factor)}" for each in outcomes if each.factor is not None][:1]
    words += ["rounded"] if any(each.rounded for each in outcomes) else []
    return Cell(", ".join(words), "healthy" if statuses == ["arrived"] else "critical")


KIND_COLUMNS = (
    Column("parameters", text, of=lambda group: group[0], tone="code"),
    Column("how many", count, of=lambda group: len(group[1])),
    *(
        Column(STATES[push], text, int(push == BACK), of=partial(_push, push))
        for push in (1, 2, BACK)
    ),
    Column("where", text, 1, of=lambda group: _where(group[1])),
)
SCORE_COLUMNS = (
    Column("state", text, of=lambda row: STATES[row.push]),
    Column("tokens", count, 1, of="tokens"),
    Column("engine to trainer", number, detail="mean |delta|, nats", of="apart"),
    Column("trainer moved", number, detail="nats", of="trainer_moved"),
    Column("engine moved", number, detail="nats", of="engine_moved"),
)
CACHE_COLUMNS = (
    Column("after", text, of=lambda row: STATES[row.push]),
    Column("prompts", count, of="prompts"),
    Column("answered otherwise", count, of="differ"),
    Column("largest difference", number, detail="nats", of="largest"),
)


def section(result: SyncReport) -> Section:
    """Faults by kind of parameter; every parameter, scores and caches below."""
    kinds: dict[tuple[str, Status], list[Parameter]] = {}  # gathered over layers and experts
    for each in (*result.faults, *result.of_status("not_compared")):
        kinds.setdefault((kind_of(each.name), each.status), []).append(each)
    every = [(each.name, [each]) for each in result.parameters]
    return Section(
        "sync-probe",
        "Weight sync",
        f"{LEAD} Engine {result.engine}, path {result.path}.",
        sentences=[*_sentences(result)],
        tables=[Table.of(KIND_COLUMNS, ((name, group) for (name, _), group in kinds.items()))],
        notes=not_tested(result.not_tested),
        parts=[
            Section(f"sync-{id}", title, tables=[Table.of(columns, rows)], page_only=wide)
            for id, title, columns, rows, wide in (
                ("scores", "Both sides on the same tokens", SCORE_COLUMNS, result.scores, False),
                ("caches", "The same prompts, warm and cold", CACHE_COLUMNS, result.caches, False),
                ("parameters", "Every parameter", KIND_COLUMNS, every, True),
            )
        ],
    )


def _sentences(result: SyncReport) -> Iterator[str]:
    arrived = len(result.of_status("arrived"))
    yield f"{arrived} of {len(result.parameters)} parameters arrived in every push."
    hidden = [p for p in result.faults if p.outcomes and p.outcomes[-1].status == "arrived"]
    if hidden and len(hidden) == len(result.faults):
        yield "With the first weights back all is as before: a round trip hides this."
    apart = [f"{number(r.apart)} {STATES[r.push]}" for r in result.scores if r.apart is not None]
    if apart:
        yield f"Engine and trainer on the same tokens, nats apart: {', '.join(apart)}."
    for row in kept_caches(result)[:1]:
        yield (
            f"After {STATES[row.push]} {row.differ} of {row.prompts} prompts were answered from "
            "keys and values of the old weights: reset the prefix cache after the sync."
        )
    for push, why in result.push_failed.items():
        yield f"{STATES[push]} failed: {why}"


def _where(parameters: Sequence[Parameter]) -> str:
    """Experts and blocks of the first parameter that has any, or why it was not compared."""
    for parameter in parameters:
        if parameter.reason and not parameter.outcomes:
            return parameter.reason
        for outcome in parameter.outcomes:
            if outcome.parts:
                return "; ".join(
                    f"{status}: {in_list(labels, MOST_PARTS)}"
                    for status, labels in outcome.parts.items()
                )
    return ""


def page(result: SyncReport) -> Page:
    """Return the probe as a separate page."""
    verdict = judge(result)
    facts = named(
        (f"{name}: {key}" if key else name, str(each))
        for name, value in result.facts.items()
        for key, each in (value if isinstance(value, dict) else {"": value}).items()
        if each is not None
    )
    size = f"updates of {number(result.size)} of each parameter's size, seed {result.seed}"
    return Page(
        kind="probe of the weight sync",
        word=verdict.status,
        tone=TONES[verdict.status],
        reason=verdict.reason,
        title=Path(result.model).name,
        facts=(f"{result.engine}, path {result.path}; {size}",),
        sections=(section(result), Section("probe", "This probe", tables=(facts,))),
        file="sync-probe",
    )
