"""Other kernels on weights that are loaded already: the same scoring as with a load of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.specs import Pass, TrainSpec
from mismatch.training.distributed import World
from mismatch.training.load import load, switched
from mismatch.training.score import score_pass
from mismatch.types import Scoring
from tests.checkpoints import make, rollout

ROLLOUT = rollout(((5, 12), (5, 30), (6, 9)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainSpec:
    return TrainSpec(str(make("gpt_oss", tmp_path_factory.mktemp("gpt-oss"))))


def _same(scoring: Scoring | None, other: Scoring | None) -> None:
    assert scoring is not None
    assert other is not None
    assert np.array_equal(scoring.logprobs, other.logprobs)
    for name in ("attention", "attention_requested", "honours_sinks", "experts", "weights"):
        assert scoring.fingerprint[name] == other.fingerprint[name], name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"attention": "no-sinks"}),
        ({"attention": "no-sinks"}, {}),
        ({}, {"attention": "eager", "experts": "eager"}),
        ({"experts": "eager"}, {"experts": "batched_mm"}),
        ({"experts": "batched_mm"}, {}),
        ({}, {"experts": "bounded"}),
    ],
)
def test_switched_is_loaded_anew(
    world: World, base: TrainSpec, before: dict[str, str], after: dict[str, str]
) -> None:
    first, then = replace(base, **before), replace(base, **after)
    loaded = load(first, world.mesh, world.device)
    plain = score_pass(world, loaded, ROLLOUT, Pass("first", first))
    moved = switched(loaded, then)
    assert moved is not None
    assert moved.scorer is loaded.scorer
    fresh = load(then, world.mesh, world.device)
    _same(
        score_pass(world, moved, ROLLOUT, Pass("then", then)),
        score_pass(world, fresh, ROLLOUT, Pass("then", then)),
    )
    back = switched(moved, first)
    assert back is not None
    _same(score_pass(world, back, ROLLOUT, Pass("first", first)), plain)


@pytest.mark.parametrize("fields", [{"dtype": "fp32"}, {"master_dtype": "bf16"}, {"model": "x"}])
def test_other_weights_are_loaded(world: World, base: TrainSpec, fields: dict[str, str]) -> None:
    loaded = load(base, world.mesh, world.device)
    assert switched(loaded, replace(base, **fields)) is None


def test_kernels_that_cannot_run_are_refused(world: World, base: TrainSpec) -> None:
    loaded = load(base, world.mesh, world.device)
    with pytest.raises(MismatchError, match="nonsense"):
        switched(loaded, replace(base, experts="nonsense"))
    with pytest.raises(MismatchError, match="sinks"):
        switched(loaded, replace(base, attention="sdpa"))
