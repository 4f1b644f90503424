"""``mismatch selftest``: known faults, planted in the user's own pipeline; which are named?

The engine samples once. Faults of weights and functions are checkpoints that the training world
scores as well; faults of the pairing are made on the recorded numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import Side, detectors
from mismatch.analysis.diagnosis.detectors.stated import configurations, weights
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import reference_of
from mismatch.models.planted import plant
from mismatch.pipeline.explain import case_of
from mismatch.processes.stages import Narrator, Stages
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.manifest import is_current
from mismatch.run.store import REFERENCE, TRAIN
from mismatch.specs import CheckSpec, Pass, spec_hash
from mismatch.types import Bools, Estimate, Floats, NotTested, Scoring

SCHEMA, FILE, PLACE = "mismatch.selftest/1", "selftest.json", "planted"
Record = Callable[[Case, float], Case]


Grade = Literal["first", "top three", "noticed", "missed"]
TOP = 3  # causes among which a caught fault is named


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault that is planted.

    Attributes:
        sizes: the largest first; it has to be caught at that one.
        causes: its name, and what even digests and resolved settings cannot tell from it.
        side: whose numbers it moves; None: a pairing, which is of both.
        kin: causes with the same mark in the log-probabilities: they count only where the sides
            do not state what ``stated`` reads.
        stated: detector that reads the fault off what both sides state; "" where none does.
        record: of recorded numbers: (case, size) -> the case with it.
        of: a planted checkpoint and its size, whose numbers the later turns take on ``side``;
            neither: a checkpoint of the fault's own name.
        turns: planted in runs of several turns alone.
    """

    id: str
    sizes: tuple[float, ...]
    causes: tuple[str, ...]
    side: Side | None = "trainer"
    kin: tuple[str, ...] = ()
    stated: str = ""
    record: Record | None = None
    of: tuple[str, float] | None = None
    turns: bool = False

    @property
    def checkpoint(self) -> bool:
        """Whether it is planted in a checkpoint of its own."""
        return self.record is None and self.of is None

    def expected(self, reading: frozenset[str]) -> tuple[str, ...]:
        """Causes that the data cannot tell apart, by the detectors that had something to read."""
        return self.causes if self.stated in reading else (*self.causes, *self.kin)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One fault at one size.

    Attributes:
        named: the leading cause, "" for none; ``side`` of it.
        rank: of the first expected cause, from 1; None where none is named.
        effect: share of mean |delta| of that cause.
        mean_abs_delta: with the fault, nats.
        grade: "noticed": a cause is named that the pipeline lacks without the fault, but not this.
        right_side: of the expected cause, else of the leading one; None where a fault has no side
            or nothing is named.
    """

    size: float
    named: str
    side: Side | None
    rank: int | None
    effect: Estimate | None
    mean_abs_delta: float
    grade: Grade = "missed"
    right_side: bool | None = None

    @property
    def caught(self) -> bool:
        """Whether it is named among the first three causes."""
        return self.grade in ("first", "top three")


@dataclass(frozen=True, slots=True)
class Tried:
    """One fault at all its sizes.

    Attributes:
        expected: causes that these data cannot tell apart, the fault's own name first.
        found: it is caught at its largest size; None where it could not be planted.
        smallest: the smallest size at which it is caught, sizes in their order; None: at none.
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
        """Whether every fault that could be planted was caught, and there was one."""
        planted = [tried.found for tried in self.faults if tried.found is not None]
        return bool(planted) and all(planted)

    @property
    def grades(self) -> dict[Grade, int]:
        """How many faults ended so, each at its largest size."""
        counts: dict[Grade, int] = {"first": 0, "top three": 0, "noticed": 0, "missed": 0}
        for tried in self.faults:
            if tried.attempts:
                counts[tried.attempts[0].grade] += 1
        return counts

    @property
    def sides(self) -> tuple[int, int]:
        """Of the faults with a side, at their largest size: those named on it, and all."""
        right = [t.attempts[0].right_side for t in self.faults if t.attempts]
        sided = [side for side in right if side is not None]
        return sum(sided), len(sided)


def _shift(case: Case, size: float) -> Case:
    right = case.right.copy()
    for row in case.rows:
        right[row] = np.roll(right[row], int(size))
    return _recorded(case, case.left, right)


def _rows(case: Case, size: float) -> Case:
    """A share of the rows takes the next row's numbers."""
    right, rows = case.right.copy(), case.rows
    for row, after in zip(rows, [*rows[1:], rows[0]], strict=True):
        if rows.index(row) < size * len(rows):
            length = min(row.stop - row.start, after.stop - after.start)
            right[row.start : row.start + length] = case.right[after.start : after.start + length]
    return _recorded(case, case.left, right)


def _ends(case: Case, size: float) -> Case:
    left = case.left.copy()
    for row in case.rows[: max(2, int(size * len(case.rows)))]:
        left[row.stop - 1] = 0.0
    return _recorded(case, left, case.right)


