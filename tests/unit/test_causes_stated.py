"""Causes that settings, a side against itself and routes tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.diagnosis.case import Case
from mismatch.types import Routing, Scoring
from tests import drawn_pair as drawn
from tests.diagnosed import causes, first, healthy, stating

# ---------------------------------------------------------------- what sides state


@pytest.mark.parametrize(
    ("differ", "cause"),
    [
        (["lm_head.weight"], "tied-head-stale"),
        (["layers.0.mlp.experts.up"], "experts-differ"),
        (["layers.0.q_proj.weight"], "lora-scale"),
        (["layers.0.q_proj.weight", "norm.weight"], "stale-weights"),
    ],
)
def test_digests_give_a_difference_its_name_and_its_share(differ: list[str], cause: str) -> None:
    names = ["lm_head.weight", "layers.0.mlp.experts.up", "layers.0.q_proj.weight", "norm.weight"]
    same = {name: [1, 2, 3] for name in names}
    case = drawn.other_weights(0, 5)
    leading = first(
        stating(case, {"weights": same}, {"weights": same | {n: [9, 2, 3] for n in differ}})
    )
    assert (leading.id, leading.side) == (cause, "trainer")
    assert leading.effect is not None
    unsaid = first(case)  # evidence, never a precondition
    assert unsaid.id == "weights-differ"
    assert unsaid.effect == leading.effect


@pytest.mark.parametrize(("layers", "named"), [((0, 1), False), ((1,), True)])
def test_an_engines_own_layout_of_experts_is_no_cause(layers: tuple[int, ...], named: bool) -> None:
    names = [f"layers.{layer}.mlp.experts.up" for layer in range(2)]
    same = {name: [1, 2, 3, 4, 5] for name in names}
    other = same | {names[layer]: [1, 2, 3, 7, 5] for layer in layers}
    report = causes(stating(healthy(0), {"weights": other}, {"weights": same}))
    assert ("experts-differ" in {cause.id for cause in report.ranked}) == named


def test_resolved_settings_are_compared_field_by_field() -> None:
    engine = {"rope_theta": 10000, "rms_norm_eps": 1e-5, "sliding_window": 128}
    case = drawn.other_function(0, 1.0)
    other = stating(case, {"config": engine}, {"config": engine | {"rope_theta": 40000.0}})
    assert first(other).id == "rope-config"
    same = stating(
        healthy(0), {"config": engine}, {"config": {k: float(v) for k, v in engine.items()}}
    )
    assert causes(same).ranked == ()


def test_an_onset_at_the_stated_window_is_the_window() -> None:
    case = stating(drawn.onset(0, 20, at=40), {"sliding_window": 40}, {})
    assert first(case).id == "sliding-window"


@pytest.mark.parametrize("kept", [None, 1.0, 0.98])
def test_a_law_that_was_cut_for_sampling_alone_is_named_by_the_settings(kept: float | None) -> None:
    """SGLang scores the whole law: what it cut leaves no mark in any number."""
    case = stating(healthy(0), {"logprobs_truncated": False}, {})
    assert causes(case).ranked == ()
    cut = replace(case.rollout, sampling=replace(case.rollout.sampling, top_k=20))
    case = replace(case, rollout=cut)
    if kept is not None:
        extra = {"kept_mass": np.full(len(case.left), kept)}
        case = replace(case, trainer=replace(case.trainer, extra=extra))
    named = [(cause.id, cause.side) for cause in causes(case).ranked]
    assert named == ([] if kept == 1.0 else [("sampling-truncation", "engine")])
    renormalised = stating(case, {"logprobs_truncated": True}, {})
    assert causes(renormalised).ranked == ()  # that one is seen in the numbers


def test_tokens_of_a_cut_law_are_seen_though_both_sides_score_the_whole_one() -> None:
    """Four hundredths of a nat are nine times mean |delta|; no setting is stated."""
    draw = drawn.draw(11, prompts=256, rounding=0.005)
    law = drawn.log_law(draw.engine)
    least = np.sort(law, axis=1)[:, -17][:, None]
    kept = np.where(law >= least, law, -np.inf)
    draw.sampled = kept - np.log(np.exp(kept).sum(axis=1, keepdims=True))
    named = first(draw.case())
    assert (named.id, named.side) == ("sampling-law", "engine")
    assert "sampling-truncation" in named.alike
    surplus = next(item.value for item in named.evidence if "entropy" in item.what)
    assert 0.035 < float(surplus) < 0.0434


def test_the_trainers_own_softcap_is_no_other_law_of_the_sampler() -> None:
    case = drawn.softcapped(0, 5.0, rounding=0.005)
    assert float((case.right + case.trainer.entropy).mean()) > 0.05  # by the trainer's law
    assert "sampling-law" not in {cause.id for cause in causes(case).ranked}


def test_settings_in_use_are_no_cause_of_their_own() -> None:
    case = stating(
        healthy(0), {"quantization": "mxfp4", "prefix_caching": True}, {"autocast": "bf16"}
    )
    assert causes(case).ranked == ()


# ---------------------------------------------------------------- a side against itself


def with_pass(case: Case, name: str, moved: np.ndarray) -> Case:
    other = Scoring(name, case.trainer.token_ids, case.trainer.logprobs + moved, {})
    return replace(case, others=case.others | {name: other})


@pytest.mark.parametrize(
    ("name", "cause"),
    [("fsdp:regrouped", "microbatch-dependence"), ("fsdp:grad", "train-eval-paths")],
)
def test_a_trainer_that_moves_against_itself(name: str, cause: str) -> None:
    case = healthy(3)
    noise = np.random.default_rng(0).standard_normal(len(case.left))
    assert causes(with_pass(case, name, 0.005 * noise)).ranked == ()
    draw = drawn.draw(3)
    good = drawn.log_law(draw.trainer)
    draw.trainer = draw.trainer + 0.12 * draw.rng.standard_normal(draw.logits.shape)
    odd = draw.case()
    ids = odd.trainer.token_ids
    moved = good[np.arange(len(ids)), ids] - odd.trainer.logprobs
    leading = first(with_pass(odd, name, moved))
    assert (leading.id, leading.side, leading.status) == (cause, "trainer", "confirmed")


def test_the_engines_own_rescoring_confirms_its_decode_path() -> None:
    draw = drawn.draw(4)
    good = draw.engine
    draw.engine = good + 0.3 * draw.rng.standard_normal(good.shape)
    case = draw.case()
    ids = case.engine.token_ids
    prefill = drawn.log_law(good)[np.arange(len(ids)), ids]
    case = replace(
        case, others=case.others | {"vllm:prefill": Scoring("vllm:prefill", ids, prefill, {})}
    )
    leading = first(case)
    assert (leading.id, leading.side, leading.status) == (
        "decode-vs-prefill",
        "engine",
        "confirmed",
    )


# ---------------------------------------------------------------- routed experts


def routed(kind: str) -> Case:
    """Top-2 of 16 experts in 3 layers; near-ties flip, or a capture is wrong."""
    case, rng = healthy(5, prompts=24), np.random.default_rng(6)
    tokens = len(case.rollout.token_ids)
    scores = rng.standard_normal((tokens, 3, 16))
    other = scores + 0.02 * rng.standard_normal(scores.shape)
    if kind == "chance":
        other[:, 1] = rng.standard_normal((tokens, 16))
    if kind == "shifted":
        other = np.roll(other, 1, axis=0)

    def routing(values: np.ndarray) -> Routing:
        order = np.argsort(-values, axis=2)[:, :, :2].astype(np.uint8)
        top = -np.sort(-values, axis=2)
        margin = (top[:, :, 1] - top[:, :, 2]).astype(np.float32)
        return Routing((0, 1, 2), 16, order, np.ones(tokens, bool), None, margin)

    return replace(
        case,
        engine=replace(case.engine, routing=routing(scores)),
        trainer=replace(case.trainer, routing=routing(other)),
    )


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("near-ties", []),
        ("chance", ["corrupt-route-capture"]),
        ("shifted", ["shifted-route-capture"]),
    ],
)
def test_routes(kind: str, wanted: list[str]) -> None:
    assert [cause.id for cause in causes(routed(kind)).ranked] == wanted
