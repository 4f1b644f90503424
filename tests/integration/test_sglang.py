"""The real SGLang on this machine's CPU: whole checks, and what goes wrong in the middle of one.

The argument for the numbers: in float32 SGLang and the trainer are the same function, whatever the
family, so no logprob may differ by more than rounding and not one expert may differ. That holds for
gpt-oss only if our attention with sinks is right.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.planted_checkpoint import plant
from mismatch.engines.base import UNTESTED
from mismatch.processes.launch import interpreter_environment, own_python
from mismatch.run import store
from mismatch.specs import EngineSpec
from tests import checkpoints, families, sglang_cpu
from tests.conftest import grid
from tests.contract.conftest import MAKE, installed
from tests.integration.conftest import Run, run_check
from tests.integration.test_failures import (
    ENGINE,
    assert_ended,
    start,
    wait_for_workers,
    workers_of,
)
from tests.integration.test_locate import located, location_of
from tests.sameness import FLIPS

SAME_IN_FP32 = 1e-4
FP32 = (
    *("--engine", "sglang", "--dtype", "fp32", "--train-dtype", "fp32", "--no-noise-floor"),
    *("--nproc-per-node", "1", "--num-prompts", "12", "--samples-per-prompt", "2"),
)
# llama: its configuration imports torchvision, whose GPU build cannot be imported unprepared
MODELS = ("tiny-gpt-oss", "qwen3_moe", "llama")
LOCAL = pytest.mark.skipif(not installed("sglang"), reason=f"engine: no SGLang: {MAKE['sglang']}")
pytestmark = [pytest.mark.slow, LOCAL]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs: dict[str, Run] = {}

    def get(model: str) -> Run:
        if model not in runs:
            folder = tmp_path_factory.mktemp(model)
            flags = ["--model", model, "--max-tokens", "32"]
            if model in checkpoints.FAMILIES:  # no chat template: prompts are ids
                flags[1] = str(checkpoints.make(model, folder / "model"))
                flags += ["--prompts", str(families.write_prompts(folder / "prompts.jsonl", 12))]
            runs[model] = run_check(folder / "run", *FP32, *flags)
            runs[model].require_judged()
        return runs[model]

    return get


@pytest.mark.parametrize("model", grid(MODELS, "tiny-gpt-oss"))
def test_it_agrees_with_the_trainer_in_fp32(model: str, run_of: Any) -> None:
    run = run_of(model)
    assert len(run.tokens) > 100
    assert run.tokens["delta"].abs().max() <= SAME_IN_FP32
    prefill = store.load_scoring(run.directory, "sglang:prefill")
    trainer = store.load_scoring(run.directory, "fsdp")
    assert abs(prefill.logprobs - trainer.logprobs).max() <= SAME_IN_FP32


@pytest.mark.parametrize("model", grid(["tiny-gpt-oss", "qwen3_moe"], "tiny-gpt-oss"))
def test_it_routes_as_the_trainer_does_in_fp32(model: str, run_of: Any) -> None:
    run = run_of(model)
    routing = run.headline["routing"]
    assert routing["routing_disagree_layer"]["value"] <= FLIPS
    assert routing["routing_disagree_layer"]["n_tokens"] > 100


@pytest.mark.parametrize("model", grid(MODELS, "tiny-gpt-oss"))
def test_it_loaded_the_weights_of_the_checkpoint(model: str, run_of: Any) -> None:
    assert run_of(model).checks["weights-as-loaded"] == "passed"


def test_a_report_says_what_is_ours_in_it(run_of: Any) -> None:
    gpt_oss = run_of("tiny-gpt-oss")
    fingerprint = store.load_scoring(gpt_oss.directory, "sglang:decode").fingerprint
    assert fingerprint["substitutes"] == [sglang_cpu.SINKS]
    assert sglang_cpu.SINKS in " ".join(gpt_oss.output.split())[:20_000].replace(" ,", ",") or (
        sglang_cpu.SINKS in (gpt_oss.directory / "report.html").read_text().replace("&#39;", "'")
    )
    assert UNTESTED["deterministic"] in {e["what"] for e in gpt_oss.report["not_tested"]}


@pytest.mark.grid
def test_a_dense_model_needs_no_substitute(run_of: Any) -> None:
    scoring = store.load_scoring(run_of("llama").directory, "sglang:decode")
    assert scoring.fingerprint["substitutes"] == []


def is_sglangs(process: psutil.Process) -> bool:
    """Not a resource tracker, nor a tool that an import runs for a moment and that may be gone."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "spawn_main" in command or "sglang::" in command


def located_sides(run: Path, code: int, output: str) -> dict[str, Any]:
    assert (run / "locate.json").exists(), output
    sides: dict[str, Any] = {side.role: side for side in location_of(run).sides}
    assert sides.keys() == {"engine", "trainer"}, output
    assert sides["engine"].name == "sglang:prefill"
    assert code == int(any(side.source for side in sides.values())), output
    return sides


