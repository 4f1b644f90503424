"""Running servers as one engine; see :class:`mismatch.engines.base.Engine`.

Requests wait in one queue, and every server takes the next request when it has room. A server that
stays unavailable gets no more work and the others do the rest; a server that becomes another
(model, version, weights) ends the run. Partial work is not kept.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
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
from mismatch.engines.servers.server import SampleRequest, Server
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Fingerprint, Floats, NotTested, Sampling

VERIFY_EVERY_S = 60.0
BUSY_ATTEMPTS = 30  # a server that others use too is busy for minutes
T = TypeVar("T")


class ServerEngine(Engine):
    """One or more running servers of one model."""

    name: ClassVar[str] = "server"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec = spec
        self.sampling = sampling
        self.info = read_model_info(spec)
        self._sent: dict[str, Any] = {}
        self._stop: tuple[str, ...] = ()
        self._verified = 0.0  # when, by time.monotonic()
        group = discover(spec)
        self.probes, self.layout = group.probes, group.layout
        # What happened while they were examined is not counted as a part of the run.
        self.servers: list[Server] = []
        for each in group.servers:
            client = replace(each.client, busy_attempts=BUSY_ATTEMPTS, unreached=True)
            client.failures = Counter()
            server = replace(each, client=client)
            self.servers.append(server)
            limit = server.facts.max_model_len
            scoring = spec.prefill and server.prefill  # samples one token more
            needed = longest + server.facts.spare + scoring
            if limit is not None and needed > limit:
                fault = f"{server.url} takes sequences of {limit} tokens, these may have {needed}"
                fix = "lower --max-tokens, or start the server with a longer context"
                raise MismatchError(fault, fix)

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        servers = discover(spec).servers
        reasons: dict[str, str] = {
            "deterministic": "a server's batches depend on what else it has to do",
            "prefill_tempered": "servers score prompts at temperature 1 only",
            "distributions": "a server gives no whole distributions",
        }
        for server in servers:
            reasons |= server.reasons
        return Capabilities(
            prefill=all(server.prefill for server in servers),
            prefill_tempered=False,
            routed_experts=all(server.routes for server in servers),
            processed_logprobs=bool(servers[0].mode.truncated),
            deterministic=False,
            reasons=reasons,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the servers running: they are not ours to stop."""

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        """Sample each of a turn's requests, whichever server answers it and when."""
        require_ids(prompts, self.info.vocab_size)
        requests = requests_of(len(prompts), self.sampling, turn)
        first = self.servers[0]
        self._sent = settings = first.settings(self.sampling, self.info.stop_ids, self._stop)

        async def ask(server: Server, job: int) -> Sample:
            prompt, number = requests[job]
            seed = self._seed(server, prompt, number)
            layout = self.layout if server.routes else None
            answer = await server.generate(
                SampleRequest(prompts[prompt], settings, seed, layout, self.likeliest)
            )
            known = server.configuration
            if answer.identity != known:
                raise changed(server, f"it answers as {answer.identity}, not {known}")
            self._require_whole(answer.sample, server)
            server.sequences += 1
            return answer.sample

        samples = wait_for(
            self._work(len(requests), ask, lambda sample: len(sample.token_ids), progress)
        )
        return by_prompt(samples, len(prompts))

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """Score at temperature 1, whatever ``temperature`` is."""
        require_starts(starts)
        require_ids(sequences, self.info.vocab_size)

        async def ask(server: Server, job: int) -> Floats:
            scored = await server.score(sequences[job], starts[job])
            if not np.isfinite(scored).all():
                raise RequestFailed("logprobs that are no numbers")
            return scored

        return wait_for(self._work(len(sequences), ask, len, progress))

    def experts(self) -> ExpertLayout | None:
        return self.layout if all(server.routes for server in self.servers) else None

    def weights(self) -> LoadedWeights:
        """Return none: servers do not show their parameters."""
        return LoadedWeights({})

    def fingerprint(self, mode: Mode) -> Fingerprint:
        """Return what the servers say and what probes showed; what all share is the first one's."""
        server = self.servers[0]
        facts, decode = server.facts, mode == "decode"
        temperature: float | None = 1.0
        if decode and self.sampling.temperature not in (0.0, 1.0):
            tempered = {True: self.sampling.temperature, False: 1.0, None: None}
            temperature = tempered[server.mode.tempered]
        return (
            model_facts(self.spec)
            | {
                "mode": mode,
                "served_by": facts.kind,
                "version": facts.version,
                "versions": {facts.kind: facts.version},
                "source_files": {},  # those of the servers cannot be read
                "dtype": facts.dtype,
            }
            | facts.details
            | {
                "logprobs_mode": f"{server.mode.name} (probed)" if decode else "prompt_logprobs",
                "logprobs_temperature": temperature,
                "logprobs_truncated": decode and self.sampling.truncates and server.mode.truncated,
                "max_model_len": facts.max_model_len,
                "weights_not_comparable": "a server does not show its parameters",
                "engine": self.name,
                "moe": self.info.moe,
                "seeding": "none" if self._seed(server, 0, 0) is None else "per sample",
                "sampling": self._sent,
                "servers": [_record(each) for each in self.servers],
                "not_tested": to_json(list(not_tested(self.servers))),
            }
        )

    # ------------------------------------------------------------ requests

    async def _work(
        self,
        count: int,
        ask: Callable[[Server, int], Awaitable[T]],
        size: Callable[[T], int],
        progress: Progress,
    ) -> list[T]:
        """Ask the servers until every job has an answer; return answers in the order of the jobs.

        No request is ever sent to two servers at once: the first of two answers is more often the
        shorter one, and taking it would bias the sample.

        Raises:
            MismatchError: no server is left, one became another, or refuses a request.
        """
        answers: dict[int, T] = {}
        waiting, tokens = deque(range(count)), 0
        self._verified = time.monotonic()

        async def take(server: Server) -> None:
            nonlocal tokens
            while waiting and server.dropped is None:
                job = waiting.popleft()
                try:
                    answers[job] = await ask(server, job)
                except RequestFailed as error:
                    if error.kind == "refused":
                        fault = f"{server.url} refuses a request: {error.reason}"
                        fix = "look into the server's log; its version may not know this request"
                        raise MismatchError(fault, fix) from error
                    _drop(server, error.reason)
                    waiting.appendleft(job)
                    return
                server.unconfirmed += 1
                tokens += size(answers[job])
                progress(len(answers), count, tokens)
                if time.monotonic() > self._verified + VERIFY_EVERY_S:
                    await self._verify()  # a long run ends early where a server changed

        while waiting:  # again, where a server was dropped after the others had ended
            alive = [server for server in self.servers if server.dropped is None]
            if not alive:
                reasons = "; ".join(f"{server.url}: {server.dropped}" for server in self.servers)
                raise MismatchError(
                    f"no server is left ({reasons})",
                    "look into the servers' logs and start them again; then sample again: --resume",
                )
            turns = [server for _ in range(self.spec.server_concurrency) for server in alive]
            tasks = [asyncio.ensure_future(take(server)) for server in turns]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await self._verify()
        return [answers[job] for job in range(count)]

    async def _verify(self) -> None:
        """Confirm that the servers are what they were, and so the answers that they gave before."""
        self._verified = time.monotonic()
        for server in self.servers:
            answers = server.unconfirmed
            if server.dropped is None and answers:
                try:
                    await verify(server, self.probes)
                    server.unconfirmed -= answers
                except RequestFailed as error:
                    _drop(server, error.reason)

    def _seed(self, server: Server, prompt: int, sample: int) -> int | None:
        """Return a different seed for every sample, where seeds do no harm.

        SGLang gives every request without one the same, in its deterministic mode. vLLM's CPU
        sampler dies of a seeded request whose prefill is cut in two, and a server does not say
        where it runs.
        """
        facts = server.facts
        safe = facts.kind == "sglang" or facts.details.get("device") == "cuda"
        return sample_seed(self.sampling.seed, prompt, sample) if safe else None

    def _require_whole(self, sample: Sample, server: Server) -> None:
        short = len(sample.token_ids) < self.sampling.max_tokens
        if sample.finish_reason == "length" and short:
            raise MismatchError(
                f"{server.url} cut a response at {len(sample.token_ids)} tokens, "
                f"--max-tokens asked for {self.sampling.max_tokens}",
                "start the server without a limit, or lower --max-tokens",
            )
        vocabulary = self.info.vocab_size
        if max(sample.token_ids) >= vocabulary:
            raise MismatchError(
                f"{server.url} sampled token {max(sample.token_ids)}, the model has {vocabulary}: "
                "the wrong model",
                "give the model that the server loaded: --model",
            )


