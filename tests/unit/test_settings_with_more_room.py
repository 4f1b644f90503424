"""A refused or tight plan names settings with which it fits; a plan with them proves it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.cli.session import room_for
from mismatch.doctor.plan import plan
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.spec_edits import on_trainer
from mismatch.models import resolve_model
from tests.unit.test_float32_on_gpus import check, gpus

LEVELS = ("fits", "tight", "does not fit")


def planned(model: str, machine: str, ranks: int, *flags: str) -> dict[str, Any]:
    command = ("check", "--dry-run", "--format", "json", "--model", model, "--gpus", machine)
    done = CliRunner().invoke(app, [*command, "--nproc-per-node", str(ranks), *flags])
    return json.loads(done.stdout)


def worst(plan: dict[str, Any]) -> int:
    sides = [side for side in plan["sides"] if not side["side"].endswith("in float32")]
    return max(LEVELS.index(side["level"]) for side in sides)


@pytest.mark.parametrize(
    ("model", "machine", "ranks", "flags", "best"),
    [
        ("gpt-oss-20b", "1xL40S-48GB", 1, ["--offload"], "HEALTHY"),  # refused without
        ("gpt-oss-120b", "1xH100-80GB", 1, ["--layers", "9"], "TOLERABLE"),  # likewise
        ("gpt-oss-20b", "4xRTX4090-24GB", 4, ["--offload"], "HEALTHY"),  # without a reference
        ("qwen3-8b", "1xRTX4090-24GB", 1, ["--offload"], "HEALTHY"),  # tight
    ],
)
def test_the_settings_that_a_plan_names_make_room(
    model: str, machine: str, ranks: int, flags: list[str], best: str
) -> None:
    before = planned(model, machine, ranks)
    assert shlex.split(before["cheaper"]) == flags
    after = planned(model, machine, ranks, *flags)
    assert worst(after) < worst(before)
    assert after["fits"]
    assert after["best_verdict"] == best


def test_a_check_that_is_refused_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch.doctor.plan.inspect_machine", lambda: gpus("1xL40S-48GB"))
    spec = check(resolve_model("gpt-oss-20b"))
    with pytest.raises(MismatchError) as refused:
        room_for(spec, force=False)
    assert "--offload;" in refused.value.fix
    room = room_for(on_trainer(spec, offload=True), force=False)
    assert room.left_out == {}


def test_on_a_cpu_offload_is_none_of_them() -> None:
    ram = 30 << 30
    here = replace(gpus("1xH100"), gpus=(), ram_bytes=ram, ram_free_bytes=ram)
    assert plan(check(resolve_model("gpt-oss-20b")), here).cheaper == "--layers 6"


def test_what_fits_needs_none() -> None:
    assert planned("gpt-oss-20b", "1xH200-141GB", 1)["cheaper"] == ""


def test_no_setting_of_ours_is_named_where_others_code_trains() -> None:
    spec = check(resolve_model("gpt-oss-20b"))
    refused = replace(spec, train=replace(spec.train, scorer="mine:score"))
    assert plan(spec, gpus="1xL40S-48GB").cheaper == "--offload"
    assert plan(refused, gpus="1xL40S-48GB").cheaper == ""
