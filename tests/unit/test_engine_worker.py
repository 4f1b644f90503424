"""What the engine's worker leaves in a run: routes missing or corrupt, and no prefill to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mismatch.captures import NotNumbers
from mismatch.engines.base import Capabilities, ExpertLayout, LoadedWeights, Sample
from mismatch.engines.model_info import ModelInfo
from mismatch.errors import MismatchError
from mismatch.processes.tasks import Score
from mismatch.processes.workers import engine as worker
from mismatch.processes.workers import sampling
from mismatch.prompts.prompt import Prompt
from mismatch.run import resume, store
from mismatch.specs import EngineSpec, RolloutSpec
from mismatch.types import ROUTES, NotTested, Sampling
from tests.made_run import scoring

SPEC = RolloutSpec(EngineSpec("stub"), sampling=Sampling(max_tokens=2, samples_per_prompt=2))
PROMPTS = [[5, 6], [7, 8, 9]]
NO_ROUTES = Capabilities(routed_experts=False, reasons={"routed_experts": "no routes here"})
NO_PREFILL = Capabilities(prefill=False, reasons={"prefill": "it cannot rescore"})


class Stub:
    """An engine that samples two tokens per prompt; ``missing`` sequences have no experts."""

    name = "stub"
    can = Capabilities()
    missing: tuple[int, ...] = ()
    unwritten = False
    started = 0

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None: ...

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        return cls.can

    def __enter__(self) -> Self:
        type(self).started += 1
        return self

    def __exit__(self, *exc: object) -> None: ...

    def generate(self, prompts: Sequence[list[int]], progress: Any) -> list[list[Sample]]:
        def sample(index: int, prompt: list[int]) -> Sample:
            experts = [0, 0] if self.unwritten else [0, 3]
            rows = np.tile(np.array(experts, np.uint16), (len(prompt) + 1, 1, 1))
            routed = None if index in self.missing else rows
            return Sample([11, 2], np.array([-0.5, -1.5]), "stop", routed)

        return [[sample(2 * p + s, ids) for s in range(2)] for p, ids in enumerate(prompts)]

    def prefill(self, sequences: Sequence[list[int]], *_: Any) -> list[Any]:
        return [np.array([-0.5, -1.5]) for _ in sequences]

    def experts(self) -> ExpertLayout:
        return ExpertLayout((1,), num_experts=4, top_k=2)

    def weights(self) -> LoadedWeights:
        return LoadedWeights({})

    def fingerprint(self, mode: str) -> dict[str, Any]:
        return {"mode": mode, "engine": "stub", "dtype": "bf16"}


class Tokenizer:
    vocab_size, bos_token_id = 50, None
    chat_template: str | None = "a template"

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    """A fresh stub, with everything around it that would read a model."""

    class Fresh(Stub):
        pass

    monkeypatch.setattr(worker, "engine_class", lambda _: Fresh)
    for name, value in {
        "engine_class": Fresh,
        "read_prompts": [Prompt("p:1"), Prompt("p:2")],
        "read_model_info": ModelInfo(50, 64, (2,), num_experts=4, top_k=2),
        "load_tokenizer": Tokenizer(),
        "render_prompts": PROMPTS,
    }.items():
        monkeypatch.setattr(sampling, name, lambda *_, value=value: value)
    return Fresh


def routing_reasons(run: Path) -> list[str]:
    entries = NotTested.of(store.load_scoring(run, "stub:decode").fingerprint)
    return [entry.reason for entry in entries if entry.what == ROUTES]


@pytest.mark.parametrize("broken", [True, False])
def test_nan_from_an_engine_is_traced_to_the_checkpoints_tensor(
    kind: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def generate(*_: Any) -> Any:
        raise NotNumbers("likeliest tokens: logprobs that are no numbers")

    monkeypatch.setattr(kind, "generate", generate)
    values = {"sound": torch.ones(2, 2), "layers.1.up": torch.ones(2)}
    values["layers.1.up"][1] = float("nan") if broken else 0.0
    save_file(values, tmp_path / "model.safetensors")
    spec = replace(SPEC, engine=replace(SPEC.engine, model=str(tmp_path)))
    with pytest.raises(MismatchError, match="NaN") as caught:
        worker.run(tmp_path / "run", spec)
    assert ("layers.1.up" in caught.value.message) is broken


@pytest.mark.parametrize("template", ["a template", None])
def test_questions_without_a_chat_template_are_said(
    kind: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", template)
    worker.run(tmp_path, SPEC)
    entries = NotTested.of(store.load_scoring(tmp_path, "stub:decode").fingerprint)
    assert (sampling.WITHOUT_TEMPLATE in entries) is (template is None)


def test_routes_and_prefill_are_saved_where_the_engine_has_them(
    kind: type[Stub], tmp_path: Path
) -> None:
    worker.run(tmp_path, SPEC)
    decode = store.load_scoring(tmp_path, "stub:decode")
    assert decode.routing is not None
    assert decode.routing.present.sum() == 14
    assert routing_reasons(tmp_path) == []
    assert decode.fingerprint["prefill"] is True
    assert resume.rollout_done(tmp_path, SPEC)
    assert resume.rescored(tmp_path, SPEC)
    (tmp_path / store.scoring_file("stub:prefill")).unlink()
    assert not resume.rescored(tmp_path, SPEC)


def test_an_engine_that_scores_later_says_which_weights_it_holds(
    kind: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.run(tmp_path, SPEC)
    monkeypatch.setattr(kind, "weights", lambda self: LoadedWeights({"norm": (1, 2, 3)}))
    spec = replace(SPEC, engine=replace(SPEC.engine, dtype="bf16"))
    worker.score(tmp_path, spec, [Score("stub:fp32")])
    assert store.load_scoring(tmp_path, "stub:fp32").fingerprint["weights"] == {"norm": [1, 2, 3]}


def test_an_engine_that_cannot_capture_routes_samples_without_them(
    kind: type[Stub], tmp_path: Path
) -> None:
    kind.can = NO_ROUTES
    kind.missing = (0, 1, 2, 3)
    worker.run(tmp_path, SPEC)
    assert store.load_scoring(tmp_path, "stub:decode").routing is None
    assert routing_reasons(tmp_path) == [f"stub: {NO_ROUTES.reasons['routed_experts']}"]
    assert resume.rollout_done(tmp_path, SPEC)


@pytest.mark.parametrize("missing", [(1, 3), (0, 1, 2, 3)])
def test_a_broken_capture_costs_the_routes_alone(
    kind: type[Stub], tmp_path: Path, missing: tuple[int, ...]
) -> None:
    kind.missing = missing
    worker.run(tmp_path, SPEC)
    decode = store.load_scoring(tmp_path, "stub:decode")
    assert decode.logprobs.tolist() == [-0.5, -1.5] * 4
    assert decode.routing is None
    (reason,) = routing_reasons(tmp_path)
    assert f"{len(missing)} of 4" in reason
    assert resume.rollout_done(tmp_path, SPEC)


def test_a_buffer_that_no_kernel_writes_costs_the_routes_alone(
    kind: type[Stub], tmp_path: Path
) -> None:
    kind.unwritten = True
    worker.run(tmp_path, SPEC)
    assert store.load_scoring(tmp_path, "stub:decode").routing is None
    (reason,) = routing_reasons(tmp_path)
    assert reason == f"stub: {sampling.NEVER_WRITTEN}"
    assert resume.rollout_done(tmp_path, SPEC)


def rescored(run: Path, spec: RolloutSpec = SPEC) -> bool:
    return resume.rescored(run, spec)


def test_a_prefill_that_never_comes_is_not_waited_for(kind: type[Stub], tmp_path: Path) -> None:
    kind.can = NO_PREFILL
    assert not rescored(tmp_path)
    worker.run(tmp_path, SPEC)
    assert not (tmp_path / store.scoring_file("stub:prefill")).exists()
    assert resume.rollout_done(tmp_path, SPEC)
    assert rescored(tmp_path)
    warmer = replace(SPEC, sampling=replace(SPEC.sampling, temperature=0.5))
    assert not rescored(tmp_path, warmer)  # what another spec could not do says nothing


def test_a_run_that_does_not_say_gets_its_prefill(tmp_path: Path) -> None:
    from tests.made_run import rollout

    samples = rollout()
    store.save_rollout(tmp_path, samples, made_by=SPEC)
    store.save_scoring(tmp_path, scoring("stub:decode", samples), samples, made_by=SPEC)
    assert not rescored(tmp_path)
