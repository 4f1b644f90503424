"""Which servers these are, whether they have the right model, and whether they are alike.

:func:`recognise` needs none of the model's files, so that a wrong address or model is reported
before any process starts; :func:`discover` probes the servers too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePosixPath

from mismatch.engines.base import ExpertLayout
from mismatch.engines.model_info import read_model_info
from mismatch.engines.servers.address import parse_address
from mismatch.engines.servers.client import Client, RequestFailed, api_key, wait_for
from mismatch.engines.servers.probing import (
    Probes,
    allowed_drift,
    examine,
    expert_layout,
    make_probes,
    mean_abs_diff,
)
from mismatch.engines.servers.server import Server, ServerFacts
from mismatch.engines.servers.sglang_api import SglangServer
from mismatch.engines.servers.vllm_api import VllmServer
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec

KINDS: tuple[type[Server], ...] = (SglangServer, VllmServer)  # in the order of asking


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """All servers of a run, and what they are probed with."""

    servers: tuple[Server, ...]
    probes: Probes
    layout: ExpertLayout | None


def recognise(spec: EngineSpec) -> list[Server]:
    """Ask every server who it is, and whether it has the right model.

    Raises:
        MismatchError: no address, a bad one or the same one twice; no answer, no server of a known
            kind, another model, or not all alike.
    """
    if not spec.servers:
        raise MismatchError("--engine server: no address", "--server http://127.0.0.1:8000")
    return wait_for(_recognise(spec))


async def _recognise(spec: EngineSpec) -> list[Server]:
    addresses = [parse_address(text) for text in spec.servers]
    if len(set(addresses)) < len(addresses):
        raise MismatchError("the same --server twice", "name every server once")
    servers = []
    for address in addresses:
        server = await _describe(Client(address, spec.server_timeout_s, api_key()), spec)
        _require_model(server.url, server.facts, spec)
        servers.append(server)
    first = servers[0]
    for other in servers[1:]:
        if (difference := first.facts.difference(other.facts)) is not None:
            fault = f"the servers {first.url} and {other.url} differ in {difference}"
            raise MismatchError(fault, "measure one kind at a time: give servers that are alike")
    return servers


async def _describe(client: Client, spec: EngineSpec) -> Server:
    url = client.address.text
    for kind in KINDS:
        try:
            facts = await kind.describe(client, spec.served_model)
        except RequestFailed as error:
            if error.kind == "refused":
                continue
            fault = f"{url}: {error.reason}"
            fix = f"is it up, and is this its address? try: curl {url}/v1/models; or leave it out"
            raise MismatchError(fault, fix) from error
        if facts is not None:
            return kind(client, facts)
    fault = f"{url} is no server that mismatch knows"
    raise MismatchError(fault, "give the address of a vLLM or SGLang server, without a path")


def _require_model(url: str, facts: ServerFacts, spec: EngineSpec) -> None:
    """Compare the server's names of its model with the one that was asked for."""
    served = {PurePosixPath(name.replace("\\", "/")).name.casefold() for name in facts.names}
    wanted = PurePosixPath(spec.model.replace("\\", "/")).name.casefold()
    if spec.served_model is None and wanted not in served:
        asked = f"--model {wanted}"
        fix = (
            f"is it the same checkpoint under another name? --served-model {facts.model}; "
            "else name the model that it serves"
        )
    elif spec.served_model is not None and spec.served_model not in facts.names:
        asked, fix = f"--served-model {spec.served_model}", "name one that it has"
    else:
        return
    names = " or ".join(sorted(served))
    raise MismatchError(f"{url} serves {names}, not {asked}: the wrong model", fix)


@functools.lru_cache(maxsize=4)
def discover(spec: EngineSpec) -> ServerGroup:
    """Recognise and probe all servers of a spec; they are asked once in a process.

    Raises:
        MismatchError: as :func:`recognise`; or a server that gives no logprobs of sampled tokens,
            or has other weights than the first.
    """
    return wait_for(_discover(spec))


async def _discover(spec: EngineSpec) -> ServerGroup:
    probes, info = make_probes(spec), read_model_info(spec)
    layout = expert_layout(spec, info) if spec.routing else None
    servers = await _recognise(spec)
    for server in servers:
        try:
            await examine(server, probes, layout)
        except RequestFailed as error:
            raise MismatchError(
                f"{server.url} did not answer a probe: {error.reason}",
                "look into the server's log; --server-timeout gives a request more time. If the "
                "server refuses it, compare --model with what it loaded",
            ) from error
    first = servers[0]
    for other in servers[1:]:
        difference = mean_abs_diff(first.probe, other.probe)
        if difference > allowed_drift(max(first.noise, other.noise)):
            raise MismatchError(
                f"the servers have other weights or settings: probe logprobs of {first.url} and "
                f"{other.url} are {difference:.3g} apart on average",
                "give servers that loaded the same checkpoint in the same way",
            )
        if first.mode != other.mode:
            raise MismatchError(
                f"the servers differ: logprobs are {first.mode.name} at {first.url}, "
                f"{other.mode.name} at {other.url}",
                "start them with the same logprobs mode",
            )
    return ServerGroup(tuple(servers), probes, layout)
