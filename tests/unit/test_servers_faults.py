"""The server engine while servers fail, die and come back otherwise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.types import NotTested
from tests.servers_fixture import (
    PROMPTS,
    _light,
    dying,
    generate,
    require_true,
    serve,
    sglang,
)
from tests.texts import numbers

__all__ = ["_light", "serve", "sglang"]  # fixtures


FAULTS = ["status:429:0", "status:503", "status:500", "reset", "half", "text", "hang:1.2"]
FAULTS += ['json:{"choices": []}', "json:[]", 'json:{"choices": [{"token_ids": [1]}]}']


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_costs_nothing(serve: Any, fault: str) -> None:
    # Two servers: a time-out counts against the one that hangs.
    first = serve(faults=lambda number, body: fault if number == 2 else None)
    samples, engine = generate(first, serve(), server_timeout_s=0.8)
    require_true(samples)
    record = engine.fingerprint("decode")["servers"][0]
    assert record["failures"] + record["timeouts"] + record["busy"] == 1
    assert record["dropped"] is None


def test_time_outs_are_said_because_they_favour_short_responses(serve: Any) -> None:
    server = serve(faults=lambda number, body: "hang:1.2" if number == 2 else None)
    _, engine = generate(server, server_timeout_s=0.6)
    facts = engine.fingerprint("decode")
    (record,) = facts["servers"]
    assert record["timeouts"] > 0
    reasons = [entry.reason for entry in NotTested.of(facts)]
    assert any(reason.startswith(f"{record['timeouts']} requests to ") for reason in reasons)


def test_a_truncated_response_is_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def short(body: dict[str, Any]) -> dict[str, Any]:
        return honest(body | {"max_tokens": min(body["max_tokens"], 3), "stop_token_ids": []})

    server.completion = short
    with pytest.raises(MismatchError, match=r"\b3 tokens, --max-tokens"):
        generate(server)


def test_a_changed_prompt_is_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def cut(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        answer["choices"][0]["prompt_token_ids"] = body["prompt"][1:]
        return answer

    server.completion = cut
    with pytest.raises(MismatchError, match="changed the prompt"):
        generate(server)


def test_the_others_finish_what_a_dead_server_began(serve: Any) -> None:
    dead, alive = serve(), serve(delay_s=0.02)
    dying(dead, after=5)
    samples, engine = generate(dead, alive)
    require_true(samples)
    facts = engine.fingerprint("decode")
    assert [server["sequences"] for server in facts["servers"]] == [5, len(PROMPTS) - 5]
    assert facts["servers"][0]["unconfirmed"] == 5
    assert any(5 in numbers(entry.reason) for entry in NotTested.of(facts))


def test_a_server_restarted_with_other_weights_is_caught(serve: Any) -> None:
    bad, good = serve(), serve(delay_s=0.01)

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 4:
            bad.weights, bad.started = 1, 2.0
            return "reset"
        return None

    bad.faults = faults
    samples, engine = generate(bad, good)
    require_true(samples)  # none of the other checkpoint
    record = engine.fingerprint("decode")["servers"][0]
    assert "other weights" in record["dropped"]
    assert record["restarts"] == 1
    assert record["sequences"] == 0
    assert record["void"] >= 4


def test_weights_that_change_under_a_living_server_are_caught(serve: Any) -> None:
    server = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 10:
            server.weights = 1
        return None

    server.faults = faults
    with pytest.raises(MismatchError, match="other weights"):
        generate(server)


def test_a_restart_with_the_same_weights_goes_on(serve: Any) -> None:
    server = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 4:
            server.started = 2.0
            return "reset"
        return None

    server.faults = faults
    samples, engine = generate(server)
    require_true(samples)
    record = engine.fingerprint("decode")["servers"][0]
    assert (record["restarts"], record["dropped"]) == (1, None)


def test_another_version_after_a_restart_is_caught(serve: Any) -> None:
    bad = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 4:
            bad.version = "0.33.0"
            return "reset"
        return None

    bad.faults = faults
    samples, engine = generate(bad, serve(delay_s=0.01))
    require_true(samples)
    dropped = engine.fingerprint("decode")["servers"][0]["dropped"]
    assert re.findall(r"\d+\.\d+\.\d+", dropped) == ["0.32.0", "0.33.0"]


def test_an_answer_of_another_configuration_is_caught(serve: Any) -> None:
    bad = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 4:
            bad.configuration = "vllm-0.32.0-xyz"  # nothing else tells
        return None

    bad.faults = faults
    samples, engine = generate(bad, serve(delay_s=0.01))
    require_true(samples)
    dropped = engine.fingerprint("decode")["servers"][0]["dropped"]
    assert re.findall(r"vllm-[\w.-]+", dropped) == ["vllm-0.32.0-xyz", "vllm-0.32.0-abc"]
