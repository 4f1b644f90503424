"""The server engine against scripted servers whose law is known: numbers, faults, resuming."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.captures import Likeliest
from mismatch.engines.base import ExpertLayout, Sample
from mismatch.engines.model_info import ModelInfo
from mismatch.engines.servers import discovery, http, probing
from mismatch.engines.servers import engine as engines
from mismatch.engines.servers.discovery import recognise
from mismatch.engines.servers.engine import ServerEngine
from mismatch.engines.servers.journal import PLACE, Journal
from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, from_dict, spec_hash, to_dict
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
    info = ModelInfo("x", VOCABULARY, 512, (STOP,), num_experts=0, top_k=0)
    for module in (engines, probing, discovery):
        monkeypatch.setattr(module, "read_model_info", lambda spec: info)
    monkeypatch.setattr(probing, "load_tokenizer", lambda spec: Tokenizer())
    monkeypatch.setattr(engines, "model_facts", lambda spec: {"model": spec.model})
    monkeypatch.setattr(http, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(http, "LONGEST_BACKOFF_S", 0.03)
    monkeypatch.delenv(http.KEY_VARIABLE, raising=False)
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
    fields = {"model": MODEL, "server_timeout_s": 5.0, "server_concurrency": 4} | fields
    return EngineSpec(engine="server", servers=urls, **fields)


def quiet(*_: Any) -> None:
    pass


def generate(
    *servers: ScriptedServer, sampling: Sampling = LAW, run: Path | None = None, **fields: Any
) -> tuple[list[Sample], ServerEngine]:
    engine = ServerEngine(spec(*servers, **fields), sampling, longest=64)
    if run is not None:
        engine.keep_journal(run, "asked")
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


# ---------------------------------------------------------------- numbers


def test_samples_come_in_the_order_of_the_prompts_whoever_answers(serve: Any) -> None:
    alone, _ = generate(serve())
    slow = serve(delay_s=0.02)
    shared, engine = generate(slow, serve())
    assert [s.token_ids for s in shared] == [s.token_ids for s in alone]
    require_true(shared)
    records = engine.fingerprint("decode")["servers"]
    assert sum(one["sequences"] for one in records) == len(PROMPTS)
    assert records[0]["sequences"] < records[1]["sequences"]


def test_a_later_turn_continues_every_context_once(serve: Any) -> None:
    several = Sampling(max_tokens=8, samples_per_prompt=3, seed=LAW.seed)
    engine = ServerEngine(spec(serve(), serve()), several, longest=64)
    first, second = engine.generate(PROMPTS, quiet), engine.generate(PROMPTS, quiet, turn=2)
    assert {len(group) for group in first} == {3}
    assert {len(group) for group in second} == {1}
    for (sample,), prompt in zip(second, PROMPTS, strict=True):
        np.testing.assert_allclose(sample.logprobs, expected(sample, prompt), atol=1e-12)


def test_only_token_ids_are_sent_and_every_parameter_of_the_law(serve: Any) -> None:
    server = serve()
    generate(server, sampling=Sampling(0.7, top_p=0.9, top_k=5, max_tokens=6, samples_per_prompt=1))
    bodies = [body for path, _, body in server.seen if body.get("max_tokens") == 6]
    assert len(bodies) == len(PROMPTS)
    for body in bodies:
        assert all(isinstance(token, int) for token in body["prompt"])
        assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
        assert body["stop_token_ids"] == [STOP]
        assert body["repetition_penalty"] == 1.0
        assert body["model"] == "tiny"
        assert "seed" not in body  # vLLM's CPU sampler may die of one


def test_prefill_scores_the_tokens_that_are_asked_for(serve: Any) -> None:
    engine = ServerEngine(spec(serve(), serve()), LAW, longest=64)
    sequences = [[1, 2, 3, 4, 5], [7, 8, 9]]
    found = engine.prefill(sequences, [2, 1], 1.0, quiet)
    np.testing.assert_allclose(found[0], [law(2)[3], law(3)[4], law(4)[5]], atol=1e-12)
    np.testing.assert_allclose(found[1], [law(7)[8], law(8)[9]], atol=1e-12)
    with pytest.raises(MismatchError, match="token 0"):
        engine.prefill(sequences, [0, 1], 1.0, quiet)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_law_of_the_logprobs_is_found_out(serve: Any, mode: str) -> None:
    cold = Sampling(0.6, top_k=4, max_tokens=6, samples_per_prompt=1)
    samples, engine = generate(serve(mode=mode), sampling=cold)
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


def test_ids_may_come_as_names(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def older(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        del answer["choices"][0]["token_ids"], answer["choices"][0]["prompt_token_ids"]
        return answer

    server.completion = older
    samples, _ = generate(server)
    require_true(samples)
    server.completion = lambda body: honest(body) | {"choices": [{"text": "no ids"}]}
    discovery.discover.cache_clear()
    with pytest.raises(MismatchError, match="without token ids"):
        generate(server)


def test_logits_are_no_logprobs(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def shifted(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        said = answer["choices"][0]["logprobs"]
        if said:
            tops = said["top_logprobs"]
            said["top_logprobs"] = [{k: v + 9 for k, v in top.items()} for top in tops]
        return answer

    server.completion = shifted
    with pytest.raises(MismatchError, match="reports logits, not logprobs"):
        ServerEngine(spec(server), LAW, longest=64)


def test_ids_are_validated_before_they_are_sent(serve: Any) -> None:
    server = serve()
    engine = ServerEngine(spec(server), LAW, longest=64)
    sent = len(server.seen)
    for bad in ([[1, VOCABULARY]], [[-1]], [[]]):
        with pytest.raises(MismatchError):
            engine.generate(bad, quiet)
    assert len(server.seen) == sent


# ---------------------------------------------------------------- what servers cannot do


def test_what_is_missing_is_a_capability_with_a_reason(serve: Any) -> None:
    found = ServerEngine.capabilities(spec(serve(prompt_logprobs=False)), LAW)
    assert not found.prefill
    assert "prompt logprobs" in found.reasons["prefill"]
    assert not found.routed_experts
    assert "--enable-return-routed-experts" in found.reasons["routed_experts"]
    assert not found.deterministic
    assert not found.distributions
    assert found.journals
    full = ServerEngine.capabilities(spec(serve()), LAW)
    assert full.prefill
    assert not full.prefill_tempered


def test_a_server_without_logprobs_measures_nothing(serve: Any) -> None:
    with pytest.raises(MismatchError, match="no logprobs of the tokens that it samples"):
        ServerEngine(spec(serve(logprobs=False)), LAW, longest=64)


def test_a_server_without_prompt_logprobs_is_watched_by_what_it_would_say_next(serve: Any) -> None:
    server, other = serve(prompt_logprobs=False), serve(prompt_logprobs=False, weights=1)
    samples, _ = generate(server)
    require_true(samples)
    with pytest.raises(MismatchError, match="other weights"):
        ServerEngine(spec(server, other), LAW, longest=64)


def test_the_context_of_the_server_is_respected(serve: Any) -> None:
    with pytest.raises(MismatchError, match="sequences of 60 tokens, these may have 65"):
        ServerEngine(spec(serve(max_model_len=60)), LAW, longest=64)


def test_what_a_server_does_not_say_is_not_tested(serve: Any) -> None:
    _, engine = generate(serve())
    facts = engine.fingerprint("decode")
    assert facts["dtype"] is None
    assert any("dtype" in line for line in facts["not_tested"])
    assert facts["source_files"] == {}
    assert engine.weights().digests == {}


# ---------------------------------------------------------------- the wrong servers


def test_no_server_at_all(serve: Any) -> None:
    gone = serve()
    gone.stop()
    with pytest.raises(MismatchError, match="connection refused") as caught:
        recognise(spec(gone))
    assert "curl" in caught.value.fix


def test_another_kind_of_server(serve: Any) -> None:
    server = serve()
    server.answer = lambda web, body: server.send(web, 404, {})
    with pytest.raises(MismatchError, match="no server that mismatch knows"):
        recognise(spec(server))


def test_the_wrong_model_is_refused_by_its_name(serve: Any) -> None:
    with pytest.raises(MismatchError, match="serves large, not --model tiny: the wrong") as caught:
        recognise(spec(serve(name="large")))
    assert "--served-model large" in caught.value.fix
    assert recognise(spec(serve(name="large"), served_model="large"))
    with pytest.raises(MismatchError, match="--served-model other"):
        recognise(spec(serve(name="large"), served_model="other"))


def test_the_wrong_tokenizer_is_refused(serve: Any) -> None:
    server = serve()
    plain = server.answer

    def answer(web: Any, body: dict[str, Any]) -> None:
        if web.path == "/tokenize":
            return server.send(web, 200, {"tokens": [1, 2, 3]})
        return plain(web, body)

    server.answer = answer
    with pytest.raises(MismatchError, match="another tokenizer"):
        ServerEngine(spec(server), LAW, longest=64)


@pytest.mark.parametrize(
    ("setting", "other"), [("version", "0.33.0"), ("max_model_len", 256), ("weights", 1)]
)
def test_servers_that_are_not_alike_are_refused(serve: Any, setting: str, other: Any) -> None:
    with pytest.raises(MismatchError, match=r"the servers (differ|have other weights)"):
        ServerEngine(spec(serve(), serve(**{setting: other})), LAW, longest=64)


def test_servers_with_different_logprobs_are_refused(serve: Any) -> None:
    with pytest.raises(MismatchError, match=r"raw at .*, processed at"):
        ServerEngine(spec(serve(), serve(mode="processed")), LAW, longest=64)


def test_other_settings_are_said(serve: Any) -> None:
    _, engine = generate(serve(), serve(configuration="vllm-0.32.0-xyz"))
    said = engine.fingerprint("decode")["not_tested"]
    assert any("configurations differ" in line for line in said)


def test_the_same_server_twice_is_refused(serve: Any) -> None:
    server = serve()
    twice = EngineSpec("server", MODEL, servers=(server.url, server.url + "/"))
    with pytest.raises(MismatchError, match="twice"):
        recognise(twice)


def test_an_address_with_two_models_behind_it_is_said(serve: Any) -> None:
    server = serve()
    honest, numbers = server.completion, itertools.count()

    def either(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("prompt_logprobs") is not None:  # as a balancer deals the requests
            server.weights = next(numbers) // 3 % 2
        return honest(body)

    server.completion = either
    engine = ServerEngine(spec(server), LAW, longest=64)
    said = engine.fingerprint("decode")["not_tested"]
    assert any("that one model answers at" in line for line in said)
    calm = ServerEngine(spec(serve()), LAW, longest=64).fingerprint("decode")["not_tested"]
    assert not any("that one model answers at" in line for line in calm)


def test_probes_without_numbers_are_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def overflown(body: dict[str, Any]) -> dict[str, Any]:
        answer = honest(body)
        for row in answer["choices"][0].get("prompt_logprobs") or [None]:
            for said in (row or {}).values():
                said["logprob"] = float("nan")
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


@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_moment_is_no_missing_capability(serve: Any, status: int) -> None:
    server = serve(mode="processed")
    seldom_free(server, status)
    found = ServerEngine.capabilities(spec(server), LAW)
    assert found.prefill
    assert found.processed_logprobs


def test_a_server_that_stays_busy_says_nothing_about_what_it_can_do(serve: Any) -> None:
    server = serve()
    plain = server.answer

    def answer(web: Any, body: dict[str, Any]) -> None:
        if "prompt_logprobs" in body:
            return server.send(web, 503, {"error": "too much to do"})
        return plain(web, body)

    server.answer = answer
    with pytest.raises(MismatchError, match=r"HTTP 503: too much to do"):
        ServerEngine.capabilities(spec(server), LAW)


@pytest.mark.parametrize("cards", [["x"], [{"owned_by": "vllm"}], [], [{"id": "x"}]])
def test_another_program_is_no_server_of_a_known_kind(serve: Any, cards: list[Any]) -> None:
    server = serve()
    odd = {"/model_info": {"model_path": "x"}, "/server_info": None, "/v1/models": {"data": cards}}
    odd["/version"] = {"version": "1"}
    server.answer = lambda web, body: server.send(web, 200, odd.get(web.path))
    with pytest.raises(MismatchError, match="no server that mismatch knows"):
        recognise(spec(server))


# ---------------------------------------------------------------- faults in mid-run

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
    said = engine.fingerprint("decode")["not_tested"]
    assert any("ran out of time" in line for line in said)


def test_a_truncated_response_is_refused(serve: Any) -> None:
    server = serve()
    honest = server.completion

    def short(body: dict[str, Any]) -> dict[str, Any]:
        return honest(body | {"max_tokens": min(body["max_tokens"], 3), "stop_token_ids": []})

    server.completion = short
    with pytest.raises(MismatchError, match="cut a response at 3 tokens"):
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


def test_the_others_finish_what_a_dead_server_began(serve: Any) -> None:
    dead, alive = serve(), serve(delay_s=0.02)
    dying(dead, after=5)
    samples, engine = generate(dead, alive)
    require_true(samples)
    facts = engine.fingerprint("decode")
    assert [one["sequences"] for one in facts["servers"]] == [5, len(PROMPTS) - 5]
    assert facts["servers"][0]["unconfirmed"] == 5
    assert any("before 5 of its answers" in line for line in facts["not_tested"])


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
    assert "version was 0.32.0 and is 0.33.0" in dropped


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
    assert dropped == "it answers as vllm-0.32.0-xyz, not vllm-0.32.0-abc"


# ---------------------------------------------------------------- resuming


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / PLACE).read_text().splitlines()]


def test_finished_sequences_outlive_all_servers(serve: Any, tmp_path: Path) -> None:
    dead = serve()
    dying(dead, after=9)
    with pytest.raises(MismatchError, match="9 finished sequences are kept") as caught:
        generate(dead, run=tmp_path)
    assert "--resume" in caught.value.fix
    kept = {one["job"]: one["ids"] for one in lines(tmp_path)[1:]}
    assert len(kept) == 9
    again = serve()
    samples, engine = generate(again, run=tmp_path)
    require_true(samples)
    assert again.sampled == len(PROMPTS) - 9  # none is sampled twice
    assert all(samples[job].token_ids == ids for job, ids in kept.items())
    jobs = [one["job"] for one in lines(tmp_path)[1:]]
    assert sorted(jobs) == list(range(len(PROMPTS)))
    assert sum(one["sequences"] for one in engine.fingerprint("decode")["servers"]) == 15
    engine.discard_journal()
    assert not (tmp_path / PLACE).exists()


def test_what_is_kept_is_said_whatever_ends_the_run(serve: Any, tmp_path: Path) -> None:
    server = serve(faults=lambda number, body: "status:400" if number == 9 else None)
    with pytest.raises(MismatchError, match=r"HTTP 400.*finished sequences are kept") as caught:
        generate(server, run=tmp_path)
    assert caught.value.fix.endswith("then go on where it stopped: --resume")


def test_a_line_that_was_cut_short_is_dropped(serve: Any, tmp_path: Path) -> None:
    generate(serve(), run=tmp_path)
    path = tmp_path / PLACE
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    again = serve()
    samples, _ = generate(again, run=tmp_path)
    require_true(samples)
    assert again.sampled == 1
    assert path.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, -1) + 1])
    assert sorted(one["job"] for one in lines(tmp_path)[1:]) == list(range(len(PROMPTS)))


def test_other_weights_do_not_go_on_with_a_run(serve: Any, tmp_path: Path) -> None:
    dead = serve()
    dying(dead, after=4)
    with pytest.raises(MismatchError, match="no server is left"):
        generate(dead, run=tmp_path)
    with pytest.raises(MismatchError, match="are of other weights"):
        generate(serve(weights=1), run=tmp_path)
    with pytest.raises(MismatchError, match=r"version was 0\.32\.0, now it is 0.33.0"):
        generate(serve(version="0.33.0"), run=tmp_path)


def test_another_weight_version_does_not_go_on_with_a_run(sglang: Any, tmp_path: Path) -> None:
    generate(sglang(), run=tmp_path)
    with pytest.raises(MismatchError, match="weight version was default, now it is step-2"):
        generate(sglang(weight_version="step-2"), run=tmp_path)


def test_void_sequences_are_not_taken_up_again(serve: Any, tmp_path: Path) -> None:
    server = serve()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 10:
            server.weights = 1
        return None

    server.faults = faults
    with pytest.raises(MismatchError, match="other weights"):
        generate(server, run=tmp_path)
    assert Journal.open(tmp_path, "asked").samples == {}
    fresh = serve()
    samples, _ = generate(fresh, run=tmp_path)
    require_true(samples)
    assert fresh.sampled == len(PROMPTS)


def test_a_journal_of_another_question_begins_anew(serve: Any, tmp_path: Path) -> None:
    generate(serve(), run=tmp_path)
    assert Journal.open(tmp_path, "asked").samples
    assert Journal.open(tmp_path, "something else").new


def test_routes_survive_the_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, "x")
    journal.begin({})
    routed = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)
    top = Likeliest.of([[1, 3], [2, 1]], [[-0.1, -3.0], [-0.25, -9999.0]])
    sample = Sample([1, 2], np.array([-0.1, -0.25]), "stop", routed, likeliest=top)
    journal.add(7, sample, "http://a")
    found = Journal.open(tmp_path, "x").samples[7]
    assert found.routed is not None
    assert found.routed.dtype == np.uint8
    np.testing.assert_array_equal(found.routed, routed)
    np.testing.assert_array_equal(found.logprobs, [-0.1, -0.25])
    assert found.likeliest is not None
    np.testing.assert_array_equal(found.likeliest.ids, top.ids)
    np.testing.assert_array_equal(found.likeliest.logprobs, top.logprobs)
    assert found.likeliest.logprobs[1, 1] == -np.inf


def require_likeliest(samples: list[Sample], temperature: float = 1.0) -> None:
    """Five of every sampled token, as the scripted law has them."""
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        assert sample.likeliest is not None
        assert sample.likeliest.ids.shape == (len(sample.token_ids), 5)
        before = [prompt[-1], *sample.token_ids[:-1]]
        for token, ids, logprobs in zip(
            before, sample.likeliest.ids, sample.likeliest.logprobs, strict=True
        ):
            said = law(token, temperature)
            np.testing.assert_allclose(logprobs, np.sort(said)[::-1][:5], atol=1e-6)
            np.testing.assert_allclose(said[ids], logprobs, atol=1e-6)


def test_a_server_is_asked_for_the_likeliest_tokens(serve: Any) -> None:
    engine = ServerEngine(spec(serve()), LAW, longest=64)
    engine.likeliest = 5
    require_likeliest([sample for (sample,) in engine.generate(PROMPTS, quiet)], LAW.temperature)
    engine.likeliest = 0
    assert all(sample.likeliest is None for (sample,) in engine.generate(PROMPTS, quiet))


def test_where_servers_are_is_no_part_of_what_was_asked() -> None:
    one = CheckSpec(rollout=RolloutSpec(EngineSpec("server", MODEL, servers=("http://a:1",))))
    two = CheckSpec(rollout=RolloutSpec(EngineSpec("server", MODEL, servers=("http://b:2",))))
    assert spec_hash(one) == spec_hash(two)
    assert spec_hash(one.rollout) == spec_hash(two.rollout)
    assert from_dict(CheckSpec, json.loads(json.dumps(to_dict(one)))) == one
    assert spec_hash(one) != spec_hash(CheckSpec(rollout=RolloutSpec(EngineSpec("vllm", MODEL))))


# ---------------------------------------------------------------- SGLang


@pytest.fixture
def sglang() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(ScriptedSglang(**settings))


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


def test_sglang_scores_prompts(sglang: Any) -> None:
    engine = ServerEngine(spec(sglang()), LAW, longest=64)
    (found,) = engine.prefill([[1, 2, 3, 4, 5]], [2], 1.0, quiet)
    np.testing.assert_allclose(found, [law(2)[3], law(3)[4], law(4)[5]], atol=1e-12)


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
    assert f"{kind} server returns no routed experts" in without.reasons["routed_experts"]


def test_an_aborted_request_is_asked_again(sglang: Any) -> None:
    server = sglang(faults=lambda number, body: "abort" if number == 3 else None)
    samples, _ = generate(server)
    require_true(samples)


def test_a_new_weight_version_is_another_server(sglang: Any) -> None:
    server = sglang()

    def faults(number: int, body: dict[str, Any]) -> str | None:
        if number == 5:
            server.weight_version = "step-2"
        return None

    server.faults = faults
    with pytest.raises(MismatchError, match="it answers as step-2, not default"):
        generate(server)


def test_vllm_and_sglang_are_not_mixed(serve: Any, sglang: Any) -> None:
    with pytest.raises(MismatchError, match=r"kind is vllm at .*, sglang at"):
        recognise(spec(serve(), sglang()))


# ---------------------------------------------------------------- secrets


def test_the_key_is_nowhere_to_be_found(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv(http.KEY_VARIABLE, secret)
    server = serve(key=secret)
    _, engine = generate(server, run=tmp_path)
    assert any(head.get("Authorization") == f"Bearer {secret}" for _, head, _ in server.seen)
    kept = (tmp_path / PLACE).read_text() + json.dumps(engine.fingerprint("decode"))
    assert secret not in kept
    assert secret not in repr(engine.group)


def test_the_layout_is_none_for_a_dense_model() -> None:
    info = ModelInfo("x", VOCABULARY, 512, (STOP,), num_experts=0, top_k=0)
    assert probing.expert_layout(EngineSpec(model=MODEL), info) is None
