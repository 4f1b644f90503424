"""The main job, from the command line: real vLLM samples, a real 2-rank FSDP2 world scores again.

The argument: in float32 both sides agree to 1e-4 and choose the same experts, so that whatever is
measured in bf16 is the mismatch of bf16 kernels, and a planted fault stands out against it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from benchmarks.calibration import plugin
from mismatch.features.locate.kinds import MODULE
from mismatch.pipeline.document import schema
from mismatch.pipeline.saved_runs import UNVERIFIED
from tests.conftest import grid
from tests.sameness import FLIPS

from .conftest import SMALL, Run, run_check

pytestmark = pytest.mark.slow
# Attention of a trainer whose blocks beyond the second are wrong, in bf16 alone.
WRONG_BLOCKS = """
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

def attend(module, query, *args, **more):
    out, weights = eager_attention_forward(module, query, *args, **more)
    if query.dtype == torch.bfloat16:
        out[:, 256:] *= 0.9
    return out, weights
"""
ARTEFACTS = (
    "report.html",
    "report.json",
    "report.md",
    "tokens.parquet",
    "rollout.parquet",
    "spec.json",
    "scores/vllm-decode.parquet",
    "scores/vllm-prefill.parquet",
    "scores/vllm-fp32.parquet",
    "scores/plain-bf16.parquet",
    "scores/fsdp.parquet",
    "routing/vllm-decode.safetensors",
    "routing/fsdp.safetensors",
)


def test_a_healthy_model_passes_and_leaves_its_artefacts(default_run):
    assert default_run.report["verdict"]["fitness"]["status"] in ("healthy", "tolerable")
    assert default_run.report["verdict"]["status"] not in ("broken", "unfit"), default_run.output
    assert default_run.code == default_run.report["headline"]["exit_code"]
    last = default_run.output.strip().splitlines()[-1]
    assert last.startswith("verdict: ")
    assert default_run.report["verdict"]["status"] in last.lower()
    for name in ARTEFACTS:
        assert (default_run.directory / name).stat().st_size > 0, name


def test_the_output_is_plain_where_it_is_not_a_terminal(default_run):
    assert "\x1b" not in default_run.output
    assert max(map(len, default_run.output.splitlines())) <= 200


@pytest.mark.parametrize(
    "run",
    grid(["default_run", "fp32_run", "no_sinks_run", "raw_run"], "default_run", "no_sinks_run"),
)
def test_reports_fulfil_the_shipped_schema(run, request):
    Draft202012Validator(schema()).validate(request.getfixturevalue(run).report)


def test_bf16_mismatch_has_the_size_that_this_model_shows(default_run):
    """Seen for a trained gpt-oss of this size: mean |delta| 0.011, k3 3.1e-4."""
    assert 1e-3 < default_run.value("logprob_abs_diff_mean") < 0.03
    assert 1e-6 < default_run.value("k3_kl") < 2e-3
    assert default_run.value("probs_pearson") > 0.99
    assert 0 < default_run.headline["routing"]["routing_disagree_layer"]["value"] < 0.2
    assert default_run.headline["sampled_by_left"] is True


def test_every_number_carries_its_interval_and_counts(default_run):
    sizes = default_run.report["run"]
    for name, estimate in default_run.headline["metrics"].items():
        assert estimate["n_prompts"] == 16, name
        if "exact" in name:  # at some of the tokens
            assert 50 < estimate["n_sequences"] <= 64, name
            assert estimate["n_tokens"] == 512, name
        else:
            assert estimate["n_sequences"] == sizes["n_sequences"] == 64, name
            assert estimate["n_tokens"] == sizes["n_tokens"], name
        if estimate["low"] is not None:
            assert estimate["low"] <= estimate["value"] <= estimate["high"], name


def test_the_report_says_what_the_token_table_says(default_run):
    tokens = default_run.tokens
    assert len(tokens) == default_run.report["run"]["n_tokens"]
    delta = tokens["train_logprob"] - tokens["rollout_logprob"]
    np.testing.assert_array_equal(tokens["delta"], delta)
    assert default_run.value("logprob_abs_diff_mean") == pytest.approx(delta.abs().mean())
    assert default_run.value("k3_kl") == pytest.approx((np.exp(delta) - 1 - delta).mean())
    flips = tokens["routing_flips"]
    any_flip = default_run.headline["routing"]["routing_disagree_any"]["value"]
    assert (flips > 0).mean() == pytest.approx(any_flip)
    assert tokens["token"].str.len().gt(0).mean() > 0.9


def test_the_noise_floor_is_measured_not_assumed(default_run):
    floor = {(pair["left"], pair["right"]): pair for pair in default_run.report["noise_floor"]}
    exact = [
        ("vllm:decode", "vllm:prefill"),  # equal on a CPU, not on a GPU
        ("fsdp", "fsdp:regrouped"),
        ("fsdp", "fsdp:repeated"),
        ("fsdp", "fsdp:grad"),
    ]
    for pair in exact:
        assert floor[pair]["metrics"]["logprob_abs_diff_mean"]["value"] < 1e-3, pair
    for side in ("vllm:decode", "fsdp"):
        assert floor[side, "reference:fp32"]["metrics"]["logprob_abs_diff_mean"]["value"] > 1e-3


def test_all_semantic_checks_pass_on_a_clean_run(default_run):
    bad = {id: status for id, status in default_run.checks.items() if status != "passed"}
    assert bad.keys() <= {"importance-ratio"}, bad  # a 99.7 % test, so a warning may happen
    assert "failed" not in bad.values()
    assert {"displaced-engine", "displaced-trainer", "turns"} <= default_run.checks.keys()
    assert len(default_run.checks) == 35


def test_a_clean_run_rounds_as_a_plain_forward_does(default_run):
    square = default_run.report["square"]
    assert {finding["standing"] for finding in square["findings"]} == {"within"}
    for leg in square["legs"]:
        assert 0.9 < leg["excess"]["value"] < 1.1, leg["scoring"]
    gaps = {gap["left"]: gap["size"]["value"] for gap in square["gaps"]}
    assert gaps.keys() == {"vllm:fp32", "fsdp:fp32"}
    assert max(gaps.values()) < 1e-6
    assert square["seconds"].keys() == {"plain:bf16", "reference:fp32", "vllm:fp32", "fsdp:fp32"}


def test_one_long_sequence_reaches_beyond_the_runs_own(default_run):
    """Both sides read it in float32; only what lies beyond it is not tested."""
    long = default_run.report["long_sequence"]
    assert long["tokens"] == 2047 > 10 * long["reached"]  # of 2,048 positions one is left free
    names = ["vllm:long", "fsdp:long", "vllm:as-run:long", "fsdp:as-run:long"]
    assert [gap["scoring"] for gap in long["gaps"]] == names
    for gap in long["gaps"][2:]:
        assert 0.5 < max(block["nats"] / block["plain"] for block in gap["blocks"]) < 1.5
    kinds = {f"long-sequence-{side}" for side in ("engine", "trainer")}
    assert kinds | {f"{kind}-rounding" for kind in kinds} <= default_run.checks.keys()
    untested = {entry["what"] for entry in default_run.report["not_tested"]}
    assert "positions beyond 2,047" in untested
    assert "One long sequence" in (default_run.directory / "report.html").read_text()


@pytest.mark.grid
def test_a_kernel_that_is_wrong_in_bf16_beyond_every_response_is_broken(tmp_path, monkeypatch):
    """No response of the run is so long, and float32 takes another path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "wrong_blocks.py").write_text(WRONG_BLOCKS)
    flags = ("--num-prompts", "16", "--samples-per-prompt", "2", "--nproc-per-node", "1")
    own = ("--engine", "transformers", "--attention", "wrong_blocks:attend@eager")
    run = run_check(tmp_path / "run", *flags, *own)
    assert run.failed == {"long-sequence-trainer-rounding"}
    assert run.report["verdict"]["status"] == "broken"
    assert run.code == 1


