"""New weights for running servers, for a probe of the weight sync: update and reset endpoints.

A server shows its parameters only if it is vLLM and its workers have mismatch's extension; else the
probe has log-probabilities before and after alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from mismatch.engines.base import Engine
from mismatch.engines.servers.client import Patience, RequestFailed, wait_for
from mismatch.engines.servers.engine import ServerEngine
from mismatch.engines.servers.server_api import SampleRequest, Server
from mismatch.engines.sync_drivers import Answer, AsGiven, Held
from mismatch.errors import MismatchError
from mismatch.models.weight_states import PUSHES, Checkpoint, state_of
from mismatch.types import NotTested, Sampling

UNSEEN = (
    "the server does not show it; vLLM does with VLLM_SERVER_DEV_MODE=1 and "
    "--worker-extension-cls mismatch.engines.vllm.weight_sync.WeightSync"
)


class ServerDriver(AsGiven):
    """Push weights into servers; restore the first weights at the end of the engine."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        self.engine = cast(ServerEngine, engine)
        self.engine.at_end = self.restore
        self.checkpoint = checkpoint
        self.scratch = scratch
        self.state = 0

    @property
    def servers(self) -> list[Server]:
        """The servers, asked once: an update that is sent twice would be another protocol."""
        once = Patience(failures=1, busy=1)
        return [server.asked_with(once) for server in self.engine.servers]

    def push(self, path: str, push: int) -> None:
        """Write the state to a folder, which the servers have to be able to read."""
        source = self.checkpoint.directory
        self.state = state_of(push)
        if self.state:
            source = self.checkpoint.write(push, self.scratch / f"push-{push}")
        try:
            for server in self.servers:
                with _asked(server, "an update of its weights"):
                    wait_for(server.update_weights(source.resolve()))
        finally:
            shutil.rmtree(self.scratch / f"push-{push}", ignore_errors=True)
        self.engine.meet_again()

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        function(weights, [server.url for server in self.servers])
        self.engine.meet_again()

    def restore(self) -> None:
        """Push the checkpoint's own weights again, if a probe that ended early left others."""
        if self.state:
            with suppress(MismatchError):
                self.push("update", PUSHES)

    def held(self, names: list[str], transposed: list[str]) -> Held:
        server = self.servers[0]
        with _asked(server, "a look at its parameters"):
            return wait_for(server.held(names, transposed)) or ({}, dict.fromkeys(names, UNSEEN))

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        """Return the first server's answers."""
        server = self.servers[0]
        if server.facts.details.get("prefix_caching") is False:
            return None
        settings = server.settings(Sampling(temperature=0.0, max_tokens=1))
        with _asked(server, "a prompt"):
            answers = [wait_for(server.generate(SampleRequest(ids, settings))) for ids in prompts]
        return [Answer(float(answer.sample.logprobs[0]), 0) for answer in answers]

    def drop_caches(self) -> None:
        for server in self.servers:
            with _asked(server, "a reset of its prefix cache"):
                wait_for(server.drop_caches())

    def not_tested(self) -> list[NotTested]:
        others = [NotTested("the other servers' parameters", "the first is asked alone")]
        return others if len(self.servers) > 1 else []


@contextmanager
def _asked(server: Server, what: str) -> Iterator[None]:
    """Turn a failed request into an error that says how an operator allows it."""
    try:
        yield
    except RequestFailed as error:
        raise MismatchError(f"{server.url} refuses {what}: {error}", server.allow) from error
