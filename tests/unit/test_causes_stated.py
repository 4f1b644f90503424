"""Causes that settings, a side against itself and routes tell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detectors.stated import TIMES_HELD
from mismatch.analysis.diagnosis.loaded_weights import (
    AS_READ,
    NOT_OF_CHECKPOINT,
    Difference,
    weights_as_loaded,
)
from mismatch.engines.vllm.lora import one_factor
from mismatch.models.digests import digest_tensor
from mismatch.pipeline.on_disk import not_of_checkpoint
from mismatch.types import Routing, Scoring
from tests import drawn_pair as drawn
from tests.diagnosed import causes, first, healthy, stating
from tests.texts import numbers

# ---------------------------------------------------------------- what sides state


NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in range(4)
    for part in ("self_attn.k_proj.bias", "self_attn.q_proj.weight", "mlp.experts.up")
] + ["lm_head.weight", "model.norm.weight"]
SAME = {name: [number, 2, 3, number, 5] for number, name in enumerate(NAMES)}


def with_weights(case: Case, engine: dict[str, list[int]], **config: object) -> Case:
    facts = {"config": config} if config else {}
    return stating(case, {"weights": engine} | facts, {"weights": SAME} | facts)


@pytest.mark.parametrize(
    ("differ", "config", "cause", "said"),
    [
        (["lm_head.weight"], {"tie_word_embeddings": True}, "tied-head-stale",
         (1, "lm_head.weight")),
        (["lm_head.weight"], {}, "weights-differ", (1, "lm_head.weight")),
        ([n for n in NAMES if "experts" in n], {}, "experts-differ",
         (4, "model.layers.*.mlp.experts.up")),
        ([n for n in NAMES if n.endswith("bias")], {}, "weights-differ",
         (4, "model.layers.*.self_attn.k_proj.bias")),
        (NAMES, {}, "stale-weights", (14, "more")),
    ],
)  # fmt: skip
def test_digests_that_differ_are_the_first_cause_with_their_list(
    differ: list[str], config: dict[str, object], cause: str, said: tuple[int, str]
) -> None:
    case = drawn.other_weights(0, 5)
    stated = with_weights(case, SAME | {name: [99, 98, 97] for name in differ}, **config)
    leading = first(stated)
    assert (leading.id, leading.side, leading.fact) == (cause, "either", True)
    text = str(leading.evidence[0].value)
    assert (numbers(text)[:2], text.endswith(said[1])) == ([said[0], 14], True)
    unsaid = first(case)  # evidence, never a precondition
    assert (unsaid.id, unsaid.effect) == ("side-off", leading.effect)


@pytest.mark.parametrize(
    ("engine", "trainer", "side"),
    [
        ([], ["lm_head.weight"], "trainer"),
        (["lm_head.weight"], [], "engine"),
        ([], [], "either"),  # two checkpoints
        (["lm_head.weight"], ["lm_head.weight"], "either"),
        ([], None, "either"),  # its files were not compared
    ],
)
def test_the_side_that_alone_is_unlike_its_checkpoint_is_at_fault(
    engine: list[str], trainer: list[str] | None, side: str
) -> None:
    """A trainer that holds its checkpoint's values is not away from float32 because of weights."""
    far = drawn.other_weights(0, 5)
    if trainer == []:
        sides = replace(far.engine, logprobs=far.right), replace(far.trainer, logprobs=far.left)
        far = Case.of(far.rollout, *sides, far.others)
    case = with_weights(far, SAME | {"lm_head.weight": [99, 98, 97]})
    off = [{} if names is None else {NOT_OF_CHECKPOINT: names} for names in (engine, trainer)]
    leading = first(stating(case, *off))
    assert (leading.side, leading.fact) == (side, True)
    assert leading.effect is not None


def test_weights_take_no_share_of_what_a_right_trainer_is_away_from_float32() -> None:
    case = with_weights(drawn.other_function(0, 2.0), SAME | {"model.norm.weight": [9, 9, 9]})
    facts = {NOT_OF_CHECKPOINT: []}
    found = causes(stating(case, facts, facts | {"honours_sinks": False, "attention": "sdpa"}))
    shares = {cause.id: cause.effect for cause in found.ranked}
    assert [*shares] == ["attention-sinks", "weights-differ"]
    assert shares["weights-differ"] is None


