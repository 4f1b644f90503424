"""The library call, an exported folder and the plan: faults are named, what is right passes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.features.sync.in_framework import judge, probe
from mismatch.models.weight_states import Prints

Tensors = dict[str, torch.Tensor]
SINKS, HEAD, EMBED = "layers.0.self_attn.sinks", "lm_head.weight", "model.embed_tokens.weight"


def trainer() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {SINKS: (8,), EMBED: (16, 8), "layers.0.o_proj.weight": (8, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_sync_that_copies_everything_is_healthy_and_the_weights_come_back() -> None:
    model = trainer()
    before = {name: tensor.clone() for name, tensor in model.items()}
    engine = {name: tensor.bfloat16() for name, tensor in model.items()}
    report = probe(lambda: engine, model, lambda: [engine[n].copy_(t) for n, t in model.items()])
    assert judge(report).status == "healthy"
    assert all(torch.equal(model[name], before[name]) for name in model)


def test_a_sync_that_forgets_a_parameter_or_the_tied_head_is_broken() -> None:
    model = trainer()
    engine = {**{name: t.clone() for name, t in model.items()}, HEAD: model[EMBED].clone()}

    def sync() -> None:
        for name, tensor in model.items():
            if name != SINKS:
                engine[name].copy_(tensor)

    report = probe(lambda: engine, model, sync, tied={HEAD: EMBED})
    assert {p.name: p.status for p in report.faults} == {SINKS: "stale", HEAD: "alias_lost"}


def test_an_sglang_engine_is_asked_beside_its_model_or_refused() -> None:
    model = trainer()
    asked: list[list[str]] = []

    class Plain:
        __module__ = "sglang.srt.entrypoints.engine"
        collective_rpc = None

    class Shown(Plain):
        def mismatch_called(self, method: str, names: list[str], transposed: list[str]) -> Any:
            asked.append([method, *names])
            return {n: asdict(Prints.of(n, model[n])) for n in names}, {}

    assert judge(probe(Shown(), model, lambda: None)).status == "healthy"
    assert asked[0] == ["mismatch_held", *model]
    with pytest.raises(MismatchError):
        probe(Plain(), model, lambda: None)


def test_the_weights_come_back_when_the_sync_raises() -> None:
    model = trainer()
    before = model[SINKS].clone()
    with pytest.raises(ZeroDivisionError):
        probe(lambda: {n: t.clone() for n, t in model.items()}, model, lambda: 1 / 0)
    assert torch.equal(model[SINKS], before)


def test_an_engine_of_another_model_is_refused() -> None:
    model = trainer()
    with pytest.raises(MismatchError):
        probe(lambda: {n: torch.zeros_like(t) for n, t in model.items()}, model, lambda: None)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["sync-probe", *arguments], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


def test_a_plan_starts_nothing() -> None:
    code, output = run("--dry-run")
    assert code == 0
    assert "71 tensors" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine", "nowhere"),
        ("--path", "load", "--push", "a:b"),
        ("--model", "nowhere"),
        ("--path", "reloaded"),
        ("--engine", "transformers", "--path", "rpc"),
        ("--push", "my.sync.push"),
    ],
)
def test_what_cannot_be_probed_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Before there is a directory, so that the mended command can have the same one."""
    out = tmp_path / "probe"
    done = CliRunner().invoke(
        app, ["sync-probe", *arguments, "--out", str(out)], standalone_mode=False
    )
    assert isinstance(done.exception, MismatchError)
    assert not out.exists()
