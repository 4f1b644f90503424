"""Running servers as one engine; see :class:`mismatch.engines.base.Engine`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from mismatch.codec import to_json
from mismatch.engines.base import (
    Capabilities,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
    requests_of,
    require_ids,
    require_starts,
    sample_seed,
)
from mismatch.engines.model_info import read_model_info
from mismatch.engines.registry import model_facts
from mismatch.engines.servers.discovery import ServerGroup, discover
from mismatch.engines.servers.http import Unavailable
from mismatch.engines.servers.journal import Journal
from mismatch.engines.servers.probing import (
    SAME_WEIGHTS,
    Server,
    allowed_drift,
    mean_abs_diff,
    verify,
)
from mismatch.engines.servers.scheduler import (
    JobCallbacks,
    NoServerLeft,
    Scheduler,
    ServerChanged,
    ServerState,
)
from mismatch.engines.servers.server_api import Answer
from mismatch.errors import MismatchError
from mismatch.specs import EngineSpec
from mismatch.types import Fingerprint, Floats, NotTested, Sampling

UNTEMPERED = "servers score prompts at temperature 1 only"
UNSEEDED = "a server's batches depend on what else it has to do"
NO_WEIGHTS = "a server does not show its parameters"
IDENTITY = ("kind", "version", "dtype", "weight_version", "law", "routes")  # of a journal's servers


class ServerEngine:
    """One or more running servers of one model."""

    name: ClassVar[str] = "server"
    likeliest = 0

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec = spec
        self.sampling = sampling
        self.info = read_model_info(spec)
        self.at_end: Callable[[], None] | None = None  # called while the servers are still asked
        self._longest = longest
        self._journal: Journal | None = None
        self._sent: dict[str, Any] = {}
        self._stop: tuple[str, ...] = ()
        self._shares: Counter[str] = Counter()
        self._meet()

    def _meet(self) -> None:
        self.group: ServerGroup = discover(self.spec)
        self._require_room(self._longest)
        self._notes: dict[str, dict[str, Any]] = {
            server.url: {"restarts": [], "drift": 0.0} for server in self.group.servers
        }
        self.scheduler = Scheduler(
            [ServerState(server.url, server) for server in self.group.servers],
            lambda server: verify(server, self.group.probes, self._notes[server.url]),
            self.spec.server_concurrency,
            _log,
        )

    def meet_again(self) -> None:
        """The servers have other weights, rightly: probe them anew."""
        discover.cache_clear()
        self._meet()

    # ------------------------------------------------------------ Engine protocol

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        servers = discover(spec).servers
        reasons: dict[str, str] = {
            "deterministic": UNSEEDED,
            "prefill_tempered": UNTEMPERED,
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
            journals=True,
            reasons=reasons,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.at_end is not None:  # servers are not ours to stop
            self.at_end()

    def keep_journal(self, run_dir: Path, asked: str) -> None:
        """Save every finished sequence at once, and take up those that are saved already.

        Args:
            asked: hash of what is asked for.

        Raises:
            MismatchError: the sequences there are of other weights than the servers have now.
        """
        self._journal = Journal.open(run_dir, asked)
        if self._journal.new:
            self._journal.begin(self._identity())
        else:
            self._require_same_as(self._journal)

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)

    def discard_journal(self) -> None:
        if self._journal is not None:
            self._journal.discard()

    def generate(
        self, prompts: Sequence[list[int]], progress: Progress, turn: int = 1
    ) -> list[list[Sample]]:
        """Each of a turn's requests, whichever server answers it and when."""
        require_ids(prompts, self.info.vocab_size)
        requests = requests_of(len(prompts), self.sampling, turn)
        total = len(requests)
        per_prompt = total // len(prompts)
        samples: dict[int, Sample] = {}
        if self._journal is not None and self._journal.samples:
            samples = {job: s for job, s in self._journal.samples.items() if job < total}
            self._shares.update(self._journal.answered_by[job] for job in samples)
            _log(f"{len(samples)} of {total} sequences were finished before")
        tokens = sum(len(sample.token_ids) for sample in samples.values())
        first = self.group.servers[0]
        self._sent = settings = first.api.settings(self.sampling, self.info.stop_ids, self._stop)

        def ask(server: Server, job: int) -> Answer:
            ids, seed = prompts[requests[job][0]], self._seed(server, *requests[job])
            layout = self.group.layout if server.routes else None
            answer = server.api.generate(ids, settings, seed, layout, self.likeliest)
            if answer.identity != server.facts.configuration:
                raise ServerChanged(
                    f"it answers as {answer.identity}, not {server.facts.configuration}"
                )
            self._require_whole(answer.sample, server)
            return answer

        def done(job: int, state: ServerState, answer: Answer) -> None:
            nonlocal tokens
            samples[job] = answer.sample
            tokens += len(answer.sample.token_ids)
            self._shares[state.name] += 1
            if self._journal is not None:
                self._journal.add(job, answer.sample, state.name)
            progress(len(samples), total, tokens)

        def void(jobs: list[int], state: ServerState) -> None:
            for job in jobs:
                del samples[job]
            self._shares[state.name] -= len(jobs)
            if self._journal is not None:
                self._journal.void(jobs, str(state.dropped))

        self._run(
            [job for job in range(total) if job not in samples], JobCallbacks(ask, done, void)
        )
        flat = [samples[job] for job in range(total)]
        return [flat[i : i + per_prompt] for i in range(0, total, per_prompt)]

    def prefill(
        self,
        sequences: Sequence[list[int]],
        starts: Sequence[int],
        temperature: float,
        progress: Progress,
    ) -> list[Floats]:
        """At temperature 1, whatever ``temperature`` is."""
        require_starts(starts)
        require_ids(sequences, self.info.vocab_size)
        scores: dict[int, Floats] = {}
        tokens = 0

        def ask(server: Server, job: int) -> Floats:
            scored = server.api.score(sequences[job], starts[job])
            if not np.isfinite(scored).all():
                raise Unavailable("logprobs that are no numbers")
            return scored

        def done(job: int, state: ServerState, answer: Floats) -> None:
            nonlocal tokens
            scores[job] = answer
            tokens += len(answer)
            progress(len(scores), len(sequences), tokens)

        def void(jobs: list[int], state: ServerState) -> None:
            for job in jobs:
                del scores[job]

        self._run(range(len(sequences)), JobCallbacks(ask, done, void))
        return [scores[job] for job in range(len(sequences))]

    def experts(self) -> ExpertLayout | None:
        return self.group.layout if all(server.routes for server in self.group.servers) else None

    def weights(self) -> LoadedWeights:
        """None: servers do not show their parameters."""
        return LoadedWeights({})

    def fingerprint(self, mode: Mode) -> Fingerprint:
        """What the servers say, and what probes showed; facts of all from the first of them."""
        server = self.group.servers[0]
        facts, states = server.facts, self.scheduler.states
        decode = mode == "decode"
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
                "weights_not_comparable": NO_WEIGHTS,
                "engine": self.name,
                "moe": self.info.moe,
                "seeding": "none" if self._seed(server, 0, 0) is None else "per sample",
                "sampling": self._sent,
                "servers": [self._record(state) for state in states],
                "not_tested": to_json(list(not_tested(states, self.info.model_type))),
            }
        )

    # ------------------------------------------------------------ requests

    def _run(self, jobs: Sequence[int], work: JobCallbacks) -> None:
        try:
            self.scheduler.run(jobs, work)
        except MismatchError as error:
            kept = len(self._journal.samples) if self._journal else 0
            if kept:
                error.message += f"; {kept} finished sequences are kept"
            if kept or isinstance(error, NoServerLeft):
                error.fix += "; then go on where it stopped: --resume"
            raise

    def _seed(self, server: Server, prompt: int, sample: int) -> int | None:
        """A seed of its own for every sample, where seeds do no harm.

        SGLang gives every request without one the same, in its deterministic mode. vLLM's CPU
        sampler dies of a seeded request whose prefill is cut in two, and a server does not say
        where it runs.
        """
        safe = server.facts.kind == "sglang" or server.facts.details.get("device") == "cuda"
        return sample_seed(self.sampling.seed, prompt, sample) if safe else None

    def _require_whole(self, sample: Sample, server: Server) -> None:
        short = len(sample.token_ids) < self.sampling.max_tokens
        if sample.finish_reason == "length" and short:
            raise MismatchError(
                f"{server.url} cut a response at {len(sample.token_ids)} tokens, "
                f"--max-tokens asked for {self.sampling.max_tokens}",
                "start the server without a limit of its own, or lower --max-tokens",
            )
        vocabulary = self.info.vocab_size
        if max(sample.token_ids) >= vocabulary:
            raise MismatchError(
                f"{server.url} sampled token {max(sample.token_ids)}, the model has {vocabulary}: "
                "the wrong model",
                "give the model that the server loaded: --model",
            )

    def _require_room(self, longest: int) -> None:
        for server in self.group.servers:
            limit = server.facts.max_model_len
            scoring = self.spec.prefill and server.prefill  # samples one token more
            needed = longest + server.facts.spare + scoring
            if limit is not None and needed > limit:
                raise MismatchError(
                    f"{server.url} takes sequences of {limit} tokens, these may have {needed}",
                    "lower --max-tokens, or start the server with a longer context",
                )

    # ------------------------------------------------------------ which servers they are

    def _identity(self) -> dict[str, Any]:
        first = self.group.servers[0]
        return {
            "kind": first.facts.kind,
            "version": first.facts.version,
            "dtype": first.facts.dtype,
            "weight_version": first.facts.weight_version,
            "law": first.mode.name,
            "routes": self.experts() is not None,
            "probe": first.probe.tolist(),
            "noise": first.noise,
        }

    def _require_same_as(self, journal: Journal) -> None:
        now, before = self._identity(), journal.header
        for name in IDENTITY:
            if now[name] != before.get(name):
                raise MismatchError(
                    f"the sequences in {journal.path} are of servers whose "
                    f"{name.replace('_', ' ')} was {before.get(name)}, now it is {now[name]}",
                    "bring back the servers that were there, or start a new run without --resume",
                )
        drift = mean_abs_diff(np.asarray(before["probe"], np.float64), self.group.servers[0].probe)
        if drift > allowed_drift(max(before["noise"], now["noise"])):
            raise MismatchError(
                f"the sequences in {journal.path} are of other weights: probe logprobs have moved "
                f"by {drift:.3g} on average",
                "bring back the weights that were there, or start a new run without --resume",
            )

    def _record(self, state: ServerState) -> dict[str, Any]:
        """One server's part in a run."""
        server: Server = state.server
        notes = self._notes[state.name]
        return {
            "url": server.url,
            "version": server.facts.version,
            "configuration": server.facts.configuration,
            "sequences": self._shares[state.name],
            "unconfirmed": len(state.unconfirmed),
            "noise": server.noise,
            "drift": notes["drift"],
            "restarts": len(notes["restarts"]),
            "dropped": state.dropped,
            **state.counts,
        }


