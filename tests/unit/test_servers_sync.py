"""Running servers in a probe of the weight sync: pushed to, asked, and given their weights back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mismatch.engines.servers.engine import ServerEngine
from mismatch.engines.servers.sync_driver import ServerDriver
from mismatch.errors import MismatchError
from mismatch.features.sync.judge import judge, parted, score_rows
from mismatch.features.sync.report import SyncSpec
from mismatch.features.sync.worker import Probe
from mismatch.models.weight_states import PUSHES, Checkpoint, Prints, state_of
from mismatch.probe import probe as library_call
from tests.scripted_server import ScriptedServer, ScriptedSglang, law
from tests.servers_fixture import LAW, _light, serve, spec

__all__ = ["_light", "serve"]  # fixtures
SEQUENCES = [[3, 1, 5, 7, 2, 9, 4], [8, 2, 6, 1, 1, 3, 5]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file({"head.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return Checkpoint(folder, 0)


@pytest.fixture(params=[ScriptedServer, ScriptedSglang])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(developer=True) as running:
        yield running


def probed(server: ScriptedServer, checkpoint: Checkpoint, tmp_path: Path) -> Any:
    asked = SyncSpec(spec(server), path="update")
    with ServerEngine(asked.engine, LAW, longest=64) as engine:
        driver = ServerDriver(engine, checkpoint, tmp_path / "states")
        probe = Probe(driver, engine, SEQUENCES, asked, checkpoint, checkpoint.names())
        expected = [checkpoint.prints(push) for push in range(PUSHES)]
        return probe.run(expected, None), probe.scores


def law_of(weights: int) -> list[Any]:
    """What a trainer with these weights says."""
    return [
        np.array([law(a, weights=weights)[b] for a, b in itertools.pairwise(ids)])
        for ids in SEQUENCES
    ]


def test_every_state_is_scored_and_the_first_is_back(
    server: ScriptedServer, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    report, scores = probed(server, checkpoint, tmp_path)
    for push, state in enumerate(scores):
        expected = law_of(state_of(push))
        assert np.allclose(np.concatenate(state), np.concatenate(expected), atol=1e-6)
    assert server.weights == 0
    rows = score_rows(scores, [law_of(push) for push in range(PUSHES)])
    assert all(row.apart == pytest.approx(0, abs=1e-6) for row in rows)
    assert {p.status for p in report.parameters} == {"not_compared"}
    assert judge(report).word == "inconclusive"


def test_a_server_that_loads_nothing_parts_from_the_trainer(
    server: ScriptedServer, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    server.load = lambda folder: None  # type: ignore[method-assign]
    report, scores = probed(server, checkpoint, tmp_path)
    rows = score_rows(scores, [law_of(push) for push in range(PUSHES)])
    assert [row.push for row in parted(replace(report, scores=rows))] == [1, 2]
    assert judge(replace(report, scores=rows)).word == "broken"


def test_a_probe_that_ends_early_gives_the_weights_back(
    server: ScriptedServer, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with ServerEngine(spec(server), LAW, longest=64) as engine:
        ServerDriver(engine, checkpoint, tmp_path / "states").push("update", 2)
        assert server.weights == 2
    assert server.weights == 0
    assert not list((tmp_path / "states").iterdir())


def test_a_server_that_allows_no_update_is_refused(
    serve: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with ServerEngine(spec(serve()), LAW, longest=64) as engine:
        driver = ServerDriver(engine, checkpoint, tmp_path / "states")
        with pytest.raises(MismatchError) as refused:
            driver.push("update", 1)
    assert "VLLM_SERVER_DEV_MODE" in refused.value.fix


@pytest.mark.parametrize(("stale", "word"), [(False, "healthy"), (True, "broken")])
def test_a_server_with_the_extension_is_judged_parameter_by_parameter(
    serve: Any, checkpoint: Checkpoint, tmp_path: Path, stale: bool, word: str
) -> None:
    server = serve(developer=True)

    def shows(names: list[str], transposed: list[str]) -> str:
        prints = checkpoint.prints(0 if stale else server.weights)
        return json.dumps([{name: asdict(each) for name, each in prints.items()}, {}])

    server.shows = shows
    report, _ = probed(server, checkpoint, tmp_path)
    assert judge(report).word == word
    assert [p.status for p in report.parameters] == ["stale" if stale else "arrived"]


def test_the_library_call_reads_a_server(serve: Any) -> None:
    server, own = serve(developer=True), {"head.weight": torch.ones(4, 4)}
    held = {name: tensor.clone() for name, tensor in own.items()}

    def shows(names: list[str], transposed: list[str]) -> str:
        return json.dumps([{n: asdict(Prints.of(n, held[n])) for n in names}, {}])

    server.shows = shows
    report = library_call(server.url, own, lambda: held["head.weight"].copy_(own["head.weight"]))
    assert judge(report).word == "healthy"
    assert judge(library_call(server.url, own, lambda: None)).word == "broken"
    server.shows = None
    with pytest.raises(MismatchError) as refused:
        library_call(server.url, own, lambda: None)
    assert "--worker-extension-cls" in refused.value.fix
