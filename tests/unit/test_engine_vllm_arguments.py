"""What is sent to vLLM. A stand-in lists vLLM's arguments: the real one is heavy to import."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mismatch.engines.model_info import ModelInfo
from mismatch.engines.vllm import arguments as vllm_args
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Sampling
from tests.checkpoints import make, make_mxfp4
from tests.contract.conftest import installed

MOE = ModelInfo(100, 4096, (2,), num_experts=8, top_k=2)
DENSE = dataclasses.replace(MOE, num_experts=0, top_k=0)


REFUSES: list[str] = []  # arguments that the stand-in refuses, in words of its own


@dataclasses.dataclass
class EngineArgs:
    model: str = ""
    enforce_eager: bool = False
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    worker_extension_cls: str = ""
    enable_return_routed_experts: bool = False

    def create_engine_config(self) -> None:
        for name in REFUSES:
            if getattr(self, name):
                raise ValueError(f"no {name} here")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm")
    module.EngineArgs = EngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: True)


def arguments(spec: EngineSpec, info: ModelInfo = MOE, **law: Any) -> dict[str, Any]:
    return vllm_args.engine_arguments(spec, Sampling(**law), info, longest=200)


def with_args(**args: Any) -> EngineSpec:
    return EngineSpec(model="m", args=tuple(args.items()))


@pytest.mark.parametrize(
    ("law", "mode"),
    [
        ({}, "raw_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "processed_logprobs"),
        ({"top_k": 5}, "processed_logprobs"),
        ({"min_p": 0.1}, "processed_logprobs"),
        ({"temperature": 0.0}, "raw_logprobs"),
        ({"temperature": 0.0, "top_k": 5}, "raw_logprobs"),
    ],
)
def test_the_logprob_mode_follows_the_law(law: dict[str, Any], mode: str) -> None:
    assert arguments(EngineSpec(model="m"), **law)["logprobs_mode"] == mode


def test_nothing_is_left_to_vllms_defaults_that_changes_the_law() -> None:
    settings = arguments(EngineSpec(model="m", dtype="fp32"), seed=4)
    assert settings["generation_config"] == "vllm"
    assert (settings["dtype"], settings["seed"]) == ("float32", 4)
    sent = vllm_args.sampling_arguments(Sampling(top_k=3, min_p=0.1), (2, 7))
    assert (sent["n"], sent["top_k"], sent["min_p"], sent["stop_token_ids"]) == (1, 3, 0.1, [2, 7])
    assert (sent["repetition_penalty"], sent["min_tokens"]) == (1.0, 0)


def test_the_context_is_as_long_as_needed_and_no_longer_than_the_model() -> None:
    assert arguments(EngineSpec(model="m"))["max_model_len"] == 256
    assert arguments(EngineSpec(model="m", max_model_len=1000))["max_model_len"] == 1000
    short = dataclasses.replace(MOE, context=201)
    assert arguments(EngineSpec(model="m"), short)["max_model_len"] == 201
    silent = dataclasses.replace(MOE, context=None)
    assert "max_model_len" not in arguments(EngineSpec(model="m"), silent)


def test_routes_are_captured_by_us_on_a_cpu_and_by_vllm_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu = arguments(EngineSpec(model="m"))
    assert on_cpu["enable_prefix_caching"] is False
    assert "enable_return_routed_experts" not in on_cpu
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: False)
    on_gpu = arguments(EngineSpec(model="m"))
    assert on_gpu["enable_return_routed_experts"] is True
    assert "enable_prefix_caching" not in on_gpu
    assert "enforce_eager" not in on_gpu
    assert "enable_return_routed_experts" not in arguments(EngineSpec(model="m"), DENSE)
    assert "enable_return_routed_experts" not in arguments(EngineSpec(model="m", routing=False))


@pytest.mark.parametrize(
    ("given", "sequences", "largest"),
    [
        ({}, 0, 256), ({}, 256, 256), ({}, 4096, 256), ({}, 24, 32), ({}, 1, 1),
        ({"max_num_seqs": 24}, 256, 32), ({"max_num_seqs": 64}, 8, 8),
        ({"enforce_eager": True}, 24, None),
    ],
)  # fmt: skip
def test_a_gpu_captures_graphs_of_batches_that_come_unless_the_user_says_which(
    given: dict[str, Any], sequences: int, largest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not vllm_args.capture_sizes(with_args(**given), sequences)  # on a CPU
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: False)
    sizes = vllm_args.capture_sizes(with_args(**given), sequences).get("cudagraph_capture_sizes")
    assert (sizes and sizes[-1]) == largest


@pytest.mark.parametrize("cpu", [True, False])
def test_no_routes_are_captured_over_a_pipeline(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: cpu)
    routed = "enable_prefix_caching" if cpu else "enable_return_routed_experts"
    for size, captures in ((2, False), (1, True)):
        spec = with_args(**{"pipeline-parallel-size": size})
        assert (routed in arguments(spec)) is captures
        assert vllm_args.captures_routes(spec, MOE) is captures


def test_prefix_caching_with_routes_on_a_cpu_is_refused() -> None:
    spec = with_args(enable_prefix_caching=True)
    with pytest.raises(MismatchError, match="prefix caching") as caught:
        arguments(spec)
    assert "--no-routing" in caught.value.fix
    assert arguments(spec, DENSE)["enable_prefix_caching"] is True


def test_prefills_are_whole_unless_the_user_asks_otherwise() -> None:
    assert arguments(EngineSpec(model="m"))["enable_chunked_prefill"] is False
    chunked = arguments(with_args(max_num_batched_tokens=64))
    assert "enable_chunked_prefill" not in chunked
    assert chunked["max_num_batched_tokens"] == 64


def test_the_users_arguments_win() -> None:
    settings = arguments(
        with_args(**{"enforce-eager": False, "logprobs_mode": "raw_logprobs"}), top_k=2
    )
    assert settings["enforce_eager"] is False
    assert settings["logprobs_mode"] == "raw_logprobs"


@pytest.mark.parametrize(
    ("name", "value", "says", "fix"),
    [
        ("max_num_seq", 4, "no such engine argument", "max_num_seqs"),
        ("zzz", 4, "no such engine argument", "vllm serve --help"),
        ("dtype", "float32", "sets this itself", "--dtype"),
        ("model", "x", "sets this itself", "--model"),
        ("worker-extension-cls", "x", "worker extension", "drop it"),
        ("logprobs_mode", "raw_logits", "not logprobs", "processed_logprobs"),
    ],
)
def test_a_bad_argument_is_refused(name: str, value: Any, says: str, fix: str) -> None:
    with pytest.raises(MismatchError) as caught:
        arguments(with_args(**{name: value}))
    assert says in caught.value.message
    assert fix in caught.value.fix


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse(temperature: float) -> None:
    with pytest.raises(MismatchError, match="vLLM samples at"):
        arguments(EngineSpec(model="m"), temperature=temperature)


def test_packed_experts_on_a_cpu_are_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By id, of which this machine has nothing, and by directory."""
    made = make_mxfp4(tmp_path / "model", tmp_path / "plain")
    for model in ("openai/gpt-oss-20b", str(made)):
        with pytest.raises(MismatchError) as refused:
            vllm_args.require_machine(EngineSpec(model=model))
        assert "--weights engine=bf16" in refused.value.fix
        vllm_args.require_machine(EngineSpec(model=model, weights="bf16"))
    monkeypatch.setattr(vllm_args, "is_cpu_build", lambda: False)
    vllm_args.require_machine(EngineSpec(model=str(made)))


