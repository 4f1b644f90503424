"""Is a side broken, or is it the rounding of its precision? Scorings of the same tokens.

    engine as it runs     engine in float32       (the same implementation, started in float32)
    trainer as it runs    trainer in float32      (the same implementation)
    plain forward         reference in float32    (a plain forward of the trainer's model code)

``excess`` of a side: spread(side - its float32) / spread(plain at its precision - plain float32).
About 1 where rounding is all that happens; a broken kernel, setting or cache rounds more. The
trainer's plain forward takes over what the trainer declares (temperature, autocast, dtypes of head,
router and log-probabilities): a declared setting is no fault. A ``gap``, a side in float32 against
the reference, is free of rounding at the precision of the run: it sees other weights and other
functions at a ten-thousandth of its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mismatch.analysis.displaced import (
    CORRELATION,
    EXCESS,
    EXCESS_SIZE,
    LEVELS,
    RMS,
    SIZE,
    Bound,
    correlation_terms,
    device_class,
    displaced,
    excess_terms,
    levels_for,
)
from mismatch.analysis.levels import DEQUANTISED, NOT_QUANTISED, PRECISION, short_name
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import (
    LATER_LAYERS,
    Displaced,
    Evidence,
    FarToken,
    FarTokens,
    Finding,
    Gap,
    Leg,
    OneSide,
    Side,
    Square,
    Standing,
    check_id,
)
from mismatch.keys import (
    FLOAT32,
    GRAD,
    PLAIN,
    PLAIN_TRAINER,
    REFERENCE,
    REGROUPED,
    TRAIN,
    TRAINER_FLOAT32,
    Key,
    yardsticks,
)
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.specs import CheckSpec
from mismatch.types import (
    WITHOUT_MLA,
    Bools,
    Estimate,
    Floats,
    Ints,
    NotTested,
    Scoring,
    SideFacts,
)

FP8_KV = "-fp8kv"
# In names of vLLM's kernels for MXFP4 experts: those that quantise the activations too.
NARROW = ("MXFP8", "MXFP4_FP8", "MXFP4_MXFP4", "DEEPGEMM", "DEEP_GEMM")
FP8_NAMES = ("fp8", "fp8_e4m3", "float8_e4m3fn", "e4m3")
ONE_CODE = 0.9  # correlation of roundings of one arithmetic; other kernels on CPUs: 0.3 to 0.65
SAME_FAULT = "not meaningful: its float32 pass, which it is compared with, has the same fault"
BITS = {"bf16": 8, "fp16": 11, "fp32": 24}  # of a significand
# Nats that one token of two implementations in float32 may always differ by. Clean runs of dense
# models on CPUs reach 1.5e-5 (qwen3, phi); larger models may have 50 times the rounding of float32.
LEAST_FAR = 1e-3
SAME_VALUES = frozenset(("as-stored", "bf16"))  # forms of one checkpoint that hold equal values


@dataclass(frozen=True, slots=True)
class PlainCost:
    """What a plain forward costs, and what float32 is expected to cost; None: not measured."""

    nats: float | None
    """mean |plain - reference|"""
    floor: float | None
    """The same, scaled by the ratio of the two precisions' roundings."""
    largest: float | None = None
    """Of |plain - reference|"""
    largest_floor: float | None = None
    """The same, scaled likewise."""

    @classmethod
    def of(cls, scorings: Mapping[str, Scoring], reference: Floats) -> PlainCost:
        """Return it for the lowest precision among the scorings.

        Args:
            reference: [A] log-probabilities in float32.
        """
        for dtype in reversed(PRECISION[1:]):
            plain = scorings.get(Key.of(PLAIN, precision=dtype))
            if plain is not None:
                sizes = np.abs(plain.logprobs - reference)
                cost, largest = float(sizes.mean()), float(sizes.max())
                finer = 2.0 ** (BITS[dtype] - BITS["fp32"])
                return cls(cost, cost * finer, largest, largest * finer)
        return cls(None, None)


