"""vLLM's ways to new weights, against a scripted ``LLM``: which calls come in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch.engines.vllm import sync_driver
from mismatch.engines.vllm.sync_driver import SLEEPS, VllmDriver
from mismatch.errors import MismatchError
from mismatch.features.sync.report import BACK
from mismatch.models import EMBEDDED
from mismatch.models.weight_states import Checkpoint
from mismatch.specs import EngineSpec


class ScriptedLLM:
    """Writes down what it is asked for; refuses new weights where it is told to."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError
        self.calls.append((method, kwargs["weights_path"]))


def driver(states: Path, *, refuses: bool = False) -> tuple[VllmDriver, list[Any]]:
    llm = ScriptedLLM(refuses)
    engine: Any = type("Engine", (), {"llm": llm})()
    return VllmDriver(engine, Checkpoint(EMBEDDED["tiny-gpt-oss"], 0), states), llm.calls


@pytest.mark.parametrize(("path", "level"), SLEEPS.items())
def test_new_weights_come_between_the_two_parts_of_waking_up(
    path: str, level: int, tmp_path: Path
) -> None:
    probed, calls = driver(tmp_path)
    before = {entry.what for entry in probed.not_tested()}
    probed.push(path, BACK)
    reload = ("reload_weights", str(EMBEDDED["tiny-gpt-oss"]))
    assert calls == [("sleep", level), ("wake_up", "weights"), reload, ("wake_up", "kv_cache")]
    assert len(before - {entry.what for entry in probed.not_tested()}) == 1  # this level


def test_a_loop_has_it_sleep_and_wake_part_by_part(tmp_path: Path) -> None:
    sleeper, calls = driver(tmp_path)
    sleeper.sleep()
    sleeper.wake("weights")
    sleeper.wake("kv_cache")
    assert calls == [("sleep", 1), ("wake_up", "weights"), ("wake_up", "kv_cache")]


def test_an_engine_that_refuses_is_not_left_half_asleep(tmp_path: Path) -> None:
    probed, calls = driver(tmp_path, refuses=True)
    with pytest.raises(RuntimeError):
        probed.push("sleep-2", BACK)
    assert calls[-1] == ("wake_up", "kv_cache")
    assert not probed.slept


def test_the_engine_is_started_able_to_sleep_and_a_cpu_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = EngineSpec(args=(("seed", 1),))
    assert VllmDriver.prepared(spec, "reload") == spec
    with pytest.raises(MismatchError):
        VllmDriver.prepared(EngineSpec(tensor_parallel_size=2), "rpc")
    monkeypatch.setattr(sync_driver, "is_cpu_build", lambda: True)
    with pytest.raises(MismatchError):
        VllmDriver.prepared(spec, "sleep-2")
    monkeypatch.setattr(sync_driver, "is_cpu_build", lambda: False)
    prepared = VllmDriver.prepared(spec, "sleep-2")
    assert dict(prepared.args) == {"seed": 1, "enable_sleep_mode": True}
    assert dict(VllmDriver.prepared(spec, "lora").args)["enable_lora"] is True
