"""``--server`` and its companions: running servers in place of an engine of our own."""

from __future__ import annotations

from dataclasses import replace

from mismatch.cli.flags import Flags, spec_values
from mismatch.cli.options import SERVER_FLAGS
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec

# Where servers are, and not what is run: a resumed run may go on elsewhere.
SERVER_NAMES = frozenset(option.name for option in SERVER_FLAGS)
WEEK_S = 7 * 86400.0
# What only an engine that mismatch starts can be told.
OURS = (
    *("vllm_python", "sglang_python", "tensor_parallel_size", "max_model_len", "engine_arg"),
    *("gpu_memory_utilization", "rollout_weights", "verl_config", "other_engine_arg"),
)


def server_addresses(flags: Flags) -> tuple[str, ...]:
    """The addresses of ``--server``; none without it.

    Raises:
        MismatchError: an address that is none or holds a secret, flags of an engine that mismatch
            starts, or companions without ``--server``.
    """
    if not flags.get("server"):
        for name in sorted(SERVER_NAMES & flags.explicit):
            raise MismatchError(f"{_flag(name)} without --server", "--server http://127.0.0.1:8000")
        return ()
    from mismatch.engines.servers.address import parse_address

    if "engine" in flags.explicit:
        raise MismatchError("--engine and --server: a server is asked what it is", "drop --engine")
    for name in OURS:
        if name in flags.explicit:
            raise MismatchError(
                f"{_flag(name)} is for an engine that mismatch starts, servers run with their own "
                "settings",
                f"drop {_flag(name)}, or --server",
            )
    if flags["server_timeout"] > WEEK_S:
        raise MismatchError(
            f"--server-timeout is {flags['server_timeout']:g}", "give seconds, a week's at most"
        )
    return tuple(parse_address(text).text for text in flags["server"])


def moved(engine: EngineSpec, flags: Flags) -> EngineSpec:
    """A stored engine's spec with the servers that a resumed command names.

    Raises:
        MismatchError: the run was not made with servers.
    """
    if not engine.servers:
        raise MismatchError(
            f"the run was made with the engine {engine.engine}, not with servers", "drop --server"
        )
    explicit = {name: flags[name] for name in SERVER_NAMES & flags.explicit}
    servers = server_addresses(flags) if flags["server"] else engine.servers
    return replace(engine, servers=servers, **spec_values(EngineSpec, explicit))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
