"""``mismatch selftest``: known faults, planted in the user's own pipeline; which are named?

The engine samples once. Faults of weights and functions are checkpoints that the training world
scores as well; faults of the pairing are made on the recorded numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import Side, detectors
from mismatch.analysis.diagnosis.detectors.displacement import FUNCTIONS, WEIGHTS
from mismatch.analysis.diagnosis.ranking import KINDS, diagnose
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.experiments.passes import reference_of
from mismatch.models.planted import plant
from mismatch.pipeline.explain import case_of
from mismatch.processes.stages import Narrator, Stages
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.manifest import is_current
from mismatch.run.scorings import REFERENCE, TRAIN
from mismatch.specs import CheckSpec, Pass, spec_hash
from mismatch.types import Estimate, Floats

SCHEMA, FILE, PLACE = "mismatch.selftest/1", "selftest.json", "planted"
Record = Callable[[Case, float], tuple[Floats, Floats]]


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault that is planted.

    Attributes:
        sizes: the largest first; it has to be found at that one.
        expected: causes whose mark it leaves; the first is its name.
        record: of recorded numbers: (case, size) -> both sides; None: a checkpoint of that name.
    """

    id: str
    sizes: tuple[float, ...]
    expected: tuple[str, ...]
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One fault at one size.

    Attributes:
        named: the leading cause, "" for none; ``side`` of it.
        rank: of the first expected cause, from 1; None where none is named.
        effect: share of mean |delta| of that cause.
        mean_abs_delta: with the fault, nats.
    """

    size: float
    named: str
    side: Side | None
    rank: int | None
    effect: Estimate | None
    mean_abs_delta: float


@dataclass(frozen=True, slots=True)
class Tried:
    """One fault at all its sizes.

    Attributes:
        found: it leads at its largest size; None where it could not be planted.
        smallest: the smallest size at which it leads, sizes in their order; None where at none.
        reason: why it could not be planted.
    """

    fault: str
    expected: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    found: bool | None
    smallest: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """All faults; ``clean``: causes that the pipeline has without any."""

    faults: tuple[Tried, ...]
    clean: tuple[str, ...]
    mean_abs_delta: float
    n_tokens: int

    @property
    def caught(self) -> bool:
        """Whether every fault that could be planted was found, and there was one."""
        planted = [one.found for one in self.faults if one.found is not None]
        return bool(planted) and all(planted)


def _shift(case: Case, size: float) -> tuple[Floats, Floats]:
    right = case.right.copy()
    for row in case.rows:
        right[row] = np.roll(right[row], int(size))
    return case.left, right


def _rows(case: Case, size: float) -> tuple[Floats, Floats]:
    """A share of the rows takes the next row's numbers."""
    right, rows = case.right.copy(), case.rows
    for one, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        if rows.index(one) < size * len(rows):
            length = min(one.stop - one.start, other.stop - other.start)
            right[one.start : one.start + length] = case.right[other.start : other.start + length]
    return case.left, right


def _ends(case: Case, size: float) -> tuple[Floats, Floats]:
    left = case.left.copy()
    for row in case.rows[: max(2, int(size * len(case.rows)))]:
        left[row.stop - 1] = 0.0
    return left, case.right


def _rounded(case: Case, size: float) -> tuple[Floats, Floats]:
    """To so many bits of mantissa; bf16 has 8."""
    mantissa, exponent = np.frexp(case.left)
    return np.ldexp(np.round(mantissa * 2**size) / 2**size, exponent), case.right


def _raw(case: Case, size: float) -> tuple[Floats, Floats]:
    """The trainer does not divide its logits by the sampling temperature."""
    raw = case.trainer.extra.get("logprobs_untempered")
    if raw is None:
        raise MismatchError("the sampling temperature is 1: there is nothing to leave out")
    return case.left, np.asarray(raw, np.float64)


FUNCTION = (*KINDS, *FUNCTIONS, "grows-with-position", "onset", "first-token")
VALUES = (*KINDS, *WEIGHTS, "onset", "first-token")
FAULTS = (
    Planted("layer-noise", (0.3, 0.1, 0.03), VALUES),
    Planted("stale-weights", (0.1, 0.03, 0.01), VALUES),
    Planted("swapped-experts", (1.0,), ("experts-differ", *VALUES)),
    Planted("norm-eps", (100.0, 10.0), ("norm-eps", *VALUES, *FUNCTION)),
    Planted("rope", (10.0, 2.0), ("rope-config", *FUNCTION)),
    Planted("window", (0.5, 0.9), ("sliding-window", *FUNCTION)),
    Planted("no-sinks", (30.0, 1.0), ("attention-sinks", *FUNCTION)),
    Planted("temperature", (1.0,), ("temperature-semantics",), _raw),
    Planted("misalignment", (1.0, 3.0), ("misalignment",), _shift),
    Planted("row-pairing", (1.0, 0.25), ("row-pairing",), _rows),
    Planted("appended-eos", (1.0, 0.1), ("appended-eos",), _ends),
    Planted("bf16-logprobs", (8.0, 11.0), ("bf16-logprobs",), _rounded),
)


