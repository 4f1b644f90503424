"""`mismatch doctor` and the dry run: right verdicts for machines we describe."""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from io import StringIO

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process
from huggingface_hub import constants
from rich.console import Console

from mismatch.doctor.machine import Gpu, Machine, gpus_of, parse_kind
from mismatch.doctor.memory import Workload, predict_engine
from mismatch.doctor.plan import plan
from mismatch.errors import MismatchError
from mismatch.features.doctor.examine import Diagnosis, Use, examine, look, tried, uses_of
from mismatch.models import resolve_model
from mismatch.models.config import find_config
from mismatch.models.sizes import sized
from mismatch.reports.plan import print_plan
from mismatch.run.interpreters import look_into
from mismatch.run.machine import Card
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, TrainSpec
from mismatch.types import Sampling
from tests.command import mismatch
from tests.played_driver import play_driver

GIB = 1 << 30
SCORED = "scored by the trainer at most"  # tokens of the plan


WORKING = (Use("engine", "vllm", "1.0"), Use("trainer", "fsdp", "1.0"))


def machine(gpus: int = 0, gib: int = 80, ram_gib: int = 64) -> Machine:
    one = Gpu("H100", gib * GIB, gib * GIB, "580")
    return Machine(8, ram_gib * GIB, ram_gib * GIB, (one,) * gpus)