def measure(run: RunArtefacts, spec: CheckSpec) -> Square | NotTested:
    """Return the square of the scorings that a run holds."""
    what = "rounding or fault (the square)"
    if spec.rollout.engine.engine == "recorded":
        return NotTested(what, "a dump cannot tell a fault from rounding")
    if spec.quick:
        return NotTested(what, "left out by --depth quick")
    if not spec.noise_floor:
        return NotTested(what, "left out by --no-noise-floor")
    if REFERENCE not in run.usable:
        reason = run.refused.get(REFERENCE, "the run holds no float32 reference")
        return NotTested(what, reason)
    square = _Corners(run, spec).square()
    if not square.findings:
        return NotTested(
            what, ", ".join(f"{entry.what} ({entry.reason})" for entry in square.not_judged)
        )
    return square


def precision_of(facts: SideFacts) -> str | None:
    """Return the precision that a side computes in: "bf16", "fp16", "fp32", or with "-fp8kv".

    None where it is not known, or where no plain forward rounds as it does (quantised activations,
    other caches). Weights in MXFP4 are dequantised before they are multiplied.
    """
    dtype = short_name(facts.get("autocast")) or short_name(facts.get("dtype"))
    cache, weights = short_name(facts.get("kv_cache_dtype")), short_name(facts.get("quantization"))
    narrow = facts.get("flashinfer_mxfp4_moe_precision", "bf16") != "bf16"  # activations
    narrow = narrow and facts.get("moe_runner_backend") == "flashinfer_mxfp4"
    narrow = narrow or any(name in (facts.get("moe_backend") or "") for name in NARROW)
    if narrow or dtype not in PRECISION or weights not in NOT_QUANTISED | DEQUANTISED:
        return None
    if cache in NOT_QUANTISED:
        return dtype
    return f"{dtype}{FP8_KV}" if cache in FP8_NAMES else None


def gap_side(exact: Scoring, scorings: Mapping[str, Scoring], level: float) -> OneSide:
    """Return the side that is off where a side's float32 differs from the reference.

    The trainer's own gap names the trainer: it shares its model code with the reference. The
    engine's names neither side: the engine's implementation or the trainer's model code may be the
    one that is wrong, unless a third implementation in float32 agrees with one of the two.

    Args:
        level: nats of mean |delta| up to which two implementations agree.
    """
    if Key(exact.name).side == TRAIN:
        return "trainer"
    reference = scorings[REFERENCE]
    for name, third in scorings.items():
        own = Key(name).side in (TRAIN, PLAIN, *(Key(s.name).side
                                                         for s in (exact, reference)))  # fmt: skip
        if own or precision_of(third.fingerprint) != "fp32" or not same_law(third, reference):
            continue
        engine, trainer = (
            float(np.abs(third.logprobs - other.logprobs).mean()) <= level
            for other in (exact, reference)
        )
        if engine != trainer:
            return "trainer" if engine else "engine"
    return "either"


