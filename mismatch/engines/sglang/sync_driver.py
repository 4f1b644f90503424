"""SGLang's own ways to new weights, for a probe of the weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from mismatch.engines.sglang import wire
from mismatch.engines.sync_drivers import Answer, CalledDriver
from mismatch.errors import MismatchError
from mismatch.types import NotTested, Sampling

AT_ONCE = 16  # tensors in one message
IDLE_SECONDS = 60.0  # to wait until SGLang has put away the batch that it last answered
ONE_TOKEN = Sampling(temperature=0.0, max_tokens=1)


class SglangDriver(CalledDriver):
    """See :class:`mismatch.engines.sync_drivers.Driver`."""

    def push(self, path: str, push: int) -> None:
        self.wait_until_idle()
        engine = self.engine.engine
        if path == "disk":
            with self.files(push) as source:
                _require(engine.update_weights_from_disk(source))
            return
        push_tensors(engine, self.checkpoint.tensors(push))

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        self.wait_until_idle()
        function(weights, self.engine.engine)

    def wait_until_idle(self) -> None:
        """Until SGLang can drop its cache.

        It answers a request before it puts its batch away. A push that comes in between brings
        the weights and is refused all the same, for the cache that it could not drop.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.engine._call("mismatch_idle")[0] and time.monotonic() < deadline:
            time.sleep(0.01)

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        if self.engine._server.get("disable_radix_cache"):
            return None
        law = wire.sampling_parameters(ONE_TOKEN, self.engine.info.stop_ids)
        bodies = [wire.generate_request(ids, law, routes=False) for ids in prompts]
        answers = self.engine._run(bodies, lambda *done: None)
        return [_answer(answer["meta_info"]) for answer in answers]

    def drop_caches(self) -> None:
        engine = self.engine.engine
        flush = engine.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS)
        if not engine.loop.run_until_complete(flush).success:
            raise MismatchError("SGLang did not flush its cache", wire.LOG_FIX)

    def not_tested(self) -> list[NotTested]:
        return [
            NotTested(
                "update_weights_from_distributed, memory released and resumed",
                "this probe does not drive them",
                "a --push of your own that calls them",
            )
        ]


def push_tensors(
    engine: Any, weights: Iterable[tuple[str, Any]], *, flush_cache: bool = False
) -> None:
    """One update of an SGLang engine, as frameworks send it: begun, in parts, ended.

    Raises:
        MismatchError: SGLang refused a part of it.
    """
    begin = getattr(engine, "begin_weight_update", None)  # older versions have no sessions
    if begin is not None:
        _require(begin())
    try:
        rest = iter(weights)
        while part := list(islice(rest, AT_ONCE)):
            _require(engine.update_weights_from_tensor(part, flush_cache=flush_cache))
    finally:
        if begin is not None:
            _require(engine.end_weight_update())


def _require(answer: Any) -> None:
    success, message = answer[:2]
    if not success:
        raise MismatchError(f"SGLang refused new weights: {message}", wire.LOG_FIX)


def _answer(facts: dict[str, Any]) -> Answer:
    return Answer(float(facts["output_token_logprobs"][0][0]), int(facts["cached_tokens"]))
