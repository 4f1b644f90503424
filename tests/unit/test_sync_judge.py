"""Every fault of a weight sync, planted in what an engine holds, is named; a clean push passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mismatch.codec import from_json, to_json
from mismatch.features.sync.judge import (
    SCHEMA,
    judge,
    kept_caches,
    kind_of,
    of_adapters,
    parameters,
    parted,
    score_rows,
    sync_to_json,
)
from mismatch.features.sync.report import CacheRow, Parameter, ScoreRow, SyncReport
from mismatch.models.weight_states import (
    SCALE,
    Adapters,
    B,
    Prints,
    state_of,
    transposed_names,
    updated,
)
from tests.texts import numbers

Tensors = dict[str, torch.Tensor]
EXPERTS, SQUARE, WIDE = "layers.0.mlp.experts.gate_up_proj", "layers.0.o_proj.weight", "layers.0.up"
NORM, EMBED, HEAD = "norm.weight", "model.embed_tokens.weight", "lm_head.weight"
SHAPES = {EXPERTS: (4, 8, 16), SQUARE: (16, 16), WIDE: (24, 8), NORM: (16,), EMBED: (32, 8)}
Fault = Callable[[list[Tensors]], list[Tensors]]


def states() -> list[Tensors]:
    """Before any push, after two, and back."""
    return [dict(state) for state in _states()]


@lru_cache(1)
def _states() -> list[Tensors]:
    generator = torch.Generator().manual_seed(7)
    base = {n: torch.randn(s, generator=generator).bfloat16() for n, s in SHAPES.items()}
    base[NORM] = torch.ones(16, dtype=torch.bfloat16)
    pushed = [{n: updated(n, t, 0, push) for n, t in base.items()} for push in (0, 1, 2)]
    return [*pushed, dict(pushed[0])]


@lru_cache
def prints(name: str, tensor: torch.Tensor) -> Prints:
    """Tensors are keys by identity; most states share them."""
    return Prints.of(name, tensor)


def probe(held: list[Tensors], tied: dict[str, str] | None = None) -> SyncReport:
    expected = [{n: prints(n, t) for n, t in state.items()} for state in states()]
    seen = [{n: prints(n, t) for n, t in state.items()} for state in held]
    outcome = parameters(expected, seen, {}, tied or {})
    return SyncReport("toy", "vllm", "reload", 0, 0.1, outcome)


def statuses(report: SyncReport) -> dict[str, str]:
    return {p.name: p.status for p in report.faults}


def change(
    name: str, edit: Callable[[list[Tensors], int], torch.Tensor], pushes: tuple[int, ...] = (1, 2)
) -> list[Tensors]:
    """What an engine holds whose pushes go wrong for one parameter."""
    right, held = states(), states()
    for push in pushes:
        held[push][name] = edit(right, push)
    return held


def test_a_clean_push_passes() -> None:
    report = probe(states())
    assert judge(report).status == "healthy"
    assert len(report.parameters) == len(SHAPES)
    assert all(p.arrived and len(p.outcomes) == 3 for p in report.parameters)


@pytest.mark.parametrize("name", SHAPES)
def test_a_parameter_that_is_skipped_is_stale_though_the_round_trip_hides_it(name: str) -> None:
    report = probe(change(name, lambda right, push: right[0][name]))
    assert statuses(report) == {name: "stale"}
    assert report.faults[0].outcomes[2].status == "arrived"
    assert judge(report).status == "broken"


def test_an_update_that_is_dropped_the_second_time_only_is_stale() -> None:
    report = probe(change(WIDE, lambda right, push: right[1][WIDE], (2,)))
    assert [o.status for o in report.faults[0].outcomes] == ["arrived", "stale", "arrived"]


def test_a_tied_head_that_is_not_carried_has_lost_its_tie() -> None:
    held = [{**state, HEAD: states()[0][EMBED]} for state in states()]
    assert statuses(probe(held, {HEAD: EMBED})) == {HEAD: "alias_lost"}
    followed = [{**state, HEAD: state[EMBED]} for state in states()]
    assert judge(probe(followed, {HEAD: EMBED})).status == "healthy"


@pytest.mark.parametrize("factor", [0.5, 2.0, 0.0, -1.0])
def test_an_update_of_another_scale_is_measured(factor: float) -> None:
    """An adapter with the wrong alpha / rank, or one that is merged twice."""

    def scaled(right: list[Tensors], push: int) -> torch.Tensor:
        before, now = right[push - 1][SQUARE].float(), right[push][SQUARE].float()
        return (before + factor * (now - before)).bfloat16()

    report = probe(change(SQUARE, scaled, (1,)))
    expected = {0.5: "scaled", 2.0: "twice", 0.0: "stale", -1.0: "scaled"}[factor]
    assert statuses(report) == {SQUARE: expected}
    if expected in ("scaled", "twice"):
        assert report.faults[0].outcomes[0].factor == pytest.approx(factor, abs=0.05)


def test_a_second_load_that_shuffles_experts_again_is_rearranged_from_the_second_push() -> None:
    def shuffled(right: list[Tensors], push: int) -> torch.Tensor:
        return right[push][EXPERTS].flatten(1).roll(3, 1).view(4, 8, 16)

    report = probe(change(EXPERTS, shuffled, (2,)))
    assert statuses(report) == {EXPERTS: "rearranged"}
    assert report.faults[0].outcomes[0].status == "arrived"


def test_experts_that_change_places_are_named() -> None:
    report = probe(change(EXPERTS, lambda right, push: right[push][EXPERTS][[0, 2, 1, 3]]))
    assert report.faults[0].status == "partly"
    parts = report.faults[0].outcomes[0].parts
    assert list(parts) == ["exchanged"]
    assert [numbers(expert) for expert in parts["exchanged"]] == [[1, 2], [2, 1]]


def test_one_experts_shards_that_change_places_are_named() -> None:
    def swapped(right: list[Tensors], push: int) -> torch.Tensor:
        tensor = right[push][EXPERTS].clone()
        tensor[3] = tensor[3].roll(8, 1)  # gate and up
        return tensor

    report = probe(change(EXPERTS, swapped))
    assert report.faults[0].outcomes[0].parts == {"rearranged": ("expert 3",)}


def test_one_stale_expert_and_one_stale_shard_are_named() -> None:
    def expert(right: list[Tensors], push: int) -> torch.Tensor:
        tensor = right[push][EXPERTS].clone()
        tensor[2] = right[0][EXPERTS][2]
        return tensor

    def shard(right: list[Tensors], push: int) -> torch.Tensor:
        tensor = right[push][WIDE].clone()
        tensor[:12] = right[0][WIDE][:12]
        return tensor

    (fault,) = probe(change(EXPERTS, expert)).faults
    assert (fault.status, fault.outcomes[0].parts) == ("partly", {"stale": ("expert 2",)})
    (fault,) = probe(change(WIDE, shard)).faults
    assert fault.status == "partly"
    assert {label.split(",")[0] for label in fault.outcomes[0].parts["stale"]} == {
        "rows 0:6",
        "rows 6:12",
    }


@pytest.mark.parametrize("name", [SQUARE, WIDE])
def test_a_transposed_matrix_is_rearranged(name: str) -> None:
    report = probe(change(name, lambda right, push: right[push][name].t()))
    assert statuses(report) == {name: "rearranged"}
    assert report.faults[0].outcomes[0].parts == {"transposed": ("all",)}


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e20])
def test_memory_that_nothing_was_written_to_is_uninitialised(value: float) -> None:
    report = probe(change(NORM, lambda right, push: torch.full_like(right[push][NORM], value)))
    assert statuses(report) == {NORM: "uninitialised"}


def fp8(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return (tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale


def test_eight_bits_arrive_with_their_rounding_and_a_forgotten_scale_is_seen() -> None:
    """The engine's values in fp8; then with the scale of the push before."""

    def scale(tensor: torch.Tensor) -> float:
        return float(tensor.float().abs().max()) / 448

    held = change(SQUARE, lambda right, push: fp8(right[push][SQUARE], scale(right[push][SQUARE])))
    report = probe(held)
    assert judge(report).status == "healthy"
    (rounded,) = (p for p in report.parameters if p.name == SQUARE)
    assert rounded.outcomes[0].rounded
    assert not rounded.outcomes[2].rounded

    def forgotten(right: list[Tensors], push: int) -> torch.Tensor:
        now = fp8(right[push][SQUARE], scale(right[push][SQUARE]))
        return now / scale(right[push][SQUARE]) * scale(right[push][SQUARE]) * 0.8

    report = probe(change(SQUARE, forgotten))
    assert statuses(report) == {SQUARE: "scaled"}
    assert report.faults[0].outcomes[0].factor == pytest.approx(0.8, abs=0.02)


