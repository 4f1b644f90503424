"""A kernel is run before it is trusted: wrong ones are refused, with the number, or passed over.

"By name" is ``--attention package.module:function``; "auto" is the choice among fast kernels, here
played by functions of ours, because the real ones need a GPU (tests/gpu has those).
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mismatch.errors import MismatchError
from mismatch.run.store import save_scoring
from mismatch.specs import Pass, TrainSpec
from mismatch.training.attention import trial
from mismatch.training.attention.resolve import (
    OUR_KERNELS,
    register_kernels,
    resolve_attention,
    resolve_for,
)
from mismatch.training.attention.trial import Geometry, geometry_of, try_kernel
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.score import score_pass
from mismatch.training.source import skeleton
from mismatch.training.user_kernels import is_user_kernel, load_function, register_attention
from mismatch.types import Scoring
from tests.checkpoints import configuration, make, rollout
from tests.invented_run import facts, likely, report_of, sampled, saved
from tests.texts import numbers

MINE = "tests.unit.user_attention"
CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return skeleton(configuration("gpt_oss"))


def _name(function: str) -> str:
    return f"{MINE}:{function}"


# ---------------------------------------------------------------- the trial


def test_the_geometry_is_the_models(model: PreTrainedModel) -> None:
    assert geometry_of(model, True) == Geometry(4, 2, 16, 16, True, True, 0.25)
    plain = geometry_of(skeleton(configuration("llama")), False)
    assert (plain.window, plain.sinks) == (False, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("function", ["attend", "attend_added@eager", "attend_without_mask@none"])
def test_what_is_right_passes_in_every_dtype(function: str, dtype: torch.dtype) -> None:
    geometry = Geometry(6, 2, 24, 16, True, True, 0.3)
    outcome = try_kernel(register_attention(_name(function)), geometry, CPU, dtype)
    if dtype == torch.float64:  # their softmax is in float32
        assert not outcome.passed
        assert outcome.forward is not None
        assert outcome.forward < 1e-6
        return
    assert outcome.passed, outcome
    assert set(outcome.gradients) == {"q", "k", "v", "sinks"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, BF16])
def test_our_kernel_passes(dtype: torch.dtype) -> None:
    register_kernels()
    geometry = Geometry(8, 1, 64, 64, True, True, 0.125)
    assert try_kernel(OUR_KERNELS["sink-sdpa"], geometry, CPU, dtype).passed


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("drops_sinks", r"\d+ % \(full"),
        ("ignores_the_window", r"[\d.]+ % .*window"),
        ("leaks", r"[\d.]+ % .*documents"),
        ("attend_without_mask@none", ""),
        ("raises", "RuntimeError: head size"),
        ("wrong_shape", r"not \[B, T, H, Dv\]"),
    ],
)
def test_faults_are_told(model: PreTrainedModel, function: str, fault: str) -> None:
    name = _name(function)
    if not fault:
        assert resolve_for(name, model, CPU, BF16).tried == (f"{name}: passed",)
        return
    with pytest.raises(MismatchError, match=fault) as caught:
        resolve_for(name, model, CPU, BF16)
    assert "--attention auto" in caught.value.fix


@pytest.mark.slow
def test_flex_attention_needs_a_gpu(model: PreTrainedModel) -> None:
    with pytest.raises(MismatchError, match=r"flex_attention: .*CUDA"):
        resolve_for("flex_attention", model, CPU, BF16)


# ---------------------------------------------------------------- auto


@pytest.mark.parametrize("fault", ["", "output off by 3 % (full attention)"])
def test_auto_on_a_gpu_is_sink_sdpa_once_it_was_tried(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    asked = []

    def outcome(implementation: str, *arguments: object) -> trial.Trial:
        asked.append((implementation, *arguments))
        return trial.Trial(fault)

    monkeypatch.setattr(trial, "try_kernel", outcome)
    assert resolve_for("auto", model).label == "sink-sdpa"
    assert resolve_for("auto", model, CPU, BF16).tried == ()
    assert not asked
    cuda = torch.device("cuda")
    if fault:
        with pytest.raises(MismatchError, match=re.escape(fault)):
            resolve_for("auto", model, cuda, BF16)
    else:
        resolved = resolve_for("auto", model, cuda, BF16)
        assert (resolved.requested, resolved.label, resolved.honours_sinks) == (
            "auto",
            "sink-sdpa",
            True,
        )
        assert resolved.tried == ("sink-sdpa: passed",)
    assert asked == [(OUR_KERNELS["sink-sdpa"], geometry_of(model, True), cuda, BF16)]
    dense = skeleton(configuration("llama"))
    assert resolve_for("auto", dense, cuda, BF16).label == "sdpa"


# ---------------------------------------------------------------- by name


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("no_such_module_here:f", "no_such_module_here: ModuleNotFoundError"),
        (f"{MINE}:nothing", "has no nothing"),
        (f"{MINE}:NOT_A_FUNCTION", "is no function"),
        (f"{MINE}:attend@half", "mask 'half'"),
        (f"{MINE}:attend@", "mask ''"),
        (f"{MINE}:", "names no function"),
        ("attend", "names no function"),
    ],
)
def test_functions_that_are_not_there(text: str, fault: str) -> None:
    with pytest.raises(MismatchError, match=fault) as caught:
        load_function(text)
    assert caught.value.fix


def test_functions_are_found() -> None:
    from tests.unit import user_attention

    assert load_function(_name("attend")) == (user_attention.attend, "sdpa")
    assert load_function(_name("Kernels.attend@flash")) == (user_attention.attend, "flash")
    assert is_user_kernel("a.b:c@eager")
    assert not is_user_kernel("kernels-community/flash-attn3:attend")


def test_a_module_that_fails_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_kernels.py").write_text("raise ValueError('no CUDA')\n")
    monkeypatch.chdir(tmp_path)  # the current directory is looked at
    with pytest.raises(MismatchError, match="ValueError: no CUDA") as caught:
        load_function("broken_kernels:attend")
    assert "import broken_kernels" in caught.value.fix


def test_a_wrong_gradient_is_told_and_not_refused(model: PreTrainedModel) -> None:
    name = _name("sinks_without_gradient")
    resolved = resolve_for(name, model, CPU, BF16)
    assert resolved.label == name
    (tried,) = resolved.tried
    assert tried.startswith(f"{name}: ")
    found_in = tried.removeprefix(name)
    assert "sinks" in found_in
    assert numbers(found_in) == [100]


@pytest.mark.parametrize(
    ("function", "off"),
    [("attend", None), ("sharpens", 0.0142), ("drops_sinks", 1.0), ("overflows", math.inf)],
)
def test_a_wrong_output_in_float32_is_measured_and_not_refused(
    model: PreTrainedModel, function: str, off: float | None
) -> None:
    exact = resolve_for(_name(function), model, CPU, torch.float32)
    assert exact.error == (None if off is None else pytest.approx(off, rel=0.3))
    if function in ("attend", "sharpens"):  # others are refused: see above
        assert resolve_for(_name(function), model, CPU, BF16).error is None
    with pytest.raises(MismatchError, match="head size"):
        resolve_for(_name("raises"), model, CPU, torch.float32)


@pytest.mark.parametrize("off", [None, 3e-4, 0.0142, 1e9])
def test_a_kernel_that_is_wrong_in_float32_is_broken_whatever_it_does_to_the_run(
    tmp_path: Path, off: float | None
) -> None:
    tokens = sampled(prompts=16, response=20)
    values, kernel = likely(tokens), _name("sharpens")
    run = saved(tmp_path / "run", tokens, values, values, {})
    tried = {} if off is None else {"attention_error": off, "attention_candidates": [kernel]}
    exact = Scoring("fsdp:fp32", tokens.token_ids[tokens.actions], values, facts("train", **tried))
    save_scoring(run, exact, tokens)
    report = report_of(run)
    found = [check for check in report.checks if check.id == "attention-trial"]
    expected = {None: [], 3e-4: ["warning"]}.get(off, ["failed"])  # TF32 is no fault
    assert [check.status for check in found] == expected
    assert all(kernel in check.detail for check in found)
    assert (report.verdict.status == "broken") == (expected == ["failed"])


def test_nothing_runs_where_there_is_no_device(model: PreTrainedModel) -> None:
    resolved = resolve_attention(_name("raises"), configuration("gpt_oss"))
    assert (resolved.honours_sinks, resolved.tried) == (True, ())


def test_families_that_compute_with_their_masks_are_refused(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel
) -> None:
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    with pytest.raises(MismatchError, match=f"{_name('attend')} .*gpt_oss.*masks"):
        resolve_for(_name("attend"), model)


@pytest.mark.slow
def test_a_pass_runs_with_it(tmp_path: Path) -> None:
    from tests.unit import user_attention

    world = World.start()
    try:
        spec = TrainSpec(str(make("gpt_oss", tmp_path / "model")), dtype="fp32")
        tokens = rollout(((5, 12), (5, 30), (6, 9)))
        scorings = []
        for name in ("sink-sdpa", _name("attend"), _name("attend_added@eager")):
            for layout in ("padding", "packing"):
                chosen = replace(spec, attention=name, layout=layout)  # type: ignore[arg-type]
                loaded = load(chosen, world.mesh, world.device)
                scorings.append(score_pass(world, loaded, tokens, Pass("fsdp", chosen)))
        off = load(replace(spec, attention=_name("sharpens")), world.mesh, world.device)
        told = score_pass(world, off, tokens, Pass("fsdp", off.spec))
        with pytest.raises(MismatchError, match="output off by"):
            load(
                replace(spec, attention=_name("drops_sinks"), dtype="bf16"),
                world.mesh,
                world.device,
            )
    finally:
        dist.destroy_process_group()
    assert told is not None
    assert told.fingerprint["attention_error"] == off.attention.error
    first = scorings[0]
    assert first is not None
    for other in scorings[1:]:
        assert other is not None
        assert np.abs(other.logprobs - first.logprobs).max() < 1e-4
    ran = scorings[2].fingerprint  # type: ignore[union-attr]
    assert ran["attention"] == _name("attend")
    assert ran["attention_candidates"] == [f"{_name('attend')}: passed"]
    assert ran["honours_sinks"]
    assert "attention_candidates" not in first.fingerprint
    assert all(mask is not None for mask in user_attention.CALLS)