@pytest.mark.grid
def test_its_modules_are_recorded_and_a_clean_run_has_no_source(
    run_of: Any, tmp_path: Path
) -> None:
    code, output, run = located(run_of("qwen3_moe").directory, tmp_path)
    sides = located_sides(run, code, output)
    assert all(side.groups == () for side in sides.values())
    assert all(side.held is not None and side.held < SAME_IN_FP32 for side in sides.values())
    places = [{site.site for site in side.sites} for side in sides.values()]
    assert places[0] == places[1]


@pytest.mark.grid
def test_a_planted_fault_is_its_first_source(run_of: Any, tmp_path: Path) -> None:
    """In the trainer's copy, whose weights and settings the reference shares.

    Which of the layer's modules is the first that moves the end depends on the sampled tokens, and
    these on the CPU: the modules that err do not.
    """
    run = tmp_path / "run"
    shutil.copytree(run_of("tiny-gpt-oss").directory, run)
    spec = json.loads((run / "spec.json").read_text())
    source = plant(Path(spec["train"]["model"]), tmp_path / "planted", "layer-noise", 0.03)
    spec["train"]["model"] = str(source)
    (run / "spec.json").write_text(json.dumps(spec))
    sides = located_sides(run, *located(run, tmp_path)[:2])
    assert sides["trainer"].source is None
    planted = {"q", "k", "v", "attention_output", "router", "mlp"}
    groups = sides["engine"].groups
    assert {(group.site, group.layers) for group in groups} == {(site, (1,)) for site in planted}
    assert groups[0].site == "q"
    assert sides["engine"].source is not None


def children_of(directory: Path) -> list[psutil.Process]:
    """SGLang's own processes, its scheduler first; they start after the engine's worker."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        for worker in workers_of(directory, ENGINE):
            spawned = [child for child in worker.children(recursive=True) if is_sglangs(child)]
            if len(spawned) >= 2:
                return sorted(spawned, key=lambda child: child.pid)
        time.sleep(0.1)
    raise AssertionError("SGLang never started its processes")


@pytest.mark.grid
def test_a_killed_scheduler_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--engine", "sglang", "--num-prompts", "64", "--max-tokens", "200")
    process = start(tmp_path / "run", "--model", "tiny-gpt-oss", *flags)
    family = children_of(tmp_path)
    family[0].kill()
    assert_ended(process, tmp_path / "run", "SGLang", "fix:")
    assert not [child for child in family if child.is_running()]


@pytest.mark.grid
def test_ctrl_c_ends_sglangs_own_processes_too(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--model", "tiny-gpt-oss", "--engine", "sglang")
    wait_for_workers(tmp_path, ENGINE, 1)
    family = children_of(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    assert_ended(process, tmp_path / "run", "interrupted", "fix:")
    assert not [child for child in family if child.is_running()]


@pytest.mark.grid
@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("attention_backend=no_such_backend", "Prefill: no_such_backend"),
        ("tp_size=2", "--tensor-parallel-size"),
    ],
)
def test_a_bad_argument_is_refused_with_its_reason(
    argument: str, says: str, tmp_path: Path
) -> None:
    flags = ("--model", "tiny-gpt-oss", "--engine", "sglang", "--engine-arg", argument)
    run = run_check(tmp_path / "run", *flags)
    assert run.code == 2
    assert says in " ".join(run.output.split())
    assert "fix:" in run.output
    assert "Traceback" not in run.output


def test_the_branch_of_triton_kernels_is_captured_too() -> None:
    """SGLang's router as shipped, on the branch that runs gpt-oss on a GPU, with its kernel out."""
    script = """
    from mismatch.engines.sglang import private
    private.hook().prepare()
    import types
    import torch
    from sglang.srt.layers.moe import topk

    router = topk.TopK.__new__(topk.TopK)
    torch.nn.Module.__init__(router)
    router.layer_id = 5
    router.topk_config = topk.TopKConfig(top_k=3, layer_id=5, renormalize=True)
    router.topk_config.output_format = topk.TopKOutputFormat.TRITON_KERNEL
    router._resolve_routing_inputs = lambda *given: (None, None)
    topk.routing = lambda logits, k, **given: (None, None, None, None, k)
    taken = []
    capturer = types.SimpleNamespace(capture=lambda **given: taken.append(given))
    topk.get_global_experts_capturer = lambda: capturer
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    router.forward_cuda(torch.ones(1, 2), logits)
    assert taken == []  # if SGLang captures here by itself now, drop the wrapper
    assert private.capture_triton_routes() == ""
    assert router.forward_cuda(torch.ones(1, 2), logits).n_expts_act == 3
    (given,) = taken
    assert given["layer_id"] == 5 and given["topk_indices"].tolist() == [[1, 2, 4]]
    """
    python = own_python(EngineSpec("sglang"))
    command = [python or sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | interpreter_environment(python)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
