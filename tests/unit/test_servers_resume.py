"""The server engine goes on with what it finished before, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.captures import Likeliest
from mismatch.codec import from_json
from mismatch.engines.base import Sample
from mismatch.engines.servers.journal import PLACE, Journal
from mismatch.engines.servers.scheduler import NoServerLeft
from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, spec_hash, to_dict
from tests.servers_fixture import (
    MODEL,
    PROMPTS,
    _light,
    dying,
    generate,
    require_true,
    serve,
    sglang,
)

__all__ = ["_light", "serve", "sglang"]  # fixtures


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / PLACE).read_text().splitlines()]


def test_finished_sequences_outlive_all_servers(serve: Any, tmp_path: Path) -> None:
    dead = serve()
    dying(dead, after=9)
    with pytest.raises(MismatchError, match=r"\b9 finished") as caught:
        generate(dead, run=tmp_path)
    assert "--resume" in caught.value.fix
    kept = {line["job"]: line["ids"] for line in lines(tmp_path)[1:]}
    assert len(kept) == 9
    again = serve()
    samples, engine = generate(again, run=tmp_path)
    require_true(samples)
    assert again.sampled == len(PROMPTS) - 9  # none is sampled twice
    assert all(samples[job].token_ids == ids for job, ids in kept.items())
    jobs = [line["job"] for line in lines(tmp_path)[1:]]
    assert sorted(jobs) == list(range(len(PROMPTS)))
    assert sum(server["sequences"] for server in engine.fingerprint("decode")["servers"]) == 15
    engine.discard_journal()
    assert not (tmp_path / PLACE).exists()


def test_what_is_kept_is_said_whatever_ends_the_run(serve: Any, tmp_path: Path) -> None:
    server = serve(faults=lambda number, body: "status:400" if number == 9 else None)
    with pytest.raises(MismatchError, match=r"HTTP 400.*\d finished") as caught:
        generate(server, run=tmp_path)
    assert caught.value.fix.endswith(": --resume")


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
    assert sorted(line["job"] for line in lines(tmp_path)[1:]) == list(range(len(PROMPTS)))


def test_other_weights_do_not_go_on_with_a_run(serve: Any, tmp_path: Path) -> None:
    dead = serve()
    dying(dead, after=4)
    with pytest.raises(NoServerLeft):
        generate(dead, run=tmp_path)
    with pytest.raises(MismatchError, match="of other weights"):
        generate(serve(weights=1), run=tmp_path)
    with pytest.raises(MismatchError, match=r"version.*0\.32\.0,.*0\.33\.0"):
        generate(serve(version="0.33.0"), run=tmp_path)


def test_another_weight_version_does_not_go_on_with_a_run(sglang: Any, tmp_path: Path) -> None:
    generate(sglang(), run=tmp_path)
    with pytest.raises(MismatchError, match=r"weight version.*default,.*step-2"):
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
    restored = Journal.open(tmp_path, "x").samples[7]
    assert restored.routed is not None
    assert restored.routed.dtype == np.uint8
    np.testing.assert_array_equal(restored.routed, routed)
    np.testing.assert_array_equal(restored.logprobs, [-0.1, -0.25])
    assert restored.likeliest is not None
    np.testing.assert_array_equal(restored.likeliest.ids, top.ids)
    np.testing.assert_array_equal(restored.likeliest.logprobs, top.logprobs)
    assert restored.likeliest.logprobs[1, 1] == -np.inf


def test_where_servers_are_is_no_part_of_what_was_asked() -> None:
    first = CheckSpec(rollout=RolloutSpec(EngineSpec("server", MODEL, servers=("http://a:1",))))
    second = CheckSpec(rollout=RolloutSpec(EngineSpec("server", MODEL, servers=("http://b:2",))))
    assert spec_hash(first) == spec_hash(second)
    assert spec_hash(first.rollout) == spec_hash(second.rollout)
    assert from_json(CheckSpec, json.loads(json.dumps(to_dict(first)))) == first
    assert spec_hash(first) != spec_hash(CheckSpec(rollout=RolloutSpec(EngineSpec("vllm", MODEL))))
