"""The parts of the SGLang engine that need no SGLang: wire format, arguments, weights."""

from __future__ import annotations

import base64
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.engines.held_weights import loaded_digests
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.sglang import wire as sglang_args
from mismatch.engines.sglang import wire as sglang_wire
from mismatch.engines.sglang.child import ErrorFile
from mismatch.engines.sglang.private import HOOK, moe_layers
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Sampling
from tests import sglang_cpu

INFO = ModelInfo(vocab_size=320, context=512, stop_ids=(2,), num_experts=8, top_k=2)


def answer(**facts: Any) -> dict[str, Any]:
    given = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 2, None]],
    }
    return {"output_ids": [7, 2], "meta_info": given | facts}


# ---------------------------------------------------------------- wire


def test_a_sample_is_ids_with_their_own_logprobs() -> None:
    sample = sglang_wire.parse_sample(answer(), "here", None)
    assert sample.token_ids == [7, 2]
    assert sample.logprobs.tolist() == [-0.5, -1.5]
    assert sample.finish_reason == "stop"
    assert sample.cached is None
    assert sglang_wire.parse_sample(answer(cached_tokens=39), "here", None).cached == 39


def test_a_sample_has_the_likeliest_of_every_token_where_they_were_asked_for() -> None:
    rows = [[[-0.5, 7, None], [-1.0, 3, None]], [[-0.1, 5, None], [-1.5, 2, None]]]
    top = sglang_wire.parse_sample(answer(output_top_logprobs=rows), "here", None).likeliest
    assert top is not None
    assert top.ids.tolist() == [[7, 3], [5, 2]]
    assert top.logprobs.tolist() == np.float32([[-0.5, -1.0], [-0.1, -1.5]]).tolist()
    for less in ([], rows[:1], [rows[0], rows[1][:1]]):
        sample = sglang_wire.parse_sample(answer(output_top_logprobs=less), "here", None)
        assert sample.likeliest is None
    body = sglang_wire.generate_request([1], {}, routes=False, likeliest=5)
    assert body["top_logprobs_num"] == 5
    assert "top_logprobs_num" not in sglang_wire.generate_request([1], {}, routes=False)


def test_a_cold_context_is_computed_anew_and_a_warm_one_may_be_read() -> None:
    """SGLang reads no cache behind the first token that it gives a logprob of."""
    cold, warm = (sglang_wire.greedy_request([5, 6, 7], 4, read) for read in (False, True))
    assert (cold["logprob_start_len"], warm["logprob_start_len"]) == (0, -1)
    for body in (cold, warm):
        law = body["sampling_params"]
        assert (law["temperature"], law["max_new_tokens"], law["ignore_eos"]) == (0.0, 4, True)
        assert body["top_logprobs_num"] > 1


