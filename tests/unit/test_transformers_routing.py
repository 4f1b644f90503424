"""The transformers engine samples and captures odd families too, and refuses what it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.family_models import FAMILIES
from mismatch.engines.artefacts import build_rollout, decode_routing
from mismatch.engines.transformers.engine import TransformersEngine
from mismatch.engines.turns import starting
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec, RolloutSpec
from mismatch.types import Sampling
from tests import families

LAW = Sampling(max_tokens=6, samples_per_prompt=2)
PROMPTS = [[5, 9, 12, 40], [7, 8, 30]]
SAME_IN_FP32 = 1e-3


@pytest.mark.parametrize("family", ["llama4_text", "phimoe", "dbrx", "qwen2_moe"])
def test_sampling_uses_the_experts_of_a_plain_forward(family: str, tmp_path: Path) -> None:
    spec = EngineSpec("transformers", str(families.write(family, tmp_path)), dtype="fp32")
    with TransformersEngine(spec, LAW, 16) as engine:
        samples = engine.generate(PROMPTS, lambda *_: None)
        trajectories = starting(PROMPTS, samples)
        rollout = build_rollout(trajectories, RolloutSpec(spec, sampling=LAW), {})
        routing = decode_routing(engine, trajectories, rollout)
        layers = tuple(layer.index for layer in engine._moe)
        assert routing is not None
        assert routing.layers == layers == families.trial(family).layers
        for start, end in zip(rollout.offsets[:-1], rollout.offsets[1:], strict=True):
            ids = torch.from_numpy(rollout.token_ids[start:end])[None]
            _, routes = families.captured(engine.model, ids)
            want = np.stack([route.ids.numpy() for route in routes], 1)[:-1]
            assert np.array_equal(np.sort(want), np.sort(routing.ids[start : end - 1]))


@pytest.mark.parametrize("family", ["falcon_h1", "nemotron_h", "deepseek_v32"])
def test_samples_have_the_logprobs_of_a_plain_forward(family: str, tmp_path: Path) -> None:
    """Layers with a recurrent state, or an index of keys; sequences leave the batch as they end."""
    sampling = Sampling(max_tokens=24, samples_per_prompt=3, seed=3)
    # transformers bounds Mamba's time steps from below in a whole forward, and not in one step.
    unbounded = {"time_step_min": 1e-9} if family == "nemotron_h" else {}
    model = families.write(family, tmp_path, **FAMILIES[family] | unbounded)
    spec, away = EngineSpec("transformers", str(model), dtype="fp32", routing=False), []
    with TransformersEngine(spec, sampling, 40) as engine:
        engine.info = replace(engine.info, stop_ids=tuple(range(0, 256, 8)))
        samples = engine.generate(PROMPTS, lambda *_: None)
        assert len({len(sample.token_ids) for of_one in samples for sample in of_one}) > 2
        for ids, of_one in zip(PROMPTS, samples, strict=True):
            for sample in of_one:
                whole = torch.tensor([[*ids, *sample.token_ids]])
                with torch.no_grad():
                    logits = engine.model(input_ids=whole, use_cache=False).logits[0]
                rows = logits.log_softmax(-1)[len(ids) - 1 : -1]
                expected = rows[np.arange(len(rows)), sample.token_ids]
                away += np.abs(sample.logprobs - expected.numpy()).tolist()
    assert max(away) < SAME_IN_FP32


def test_a_family_without_readable_routes_is_refused_before_it_loads(tmp_path: Path) -> None:
    model = families.write("doge", tmp_path)
    spec = EngineSpec("transformers", str(model), dtype="fp32")
    (model / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(MismatchError, match="captured: doge"), TransformersEngine(spec, LAW, 16):
        pass