def test_the_environment_is_a_default_and_not_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    # Set before it is unset: so that the test's own change is undone as well.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "1")
    vllm_args.set_environment("m")
    assert vllm_args.os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert vllm_args.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert vllm_args.START_METHOD not in vllm_args.os.environ


MADE_THEN_STARTED = """
import sys
from pathlib import Path
import torch
from mismatch.engines.vllm.arguments import set_environment
from mismatch.models.derived import derive

def fill():
    torch.zeros(1 << 26).add_(1)  # in parallel

if __name__ == "__main__":
    torch.set_num_threads(2)
    model = derive(Path(sys.argv[1]), "mxfp4-rounded")
    torch.zeros(1 << 26).add_(1)  # as larger weights do
    set_environment(str(model))
    from vllm.utils.system_utils import get_mp_context
    core = get_mp_context().Process(target=fill)
    core.start()
    core.join(60)
    hangs = core.is_alive()
    core.kill()
    raise SystemExit("the core hangs" if hangs else core.exitcode)
"""


@pytest.mark.slow
@pytest.mark.skipif(not installed("vllm"), reason="engine: no vLLM here: make env")
def test_a_core_is_not_forked_from_a_process_that_made_its_weights(tmp_path: Path) -> None:
    """On a GPU the core of a float32 engine of MXFP4 experts hung before it loaded them."""
    script = tmp_path / "worker.py"
    script.write_text(MADE_THEN_STARTED)
    made = str(make("gpt_oss", tmp_path / "model"))
    environment = {**os.environ, "MISMATCH_CACHE": str(tmp_path), vllm_args.START_METHOD: "fork"}
    done = subprocess.run(
        [sys.executable, str(script), made], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


CAPTURING = {"model": "m", vllm_args.CAPTURE: True}


@pytest.mark.parametrize(
    ("refused", "left", "reason"),
    [
        ([], CAPTURING, False),
        ([vllm_args.CAPTURE], {"model": "m"}, True),
        (["model"], CAPTURING, False),  # not the capture's fault: vLLM says so itself
    ],
)
def test_a_capture_that_vllm_refuses_is_left_out(
    refused: list[str], left: dict[str, Any], reason: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REFUSES", refused)
    arguments, why = vllm_args.without_refused_capture(CAPTURING)
    assert arguments == left
    assert bool(why) is reason
