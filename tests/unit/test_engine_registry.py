"""An engine is a folder and a line in the registry: the tool finds all the rest by itself."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

import pytest

from mismatch.engines import registry
from mismatch.engines.registry import check_machine, model_facts, versions
from mismatch.engines.sync_drivers import driver_class
from mismatch.errors import MismatchError
from mismatch.features.doctor.examine import look, tried, uses_of
from mismatch.features.presets.verl import follow_verl, read_verl_config
from mismatch.models.moe import require_routes
from mismatch.pipeline.preflight import preflight_rollout
from mismatch.processes.launch import own_python
from mismatch.specs import CheckSpec, EngineSpec, PromptSpec, RolloutSpec, TrainSpec
from tests.toy_engine import INFO
from tests.toy_engine.engine import ToyEngine

TARGET = "tests.toy_engine:INFO"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "toy", TARGET)


def test_it_is_known_by_its_line() -> None:
    assert registry.engine_infos()["toy"] == INFO
    assert "toy" in registry.startable_engines()
    assert "server" not in registry.startable_engines()
    assert registry.engine_class("toy") is ToyEngine


def test_the_help_names_it() -> None:
    code = (
        "from mismatch.engines import registry\n"
        f"registry.ENGINES['toy'] = {TARGET!r}\n"
        "from mismatch.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    assert "transformers, toy" in done.stdout, done.stdout + done.stderr


def test_preflight_asks_it(tmp_path: Path) -> None:
    engine = EngineSpec("toy", "tiny-gpt-oss", tensor_parallel_size=2)
    with pytest.raises(MismatchError, match=r"toy engine .*device"):
        preflight_rollout(RolloutSpec(engine=engine, prompts=PromptSpec(num_prompts=1)))


def test_its_own_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_python(EngineSpec("toy")) is None  # it is installed here
    monkeypatch.setattr("mismatch.processes.launch.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    python = tmp_path / ".venv-toy" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert own_python(EngineSpec("toy")) == str(python)


def test_its_packages_are_in_fingerprints() -> None:
    assert versions()["pyarrow"] == version("pyarrow")
    assert model_facts(EngineSpec("toy", "nobody/nothing"))["version"] == version("pyarrow")


def test_the_doctor_tries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (use,) = (use for use in uses_of(look(sys.executable)) if use.name == "toy")
    assert use.version == metadata.version("pyarrow")
    assert tried(use).possible


def test_it_may_give_routing_weights() -> None:
    spec = CheckSpec(
        rollout=RolloutSpec(EngineSpec("toy")), train=TrainSpec(replay_routing="ids+weights")
    )
    require_routes(spec, registry.weight_givers())


def test_a_verl_config_may_name_it(tmp_path: Path) -> None:
    config = tmp_path / "verl.yaml"
    config.write_text(
        "actor_rollout_ref:\n  actor: {strategy: fsdp2}\n  rollout: {name: toy_rollout, "
        "temperature: 1.0, n: 1, dtype: bfloat16, tensor_model_parallel_size: 1}\n"
    )
    applied = follow_verl(read_verl_config(config), CheckSpec())
    assert applied.spec.rollout.engine.engine == "toy"


@pytest.mark.parametrize(
    ("engine", "name"), [("vllm", "model"), ("vllm", "worker_extension_cls"), ("sglang", "dp_size")]
)
def test_an_argument_that_is_ours_is_refused_before_the_engine_is_imported(
    engine: str, name: str
) -> None:
    spec = EngineSpec(engine, "tiny-gpt-oss", args=((name, "x"),))
    with pytest.raises(MismatchError, match=f"--engine-arg {name}"):
        check_machine(spec)


@pytest.mark.parametrize("inside", ["srt/server_args.py", "srt/arg_groups/fields/device.py"])
def test_an_unknown_argument_is_refused_without_an_import_of_sglang(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (
        ("__init__.py", "raise RuntimeError('imported')"),
        (inside, "class Device:\n    attention_backend: str | None = None\n"),
    ):
        (tmp_path / "sglang" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sglang" / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    right, wrong = (
        EngineSpec("sglang", "tiny-gpt-oss", args=((name, "x"),))
        for name in ("attention_backend", "attention_backnd")
    )
    check_machine(right)
    with pytest.raises(MismatchError, match="attention_backnd") as refused:
        check_machine(wrong)
    assert "attention_backend" in refused.value.fix


def test_every_engine_that_takes_weights_has_a_driver() -> None:
    assert set(registry.probed_engines()) == {"vllm", "sglang", "transformers"}
    for name in registry.probed_engines():
        assert callable(driver_class(name).push)
        assert next(iter(registry.engine_info(name).weight_paths.values()))