@pytest.mark.grid
@pytest.mark.parametrize("function", ["attend", "sharpens"])
def test_a_kernel_that_fails_its_trial_in_float32_is_broken(tmp_path, function):
    """It scales its scores by 1 % too much, which its trial in bf16 lets pass."""
    own = ("--engine", "transformers", "--attention", f"tests.unit.user_attention:{function}")
    run = run_check(tmp_path / "run", "--num-prompts", "8", "--max-tokens", "16", *own)
    wrong = function == "sharpens"
    named = {"attention-trial", "implementation-gap-trainer", "long-sequence-trainer"}
    assert run.failed == (named if wrong else set())
    assert (run.report["verdict"]["status"] == "broken") == wrong
    if wrong:
        (cause, *_) = run.report["causes"]["ranked"]
        assert (run.code, cause["side"]) == (1, "trainer")
        off = run.report["fingerprints"]["fsdp:fp32"]["attention_error"]
        assert off == pytest.approx(0.0142, rel=0.1)


def plant(monkeypatch, folder, fault):
    """Plant a fault of benchmarks/planted_fault.py in the vLLM of all processes that follow."""
    path = os.pathsep.join([str(plugin(folder)), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PLANTED_FAULT", fault)


@pytest.mark.grid
def test_an_engine_that_is_wrong_beyond_every_response_is_broken(tmp_path, monkeypatch):
    """Its rotations stand still from position 256 on; no sequence of the run comes so far."""
    plant(monkeypatch, tmp_path, "rope-beyond:256")
    flags = ("--num-prompts", "16", "--samples-per-prompt", "2", "--nproc-per-node", "1")
    run = run_check(tmp_path / "run", *flags)
    assert run.report["long_sequence"]["reached"] < 256
    assert run.failed == {"long-sequence-engine", "long-sequence-engine-rounding"}
    assert run.report["verdict"]["status"] == "broken"
    assert run.code == 1
    engine, trainer, *_ = run.report["long_sequence"]["gaps"]
    beyond = [block["nats"] > engine["failed"] for block in engine["blocks"]]
    # Most of a block decides.
    assert beyond == [(block["low"] + block["high"]) / 2 > 256 for block in engine["blocks"]]
    assert max(block["nats"] for block in trainer["blocks"]) < 1e-5
    assert max(block["nats"] for block in engine["blocks"]) > 30 * engine["failed"]


@pytest.mark.grid
@pytest.mark.parametrize("fault", ["sampler-temperature:0.85", "late-end:30"])
def test_a_sampler_of_another_law_is_broken_though_no_value_differs(tmp_path, monkeypatch, fault):
    """It draws at another temperature, or never an end token."""
    plant(monkeypatch, tmp_path, fault)
    run = run_check(tmp_path / "run", "--nproc-per-node", "1", "--exact-kl", "0")
    assert run.failed == {"sampling-law"}
    assert (run.report["verdict"]["status"], run.code) == ("broken", 1)
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["side"]) == ("sampling-law", "engine")


@pytest.mark.grid
def test_norms_without_their_upcast_are_seen_though_they_cost_no_more(tmp_path, monkeypatch):
    """It does not exist in float32, and rounds no more than a plain forward."""
    plant(monkeypatch, tmp_path, "narrow-norms:1")
    few = ("--num-prompts", "24", "--context-length", "0", "--exact-kl", "0")
    run = run_check(tmp_path / "run", *few, "--nproc-per-node", "1")
    assert not run.failed & {"implementation-gap", "implementation-gap-trainer"}
    assert run.checks["rounding-alike"] in ("inconclusive", "warning")  # no module was looked at
    assert run.report["verdict"]["status"] != "healthy"


@pytest.mark.grid
def test_a_wrong_window_of_the_engine_is_named_by_the_settings(tmp_path):
    """Files and weights are right. The reference shares its code with the trainer: side either."""
    few = ("--num-prompts", "24", "--samples-per-prompt", "2", "--max-tokens", "80")
    override = 'hf_overrides={"sliding_window": 16}'
    run = run_check(
        tmp_path / "run", *few, "--exact-kl", "0", "--engine-arg", override, locate=True
    )
    assert run.code == 1
    assert "implementation-gap" in run.failed
    assert not run.failed & {"excess-engine", "excess-trainer", "weights-as-loaded"}
    sizes = {gap["side"]: gap["size"]["value"] for gap in run.report["square"]["gaps"]}
    assert sizes["either"] > 1e-3
    assert sizes["trainer"] < 1e-6
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["fact"], first["status"]) == ("sliding-window", True, "confirmed")
    assert MODULE in {item["what"] for item in first["evidence"]}
    sides = {side["role"]: side for side in run.report["locate"]["sides"]}
    engine = sides["engine"]
    assert engine["groups"][engine["first"]]["site"] == "attention"
    assert (engine["kind"], sides["trainer"]["first"]) == ("function", None)


