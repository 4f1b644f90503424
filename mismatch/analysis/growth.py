"""Error budget and length forecast of what a run has scored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatch.metrics.budget import Budget, Gap, error_budget
from mismatch.metrics.forecast import Forecast, length_forecast
from mismatch.run.store import REFERENCE, TRAIN
from mismatch.specs import CheckSpec
from mismatch.types import Pair, Rollout, Scoring

BESIDE = {  # variant of the trainer's scoring -> what it is
    "repeated": "trainer repeated",
    "regrouped": "trainer regrouped",
    "grad": "trainer with gradients",
    "replayed": "trainer with replayed routing",
}
ENGINE_REPEATED = "engine decode repeated"


def budget_of(
    spec: CheckSpec,
    rollout: Rollout,
    scorings: Mapping[str, Scoring],
    refused: Mapping[str, str],
    seed: int = 0,
) -> Budget:
    """The error budget of what a run has scored, with a reason for every step it has not.

    Args:
        scorings: those that can be compared; the engine's decode and the trainer among them.
        refused: scorings that cannot, with the reason.

    Raises:
        EmptyComparison, MismatchError: see :func:`mismatch.metrics.budget.error_budget`.
    """
    engine = spec.rollout.engine.engine
    decode, prefill = scorings[f"{engine}:decode"], f"{engine}:prefill"
    reasons = {
        name: reason
        for name in (prefill, REFERENCE)
        if (reason := refused.get(name) or _off_chain(name, decode, scorings, spec))
    }
    chain = [decode.name, *(n for n in (prefill, REFERENCE) if n not in reasons), TRAIN]
    beside, gaps = _beside(spec, scorings, refused, engine)
    gaps = [Gap(f"step through {name}", why) for name, why in reasons.items()] + gaps
    actions = rollout.actions
    return error_budget(
        [(name, scorings[name].logprobs) for name in chain],
        [((a, scorings[a].logprobs), (b, scorings[b].logprobs)) for a, b in beside],
        sequence=rollout.sequence_of_token[actions],
        prompt=rollout.prompt_index,
        seed=seed,
        gaps=gaps,
        notes=_notes(chain, scorings),
    )


def forecast_of(
    rollout: Rollout, left: Scoring, right: Scoring, target: int, seed: int = 0
) -> Forecast:
    """The forecast of one comparison of a run.

    Raises:
        EmptyComparison, MismatchError: see :func:`mismatch.metrics.forecast.length_forecast`.
    """
    pair = Pair.of(rollout, left, right)
    return length_forecast(
        pair.delta, sequence=pair.sequence, prompt=pair.prompt, target=target, seed=seed
    )


def _off_chain(name: str, decode: Scoring, scorings: Mapping[str, Scoring], spec: CheckSpec) -> str:
    """Why a scoring is no link of the chain; empty where it is one."""
    scoring = scorings.get(name)
    if scoring is None:
        return _absent_reference(spec) if name == REFERENCE else _absent_prefill(decode, spec)
    asked, given = (s.fingerprint.get("logprobs_temperature") for s in (decode, scoring))
    if asked is not None and given is not None and not np.isclose(asked, given, rtol=1e-9):
        return f"it was scored at temperature {given:g}, the tokens were sampled at {asked:g}"
    return ""


def _absent_prefill(decode: Scoring, spec: CheckSpec) -> str:
    if not spec.rollout.engine.prefill:
        return "the prefill rescoring was switched off (--no-prefill)"
    if decode.fingerprint.get("prefill") is False:
        temperature = spec.rollout.sampling.temperature
        tempered = "" if temperature == 1.0 else f" at temperature {temperature:g}"
        return f"this engine cannot rescore given tokens{tempered}"
    return "the run holds no prefill rescoring"


def _absent_reference(spec: CheckSpec) -> str:
    if not spec.noise_floor:
        return "the noise floor was switched off (--no-noise-floor)"
    if spec.train.dtype == "fp32":
        return "the trainer itself computes in float32: it is its own reference"
    return "the run holds no float32 reference"


def _beside(
    spec: CheckSpec, scorings: Mapping[str, Scoring], refused: Mapping[str, str], engine: str
) -> tuple[list[tuple[str, str]], list[Gap]]:
    pairs, gaps = [], []
    repeated = f"{engine}:repeated"
    if repeated in scorings:
        pairs.append((f"{engine}:decode", repeated))
    else:
        gaps.append(
            Gap(
                ENGINE_REPEATED,
                "sampling again gives other tokens from the first difference on, and this run "
                "does not make the engine decode given tokens",
            )
        )
    for variant, title in BESIDE.items():
        name = f"{TRAIN}:{variant}"
        if name in scorings:
            pairs.append((TRAIN, name))
        else:
            gaps.append(Gap(title, refused.get(name) or _absent_variant(variant, spec)))
    return pairs, gaps


def _absent_variant(variant: str, spec: CheckSpec) -> str:
    if variant == "replayed":
        return "the run holds no pass with replayed routing"
    if not spec.noise_floor:
        return "the noise floor was switched off (--no-noise-floor)"
    if variant == "grad" and spec.train.grad:
        return "the trainer's own pass has gradients on"
    return f"the run holds no scoring {TRAIN}:{variant}"


def _notes(chain: list[str], scorings: Mapping[str, Scoring]) -> list[str]:
    cut = [bool(scorings[name].fingerprint.get("logprobs_truncated")) for name in chain]
    if cut[0] and not all(cut):
        first = chain[cut.index(False)]
        return [
            "the engine's logprobs are renormalised over the tokens that top-p or top-k kept; the "
            f"step to {first} holds the logarithm of the kept mass as well"
        ]
    return []
