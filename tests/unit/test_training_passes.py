"""The table of a check's scorings, over a grid of settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from mismatch.experiments.scoring_passes import training_passes, wants_long
from mismatch.keys import (
    FIX,
    FLOAT32,
    NEW_REPLAYED,
    PLAIN,
    REFERENCE,
    REPLAYED,
    TRAIN,
    TRAINER_FLOAT32,
    TRAINER_LONG,
    Key,
)
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


def test_the_long_sequence_has_rows_of_the_same_passes_that_may_be_missing() -> None:
    for spec in grid():
        passes = training_passes(spec)
        long = {Key(pass_.name): pass_ for pass_ in passes if pass_.folder}
        short = {pass_.name: pass_.spec for pass_ in passes if not pass_.folder}
        assert [pass_.name for pass_ in passes] == [*short, *long]
        assert all(key.tokens and pass_.optional == "any" for key, pass_ in long.items())
        assert bool(long) == wants_long(spec) == (spec.noise_floor and not spec.quick)
        assert long.keys() >= {Key(n).over_long() for n in short if long and Key(n).side == PLAIN}
        assert (TRAINER_LONG in long) == (bool(long) and spec.train.scorer == OWN_SCORER)
        if TRAINER_LONG in long and TRAINER_FLOAT32 in short:
            assert long[TRAINER_LONG].spec == short[TRAINER_FLOAT32]
            assert long[TRAIN.over_long()].spec.dtype == spec.train.dtype
        fewer = replace(spec, context_length=0)
        assert training_passes(fewer) == [pass_ for pass_ in passes if not pass_.folder]


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
        assert [(each.name, each.optional) for each in training_passes(alone)] == [(TRAIN, "")]
