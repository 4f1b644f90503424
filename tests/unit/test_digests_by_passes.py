"""Other passes tell a digest that says nothing, and a fault behind two forms, from a real fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.digests_by_passes import undescribed, with_passes
from mismatch.analysis.diagnosis.loaded_weights import (
    IN_ENGINES_FORM,
    NOT_OF_CHECKPOINT,
    UNDESCRIBED,
    Difference,
    same_weights,
    weights_as_loaded,
)
from mismatch.keys import PLAIN, REFERENCE, TRAINER_FLOAT32, WEIGHTS
from mismatch.types import Scoring
from tests import drawn_pair as drawn
from tests.diagnosed import causes

LAYERS = 4
PARTS = (
    *("mamba.A_log", "mamba.D", "self_attn.q_proj.weight", "mlp.gate.weight"),
    *("mlp.experts.down_proj", "input_layernorm.weight"),
)
NAMES = [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS]
NAMES += ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
NAMES += ["model.layers.3.mamba.own_bias"]  # of one layer alone
NAMES += [f"model.visual.layers.{layer}.norm.weight" for layer in range(3)]
HELD = {name: [number, 2, 3, number, 5] for number, name in enumerate(NAMES)}
CASE = drawn.other_weights(0, 5)
FLOOR = 8e-3 * 2.0**-16  # nats that float32 rounding costs where bf16's costs 8e-3
LOADER = [name for name in NAMES if name.endswith("A_log")]


def changed(names: list[str], by: int = 900) -> dict[str, list[int]]:
    return HELD | {name: [number + by, 8, 9] for number, name in enumerate(names)}


def alike(*parts: str) -> list[str]:
    return [name for name in NAMES if name.endswith(parts)]


class Run:
    """A run whose engine alone holds some parameters otherwise, and whose float32 passes agree."""

    def __init__(self, differ: list[str]) -> None:
        size = CASE.engine.logprobs.shape
        noise = np.random.default_rng(0).normal(size=(4, *size))
        exact = CASE.engine.logprobs
        engine = {"weights": changed(differ), "dtype": "bf16", NOT_OF_CHECKPOINT: differ}
        trainer = {"weights": HELD, "dtype": "bf16", NOT_OF_CHECKPOINT: []}
        self.engine = self.scoring("vllm:decode", exact + 1e-2 * noise[0], engine)
        self.trainer = self.scoring("fsdp", exact + 1e-2 * noise[1], trainer)
        passes = {
            REFERENCE: (exact, {"weights": HELD, "dtype": "fp32"}),
            f"{PLAIN}:bf16": (exact + 1e-2 * noise[2], {"weights": HELD, "dtype": "bf16"}),
            "vllm:fp32": (exact + 2 * FLOOR * noise[3],
                          {"weights": changed(differ), "dtype": "fp32"}),
            TRAINER_FLOAT32: (exact.copy(), {"weights": HELD, "dtype": "fp32"}),
        }  # fmt: skip
        self.others = {name: self.scoring(name, *held) for name, held in passes.items()}

    @staticmethod
    def scoring(name: str, logprobs: Any, facts: dict[str, Any]) -> Scoring:
        return Scoring(name, CASE.engine.token_ids, logprobs, facts)

    def state(self, name: str, **facts: Any) -> None:
        """Change what one scoring says of itself."""
        sides = {"vllm:decode": self.engine, "fsdp": self.trainer, **self.others}
        new = replace(sides[name], fingerprint=sides[name].fingerprint | facts)
        if name == "vllm:decode":
            self.engine = new
        elif name == "fsdp":
            self.trainer = new
        else:
            self.others[name] = new

    def off(self, name: str, nats: float) -> None:
        """Move the log-probabilities of a pass by so much."""
        held = self.others[name]
        self.others[name] = replace(held, logprobs=held.logprobs + nats)

    @property
    def names(self) -> list[str]:
        return undescribed(self.engine, self.trainer, self.others)

    @property
    def case(self) -> Case:
        """What detectors and the check get to see."""
        sides = with_passes(self.engine, self.trainer, self.others)
        return Case.of(CASE.rollout, *sides, self.others)

    def check(self) -> Any:
        case = self.case
        return weights_as_loaded(case.engine.fingerprint, case.trainer.fingerprint)

    def causes(self) -> set[str]:
        return {cause.id for cause in causes(self.case).ranked if cause.fact}


def test_a_loaders_work_in_every_layer_is_a_warning_and_no_cause() -> None:
    run = Run(LOADER)
    assert run.names == sorted(LOADER)
    check, case = run.check(), run.case
    assert check.status == "warning"
    assert "A_log" in check.detail
    assert f"{len(NAMES) - LAYERS} of {len(NAMES)}" in check.detail
    assert run.causes() == set()
    assert not same_weights(case.engine.fingerprint, case.trainer.fingerprint)
    assert weights_as_loaded(run.engine.fingerprint, run.trainer.fingerprint).status == "failed"
    swapped = Run(LOADER)  # the trainer's loader
    swapped.state("vllm:decode", **{"weights": HELD, NOT_OF_CHECKPOINT: []})
    swapped.state("vllm:fp32", weights=HELD)
    swapped.state("fsdp", **{"weights": changed(LOADER), NOT_OF_CHECKPOINT: LOADER})
    swapped.state(TRAINER_FLOAT32, weights=changed(LOADER))
    assert swapped.check().status == "warning"


@pytest.mark.parametrize(
    "differ",
    [
        NAMES,  # stale weights
        alike("A_log", "mamba.D", "q_proj.weight", "input_layernorm.weight"),  # more than half
        LOADER[1:2],
        LOADER[:-1],
        ["model.layers.3.mlp.experts.down_proj"],  # an expert that no token chose
        alike("experts.down_proj"),
        alike("gate.weight"),
        ["model.embed_tokens.weight"],
        ["lm_head.weight"],
        ["model.norm.weight"],
        ["model.layers.3.mamba.own_bias"],
        [name for name in NAMES if "visual" in name],
        [*LOADER, "model.embed_tokens.weight"],
        [*LOADER, "model.layers.0.mamba.D"],
    ],
)
def test_faults_that_leave_float32_alone_are_not_excused(differ: list[str]) -> None:
    run = Run(differ)
    assert run.names == []
    assert run.check().status == "failed"
    assert run.causes() & {"weights-differ", "stale-weights", "experts-differ"}


def synced_since(run: Run) -> None:
    """Give the engine that sampled other values; the float32 engine loads the checkpoint again."""
    run.state("vllm:decode", weights=changed(LOADER, 500))


def fresh_engine_is_right(run: Run) -> None:
    run.state("vllm:fp32", weights=HELD)


def no_digests_in_float32(run: Run) -> None:
    run.state("vllm:fp32", weights=None)


def trainer_moved_on(run: Run) -> None:
    run.state(TRAINER_FLOAT32, weights=changed(LOADER, 300))


def two_checkpoints(run: Run) -> None:
    run.state("vllm:decode", **{NOT_OF_CHECKPOINT: []})


def both_off(run: Run) -> None:
    run.state("fsdp", **{NOT_OF_CHECKPOINT: LOADER})


def files_unread(run: Run) -> None:
    run.state("vllm:decode", **{NOT_OF_CHECKPOINT: None})


def engine_apart(run: Run) -> None:
    """Above rounding, and far below the level of a gap."""
    run.off("vllm:fp32", 15 * FLOOR)


def trainer_apart(run: Run) -> None:
    run.off(TRAINER_FLOAT32, 15 * FLOOR)


def not_a_number(run: Run) -> None:
    run.off("vllm:fp32", float("nan"))


def engine_not_measured(run: Run) -> None:
    del run.others["vllm:fp32"]


def trainer_not_measured(run: Run) -> None:
    del run.others[TRAINER_FLOAT32]


def no_reference(run: Run) -> None:
    del run.others[REFERENCE]


def no_yardstick(run: Run) -> None:
    del run.others[f"{PLAIN}:bf16"]


def only_called_float32(run: Run) -> None:
    run.state("vllm:fp32", dtype="bf16")


@pytest.mark.parametrize(
    "doubt",
    [
        *(synced_since, fresh_engine_is_right, no_digests_in_float32, trainer_moved_on),
        *(two_checkpoints, both_off, files_unread, engine_apart, trainer_apart, not_a_number),
        *(engine_not_measured, trainer_not_measured, no_reference, no_yardstick),
        only_called_float32,
    ],
)
def test_without_each_proof_a_difference_stays_one(doubt: Any) -> None:
    run = Run(LOADER)
    doubt(run)
    assert run.names == []
    assert run.check().status == "failed"


@pytest.mark.parametrize(("nats", "excused"), [(5e-7, True), (3e-6, False)])
def test_where_little_is_rounded_float32_itself_is_the_floor(nats: float, excused: bool) -> None:
    run, name = Run(LOADER), f"{PLAIN}:bf16"
    run.others[name] = replace(run.others[name], logprobs=run.others[REFERENCE].logprobs + 1e-4)
    run.off("vllm:fp32", nats)
    assert bool(run.names) == excused


def test_another_fault_beside_a_loaders_work_is_named_as_before() -> None:
    facts = Run(LOADER).case.engine.fingerprint
    other = facts | {"weights": facts["weights"] | {"lm_head.weight": [7, 7, 7]}}
    check = weights_as_loaded(other, {"weights": HELD})
    assert check.status == "failed"
    assert "lm_head.weight" in check.detail
    assert "A_log" not in check.detail


# ---------------------------------------------------------------- two forms

MATRICES = alike("q_proj.weight", "down_proj")
STALE = "model.layers.2.self_attn.q_proj.weight"


def of_two_forms(engine: dict[str, list[int]], form: str = "fp8-rounded", **pass_: Any) -> Run:
    """The engine in a form of its own, and a pass of the trainer with that form."""
    run = Run([])
    of_pass = {"weights": changed(MATRICES), "dtype": "bf16", "weights_form": form} | pass_
    run.others[WEIGHTS] = run.scoring(WEIGHTS, CASE.engine.logprobs, of_pass)
    own = {"weights": engine, "weights_form": "fp8-rounded", NOT_OF_CHECKPOINT: MATRICES}
    run.state("vllm:decode", **own)
    run.state("fsdp", weights_form="as-stored")
    return run


def test_of_two_forms_the_form_alone_differs_where_the_pass_equals_the_engine() -> None:
    run = of_two_forms(changed(MATRICES))
    check = run.check()
    assert (check.status, WEIGHTS in check.detail) == ("warning", True)
    assert run.causes() == {"quantised-rollout"}


@pytest.mark.parametrize(
    ("stale", "cause"),
    [
        ([STALE], "weights-differ"),
        (["model.layers.3.mlp.experts.down_proj"], "experts-differ"),
        (NAMES, "stale-weights"),
        (["model.norm.weight"], "weights-differ"),
    ],
)
def test_of_two_forms_a_stale_parameter_is_named_alone(stale: list[str], cause: str) -> None:
    held = changed(MATRICES)
    for name in stale:
        held[name] = [4, 4, 4]
    run = of_two_forms(held)
    check = run.check()
    assert check.status == "failed"
    assert f"{len(stale)} of {len(NAMES)}" in check.detail
    assert run.causes() == {cause}
    (found,) = (each for each in causes(run.case).ranked if each.fact)
    assert found.side == "engine"


def test_of_two_forms_exchanged_layers_are_seen_in_the_engines_form() -> None:
    held = changed(MATRICES)
    for name in [name for name in NAMES if name.startswith("model.layers.1.")]:
        other = name.replace(".1.", ".3.")
        held[name], held[other] = held[other], held[name]
    case = of_two_forms(held).case
    found = Difference.between(case.engine.fingerprint, case.trainer.fingerprint)
    assert found is not None
    assert found.exchanged == (("model.layers.1", "model.layers.3"),)


@pytest.mark.parametrize(
    "unlike",
    [
        {"form": "mxfp4-rounded"},
        {"weights_comparable": False},
        {"weights": {}},
        {"weights": {k: v for k, v in changed(MATRICES).items() if k not in MATRICES}},
    ],
)
def test_without_digests_in_the_engines_form_two_forms_stay_a_warning(unlike: Any) -> None:
    run = of_two_forms(changed(MATRICES) | {STALE: [4, 4, 4]}, **unlike)
    check = run.check()
    assert check.status == "warning"
    assert WEIGHTS not in check.detail
    assert run.causes() == {"quantised-rollout"}


def test_a_pass_does_not_speak_for_a_trainer_that_is_unlike_its_checkpoint() -> None:
    run = of_two_forms(changed(MATRICES))
    run.state("fsdp", **{NOT_OF_CHECKPOINT: [STALE]})
    assert WEIGHTS not in run.check().detail
    run.state("fsdp", weights=HELD | {"model.norm.weight": [4, 4, 4]})
    assert run.check().status == "failed"


def test_sides_of_one_form_are_compared_with_each_other() -> None:
    run = of_two_forms(HELD)
    run.state("fsdp", weights_form="fp8-rounded")
    case = run.case
    assert IN_ENGINES_FORM not in case.trainer.fingerprint
    assert UNDESCRIBED not in case.engine.fingerprint
    assert run.check().status == "passed"