def run_selftest(spec: CheckSpec, run_dir: Path, narrator: Narrator, command: str = "") -> SelfTest:
    """Sample once, score every planted checkpoint, and see what the detectors name.

    Raises:
        MismatchError: the engine or the trainer failed.
    """
    directory = Path(spec.train.model)
    if not directory.is_dir():
        raise MismatchError(
            f"faults are planted in a checkpoint on disk, and {spec.train.model} is a hub id",
            "download it: hf download MODEL --local-dir DIR, then --model DIR",
        )
    with at_work(run_dir, "selftest", spec, command) as journal:
        stages = Stages(spec, run_dir, narrator, journal)
        reasons: dict[str, str] = {}
        passes = [Pass(TRAIN, spec.train), Pass(REFERENCE, reference_of(spec.train))]
        try:
            passes += _planted(spec, run_dir / PLACE, reasons)
            stages.measure(passes)
        finally:
            shutil.rmtree(run_dir / PLACE, ignore_errors=True)
        result = judged(case_of(run_dir, spec), run_dir, reasons)
        document = {"schema": SCHEMA, "caught": result.caught, **to_json(result)}
        store.save_document(run_dir, FILE, document, schema=SCHEMA)
    return result


def pass_name(fault: str, size: float) -> str:
    """Of a planted checkpoint's scoring; `fix:` keeps it out of a report's other passes."""
    return f"{store.FIX_PREFIX}planted-{fault}-{size:g}"


def _planted(spec: CheckSpec, place: Path, reasons: dict[str, str]) -> list[Pass]:
    """The passes of all planted checkpoints; what cannot be planted leaves its reason."""
    shutil.rmtree(place, ignore_errors=True)
    passes = []
    for fault in FAULTS:
        for size in fault.sizes if fault.record is None else ():
            target = place / f"{fault.id}-{size:g}"
            train = replace(spec.train, model=str(target), revision=None, routing=False)
            name = pass_name(fault.id, size)
            if is_current(place.parent, store.scoring_file(name), spec_hash(train)):
                continue
            try:
                plant(Path(spec.train.model), target, fault.id, size)
            except MismatchError as error:
                shutil.rmtree(target, ignore_errors=True)
                reasons[fault.id] = error.message
                break
            passes.append(Pass(name, train))
    return passes


def judged(clean: Case, run_dir: Path, reasons: dict[str, str]) -> SelfTest:
    """What the detectors say of every fault."""
    clean = replace(clean, others={n: s for n, s in clean.others.items() if TRAIN not in n})
    known = set(store.scoring_names(run_dir))
    tried = []
    for fault in FAULTS:
        attempts = []
        for size in fault.sizes:
            name = pass_name(fault.id, size)
            if fault.record is not None:
                try:
                    case = _recorded(clean, *fault.record(clean, size))
                except MismatchError as error:
                    reasons = reasons | {fault.id: error.message}
                    break
            elif name in known:
                scoring = replace(store.load_scoring(run_dir, name), name=TRAIN)
                case = Case.of(clean.rollout, clean.engine, scoring, clean.others)
            else:
                continue
            attempts.append(_attempt(fault, size, case))
        tried.append(_told(fault, attempts, reasons.get(fault.id, "")))
    plain = diagnose(clean, detectors())
    return SelfTest(
        tuple(tried),
        tuple(cause.id for cause in plain.ranked),
        plain.mean_abs_delta,
        clean.rollout.n_actions,
    )


def _recorded(clean: Case, left: Floats, right: Floats) -> Case:
    """As a run with these numbers leaves it: no other view of the trainer's law is there."""
    engine = replace(clean.engine, logprobs=left)
    trainer = replace(clean.trainer, logprobs=right, extra={})
    return Case.of(clean.rollout, engine, trainer, clean.others)


def _attempt(fault: Planted, size: float, case: Case) -> Attempt:
    causes = diagnose(case, detectors())
    ids = [cause.id for cause in causes.ranked]
    rank = next((n for n, id in enumerate(ids, 1) if id in fault.expected), None)
    first = causes.ranked[0] if ids else None
    return Attempt(
        size,
        first.id if first else "",
        first.side if first else None,
        rank,
        None if rank is None else causes.ranked[rank - 1].effect,
        causes.mean_abs_delta,
    )


def _told(fault: Planted, attempts: list[Attempt], reason: str) -> Tried:
    led = [one.size for one in attempts if one.rank == 1]
    if not attempts and not reason:
        reason = "its pass could not be made; see logs/train.log"
    return Tried(
        fault.id,
        fault.expected[:1],
        tuple(attempts),
        attempts[0].rank == 1 if attempts else None,
        led[-1] if led else None,
        reason,
    )
