"""Which scorings one training world has to make: the trainer, its noise floor, its second pass."""

from __future__ import annotations

from dataclasses import replace

from mismatch.experiments.square import plain_of, plain_passes
from mismatch.models.config import is_moe
from mismatch.run.scorings import NEW, NEW_REPLAYED, REFERENCE, REGROUPED, REPLAYED, TRAIN, WEIGHTS
from mismatch.specs import CheckSpec, Pass, TrainSpec


def training_passes(spec: CheckSpec) -> list[Pass]:
    """What one training world has to score: the trainer, and what its noise floor needs."""
    train = spec.train
    passes = [Pass(TRAIN, train)]
    effect = []  # after all passes with the trainer's own weights: one load more, not two
    if spec.weights_effect is not None:
        effect.append(Pass(WEIGHTS, replace(train, weights=spec.weights_effect)))
    if not spec.noise_floor:
        return passes + second_passes(spec) + effect
    passes.append(Pass(f"{TRAIN}:regrouped", regrouped(train)))
    passes.append(Pass(f"{TRAIN}:repeated", train))
    if not train.grad:
        passes.append(Pass(f"{TRAIN}:grad", replace(train, grad=True, routing=False)))
    passes += second_passes(spec) + effect
    reference = reference_of(train)
    if replace(reference, micro_batch_tokens=train.micro_batch_tokens) != train:
        passes.append(Pass(REFERENCE, reference))
    return passes + plain_passes(spec)


def second_passes(spec: CheckSpec) -> list[Pass]:
    """What PPO's second forward pass takes beyond the passes of the noise floor.

    The trainer regrouped is such a pass; noise is injected into a copy of it. Router replay of the
    first pass in the second, and of the engine in the trainer, are made where they were asked for.
    """
    train, new = spec.train, regrouped(spec.train)
    passes = []
    if spec.inject:
        new = replace(new, inject=spec.inject, inject_seed=spec.seed)
        passes.append(Pass(NEW, new))
    elif spec.two_passes and not spec.noise_floor:
        passes.append(Pass(REGROUPED, new))
    wanted = spec.two_passes or (spec.inject and spec.two_passes is not False)
    if not wanted or not train.routing or train.replay_routing is not None:
        return passes
    if is_moe(train.model, train.revision):
        passes.append(
            Pass(NEW_REPLAYED, replace(new, replay_routing="ids", replay_source=TRAIN)),
        )
        if spec.two_passes and spec.rollout.engine.routing:
            passes.append(Pass(REPLAYED, replace(train, replay_routing="ids")))
    return passes


def regrouped(train: TrainSpec) -> TrainSpec:
    """The same trainer with other micro-batches."""
    return replace(train, micro_batch_tokens=max(256, train.micro_batch_tokens // 4))


def reference_of(train: TrainSpec) -> TrainSpec:
    """The plain forward of the same weights in float32."""
    return plain_of(train, "fp32")
