"""Which server this is, and whether it has the right model.

:func:`recognise` needs none of the model's files, so that a wrong address or model is reported
before any process starts; :func:`discover` probes the server too.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import PurePosixPath

from mismatch.engines.model_info import read_model_info
from mismatch.engines.servers.address import parse_address
from mismatch.engines.servers.client import Client, RequestFailed, api_key, wait_for
from mismatch.engines.servers.probing import examine, expert_layout, probe_texts
from mismatch.engines.servers.server import Server
from mismatch.engines.servers.sglang_api import SglangServer
from mismatch.engines.servers.vllm_api import VllmServer
from mismatch.errors import MismatchError, argument, one_line
from mismatch.specs import EngineSpec

TELLS = ("torch", "transformers")
UNTOLD = "torch and transformers tell which layers have experts: --python PATH has them"
KINDS: tuple[type[Server], ...] = (SglangServer, VllmServer)  # in the order of asking


def recognise(spec: EngineSpec) -> Server:
    """Ask the server who it is, and whether it has the right model.

    Raises:
        MismatchError: no address, a bad one or several; no answer, no server of a known kind, or
            another model.
    """
    if not spec.servers:
        raise MismatchError("--engine server: no address", "--server http://127.0.0.1:8000")
    if len(spec.servers) > 1:
        fault = f"{len(spec.servers)} addresses given with --server: a run measures one server"
        raise MismatchError(fault, "name one of them; a second run measures another")
    client = Client(parse_address(spec.servers[0]), spec.server_timeout_s, api_key())
    url = client.address
    for kind in KINDS:
        try:
            server = wait_for(kind.recognised(client, spec.served_model))
        except RequestFailed as error:
            if error.kind == "refused":
                continue
            fault = f"{url}: {error}"
            fix = f"is it up, and is this its address? try: curl {url}/v1/models"
            raise MismatchError(fault, fix) from error
        if server is not None:
            _require_model(server, spec)
            return server
    fault = f"{url} is no server that mismatch knows"
    raise MismatchError(fault, "give the address of a vLLM or SGLang server, without a path")


def _require_model(server: Server, spec: EngineSpec) -> None:
    """Compare the server's names of its model with the one that was asked for."""
    served = {PurePosixPath(name.replace("\\", "/")).name.casefold() for name in server.names}
    if spec.served_model is not None:
        asked, fix = f"--served-model {spec.served_model}", "name one that it has"
        known = spec.served_model in server.names
    else:
        wanted = PurePosixPath(spec.model.replace("\\", "/")).name.casefold()
        asked, known = f"--model {wanted}", wanted in served
        fix = (
            "is it the same checkpoint under another name? "
            f"--served-model {argument(server.names[0])}; else name the model that it serves"
        )
    if not known:
        names = one_line(" or ".join(sorted(served)))
        raise MismatchError(f"{server.url} serves {names}, not {asked}: the wrong model", fix)


@functools.lru_cache(maxsize=4)
def discover(spec: EngineSpec) -> Server:
    """Recognise and probe the server of a spec; it is asked once in a process.

    Raises:
        MismatchError: as :func:`recognise`; or it gives no logprobs of sampled tokens.
    """
    info, server = read_model_info(spec), recognise(spec)
    server.texts = probe_texts(spec, info)
    layout = None
    if spec.routing and info.moe and not all(map(find_spec, TELLS)):
        server.reasons["routed_experts"] = UNTOLD
    elif spec.routing:
        layout = expert_layout(spec, info)
    try:
        wait_for(examine(server, layout))
    except RequestFailed as error:
        raise MismatchError(
            f"{server.url} did not answer a probe: {error}",
            "look into the server's log; --server-timeout gives a request more time. If the "
            "server refuses it, compare --model with what it loaded",
        ) from error
    return server