def test_fingerprints_hold_what_ran(default_run):
    prints = default_run.report["fingerprints"]
    engine, trainer = prints["vllm:decode"], prints["fsdp"]
    assert engine["engine"] == "vllm"
    assert engine["dtype"] == "bf16"
    assert trainer["attention"] not in ("auto", None)
    assert trainer["honours_sinks"] is True
    assert trainer["world_size"] == 2
    assert max(trainer["resident_fraction"]) <= 0.6
    assert prints["reference:fp32"]["dtype"] == "fp32"


@pytest.mark.grid
def test_float32_on_both_sides_agrees(fp32_run):
    assert fp32_run.value("logprob_abs_diff_max") <= 1e-4
    assert fp32_run.headline["routing"]["routing_disagree_layer"]["value"] <= FLIPS
    assert fp32_run.headline["routing"]["routing_disagree_any"]["value"] <= FLIPS
    verdict = fp32_run.report["verdict"]
    assert verdict["levels"] == "fp32"
    assert {row["status"] for row in verdict["judgements"]} == {"healthy"}
    assert fp32_run.code == 0


def test_a_sinkless_trainer_is_critical(default_run, no_sinks_run):
    assert no_sinks_run.code == 1
    assert no_sinks_run.report["verdict"]["status"] == "broken"
    assert "attention-sinks" in no_sinks_run.failed
    judged = {j["metric"]: j["status"] for j in no_sinks_run.report["verdict"]["judgements"]}
    assert judged["k3_kl"] == judged["logprob_abs_diff_mean"] == "unfit"  # also by the numbers
    assert no_sinks_run.value("k3_kl") >= 20 * default_run.value("k3_kl")
    trainer = no_sinks_run.report["fingerprints"]["fsdp"]
    assert trainer["honours_sinks"] is False
    assert "broken" in no_sinks_run.output.strip().splitlines()[-1].lower()


