"""Equal bits: known truths on made arrays, the gate, and the table of what excludes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch.analysis.comparison import compare
from mismatch.analysis.plugins import RunArtefacts
from mismatch.experiments.fixes.catalogue import chosen_of
from mismatch.experiments.fixes.planning import with_all
from mismatch.features.exact.excluded import CONDITIONS, Stack, excluded, planned, table
from mismatch.features.exact.measure import measure, ulps
from mismatch.features.exact.probe import choose, compared, orders
from mismatch.features.exact.results import BatchProbe, Exactness, said
from mismatch.features.exact.section import lacks
from mismatch.features.exact.worker import every_way, until_parted, with_positions
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, Sampling, TrainSpec
from mismatch.types import Distributions, Rollout, Routing, Scoring
from tests.command import mismatch
from tests.made_run import MODEL, make_run, rollout, scoring

DECODE, PREFILL = "transformers:decode", "transformers:prefill"
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = float(np.finfo(np.float32).max)


@given(FLOATS.filter(lambda value: abs(value) < LARGEST), st.integers(0, 40))
def test_ulps_count_steps_between_neighbours(value: float, steps: int) -> None:
    start = other = np.float32(value)
    for _ in range(steps):
        other = np.nextafter(other, np.float32(np.inf))
    assert ulps(np.array([start]), np.array([other])).tolist() == [steps]
    assert ulps(np.array([other]), np.array([start])).tolist() == [steps]


def rounded(made: Scoring) -> Scoring:
    """The scoring as a back-end in float32 gives it."""
    return replace(made, logprobs=made.logprobs.astype(np.float32).astype(np.float64))


def artefacts(*scorings: Scoring, samples: Rollout | None = None) -> RunArtefacts:
    samples = samples or rollout()
    named = {each.name: each for each in scorings}
    decode, train = scorings[0], named["fsdp"]
    headline = compare(samples, decode, train, sampled_by_left=True, headline_only=True)
    return RunArtefacts(samples, decode, train, headline, named, {})


def measured(*scorings: Scoring, **changed: Any) -> Exactness:
    return measure(artefacts(*scorings, **changed), CheckSpec())


def same(name: str) -> Scoring:
    return rounded(scoring(name, rollout()))


def test_one_step_in_one_token_is_found_where_it_is() -> None:
    train, at = same("fsdp"), 17
    moved = train.logprobs.astype(np.float32)
    moved[at] = np.nextafter(moved[at], np.float32(0))
    result = measured(same(DECODE), replace(train, logprobs=moved.astype(np.float64)))
    (pair,) = result.pairs
    assert (pair.unequal, pair.n, pair.ulps, pair.dtype) == (1, 96, 1, "float32")
    samples, first = rollout(), pair.first
    assert first is not None
    row = int(samples.offsets[first.sequence]) + first.position
    assert row == samples.actions[at]
    assert first.token == samples.token_ids[row]
    assert first.prompt == samples.prompt_index[first.sequence]
    assert (pair.word, result.word) == ("not exact", "not exact")
    assert "1 of 96" in said(result)


def test_equal_numbers_that_were_computed_twice_are_exact() -> None:
    result = measured(same(DECODE), same("fsdp"), same("fsdp:repeated"))
    assert [pair.word for pair in result.pairs] == ["exact", "exact"]
    assert result.word == "exact"


def test_a_pass_that_differs_from_its_own_repetition_is_not_exact() -> None:
    shifted = replace(same("fsdp:repeated"), logprobs=same("fsdp").logprobs - 2.0**-9)
    result = measured(same(DECODE), same("fsdp"), shifted)
    assert [pair.word for pair in result.pairs] == ["exact", "not exact"]
    assert "trainer: repeated" in said(result)


@pytest.mark.parametrize("facts", [{"mode": "train"}, {"mode": "train", "file": "scores.parquet"}])
def test_numbers_that_may_be_copies_prove_nothing(facts: Any) -> None:
    result = measured(same(DECODE), replace(same("fsdp"), fingerprint=facts))
    assert (result.pairs[0].unequal, result.word) == (0, "not proven")
    assert "copy" in said(result)


def test_a_value_that_is_no_float32_is_compared_as_it_is() -> None:
    train = same("fsdp")
    values = train.logprobs.copy()
    values[3] = np.nextafter(values[3], 0.0)
    (pair,) = measured(same(DECODE), replace(train, logprobs=values)).pairs
    assert (pair.unequal, pair.ulps, pair.dtype) == (1, 1, "float64")


def routed(name: str, ids: np.ndarray, weights: np.ndarray) -> Scoring:
    present = np.ones(len(ids), np.bool_)
    return replace(same(name), routing=Routing((0,), 8, ids, present, weights))


def test_experts_are_a_set_and_their_weights_go_with_them() -> None:
    tokens = len(rollout().token_ids)
    at = np.arange(tokens)
    ids = np.stack((at % 4, 4 + at % 3), axis=-1).astype(np.uint8)[:, None]
    weights = np.tile(np.array([[[0.7, 0.3]]], np.float32), (tokens, 1, 1))
    turned = routed("fsdp", ids[..., ::-1], weights[..., ::-1])
    result = measured(routed(DECODE, ids, weights), turned)
    assert {pair.what: pair.word for pair in result.others} == {
        "experts chosen": "exact",
        "experts' weights": "exact",
    }
    row = int(rollout().actions[5]) - 1
    other = ids.copy()
    other[row, 0, 0] = 7
    result = measured(routed(DECODE, ids, weights), routed("fsdp", other, weights))
    chosen, weighed = result.others
    assert (chosen.unequal, weighed.unequal) == (1, 1)
    assert chosen.first == weighed.first
    facts: Any = {**turned.fingerprint, "replay": {"mode": "ids", "source": DECODE}}
    result = measured(routed(DECODE, ids, weights), replace(turned, fingerprint=facts))
    assert {pair.word for pair in result.others} == {"not proven"}


def test_distributions_are_compared_whole() -> None:
    kept = np.array([2, 9])
    values = np.log(np.full((2, 500), 0.002, np.float32))
    moved = values.copy()
    moved[1, 3] = np.nextafter(moved[1, 3], np.float32(0))
    sides = [
        replace(same(name), distributions=Distributions(kept, each, 500))
        for name, each in ((DECODE, values), ("fsdp", moved))
    ]
    (pair,) = measured(*sides).others
    assert (pair.what, pair.n, pair.unequal, pair.ulps) == ("distributions", 2, 1, 1)


# ---------------------------------------------------------------- the gate


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (0.01, 1)])
def test_the_gate_asks_for_equal_bits(tmp_path: Path, shift: float, code: int) -> None:
    run = make_run(tmp_path / "run", shift=shift)
    asked = ["compare", run, "--left", DECODE, "--right", "fsdp", "--fail-on", "broken"]
    assert mismatch(*asked).returncode == 0
    gated = mismatch(*asked, "--require", "exact")
    assert gated.returncode == code, gated.stderr
    assert ("required: exact" in gated.stderr) == bool(code)


def test_what_cannot_be_required_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    refused = mismatch("compare", run, "--require", "exat")
    assert refused.returncode == 2
    assert "exact" in refused.stderr


# ---------------------------------------------------------------- the table


def stack(engine: str = "vllm", gpu: bool = True, experts: bool = False, **given: Any) -> Stack:
    names: dict[str, Any] = {"args": (), "env": (), "dtype": "bf16"} | given
    train = {name[6:]: names.pop(name) for name in [*names] if name.startswith("train_")}
    law = names.pop("sampling", Sampling())
    version = names.pop("version", (0, 32))
    environment = names["env"]
    spec = CheckSpec(
        rollout=RolloutSpec(engine=EngineSpec(engine=engine, **names), sampling=law),
        train=TrainSpec(**train),
    )
    return Stack(spec, gpu, experts, version, None, environment)


INVARIANT = (("VLLM_BATCH_INVARIANT", "1"),)
DETERMINISTIC = ("enable_deterministic_inference", True)
ASYNC_TP = ("compilation_config", {"pass_config": {"fuse_gemm_comms": True}})
STACKS = (
    stack(),
    stack(gpu=False),
    stack(experts=True, env=INVARIANT, train_dtype="fp32"),
    stack(version=(0, 25), tensor_parallel_size=2, args=(ASYNC_TP, ("speculative_config", {}))),
    stack(args=(("kv_cache_dtype", "fp8"), ("quantization", "fp8")), dtype="fp16"),
    stack("sglang", experts=True, tensor_parallel_size=2),
    stack("sglang", args=(DETERMINISTIC, ("attention_backend", "aiter"))),
    stack(
        "transformers", experts=True, train_layout="packing", train_sequence_parallel=2,
        train_autocast="bf16", train_head_dtype="fp32", train_router_dtype="fp32",
        train_logprobs_dtype="bf16", train_temperature_in="logits", train_scorer="verl",
        train_dtype="fp32", sampling=Sampling(temperature=0.7, top_p=0.9),
    ),
)  # fmt: skip


def ids_of(given: Stack) -> set[str]:
    return {row.id for row in excluded(given)}


def test_every_row_has_known_conditions_and_a_source_and_holds_in_some_stack() -> None:
    rows = table()
    used = {name for row in rows.values() for name in row["when"]}
    assert used == CONDITIONS.keys()
    assert all(row["source"].startswith("https://") for row in rows.values())
    adapter = object()  # any
    apart = replace(STACKS[0].spec.rollout.engine, adapter=adapter, adapter_as="own")
    spec = replace(STACKS[0].spec, rollout=replace(STACKS[0].spec.rollout, engine=apart))
    reached = set().union(*map(ids_of, (*STACKS, replace(STACKS[0], spec=spec))))
    assert reached == rows.keys()


def test_what_removes_a_setting_removes_its_row() -> None:
    assert "vllm-batches" in ids_of(stack())
    assert "vllm-batches" not in ids_of(stack(env=INVARIANT))
    assert "vllm-fused-experts" not in ids_of(stack(experts=True))
    off = (("VLLM_USE_FLASHINFER_SAMPLER", "0"),)
    assert "vllm-flashinfer-sampler" in ids_of(stack(env=INVARIANT))
    assert "vllm-flashinfer-sampler" not in ids_of(stack(env=(*INVARIANT, *off)))
    eager = stack("transformers", False, args=(("attention", "eager"),), train_attention="eager",
                  train_micro_batch_tokens=1)  # fmt: skip
    assert ids_of(eager) == {"decode-shape"}
    assert not any(row.certain for row in excluded(eager))


def test_a_plan_shows_every_row_before_anything_starts() -> None:
    spec = replace(STACKS[0].spec, train=TrainSpec(model=MODEL, dtype="fp32"))
    rows = excluded(Stack.planned(spec))
    for note, row in zip(planned(spec).notes, rows, strict=True):
        assert row.what in note
        assert row.remove in note
        assert row.side in note
    assert "dtypes" in {row.id for row in rows if row.certain}


# ---------------------------------------------------------------- batches and fixes


def test_a_batch_takes_a_sequence_of_every_prompt_first_and_is_shuffled() -> None:
    samples = rollout()
    chosen = choose(samples, 8)
    assert sorted(samples.prompt_index[chosen].tolist()) == list(range(8))
    assert len(choose(samples, 100)) == samples.n_sequences
    for count in range(2, 20):
        ways = orders(count)
        assert {tuple(sorted(order)) for order in ways.values()} == {tuple(range(count))}
        assert ways["shuffled"] != ways["together"] == ways["alone"]


def test_every_way_gives_a_sequence_back_under_its_number() -> None:
    """An engine that adds the place in its batch to the values of one sequence."""
    sequences = [[n, n + 1, n + 2] for n in range(0, 12, 3)]

    def score(given: list[list[int]]) -> list[np.ndarray]:
        return [
            with_positions(1, [ids[1] + 0.5 * place * (ids[0] == 6), ids[2]])
            for place, ids in enumerate(given)
        ]

    scores = every_way("prefill", sequences, score)
    rows = np.arange(4)
    samples = rollout()
    pairs = {pair.what: pair for pair in compared("engine", scores, samples, rows)}
    one, shuffled, again = pairs.values()
    assert (one.unequal, one.n, again.unequal, again.word) == (1, 8, 0, "exact")
    moved = orders(4)["shuffled"].index(2) != 2
    assert shuffled.unequal == int(moved)
    assert one.first is not None
    assert (one.first.sequence, one.first.position) == (2, 1)


def test_greedy_tokens_count_up_to_the_first_that_parts() -> None:
    same = np.column_stack((np.arange(4), -np.ones(4), [7, 8, 9, 9]))
    other = same.copy()
    other[2:, 2] = [5, 5]
    cut = until_parted({"decode alone 0": same, "decode together 0": other}, 1)
    assert {key: len(values) for key, values in cut.items()} == {
        "decode alone 0": 3,
        "decode together 0": 3,
    }


def test_a_probe_counts_for_the_word_of_its_run() -> None:
    result = measured(same(DECODE), same("fsdp"))
    pair = replace(result.pairs[0], what="batch of 1 / 8", scope="one side")
    report = SimpleNamespace(result=lambda id: BatchProbe(8, (pair,)))
    assert lacks(result, report) == ""
    off = replace(pair, unequal=3)
    report = SimpleNamespace(result=lambda id: BatchProbe(8, (off,)))
    assert off.what in lacks(result, report)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_the_fix_sets_what_excludes_equal_bits_and_can_be_set(engine: str) -> None:
    spec = CheckSpec(
        rollout=RolloutSpec(engine=EngineSpec(engine=engine, args=(("kv_cache_dtype", "fp8"),))),
        train=TrainSpec(dtype="fp32", autocast="bf16", head_dtype="fp32", layout="packing"),
    )
    fixed = with_all(chosen_of("exact"), spec)
    left = {row.id for row in excluded(Stack(fixed, False, False, (0, 32)))}
    assert left <= {
        "engine-kernels", "decode-shape", "vllm-no-invariance-on-cpu", "vllm-chunked-prefill"
    }  # fmt: skip
    assert with_all(chosen_of("exact"), fixed) == fixed
