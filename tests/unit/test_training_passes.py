"""The table of a check's scorings, over a grid of settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from mismatch.experiments.scoring_passes import training_passes
from mismatch.keys import FIX, FLOAT32, NEW_REPLAYED, PLAIN, REFERENCE, REPLAYED, TRAIN, Key
from mismatch.models import EMBEDDED
from mismatch.specs import OWN_SCORER, CheckSpec, EngineSpec, RolloutSpec, TrainSpec

MODEL = str(EMBEDDED["tiny-gpt-oss"])  # a path: of a name nobody knows whether it is MoE


def grid() -> Iterator[CheckSpec]:
    for floor, quick, two, noise, weights, grad, scorer, dtype in itertools.product(
        (True, False),
        (True, False),
        (None, True, False),
        ((), (("router-noise", 0.1),)),
        (None, "bf16"),
        (True, False),
        (OWN_SCORER, "verl"),
        ("bf16", "fp32"),
    ):
        engine = EngineSpec(engine="vllm", model=MODEL, routing=True)
        train = TrainSpec(model=MODEL, dtype=dtype, grad=grad, scorer=scorer, python="p")
        yield CheckSpec(
            rollout=RolloutSpec(engine=engine),
            train=train,
            noise_floor=floor,
            quick=quick,
            two_passes=two,
            inject=noise,
            weights_effect=weights,
        )


def test_every_scoring_has_one_row_and_the_judged_one_comes_first() -> None:
    for spec in grid():
        passes = training_passes(spec)
        names = [pass_.name for pass_ in passes]
        assert len(names) == len(set(names))
        assert passes[0].name == TRAIN
        assert passes[0].spec == spec.train
        assert not [name for name in names if Key(name).side == FIX]


def test_routes_are_replayed_where_a_second_pass_was_asked_for() -> None:
    for spec in grid():
        made = {pass_.name: pass_.spec for pass_ in training_passes(spec)}
        ours = spec.train.scorer == OWN_SCORER
        second = spec.two_passes or (bool(spec.inject) and spec.two_passes is None)
        assert (NEW_REPLAYED in made) == (ours and bool(second))
        assert (REPLAYED in made) == (ours and bool(spec.two_passes))
        if NEW_REPLAYED in made:
            assert made[NEW_REPLAYED].replay_source == TRAIN
            assert made[NEW_REPLAYED].inject == spec.inject


def test_what_is_measured_from_is_our_own_code_and_undisturbed() -> None:
    for spec in grid():
        for pass_ in training_passes(spec):
            key = Key(pass_.name)
            if key.side in (PLAIN, REFERENCE.side):
                assert pass_.spec.scorer == OWN_SCORER
                assert (pass_.spec.inject, pass_.spec.grad) == ((), False)
            if key.precision == FLOAT32:
                assert (pass_.spec.dtype, pass_.spec.autocast) == ("fp32", None)


def test_a_framework_makes_no_pass_that_only_our_code_can_make() -> None:
    for spec in grid():
        if spec.train.scorer != OWN_SCORER:
            made = [pass_.spec for pass_ in training_passes(spec) if pass_.spec.scorer == "verl"]
            assert all(each.inject == () for each in made)
            assert {each.weights for each in made} == {spec.train.weights}


def test_where_no_noise_floor_is_asked_for_nothing_is_measured_from_it() -> None:
    for spec in grid():
        sides = {Key(pass_.name).side for pass_ in training_passes(spec)}
        assert (PLAIN in sides) <= (spec.noise_floor and not spec.quick)
        assert (REFERENCE.side in sides) == spec.noise_floor
        alone = replace(spec, noise_floor=False, two_passes=False, inject=(), weights_effect=None)
        assert [pass_.name for pass_ in training_passes(alone)] == [TRAIN]
