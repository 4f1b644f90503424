"""An engine that cannot start says why: vLLM's own process knows, and only its log tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch.engines.model_info import CauseInLog, load_fix, logged_cause
from mismatch.engines.vllm.engine import STATES, started
from mismatch.errors import MismatchError, first_line
from mismatch.processes.tasks import EngineSession
from mismatch.processes.workers import engine as worker
from mismatch.run.messages import read_error
from mismatch.specs import EngineSpec, RolloutSpec

# As vLLM 0.32 logged it, shortened.
LOG = """\
(EngineCore pid=30313) INFO 11-22 07:06:57 [core.py:110] Initializing a V1 LLM engine
(Worker pid=30462) ERROR 11-22 07:07:46 [multiproc_executor.py:1063] Traceback (most recent):
(Worker pid=30462) ERROR 11-22 07:07:46 [multiproc_executor.py:1063] ValueError: Available memory \
on node 0 (16.93/21.59 GiB) is less than requested memory for kv (900000.0 GiB).
(EngineCore pid=30313) ERROR 11-22 07:07:46 [core.py:1510] RuntimeError: Worker failed with error \
'Available memory', please check the stack trace above for the root cause
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
CAUSE = (
    "Available memory on node 0 (16.93/21.59 GiB) is less than requested memory for kv "
    "(900000.0 GiB)."
)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (LOG, CAUSE),
        ("", ""),
        ("ValueError: of a library, while it was tried\nINFO fine", ""),
        (
            "(MainProcess pid=7) ERROR 11-26 09:20:46 [registry.py:1120] ModuleNotFoundError: "
            "No module named 'torchvision'",
            "No module named 'torchvision'",
        ),
        ("(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory.", "CUDA out of memory."),
    ],
)
def test_the_cause_is_the_childs_own_error(log: str, cause: str) -> None:
    assert logged_cause(log) == cause


def test_a_package_that_the_engine_lacks_is_named_with_its_command() -> None:
    fix = load_fix(ValueError("No module named 'torchvision'"))
    assert fix.endswith("pip install torchvision")


@pytest.mark.parametrize("log", [LOG, ""])
def test_a_start_error_carries_it_to_the_user(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise CauseInLog("vLLM cannot load m", "look into logs/engine.log")

    monkeypatch.setattr(worker, "run", fails)
    monkeypatch.setattr(worker, "LOG_DELAY_S", 0.0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text(log)
    session = EngineSession(tmp_path, RolloutSpec(EngineSpec("vllm", "m")))
    assert worker.work(session) == 1
    error = read_error(tmp_path, "engine")
    assert isinstance(error, MismatchError)
    assert (CAUSE in error.message) == bool(log)
    assert ("--gpu-memory-utilization" in error.fix) == bool(log)


class Refused(Exception):
    """As a validation error of pydantic says itself."""

    def errors(self) -> list[dict[str, Any]]:
        return [
            {"loc": (), "msg": "Value error, User-specified max_model_len (9) is\ntoo long."},
            {"loc": ("block_size", 0), "msg": "Input should be less than 256"},
        ]


def test_a_validation_error_keeps_what_each_field_was_refused_for() -> None:
    pydantic = pytest.importorskip("pydantic", reason="client: pydantic")

    class ModelConfig(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        seed: int

    with pytest.raises(pydantic.ValidationError) as found:
        ModelConfig(seed="x")
    assert first_line(found.value).startswith("seed: Input")
    said = first_line(Refused("2 validation errors")).split("; ")
    assert [text.split(" ")[0] for text in said] == ["User-specified", "block_size:"]
    assert said[0].endswith("is too long.")


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"enable_prefix_caching": True}])
def test_a_model_with_states_starts_without_prefixes_unless_they_are_asked_for(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = pytest.importorskip("vllm", reason="client: vllm")
    calls: list[dict[str, Any]] = []

    def start(**arguments: Any) -> str:
        calls.append(arguments)
        if arguments.get("enable_prefix_caching", True):
            raise ValueError(f"Assertion failed, {STATES} 'align'.")
        return "started"

    monkeypatch.setattr(vllm, "LLM", start)
    if given:
        with pytest.raises(ValueError, match="mamba"):
            started(given)
    else:
        assert started(given) == "started"
    assert len(calls) == 2 - len(given)