def test_values_of_no_push_are_altered() -> None:
    noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert statuses(probe(change(SQUARE, lambda right, push: noise))) == {SQUARE: "altered"}


def test_what_differs_before_any_push_or_is_not_shown_is_not_compared() -> None:
    held = [{**state, WIDE: state[WIDE].flip(0)} for state in states()]
    for state in held:
        del state[NORM]
    report = probe(held)
    assert {p.name for p in report.of_status("not_compared")} == {WIDE, NORM}
    assert all(p.reason for p in report.of_status("not_compared"))
    assert judge(report).status == "inconclusive"
    assert judge(report).code == 1


def test_nothing_compared_is_never_healthy() -> None:
    assert judge(SyncReport("toy", "vllm", "reload", 0, 0.1, ())).status == "inconclusive"


def test_a_cache_that_outlives_the_push_breaks_it() -> None:
    clean = replace(probe(states()), caches=(CacheRow(1, 4, 0, 0.0),))
    assert judge(clean).status == "healthy"
    kept = replace(clean, caches=(CacheRow(1, 4, 3, 0.5),))
    assert judge(kept).status == "broken"
    assert kept_caches(kept) == kept.caches


def test_sides_that_part_after_a_push_break_it_though_every_digest_agrees() -> None:
    generator = np.random.default_rng(0)
    base, moved = generator.normal(size=200), generator.normal(size=200)
    near = [base + 0.01, moved + 0.01, base - moved, base + 0.01]
    trainer = [base, moved, base - moved]
    rows = score_rows(near, trainer)
    assert [row.push for row in rows] == [0, 1, 2, 3]
    assert rows[3].engine_moved == 0
    assert rows[1].trainer_moved == pytest.approx(np.abs(moved - base).mean())
    report = replace(probe(states()), scores=rows)
    assert judge(report).status == "healthy"
    stale = score_rows([near[0], near[0], near[2], near[3]], trainer)
    assert [row.push for row in parted(replace(report, scores=stale))] == [1]
    assert judge(replace(report, scores=stale)).status == "broken"


