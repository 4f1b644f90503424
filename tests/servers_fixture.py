"""Scripted servers, a light server engine that asks them, and what it has to answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from mismatch.engines.base import Sample
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.servers import address, client, discovery, probing
from mismatch.engines.servers import engine as engines
from mismatch.engines.servers.engine import ServerEngine
from mismatch.specs import EngineSpec
from mismatch.types import Sampling
from tests.scripted_server import VOCABULARY, ScriptedServer, ScriptedSglang, law

STOP = 2
PROMPTS = [[3, 1 + i % 12, 5 + i % 7, i % 16] for i in range(24)]
LAW = Sampling(max_tokens=6, samples_per_prompt=1)
MODEL = "/some/where/tiny"


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No files of a model, no waiting, nothing remembered."""
    info = ModelInfo(VOCABULARY, 512, (STOP,), num_experts=0, top_k=0)
    for module in (engines, discovery):
        monkeypatch.setattr(module, "read_model_info", lambda spec: info)
    monkeypatch.setattr(probing, "load_tokenizer", lambda spec: Tokenizer())
    monkeypatch.setattr(engines, "model_facts", lambda spec: {"model": spec.model})
    monkeypatch.setattr(client, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_BACKOFF_S", 0.03)
    monkeypatch.delenv(address.KEY_VARIABLE, raising=False)
    discovery.discover.cache_clear()
    yield
    discovery.discover.cache_clear()


@pytest.fixture
def serve() -> Iterator[Any]:
    """Makes scripted servers that end with the test."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(ScriptedServer(**settings))


def spec(*servers: ScriptedServer, **fields: Any) -> EngineSpec:
    urls = tuple(server.url for server in servers)
    fields = {"model": MODEL, "server_timeout_s": 60.0, "server_concurrency": 4} | fields
    return EngineSpec(engine="server", servers=urls, **fields)


def quiet(*_: Any) -> None:
    pass


def generate(
    *servers: ScriptedServer, sampling: Sampling = LAW, **fields: Any
) -> tuple[list[Sample], ServerEngine]:
    engine = ServerEngine(spec(*servers, **fields), sampling, longest=64)
    groups = engine.generate(PROMPTS, quiet)
    assert len(groups) == len(PROMPTS)
    return [sample for group in groups for sample in group], engine


def expected(sample: Sample, prompt: list[int], **at: Any) -> np.ndarray:
    chain = [prompt[-1], *sample.token_ids]
    return np.array([law(a, **at)[b] for a, b in itertools.pairwise(chain)])


def require_true(samples: list[Sample], **at: Any) -> None:
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        np.testing.assert_allclose(sample.logprobs, expected(sample, prompt, **at), atol=1e-12)
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == STOP)


def dying(server: ScriptedServer, after: int) -> None:
    """The server goes away with its n-th sample."""
    import threading

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number < after:
            return None
        if number == after:
            threading.Thread(target=server.stop, daemon=True).start()
        return "reset"

    server.faults = faults


@pytest.fixture
def sglang() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(ScriptedSglang(**settings))
