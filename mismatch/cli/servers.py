"""`--server` and its companions: running servers in place of an engine of our own."""

from __future__ import annotations

from typing import Any

from mismatch.cli.flags import Flags
from mismatch.errors import MismatchError

# They say where, and not what: a resumed run may go on elsewhere.
SERVER_FLAGS = {"server", "served_model", "server_concurrency", "server_timeout"}
WEEK_S = 7 * 86400.0
# What only an engine that mismatch starts can be told.
OURS = (
    *("vllm_python", "sglang_python", "tensor_parallel_size", "max_model_len", "engine_arg"),
    *("gpu_memory_utilization", "rollout_weights", "verl_config", "other_engine_arg"),
)


def server_fields(flags: Flags) -> dict[str, Any]:
    """Fields of an engine's spec that say where its servers are; none without ``--server``.

    Raises:
        MismatchError: an address that is none or holds a secret, flags of an engine that mismatch
            starts, or companions without ``--server``.
    """
    from mismatch.engines.servers.address import parse_address

    given = [name for name in sorted(SERVER_FLAGS - {"server"}) if name in flags.given]
    if not flags.get("server"):
        if given:
            raise MismatchError(
                f"{_flag(given[0])} without --server", "--server http://127.0.0.1:8000"
            )
        return {}
    if "engine" in flags.given:
        raise MismatchError("--engine and --server: a server is asked what it is", "drop --engine")
    for name in OURS:
        if name in flags.given:
            raise MismatchError(
                f"{_flag(name)} is for an engine that mismatch starts, servers run with their own "
                "settings",
                f"drop {_flag(name)}, or --server",
            )
    return place_fields(flags) | {
        "servers": tuple(parse_address(text).text for text in flags["server"])
    }


def place_fields(flags: Flags) -> dict[str, Any]:
    """Those of :func:`server_fields` beside the addresses.

    Raises:
        MismatchError: no concurrency, or no time.
    """
    if flags["server_concurrency"] < 1:
        raise MismatchError(
            f"--server-concurrency is {flags['server_concurrency']}", "use 1 or more"
        )
    if not 0 < flags["server_timeout"] <= WEEK_S:  # also of nan
        raise MismatchError(
            f"--server-timeout is {flags['server_timeout']:g}", "give seconds, a week's at most"
        )
    return {
        "served_model": flags["served_model"],
        "server_concurrency": flags["server_concurrency"],
        "server_timeout_s": float(flags["server_timeout"]),
    }


def moved(engine: Any, flags: Flags) -> Any:
    """A stored engine's spec with the servers that a resumed command names.

    Raises:
        MismatchError: the run was not made with servers.
    """
    from dataclasses import replace

    if not engine.servers:
        raise MismatchError(
            f"the run was made with the engine {engine.engine}, not with servers", "drop --server"
        )
    fields = {
        name: value
        for name, value in place_fields(flags).items()
        if name.removesuffix("_s") in flags.given
    }
    if flags["server"]:
        fields["servers"] = server_fields(flags)["servers"]
    return replace(engine, **fields)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
