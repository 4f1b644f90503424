"""A real torchrun world of two ranks scores like one process, and like plain transformers.

By transitivity a training stack of any size gives the numbers of the model's own forward: worlds of
one and two agree bit for bit, and a world agrees with plain transformers to 1e-5 in float32. On the
way no rank holds more than its share, neither at rest nor while it loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from mismatch.models.digests import combine, digest_tensor
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run.store import load_scoring, save_rollout
from mismatch.specs import Pass, TrainSpec
from mismatch.training.attention.resolve import PLANTED
from mismatch.types import Rollout, Sampling, Scoring
from tests.checkpoints import make, rollout

TEMPERATURE = 0.7
ROLLOUT = rollout(
    # The third sequence has no action at all, the last does not fit the smaller budget.
    ((5, 12), (5, 30), (6, 0), (9, 7), (9, 40), (3, 21), (30, 45)),
    sampling=Sampling(temperature=TEMPERATURE, top_p=0.9),
)


@dataclass(frozen=True)
class Ran:
    """What the two worlds left behind."""

    models: dict[str, str]
    single: Path
    two: Path
    progress: str

    def scoring(self, name: str, world: int = 2) -> Scoring:
        return load_scoring(self.two if world == 2 else self.single, name)

    def logprobs(self, name: str, world: int = 2) -> np.ndarray:
        return self.scoring(name, world).logprobs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    root = tmp_path_factory.mktemp("worlds")
    models = {family: str(make(family, root / family)) for family in ("gpt_oss", "qwen3_moe")}
    models["tied"] = str(make("qwen3", root / "tied", tie_word_embeddings=True))
    models["big"] = str(
        make("llama", root / "big", hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    )
    jobs = {}
    for world in ("one", "two"):
        (root / world).mkdir()
        save_rollout(root / world, ROLLOUT)
        passes = tuple(_passes(models))
        jobs[world] = write_session(TrainerSession(root / world, passes, resident_report=True))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = _python("-m", *torchrun, "mismatch.processes.workers.session", str(jobs["two"]))
    assert done.returncode == 0, done.stderr
    progress = done.stderr
    done = _python("-m", "mismatch.processes.workers.session", str(jobs["one"]))
    assert done.returncode == 0, done.stderr
    return Ran(models, root / "one", root / "two", progress)


def _passes(models: dict[str, str]) -> list[Pass]:
    gpt_oss = {
        "fsdp": TrainSpec(),
        "fsdp:regrouped": TrainSpec(micro_batch_tokens=64),
        "fsdp:grad": TrainSpec(grad=True),
        "fsdp:no-sinks": TrainSpec(attention="no-sinks"),
        "fsdp:autocast": TrainSpec(dtype="fp32", autocast="bf16"),
        "reference:fp32": TrainSpec(dtype="fp32"),
        "reference:packed": TrainSpec(dtype="fp32", layout="packing", micro_batch_tokens=100),
        "reference:grad": TrainSpec(dtype="fp32", grad=True),
        "fsdp:eager": TrainSpec(attention="eager"),
        "reference:eager": TrainSpec(dtype="fp32", attention="eager"),
    }
    passes = [Pass(name, _with(spec, models["gpt_oss"])) for name, spec in gpt_oss.items()]
    for name in ("qwen3_moe", "tied"):
        passes.append(Pass(f"reference:{name}", TrainSpec(models[name], dtype="fp32")))
    return [*passes, Pass("big", TrainSpec(models["big"], master_dtype="fp32"))]


def _with(spec: TrainSpec, model: str) -> TrainSpec:
    return replace(spec, model=model)


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**outside, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _plain(model: str, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Logprobs of plain transformers: one process, one sequence at a time, whole logits."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    out = []
    masks = np.split(ROLLOUT.action_mask, ROLLOUT.offsets[1:-1])
    for ids, mask in zip(ROLLOUT.sequences(), masks, strict=True):
        with torch.no_grad():
            logits = loaded(torch.from_numpy(ids)[None]).logits[0].float() / TEMPERATURE
        picked = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0]
        out.append(picked.double().numpy()[mask[1:]])
    return np.concatenate(out)


NAMES = [each.name for each in _passes(dict.fromkeys(("gpt_oss", "qwen3_moe", "tied", "big"), ""))]


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_worlds_of_one_and_two_agree_bitwise(ran: Ran, name: str) -> None:
    single, two = ran.scoring(name, 1), ran.scoring(name, 2)
    assert single.fingerprint["world_size"] == 1
    assert two.fingerprint["world_size"] == 2
    assert np.array_equal(single.token_ids, ROLLOUT.token_ids[ROLLOUT.actions])
    for field in ("logprobs", "entropy", "top1"):
        assert np.array_equal(getattr(single, field), getattr(two, field)), field
    if single.routing is not None and two.routing is not None:
        assert np.array_equal(single.routing.ids, two.routing.ids)
    assert single.fingerprint["weights"] == two.fingerprint["weights"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("reference:fp32", "gpt_oss"),
        ("reference:qwen3_moe", "qwen3_moe"),
        ("reference:tied", "tied"),
    ],
)
def test_float32_equals_plain_transformers(ran: Ran, name: str, model: str) -> None:
    gap = np.abs(ran.logprobs(name) - _plain(ran.models[model])).max()
    assert gap <= 1e-5


def test_bf16_equals_plain_transformers_where_the_kernels_are_the_same(ran: Ran) -> None:
    gap = np.abs(ran.logprobs("fsdp:eager") - _plain(ran.models["gpt_oss"], torch.bfloat16))
    assert gap.max() <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_keeps_its_share(ran: Ran, name: str) -> None:
    shares = ran.scoring(name).fingerprint["resident_fraction"]
    assert len(shares) == 2
    assert max(shares) <= 0.6
    assert sum(shares) == pytest.approx(1.0)


def test_no_rank_ever_holds_the_full_model(ran: Ran) -> None:
    file = load_file(Path(ran.models["big"]) / "model.safetensors")
    whole = 4 * sum(tensor.numel() for tensor in file.values())  # bytes, held in float32
    (alone,) = ran.scoring("big", 1).fingerprint["load_peak_bytes"]
    assert alone > 0.9 * whole  # the gauge sees a full model where there is one
    for peak in ran.scoring("big", 2).fingerprint["load_peak_bytes"]:
        assert 0.4 * whole < peak < 0.7 * whole


@pytest.mark.parametrize(
    ("name", "against", "tolerance"),
    [
        ("reference:packed", "reference:fp32", 2e-5),
        ("reference:grad", "reference:fp32", 2e-5),
        ("reference:eager", "reference:fp32", 2e-5),
        ("fsdp:regrouped", "fsdp", 0.5),
        ("fsdp:grad", "fsdp", 0.5),
    ],
)
def test_what_should_change_nothing_changes_nothing(
    ran: Ran, name: str, against: str, tolerance: float
) -> None:
    gap = np.abs(ran.logprobs(name) - ran.logprobs(against))
    assert gap.max() <= tolerance
    assert gap.mean() <= tolerance / 10


def test_dropping_the_sinks_is_loud(ran: Ran) -> None:
    noise = np.abs(ran.logprobs("fsdp") - ran.logprobs("reference:fp32")).mean()
    fault = np.abs(ran.logprobs("fsdp:no-sinks") - ran.logprobs("fsdp")).mean()
    assert fault > 3 * noise > 0
    facts = ran.scoring("fsdp:no-sinks").fingerprint
    assert facts["honours_sinks"] is False
    assert facts["attention"] == PLANTED


def test_autocast_is_not_float32(ran: Ran) -> None:
    gap = np.abs(ran.logprobs("fsdp:autocast") - ran.logprobs("reference:fp32"))
    assert gap.mean() > 1e-4


@pytest.mark.parametrize(
    ("name", "layers"), [("fsdp", 2), ("reference:qwen3_moe", 2), ("reference:packed", 2)]
)
def test_routing_covers_every_token(ran: Ran, name: str, layers: int) -> None:
    routing = ran.scoring(name).routing
    assert routing is not None
    routing.validate(ROLLOUT, name)
    assert routing.ids.shape == (len(ROLLOUT.token_ids), layers, 2)
    assert routing.ids.dtype == np.uint8
    assert routing.present.all()
    assert routing.weights is not None
    assert routing.weights.sum(-1) == pytest.approx(1.0, abs=2e-2)
    assert routing.margin is not None
    assert (routing.margin >= 0).all()


def test_packing_and_padding_route_alike(ran: Ran) -> None:
    packed, padded = ran.scoring("reference:packed"), ran.scoring("reference:fp32")
    assert packed.routing is not None
    assert padded.routing is not None
    assert np.array_equal(packed.routing.ids, padded.routing.ids)


def test_tempered_scorings_carry_what_the_checks_need(ran: Ran) -> None:
    scoring = ran.scoring("fsdp")
    assert scoring.fingerprint["logprobs_temperature"] == TEMPERATURE
    untempered = scoring.extra["logprobs_untempered"]
    assert np.abs(untempered - scoring.logprobs).mean() > 0.05
    assert ((scoring.extra["kept_mass"] > 0.85) & (scoring.extra["kept_mass"] <= 1)).all()


@pytest.mark.parametrize(
    ("name", "model"), [("fsdp", "gpt_oss"), ("reference:qwen3_moe", "qwen3_moe")]
)
def test_digests_of_the_held_weights_are_those_of_the_file(ran: Ran, name: str, model: str) -> None:
    # One number for all tensors: fused experts (qwen3_moe) have the sum of their parts' digests.
    file = load_file(Path(ran.models[model]) / "model.safetensors")
    held = ran.scoring(name).fingerprint["weights"]
    whole = combine(map(digest_tensor, file.values()))
    assert combine(map(tuple, held.values()))[:3] == whole[:3]
    alike = {name for name in held.keys() & file.keys() if file[name].shape}
    assert alike
    for name in alike:  # shards of two ranks know where they lie
        assert tuple(held[name]) == digest_tensor(file[name])


def test_fingerprint_says_what_ran(ran: Ran) -> None:
    facts = ran.scoring("fsdp").fingerprint
    wanted = {
        "mode": "train",
        "backend": "fsdp2",
        "dtype": "bf16",
        "attention": "sink-sdpa",
        "attention_requested": "auto",
        "honours_sinks": True,
        "experts": "grouped_mm",
        "moe": True,
        "routing": "captured",
    }
    assert {key: facts[key] for key in wanted} == wanted
    assert "model.safetensors" in facts["source_files"]
    assert ran.scoring("reference:fp32").fingerprint["mode"] == "reference"
    assert ran.scoring("reference:tied").fingerprint["routing"] == "dense"


def test_progress_ends_at_the_total(ran: Ran) -> None:
    total = len(ROLLOUT.token_ids)
    assert f"progress fsdp:grad {total}/{total} tokens" in ran.progress


def test_a_rank_that_fails_leaves_its_reason(tmp_path: Path) -> None:
    batch: Rollout = rollout()
    save_rollout(tmp_path, batch)
    spec = TrainSpec(str(make("llama", tmp_path / "llama")), attention="no-sinks")
    session = write_session(TrainerSession(tmp_path, (Pass("fsdp", spec),)))
    done = _python("-m", "mismatch.processes.workers.session", str(session))
    assert done.returncode == 2
    error = json.loads((tmp_path / "errors" / "train-rank0.json").read_text())
    assert "attention sinks" in error["message"]
    assert error["fix"] == "use --attention auto"
    assert not (tmp_path / "scores").exists()