def _rounded(case: Case, size: float) -> Case:
    """To so many bits of mantissa; bf16 has 8."""
    mantissa, exponent = np.frexp(case.left)
    return _recorded(case, np.ldexp(np.round(mantissa * 2**size) / 2**size, exponent), case.right)


def _raw(case: Case, size: float) -> Case:
    """The trainer does not divide its logits by the sampling temperature."""
    raw = case.trainer.extra.get("logprobs_untempered")
    if raw is None:
        raise MismatchError("the sampling temperature is 1: there is nothing to leave out")
    return _recorded(case, case.left, np.asarray(raw, np.float64))


def _counted(case: Case, size: float) -> Case:
    """The engine's list counts observations: behind one it is so many tokens late."""
    left, late = case.left.copy(), int(size)
    for row in case.rows:
        start = row.start + int(np.sum(case.turn[row] == 1))
        moved = np.concatenate([np.full(late, UNLIKELY), case.left[start : row.stop]])
        left[start : row.stop] = moved[: row.stop - start]
    return _recorded(case, left, case.right)


def _mask_late(case: Case, size: float) -> Case:
    """The mask of every response stands so many tokens further on."""
    mask, rollout = case.rollout.action_mask, case.rollout
    late = np.zeros(len(mask), bool)
    for start, stop in zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True):
        late[start + int(size) : stop] = mask[start : stop - int(size)]
    return _masked(case, late)


def _mask_of_tools(case: Case, size: float) -> Case:
    """What stands between the responses of a sequence counts as sampled."""
    return _masked(case, case.rollout.action_mask | (case.rollout.turn > 0))


def _masked(case: Case, mask: Bools) -> Case:
    """The run under another mask: the engine has 0 for what it did not sample."""
    sides = []
    for side, other in ((case.engine, 0.0), (case.trainer, UNLIKELY)):
        whole = np.full(len(mask), other)
        whole[case.rollout.actions] = side.logprobs
        sides.append(Scoring(side.name, case.rollout.token_ids[mask], whole[mask],
                             side.fingerprint))  # fmt: skip
    return Case.of(replace(case.rollout, action_mask=mask), sides[0], sides[1], {})


def _routes(case: Case, size: float) -> Case:
    """From the second turn on the engine's experts are those of so many tokens before."""
    routing = case.engine.routing
    if routing is None or case.trainer.routing is None:
        raise MismatchError("the run has no routed experts")
    later = (case.rollout.turn > 1)[:, None, None]
    ids = np.where(later, np.roll(routing.ids, int(size), axis=0), routing.ids)
    engine = replace(case.engine, routing=replace(routing, ids=ids))
    return Case.of(case.rollout, engine, case.trainer, case.others)


def _later(case: Case, side: Side | None, other: Scoring) -> Case:
    """From the second turn on one side has another scoring's numbers."""
    later = case.turn > 1
    if side == "engine":
        return _recorded(case, np.where(later, other.logprobs, case.left), case.right)
    return _recorded(case, case.left, np.where(later, other.logprobs, case.right))


UNLIKELY = -6.0  # nats, that a law gives to what nobody sampled
NUMBERS = ("weights-differ",)  # what log-probabilities alone say of other values
FUNCTION = ("function-differs",)  # and of another function
FAULTS = (
    # A dense model's layer is projections only: an adapter's scale differs in just those.
    Planted("layer-noise", (0.3, 0.1, 0.03), ("stale-weights", "lora-scale"), kin=NUMBERS,
            stated="weights"),
    Planted("stale-weights", (0.1, 0.03, 0.01), ("stale-weights", "lora-scale"), kin=NUMBERS,
            stated="weights"),
    Planted("swapped-experts", (1.0,), ("experts-differ",), kin=(*NUMBERS, *FUNCTION),
            stated="weights"),
    Planted("norm-eps", (100.0, 10.0), ("norm-eps",), kin=NUMBERS, stated="configurations"),
    Planted("rope", (10.0, 2.0), ("rope-config",), kin=(*FUNCTION, "grows-with-position"),
            stated="configurations"),
    Planted("window", (0.5, 0.9), ("sliding-window",),
            kin=(*FUNCTION, "onset", "grows-with-position"), stated="configurations"),
    Planted("no-sinks", (30.0, 1.0), ("attention-sinks",), kin=(*FUNCTION, "first-token"),
            stated="weights"),
    Planted("temperature", (1.0,), ("temperature-semantics",), record=_raw),
    Planted("misalignment", (1.0, 3.0), ("misalignment",), None, record=_shift),
    Planted("row-pairing", (1.0, 0.25), ("row-pairing",), None, record=_rows),
    Planted("appended-eos", (1.0, 0.1), ("appended-eos",), "engine", record=_ends),
    Planted("bf16-logprobs", (8.0, 11.0), ("bf16-logprobs",), "engine", record=_rounded),
    # Another context moves tokens as another function does, and a stale cache as other weights.
    Planted("later-context", (1.0,), ("turn-context",), of=("rope", 10.0), turns=True),
    Planted("later-cache", (1.0,), ("prefix-cache-stale", "turn-context"), "engine",
            of=("stale-weights", 0.1), turns=True),
    Planted("counted-observations", (4.0, 2.0), ("misalignment", "retokenisation"), None,
            record=_counted, turns=True),
    Planted("late-mask", (1.0,), ("action-mask",), None, record=_mask_late, turns=True),
    Planted("tools-in-the-loss", (1.0,), ("action-mask",), None, record=_mask_of_tools,
            turns=True),
    Planted("later-routes", (20.0, 5.0), ("shifted-route-capture",), None, record=_routes,
            turns=True),
)  # fmt: skip


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