def test_what_a_side_holds_is_compared_with_the_files_of_its_checkpoint(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 3), "b.weight": torch.zeros(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    held = {name: list(digest_tensor(tensor)) for name, tensor in tensors.items()}
    moved = held | {"a.weight": list(digest_tensor(torch.ones(4, 3) * 1.02))}
    for weights, off in ((held, []), (moved, ["a.weight"])):
        side = {"weights": weights}
        assert not_of_checkpoint(side, str(tmp_path), None, ["a.weight", "b.weight"]) == off
    fused = {"weights": held | {"ab.weight": held["a.weight"]}}
    assert not_of_checkpoint(fused, str(tmp_path), None, ["a.weight", "ab.weight"]) is None


def test_fused_experts_are_compared_with_a_matrix_for_each_in_the_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(3, 4, 4, generator=generator) for _ in range(3))
    layer = "model.layers.1.mlp.experts"
    kinds = {"gate": gate, "up": up, "down": down}
    files = {
        f"{layer}.{n}.{k}_proj.weight": t[n].clone() for k, t in kinds.items() for n in range(3)
    }
    save_file(files, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    names = [f"{layer}.gate_up_proj", f"{layer}.down_proj"]

    def off(gate_up: torch.Tensor, down: torch.Tensor, sums: int) -> list[str] | None:
        held = dict(zip(names, (gate_up, down), strict=True))
        digests = {name: list(digest_tensor(tensor)[:sums]) for name, tensor in held.items()}
        return not_of_checkpoint({"weights": digests}, str(tmp_path), None, names)

    both = torch.cat([gate, up], 1)
    for sums in (4, 6):  # of an engine, and of a trainer
        assert off(both, down, sums) == []
        assert off(both, down.mT.contiguous(), sums) == []  # however a side lays out a matrix
        assert off(both, down.flip(0), sums) == [names[1]]
        assert off(both * 1.02, down, sums) == [names[0]]
    eight_bits = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in files.items()}
    save_file(eight_bits, tmp_path / "model.safetensors")
    assert off(both, down, 4) is None


def test_layers_that_are_exchanged_are_found_by_their_digests() -> None:
    swapped = dict(SAME)
    for name in NAMES:
        if ".layers.1." in name:
            other = name.replace(".layers.1.", ".layers.3.")
            swapped[name], swapped[other] = SAME[other], SAME[name]
    found = Difference.of(swapped, SAME)
    assert found.exchanged == (("model.layers.1", "model.layers.3"),)
    assert all(part in found.text() for part in found.exchanged[0])
    leading = first(with_weights(drawn.other_function(0, 2.0), swapped))
    assert (leading.id, leading.evidence[0].value) == ("weights-differ", found.text())
    swapped["lm_head.weight"] = [7, 7, 7]
    more = Difference.of(swapped, SAME).text()
    assert more.startswith(found.text())
    assert more.endswith("lm_head.weight")


@pytest.mark.parametrize("kind", ["chance", "shifted"])
def test_a_fact_comes_first_but_for_what_carries_the_mismatch(kind: str) -> None:
    """Exchanged layers choose other experts, which looks like a capture that is broken."""
    case = with_weights(routed(kind), SAME | {"model.norm.weight": [9, 9, 9]})
    assert [cause.fact for cause in causes(case).ranked] == [True, False]
    moved = with_weights(drawn.shifted(0, 1), SAME | {"model.norm.weight": [9, 9, 9]})
    assert [cause.id for cause in causes(moved).ranked] == ["misalignment", "weights-differ"]


@pytest.mark.parametrize(
    ("held", "times", "cause", "side"),
    [
        (["lm_head.weight"], 0.25, "lora-scale", "engine"),
        (["lm_head.weight"], None, "lora-scale", "engine"),
        (["model.norm.weight"], 0.25, "weights-differ", "either"),  # of other parameters
    ],
)
def test_an_adapter_that_the_engine_holds_otherwise_than_its_files_is_named(
    held: list[str], times: float | None, cause: str, side: str
) -> None:
    case = with_weights(drawn.other_weights(0, 5), SAME | {"lm_head.weight": [99, 98, 97]})
    facts = {"adapter_held_otherwise": held} | ({} if times is None else {"adapter_times": times})
    leading = next(c for c in causes(stating(case, facts, {})).ranked if c.fact)
    assert (leading.id, leading.side) == (cause, side)
    measured = [item.value for item in leading.evidence if item.what == TIMES_HELD]
    assert measured == ([times] if times and cause == "lora-scale" else [])


