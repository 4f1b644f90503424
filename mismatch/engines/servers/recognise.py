"""Which servers these are, and whether they are the right ones: asked, not assumed.

Light: nothing of it needs the model's files, so that a wrong address or model is found out before
any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from mismatch.engines.servers.address import parse_address
from mismatch.engines.servers.dialect import Dialect, Facts
from mismatch.engines.servers.http import Client, Unavailable, api_key
from mismatch.engines.servers.patience import PatientClient
from mismatch.engines.servers.sglang import SglangServer
from mismatch.engines.servers.vllm import VllmServer
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec


def dialects() -> tuple[Dialect, ...]:
    """All kinds of servers that are known, in the order in which they are tried."""
    return (SglangServer(), VllmServer())


def clients(spec: EngineSpec) -> list[PatientClient]:
    """One per address.

    Raises:
        MismatchError: an address that is none, or the same one twice.
    """
    addresses = [parse_address(text) for text in spec.servers]
    if len(set(addresses)) < len(addresses):
        raise MismatchError("the same --server twice", "name every server once")
    return [PatientClient(address, spec.server_timeout_s, api_key()) for address in addresses]


def recognise(spec: EngineSpec) -> list[tuple[PatientClient, Dialect, Facts]]:
    """Ask every server who it is, and whether it is the right one.

    Raises:
        MismatchError: no answer, no server of a known kind, another model, or not all alike.
    """
    found = []
    for client in clients(spec):
        dialect, facts = _kind(client, spec)
        require_model(client.address.text, facts, spec)
        found.append((client, dialect, facts))
    require_alike([(client.address.text, facts) for client, _, facts in found])
    return found


def _kind(client: Client, spec: EngineSpec) -> tuple[Dialect, Facts]:
    url = client.address.text
    try:
        for dialect in dialects():
            facts = dialect.look(client, spec.served_model)
            if facts is not None:
                return dialect, facts
    except Unavailable as error:
        raise MismatchError(
            f"{url}: {error.reason}",
            f"is it up, and is this its address? try: curl {url}/v1/models; or leave it out",
        ) from error
    raise MismatchError(
        f"{url} is no server that mismatch knows",
        "give the address of a vLLM or SGLang server, without a path",
    )


def require_model(url: str, facts: Facts, spec: EngineSpec) -> None:
    """The server has the model that was asked for, by its names.

    Raises:
        MismatchError: it serves another one.
    """
    if spec.served_model is not None:
        if spec.served_model in facts.names:
            return
        asked, fix = f"--served-model {spec.served_model}", "name one that it has"
    else:
        wanted = _last(spec.model)
        if any(name == spec.model or _last(name) == wanted for name in facts.names):
            return
        asked = f"--model {wanted}"
        fix = (
            f"is it the same checkpoint under another name? --served-model {facts.model}; "
            "else name the model that it serves"
        )
    served = " or ".join(dict.fromkeys(_last(name) for name in facts.names))
    raise MismatchError(f"{url} serves {served}, not {asked}: the wrong model", fix)


def _last(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).name.casefold()


def require_alike(found: Sequence[tuple[str, Facts]]) -> None:
    """All servers are of one kind, version, context and dtype, as far as they say.

    Raises:
        MismatchError: they differ, with what.
    """
    first_url, first = found[0]
    for url, facts in found[1:]:
        for name in ("kind", "version", "max_model_len", "dtype", "weight_version"):
            one, other = getattr(first, name), getattr(facts, name)
            if one != other:
                raise MismatchError(
                    f"the servers differ: {name.replace('_', ' ')} is {one} at {first_url}, "
                    f"{other} at {url}",
                    "measure one kind at a time: give servers that are alike",
                )