def _planted(spec: CheckSpec, directory: Path, reasons: dict[str, str]) -> list[Pass]:
    """The passes of all planted checkpoints; what cannot be planted leaves its reason."""
    shutil.rmtree(directory, ignore_errors=True)
    passes = []
    for fault in FAULTS:
        for size in fault.sizes if fault.checkpoint else ():
            target = directory / f"{fault.id}-{size:g}"
            train = replace(spec.train, model=str(target), revision=None, routing=False)
            name = pass_name(fault.id, size)
            if is_current(directory.parent, store.scoring_file(name), spec_hash(train)):
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
    plain = diagnose(clean, detectors())
    without = frozenset(cause.id for cause in plain.ranked)
    scored = set(store.scoring_names(run_dir))
    tried = []
    for fault in faults_of(clean):
        expected = fault.expected(stated_by(clean))
        attempts = []
        for size in fault.sizes:
            name = pass_name(*(fault.of or (fault.id, size)))
            if fault.record is not None:
                try:
                    case = fault.record(clean, size)
                except MismatchError as error:
                    reasons = reasons | {fault.id: error.message}
                    break
            elif name in scored:
                scoring = replace(store.load_scoring(run_dir, name), name=TRAIN)
                case = (Case.of(clean.rollout, clean.engine, scoring, clean.others)
                        if fault.of is None else _later(clean, fault.side, scoring))  # fmt: skip
            else:
                continue
            attempts.append(_attempt(expected, fault.side, size, case, without))
        tried.append(_told(fault.id, expected, attempts, reasons.get(fault.id, "")))
    return SelfTest(
        tuple(tried),
        tuple(cause.id for cause in plain.ranked),
        plain.mean_abs_delta,
        clean.rollout.n_actions,
    )


def faults_of(case: Case) -> list[Planted]:
    """Those that a run of these sequences can have."""
    several = case.turn.max() > 1
    return [fault for fault in FAULTS if several or not fault.turns]


def stated_by(case: Case) -> frozenset[str]:
    """Detectors that find what they need in what both sides state."""
    looks = {"weights": weights(case), "configurations": configurations(case)}
    return frozenset(id for id, look in looks.items() if not isinstance(look, NotTested))


def _recorded(clean: Case, left: Floats, right: Floats) -> Case:
    """As a run with these numbers leaves it: no other view of the trainer's law is there."""
    engine = replace(clean.engine, logprobs=left)
    trainer = replace(clean.trainer, logprobs=right, extra={})
    return Case.of(clean.rollout, engine, trainer, clean.others)


def _attempt(
    expected: tuple[str, ...], side: Side | None, size: float, case: Case, without: frozenset[str]
) -> Attempt:
    """One fault judged; ``without``: causes that the pipeline has without it."""
    causes = diagnose(case, detectors())
    rank = next((n for n, cause in enumerate(causes.ranked, 1) if cause.id in expected), None)
    leading = causes.ranked[0] if causes.ranked else None
    meant = leading if rank is None else causes.ranked[rank - 1]
    grade: Grade = "missed"
    if rank is not None and rank <= TOP:
        grade = "first" if rank == 1 else "top three"
    elif any(cause.id not in without for cause in causes.ranked):
        grade = "noticed"
    return Attempt(
        size,
        leading.id if leading else "",
        leading.side if leading else None,
        rank,
        None if rank is None or meant is None else meant.effect,
        causes.mean_abs_delta,
        grade,
        None if side is None or meant is None else meant.side == side,
    )


def _told(id: str, expected: tuple[str, ...], attempts: list[Attempt], reason: str) -> Tried:
    caught = [attempt.size for attempt in attempts if attempt.caught]
    if not attempts and not reason:
        reason = "its pass could not be made; see logs/train.log"
    return Tried(
        id,
        expected,
        tuple(attempts),
        attempts[0].caught if attempts else None,
        caught[-1] if caught else None,
        reason,
    )