def test_a_push_that_fails_the_second_time_breaks_it() -> None:
    report = replace(probe(states()), push_failed={2: "shape mismatch"})
    assert judge(report).status == "broken"


def test_the_document_comes_back_as_it_was() -> None:
    rows = (ScoreRow(0, 9, 0.01, 0.0, 0.0), ScoreRow(1, 9, None, None, 0.3))
    report = replace(probe(change(WIDE, lambda r, p: r[0][WIDE])), scores=rows)
    document = sync_to_json(report)
    assert (document.pop("schema"), document.pop("verdict")["word"]) == (SCHEMA, "broken")
    assert from_json(SyncReport, document) == report


def test_updates_differ_between_parameters_pushes_and_experts() -> None:
    base = torch.ones(4, 8, 16, dtype=torch.bfloat16)
    first, other = updated("a", base, 0, 1), updated("b", base, 0, 1)
    assert torch.equal(first, updated("a", base, 0, 1))
    assert not torch.equal(first, other)
    assert not torch.equal(first, updated("a", base, 0, 2))
    assert not torch.equal(first, updated("a", base, 1, 1))
    assert not torch.equal(first[0], first[1])
    zeros = updated("sinks", torch.zeros(8), 0, 1)
    assert (zeros != 0).all()


def test_a_verdict_names_modules_not_every_layer() -> None:
    names = ("layers.0.mlp.experts.w_up", "layers.1.mlp.experts.w_down", "layers.1.self_attn.sinks")
    stale = tuple(Parameter(f"model.{name}", "stale") for name in names)
    reason = judge(SyncReport("toy", "vllm", "reload", 0, 0.1, stale)).reason
    assert "mlp.experts (2)" in reason
    assert "self_attn.sinks (1)" in reason
    assert kind_of("model.layers.0.mlp.experts.3.up_proj.weight") == "mlp.experts.up_proj.weight"


