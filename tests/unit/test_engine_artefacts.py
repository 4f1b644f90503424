"""From samples to artefacts, and what the engine's worker refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from mismatch.engines.artefacts import build_rollout, build_routing, response_rewards
from mismatch.engines.base import Capabilities, ExpertLayout, Sample
from mismatch.engines.model_info import ModelInfo, load_fix, read_model_info, require_model
from mismatch.engines.turns import starting
from mismatch.errors import CorruptCapture, MismatchError
from mismatch.processes.tasks import EngineSession, write_session
from mismatch.processes.workers.sampling import (
    not_tested,
    require_complete,
    require_context,
    wants_prefill,
)
from mismatch.processes.workers.session import main
from mismatch.prompts.prompt import Prompt
from mismatch.run.messages import Reporter
from mismatch.specs import EngineSpec, RolloutSpec
from mismatch.types import EXACT_KL, PREFILL, ROUTES, NotTested, Rollout, Sampling
from tests.checkpoints import tokenizer

INFO = ModelInfo(100, 16, (2,), num_experts=4, top_k=2)
LAYOUT = ExpertLayout(layers=(1,), num_experts=4, top_k=2)
PROMPTS = [[5, 6], [7]]


def sample(*ids: int, rows: int | None = None) -> Sample:
    routed = None if rows is None else np.tile(np.array([[[0, 3]]], np.uint16), (rows, 1, 1))
    return Sample(list(ids), np.log(np.full(len(ids), 0.5)), "stop", routed)


SAMPLES = [[sample(8, 2), sample(9)], [sample(2), sample(8, 8, 2)]]


def rollout() -> Rollout:
    spec = RolloutSpec(sampling=Sampling(samples_per_prompt=2))
    return build_rollout(starting(PROMPTS, SAMPLES), spec, {"engine": "x", "weights": {"a": [1]}})


def test_samples_become_one_flat_rollout() -> None:
    flat = rollout()
    assert flat.token_ids.tolist() == [5, 6, 8, 2, 5, 6, 9, 7, 2, 7, 8, 8, 2]
    assert flat.offsets.tolist() == [0, 4, 7, 9, 13]
    assert flat.actions.tolist() == [2, 3, 6, 8, 10, 11, 12]
    assert flat.turn.tolist() == flat.action_mask.astype(int).tolist()
    assert flat.prompt_index.tolist() == [0, 0, 1, 1]
    assert flat.fingerprint == {"engine": "x"}


@pytest.mark.parametrize("surplus", [0, 1])
def test_experts_have_a_row_for_all_tokens_but_the_last(surplus: int) -> None:
    flat = rollout()
    rows: list[Any] = []
    for index, length in enumerate(np.diff(flat.offsets)):
        experts = np.array([0, 3]) if index % 2 else np.array([2, 1])
        rows.append(np.tile(experts, (length - 1 + surplus, 1, 1)).astype(np.uint16))
    routing = build_routing(rows, LAYOUT, flat, "x:decode")
    assert routing.ids.dtype == np.uint8
    assert np.flatnonzero(~routing.present).tolist() == [3, 6, 8, 12]
    assert routing.ids[0].tolist() == [[2, 1]]
    assert routing.ids[4].tolist() == [[0, 3]]
    assert routing.layers == (1,)


@pytest.mark.parametrize("fault", ["missing", "short", "layers", "range"])
def test_impossible_experts_are_refused(fault: str) -> None:
    flat = rollout()
    rows: list[Any] = [
        np.tile(np.array([0, 3], np.uint16), (n - 1, 1, 1)) for n in np.diff(flat.offsets)
    ]
    rows[1] = {
        "missing": None,
        "short": rows[1][:-1],
        "layers": np.repeat(rows[1], 2, axis=1),
        "range": rows[1] + 256,
    }[fault]
    with pytest.raises(CorruptCapture, match="x:decode, sequence 1"):
        build_routing(rows, LAYOUT, flat, "x:decode")


def test_fewer_samples_than_asked_are_refused() -> None:
    require_complete(SAMPLES, 2, 2, "x")
    with pytest.raises(MismatchError, match=r"\b3 .*\b2 x"):
        require_complete([SAMPLES[0], SAMPLES[1][:1]], 2, 2, "x")
    with pytest.raises(MismatchError, match=r"\b2 .*\b2 x"):
        require_complete(SAMPLES[:1], 2, 2, "x")
    torn = replace(sample(8, 2), logprobs=np.zeros(1))
    with pytest.raises(MismatchError, match=r"\b2 .*\b1 .*\b1\n"):
        require_complete([SAMPLES[0], [torn, sample(2)]], 2, 2, "x")


def context(tokens: int, max_tokens: int, **engine: Any) -> int:
    spec = RolloutSpec(EngineSpec(**engine), sampling=Sampling(max_tokens=max_tokens))
    prompts = [Prompt("p:1"), Prompt("p:2")]
    return require_context(spec, prompts, [[1], [1] * tokens], INFO)


def test_a_prompt_has_to_fit_with_its_response() -> None:
    assert context(8, 7) == 15  # 16, less one position for rescoring
    assert context(8, 8, prefill=False) == 16
    assert context(8, 50, max_model_len=64) == 58
    with pytest.raises(MismatchError, match=r"p:2 .*16 .*16"):
        context(16, 1)
    with pytest.raises(MismatchError, match=r"p:2 .*--max-tokens 8") as caught:
        context(8, 8)
    assert "--max-tokens 7" in caught.value.fix


def test_what_an_engine_cannot_do_is_said_and_not_tried() -> None:
    reasons = {"prefill_tempered": "T must be 1."}
    able = Capabilities(prefill_tempered=False, distributions=True, reasons=reasons)
    warm = RolloutSpec(EngineSpec("x"), sampling=Sampling(temperature=0.7))
    assert not wants_prefill(warm, able)
    assert not_tested(warm, able) == [NotTested(PREFILL, f"x: {reasons['prefill_tempered']}")]
    plain = RolloutSpec(EngineSpec("x"))
    assert wants_prefill(plain, able)
    assert not_tested(plain, able) == []
    assert not wants_prefill(RolloutSpec(EngineSpec("x", prefill=False)), able)
    blind = Capabilities(routed_experts=False, distributions=True)
    assert [entry.what for entry in not_tested(plain, blind)] == [ROUTES]
    (entry,) = not_tested(plain, Capabilities(reasons={"distributions": "none"}))
    assert entry == NotTested(EXACT_KL, "x: none")


class Decoder:
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_tokens = ("<|end|>",)

    def decode(self, ids: np.ndarray, skip_special_tokens: bool) -> str:
        return f"Sure.</think>Answer: <|end|>{int(ids.sum())}<|end|>"


def test_rewards_where_every_answer_is_known() -> None:
    prompts = [Prompt("a", answer=10), Prompt("b", answer=18)]
    rewards = response_rewards(prompts, rollout(), Decoder())
    assert rewards is not None
    assert rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert response_rewards([prompts[0], Prompt("b")], rollout(), Decoder()) is None


def test_progress_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report = Reporter("rollout")
    report(1, 4, 10)
    report(2, 4, 20)  # too soon after the first
    report(4, 4, 40)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["progress", "rollout", "1/4"],
        ["progress", "rollout", "4/4"],
    ]
    assert "eta" not in lines[-1]  # said only after 5 s


def test_a_model_directory_without_its_files(tmp_path: Path) -> None:
    def refused() -> str:
        with pytest.raises(MismatchError) as caught:
            require_model(EngineSpec(model=str(tmp_path)))
        return caught.value.message

    assert "no config.json" in refused()
    (tmp_path / "config.json").touch()
    assert "no weights" in refused()
    (tmp_path / "model.safetensors").touch()
    assert "no tokenizer" in refused()
    (tmp_path / "tokenizer.json").touch()
    require_model(EngineSpec(model=str(tmp_path)))
    require_model(EngineSpec(model="org/name"))
    with pytest.raises(MismatchError, match="does not exist"):
        require_model(EngineSpec(model=str(tmp_path / "none")))


def test_a_configuration_is_read_before_anything_is_loaded(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 50,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 77,
        "eos_token_id": [4, 9],
    }
    (tmp_path / "model.safetensors").touch()
    tokenizer().save_pretrained(tmp_path)  # its EOS is 2
    spec = EngineSpec(model=str(tmp_path))

    def read(**changes: Any) -> ModelInfo:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return read_model_info(spec)

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    info = read()
    assert (info.vocab_size, info.context, info.stop_ids) == (50, 77, (2, 3, 4, 9))
    assert (info.num_experts, info.top_k, info.moe) == (6, 3, True)
    with pytest.raises(MismatchError, match="BertForMaskedLM: not"):
        read(architectures=["BertForMaskedLM"])
    with pytest.raises(MismatchError, match="cannot be read") as caught:
        read(model_type="nosuch")
    assert "newer transformers" in caught.value.fix


@pytest.mark.parametrize(
    ("says", "fix"),
    [
        ("Error while deserializing header: incomplete metadata", "download them again"),
        ("KV cache is larger than the available memory", "--max-model-len"),
        ("AuxOutput Connector requires Model Runner V2", "--no-routing"),
        ("Model architectures ['X'] are not supported for now", "another engine"),
        ("something else", "logs/engine.log"),
    ],
)
def test_a_load_failure_gets_a_fix(says: str, fix: str) -> None:
    assert fix in load_fix(RuntimeError(says))


def test_a_failure_is_left_for_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tmp_path / "none")
    session = EngineSession(tmp_path, RolloutSpec(EngineSpec(engine="transformers", model=model)))
    path = write_session(session)

    def left() -> dict[str, str]:
        assert main([str(path)]) == 1
        return json.loads((tmp_path / "errors" / "engine.json").read_text())

    error = left()
    assert model in error["message"]
    assert error["fix"]

    def crash(*_: object) -> None:
        raise RuntimeError("no room\nsecond line")

    monkeypatch.setattr("mismatch.processes.workers.engine.run", crash)
    error = left()
    assert error["message"].endswith("RuntimeError: no room")
    assert "logs/engine.log" in error["fix"]