def spec(model: str = "tiny-gpt-oss", ranks: int = 2, max_tokens: int = 128, **train) -> CheckSpec:
    name = resolve_model(model)
    return CheckSpec(
        rollout=RolloutSpec(
            engine=EngineSpec(model=name),
            prompts=PromptSpec(num_prompts=4),
            sampling=Sampling(samples_per_prompt=2, max_tokens=max_tokens),
        ),
        train=TrainSpec(model=name, **train),
        nproc_per_node=ranks,
    )


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path, monkeypatch):
    """No cached model of the machine that runs the tests decides anything."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def text_of(show, subject) -> str:
    out = StringIO()
    show(subject, Console(file=out, width=120))
    return out.getvalue()


# ---------------------------------------------------------------- plan


def test_the_plan_counts_what_the_run_would_do():
    run_plan = plan(spec(max_tokens=100), machine())
    assert run_plan.tokens["sequences"] == 4 * 2
    assert run_plan.tokens["sampled at most"] == 8 * 100
    longest = run_plan.tokens["longest sequence"]
    assert longest > 100
    # trainer, regrouped, repeated, with gradients, in float32; float32 and bf16 plain forwards
    assert run_plan.tokens[SCORED] == 8 * longest * 7
    assert [side.side for side in run_plan.sides] == [
        "engine",
        "fsdp",
        "fsdp:regrouped",
        "fsdp:repeated",
        "fsdp:grad",
        "fsdp:fp32",
        "reference:fp32",
        "plain:bf16",
        "vllm in float32",
    ]
    assert list(run_plan.stages)[:2] == ["rollout", "rollout in float32"]
    quick = plan(replace(spec(max_tokens=100), quick=True), machine())
    assert quick.tokens[SCORED] == 8 * longest * 5
    assert "rollout in float32" not in quick.stages
    quick = plan(replace(spec(max_tokens=100), noise_floor=False), machine())
    assert quick.tokens[SCORED] == 8 * longest


def test_prompts_given_as_ids_are_counted_exactly(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2, 3]}\n{"prompt_token_ids": [1, 2, 3, 4, 5]}\n')
    base = spec(max_tokens=10)
    prompts = PromptSpec(path=str(path), num_prompts=99)
    run_plan = plan(replace(base, rollout=replace(base.rollout, prompts=prompts)), machine())
    assert (run_plan.tokens["prompts"], run_plan.tokens["longest sequence"]) == (2, 15)
    assert run_plan.notes == ()


def test_a_large_model_is_planned_from_the_shipped_config():
    run_plan = plan(spec("gpt-oss-20b", ranks=8), machine(gpus=8))
    assert run_plan.config_source == "shipped with mismatch"
    assert run_plan.fits
    assert run_plan.attention.endswith("honours the sinks")
    text = text_of(print_plan, run_plan)
    assert "openai/gpt-oss-20b" in text
    assert "sharded parameters" in text
    assert text.rstrip().endswith("it fits")


def test_too_few_gpus_are_told_how_many_would_do():
    run_plan = plan(spec("gpt-oss-20b", ranks=1, master_dtype="fp32"), machine(gpus=1))
    levels = {side.side: side.level for side in run_plan.sides}
    assert levels["engine"] == "fits"
    assert levels["fsdp"] == "does not fit"
    assert any("--nproc-per-node 2" in line for line in run_plan.warnings)
    assert any("--master-dtype auto" in line for line in run_plan.warnings)
    assert any("--offload" in line for line in run_plan.warnings)
    assert text_of(print_plan, run_plan).rstrip().endswith("see the warnings")


@pytest.mark.parametrize(
    ("model", "gpus"), [("gpt-oss-20b", "1xH100-80GB"), ("gpt-oss-120b", "8xA100-80GB")]
)
def test_released_models_are_checked_whole_on_their_machines(model, gpus):
    """With what a check has by default: 64 prompts of 4, float32 reference and gradients too."""
    ranks = int(gpus[0])
    asked = replace(
        spec(model, ranks=ranks), rollout=RolloutSpec(engine=EngineSpec(model=resolve_model(model)))
    )
    if model == "gpt-oss-120b":
        asked = replace(asked, nproc_per_node=8)
    run_plan = plan(asked, machine(), gpus)
    assert {side.side: side.level for side in run_plan.sides}.keys() >= {
        "engine",
        "fsdp",
        "fsdp:grad",
        "reference:fp32",
    }
    # 20.9 billion parameters in float32 are 78 GiB: what 80 GB lack is in the host's memory. Eight
    # GPUs share those of the larger model.
    assert not [s.side for s in run_plan.sides if s.level == "does not fit"]
    assert (run_plan.float32_offload > 0) is (gpus[0] == "1")
    assert run_plan.best_verdict == "HEALTHY"


def test_passes_that_cannot_fit_are_left_out_and_the_check_goes_on():
    big = plan(spec("qwen3-8b", ranks=1), machine(gpus=1, gib=21))
    assert {side.side for side in big.refused()} <= {"engine", "fsdp"}
    reference = [side for side in big.sides if side.side == "reference:fp32"]
    assert reference[0].level == "does not fit"
    assert reference[0] not in big.refused()
    only = replace(big, sides=(*[s for s in big.sides if s.level != "does not fit"], *reference))
    assert only.fits
    (out,) = [line for line in text_of(print_plan, only).splitlines() if "left out" in line]
    assert out.endswith(": reference:fp32")


@pytest.mark.parametrize("gpus", ["8xH900", "0xH100", "A100", "", "x"])
def test_gpus_that_nobody_knows_are_refused(gpus):
    with pytest.raises(MismatchError, match="--gpus"):
        parse_kind(gpus)


@pytest.mark.parametrize("gpus", ["H100", "1xh100", "1 x H100-80GB", "1xH100-80gb"])
def test_a_kind_of_gpu_has_a_few_spellings(gpus):
    assert parse_kind(gpus) == (1, "H100-80GB")


def test_offloading_moves_the_shards_to_the_host():
    plain, moved = (
        plan(spec("gpt-oss-20b", ranks=1, offload=offload), machine(gpus=1, ram_gib=128))
        for offload in (False, True)
    )
    assert moved.sides[1].needed < plain.sides[1].needed - 35 * GIB
    (host,) = (side for side in moved.sides if side.side == "host memory")
    assert (host.side, host.level) == ("host memory", "fits")
    small = plan(spec("gpt-oss-20b", ranks=1, offload=True), machine(gpus=1, ram_gib=32))
    assert not small.fits


def test_vllm_refuses_a_gpu_that_is_not_free_and_so_does_the_plan():
    held = replace(machine(gpus=1), gpus=(Gpu("H100", 80 * GIB, 70 * GIB, "580"),))
    run_plan = plan(spec("qwen3-8b", ranks=1), held)
    engine = run_plan.sides[0]
    assert (engine.side, engine.level) == ("engine", "does not fit")
    assert "--gpu-memory-utilization 0.86" in engine.warning
    asked = spec("qwen3-8b", ranks=1)
    lower = replace(asked.rollout.engine, gpu_memory_utilization=0.86)
    lower = replace(asked, rollout=replace(asked.rollout, engine=lower))
    assert plan(lower, held).sides[0].level == "fits"


@pytest.mark.slow
def test_a_dry_run_for_other_gpus_needs_none_here(tmp_path):
    command = ("check", "--dry-run", "--model", "gpt-oss-120b", "--gpus")
    fits = mismatch(*command, "8xH100-80GB", cwd=tmp_path)
    assert fits.returncode == 0, fits.stdout + fits.stderr
    assert fits.stdout.rstrip().endswith("it fits")
    assert mismatch(*command, "1xL40S", cwd=tmp_path).returncode == 2
    nowhere = mismatch("check", "--model", "tiny-gpt-oss", "--gpus", "H100", cwd=tmp_path)
    assert nowhere.returncode == 2
    assert "--dry-run" in nowhere.stdout + nowhere.stderr


def test_the_eager_kernel_at_length_is_warned_about():
    long = spec("gpt-oss-20b", ranks=8, max_tokens=16000, attention="eager", micro_batch_tokens=1)
    run_plan = plan(long, machine(gpus=8))
    assert not run_plan.fits
    assert any("--attention auto" in line for line in run_plan.warnings)
    assert plan(replace(long, train=replace(long.train, attention="auto")), machine(gpus=8)).fits


def test_a_kernel_that_would_be_refused_is_refused_in_the_plan():
    with pytest.raises(MismatchError, match="sinks"):
        plan(spec(attention="sdpa"), machine())


def test_sequences_beyond_the_context_are_refused():
    with pytest.raises(MismatchError, match="context is 2048"):
        plan(spec(max_tokens=4000), machine())


# ---------------------------------------------------------------- doctor


def test_a_complete_machine_is_ready():
    diagnosis = examine("vllm", machine(), WORKING)
    assert diagnosis.problems == ()
    text = text_of(Diagnosis.show, diagnosis)
    assert text.splitlines()[-1].startswith("ready:")
    assert "\x1b[" not in text
    document = json.loads(json.dumps(diagnosis.to_dict()))
    assert document["ready"] is True


def test_what_a_check_refuses_is_a_problem_with_its_fix(monkeypatch):
    monkeypatch.setattr("mismatch.engines.registry.importlib.util.find_spec", lambda name: None)
    (problem,) = examine("vllm", machine(), WORKING).problems
    assert "pip install 'train-infer-mismatch[vllm]'" in problem.fix


@pytest.mark.parametrize("name", ["vllm", "fsdp"])
def test_a_package_that_is_installed_and_does_not_work_is_a_problem(name):
    broken = tuple(
        replace(use, error="ImportError: nms") if use.name == name else use for use in WORKING
    )
    diagnosis = examine("vllm", machine(), broken)
    assert not diagnosis.ready
    assert "ImportError: nms" in diagnosis.problems[0].what
    assert examine("transformers", machine(), broken).ready == (name == "vllm")


@pytest.mark.parametrize(("code", "fix"), [(0, ""), (802, "fabricmanager"), (999, "dmesg")])
def test_a_driver_that_does_not_start_is_named_with_its_error(tmp_path, monkeypatch, code, fix):
    play_driver(tmp_path / "lib", monkeypatch, code)
    monkeypatch.setattr("mismatch.features.doctor.examine._missing_compiler", lambda machine: ())
    named = examine("vllm", machine(1), WORKING).problems
    assert len(named) == bool(code)
    assert all(f"{code} CUDA_ERROR_PLAYED" in each.what and fix in each.fix for each in named)
    assert examine("vllm", machine(), WORKING).ready  # no GPU: its driver is nobody's business


# ---------------------------------------------------------------- looking at a machine


def test_a_package_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "sglang.py").write_text("raise RuntimeError('no such operator')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    look_into.cache_clear()
    uses = uses_of(look(sys.executable))
    look_into.cache_clear()
    (use,) = (use for use in uses if use.name == "sglang")
    assert "no such operator" in tried(use).error


def test_the_installed_vllm_loads_its_library_for_this_cpu():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("engine: make env")
    (use,) = (use for use in uses_of(look(sys.executable)) if use.name == "vllm")
    assert tried(use).possible


def test_a_model_of_unknown_size_is_planned_without_its_memory(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model", "vocab_size": 32}')
    run_plan = plan(spec(str(tmp_path)), machine())
    assert run_plan.sides == ()
    assert run_plan.fits
    assert any("no-such-model" in note for note in run_plan.notes)
    assert not text_of(print_plan, run_plan).rstrip().endswith("it fits")


def test_a_family_without_measured_peaks_is_planned_and_says_so():
    measured, other = (plan(spec(name), machine()) for name in ("qwen3-0.6b", "qwen2.5-0.5b"))
    assert len(other.notes) == len(measured.notes) + 1
    assert other.sides


@pytest.mark.slow
def test_the_command_examines_this_machine(tmp_path):
    done = mismatch("doctor", "--format", "json", cwd=tmp_path, timeout=400)
    document = json.loads(done.stdout)
    assert document["ready"] == (done.returncode == 0), done.stderr
    assert [use["error"] for use in document["uses"] if use["name"] == "fsdp"] == [""]


def test_an_unknown_model_is_refused_with_near_misses(tmp_path):
    done = mismatch("check", "--dry-run", "--model", "gpt-oss-21b", cwd=tmp_path)
    assert done.returncode == 2
    assert "gpt-oss-20b" in done.stderr


@pytest.mark.slow
def test_the_flag_shows_the_plan_and_starts_nothing(tmp_path):
    command = ("check", "--dry-run", "--num-prompts", "3", "--model")
    done = mismatch(*command, "tiny-gpt-oss", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sequences +12\b", done.stdout)
    assert "sink-sdpa" in done.stdout
    large = mismatch(*command, "gpt-oss-120b", "--nproc-per-node", "1", cwd=tmp_path)
    assert large.returncode == 2
    assert "does not fit" in large.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_another_job_holds_of_a_gpu_is_not_there():
    full = plan(spec("qwen3-8b", ranks=1), machine(gpus=1, gib=80))
    taken = replace(machine(gpus=1, gib=80), gpus=(Gpu("H100", 80 * GIB, 16 * GIB, "580"),))
    shared = plan(spec("qwen3-8b", ranks=1), taken)
    assert full.sides[1].level == "fits"
    assert shared.sides[1].level == "does not fit"
    assert {side.capacity for side in shared.sides} == {16 * GIB}


def test_a_gpu_that_shares_the_hosts_memory_is_a_gpu():
    card = Card("0", "GPU-1", "NVIDIA GB10", "[N/A]", "580.1", free="[N/A]")
    (gpu,) = gpus_of([card], (120 * GIB, 90 * GIB))
    assert (gpu.memory_bytes, gpu.free_bytes) == (120 * GIB, 90 * GIB)


def test_prompt_logprobs_are_taken_in_chunks_on_a_gpu():
    shape = sized(find_config(resolve_model("gpt-oss-20b")))
    engine = EngineSpec(model="m")
    short, long = (
        predict_engine(shape, engine, Workload(1, tokens)).moments["prefill rescoring"]
        for tokens in (1024, 16384)
    )
    name = "logits of the prefill"
    assert short[name] == long[name]
