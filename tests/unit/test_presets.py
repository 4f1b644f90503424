"""A preset gives the numbers of the framework's own arithmetic, and never overrules the user.

The arithmetic is written out here in a few lines of torch, as each preset's sources describe it;
the trainer under the preset has to give the same bits, and the plain trainer other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mismatch.experiments.scoring_passes import reference_of
from mismatch.features.presets.apply import Followed
from mismatch.features.presets.rules import NAMES, Name, table
from mismatch.specs import CheckSpec, Pass, TrainSpec
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.score import score_pass
from mismatch.types import Rollout, Sampling
from tests.checkpoints import make, rollout
from tests.preset_machine import be_on

BF16 = TrainSpec(dtype="bf16", master_dtype="fp32", autocast="bf16")
KNOWN = {
    "verl": replace(
        BF16,
        layout="packing",
        temperature_in="logits-rounded",
        attention="flash_attention_2",
        micro_batch_tokens=16384,
    ),
    "trl": replace(BF16, attention="transformers", logprobs_dtype="bf16"),
    "skyrl": replace(
        BF16, layout="packing", temperature_in="logits", attention="flash_attention_2"
    ),
}


def applied(name: Name, train: TrainSpec | None = None, explicit: Collection[str] = ()) -> Followed:
    followed = Followed(CheckSpec(train=train or TrainSpec()), explicit)
    followed.preset(name)
    return followed


@pytest.mark.parametrize("name", NAMES)
def test_what_each_framework_runs(name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch)
    assert applied(name).spec.train == KNOWN[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_where_it_was_read(name: Name) -> None:
    data = table(name)
    for row in (*data["setting"], *data["gap"]):
        assert row["file"].endswith((".py", ".yaml"))
        assert row["symbol"]
        assert row.get("version", data["version"])[0].isdigit()
    fields = [row["field"] for row in data["setting"]]
    assert len(fields) == len(set(fields))


def test_a_kernel_that_is_not_installed_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_on(monkeypatch, flash=False)
    train = applied("verl").spec.train
    assert train.attention == "auto"
    assert train.micro_batch_tokens == TrainSpec().micro_batch_tokens
    assert any("flash_attn" in line for line in applied("verl").spec.not_reproduced)
    be_on(monkeypatch)
    assert not any("flash_attn" in line for line in applied("verl").spec.not_reproduced)


def test_the_users_flags_win() -> None:
    own = TrainSpec(master_dtype="bf16")
    done = applied("verl", own, {"train_dtype", "autocast", "layout"})
    train = done.spec.train
    assert train.master_dtype == "bf16"  # not at its default
    assert (train.autocast, train.layout) == (None, "padding")  # given by name
    assert train.temperature_in == "logits-rounded"
    kept = [line.split(" ")[0] for line in done.kept]
    assert sorted(kept) == ["autocast", "layout", "master_dtype"]


def test_the_engines_dtype_flag_is_not_the_trainers() -> None:
    done = Followed(CheckSpec(), {"dtype"})
    done.set("bf16", False, "train.dtype", "fp16")
    assert done.spec.train.dtype == "fp16"
    done = Followed(CheckSpec(), {"train_dtype"})
    done.set("bf16", False, "train.dtype", "fp16")
    assert done.spec.train.dtype == TrainSpec().dtype


def test_the_reference_stays_exact_under_a_preset() -> None:
    for name in NAMES:
        reference = reference_of(applied(name).spec.train)
        assert (reference.logprobs_dtype, reference.temperature_in) == (None, "fp32")
        assert (reference.dtype, reference.autocast) == ("fp32", None)


# ---------------------------------------------------------------- the same bits

Logits = torch.Tensor


def _picked(tempered: Logits, targets: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(tempered.float(), -1).gather(-1, targets[:, None])[:, 0]


def _rounded_twice(logits: Logits, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    return _picked(logits / torch.tensor(temperature).to(logits.dtype), targets)


def _in_place(logits: Logits, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    return _picked(logits.clone().div_(temperature), targets)


def _out_of_the_root(logits: Logits, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    return _picked(logits.float() / temperature, targets).bfloat16().float()


ARITHMETIC: dict[str, Callable[[Logits, torch.Tensor, float], torch.Tensor]] = {
    "verl": _rounded_twice,
    "trl": _out_of_the_root,
    "skyrl": _in_place,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def rolled() -> Rollout:
    return rollout(sampling=Sampling(temperature=0.7))


@pytest.fixture(scope="module")
def rows(model: Path, rolled: Rollout) -> tuple[Logits, torch.Tensor]:
    """bf16 logits of every action and its token, sequence by sequence, without FSDP."""
    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    logits, targets = [], []
    masks = np.split(rolled.action_mask, rolled.offsets[1:-1])
    for ids, mask in zip(rolled.sequences(), masks, strict=True):
        acting = torch.from_numpy(np.flatnonzero(mask))
        tokens = torch.from_numpy(ids.copy())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = plain(input_ids=tokens[None]).logits[0]
        logits.append(out[acting - 1])
        targets.append(tokens[acting])
    return torch.cat(logits), torch.cat(targets)


def _scored(world: World, model: Path, rolled: Rollout, train: TrainSpec) -> np.ndarray:
    spec = replace(train, model=str(model), attention="eager")
    scoring = score_pass(world, load(spec, world.mesh, world.device), rolled, Pass("fsdp", spec))
    assert scoring is not None
    return scoring.logprobs


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_the_frameworks_arithmetic(
    name: Name, world: World, model: Path, rolled: Rollout, rows: tuple[Logits, torch.Tensor]
) -> None:
    logits, targets = rows
    expected = ARITHMETIC[name](logits, targets, 0.7).double().numpy()
    preset = applied(name).spec.train
    assert np.array_equal(_scored(world, model, rolled, preset), expected)
    undone = replace(preset, temperature_in="fp32", logprobs_dtype=None)
    assert (_scored(world, model, rolled, undone) != expected).mean() > 0.5