class _Corners:
    """The scorings of a run by their place in the square."""

    def __init__(self, run: RunArtefacts, spec: CheckSpec, of: Ints | None = None) -> None:
        self.run, self.spec, self.usable = run, spec, run.usable
        self.numbers = np.arange(run.rollout.n_sequences) if of is None else of  # in the whole run
        self.reference = run.usable[REFERENCE]
        self.plain = PlainCost.of(run.usable, self.reference.logprobs)
        self.engine = Key(run.decode.name).side
        actions = run.rollout.actions
        self.estimator = Estimator(
            run.rollout.sequence_of_token[actions], run.rollout.distinct_prompts, seed=spec.seed
        )
        self.missing: list[NotTested] = []
        self.bounds: dict[str, tuple[Bound, FarTokens | None]] = {}  # of each gap's left scoring
        self.device = device_class(run.decode.fingerprint, run.train.fingerprint)

    def square(self) -> Square:
        levels = levels_for(self.device)
        legs, gaps = tuple(self.legs()), tuple(self.gaps())
        excess = Bound(levels.excess, levels.excess_failed)
        of_legs = {leg: judged(leg, excess) for leg in legs}
        of_gaps = {gap.left: judged(gap, *self.bounds[gap.left]) for gap in gaps}
        measured = {check_id(finding) for finding in (*of_legs.values(), *of_gaps.values())}
        wrong = {name for name, finding in of_gaps.items() if finding.standing == "beyond"}
        # Against a float32 pass of that side, which has the same fault, only rounding shows.
        blind = {leg for leg in legs if leg.exact in wrong and of_legs[leg].standing != "beyond"}
        sides = dict.fromkeys(leg.side for leg in legs if leg in blind)
        self.missing += [NotTested(f"excess of the {side}", SAME_FAULT) for side in sides]
        findings = [finding for leg, finding in of_legs.items() if leg not in blind]
        findings += of_gaps.values()
        return Square(
            device=self.device,
            calibrated=self.device in LEVELS,
            legs=tuple(leg for leg in legs if leg not in blind),
            gaps=gaps,
            correlation=self.correlation(legs),
            nearest=self.nearest(legs),
            findings=tuple(findings),
            displaced=tuple(
                displaced
                for leg in legs
                for displaced in self.displaced(leg)
                if leg not in blind or displaced.standing == "beyond"
            ),
            declared=self.declared(),
            not_judged=tuple(self.missing),
            unmeasured=self.unmeasured(measured),
            seconds={
                name: float(scoring.fingerprint["seconds"])
                for name, scoring in (self.usable | self.run.few).items()
                if Key(name).side == PLAIN
                or name in (REFERENCE, self.float32_name, TRAINER_FLOAT32)
                if scoring.fingerprint.get("seconds") is not None
            },
        )

    def unmeasured(self, measured: set[str]) -> tuple[str, ...]:
        """Return checks that this run should have and lacks; a side in float32 has no excess."""
        wanted = ["implementation-gap", "implementation-gap-trainer"]
        for side, scoring in zip(SIDES, (self.run.decode, self.run.train), strict=True):
            if precision_of(scoring.fingerprint) != "fp32":
                wanted.append(f"excess-{side}")
        return tuple(id for id in wanted if id not in measured)

    @property
    def float32_name(self) -> str:
        return Key.of(self.engine, precision=FLOAT32)

    # ------------------------------------------------------------ excess

    def legs(self) -> Iterator[Leg]:
        """Yield every side that rounds, once: passes that agree bit for bit are one."""
        of_engine = [self.run.decode.name, Key.of(self.engine, "prefill")]
        of_trainer: list[str] = [TRAIN, REGROUPED, GRAD]
        sides: list[tuple[Side, list[str], Scoring | None]] = [
            ("engine", of_engine, self.engine_in_float32()),
            ("trainer", of_trainer, self.trainer_in_float32()),
        ]
        for side, names, exact in sides:
            its_float32 = self.reference if exact is None or rounds(exact) else exact
            seen: list[Floats] = []
            for name in names:
                scoring = self.usable.get(name)
                if scoring is None or any(np.array_equal(scoring.logprobs, s) for s in seen):
                    continue
                seen.append(scoring.logprobs)
                yield from self.leg(side, scoring, its_float32)
        # Other engines that scored the same tokens (mismatch score --engine).
        for name, scoring in self.usable.items():
            key = Key(name)
            if key.kind == "prefill" and key.side != self.engine:
                yield from self.leg("other-engine", scoring, self.reference)

    def leg(self, side: Side, scoring: Scoring, exact: Scoring) -> Iterator[Leg]:
        precision, reference = precision_of(scoring.fingerprint), self.reference
        if precision == "fp32":
            return  # its distance from the reference is an implementation gap
        names = yardsticks(scoring.fingerprint, precision, side == "trainer")
        name = next((each for each in names if each in self.usable), names[-1])
        plain = self.usable.get(name)
        why = ""
        if precision is None:
            why = "no plain forward rounds as it does"
            if scoring.fingerprint.get("dtype") is None:
                why = "it does not say its dtype"
        elif plain is None:
            why = self.run.refused.get(name, f"the run holds no scoring {name}")
        elif not all(same_law(each, reference) for each in (scoring, exact, plain)):
            why = "its logprobs and float32's differ in temperature, cuts or penalty"
        elif np.array_equal(plain.logprobs, reference.logprobs):
            why = f"{plain.name} equals {REFERENCE}: no yardstick"
        if why or plain is None:
            self.missing.append(NotTested(f"excess of {scoring.name}", why))
            return
        terms = excess_terms(scoring.logprobs - exact.logprobs, plain.logprobs - reference.logprobs)
        metrics = (RMS, SIZE, EXCESS, EXCESS_SIZE)
        estimates = self.estimator.all(metrics, {"terms": terms})
        numbers = (estimates[metric.name] for metric in metrics)
        yield Leg(side, scoring.name, exact.name, plain.name, *numbers)

    def displaced(self, leg: Leg) -> Iterator[Displaced]:
        away, yardstick = (
            self.usable[left].logprobs - self.usable[right].logprobs
            for left, right in ((leg.scoring, leg.exact), (leg.plain, REFERENCE))
        )
        rollout = self.run.rollout
        sequence = rollout.sequence_of_token[rollout.actions]
        prompt = rollout.distinct_prompts[sequence]
        levels = levels_for(self.device)
        return displaced(leg.side, leg.scoring, away, yardstick, sequence, prompt, levels)

    def declared(self) -> Estimate | None:
        """Return what the trainer's declared settings cost in addition to its precision."""
        own = self.usable.get(PLAIN_TRAINER)
        precision = precision_of(self.run.train.fingerprint)
        plain = self.usable.get(Key.of(PLAIN, precision=precision or ""))
        if own is None or plain is None:
            return None
        terms = excess_terms(*(each.logprobs - self.reference.logprobs for each in (own, plain)))
        return self.estimator.one(EXCESS, {"terms": terms})

    def correlation(self, legs: tuple[Leg, ...]) -> Estimate | None:
        """Of the two sides' roundings, from the first leg of each; None without both."""
        firsts = [next((leg for leg in legs if leg.side == side), None) for side in SIDES]
        apart = self.run.decode.fingerprint.get("adapter", {}).get("as") == "own"
        if None in firsts or apart:  # an adapter that is not merged rounds elsewhere
            return None
        left, right = (
            self.usable[leg.scoring].logprobs - self.usable[leg.exact].logprobs
            for leg in firsts
            if leg is not None
        )
        return self.estimator.one(CORRELATION, {"terms": correlation_terms(left, right)})

    def nearest(self, legs: tuple[Leg, ...]) -> Estimate | None:
        """Of a side's roundings with the plain forward's, the larger; None without both sides."""
        found = []
        for side in SIDES:
            for leg in [leg for leg in legs if leg.side == side][:1]:
                own, plain = (
                    self.usable[left].logprobs - self.usable[right].logprobs
                    for left, right in ((leg.scoring, leg.exact), (leg.plain, REFERENCE))
                )
                terms = correlation_terms(own, plain)
                alike = self.estimator.one(CORRELATION, {"terms": terms})
                found += [] if alike is None else [alike]
        # A side that computes as the plain forward does says nothing of how far correlations fall.
        apart = [each for each in found if each.value < ONE_CODE] or found
        return max(apart, key=lambda each: each.value) if len(found) == 2 else None

    # ------------------------------------------------------------ implementation gap

    def engine_in_float32(self) -> Scoring | None:
        """Return the engine's implementation in float32: started so, or always running so."""
        if self.float32_name in self.usable:
            return self.usable[self.float32_name]
        for name in (self.run.decode.name, Key.of(self.engine, "prefill")):
            scoring = self.usable.get(name)
            if scoring is not None and precision_of(scoring.fingerprint) == "fp32":
                return scoring
        return None

    def trainer_in_float32(self) -> Scoring | None:
        """Return the trainer's implementation in float32, or None where the run holds none."""
        if precision_of(self.run.train.fingerprint) == "fp32":
            return self.run.train
        return self.usable.get(TRAINER_FLOAT32)

    def gaps(self) -> Iterator[Gap]:
        for whose, exact, name in (
            (self.engine, self.engine_in_float32(), self.float32_name),
            ("the trainer", self.trainer_in_float32(), TRAINER_FLOAT32),
        ):
            how, corners, unseen = "", self, list[NotTested]()
            if exact is None and name in self.run.few:
                corners, exact = self.first_samples(name), self.run.few[name]
                sizes = [len(each.reference.logprobs) for each in (corners, self)]
                counts = "{:,} of {:,} tokens".format(*sizes)
                why = f"{counts}, of the first sample of each prompt: all take over a minute"
                unseen = [NotTested(f"float32 of {whose} in other samples", why)]
            elif exact is None and name == self.float32_name and (first := self.first_layers()):
                corners, exact = first, first.engine_in_float32()
                if exact is not None:
                    checked = "{} of {} layers".format(*exact.fingerprint["layers"])
                    why = f"function checked on {checked}: there is no room for more in float32"
                    unseen = [NotTested(LATER_LAYERS, why)]
            if exact is not None:
                reason = incomparable(exact, corners.reference)
            elif not (reason := self.run.refused.get(name, "")):
                reason = f"the run holds no scoring {name}"
                how = "run mismatch check" if name == self.float32_name else ""
            if exact is None or reason:
                self.missing.append(NotTested(f"implementation gap of {whose}", reason, how))
            else:
                self.missing += unseen
                named = NotTested.of(exact.fingerprint)
                self.missing += [each for each in named if each.what == WITHOUT_MLA.what]
                self.bounds[exact.name] = corners.gap_bounds(), corners.far_tokens(exact)
                yield corners.gap(exact)

    def first_samples(self, name: str) -> _Corners:
        """Return the corners of a scoring that was made of the first samples alone."""
        rollout, few = self.run.rollout, self.run.rollout.first_samples
        kept = np.isin(rollout.sequence_of_token[rollout.actions], few)
        usable = {
            each: replace(s, token_ids=s.token_ids[kept], logprobs=s.logprobs[kept], routing=None)
            for each, s in self.usable.items()
        }
        usable[name] = self.run.few[name]
        return _Corners(replace(self.run, rollout=rollout.only(few), usable=usable), self.spec, few)

    def first_layers(self) -> _Corners | None:
        """Return the corners of the first layers alone; None: the run does not hold all of them."""
        own: dict[str, Scoring] = {
            Key.of(Key(name).side, "", Key(name).precision): scoring
            for name, scoring in self.run.first.items()
        }
        held = {str(each.fingerprint.get("layers")) for each in own.values()}
        if len(held) != 1 or "None" in held or not {self.float32_name, REFERENCE} <= own.keys():
            return None
        corners = _Corners(replace(self.run, usable=own), self.spec)
        return None if corners.plain.nats is None else corners

    def gap(self, scoring: Scoring) -> Gap:
        side = gap_side(scoring, self.usable, self.gap_bounds().failed)
        delta = self.reference.logprobs - scoring.logprobs
        names = ("logprob_abs_diff_mean", "k3_kl", "logprob_abs_diff_max")
        estimates = self.estimator.all([METRICS[name] for name in names], {"delta": delta})
        size, k3, largest = (estimates[name] for name in names)
        return Gap(side, scoring.name, self.reference.name, size, k3, largest, self.plain.floor)

    def gap_bounds(self) -> Bound:
        """Return the levels of a gap, nats."""
        return levels_for(self.device).gap_bounds(self.plain.floor, self.plain.nats)

    def far_tokens(self, exact: Scoring) -> FarTokens | None:
        """Return the tokens of a gap that rounding and differing experts do not explain, if any."""
        rerouted, rollout = self.rerouted(exact), self.run.rollout
        if rerouted is None:
            return None
        largest = levels_for(self.device).gap_bounds(self.plain.largest_floor, self.plain.largest)
        bound = max(LEAST_FAR, largest.failed)
        sizes = np.where(rerouted, 0.0, np.abs(exact.logprobs - self.reference.logprobs))
        far = np.argsort(-sizes, kind="stable")[: int((sizes > bound).sum())]
        if not len(far):
            return None
        tokens = rollout.actions[far[:3]]
        sequences = rollout.sequence_of_token[tokens]
        places = self.numbers[sequences], tokens - rollout.offsets[sequences]
        numbers = (rollout.token_ids[tokens], *places)
        rows = zip(*(each.tolist() for each in (*numbers, sizes[far[:3]])), strict=True)
        return FarTokens(bound, len(far), tuple(FarToken(*row) for row in rows))

    def rerouted(self, exact: Scoring) -> Bools | None:
        """Return which tokens [A] other experts may have moved: theirs, or an earlier token's.

        None where that is not known: float32 alone can then move a token by any size.
        """
        facts, rollout = self.reference.fingerprint, self.run.rollout
        own, other = exact.routing, self.reference.routing
        if facts.get("moe") is False and "sparse_top_k" not in facts:
            return np.zeros(rollout.n_actions, bool)
        if "sparse_top_k" in facts or own is None or other is None:
            return None
        if (own.layers, own.top_k) != (other.layers, other.top_k):
            return None
        ids = np.sort(own.ids, axis=2), np.sort(other.ids, axis=2)
        same = own.present & other.present & (ids[0] == ids[1]).all(axis=(1, 2))
        changed = np.concatenate([[0], np.cumsum(~same)])  # before each token
        actions = rollout.actions
        return changed[actions] > changed[rollout.offsets[rollout.sequence_of_token[actions]]]


