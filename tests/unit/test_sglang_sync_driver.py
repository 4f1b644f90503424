"""SGLang's ways to new weights, against a scripted ``Engine``: what has to be waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch.engines.sglang import sync_driver
from mismatch.engines.sglang.sync_driver import SglangDriver
from mismatch.errors import MismatchError
from mismatch.features.sync.report import BACK
from mismatch.models import EMBEDDED
from mismatch.models.weight_states import Checkpoint


class ScriptedEngine:
    """Its scheduler puts the last batch away after some questions; until then it refuses."""

    def __init__(self, busy: int) -> None:
        self.busy = busy
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(flush_cache=self.flushed)
        self.engine = self

    def _call(self, method: str) -> list[bool]:
        assert method == "mismatch_idle"
        self.busy -= 1
        return [self.busy < 0]

    def update_weights_from_disk(self, source: str) -> tuple[bool, str]:
        return self.busy < 0, "the cache was not dropped"

    async def flushed(self, timeout_s: float) -> Any:
        return SimpleNamespace(success=timeout_s >= self.busy)


def driver(states: Path, busy: int) -> SglangDriver:
    engine: Any = ScriptedEngine(busy)
    return SglangDriver(engine, Checkpoint(EMBEDDED["tiny-gpt-oss"], 0), states)


def test_a_push_waits_until_the_last_batch_is_put_away(tmp_path: Path) -> None:
    seen: list[Any] = []
    driver(tmp_path, 3).push("disk", BACK)
    driver(tmp_path, 3).push_own(lambda weights, engine: seen.append(engine.busy), {})
    assert seen == [-1]


def test_an_engine_that_stays_busy_is_said_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_driver, "IDLE_SECONDS", 0.05)
    with pytest.raises(MismatchError, match="not dropped"):
        driver(tmp_path, 10**9).push("disk", BACK)
    with pytest.raises(MismatchError):
        driver(tmp_path, 10**9).drop_caches()
    driver(tmp_path, 0).drop_caches()
