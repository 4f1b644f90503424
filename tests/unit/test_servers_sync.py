"""The weight sync of a running server, probed from inside a framework."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.features.sync.in_framework import probe
from mismatch.features.sync.judge import judge
from mismatch.models.weight_states import Prints
from tests.scripted_server import ScriptedServer


def test_the_library_call_reads_a_server() -> None:
    own = {"head.weight": torch.ones(4, 4)}
    held = {name: tensor.clone() for name, tensor in own.items()}

    def shows(names: list[str], transposed: list[str]) -> str:
        return json.dumps([{n: asdict(Prints.of(n, held[n])) for n in names}, {}])

    with ScriptedServer(shows=shows) as server:
        report = probe(server.url, own, lambda: held["head.weight"].copy_(own["head.weight"]))
        assert judge(report).status == "healthy"
        assert judge(probe(server.url, own, lambda: None)).status == "broken"
        server.shows = None
        with pytest.raises(MismatchError) as refused:
            probe(server.url, own, lambda: None)
    assert "--worker-extension-cls" in refused.value.fix
