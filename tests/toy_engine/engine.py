"""The toy engine's class: always the same token, with the logprob 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from mismatch.engines.base import (
    Capabilities,
    Engine,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
)
from mismatch.engines.registry import model_facts
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Sampling, SideFacts


def require_small(spec: EngineSpec) -> None:
    if spec.tensor_parallel_size > 1:
        raise MismatchError("the toy engine runs on one device", "drop --tensor-parallel-size")


class ToyEngine(Engine):
    name: ClassVar[str] = "toy"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec, self.sampling = spec, sampling

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        return Capabilities(routed_experts=False, reasons={"routed_experts": "toy: no experts"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, prompts: Sequence[list[int]], progress: Progress) -> list[list[Sample]]:
        sample = Sample([2], np.zeros(1), "stop")
        return [[sample] * self.sampling.samples_per_prompt for _ in prompts]

    def prefill(
        self,
        sequences: Sequence[list[int]],
        starts: Sequence[int],
        temperature: float,
        progress: Progress,
    ) -> list[Any]:
        return [np.zeros(len(ids) - at) for ids, at in zip(sequences, starts, strict=True)]

    def experts(self) -> ExpertLayout | None:
        return None

    def weights(self) -> LoadedWeights:
        return LoadedWeights({})

    def fingerprint(self, mode: Mode) -> SideFacts:
        return {**model_facts(self.spec), "mode": mode, "engine": self.name, "dtype": "fp32"}