def not_tested(states: Sequence[ServerState], model_type: str) -> Iterator[NotTested]:
    """What is not known about these servers."""
    first: Server = states[0].server
    details = first.facts.details
    portable = (details.get("device"), details.get("attention")) == ("cpu", "torch_native")
    if first.facts.kind == "sglang" and model_type == "gpt_oss" and portable:
        yield NotTested(
            "attention sinks of the server",
            "SGLang's portable attention has none, that of mismatch.engines.sglang.cpu.serve is "
            "a substitute, and a server does not say which it runs",
        )
    if first.facts.dtype is None:
        yield NotTested("the dtype that the server computes in", "it does not say")
    if first.mode.tempered is None:
        yield NotTested("which law the server's logprobs are of", "its probes did not tell")
    if len({state.server.facts.configuration for state in states}) > 1:
        yield NotTested("equal settings of all servers", "their configurations differ")
    for state in states:
        if state.server.noise > SAME_WEIGHTS:
            yield NotTested(
                f"that one model answers at {state.name}",
                f"its probe logprobs differ by {state.server.noise:.2g} on average from one look "
                "to the next",
            )
        if state.unconfirmed:
            yield NotTested(
                f"the weights of {state.name} to its end",
                f"it was dropped ({state.dropped}) before {len(state.unconfirmed)} of its answers "
                "were confirmed by probe prompts",
            )
        if state.counts["timeouts"]:
            yield NotTested(
                "lengths as sampled",
                f"{state.counts['timeouts']} requests to {state.name} ran out of time and were "
                "sampled again, which favours short responses",
            )


def _log(line: str) -> None:
    """To the user, who sees one of many progress lines, and to the log."""
    sys.stderr.write(f"progress {line}\n")
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
