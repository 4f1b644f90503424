"""Routes of vLLM's monolithic Triton kernel, on the class as shipped; and refusals elsewhere."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from mismatch.engines.distribution_capture import stable_top_k
from tests.contract.conftest import installed

needs_vllm = pytest.mark.skipif(not installed("vllm"), reason="engine: no vLLM here: make env")

PRELUDE = """
import os
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import types
import torch
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as shipped
from vllm.distributed.aux_output_connector import worker as connector
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as capturer

Kernel = shipped.OAITritonMxfp4ExpertsMonolithic
calls = []
shipped.triton_kernel_moe_forward = lambda **given: calls.append(given) or given["hidden_states"]


def kernel(renormalize=True):
    made = Kernel.__new__(Kernel)
    made.topk, made.renormalize, made.quant_config = 4, renormalize, None
    return made


def apply(made, logits, out):
    hidden = torch.ones(len(logits), 2)
    return made.apply(
        hidden_states=hidden, w1=None, w2=None, router_logits=logits, activation=None,
        global_num_experts=32, expert_map=None, apply_router_weight_on_input=False,
        a1q_scale=None, routing_replay_out=out,
    )
"""


def in_vllm(code: str) -> None:
    """Run a script that imports the real vLLM, in a process of its own."""
    script = PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_of_equal_logits_the_lower_expert_wins() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert stable_top_k(logits, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    coarse = torch.randn(2_000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen = stable_top_k(coarse, 4)
    order = sorted(range(32), key=lambda e: (-coarse[7, e].item(), e))
    assert chosen[7].tolist() == order[:4]


@needs_vllm
@pytest.mark.grid
def test_the_shipped_kernel_writes_the_experts_it_routes_to() -> None:
    in_vllm("""
    assert not kernel().supports_routing_replay_capture()  # what vLLM 0.32 and 0.33 refuse
    from mismatch.engines.vllm import private as capture
    capture.install()
    capture.install()  # once is enough
    assert kernel().supports_routing_replay_capture()
    assert not kernel(renormalize=False).supports_routing_replay_capture()
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    buffer = torch.full((8, 4), -1, dtype=torch.int16)
    apply(kernel(), logits, buffer[:2])
    assert buffer[:2].tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]], buffer
    assert (buffer[2:] == -1).all()
    assert len(calls) == 1 and calls[0]["gating_output"] is logits and calls[0]["topk"] == 4
    apply(kernel(), logits, None)
    assert len(calls) == 2
    """)


@pytest.mark.grid
@needs_vllm
@pytest.mark.slow
def test_vllms_binder_takes_the_shipped_kernel_and_a_refusal_does_not_end_the_engine() -> None:
    """The binder as shipped, on a model with one MoE layer of this kernel, then of another."""
    in_vllm("""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsMonolithic

    class Other(FusedMoEExpertsMonolithic):
        pass

    class Runner(MoERunner):
        layer_id = 0
        _quant_method = property(lambda self: self.routed_experts.quant_method)

    Other.__abstractmethods__ = Runner.__abstractmethods__ = frozenset()
    sizes = types.SimpleNamespace(use_ep=False, ep_size=1, dp_size=1, max_num_tokens=16,
                                  experts_per_token=4, device="cpu")

    def model_with(fused):
        fused.moe_config = sizes
        runner = Runner.__new__(Runner)
        torch.nn.Module.__init__(runner)
        impl = types.SimpleNamespace(fused_experts=fused)
        method = types.SimpleNamespace(
            is_monolithic=True, moe_kernel=types.SimpleNamespace(impl=impl)
        )
        experts = torch.nn.Module()
        experts.quant_method = method
        runner.routed_experts = experts
        model = torch.nn.Module()
        model.layer = runner
        return model, experts

    source = types.SimpleNamespace(capture=lambda *a: None)
    try:
        connector.bind_routed_experts_capturer(model_with(kernel())[0], source)
    except ValueError as error:
        assert "monolithic" in str(error)
    else:
        raise AssertionError("vLLM captures from this kernel by itself now: drop the wrapper")
    from mismatch.engines.vllm import private as capture
    capture.install()
    bind = connector.bind_routed_experts_capturer  # by the name that vLLM calls
    model, experts = model_with(kernel())
    bind(model, source)
    assert experts.routing_sink.buffer.shape == (16, 4)
    assert not hasattr(model, capture.REFUSED)
    model, experts = model_with(Other.__new__(Other))
    bind(model, source)
    assert "Other" in getattr(model, capture.REFUSED)
    
    class Wrapper:  # as CUDA graphs wrap a model: reads reach it, writes do not
        def __init__(self, inside):
            self.inside = inside

        def __getattr__(self, name):
            return getattr(self.inside, name)

        def unwrap(self):
            return self.inside

    model, experts = model_with(Other.__new__(Other))
    bind(Wrapper(model), source)
    assert "Other" in getattr(model, capture.REFUSED)
    """)