def test_a_continuation_has_the_likeliest_ids_of_each_position() -> None:
    rows = [[[-0.5, 7, None], [-1.0, 9, None]], [[-0.2, 4, None]]]
    given = answer(output_top_logprobs=rows, cached_tokens=39)
    continued = sglang_wire.parse_continued(given, "here")
    assert continued.token_ids == [7, 2]
    assert continued.likeliest == [{7: -0.5, 9: -1.0}, {4: -0.2, 2: -1.5}]  # its own is there too
    assert continued.cached == 39
    with pytest.raises(MismatchError, match="1 rows"):
        sglang_wire.parse_continued(answer(output_top_logprobs=rows[:1]), "here")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"finish_reason": {"type": "abort", "message": "too long"}}, "too long"),
        ({"output_token_logprobs": [[-0.5, 7, None]]}, r"\b1 logprobs.*\b2"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-1.5, 3, None]]}, r"\b2 logprobs.*\b2"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 2, None]]}, "no logprob"),
    ],
)
def test_what_is_no_sample_is_refused(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(MismatchError, match=says):
        sglang_wire.parse_sample(answer(**facts), "prompt 3", None)


def test_every_parameter_of_the_law_is_sent() -> None:
    law = Sampling(temperature=0.7, top_p=0.9, min_p=0.1, max_tokens=5)
    body = sglang_wire.generate_request(
        [1], sglang_wire.sampling_parameters(law, (2, 5)), routes=False, seed=9
    )
    sent = body["sampling_params"]
    assert sent["top_k"] == -1  # SGLang refuses 0
    assert (sent["temperature"], sent["top_p"], sent["min_p"]) == (0.7, 0.9, 0.1)
    assert sent["sampling_seed"] == 9
    assert sent["stop_token_ids"] == [2, 5]
    unseeded = sglang_wire.generate_request([1], {}, routes=False)["sampling_params"]
    assert "sampling_seed" not in unseeded


def test_a_prefill_starts_one_early_because_its_first_entry_is_empty() -> None:
    body = sglang_wire.prefill_request([5, 6, 7, 8], 2)
    assert body["logprob_start_len"] == 1
    assert body["sampling_params"]["max_new_tokens"] == 0
    given = {"meta_info": {"input_token_logprobs": [[None, 6, 0], [-1.0, 7, 0], [-2.0, 8, 0]]}}
    assert sglang_wire.parse_prefill(given, [5, 6, 7, 8], 2, "here").tolist() == [-1.0, -2.0]
    with pytest.raises(MismatchError, match="other tokens"):
        sglang_wire.parse_prefill(given, [5, 6, 7, 9], 2, "here")
    assert len(sglang_wire.parse_prefill(given, [9, 6, 7, 8], 2, "here")) == 2
    given["meta_info"]["input_token_logprobs"][-1][1] = 0  # its name for the last id
    assert sglang_wire.parse_prefill(given, [5, 6, 7, 8], 2, "here").tolist() == [-1.0, -2.0]
    with pytest.raises(MismatchError, match="other tokens"):
        sglang_wire.parse_prefill(given, [9, 6, 7, 8], 2, "here")
    with pytest.raises(MismatchError, match="first token"):
        sglang_wire.prefill_request([5, 6], 0)


def packed(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def test_routes_are_those_of_the_layers_with_experts() -> None:
    experts = np.arange(3 * 4 * 2).reshape(3, 4, 2)  # 3 tokens, 4 layers, top-2
    routes = sglang_wire.parse_routes(answer(routed_experts=packed(experts)), 3, [1, 3], 2, "here")
    assert (routes == experts[:, [1, 3]]).all()


@pytest.mark.parametrize("routed", [None, "", "!!", packed(np.arange(7)), packed(np.arange(6))])
def test_routes_that_cannot_be_true_are_refused(routed: str | None) -> None:
    assert sglang_wire.has_routes(answer(routed_experts=routed)) is bool(routed)
    with pytest.raises(CorruptCapture):
        sglang_wire.parse_routes(answer(routed_experts=routed), 3, [1, 3], 2, "here")


# ---------------------------------------------------------------- arguments


def test_the_context_leaves_the_room_that_sglang_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOOK, raising=False)
    arguments = sglang_args.engine_arguments(EngineSpec("sglang", "m"), Sampling(seed=3), INFO, 120)
    assert arguments["context_length"] == 128
    assert arguments["enable_return_routed_experts"] is True
    assert (arguments["dtype"], arguments["random_seed"]) == ("bfloat16", 3)
    assert not {"device", "attention_backend"} & arguments.keys()
    with pytest.raises(MismatchError, match="free") as raised:
        sglang_args.engine_arguments(EngineSpec("sglang", "m"), Sampling(), INFO, 510)
    assert "by 6" in raised.value.fix
    monkeypatch.setenv(HOOK, str(Path(sglang_cpu.__file__).parent))
    monkeypatch.setenv(sglang_cpu.CPU_SWITCH, "1")
    spec = EngineSpec("sglang", "m", routing=False, gpu_memory_utilization=0.5)
    arguments = sglang_args.engine_arguments(spec, Sampling(), INFO, 120)
    assert arguments["enable_return_routed_experts"] is False
    assert arguments["mem_fraction_static"] == 0.5
    assert arguments["device"] == "cpu"


def test_seeds_count_only_in_deterministic_mode() -> None:
    spec = EngineSpec("sglang", "m")
    assert not sglang_args.deterministic(spec)
    seeded = replace(spec, args=(("enable-deterministic-inference", True),))
    assert sglang_args.deterministic(seeded)


def test_the_original_logprobs_switch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sglang_args.RAW, raising=False)
    assert not sglang_args.raw_logprobs()
    monkeypatch.setenv(sglang_args.RAW, "1")
    assert sglang_args.raw_logprobs()


# ---------------------------------------------------------------- weights


def test_fused_parameters_are_told_apart_by_name() -> None:
    from mismatch.models.digests import digest_tensor

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = torch.nn.Linear(4, 8, bias=False)
            self.qkv_proj.output_partition_sizes = [4, 2, 2]
            self.experts = torch.nn.Module()
            self.experts.w13_weight = torch.nn.Parameter(torch.randn(2, 4, 6))
            self.experts.w2_weight = torch.nn.Parameter(torch.randn(2, 4, 3))

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), Layer()])
    digests, unknown = loaded_digests(model)
    assert unknown == []
    assert set(digests) == {
        *(f"layers.1.{name}_proj.weight" for name in "qkv"),
        *(f"layers.1.experts.{name}_proj" for name in ("gate_up", "down")),
    }
    weight = model.layers[1].qkv_proj.weight
    assert digests["layers.1.k_proj.weight"] == list(digest_tensor(weight[4:6]))
    assert [layer for layer, _ in moe_layers(model)] == [1]


class FusedMoE(torch.nn.Module):
    """Holds no weights as loaded any more, as SGLang's after its triton_kernel backend."""


def test_layers_with_experts_are_found_where_a_kernel_has_dropped_their_weights() -> None:
    layers = [torch.nn.Identity(), torch.nn.Sequential(FusedMoE())]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    assert [layer for layer, _ in moe_layers(model)] == [1]


# ---------------------------------------------------------------- failures


def test_the_last_error_of_a_child_is_kept(tmp_path: Path) -> None:
    import logging

    logger = logging.getLogger("test-sglang-child")
    handler = ErrorFile(str(tmp_path / "error"))
    logger.addHandler(handler)
    logger.warning("not this")
    assert not (tmp_path / "error").exists()
    logger.error("Scheduler hit an exception: Traceback:\n  line\nRuntimeError: no memory\n")
    assert (tmp_path / "error").read_text() == "RuntimeError: no memory"
    logger.error('  File "a.py", line 3\n    assert scaling\n           ^^^^^^^\nAssertionError\n')
    assert (tmp_path / "error").read_text() == "AssertionError: assert scaling"


def test_importing_the_engine_imports_nothing_heavy() -> None:
    code = (
        "import sys, mismatch.engines.sglang.engine\n"
        "assert not {'torch', 'sglang', 'transformers', 'pandas'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
