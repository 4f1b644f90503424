"""Artefacts of a run in, a Report out: compared, judged, with what was not tested."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.cause_results import places_of
from mismatch.analysis.causes import (
    cause_checks,
    led_by,
    of_sides_at_fault,
    of_this_machine,
    others_of,
    without,
)
from mismatch.analysis.comparison import compare, is_sampling_law
from mismatch.analysis.diagnosis.declared import (
    attention_trial,
    rope_length,
    sharding_checks,
)
from mismatch.analysis.diagnosis.digests_by_passes import with_passes
from mismatch.analysis.diagnosis.pass_checks import (
    by_finiteness,
    not_finite,
    pass_checks,
    policy_entropy,
)
from mismatch.analysis.diagnosis.routes import routing_checks
from mismatch.analysis.diagnosis.semantics import input_checks, semantic_checks
from mismatch.analysis.exact_kl import exact_checks, exact_reason
from mismatch.analysis.explained import lead_of, led
from mismatch.analysis.levels import (
    column_for,
    incomplete,
    judge,
    require_applied,
    verdict,
    without_short,
)
from mismatch.analysis.plugins import RunArtefacts, analyses
from mismatch.analysis.results import LongSequence, Square
from mismatch.analysis.square import measure as measure_square
from mismatch.analysis.square_checks import square_checks
from mismatch.analysis.thresholds import Thresholds
from mismatch.analysis.two_passes import mark_injected
from mismatch.attempts import Attempts, internal_error
from mismatch.errors import WrongAnswer
from mismatch.experiments.scoring_passes import first_passes, training_passes, wants_long
from mismatch.facts import replay_of
from mismatch.keys import (
    ALONE,
    FIX,
    FLOAT32,
    GRAD,
    NEW_REPLAYED,
    REFERENCE,
    REGROUPED,
    REPEATED,
    REPLAYED,
    SAMPLES,
    TRAIN,
    TRAINER_FLOAT32,
    WEIGHTS,
    Key,
)
from mismatch.metrics.routing_pairs import keys_noise, router_noise
from mismatch.models import named
from mismatch.models.moe import CAPTURED, DENSE, NOT_ASKED
from mismatch.models.sampling_defaults import not_applied
from mismatch.pipeline.document import (
    COMPARISON,
    COMPARISON_SCHEMA,
    comparisons_from_json,
    comparisons_to_json,
)
from mismatch.pipeline.on_disk import with_disk
from mismatch.pipeline.preflight import require_a_law
from mismatch.pipeline.tokens import token_table
from mismatch.plugins import Analysis, features, step_label
from mismatch.processes.stages import LABEL as FLOAT32_ENGINE
from mismatch.run import manifest, store
from mismatch.run.manifest import damage_named
from mismatch.run.messages import pass_label, read_error
from mismatch.run.provenance import provenance
from mismatch.specs import OWN_SCORER, CheckSpec, spec_hash, to_dict
from mismatch.types import (
    EXACT_KL,
    KEYS,
    PREFILL,
    ROUTES,
    Check,
    Comparison,
    Judgement,
    NotTested,
    Report,
    Rollout,
    Scoring,
    SidePair,
    selecting_rows,
)
from mismatch.version import __version__

if TYPE_CHECKING:
    import pandas as pd


OUTPUTS = {COMPARISON, store.TOKENS, "report.json", "report.html", "report.md"}
SIDE_PAIRS = (REPEATED, REGROUPED, ALONE, GRAD)  # the trainer against itself


@dataclass(frozen=True)
class Artefacts:
    """What the stages left in a run directory.

    Attributes:
        train: the trainer's scoring that is judged.
        prefill: the engine's own rescoring, if any.
        first: scorings by the first layers alone, if the engine in float32 could hold no more.
        few: scorings of the first sample of each prompt, if all would have taken long.
    """

    rollout: Rollout
    scorings: dict[str, Scoring]
    decode: Scoring
    train: Scoring
    prefill: Scoring | None
    first: dict[str, Scoring] = field(default_factory=dict)
    few: dict[str, Scoring] = field(default_factory=dict)

    @classmethod
    def load(cls, run_dir: Path, spec: CheckSpec) -> Artefacts:
        """Read them all.

        Raises:
            MismatchError: one is missing (with the command that makes it) or damaged.
        """
        rollout = store.load_rollout(run_dir)
        engine = spec.rollout.engine.engine
        decode = store.load_scoring(run_dir, Key.of(engine, "decode"))
        train = store.load_scoring(run_dir, TRAIN)
        decode, train = damage_named(f"a file of {run_dir}")(with_disk)(run_dir, decode, train)
        names = [n for n in store.scoring_names(run_dir) if Key(n).side != FIX]
        rest = {n: store.load_scoring(run_dir, n) for n in names if n not in (decode.name, TRAIN)}
        scorings = {**rest, decode.name: decode, TRAIN: train}
        scorings = {name: scorings[name] for name in sorted(scorings)}
        sides = with_passes(decode, train, rest)
        first = {n: store.load_scoring(run_dir, n) for n in store.scoring_names(run_dir, True)}
        part = run_dir / SAMPLES
        few = {name: store.load_scoring(part, name) for name in store.scoring_names(part)}
        prefill = scorings.get(Key.of(engine, "prefill"))
        return cls(rollout, scorings, *sides, prefill, first, few)


def build_report(
    run_dir: Path,
    spec: CheckSpec,
    thresholds: Thresholds | None = None,
    again: bool = False,
    attempts: Attempts | None = None,
) -> tuple[Report, pd.DataFrame]:
    """Compare what the stages left in ``run_dir``; leaves comparison.json and tokens.parquet.

    Args:
        again: compare again even if a comparison of these artefacts exists.
        attempts: keeps what has failed; the numbers are in the report all the same.

    Returns:
        The report, and the token table (one row per action token).
    """
    attempts, artefacts = attempts or Attempts(), Artefacts.load(run_dir, spec)
    require_a_law(artefacts.rollout.sampling)
    checks = input_checks(artefacts.rollout, artefacts.decode, artefacts.train)
    comparisons, floor = compare_artefacts(run_dir, spec, artefacts, checks, again)
    if comparisons:
        checks += checks_of(spec, artefacts, comparisons[0], attempts)
    checks += wrong_answers(run_dir, spec, artefacts.scorings)
    stored = damage_named(f"a file of {run_dir}")
    left = [
        (each, attempts.make(each.id, stored(each.call), "from_run", run_dir, spec, otherwise=None))
        for each in analyses()
    ]
    left = [(analysis, result) for analysis, result in left if result is not None]
    for analysis, result in left if comparisons else ():
        held = comparisons[0].metrics
        of_all = attempts.make(analysis.id, analysis.call, "measured", result, held, otherwise=None)
        if of_all:
            comparisons[0] = replace(comparisons[0], metrics=of_all)
    column = column_for(artefacts.decode.fingerprint, artefacts.train.fingerprint)
    if comparisons:
        require_applied(comparisons[0], column, thresholds)
    judgements: tuple[Judgement, ...] = ()
    if comparisons:
        asked = comparisons[0], column, thresholds
        judgements = attempts.make("levels", judge, *asked, otherwise=())
        column = column if judgements else None
    results, unseen = measured(run_dir, spec, artefacts, comparisons, attempts)
    for analysis, result in left:
        decided = attempts.make(
            analysis.id, analysis.call, "judged", result, judgements, otherwise=None
        )
        judgements = decided or judgements
    judgements, too_short = without_short(judgements, artefacts.rollout)
    square = results.get("square")
    causes = [
        cause
        for analysis, result in left
        for cause in attempts.make(analysis.id, analysis.call, "causes", result, otherwise=()) or ()
    ]
    found = attempts.make("causes", of_sides_at_fault, causes, square, otherwise=[])
    told = [
        cause
        for analysis, result in left
        for cause in attempts.make(analysis.id, analysis.call, "told", result, otherwise=()) or ()
    ]
    if (found or told) and "causes" in results:
        before = results["causes"]
        made = attempts.make("causes", led_by, before, [*found, *told], otherwise=before)
        shown = {cause.id for cause in told}  # by a dump itself
        ranked = sorted(made.ranked, key=lambda cause: cause.id not in shown)
        results["causes"] = replace(made, ranked=tuple(ranked))
    for analysis, result in left:
        cannot = attempts.make(analysis.id, analysis.call, "excluded", result, otherwise=()) or ()
        if cannot and "causes" in results:
            given = results["causes"], analysis.id, cannot
            results["causes"] = attempts.make("causes", without, *given, otherwise=given[0])
    if "causes" in results:
        before, trainer = results["causes"], artefacts.train.fingerprint
        made = attempts.make("causes", of_this_machine, before, trainer, otherwise=before)
        results["causes"] = made
    places = places_of(found)
    if recorded := spec.rollout.engine.engine == "recorded":  # nothing here can run it again
        unseen = [replace(entry, how="") for entry in unseen]
        if (causes_found := results.get("causes")) is not None:
            bare = tuple(replace(entry, how="") for entry in causes_found.not_tested)
            results["causes"] = replace(causes_found, not_tested=bare)
    named_causes = results.get("causes"), bool(spec.explain) or recorded
    own_trainer = spec.train.scorer == OWN_SCORER
    checks += attempts.make("square", square_checks, square, places, own_trainer, otherwise=[])
    checks += attempts.make("causes", cause_checks, *named_causes, otherwise=[])
    for analysis, result in left:
        results[analysis.id] = result
        read = attempts.make(analysis.id, analysis.call, "checks", result, otherwise=()) or ()
        # What it read fails before what follows from it in the numbers.
        first = [check for check in read if analysis.told and check.status == "failed"]
        checks = [*first, *checks, *(check for check in read if check not in first)]
        unseen += not_seen(analysis, result)
    for feature in features():
        if feature.check_step and (error := read_error(run_dir, step_label(feature))) is not None:
            unseen.append(NotTested(feature.name, error.message, error.fix))
    open_question = "" if column == "fp32" else without_square(spec, comparisons, results)
    long: LongSequence | None = results.get("long_sequence")
    reach = 0 if long is None else long.tested
    missing = [*not_tested(spec, artefacts.rollout, artefacts.scorings, checks, reach)]
    missing += unseen + too_short
    missing += without_room(run_dir, spec, artefacts.scorings | artefacts.few)
    attempts.failed += _deleted(run_dir)
    judged = verdict(judgements, checks, column, open_question)
    lead = attempts.make("causes", lead_of, results.get("causes"), checks, otherwise=None)
    judged = led(judged, lead, checks)
    for analysis, result in left:
        more = attempts.make(analysis.id, analysis.call, "reason", result, otherwise="")
        judged = replace(judged, reason=f"{judged.reason}; {more}") if more else judged
    report = Report(
        model=named(spec.rollout.engine.model),
        verdict=mark_injected(judged, artefacts.scorings),
        fingerprints=named({name: s.fingerprint for name, s in artefacts.scorings.items()}),
        comparisons=tuple(comparisons),
        noise_floor=tuple(floor),
        checks=tuple(checks),
        not_tested=tuple(missing),
        run=named(facts(spec, artefacts.rollout, "")),
    ).with_analyses(**results)
    return incomplete(report, attempts.failed), store.load_tokens(run_dir)


def checks_of(
    spec: CheckSpec, artefacts: Artefacts, headline: Comparison, attempts: Attempts
) -> list[Check]:
    """Return all checks of artefacts that passed the input checks, but for those of the square."""
    sides = artefacts.rollout, artefacts.decode, artefacts.train
    usable, _ = by_finiteness(artefacts.scorings)
    others = others_of(usable, artefacts.decode, artefacts.train)
    ranks, facts_of_trainer = spec.nproc_per_node, artefacts.train.fingerprint
    return [
        *semantic_checks(*sides, headline.metrics["ratio_mean"], attempts, others),
        *attempts.make("exact KL", exact_checks, headline, otherwise=[]),
        *attempts.make("routes", routing_checks, *sides, otherwise=[]),
        *pass_checks(*sides, artefacts.scorings, attempts),
        *policy_entropy(headline),
        *rope_length(artefacts.decode.fingerprint, spec.rollout.engine.max_model_len is not None),
        *attempts.make("attention", attention_trial, artefacts.scorings, otherwise=[]),
        *attempts.make("sharding", sharding_checks, ranks, facts_of_trainer, otherwise=[]),
    ]


def without_square(spec: CheckSpec, comparisons: list[Comparison], results: dict[str, Any]) -> str:
    """Return why there is no square, "" where there is one.

    Between two sides in float32 the headline itself is the gap of the two implementations.
    """
    if "square" in results or not comparisons:
        return ""
    if spec.rollout.engine.engine == "recorded":
        return "a dump cannot tell a fault from rounding (mismatch read-rollouts, then score, can)"
    reason = "the float32 passes were left out (--depth quick)" if spec.quick else ""
    if not reason and not spec.noise_floor:
        reason = "the float32 passes were left out (--no-noise-floor)"
    return reason or "the run has no usable float32 pass"


def measured(
    run_dir: Path,
    spec: CheckSpec,
    held: Artefacts,
    comparisons: list[Comparison],
    attempts: Attempts,
) -> tuple[dict[str, Any], list[NotTested]]:
    """Return the results of all analyses by id, and what they could not see.

    None of them where nothing was compared.
    """
    if not comparisons:
        return {}, []
    run = run_artefacts(run_dir, spec, held, comparisons[0])
    results: dict[str, Any] = {}
    missing: list[NotTested] = []
    for analysis in analyses():
        result = attempts.make(analysis.id, analysis.call, "measure", run, spec, otherwise=None)
        if isinstance(result, NotTested):
            missing.append(result)
        elif result is not None:
            results[analysis.id] = result
            missing += not_seen(analysis, result)
    failures = results["causes"].failures if "causes" in results else ()
    attempts.failed += [internal_error(f"detector {f.detector}", f.error) for f in failures]
    return results, missing


def not_seen(analysis: Analysis, result: Any) -> list[NotTested]:
    """Return what a result could not see; a sentence goes by the name of the analysis."""
    return [
        each if isinstance(each, NotTested) else NotTested(analysis.id, str(each))
        for each in analysis.not_seen(result)
    ]


def run_artefacts(
    run_dir: Path, spec: CheckSpec, held: Artefacts, headline: Comparison
) -> RunArtefacts:
    """Return what analyses read: scorings that can be trusted, and why others cannot."""
    usable, refused = by_finiteness(held.scorings)
    if (error := read_error(run_dir, FLOAT32_ENGINE)) is not None:
        refused.setdefault(Key.of(spec.rollout.engine.engine, precision=FLOAT32), error.message)
    if (error := read_error(run_dir, pass_label(TRAINER_FLOAT32))) is not None:
        refused.setdefault(TRAINER_FLOAT32, error.message)
    for pass_ in first_passes(spec, 1):
        if (error := read_error(run_dir, pass_label(pass_.name))) is not None:
            name = Key.of(spec.rollout.engine.engine, precision=FLOAT32)
            refused.setdefault(name, f"of the first layers: {error.message}")
    first, (few, off) = by_finiteness(held.first)[0], by_finiteness(held.few)
    refused |= off
    sides = held.rollout, held.decode, held.train
    return RunArtefacts(*sides, headline, usable, refused, first, few)


def square_of(run_dir: Path, spec: CheckSpec) -> Square | None:
    """Return the square of a run before its report is made; None where it has none.

    Raises:
        MismatchError: artefacts are missing or damaged.
    """
    held = Artefacts.load(run_dir, spec)
    sides = held.decode, held.train
    if any(check.status == "failed" for check in input_checks(held.rollout, *sides)):
        return None
    headline = compare(
        held.rollout, *sides, sampled_by_left=False, seed=spec.seed, headline_only=True
    )
    result = measure_square(run_artefacts(run_dir, spec, held, headline), spec)
    return result if isinstance(result, Square) else None


def compare_artefacts(
    run_dir: Path, spec: CheckSpec, held: Artefacts, checks: list[Check], again: bool
) -> tuple[list[Comparison], list[SidePair]]:
    """Comparisons and noise floor, from ``comparison.json`` where that is of these artefacts."""
    made_by = f"{__version__}:{spec_hash(spec)}"
    inputs = [store.ROLLOUT, *(store.scoring_file(name) for name in held.scorings)]
    made = [manifest.is_current(run_dir, n, made_by, inputs) for n in (COMPARISON, store.TOKENS)]
    if again or not all(made):
        texts = store.load_vocabulary(run_dir)
        sound = not any(check.status == "failed" for check in checks)
        pairs = compare_all(held, spec.seed, texts) if sound else ([], [])
        document = {"schema": COMPARISON_SCHEMA, **comparisons_to_json(*pairs)}
        reference = held.scorings.get(REFERENCE)
        tokens = token_table(run_dir, held.rollout, held.decode, held.train, reference)
        entry: dict[str, Any] = {"made_by": made_by, "inputs": inputs}
        store.save_tokens(run_dir, tokens, **entry)
        store.save_document(run_dir, COMPARISON, document, schema=COMPARISON_SCHEMA, **entry)
    # Always through the file: a resumed run reports the numbers that an uninterrupted one does.
    with damage_named(run_dir / COMPARISON):
        return comparisons_from_json(store.load_document(run_dir, COMPARISON))


def compare_all(
    artefacts: Artefacts, seed: int, texts: dict[int, str] | None = None
) -> tuple[list[Comparison], list[SidePair]]:
    """Return the headline, then the prefill's view and the trainer's other settings; the floor."""
    rollout, decode, train = artefacts.rollout, artefacts.decode, artefacts.train
    lawful = is_sampling_law(rollout, decode)
    finite, _ = by_finiteness(artefacts.scorings)
    pairs = [(decode, train, lawful)]
    if artefacts.prefill is not None and artefacts.prefill.name in finite:
        pairs.append((artefacts.prefill, train, False))
    pairs += [  # what `mismatch score --name` has added
        (decode, other, lawful)
        for name, other in finite.items()
        if other.fingerprint.get("mode") == "train" and Key(name).side != TRAIN
    ]
    pairs += [(decode, finite[REPLAYED], lawful)] if REPLAYED in finite else []
    if WEIGHTS in finite:
        pairs += [(train, finite[WEIGHTS], False), (decode, finite[WEIGHTS], lawful)]
    steady = [artefacts.scorings.get(name) for name in (REGROUPED, REFERENCE)]
    passes = [scoring for scoring in steady if scoring is not None]
    noise = router_noise(rollout, train, passes)
    # The float32 reference first: where regrouped passes round alike, they move no margin.
    selecting = keys_noise(train, passes[::-1])
    comparisons = [
        compare(
            rollout,
            left,
            right,
            sampled_by_left=law,
            seed=seed,
            noise=noise,
            keys_noise=selecting,
            texts=texts,
        )
        for left, right, law in pairs
    ]
    # Pairs that would agree exactly in a perfect world: what is left of the mismatch is noise.
    alike = [(decode, artefacts.prefill.name)] if artefacts.prefill is not None else []
    alike += [(train, again) for again in SIDE_PAIRS]
    alike += [(decode, REFERENCE), (train, REFERENCE)]
    floor = [
        SidePair.of(
            compare(
                rollout, left, finite[name], sampled_by_left=False, seed=seed, headline_only=True
            )
        )
        for left, name in alike
        if name in finite and left.name in finite
    ]
    return comparisons, floor


def not_tested(
    spec: CheckSpec,
    rollout: Rollout,
    scorings: dict[str, Scoring],
    checks: list[Check],
    reach: int = 0,
) -> Iterator[NotTested]:
    """Yield what this run could not see, and why, as the report has it.

    Args:
        reach: length of a sequence that was looked at in addition to the run's.
    """
    engine = spec.rollout.engine
    decode, train = scorings[Key.of(engine.engine, "decode")], scorings[TRAIN]
    yield from (NotTested(c.id, c.detail) for c in checks if c.status == "not_tested")
    yield from (entry for side in (decode, train) for entry in NotTested.of(side.fingerprint))
    yield from (NotTested("settings of the preset", text) for text in spec.not_reproduced)
    if layers := decode.fingerprint.get("layers"):
        reason = "--layers leaves them out; the text means nothing, nor do its rewards and lengths"
        first, last = layers[0], layers[1] - 1
        which = f"layer {last}" if first == last else f"layers {first} to {last}"
        yield NotTested(f"{which} of the model", reason)
    for name, scoring in scorings.items():
        if name not in (decode.name, TRAIN) and (reason := not_finite(scoring)):
            reason = f"left out of every comparison, because {reason}"
            yield NotTested(name, reason)
    stated = {entry.what for entry in NotTested.of(decode.fingerprint)}
    recorded = engine.engine == "recorded"
    if not spec.rollout.exact_kl:
        yield NotTested(EXACT_KL, "a dump holds no distributions" if recorded else "switched off")
    elif EXACT_KL not in stated and (reason := exact_reason(decode, train)):
        yield NotTested(EXACT_KL, reason)
    yield from not_applied(engine.model, engine.revision, rollout.sampling)
    if not engine.prefill:
        off = "the prefill rescoring was switched off"
        yield NotTested(PREFILL, "a dump holds one pass of the engine" if recorded else off)
    if not spec.noise_floor:
        why = "a dump holds one pass of each side" if recorded else "switched off"
        yield NotTested("noise floor", why)
    elif REFERENCE not in {pass_.name for pass_ in training_passes(spec)}:
        yield NotTested("float32 reference", "the trainer itself is the float32 reference")
    yield from _without_routes(spec, decode, train)
    yield from _without_keys(spec, rollout, scorings, decode, train)
    if train.fingerprint.get("device") == "cpu" and not decode.fingerprint.get("server"):
        yield NotTested(
            "GPU kernels",
            "both sides ran on a CPU, where results hardly depend on batch size",
            "batch variance, fused kernels and tensor parallelism show only on a GPU",
        )
    longest = max(int(np.diff(rollout.offsets).max()), reach)
    how = "" if recorded else "--context-length"
    yield NotTested(f"positions beyond {longest:,}", "no sequence of the run is longer", how)
    if train.fingerprint.get("reads_images"):
        yield NotTested("images", "no prompt has one: the language model alone ran")
    if rollout.turn.max() <= 1:
        template = "mismatch template --model MODEL looks at the chat template"
        yield NotTested("several turns", "every sequence has one turn", template)
    reason = "both sides loaded from disk, no refit took place"
    reason = "a dump does not show what they delivered" if recorded else reason
    yield NotTested("weight syncs", reason, "mismatch sync-probe --model MODEL")


def _deleted(run_dir: Path) -> list[NotTested]:
    """Return recorded artefacts that are not there, without outputs; or that the list is not."""
    if not (run_dir / manifest.NAME).exists():
        return [NotTested(manifest.NAME, "without it, files may be missing", "copy the run again")]
    names = sorted(manifest.entries(run_dir).keys() - OUTPUTS)
    gone = [name for name in names if not (run_dir / name).exists()]
    why = f"{manifest.NAME} lists it, and it is not there"
    return [NotTested(name, why, manifest.MAKE_AGAIN) for name in gone]


def without_room(run_dir: Path, spec: CheckSpec, scorings: Collection[str]) -> Iterator[NotTested]:
    """Yield passes that are missing, and why; of the long sequence those that failed."""
    names = [pass_.name for pass_ in training_passes(spec)]
    if wants_long(spec):
        names.append(Key(spec.rollout.engine.engine).over_long())
    for name in names:
        reason = None if name in scorings else read_error(run_dir, pass_label(name))
        if reason is not None:
            yield NotTested(name, reason.message, reason.fix)
        elif name not in (*scorings, TRAIN, NEW_REPLAYED, REPLAYED) and not Key(name).tokens:
            yield NotTested(name, "the run holds neither this scoring nor why it is missing")


def wrong_answers(run_dir: Path, spec: CheckSpec, scorings: Collection[str]) -> list[Check]:
    """Return a failed check for each pass that is missing because of what a side answered."""
    engine = Key(spec.rollout.engine.engine)
    names = {pass_label(engine.over_long()): engine.over_long(), FLOAT32_ENGINE: FLOAT32_ENGINE}
    names |= {pass_label(pass_.name): pass_.name for pass_ in training_passes(spec)}
    return [
        Check("passes-answered", "failed", f"{name}: {error.message}", error.fix)
        for label, name in names.items()
        if name not in scorings and isinstance(error := read_error(run_dir, label), WrongAnswer)
    ]


def _without_routes(spec: CheckSpec, decode: Scoring, train: Scoring) -> Iterator[NotTested]:
    """Say why routes were not compared; a MoE model without them always has a reason."""
    sides = (decode, train)
    given = {each.what for side in sides for each in NotTested.of(side.fingerprint)}
    silent = [side.name for side in sides if side.routing is None]
    if replayed := replay_of(train.fingerprint):
        yield NotTested(ROUTES, f"replayed ({replayed}), so 0 by construction")
    elif not any(side.fingerprint.get("moe") for side in sides) or not silent or ROUTES in given:
        return
    elif not spec.train.routing:
        yield NotTested(ROUTES, "route capture was switched off")
    else:
        stated = train.fingerprint.get("routing", CAPTURED)
        reason = f"{' and '.join(silent)} left none, and no reason"
        if stated not in (CAPTURED, NOT_ASKED, DENSE):
            reason = f"in the trainer {stated}"
        yield NotTested(ROUTES, reason)


def _without_keys(
    spec: CheckSpec,
    rollout: Rollout,
    scorings: dict[str, Scoring],
    decode: Scoring,
    train: Scoring,
) -> Iterator[NotTested]:
    """Say why selections of sparse attention were not compared, where the model has any."""
    said = (scoring.fingerprint.get("sparse_top_k") for scoring in scorings.values())
    top_k = next((value for value in said if value is not None), None)
    silent = [side.name for side in (decode, train) if side.keys is None]
    if top_k is None or not silent:
        return
    if not spec.train.routing:
        yield NotTested(KEYS, "route capture was switched off")
    elif not top_k:
        yield NotTested(KEYS, "its indexers select pools or blocks of tokens, which are not read")
    elif not len(np.intersect1d(selecting_rows(rollout, top_k), rollout.actions - 1)):
        says = f"no sampled token had more than {top_k} keys to choose from"
        yield NotTested(KEYS, says, f"longer sequences: --max-tokens {top_k}")
    else:
        says = f"{' and '.join(silent)} gave none"
        yield NotTested(KEYS, says, "--engine transformers gives them")


def facts(spec: CheckSpec, rollout: Rollout, command: str) -> dict[str, Any]:
    """Return what was run and where, and the size of it."""
    # What the first layers alone write is no answer to anything.
    rewards = None if spec.rollout.engine.layers else rollout.rewards
    return provenance(command, spec.rollout.prompts.file) | {
        "spec": to_dict(spec),
        "spec_hash": spec_hash(spec),
        "n_prompts": rollout.n_prompts,
        "n_sequences": rollout.n_sequences,
        "n_tokens": rollout.n_actions,
        "mean_reward": None if rewards is None else float(np.nanmean(rewards)),
        "finish_reasons": {
            reason: rollout.finish_reason.count(reason)
            for reason in sorted(set(rollout.finish_reason))
        },
        "seconds": {},
    }
