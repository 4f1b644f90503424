"""The worker of locate in this process: sides are compared with float32, and a fault is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mismatch.codec import from_json, to_json
from mismatch.features.locate import worker
from mismatch.features.locate.plan import passes_of
from mismatch.features.locate.results import Sequence, SideLocation
from mismatch.run import store
from mismatch.specs import EngineSpec, RolloutSpec, TrainSpec, to_dict
from tests.checkpoints import make, rollout

ROLLOUT = rollout(((6, 20), (6, 24), (7, 18)))


def located(place: Path, train: TrainSpec, engine: EngineSpec) -> dict[str, SideLocation]:
    """Run both jobs, and return the sides by role."""
    (place / "locate").mkdir(parents=True)
    store.save_rollout(place, ROLLOUT)
    sequences = [Sequence(n, len(ids), "random") for n, ids in enumerate(ROLLOUT.sequences())]
    common: dict[str, Any] = {
        "run_dir": str(place),
        "place": str(place / "locate"),
        "label": "locate",
        "sequences": to_json(sequences),
    }
    spec = RolloutSpec(engine=engine, sampling=ROLLOUT.sampling)
    passes = passes_of(train, {"bf16"})
    jobs = {
        "engine": {"spec": to_dict(spec)},
        "passes": {
            "passes": [{"name": each.name, "spec": to_dict(each.spec)} for each in passes],
            "sides": [
                {"name": "transformers:prefill", "role": "engine", "dtype": "bf16"},
                {"name": "fsdp", "role": "trainer", "dtype": "bf16"},
            ],
            "alike": False,
        },
    }
    for name, job in jobs.items():
        path = store.write_json(place / f"{name}.json", common | job)
        try:
            assert worker.main([str(path)]) == 0
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    result = store.read_json(place / "locate" / "sides.json")
    return {side.role: side for side in from_json(list[SideLocation], result["sides"])}


@pytest.mark.slow
def test_a_trainer_without_sinks_is_named_and_the_engine_beside_it_is_not(tmp_path: Path) -> None:
    model = str(make("gpt_oss", tmp_path / "model"))
    engine = EngineSpec(engine="transformers", model=model, routing=False, prefill=True)
    sides = located(tmp_path / "run", TrainSpec(model, attention="no-sinks"), engine)
    assert sides["engine"].source is None
    assert sides["engine"].distance == pytest.approx(sides["engine"].plain_distance, rel=0.5)
    source = sides["trainer"].source
    assert source is not None
    assert (source.site, source.layers[0]) == ("attention", 0)
    assert source.explains > 0.5
