"""A running server as an engine; see :class:`mismatch.engines.base.Engine`.

A failed request is repeated by the client where that may help. What still fails ends the run, and
so does a server that becomes another (model, version, weights). Partial work is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from mismatch.codec import to_json
from mismatch.engines.base import (
    Capabilities,
    Engine,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
    TokenIds,
    by_prompt,
    requests_of,
    require_ids,
    require_starts,
    sample_seed,
)
from mismatch.engines.model_info import read_model_info
from mismatch.engines.registry import model_facts
from mismatch.engines.servers.client import RequestFailed, wait_for
from mismatch.engines.servers.discovery import discover
from mismatch.engines.servers.probing import SAME_WEIGHTS, changed, verify
from mismatch.engines.servers.server import Server
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Floats, NotTested, Sampling, SideFacts

T = TypeVar("T")


class ServerEngine(Engine):
    """A running server of the model."""

    name: ClassVar[str] = "server"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec = spec
        self.sampling = sampling
        self.info = read_model_info(spec)
        self.server = server = discover(spec)
        self._sent: dict[str, Any] = {}
        self._stop: tuple[str, ...] = ()
        limit = server.max_model_len
        scoring = spec.prefill and server.prefill  # samples one token more
        needed = longest + server.spare + scoring
        if limit is not None and needed > limit:
            fault = f"{server.url} takes sequences of {limit} tokens, these may have {needed}"
            fix = "lower --max-tokens, or start the server with a longer context"
            raise MismatchError(fault, fix)

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        server = discover(spec)
        reasons: dict[str, str] = {
            "deterministic": "a server's batches depend on what else it has to do",
            "prefill_tempered": "servers score prompts at temperature 1 only",
            "distributions": "a server gives no whole distributions",
        }
        limit = server.max_model_len
        return Capabilities(
            context=None if limit is None else limit - server.spare - server.prefill,
            prefill=server.prefill,
            prefill_tempered=False,
            routed_experts=server.layout is not None,
            processed_logprobs=bool(server.truncated),
            deterministic=False,
            reasons=reasons | server.reasons,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the server running: it is not ours to stop."""

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        require_ids(prompts, self.info.vocab_size)
        server = self.server
        requests = requests_of(len(prompts), self.sampling, turn)
        self._sent = settings = server.settings(self.sampling, self.info.stop_ids, self._stop)

        async def ask(job: int) -> Sample:
            prompt, number = requests[job]
            sample, identity = await server.generate(
                prompts[prompt], settings, self._seed(prompt, number), self.likeliest
            )
            if identity != server.configuration:
                raise changed(server, f"it answers as {identity}, not {server.configuration}")
            url, tokens, most = server.url, len(sample.token_ids), self.sampling.max_tokens
            if sample.finish_reason == "length" and tokens < most:
                fault = f"{url} cut a response at {tokens} tokens, --max-tokens asked for {most}"
                fix = "start the server without a limit, or lower --max-tokens"
                raise MismatchError(fault, fix)
            largest, vocabulary = max(sample.token_ids), self.info.vocab_size
            if largest >= vocabulary:
                fault = (
                    f"{url} sampled token {largest}, the model has {vocabulary}: the wrong model"
                )
                raise MismatchError(fault, "give the model that the server loaded: --model")
            return sample

        samples = self._work(len(requests), ask, lambda sample: len(sample.token_ids), progress)
        return by_prompt(samples, len(prompts))

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """Score at temperature 1, whatever ``temperature`` is."""
        require_starts(starts)
        require_ids(sequences, self.info.vocab_size)

        async def ask(job: int) -> Floats:
            scored = await self.server.score(sequences[job], starts[job])
            if not np.isfinite(scored).all():
                raise RequestFailed("logprobs that are no numbers")
            return scored

        return self._work(len(sequences), ask, len, progress)

    def experts(self) -> ExpertLayout | None:
        return self.server.layout

    def weights(self) -> LoadedWeights:
        """Return none: servers do not show their parameters."""
        return LoadedWeights({})

    def fingerprint(self, mode: Mode) -> SideFacts:
        """Return what the server says and what probes showed."""
        server, tempered = self.server, self.server.tempered
        decode = mode == "decode"
        mode_name = {None: "not known", False: "raw", True: "tempered"}[tempered]
        if tempered and server.truncated:
            mode_name = "processed"
        temperature: float | None = 1.0
        if decode and self.sampling.temperature not in (0.0, 1.0) and tempered is not False:
            temperature = self.sampling.temperature if tempered else None
        return {
            **model_facts(self.spec),
            "mode": mode,
            "served_by": server.kind,
            "version": server.version,
            "versions": {server.kind: server.version},
            "source_files": {},  # those of the server cannot be read
            "dtype": server.dtype,
            **server.details,
            "logprobs_mode": f"{mode_name} (probed)" if decode else "prompt_logprobs",
            "logprobs_temperature": temperature,
            "logprobs_truncated": decode and self.sampling.truncates and server.truncated,
            "logprobs_penalised": decode and self.sampling.penalises and server.truncated,
            "max_model_len": server.max_model_len,
            "weights_not_comparable": "a server does not show its parameters",
            "engine": self.name,
            "moe": self.info.moe,
            "seeding": "none" if self._seed(0, 0) is None else "per sample",
            "sampling": self._sent,
            "server": {
                "url": server.url,
                "configuration": server.configuration,
                "noise": server.noise,
                "drift": server.drift,
            },
            "not_tested": to_json(list(not_tested(server))),
        }

    # ------------------------------------------------------------ requests

    def _work(
        self,
        count: int,
        ask: Callable[[int], Awaitable[T]],
        size: Callable[[T], int],
        progress: Progress,
    ) -> list[T]:
        """Return the answers in the order of the jobs, from a server that is still the same.

        Raises:
            MismatchError: a request failed, or the server became another.
        """

        async def everything() -> list[T]:
            room = asyncio.Semaphore(self.spec.server_concurrency)
            done = tokens = 0

            async def one(job: int) -> T:
                nonlocal done, tokens
                async with room:
                    answer = await ask(job)
                done, tokens = done + 1, tokens + size(answer)
                progress(done, count, tokens)
                return answer

            answers = await asyncio.gather(*map(one, range(count)))
            await verify(self.server)
            return answers

        try:
            return wait_for(everything())
        except RequestFailed as error:
            fixes = {
                "refused": "look into the server's log; its version may not know this request",
                "slow": "give a request more time (--server-timeout), then sample again: --resume",
            }
            again = "look into the server's log and start it again; then sample again: --resume"
            fault = f"{self.server.url} did not answer a request: {error}"
            raise MismatchError(fault, fixes.get(error.kind, again)) from error

    def _seed(self, prompt: int, sample: int) -> int | None:
        """Return a different seed for every sample, where seeds do no harm.

        SGLang gives every request without one the same, in its deterministic mode. vLLM's CPU
        sampler dies of a seeded request whose prefill is cut in two, and a server does not say
        where it runs.
        """
        server = self.server
        safe = server.kind == "sglang" or server.details.get("device") == "cuda"
        return sample_seed(self.sampling.seed, prompt, sample) if safe else None


def not_tested(server: Server) -> Iterator[NotTested]:
    """List what is not known about the server."""
    if server.dtype is None:
        yield NotTested("the dtype that the server computes in", "it does not say")
    if server.tempered is None:
        yield NotTested(
            "which distribution the server's logprobs are of", "its probes did not tell"
        )
    if server.noise > SAME_WEIGHTS:
        reason = f"two probes in a row differ by {server.noise:.2g} on average"
        yield NotTested(f"that one model answers at {server.url}", reason)
