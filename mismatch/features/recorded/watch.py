"""`mismatch watch`: follow the dumps of a run while it trains.

No file ends it. The files of one step, of all ranks, are read once they are complete: prime-rl
marks a step, and other files are complete when they have not changed between two looks and end
where a row or an archive does. What cannot be read, or is passed over, is said once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mismatch.analysis.diagnosis.twins import STEP
from mismatch.analysis.drift import drift_of
from mismatch.analysis.weight_versions import VERSION, lags_of, split_by_lag
from mismatch.errors import named_line
from mismatch.features.recorded.dumps import CUT_OFF, Recorded, read_recorded
from mismatch.features.recorded.parts import SUFFIXES, named, of_one_step, suffix_of
from mismatch.features.recorded.rows import row_groups
from mismatch.features.recorded.run import RecordedRun, as_run
from mismatch.metrics.row_sums import Step
from mismatch.reports.formatting import line, number, percent, plural
from mismatch.types import Pair, Sampling

WORSE = 3.0  # times the mean |delta| of the first steps: said to grow
FIRST = 3  # steps that the others are compared with
MOST = 200_000  # tokens of a step that are kept to compare its rows; sums are of all
PATIENCE = 10  # looks at files that do not change, after which half a file is read as it is
STABLE = "STABLE"  # prime-rl's file in the folder of a complete step

NOT_PROVEN = (
    "comparison: a dump does not prove that both sides have the same weights, temperature and "
    "vocabulary; mismatch check does"
)

Look = dict[Path, tuple[int, int]]  # file -> its size, and the time of its last change


@dataclass
class _Group:
    """The files of one step, of all ranks, or one file whose rows name their steps."""

    told: Look | None = None
    """As it was read; None: never."""
    waited: int = 0
    """Looks at it since it changed, while it is not complete."""
    half: bool = False
    """It ends in half a line, or a file of it cannot be read."""
    steps: dict[int, Step] = field(default_factory=dict)
    """Those that were said."""


def follow(
    folder: Path, every_s: float, once: bool, note: Callable[[str], None], python: str | None = None
) -> Iterator[str]:
    """Yield a line for every step that is complete, as files of a dump appear.

    A step whose files change gets a new line.

    Args:
        once: stop after the files that are there.
        note: gets a line for every file that cannot be read or is passed over.
    """
    groups: dict[tuple[str, str], _Group] = {}
    before: Look = {}
    first: dict[tuple[str, int], float] = {}  # by folder and step
    ranks: dict[str, int] = {}  # by folder: the most files that a step has had
    said = set[str]()

    def once_of(text: str, own: bool = False) -> None:
        kind = text if own else re.sub(r"\d+", "N", text)  # files of one name, of other steps
        if kind not in said:
            said.add(kind)
            note(text if len(text) < 400 else f"{text[:400]} …")

    while True:
        now = _look(folder)
        for path in before.keys() - now.keys():
            once_of(f"{line(path)} was deleted")
        for key, files in _grouped(now).items():
            group = groups.setdefault(key, _Group())
            if group.told == files:
                continue
            if not once and any(before.get(path) != at for path, at in files.items()):
                group.waited = 0
                continue
            if not _marked(files, now):
                if once:
                    once_of(
                        f"{line(next(iter(files)).parent)} has no {STABLE} file yet: passed over"
                    )
                continue
            group.waited += 1
            if len(files) < ranks.get(key[0], 0) and not once and group.waited < PATIENCE:
                continue
            if 1 < group.waited < PATIENCE and group.half:
                continue
            try:
                recorded = read_recorded(list(files), python=python, most=MOST, skip_torn=True)
            except Exception as error:  # whatever a file holds, the next may be whole
                fault = line(getattr(error, "headline", None) or named_line(error))
                name = line(next(iter(files)))
                once_of(f"{fault if name in fault else f'{name}: {fault}'}: not read", own=True)
                group.told = files
                continue
            half = [str(each.headline) for each in recorded.passed_over if not each.foreign]
            half += [text for text in recorded.remarks if text.startswith(CUT_OFF)]
            for each in recorded.passed_over:
                what = "passed over" if each.foreign else "not read"
                once_of(f"{line(each.headline)}: {what}", own=not each.foreign)
            group.half = bool(half)
            if half and not once and group.waited < PATIENCE:
                once_of(f"{line(half[0])}: waiting for the rest of it")
                continue
            if not once:
                once_of(NOT_PROVEN)
            group.told = files
            ranks[key[0]] = max(len(files), ranks.get(key[0], 0))
            for step, rows in _steps(recorded):
                usual = float(np.median(list(first.values()))) if len(first) == FIRST else None
                if step.tokens and (len(first) < FIRST or (key[0], step.step) in first):
                    first[key[0], step.step] = step.abs_diff
                if group.steps.get(step.step) != step:
                    name = f"step {step.step}" if recorded.sums.steps() else line(key[0])
                    again = "; written again" if step.step in group.steps else ""
                    yield _line(step, name, rows, usual, recorded) + again
                    group.steps[step.step] = step
            for text in half:
                once_of(line(text))
        if once:
            return
        before = now
        time.sleep(every_s)


def _look(folder: Path) -> Look:
    """Return the files of a dump that are there, by step, and those that mark one as complete."""
    found: Look = {}
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or deleted meanwhile
            if (suffix_of(path) in SUFFIXES or path.name == STABLE) and path.is_file():
                about = path.stat()
                found[path] = about.st_size, about.st_mtime_ns
    order = {path: int(named(path).get("step", -1)) for path in found}
    return {path: found[path] for path in sorted(found, key=lambda path: (order[path], str(path)))}


def _grouped(files: Look) -> dict[tuple[str, str], Look]:
    groups: dict[tuple[str, str], Look] = {}
    for path, at in files.items():
        if path.name != STABLE:
            groups.setdefault(of_one_step(path), {})[path] = at
    return groups


def _marked(files: Look, all_files: Look) -> bool:
    """Whether a step is marked as complete, in a folder where some step is."""
    folder = next(iter(files)).parent
    marks = {path.parent for path in all_files if path.name == STABLE}
    return folder in marks or not any(mark.parent == folder.parent for mark in marks)


def _steps(recorded: Recorded) -> Iterator[tuple[Step, str]]:
    """Yield the steps of a dump that holds both sides, and which of their rows are off."""
    sums = recorded.sums
    if sums.one_sided == sums.rows:
        return
    rows = ""
    if sums.whole.tokens:
        run = as_run(recorded, Sampling(), {}, {})
        if run.train is not None:
            pair = Pair.of(run.rollout, run.decode, run.train)
            said = row_groups(pair, run.rollout, run.attributes).sentence(), _apart(run, pair)
            rows = "; ".join(filter(None, said))
    for step in sums.steps() or [sums.whole.step(0)]:
        yield step, rows


def _apart(run: RecordedRun, pair: Pair) -> str:
    """Return what weight versions tell of staleness, and a bias; "" where chance explains all."""
    extra, said = run.decode.extra, list[str]()
    if VERSION in extra:
        lag = lags_of(extra[VERSION], extra.get(STEP))
        split = split_by_lag(pair.delta, pair.rollout, lag, pair.prompt[pair.sequence])
        if split is not None and split.stale:
            said.append(f"mismatch {number(split.mismatch.value)} nats rms at equal weights, "
                        f"staleness {number(split.staleness.value)}")  # fmt: skip
    drift = drift_of(pair.delta, pair.sequence, pair.prompt, None)
    if drift is not None and drift.biased:
        said.append(f"a bias of {number(drift.bias, sign=True)} nats per token")
    return "; ".join(said)


def _line(step: Step, name: str, rows: str, usual: float | None, recorded: Recorded) -> str:
    sums, bad = recorded.sums, []
    for (side, what), place in sums.first.items():
        if place.step in ("", str(step.step)):
            count = plural(sums.not_finite[side, what], "token")
            bad.append(f"{side}: {what} ({count}, the first at {place})")
    if not step.tokens:
        return "; ".join([f"{name}: no token has a number on both sides", *bad])
    ess = f"effective size {percent(step.ess)}"
    if not np.isfinite(step.ess):
        ess = "every sequence weight is cut"
    text = (
        f"mean |delta| {number(step.abs_diff)}, k3 {number(step.k3)}, PPO clips "
        f"{percent(step.clipped)}, {ess} ({step.tokens:,} tokens)"
    )
    if bad:
        text = f"{'; '.join(bad)}; the others: {text}"
    elif not np.isfinite(step.k3) and sums.worst is not None:
        text = f"no finite ratio at {sums.worst[1]}: {sums.worst[0]:.4g} nats; {text}"
    if usual is not None and step.abs_diff > WORSE * usual:
        text += f"; {step.abs_diff / usual:.1f}× the first steps"
    if not recorded.ratios.agree():
        text += f"; {recorded.ratios.sentence()}"
    return f"{name}: {text}; {rows}" if rows else f"{name}: {text}"