@pytest.mark.grid
def test_raw_logprobs_at_another_temperature_fail_as_that(raw_run):
    assert raw_run.code == 1
    assert "temperature" in raw_run.failed
    assert "processed_logprobs" in raw_run.output


@pytest.mark.grid
def test_the_right_logprob_mode_for_a_temperature_is_chosen(tempered_run):
    assert "temperature" not in tempered_run.failed
    assert not tempered_run.failed, tempered_run.output
    assert tempered_run.value("logprob_abs_diff_mean") < 0.03


@pytest.mark.grid
def test_another_checkpoint_on_the_train_side_is_named(tmp_path):
    """One parameter of the trainer's copy is changed: files and values as loaded both show it."""
    from safetensors.torch import load_file, save_file

    from mismatch.models import EMBEDDED

    copy = shutil.copytree(EMBEDDED["tiny-gpt-oss"], tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.self_attn.sinks"
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    flags = ("--max-tokens", "16", "--exact-kl", "0", "--nproc-per-node", "1")
    run = run_check(tmp_path / "run", *SMALL, *flags, "--train-model", str(copy))
    assert run.code == 1
    assert {"source-files", "weights-as-loaded"} <= run.failed, run.checks
    details = {check["id"]: check["detail"] for check in run.report["checks"]}
    assert name in details["weights-as-loaded"]
    assert "1 of " in details["weights-as-loaded"]


@pytest.mark.grid
def test_thresholds_and_fail_on_decide_the_exit_code(default_run, tmp_path):
    levels = tmp_path / "levels.toml"
    levels.write_text('[k3_kl]\n"bf16 MoE" = { healthy = 1e-12, unfit = 1e-10 }\n')
    copy = Path(shutil.copytree(default_run.directory, tmp_path / "copy"))
    command = [sys.executable, "-m", "mismatch", "compare", str(copy)]
    done = subprocess.run([*command, "--thresholds", str(levels)], capture_output=True, text=True)
    run = Run(copy, done.returncode, done.stdout)
    judged = {j["metric"]: j for j in run.report["verdict"]["judgements"]}
    assert judged["k3_kl"]["unfit"] == 1e-10
    assert run.code == 1, done.stderr
    assert run.report["verdict"]["fitness"]["status"] == "unfit"
    levels.write_text('[k3_kl]\n"bf16 MoE" = { healthy = 1e-12, unfit = 1 }\n')
    warned = [*command, "--thresholds", str(levels)]
    lenient = [*warned, "--fail-on", "unfit"]
    assert subprocess.run(lenient, capture_output=True).returncode == 0
    strict = [*warned, "--fail-on", "tolerable"]
    assert subprocess.run(strict, capture_output=True).returncode == 1
    refused = subprocess.run([*warned, "--fail-on", "warn"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "tolerable" in refused.stderr + refused.stdout


@pytest.mark.grid
def test_prompts_from_a_file_in_all_three_forms(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Mia has 3 plums and finds 4 more."},
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}]},
        {"prompt_token_ids": [5, 6, 7, 8, 9]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--engine", "transformers", "--prompts", str(prompts), "--no-noise-floor")
    few = ("--max-tokens", "24", "--nproc-per-node", "1")
    run = run_check(tmp_path / "run", *flags, *few)
    assert run.report["run"]["n_prompts"] == 3
    assert run.report["run"]["n_sequences"] == 12
    assert (run.code, run.report["verdict"]["correctness"]["status"]) == (1, "inconclusive")
    assert run.failed == set()


def test_a_report_can_be_written_again(default_run, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("report.json", "tokens.parquet"):
        shutil.copy(default_run.directory / name, copy)
    done = subprocess.run(
        [sys.executable, "-m", "mismatch", "report", str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said, was = f"; {UNVERIFIED}", (default_run.directory / "report.html").read_text("utf-8")
    page = (copy / "report.html").read_text("utf-8")
    assert said in page
    assert page.replace(said, "").replace(str(copy), str(default_run.directory)) == was
    last = done.stdout.strip().splitlines()[-1]
    assert last.replace(said, "") == default_run.output.strip().splitlines()[-1]


def test_both_sides_state_what_their_loaded_models_compute_with(default_run):
    sides = {name: default_run.report["fingerprints"][name] for name in ("vllm:decode", "fsdp")}
    engine, trainer = (side["config"] for side in sides.values())
    common = engine.keys() & trainer.keys()
    wanted = {"rope_frequencies", "attention_factor", "sliding_window", "rms_norm_eps",
              "attention_scale", "attention_sinks", "num_experts_per_tok", "head_dtype",
              "attn_logit_softcapping", "final_logit_softcapping"}  # fmt: skip
    assert common >= wanted
    for name in common - {"rope_frequencies"}:
        assert engine[name] == trainer[name], name
    np.testing.assert_allclose(engine["rope_frequencies"], trainer["rope_frequencies"], rtol=0.01)
    assert trainer["attention_factor"] == [pytest.approx(1.1386)]  # YaRN, as config.json asks
    assert trainer["sliding_window"] == [32, None, 32, None]
    assert sides["fsdp"]["cast_forward_inputs"] is True
    assert default_run.report["causes"]["ranked"] == []
    assert default_run.report["causes"]["failures"] == []


@pytest.mark.grid
def test_an_engine_in_a_separate_process_gives_all_that_it_gives_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where vLLM's core is another process: all calls go through msgpack."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run = run_check(tmp_path / "run", *SMALL)
    run.require_judged()
    assert "(EngineCore pid=" in (run.directory / "logs" / "engine.log").read_text()
    assert run.report["verdict"]["fitness"]["status"] == "healthy", run.output
    assert run.value("exact_kl") < 0.002
    for name in ("routing/vllm-decode.safetensors", "scores/vllm-prefill.parquet"):
        assert (run.directory / name).stat().st_size > 0, name
    assert all("routing" not in entry["what"] for entry in run.report["not_tested"])
