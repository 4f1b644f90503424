"""Make a run directory of what a framework recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.analysis.diagnosis.twins import STEP
from mismatch.analysis.weight_versions import OLD, VERSION
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import Recorded
from mismatch.features.recorded.facts import FILE, Finding, RecordedFacts
from mismatch.frameworks import FRAMEWORKS
from mismatch.keys import Key
from mismatch.metrics.row_sums import Row
from mismatch.models.config import FoundConfig, find_config
from mismatch.models.tokenizers import load_tokenizer, stop_ids, token_texts
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.specs import CheckSpec, PromptSpec
from mismatch.types import Bools, Floats, Ints, NotTested, Rollout, Sampling, Scoring, SideFacts

ENGINE = "recorded"
UNKNOWN_MODEL = "recorded"
NOT_IN_A_FILE = ("routed experts", "weights as the engine holds them")


@dataclass(frozen=True)
class RecordedRun:
    """What a dump becomes in a run directory; its tokens with values on every side it has."""

    rollout: Rollout
    decode: Scoring
    train: Scoring | None
    findings: tuple[Finding, ...]
    attributes: dict[str, tuple[str, ...]]
    """Attribute -> its value for every sequence, of those that every sequence has."""


def as_run(
    recorded: Recorded, sampling: Sampling, engine: SideFacts, trainer: SideFacts | None = None
) -> RecordedRun:
    """Return the rollout, sequences of one prompt next to each other, and the scorings.

    Tokens without a finite value on one side leave the action mask and become findings.

    Args:
        trainer: fingerprint of the trainer's scoring; None: do not take it, even if it is there.
    """
    number_of: dict[Any, int] = {}
    prompts = [number_of.setdefault(row.key, len(number_of)) for row in recorded.sequences]
    order = np.argsort(prompts, kind="stable")
    rows = [recorded.sequences[number] for number in order]
    sampled = _flat((row.sampled for row in rows), np.bool_)
    offsets = np.cumsum([0, *(len(row.token_ids) for row in rows)]).astype(np.int64)
    sides = {"rollout": _flat((row.logprobs for row in rows), np.float64)}
    trained = [row.train_logprobs for row in rows if row.train_logprobs is not None]
    if trainer is not None and len(trained) == len(rows):
        sides["trainer"] = _flat(trained, np.float64)
    finite = np.logical_and.reduce([np.isfinite(values) for values in sides.values()])
    sums = recorded.sums
    findings = [
        Finding(what, side, count, sums.bad_rows[side, what], str(sums.first[side, what]))
        for (side, what), count in sums.not_finite.items()
        if side in sides and count
    ]
    findings += [
        Finding(
            f"{misfit}; cut to fit at the {recorded.ends} value" if recorded.ends else misfit,
            "",
            0,
            count,
            which_rows(recorded.misfit_rows[misfit]),
        )
        for misfit, count in recorded.misfits.items()
    ]
    if len(sides) == 2 and sums.whole.tokens and not np.isfinite(sums.whole.step(0).k3):
        assert sums.worst is not None
        size, place = sums.worst
        what = f"no finite ratio: the sides are {size:.4g} nats apart"
        findings.insert(0, Finding(what, "", 1, 1, str(place)))
    mask = sampled.copy()
    mask[sampled] = finite
    rewards = [row.reward for row in rows if row.reward is not None]
    rollout = Rollout(
        token_ids=_flat((row.token_ids for row in rows), np.int64),
        offsets=offsets,
        action_mask=mask,
        turn=_flat((turns_of(row.sampled, row.turns) for row in rows), np.int64),
        prompt_index=np.asarray(prompts, np.int64)[order],
        finish_reason=tuple(row.finish_reason for row in rows),
        sampling=sampling,
        fingerprint=engine,
        rewards=np.asarray(rewards) if len(rewards) == len(rows) else None,
    )
    ids = rollout.token_ids[rollout.actions]
    decode = Scoring(Key.of(ENGINE, "decode"), ids, sides["rollout"][finite], engine)
    steps = [row.attributes.get("step") for row in rows]
    if None not in steps and len({*steps}) > 1:
        of_token = rollout.sequence_of_token[rollout.actions]
        decode.extra[STEP] = np.array(steps, np.float64)[of_token]
    versions = [_versions_of(row) for row in rows]
    if any(np.isfinite(each).any() for each in versions):
        decode.extra[VERSION] = _flat(versions, np.float64)[finite]
    if all(row.old is not None for row in rows):
        old = _flat((row.old for row in rows), np.float64)[finite]
        if np.isfinite(old).all():
            decode.extra[OLD] = old
    train = None
    if trainer is not None and "trainer" in sides:
        held = [row.entropy for row in rows if row.entropy is not None]
        entropy = _flat(held, np.float64)[finite] if len(held) == len(rows) else None
        if entropy is not None and not np.isfinite(entropy).all():
            entropy = None
        train = Scoring("fsdp", ids, sides["trainer"][finite], trainer, entropy)
    of_all = sorted(set.intersection(*(set(row.attributes) for row in rows)))
    attributes = {name: tuple(row.attributes[name] for row in rows) for name in of_all}
    attributes["row"] = tuple(str(row.number) for row in rows)
    return RecordedRun(rollout, decode, train, tuple(findings), attributes)


def _versions_of(row: Row) -> Floats:
    """Return the version of the weights that sampled each token; NaN where it is no number."""
    if row.versions is not None:
        return row.versions
    said = row.attributes.get("weight_version", "")
    version = float(said) if re.fullmatch(r"\d{1,15}", said, re.ASCII) else np.nan
    return np.full(len(row.logprobs), version)


def which_rows(rows: list[int]) -> str:
    """Say which rows of a dump these are, in order.

    >>> which_rows([3, 7, 11, 15])
    'row 3, and every 4th row from there on'
    """
    gaps = np.diff(rows)
    if len(rows) > 2 and (gaps == gaps[0]).all():
        nth = {1: "every", 2: "every second", 3: "every 3rd"}.get(
            int(gaps[0]), f"every {gaps[0]}th"
        )
        return f"row {rows[0]}, and {nth} row from there on"
    return f"row {rows[0]}"


def turns_of(sampled: Bools, recorded: Ints | None = None) -> Ints:
    """Return the turn of every token: 0 before the first sampled one, n from the n-th response on.

    Args:
        recorded: turn of every token, from any number; also parts responses that touch.

    >>> turns_of(np.array([False, True, True, False, True])).tolist()
    [0, 1, 1, 1, 2]
    >>> turns_of(np.array([False, True, True, False, True]), np.array([0, 0, 1, 1, 2])).tolist()
    [0, 1, 2, 2, 3]
    """
    begins = np.diff(sampled, prepend=False)
    if recorded is not None:
        begins |= np.diff(recorded, prepend=recorded[:1]) != 0
    return np.cumsum(begins & sampled)


def _flat(parts: Iterable[Any], kind: type[np.generic]) -> Any:
    return np.concatenate([np.asarray(part, kind) for part in parts])


def keep(
    spec: CheckSpec,
    run_dir: Path,
    file: Path,
    recorded: Recorded,
    command: str,
    both: bool,
    moe: bool = False,
) -> None:
    """Write the rollout, its scorings, token texts and what the dump says into a new run.

    Args:
        both: also write the trainer's scoring, where the dump holds one.
        moe: the model has experts; else its config.json says it, where that is here.

    Raises:
        MismatchError: of a model that was named nothing is known, or it lacks an id's text.
    """
    engine = spec.rollout.engine
    longest = int(max(row.sampled.sum() for row in recorded.sequences))
    sampling = replace(spec.rollout.sampling, max_tokens=longest, samples_per_prompt=1)
    not_tested = [
        *(NotTested(what, "the dump does not hold it") for what in NOT_IN_A_FILE),
        *(NotTested(remark, f"{count}") for remark, count in recorded.remarks.items()),
    ]
    sums, kept = recorded.sums, len(recorded.sequences)
    left = sums.rows - kept
    if left:
        drawn = f"{kept:,} were drawn by prompt; sums and steps are of all"
        not_tested.append(NotTested(f"causes and tokens of the other {left:,} sequences", drawn))
    if recorded.unread:
        not_tested.append(NotTested("columns of the dump", ", ".join(sorted(recorded.unread))))
    tokenizer: Any = None
    if engine.model != UNKNOWN_MODEL:
        config: FoundConfig | None = None
        try:
            config = find_config(engine.model, engine.revision)
            moe = moe or config.model.experts > 0
        except MismatchError:  # of the hub's, it is not here
            if Path(engine.model).is_dir():
                raise
        try:
            tokenizer = load_tokenizer(engine.model, engine.revision, engine.trust_remote_code)
        except MismatchError as error:  # numbers need none
            if config is None or not both:
                raise
            not_tested.append(NotTested("token texts", error.message, error.fix))
    stops = stop_ids(engine.model, engine.revision, tokenizer.eos_token_id) if tokenizer else None
    fingerprint: SideFacts = {
        "engine": ENGINE,
        "mode": "decode",
        "model": engine.model,
        "dtype": engine.dtype,
        "file": file.name,
        "format": recorded.form,
        # At another temperature nobody says whether the logprobs are before or after it.
        "logprobs_temperature": 1.0 if sampling.temperature == 1 else None,
        "stop_token_ids": stops,
        "bos_token_id": tokenizer.bos_token_id if tokenizer else None,
        "not_tested": to_json(not_tested),
    }
    if moe:  # else it is dense, or nobody knows
        fingerprint["moe"] = True
    framework = FRAMEWORKS.get(recorded.form or "")
    trainer: SideFacts = {
        "mode": "train",
        "model": engine.model,
        "dtype": spec.train.dtype,
        "code": framework.title if framework else "your trainer",
        "temperature": sampling.temperature,
    }
    run = as_run(recorded, sampling, fingerprint, trainer if both else None)
    prompts = PromptSpec(num_prompts=run.rollout.n_prompts)
    spec = replace(spec, rollout=replace(spec.rollout, prompts=prompts, sampling=sampling))
    ids = np.unique(run.rollout.token_ids).tolist() if tokenizer else []
    texts = token_texts(tokenizer, ids) if tokenizer else {}  # nobody knows them
    compared = both and sums.whole.tokens
    facts = RecordedFacts(
        file.name,
        recorded.form or "generic",
        run.findings,
        run.attributes,
        sums.steps() if compared else (),
        sums.whole.step(0) if compared else None,
        recorded.ratios,
    )
    with at_work(run_dir, "read-rollouts", spec, command, new=True):
        store.save_rollout(run_dir, run.rollout, made_by=spec.rollout)
        store.save_vocabulary(run_dir, texts)
        store.save_document(run_dir, FILE, to_json(facts), schema=facts.schema)
        store.save_scoring(run_dir, run.decode, run.rollout, made_by=spec.rollout)
        if run.train is not None:
            store.save_scoring(run_dir, run.train, run.rollout, made_by=spec.train)
