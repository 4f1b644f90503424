"""What one run of the loop is asked: an arm, a seed, and the settings that all arms share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import fix_named, labels
from mismatch.specs import MANY, SEEDS, SHARE, CheckSpec, Flag, Range, portable

LOOP = "Training loop"
AS_IS = "as-is"
LARGE_MODELS = 1e-6  # a learning rate that large models are trained with
# Ways of the weights into an engine; the engine's way first.
PATHS = {"vllm": ("reload", "rpc"), "sglang": ("disk", "tensor"), "transformers": ("load",)}
Loss = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check found that a loop starts from (--like)."""

    prompts: int
    samples: int
    verdicts: dict[str, str]
    """Status of the run as it is, and with each fix that it measured, by the arm's name."""


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """One arm of a loop, with one seed."""

    check: CheckSpec = field(default_factory=CheckSpec)
    """Engine, trainer, prompts and sampling, with the arm's changes."""
    checked: Checked | None = None
    arm: str = AS_IS
    seed: int = 0
    steps: Annotated[int, Flag(LOOP, "Steps of each arm and seed.", range=Range(1, MANY))] = 60
    prompts: Annotated[
        int, Flag(LOOP, "Prompts of a step.", name="prompts_per_step", range=Range(1, MANY))
    ] = 12
    mini_batches: Annotated[
        int, Flag(LOOP, "Optimiser steps on each rollout.", range=Range(1, 1000))
    ] = 2
    learning_rate: Annotated[
        float, Flag(LOOP, f"Rate of AdamW; {LARGE_MODELS:g} for your --model.", range=SHARE)
    ] = 3e-4
    loss: Annotated[Loss, Flag(LOOP, "Mean over tokens, or over the means of sequences.")] = "token"
    clip: Annotated[float, Flag(LOOP, "Clip range of PPO's ratio.", range=SHARE)] = 0.2
    perfectible: Annotated[
        bool, Flag(LOOP, "Train on the prompts that the model solves sometimes.")
    ] = True
    checkpoint_every: Annotated[
        int, Flag(LOOP, "Steps between checkpoints.", range=Range(1, MANY))
    ] = 5
    reward: Annotated[str | None, Flag(LOOP, "Your package.module:function(text, answer).")] = None
    corrections: tuple[str, ...] = ()
    """Of mismatch.metrics.importance_weights; their weights are multiplied."""


class Asked(NamedTuple):
    """What a run of the loop is asked."""

    loop: LoopSpec
    """What all arms share."""
    arms: tuple[str, ...]
    seeds: tuple[int, ...]


def arm_of(base: LoopSpec, name: str) -> LoopSpec:
    """Return the loop as an arm runs it: the changes of its fixes, joined by plus signs.

    >>> arm_of(LoopSpec(), "no-sinks+seq-tis").corrections
    ('tis-sequence',)

    Raises:
        MismatchError: no such fix, a value that means nothing, or a fix without effect in a loop.
    """
    loop = replace(base, arm=name)
    for label in () if name == AS_IS else labels(name):
        before = loop
        id, _, value = label.partition("=")
        fix = fix_named(id)
        if fix.side == "estimator":
            loop = replace(loop, corrections=(*loop.corrections, fix.corrects))
        else:
            loop = replace(loop, check=fix.taking(value).apply(loop.check))
        if loop == before:
            fault = f"the arm {name}: {label} changes nothing of these settings"
            raise MismatchError(fault, f"leave it out; alone it is the same as {AS_IS}")
    return loop


def settings(loop: LoopSpec) -> dict[str, Any]:
    """Return the spec as data that is the same in every installation."""
    return portable(to_json(loop))


def names_in(text: str) -> tuple[str, ...]:
    """Return the names between commas, each once.

    >>> names_in("as-is, attention-sinks,as-is")
    ('as-is', 'attention-sinks')
    """
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def read_seeds(text: str) -> tuple[int, ...]:
    """Return the whole numbers between commas, each once."""
    parts = names_in(text)
    if not all(part.isdecimal() and int(part) in SEEDS for part in parts):
        raise MismatchError(f"--seeds {text!r}: no seeds", "whole numbers: --seeds 0,1")
    return tuple(dict.fromkeys(map(int, parts)))


def place_of(arm: str, seed: int) -> str:
    """Return the folder of an arm and a seed in the run directory."""
    return f"{arm.replace('/', '-')}/seed-{seed}"
