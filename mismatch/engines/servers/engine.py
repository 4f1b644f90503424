"""Running servers as one engine; see :class:`mismatch.engines.base.Engine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from mismatch.engines.base import (
    Capabilities,
    ExpertLayout,
    LoadedWeights,
    Mode,
    Progress,
    Sample,
)
from mismatch.engines.fingerprint import model_facts
from mismatch.engines.model_info import read_model_info
from mismatch.engines.seeds import sample_seed
from mismatch.engines.sequences import require_ids, require_starts
from mismatch.engines.servers.dialect import Answer
from mismatch.engines.servers.journal import Journal
from mismatch.engines.servers.member import Changed, Member
from mismatch.engines.servers.pool import NobodyLeft, Pool
from mismatch.engines.servers.record import open_questions, record, served_facts
from mismatch.engines.servers.survey import Fleet, Server, allowed, gap, survey, verify
from mismatch.errors import MismatchError
from mismatch.run.messages import say
from mismatch.specs import EngineSpec
from mismatch.types import Fingerprint, Floats, Sampling

UNTEMPERED = "decode against prefill: servers score prompts at temperature 1 only"
UNSEEDED = "the same tokens from the same seed: a server's batches depend on what else it has to do"


class ServerEngine:
    """One or more running servers of one model."""

    name: ClassVar[str] = "server"

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.spec = spec
        self.sampling = sampling
        self.info = read_model_info(spec)
        self.fleet: Fleet = survey(spec)
        self._require_room(longest)
        self._journal: Journal | None = None
        self._sent: dict[str, Any] = {}
        self._shares: Counter[str] = Counter()
        self._notes: dict[str, dict[str, Any]] = {
            server.url: {"restarts": [], "drift": 0.0} for server in self.fleet.servers
        }
        members = [Member(server.url, server) for server in self.fleet.servers]
        self.pool = Pool(members, self._verify, spec.server_concurrency, self._tell)

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        """See the protocol: what every one of the servers showed that it can do."""
        servers = survey(spec).servers
        reasons: dict[str, str] = {
            "deterministic": UNSEEDED,
            "prefill_tempered": UNTEMPERED,
            "distributions": "exact KL: a server gives no whole distributions",
        }
        for server in servers:
            reasons |= server.reasons
        return Capabilities(
            prefill=all(server.prefill for server in servers),
            prefill_tempered=False,
            routed_experts=all(server.routes for server in servers),
            processed_logprobs=bool(servers[0].law.truncated),
            deterministic=False,
            journals=True,
            reasons=reasons,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass  # servers are not ours to stop

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
            return
        self._require_same_as(self._journal)

    def discard_journal(self) -> None:
        """The sequences are saved as a rollout."""
        if self._journal is not None:
            self._journal.discard()

    # ------------------------------------------------------------ decode

    def generate(self, prompts: Sequence[list[int]], progress: Progress) -> list[list[Sample]]:
        """See the protocol. Job ``p * samples_per_prompt + s``, whoever answers it and when."""
        require_ids(prompts, self.info.vocab_size)
        per_prompt = self.sampling.samples_per_prompt
        total = len(prompts) * per_prompt
        taken = self._journal.samples if self._journal else {}
        samples: dict[int, Sample] = {job: s for job, s in taken.items() if job < total}
        if samples:
            self._tell(f"{len(samples)} of {total} sequences were finished before")
            assert self._journal is not None
            self._shares.update(self._journal.answered_by[job] for job in samples)
        tokens = sum(len(sample.token_ids) for sample in samples.values())
        settings = self._settings()

        def ask(server: Server, job: int) -> Answer:
            ids, seed = prompts[job // per_prompt], self._seed(server, *divmod(job, per_prompt))
            layout = self.fleet.layout if server.routes else None
            answer = server.dialect.sample(server.client, server.facts, ids, settings, seed, layout)
            if answer.identity != server.facts.configuration:
                raise Changed(f"it answers as {answer.identity}, not {server.facts.configuration}")
            self._require_whole(answer.sample, server)
            return answer

        def done(job: int, member: Member, answer: Answer) -> None:
            nonlocal tokens
            samples[job] = answer.sample
            tokens += len(answer.sample.token_ids)
            self._shares[member.name] += 1
            if self._journal is not None:
                self._journal.add(job, answer.sample, member.name)
            progress(len(samples), total, tokens)

        def void(jobs: list[int], member: Member) -> None:
            for job in jobs:
                del samples[job]
            self._shares[member.name] -= len(jobs)
            if self._journal is not None:
                self._journal.void(jobs, str(member.dropped))

        self._run([job for job in range(total) if job not in samples], ask, done, void)
        flat = [samples[job] for job in range(total)]
        return [flat[i : i + per_prompt] for i in range(0, total, per_prompt)]

    def _run(
        self,
        jobs: Sequence[int],
        ask: Callable[[Server, int], Any],
        done: Callable[[int, Member, Any], None],
        void: Callable[[list[int], Member], None],
    ) -> None:
        if not jobs:
            return
        try:
            self.pool.run(jobs, ask, done, void)
        except MismatchError as error:
            kept = len(self._journal.samples) if self._journal else 0
            if kept:
                error.message += f"; {kept} finished sequences are kept"
            if kept or isinstance(error, NobodyLeft):
                error.fix += "; then go on where it stopped: --resume"
            raise

    def _settings(self) -> dict[str, Any]:
        settings = self.fleet.servers[0].dialect.settings(self.sampling, self.info.stop_ids)
        self._sent = dict(settings)
        return settings

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

    # ------------------------------------------------------------ prefill

    def prefill(
        self,
        sequences: Sequence[list[int]],
        starts: Sequence[int],
        temperature: float,
        progress: Progress,
    ) -> list[Floats]:
        """See the protocol; at temperature 1, whatever ``temperature`` is."""
        require_starts(starts)
        require_ids(sequences, self.info.vocab_size)
        scores: dict[int, Floats] = {}
        tokens = 0

        def ask(server: Server, job: int) -> Floats:
            return server.dialect.score(server.client, server.facts, sequences[job], starts[job])

        def done(job: int, member: Member, answer: Floats) -> None:
            nonlocal tokens
            scores[job] = answer
            tokens += len(answer)
            progress(len(scores), len(sequences), tokens)

        def void(jobs: list[int], member: Member) -> None:
            for job in jobs:
                del scores[job]

        self._run(range(len(sequences)), ask, done, void)
        return [scores[job] for job in range(len(sequences))]

    # ------------------------------------------------------------ what ran

    def experts(self) -> ExpertLayout | None:
        """See the protocol."""
        return self.fleet.layout if all(one.routes for one in self.fleet.servers) else None

    def weights(self) -> LoadedWeights:
        """None: servers do not show their parameters."""
        return LoadedWeights({})

    def fingerprint(self, mode: Mode) -> Fingerprint:
        """See the protocol: what the servers say, and what they showed."""
        said = served_facts(self.fleet.servers[0], self.sampling, mode)
        return (
            model_facts(self.spec)
            | said
            | {
                "engine": self.name,
                "moe": self.info.moe,
                "seeding": "none"
                if self._seed(self.fleet.servers[0], 0, 0) is None
                else "per sample",
                "sampling": self._sent,
                "servers": [
                    record(member, self._shares[member.name], self._notes[member.name])
                    for member in self.pool.members
                ],
                "not_tested": open_questions(self.pool.members, self.info.model_type),
            }
        )

    # ------------------------------------------------------------ checks

    def _verify(self, server: Server) -> None:
        verify(server, self.fleet.probes, self._notes[server.url])

    def _require_room(self, longest: int) -> None:
        for server in self.fleet.servers:
            limit = server.facts.max_model_len
            scoring = self.spec.prefill and server.prefill  # samples one token more
            needed = longest + server.facts.spare + scoring
            if limit is not None and needed > limit:
                raise MismatchError(
                    f"{server.url} takes sequences of {limit} tokens, these may have {needed}",
                    "lower --max-tokens, or start the server with a longer context",
                )

    def _identity(self) -> dict[str, Any]:
        first = self.fleet.servers[0]
        return {
            "kind": first.facts.kind,
            "version": first.facts.version,
            "dtype": first.facts.dtype,
            "weight_version": first.facts.weight_version,
            "law": first.law.name,
            "routes": self.experts() is not None,
            "probe": first.probe.tolist(),
            "noise": first.noise,
        }

    def _require_same_as(self, journal: Journal) -> None:
        now, before = self._identity(), journal.header
        for name in ("kind", "version", "dtype", "weight_version", "law", "routes"):
            if now[name] != before.get(name):
                raise MismatchError(
                    f"the sequences in {journal.path} are of servers whose "
                    f"{name.replace('_', ' ')} was {before.get(name)}, now it is {now[name]}",
                    "bring back the servers that were there, or start a new run without --resume",
                )
        moved = gap(np.asarray(before["probe"], np.float64), self.fleet.servers[0].probe)
        if moved > allowed(max(before["noise"], now["noise"])):
            raise MismatchError(
                f"the sequences in {journal.path} are of other weights: probe logprobs have moved "
                f"by {moved:.3g} on average",
                "bring back the weights that were there, or start a new run without --resume",
            )

    def _tell(self, line: str) -> None:
        """To the user, who sees one of many progress lines, and to the log."""
        say(f"progress {line}")
        say(line)