def _drop(server: Server, reason: str) -> None:
    """Give a server no more requests, and say so in the progress line and in the log."""
    if server.dropped is None:
        server.dropped = reason
        line = f"{server.url} is dropped: {reason}"
        sys.stderr.write(f"progress {line}\n{line}\n")
        sys.stderr.flush()


def _record(server: Server) -> dict[str, Any]:
    """Return one server's part in a run."""
    failures = server.client.failures
    kept = ("configuration", "sequences", "unconfirmed", "noise", "drift", "dropped")
    return {
        "url": server.url,
        "version": server.facts.version,
        **{name: getattr(server, name) for name in kept},
        "failures": failures["failed"] + failures["absent"],
        "timeouts": failures["slow"],
        "busy": failures["busy"],
    }


def not_tested(servers: Sequence[Server]) -> Iterator[NotTested]:
    """List what is not known about these servers."""
    if servers[0].facts.dtype is None:
        yield NotTested("the dtype that the server computes in", "it does not say")
    if servers[0].mode.tempered is None:
        yield NotTested(
            "which distribution the server's logprobs are of", "its probes did not tell"
        )
    if len({server.configuration for server in servers}) > 1:
        yield NotTested("equal settings of all servers", "their configurations differ")
    for server in servers:
        if server.noise > SAME_WEIGHTS:
            reason = f"two probes in a row differ by {server.noise:.2g} on average"
            yield NotTested(f"that one model answers at {server.url}", reason)
        if server.unconfirmed:
            yield NotTested(
                f"the weights of {server.url} to its end",
                f"it was dropped ({server.dropped}) before {server.unconfirmed} of its answers "
                "were confirmed by probe prompts",
            )
        if timeouts := server.client.failures["slow"]:
            yield NotTested(
                "lengths as sampled",
                f"{timeouts} requests to {server.url} ran out of time and were sampled again, "
                "which favours short responses",
            )