@pytest.mark.parametrize(
    ("ratios", "factor"),
    [
        ({"q": [0.25, 0.251], "v": [0.249]}, 0.25),
        ({"q": [0.0, 0.0]}, 0.0),  # the adapter is not there
        ({"q": [0.25], "v": [2.0]}, None),
        ({"q": [0.25], "v": []}, None),  # other matrices, not another scale
        ({}, None),
    ],
)
def test_one_factor_fits_all_matrices_or_none_is_said(
    ratios: dict[str, list[float]], factor: float | None
) -> None:
    assert one_factor(ratios) == factor


@pytest.mark.parametrize("in_memory", [True, False])
def test_digests_of_files_as_read_are_called_that(in_memory: bool) -> None:
    facts = {"weights": SAME}
    check = weights_as_loaded(facts | {"weights_in_memory": in_memory}, facts)
    assert check.status == "passed"
    assert (AS_READ in check.detail) is not in_memory


@pytest.mark.parametrize(("layers", "named"), [((0, 1), False), ((1,), True)])
def test_an_engines_own_layout_of_experts_is_no_cause(layers: tuple[int, ...], named: bool) -> None:
    names = [f"layers.{layer}.mlp.experts.up" for layer in range(2)]
    same = {name: [1, 2, 3, 4, 5] for name in names}
    other = same | {names[layer]: [1, 2, 3, 7, 5] for layer in layers}
    report = causes(stating(healthy(0), {"weights": other}, {"weights": same}))
    assert ("experts-differ" in {cause.id for cause in report.ranked}) == named


def asked_rounded(case: Case, **engine: object) -> Case:
    """The engine's experts are rounded, as asked for."""
    held = {"layers.0.mlp.experts.up": [1, 2, 3], "norm.weight": [1, 2, 3]}
    other = held | {"layers.0.mlp.experts.up": [9, 2, 3]}
    facts = {"weights": other, "weights_form": "mxfp4-rounded"}
    return stating(case, facts | engine, {"weights": held, "config": {SOFTCAP: 0.0}})


SOFTCAP = "final_logit_softcapping"


def test_experts_that_were_asked_to_be_rounded_are_no_fault_of_loading() -> None:
    case = drawn.other_weights(0, 5)
    assert first(asked_rounded(case)).id == "quantised-rollout"
    assert first(asked_rounded(case, weights_form="as-stored")).id == "experts-differ"


def test_of_two_stated_differences_the_one_with_the_mark_has_the_share() -> None:
    case = asked_rounded(drawn.softcapped(0, 12, "engine"), config={SOFTCAP: 12.0})
    softcap, rounded = causes(case).ranked
    assert {softcap.id, rounded.id} == {"logit-softcap", "quantised-rollout"}
    assert softcap.effect is not None
    assert rounded.effect is None


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


@pytest.mark.parametrize("rescored", [True, False])
def test_a_penalty_is_the_first_cause_and_not_the_decode_path(rescored: bool) -> None:
    """The engine's prefill has no penalty: it agrees with the trainer, as if decode were wrong."""
    case = healthy(0)
    moved = -0.2 * (np.arange(len(case.left)) % 3 == 0)
    engine = replace(case.engine, logprobs=case.left + moved)
    sampling = replace(case.rollout.sampling, repetition_penalty=1.1)
    rollout = replace(case.rollout, sampling=sampling)
    others = {"vllm:prefill": replace(case.engine, name="vllm:prefill")} if rescored else {}
    case = Case.of(rollout, engine, case.trainer, case.others | others)
    named = first(stating(case, {"logprobs_penalised": True}, {}))
    assert (named.id, named.side, named.fact) == ("sampling-law", "engine", True)
    assert named.effect is not None
    assert named.effect.value > 0.7
    if rescored:  # without the fact these numbers are another path of the engine
        plain = replace(case, rollout=healthy(0).rollout)
        assert "decode-vs-prefill" in {cause.id for cause in causes(plain).ranked}


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
    if kind == "one token":  # again and again: a flip of it is one flip
        scores, other = (np.tile(rng.standard_normal((3, 16)), (tokens, 1, 1)) for _ in range(2))

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
        ("one token", []),
    ],
)
def test_routes(kind: str, wanted: list[str]) -> None:
    assert [cause.id for cause in causes(routed(kind)).ranked] == wanted
