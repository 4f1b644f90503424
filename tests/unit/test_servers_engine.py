"""The server engine against scripted servers whose distribution is known, also while they fail."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.servers import discovery
from mismatch.engines.servers.address import KEY_VARIABLE
from mismatch.engines.servers.engine import ServerEngine
from mismatch.errors import MismatchError
from mismatch.types import Sampling, SideFacts
from tests.scripted_server import VOCABULARY, law
from tests.servers_fixture import (
    LAW,
    PROMPTS,
    STOP,
    _light,
    dying,
    expected,
    generate,
    quiet,
    require_true,
    serve,
    sglang,
    spec,
)

__all__ = ["_light", "serve", "sglang"]  # fixtures


def facts_of(engine: ServerEngine) -> SideFacts:
    return engine.fingerprint("decode")


# ---------------------------------------------------------------- numbers


def test_samples_come_in_the_order_of_the_prompts_whichever_is_ready_first(serve: Any) -> None:
    server = serve()
    honest, answers = server.completion, itertools.count()

    def slow_at_times(body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.1 * (next(answers) % 3 == 0))
        return honest(body)

    server.completion = slow_at_times
    samples, engine = generate(server)
    assert len(samples) == len(PROMPTS)
    require_true(samples)
    record = facts_of(engine)["server"]
    assert (record["url"], record["configuration"]) == (server.url, server.configuration)
    assert record["drift"] == record["noise"] == 0.0


def test_a_later_turn_continues_every_context_once(serve: Any) -> None:
    several = Sampling(max_tokens=8, samples_per_prompt=3, seed=LAW.seed)
    engine = ServerEngine(spec(serve()), several, longest=64)
    first, second = engine.generate(PROMPTS, quiet), engine.generate(PROMPTS, quiet, turn=2)
    assert {len(group) for group in first} == {3}
    assert {len(group) for group in second} == {1}
    for (sample,), prompt in zip(second, PROMPTS, strict=True):
        np.testing.assert_allclose(sample.logprobs, expected(sample, prompt), atol=1e-12)


def test_a_server_gets_no_more_at_once_than_allowed(serve: Any) -> None:
    server = serve(delay_s=0.02)
    generate(server, server_concurrency=3)
    assert server.most_at_once == 3


def test_only_token_ids_are_sent_and_every_parameter_of_the_law(serve: Any) -> None:
    server = serve()
    generate(server, sampling=Sampling(0.7, 0.9, 5, 0.1, max_tokens=6, samples_per_prompt=1))
    bodies = [body for path, _, body in server.seen if body.get("max_tokens") == 6]
    assert len(bodies) == len(PROMPTS)
    for body in bodies:
        assert all(isinstance(token, int) for token in body["prompt"])
        assert [body[n] for n in ("temperature", "top_p", "top_k", "min_p")] == [0.7, 0.9, 5, 0.1]
        assert body["stop_token_ids"] == [STOP]
        assert body["repetition_penalty"] == 1.0
        assert body["model"] == "tiny"
        assert "seed" not in body  # vLLM's CPU sampler may die of one


def test_prefill_scores_the_tokens_that_are_asked_for(serve: Any) -> None:
    engine = ServerEngine(spec(serve()), LAW, longest=64)
    sequences = [[1, 2, 3, 4, 5], [7, 8, 9]]
    logprobs = engine.prefill(sequences, [2, 1], 1.0, quiet)
    np.testing.assert_allclose(logprobs[0], [law(2)[3], law(3)[4], law(4)[5]], atol=1e-12)
    np.testing.assert_allclose(logprobs[1], [law(7)[8], law(8)[9]], atol=1e-12)
    with pytest.raises(MismatchError, match="token 0"):
        engine.prefill(sequences, [0, 1], 1.0, quiet)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_law_of_the_logprobs_is_found_out(serve: Any, mode: str) -> None:
    cold = Sampling(0.6, top_k=4, max_tokens=6, samples_per_prompt=1)
    samples, engine = generate(serve(mode=mode, cached=3), sampling=cold)
    assert {sample.cached for sample in samples} == {3}
    facts = engine.fingerprint("decode")
    assert facts["logprobs_mode"] == f"{mode} (probed)"
    if mode == "raw":
        require_true(samples)
        assert (facts["logprobs_temperature"], facts["logprobs_truncated"]) == (1.0, False)
    else:
        require_true(samples, temperature=0.6, top_k=4)
        assert (facts["logprobs_temperature"], facts["logprobs_truncated"]) == (0.6, True)
    prefill = engine.fingerprint("prefill")
    assert (prefill["logprobs_temperature"], prefill["logprobs_truncated"]) == (1.0, False)


def test_logits_are_no_logprobs(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def shifted(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs:
            tops = logprobs["top_logprobs"]
            logprobs["top_logprobs"] = [{k: v + 9 for k, v in top.items()} for top in tops]
        return answer

    server.completion = shifted
    with pytest.raises(MismatchError, match=f"{server.url} reports logits"):
        ServerEngine(spec(server), LAW, longest=64)


def test_ids_are_validated_before_they_are_sent(serve: Any) -> None:
    server = serve()
    engine = ServerEngine(spec(server), LAW, longest=64)
    sent = len(server.seen)
    for bad in ([[1, VOCABULARY]], [[-1]], [[]]):
        with pytest.raises(MismatchError):
            engine.generate(bad, quiet)
    assert len(server.seen) == sent


def require_likeliest(samples: list[Sample], temperature: float = 1.0) -> None:
    """Five of every sampled token, as the scripted law has them."""
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        assert sample.likeliest is not None
        assert sample.likeliest.ids.shape == (len(sample.token_ids), 5)
        before = [prompt[-1], *sample.token_ids[:-1]]
        for token, ids, logprobs in zip(
            before, sample.likeliest.ids, sample.likeliest.logprobs, strict=True
        ):
            expected = law(token, temperature)
            np.testing.assert_allclose(logprobs, np.sort(expected)[::-1][:5], atol=1e-6)
            np.testing.assert_allclose(expected[ids], logprobs, atol=1e-6)


def test_a_server_is_asked_for_the_likeliest_tokens(serve: Any) -> None:
    engine = ServerEngine(spec(serve()), LAW, longest=64)
    engine.likeliest = 5
    require_likeliest([sample for (sample,) in engine.generate(PROMPTS, quiet)], LAW.temperature)
    engine.likeliest = 0
    assert all(sample.likeliest is None for (sample,) in engine.generate(PROMPTS, quiet))


# ---------------------------------------------------------------- SGLang


def test_an_sglang_server_is_recognised_and_its_law_found_out(sglang: Any) -> None:
    cold = Sampling(0.6, top_k=4, max_tokens=6, samples_per_prompt=1)
    server = sglang()
    samples, engine = generate(server, sampling=cold)
    require_true(samples, temperature=0.6)  # tempered, over the whole vocabulary
    facts = engine.fingerprint("decode")
    assert (facts["served_by"], facts["version"], facts["dtype"]) == ("sglang", "0.5.23", "bf16")
    assert facts["logprobs_mode"] == "tempered (probed)"
    assert (facts["logprobs_temperature"], facts["logprobs_truncated"]) == (0.6, False)
    assert "leak" not in json.dumps(facts)  # its answer may hold the key
    seeds = [
        body["sampling_params"]["sampling_seed"]
        for _, _, body in server.seen
        if body.get("sampling_params", {}).get("max_new_tokens") == 6
    ]
    assert len(set(seeds)) == len(PROMPTS)
    (logprobs,) = engine.prefill([[1, 2, 3, 4, 5]], [2], 1.0, quiet)
    np.testing.assert_allclose(logprobs, [law(2)[3], law(3)[4], law(4)[5]], atol=1e-12)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_routes_have_the_columns_of_the_moe_layers(
    serve: Any, sglang: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    there = ExpertLayout((1,), num_experts=4, top_k=2)
    monkeypatch.setattr(discovery, "expert_layout", lambda spec, info: there)
    make = serve if kind == "vllm" else sglang
    samples, engine = generate(make(routes=True))
    assert engine.experts() == there
    first = samples[0].routed
    assert first is not None
    assert first.shape == (len(PROMPTS[0]) + len(samples[0].token_ids) - 1, 1, 2)
    assert first[0].tolist() == [[2, 3]]  # of layer 1, the second column
    discovery.discover.cache_clear()
    without = ServerEngine.capabilities(spec(make()), LAW)
    assert not without.routed_experts
    assert f"{kind} server" in without.reasons["routed_experts"]


# ---------------------------------------------------------------- servers that fail

FAULTS = ["status:429", "status:503", "status:500", "reset", "half", "text"]
FAULTS += ['json:{"choices": []}', "json:[]", 'json:{"choices": [{"token_ids": [1]}]}']


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_costs_nothing(serve: Any, fault: str) -> None:
    server = serve(faults=lambda number, body: fault if number == 2 else None)
    samples, _ = generate(server)
    require_true(samples)
    assert server.sampled == len(PROMPTS) + 1  # one is asked for again, none twice


def test_a_request_that_runs_out_of_time_is_not_repeated(serve: Any) -> None:
    """A second answer in time would be a shorter one."""
    server = serve(faults=lambda number, body: "hang:1.2" if number == 2 else None)
    with pytest.raises(MismatchError, match=r"0\.8 s") as caught:
        generate(server, server_timeout_s=0.8)
    assert "--server-timeout" in caught.value.fix
    assert server.sampled <= len(PROMPTS)


def test_an_aborted_request_is_asked_again(sglang: Any) -> None:
    samples, _ = generate(sglang(faults=lambda number, body: "abort" if number == 3 else None))
    require_true(samples)


def test_a_server_that_is_gone_ends_the_run(serve: Any) -> None:
    server = serve()
    dying(server, after=4)
    with pytest.raises(MismatchError) as caught:
        generate(server)
    assert server.url in caught.value.message
    assert "--resume" in caught.value.fix


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("status:400", "400: not now"),
        ("status:500", "500: not now"),
        ('json:{"choices": [{"prompt_token_ids": [9]}]}', "4 tokens sent, 1 used"),
    ],
)
def test_a_request_that_always_fails_ends_the_run(serve: Any, fault: str, named: str) -> None:
    server = serve(faults=lambda number, body: fault if body["prompt"] == PROMPTS[3] else None)
    with pytest.raises(MismatchError, match=named) as caught:
        generate(server)
    assert caught.value.fix


def test_a_truncated_response_is_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion
    server.completion = lambda body: honest(
        body | {"max_tokens": min(body["max_tokens"], 3), "stop_token_ids": []}
    )
    with pytest.raises(MismatchError, match=r"\b3 tokens, --max-tokens"):
        generate(server)


@pytest.mark.parametrize(
    ("field", "now", "named"),
    [
        ("weights", 1, "moved by"),
        ("configuration", "vllm-0.32.0-xyz", "vllm-0.32.0-xyz, not vllm-0.32.0-abc"),
    ],
)
def test_a_server_that_changes_ends_the_run(serve: Any, field: str, now: Any, named: str) -> None:
    server = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 10:
            setattr(server, field, now)
        return None

    server.faults = faults
    with pytest.raises(MismatchError, match=named) as caught:
        generate(server)
    assert server.url in caught.value.message
    assert "--resume" in caught.value.fix


def test_a_new_weight_version_ends_the_run(sglang: Any) -> None:
    server = sglang()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        server.weight_version = "step-2" if number > 4 else "default"
        return None

    server.faults = faults
    with pytest.raises(MismatchError, match="step-2, not default"):
        generate(server)


def test_an_interrupt_ends_it_at_once_and_leaves_nothing(serve: Any) -> None:
    engine = ServerEngine(spec(serve(delay_s=20.0)), LAW, longest=64)
    before = threading.active_count()
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, quiet)
    assert time.monotonic() - start < 15  # the server takes 20 s
    timer.join()
    # The scripted servers' threads that slept through it are theirs.
    ours = [t for t in threading.enumerate() if "process_request" not in t.name]
    assert len(ours) <= before


# ---------------------------------------------------------------- secrets


def test_the_key_is_nowhere_to_be_found(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv(KEY_VARIABLE, secret)
    server = serve(key=secret)
    _, engine = generate(server)
    assert any(head.get("Authorization") == f"Bearer {secret}" for _, head, _ in server.seen)
    assert secret not in json.dumps(facts_of(engine))
    assert secret not in repr(engine.server)
