"""Servers that cannot do what is asked, that are not alike, or that are something else."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from mismatch.codec import from_json
from mismatch.engines.servers.discovery import recognise
from mismatch.engines.servers.engine import ServerEngine
from mismatch.engines.servers.probing import SAME_WEIGHTS
from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, spec_hash, to_dict
from mismatch.types import NotTested
from tests.scripted_server import ScriptedServer
from tests.servers_fixture import (
    LAW,
    MODEL,
    PROMPTS,
    _light,
    generate,
    quiet,
    require_true,
    serve,
    spec,
)
from tests.texts import numbers

__all__ = ["_light", "serve"]  # fixtures


# ---------------------------------------------------------------- what servers cannot do


def test_what_is_missing_is_a_capability_with_a_reason(serve: Any) -> None:
    capabilities = ServerEngine.capabilities(spec(serve(prompt_logprobs=False)), LAW)
    assert not capabilities.prefill
    assert "prompt logprobs" in capabilities.reasons["prefill"]
    assert not capabilities.routed_experts
    assert "--enable-return-routed-experts" in capabilities.reasons["routed_experts"]
    assert not capabilities.deterministic
    assert not capabilities.distributions
    full = ServerEngine.capabilities(spec(serve()), LAW)
    assert full.prefill
    assert not full.prefill_tempered


def test_a_server_without_logprobs_measures_nothing(serve: Any) -> None:
    with pytest.raises(MismatchError, match="gives no logprobs"):
        ServerEngine(spec(serve(logprobs=False)), LAW, longest=64)


def test_a_server_without_prompt_logprobs_is_watched_by_what_it_would_say_next(serve: Any) -> None:
    server = serve(prompt_logprobs=False)
    samples, engine = generate(server)
    require_true(samples)
    server.weights = 1
    with pytest.raises(MismatchError, match="other weights"):
        engine.generate(PROMPTS, quiet)


def test_the_context_of_the_server_is_respected(serve: Any) -> None:
    with pytest.raises(MismatchError, match=r"\b60 tokens,.*\b65"):
        ServerEngine(spec(serve(max_model_len=60)), LAW, longest=64)
    within = ServerEngine.capabilities(spec(serve(max_model_len=60)), LAW).context
    assert within is not None
    ServerEngine(spec(serve(max_model_len=60)), LAW, longest=within)


def test_what_a_server_does_not_say_is_not_tested(serve: Any) -> None:
    _, engine = generate(serve())
    facts = engine.fingerprint("decode")
    assert facts["dtype"] is None
    assert any("dtype" in entry["what"] for entry in facts["not_tested"])
    assert facts["source_files"] == {}
    assert engine.weights().digests == {}


# ---------------------------------------------------------------- the wrong servers


def test_no_server_at_all(serve: Any) -> None:
    gone = serve()
    gone.stop()
    with pytest.raises(MismatchError, match="connection") as caught:
        recognise(spec(gone))
    assert "curl" in caught.value.fix


def test_another_kind_of_server(serve: Any) -> None:
    server = serve()
    server.answer = lambda web, body: server.send(web, 404, {})
    with pytest.raises(MismatchError, match=f"{server.url} is no server"):
        recognise(spec(server))


def test_the_wrong_model_is_refused_by_its_name(serve: Any) -> None:
    with pytest.raises(MismatchError, match="large, not --model") as caught:
        recognise(spec(serve(name="large")))
    assert "--served-model large" in caught.value.fix
    assert recognise(spec(serve(name="large"), served_model="large"))
    with pytest.raises(MismatchError, match="--served-model other"):
        recognise(spec(serve(name="large"), served_model="other"))


def test_where_servers_are_is_no_part_of_what_was_asked() -> None:
    first, second, other = (
        CheckSpec(rollout=RolloutSpec(engine))
        for engine in (
            EngineSpec("server", MODEL, servers=("http://a:1",)),
            EngineSpec("server", MODEL, servers=("http://b:2",)),
            EngineSpec("vllm", MODEL),
        )
    )
    assert spec_hash(first) == spec_hash(second) != spec_hash(other)
    assert from_json(CheckSpec, json.loads(json.dumps(to_dict(first)))) == first


def test_a_run_measures_one_server() -> None:
    with pytest.raises(MismatchError, match="one server") as caught:
        recognise(EngineSpec("server", MODEL, servers=("http://h:1", "http://i:1")))
    assert caught.value.fix


def test_an_address_with_two_models_behind_it_is_said(serve: Any) -> None:
    server = serve()
    honest, looks = server.completion, itertools.count()

    def either(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("prompt_logprobs") is not None:  # as a balancer deals the requests
            server.weights = next(looks) // 3 % 2
        return honest(body)

    server.completion = either
    engine = ServerEngine(spec(server), LAW, longest=64)
    calm = ServerEngine(spec(serve()), LAW, longest=64)
    notes = [set(NotTested.of(each.fingerprint("decode"))) for each in (engine, calm)]
    (differ,) = notes[0] - notes[1]
    assert server.url.removeprefix("http://") in differ.what
    assert min(numbers(differ.reason)) > SAME_WEIGHTS


def test_probes_without_numbers_are_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def overflown(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        for row in answer["choices"][0].get("prompt_logprobs") or [None]:
            for entry in (row or {}).values():
                entry["logprob"] = float("nan")
        return answer

    server.completion = overflown
    with pytest.raises(MismatchError, match="no finite numbers"):
        ServerEngine(spec(server), LAW, longest=64)


def seldom_free(server: ScriptedServer, status: int) -> None:
    """Two of three requests to a server are answered with a status."""
    numbers, plain = itertools.count(), server.answer

    def answer(web: Any, body: dict[str, Any]) -> None:
        if next(numbers) % 3 != 2:
            return server.send(web, status, {"error": "not now"})
        return plain(web, body)

    server.answer = answer  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_moment_is_no_missing_capability(serve: Any, status: int) -> None:
    server = serve(mode="processed")
    seldom_free(server, status)
    capabilities = ServerEngine.capabilities(spec(server), LAW)
    assert capabilities.prefill
    assert capabilities.processed_logprobs


def test_a_server_that_stays_busy_says_nothing_about_what_it_can_do(serve: Any) -> None:
    server = serve()
    plain = server.answer

    def answer(web: Any, body: dict[str, Any]) -> None:
        if "prompt_logprobs" in body:
            return server.send(web, 503, {"error": "too much to do"})
        return plain(web, body)

    server.answer = answer
    with pytest.raises(MismatchError, match="503"):
        ServerEngine.capabilities(spec(server), LAW)


@pytest.mark.parametrize("cards", [[], [{"id": "x"}], [{"id": "x", "owned_by": "me"}]])
def test_another_program_is_no_server_of_a_known_kind(serve: Any, cards: list[Any]) -> None:
    server = serve()
    odd = {"/model_info": {"model_path": "x"}, "/server_info": None, "/v1/models": {"data": cards}}
    odd["/version"] = {"version": "1"}
    server.answer = lambda web, body: server.send(web, 200, odd.get(web.path))
    with pytest.raises(MismatchError, match=f"{server.url} is no server"):
        recognise(spec(server))