def test_only_matrices_are_ever_transposed() -> None:
    vector, flat = torch.arange(8.0), torch.arange(32.0).view(4, 8)
    square = torch.arange(64.0).view(8, 8)
    expected = {"v": prints("v", vector), "f": prints("f", flat), "s": prints("s", square)}
    turned = {"v": prints("v", vector.flip(0)), "f": prints("f", flat.t())}
    assert transposed_names(expected, {**turned, "s": prints("s", square.t())}) == ["f", "s"]
    assert transposed_names(expected, expected) == []


def test_an_experts_rows_that_are_shuffled_over_all_blocks_are_rearranged() -> None:
    """What vLLM's reload leaves of qwen3_moe on a CPU: right values, not packed for the kernel."""

    def shuffled(right: list[Tensors], push: int) -> torch.Tensor:
        return right[push][SQUARE].flatten().roll(19).view(16, 16)

    assert statuses(probe(change(SQUARE, shuffled))) == {SQUARE: "rearranged"}


# ---------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Of a checkpoint with one attention layer."""
    folder = tmp_path_factory.mktemp("adapters")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    save_file({name: torch.randn(16, 16).bfloat16() for name in names}, folder / "m.safetensors")
    (folder / "config.json").write_text("{}")
    return Adapters(folder, 0)


def adapter_report(
    adapters: Adapters, hold: Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]
) -> SyncReport:
    """Of an engine that holds what ``hold`` makes of each push's matrices."""
    expected = [adapters.prints(push) for push in (0, 1, 2, 0)]
    held = []
    for push in range(4):
        weights = {
            name: tensor * SCALE if name.endswith(B) else tensor
            for name, tensor in adapters.tensors(push)
        }
        own = hold(weights, push) if state_of(push) else weights
        held.append({name: Prints.of(name, tensor) for name, tensor in own.items()})
    outcome = of_adapters(parameters(expected, held, {}, {}), held)
    return SyncReport("toy", "vllm", "lora", 0, 0.1, outcome)


def test_an_adapter_that_arrives_is_healthy(adapters: Adapters) -> None:
    report = adapter_report(adapters, lambda weights, push: weights)
    assert judge(report).status == "healthy"
    assert len(report.of_status("arrived")) == 8


@pytest.mark.parametrize("factor", [0.5, 2.0, 1 / SCALE * 8])
def test_an_adapter_with_another_scale_is_named_with_its_factor(
    adapters: Adapters, factor: float
) -> None:
    def hold(weights: dict[str, torch.Tensor], push: int) -> dict[str, torch.Tensor]:
        return {n: t * factor if n.endswith(B) else t for n, t in weights.items()}

    report = adapter_report(adapters, hold)
    assert {p.name for p in report.faults} == {n for n in adapters.names() if n.endswith(B)}
    for parameter in report.faults:
        assert parameter.status == "scaled"
        assert parameter.outcomes[0].factor == pytest.approx(factor, rel=0.02)
        assert parameter.outcomes[2].status == "arrived"


def test_an_adapter_that_is_not_there_is_missing(adapters: Adapters) -> None:
    def hold(weights: dict[str, torch.Tensor], push: int) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(t) if "q_proj" in n else t for n, t in weights.items()}

    report = adapter_report(adapters, hold)
    assert {p.name.split(".")[4] for p in report.faults} == {"q_proj"}
    assert {p.status for p in report.faults} == {"missing"}
    assert from_json(SyncReport, to_json(report)) == report


def test_an_adapter_that_is_not_loaded_again_is_stale(adapters: Adapters) -> None:
    first = {n: t * SCALE if n.endswith(B) else t for n, t in adapters.tensors(1)}
    report = adapter_report(adapters, lambda weights, push: first)
    assert {p.status for p in report.faults} == {"stale"}
    assert [o.status for o in report.faults[0].outcomes] == ["arrived", "stale", "arrived"]