SIDES: tuple[Side, ...] = ("engine", "trainer")


def rounds(scoring: Scoring) -> bool:
    """Whether it is known to compute below float32, whatever it was asked."""
    return precision_of(scoring.fingerprint) not in (None, "fp32")


def incomparable(exact: Scoring, reference: Scoring) -> str:
    """Return why a difference of two scorings in float32 says nothing of functions; "": it does."""
    if rounds(exact):
        return f"{exact.name} was not computed in float32, but in {precision_of(exact.fingerprint)}"
    if not same_law(exact, reference):
        return "its logprobs and float32's differ in temperature, cuts or penalty"
    forms = {each.fingerprint.get("weights_form") or "as-stored" for each in (exact, reference)}
    if len(forms) > 1 and not forms <= SAME_VALUES:
        return "the two sides hold weights in different forms"
    return ""


def same_law(left: Scoring, right: Scoring) -> bool:
    """Return whether both logprobs are of one temperature, and cut and penalised or not alike."""

    def law(scoring: Scoring) -> tuple[float | None, bool, bool]:
        facts = scoring.fingerprint
        temperature = facts.get("logprobs_temperature")
        rounded = None if temperature is None else round(float(temperature), 9)
        return rounded, bool(facts.get("logprobs_truncated")), bool(facts.get("logprobs_penalised"))

    return law(left) == law(right)


def judged(measured: Leg | Gap, bound: Bound, far: FarTokens | None = None) -> Finding:
    """Judge one number: beyond where the whole interval fails, within where all of it passes.

    Undecided where the value does not pass; wide where the value passes and its interval does not:
    a fault could hide there.

    Args:
        far: tokens that fail whatever the mean is.
    """
    kind: Evidence = "excess" if isinstance(measured, Leg) else "gap"
    value = measured.excess if isinstance(measured, Leg) else measured.size
    scoring = measured.scoring if isinstance(measured, Leg) else measured.left
    standing: Standing = "wide"
    if far or (value.low is not None and value.low > bound.failed):
        standing = "beyond"
    elif not value.value <= bound.passed:  # or not a number
        standing = "undecided"
    elif value.high is not None and value.high <= bound.passed:
        standing = "within"
    return Finding(measured.side, kind, scoring, value, bound.passed, standing, far)
