"""The disk of copies of weights in another form: it is asked for before anything starts."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers.modeling_utils  # noqa: F401  sizes are then counted in this process

from mismatch.doctor.fit import copies
from mismatch.doctor.machine import inspect_machine, machine_with, parse_kind
from mismatch.doctor.plan import memory_of
from mismatch.models import derived, resolve_model
from mismatch.models.config import find_config
from mismatch.models.derived import copied_bytes, has_copy, in_form
from mismatch.models.sizes import SizedModel, sized
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from tests.checkpoints import make, make_mxfp4

GIB = 1 << 30
HUB = resolve_model("gpt-oss-20b")  # an id: no directory
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    packed = make_mxfp4(folder / "packed", folder / "plain")
    return {
        "packed": str(packed),
        "plain": str(make("gpt_oss", folder / "bf16")),
        "float32": str(folder / "plain"),
    }


def shape(model: str) -> SizedModel:
    return sized(find_config(model))


def weights_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("engine", "model", "form"),
    [
        ("sglang", "packed", "bf16"),
        ("transformers", "packed", "bf16"),
        ("vllm", "packed", "mxfp4-rounded"),
        ("vllm", "plain", "mxfp4-rounded"),
        ("vllm", "plain", "fp8-rounded"),
    ],
)
def test_the_size_is_that_of_the_copy_which_is_made(
    engine: str, model: str, form: Any, models: dict[str, str]
) -> None:
    spec = EngineSpec(engine, models[model], weights=form)
    size = copied_bytes(spec, shape(models[model]))
    assert not has_copy(spec)
    made = Path(in_form(spec).model)
    assert derived.is_derived(made)
    assert size == pytest.approx(weights_in(made), rel=0.1)  # headers of files of tiny models
    assert has_copy(spec)
    assert not has_copy(replace(spec, weights="int4-rounded"))
    (made / "model-00001.safetensors").unlink()
    assert not has_copy(spec)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, "packed"),
        ({"weights": "bf16"}, "packed"),  # vLLM dequantises it while it loads
        ({"weights": "mxfp4"}, "packed"),
        ({"weights": "bf16"}, "plain"),
        ({"weights": "mxfp4-rounded", "layers": 1}, "plain"),  # small next to the source
    ],
)
def test_what_makes_no_whole_copy_takes_no_disk(
    changes: dict[str, Any], model: str, models: dict[str, str]
) -> None:
    spec = EngineSpec("vllm", models[model], **changes)
    assert copied_bytes(spec, shape(models[model])) == 0
    full = replace(inspect_machine(), disk_free_bytes=0)
    assert copies(spec, shape(models[model]), full) == []


def test_the_engine_in_float32_runs_its_first_layers_where_the_disk_lacks_its_copy() -> None:
    here = machine_with(inspect_machine(), *parse_kind("1xH200-141GB"))
    check = CheckSpec(RolloutSpec(EngineSpec("sglang", HUB)), TrainSpec(HUB))
    for size, cut in {None: False, 60 * GIB: False, 30 * GIB: True}.items():  # 39 GiB are needed
        memory = memory_of(check, replace(here, disk_free_bytes=size))
        assert memory.fits
        assert bool(memory.float32_layers) is cut
        assert any("disk:" in note for note in memory.notes) is not cut
    assert "sglang in float32" in memory.notes[0]


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_check_does_not_fit_where_the_disk_lacks_a_copy_that_was_asked_for(
    side: str, models: dict[str, str]
) -> None:
    engine, train = EngineSpec("vllm", models["plain"]), TrainSpec(models["plain"])
    if side == "engine":
        engine = replace(engine, weights="mxfp4-rounded")
    else:
        train = replace(train, weights="mxfp4-rounded")
    check, here = CheckSpec(RolloutSpec(engine), train), inspect_machine()
    assert memory_of(check, replace(here, disk_free_bytes=GIB)).fits
    full = replace(here, disk_free_bytes=1000)
    (lost,) = memory_of(check, full).refused(certain=True)
    assert (lost.side, lost.capacity) == ("disk", 1000)
    in_form(engine if side == "engine" else train)
    assert memory_of(check, full).fits  # the copy is there


def test_the_command_says_so_before_anything_starts(
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mismatch.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(2000, 1000, 1000))
    flags = ["--engine", "transformers", "--model", models["plain"], "--num-prompts", "2"]
    flags += ["--weights", "engine=mxfp4-rounded", "--out", "run"]
    for more in (["--dry-run", "--format", "json"], []):
        monkeypatch.setattr("sys.argv", ["mismatch", "check", *flags, *more])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 2
        told = capsys.readouterr()
        if more:
            sides = {fit["side"]: fit["level"] for fit in json.loads(told.out)["sides"]}
            assert sides["disk"] == "does not fit"
        else:
            assert "MISMATCH_CACHE" in told.err
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("logs/*"))
    assert not (tmp_path / "cache").exists()
