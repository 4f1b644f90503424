"""SGLang's own ways to new weights, for a probe of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from mismatch.engines.model_calls import attribute
from mismatch.engines.sglang import private, wire
from mismatch.engines.sync_drivers import Answer, Driver
from mismatch.errors import MismatchError
from mismatch.types import NotTested, Sampling

AT_ONCE = 16  # tensors in one message
IDLE_SECONDS = 60.0  # to wait until SGLang has put away the batch that it last answered


class SglangDriver(Driver):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    def push(self, path: str, push: int) -> None:
        self.wait_until_idle()
        engine = self.engine.engine
        if path == "disk":
            with self.files(push) as source:
                _require(engine.update_weights_from_disk(source))
            return
        # One update as frameworks send it: begun, in parts, ended. Older versions have no sessions.
        begin = getattr(engine, "begin_weight_update", None)
        if begin is not None:
            _require(begin())
        try:
            rest = iter(self.checkpoint.tensors(push))
            while part := list(islice(rest, AT_ONCE)):
                _require(engine.update_weights_from_tensor(part, flush_cache=False))
        finally:
            if begin is not None:
                _require(engine.end_weight_update())

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        self.wait_until_idle()
        function(weights, self.engine.engine)

    def wait_until_idle(self) -> None:
        """Wait until SGLang can drop its cache.

        It answers a request before it puts its batch away. A push that comes in between brings
        the weights and is refused all the same, for the cache that it could not drop.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.engine._call("mismatch_idle")[0] and time.monotonic() < deadline:
            time.sleep(0.01)

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        if self.engine._server.get("disable_radix_cache"):
            return None
        one_token = Sampling(temperature=0.0, max_tokens=1)
        settings = wire.sampling_parameters(one_token, self.engine.info.stop_ids)
        bodies = [wire.generate_request(ids, settings, routes=False) for ids in prompts]
        facts = [answer["meta_info"] for answer in self.engine._run(bodies, lambda *done: None)]
        return [
            Answer(float(each["output_token_logprobs"][0][0]), int(each["cached_tokens"]))
            for each in facts
        ]

    def drop_caches(self) -> None:
        engine = self.engine.engine
        flush, loop = (attribute(engine, name, None) for name in (private.FLUSH, private.LOOP))
        waits = flush and loop and loop.run_until_complete(flush(timeout_s=IDLE_SECONDS))
        if not (waits or engine.flush_cache()).success:  # the public method does not wait
            raise MismatchError("SGLang did not flush its cache", wire.LOG_FIX)

    def not_tested(self) -> list[NotTested]:
        return [
            NotTested(
                "update_weights_from_distributed, memory released and resumed",
                "this probe does not drive them",
                "a --push of your own that calls them",
            )
        ]


def _require(answer: Any) -> None:
    success, message = answer[:2]
    if not success:
        raise MismatchError(f"SGLang refused new weights: {message}", wire.LOG_FIX)
