"""A probe of your own weight sync, from inside a framework.

    from mismatch.features.sync.in_framework import judge, probe

    report = probe(llm, dict(model.named_parameters()), sync=trainer.sync_weights)
    print(judge(report).line)

Every parameter gets a known update, in place; ``sync`` brings it to the engine; what the engine
holds is read back. Twice, then the first weights again (docs/how-to/weight-sync.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mismatch.engines.sync_drivers import Held, held_from_plain
from mismatch.errors import MismatchError
from mismatch.features.sync.judge import judge, unread
from mismatch.features.sync.judge import parameters as judged
from mismatch.features.sync.report import SyncReport
from mismatch.models.weight_states import PUSHES, SIZE, Prints, state_of, transposed_names, updated
from mismatch.types import NotTested

if TYPE_CHECKING:
    import torch

__all__ = ["EXTENSION", "judge", "probe", "sglang_engine"]
SERVER_S = 600.0  # for a server's digests of all its parameters
EXTENSION = "mismatch.engines.vllm.weight_sync.WeightSync"


def probe(
    engine: Any,
    parameters: Mapping[str, torch.Tensor],
    sync: Callable[[], object],
    seed: int = 0,
    tied: Mapping[str, str] | None = None,
) -> SyncReport:
    """Update parameters, sync, read back; the parameters are as before when it returns.

    Args:
        engine: a ``vllm.LLM`` made with ``worker_extension_cls=`` :data:`EXTENSION`; an SGLang
            engine of :func:`sglang_engine`; the address of a vLLM server with that extension and
            VLLM_SERVER_DEV_MODE=1; or a function that gives the tensors that an engine holds, by
            checkpoint name.
        parameters: the trainer's own whole tensors by checkpoint name; a copy of them is kept on
            the CPU meanwhile.
        sync: brings the trainer's parameters to the engine, as the training loop does.
        tied: a name that the engine holds by itself -> the parameter that it is tied to.

    Raises:
        MismatchError: the engine does not start from these parameters at all.
    """
    first = {name: tensor.detach().cpu().clone() for name, tensor in parameters.items()}
    expected = [
        {name: Prints.of(name, updated(name, base, seed, push)) for name, base in first.items()}
        for push in range(PUSHES)
    ]
    names = list(first)
    transposed = transposed_names(expected[0], held_by(engine, names, [])[0])
    prints, reasons = held_by(engine, names, transposed)
    held = [prints]
    shared = [name for name in prints if name in first]
    if not any(prints[name].cells == expected[0][name].cells for name in shared):
        fault = "the engine holds none of these parameters' values before any push"
        fix = "sync once first, and give the parameters under the checkpoint's names"
        raise MismatchError(fault, fix)
    try:
        for push in range(1, PUSHES + 1):
            _set(parameters, first, seed, push)
            sync()
            held.append(held_by(engine, names, transposed)[0])
    finally:
        _set(parameters, first, seed, 0)
    states = [expected[state_of(push)] for push in range(PUSHES + 1)]
    return SyncReport(
        model="",
        engine=type(engine).__name__,
        path="your own",
        seed=seed,
        size=SIZE,
        parameters=judged(states, held, reasons, tied or {}),
        not_tested=(
            NotTested("caches", "a library call asks no prompts", "mismatch sync-probe"),
            *unread(reasons),
        ),
    )


def sglang_engine(**arguments: Any) -> Any:
    """``sglang.Engine(**arguments)`` that shows its parameters to :func:`probe`."""
    from mismatch.engines.sglang.child import offline
    from mismatch.engines.sglang.private import hook

    hook().prepare()
    return offline()(**arguments)


def held_by(engine: Any, names: list[str], transposed: list[str]) -> Held:
    """Return what the engine holds now, and why not all of it.

    Raises:
        MismatchError: a server or an SGLang engine that does not show it.
    """
    if isinstance(engine, str):  # whose workers have the extension
        from mismatch.engines.servers.address import parse_address
        from mismatch.engines.servers.client import (
            Client,
            RequestFailed,
            answer_bytes,
            api_key,
            wait_for,
        )

        call = {"method": "mismatch_held_json", "args": [names, transposed]}
        client = Client(parse_address(engine), SERVER_S, api_key())
        try:
            return wait_for(
                client.post(
                    "/collective_rpc",
                    call,
                    lambda answer: held_from_plain(json.loads(answer["results"][0])),
                    answer_bytes(len(names), 4),
                )
            )
        except RequestFailed as error:
            fix = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
            raise MismatchError(f"{engine} does not show its parameters: {error}", fix) from error
    kinds = type(engine).__mro__
    if hasattr(engine, "mismatch_called"):
        return held_from_plain(engine.mismatch_called("mismatch_held", names, transposed))
    if any(kind.__module__.partition(".")[0] == "sglang" for kind in kinds):
        fix = "make it with mismatch.features.sync.in_framework.sglang_engine(**arguments)"
        raise MismatchError("this SGLang engine does not show its parameters", fix)
    if not hasattr(engine, "collective_rpc"):
        tensors = dict(engine())
        turned = {n: t.transpose(-1, -2) if n in transposed else t for n, t in tensors.items()}
        return {name: Prints.of(name, tensor) for name, tensor in turned.items()}, {}
    return held_from_plain(engine.collective_rpc("mismatch_held", args=(names, transposed))[0])


def _set(
    parameters: Mapping[str, torch.Tensor], first: Mapping[str, torch.Tensor], seed: int, push: int
) -> None:
    for name, tensor in parameters.items():
        tensor.data.copy_(updated(name, first[name], seed, state_of(push)))
