"""SGLang's offline engine, on GPUs and on CPUs (written against 0.5.23)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from numpy.typing import NDArray

from mismatch.codec import to_json
from mismatch.engines.base import (
    Capabilities,
    Continued,
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
    sample_seed,
)
from mismatch.engines.model_calls import attribute
from mismatch.engines.model_info import ModelInfo, load_fix, read_model_info
from mismatch.engines.registry import model_facts, short_dtype
from mismatch.engines.sglang import private, wire
from mismatch.engines.sglang.child import ERROR_FILE, FACTS, offline, on_failure
from mismatch.errors import CorruptCapture, MismatchError, first_line
from mismatch.run.messages import OUT_OF_MEMORY
from mismatch.specs import EngineSpec
from mismatch.types import ROUTES, Floats, NotTested, Sampling, SideFacts

REASONS = {
    "prefill_tempered": "SGLang gives the logprobs of given tokens at T = 1 only",
    "processed_logprobs": "SGLang's logprobs are taken before top-p and top-k cut the tail",
    "deterministic": "SGLang ignores the seeds of requests unless it is told to be deterministic "
    "(--engine-arg enable_deterministic_inference=true, on a GPU)",
    "distributions": "SGLang gives no whole distributions while it samples",
}
# Entries of /server_info that numbers may depend on.
Setting = Literal[
    "attention_backend", "sampling_backend", "moe_runner_backend", "quantization",
    "max_running_requests", "disable_radix_cache", "disable_cuda_graph",
    "disable_overlap_schedule", "enable_deterministic_inference", "rl_on_policy_target",
    "speculative_algorithm", "enable_fp32_lm_head", "ep_size", "weight_version",
    "flashinfer_mxfp4_moe_precision",
]  # fmt: skip
SETTINGS: tuple[Setting, ...] = get_args(Setting)


class SglangEngine(Engine):
    """SGLang's ``Engine`` with one model; see :class:`mismatch.engines.base.Engine`."""

    spare_tokens = wire.SPARE_TOKENS

    name: ClassVar[str] = "sglang"

    @staticmethod
    def prepare() -> None:
        private.hook().prepare()

    def __init__(self, spec: EngineSpec, sampling: Sampling, longest: int) -> None:
        self.prepare()
        self.spec = spec
        self.sampling = sampling
        self.info: ModelInfo = read_model_info(spec)
        self._arguments = wire.engine_arguments(spec, sampling, self.info, longest)
        self._capture = wire.captures_routes(spec, self.info)
        self._seeded = wire.deterministic(spec)
        self._stop: tuple[str, ...] = ()
        self._sent: dict[str, Any] = {}
        self._refused = ""  # why routes that were asked for are not captured
        self._error = Path()
        self._failed: asyncio.Future[None] | None = None

    @classmethod
    def capabilities(cls, spec: EngineSpec, sampling: Sampling) -> Capabilities:
        seeded = wire.deterministic(spec)
        reasons = {k: v for k, v in REASONS.items() if not (seeded and k == "deterministic")}
        return Capabilities(
            prefill_tempered=False,
            processed_logprobs=False,
            deterministic=seeded,
            cache_reading=True,
            reasons=reasons,
        )

    def __enter__(self) -> SglangEngine:
        descriptor, path = tempfile.mkstemp(prefix="mismatch-sglang-")
        os.close(descriptor)
        self._error = Path(path)
        os.environ[ERROR_FILE] = path
        try:
            self.engine = offline()(custom_sigquit_handler=on_failure, **self._arguments)
        except Exception as error:
            reason = " ".join(
                (self._scheduler_error() or str(error) or type(error).__name__).split()
            )
            self._forget()
            shown = textwrap.shorten(reason, 400, placeholder=" …")
            fault = f"SGLang cannot load {self.spec.model}: {shown}"
            raise MismatchError(fault, load_fix(RuntimeError(reason))) from error
        # SGLang's handlers would answer all requests first, or kill this process silently.
        end = lambda *_: private.end_with_children()  # noqa: E731
        private.handle_signals(self.engine, end, lambda *_: self._fail())
        self._facts = private.first_facts(self.engine, FACTS)
        self._server: dict[str, Any] = self.engine.get_server_info()
        self._refused = self._routes_refused() if self._capture else ""
        self._capture = self._capture and not self._refused
        return self

    def __exit__(self, *exc: object) -> None:
        self._forget()
        self.engine.shutdown()

    # ------------------------------------------------------------ decode

    def generate(self, prompts: TokenIds, progress: Progress, turn: int = 1) -> list[list[Sample]]:
        require_ids(prompts, self.info.vocab_size)
        self._sent = wire.sampling_parameters(self.sampling, self.info.stop_ids, self._stop)
        jobs = requests_of(len(prompts), self.sampling, turn)
        bodies = []
        for p, s in jobs:
            seed = sample_seed(self.sampling.seed, p, s) if self._seeded else None
            bodies.append(
                wire.generate_request(
                    prompts[p],
                    self._sent,
                    routes=self._capture,
                    seed=seed,
                    likeliest=self.likeliest,
                )
            )
        answers = self._run(bodies, progress)
        samples = [
            self._sample(answer, len(prompts[p]), f"prompt {p}, sample {s}")
            for answer, (p, s) in zip(answers, jobs, strict=True)
        ]
        return by_prompt(samples, len(prompts))

    def stop_at(self, texts: Sequence[str]) -> None:
        self._stop = tuple(texts)

    def _sample(self, answer: dict[str, Any], prompt: int, where: str) -> Sample:
        routed: NDArray[Any] | None = None
        if self._capture:
            forwarded = prompt + len(answer["output_ids"]) - 1
            try:
                routed = wire.parse_routes(
                    answer, forwarded, self._facts["moe_layers"], self.info.top_k, where
                )
            except CorruptCapture as error:  # the run is refused after its tokens are saved
                print(error, file=sys.stderr)
        return wire.parse_sample(answer, where, routed)

    def _run(self, bodies: Sequence[dict[str, Any]], progress: Progress) -> list[dict[str, Any]]:
        """Send all requests and return their answers in order.

        Raises:
            MismatchError: a request was refused, or a process of SGLang failed.
        """
        loop = attribute(self.engine, private.LOOP)
        done: list[int] = []

        async def send(body: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = await self.engine.async_generate(**body)
            facts = answer["meta_info"]
            done.append(len(answer["output_ids"]) or len(facts["input_token_logprobs"]) - 1)
            progress(len(done), len(bodies), sum(done))
            return answer

        async def everything() -> list[dict[str, Any]]:
            self._failed = loop.create_future()
            work = asyncio.gather(*(send(body) for body in bodies))
            await asyncio.wait([work, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                self._failed.result()
            return await work

        try:
            answers: list[dict[str, Any]] = loop.run_until_complete(everything())
        except MismatchError:
            raise
        except Exception as error:
            fault = f"SGLang failed: {self._scheduler_error() or first_line(error)}"
            raise MismatchError(fault, wire.LOG_FIX) from error
        return answers

    # ------------------------------------------------------------ prefill

    def prefill(
        self, sequences: TokenIds, starts: Sequence[int], temperature: float, progress: Progress
    ) -> list[Floats]:
        """Score given tokens, at T = 1 only.

        Raises:
            MismatchError: another temperature than 1 (or 0: greedy).
        """
        if temperature not in (0.0, 1.0):
            raise MismatchError(f"{REASONS['prefill_tempered']}, not {temperature:g}")
        require_ids(sequences, self.info.vocab_size)
        pairs = list(zip(sequences, starts, strict=True))
        answers = self._run([wire.prefill_request(ids, start) for ids, start in pairs], progress)
        return [
            wire.parse_prefill(answer, ids, start, f"sequence {index}")
            for index, (answer, (ids, start)) in enumerate(zip(answers, pairs, strict=True))
        ]

    def continue_greedily(
        self, contexts: TokenIds, max_tokens: int, read_cache: bool, progress: Progress
    ) -> list[Continued]:
        bodies = [wire.greedy_request(ids, max_tokens, read_cache) for ids in contexts]
        answers = self._run(bodies, progress)
        return [wire.parse_continued(answer, f"context {n}") for n, answer in enumerate(answers)]

    # ------------------------------------------------------------ what ran

    def experts(self) -> ExpertLayout | None:
        if not self._capture:
            return None
        return ExpertLayout(
            tuple(self._facts["moe_layers"]), self.info.num_experts, self.info.top_k
        )

    def _routes_refused(self) -> str:
        """Say why routes that were asked for cannot be had from what runs; "": they can."""
        version = f"SGLang {self._server.get('version')}"
        lacking = self._facts["lacking"]["routes"]
        if self._facts["model_class"] == private.UNKNOWN:
            return f"{version}: {lacking}"
        if not self._facts["moe_layers"]:
            return f"no layer with experts was found in {version}'s {self._facts['model_class']}"
        if lacking and "triton_kernel" in str(self._server.get("moe_runner_backend")):
            return f"{version}: {lacking}"
        return ""

    def weights(self) -> LoadedWeights:
        """Return digests, on one device only: slices of several ranks look alike."""
        if self.spec.tensor_parallel_size > 1 or self._facts["lacking"]["weights"]:
            return LoadedWeights({})
        digests = {name: tuple(digest) for name, digest in self._facts["digests"].items()}
        return LoadedWeights(digests, tuple(self._facts["unmapped"]))

    def fingerprint(self, mode: Mode) -> SideFacts:
        """Describe what ran, from SGLang's own server information."""
        info = self._server
        raw = wire.raw_logprobs() or mode == "prefill"
        temperature = 1.0 if raw else (self.sampling.temperature or 1.0)
        substitutes, dtype = self._facts["substitutes"], self._facts["dtype"]
        backend = str(info.get("attention_backend"))
        methods = "+".join(self._facts["moe_methods"])
        facts: SideFacts = {
            **model_facts(self.spec),
            "mode": mode,
            "engine": self.name,
            "version": str(info.get("version")),
            "dtype": short_dtype(self._arguments["dtype"] if dtype == private.UNKNOWN else dtype),
            "kv_cache_dtype": short_dtype(self._facts["kv_cache_dtype"]),
            "logprobs_mode": "input_token_logprobs" if mode == "prefill" else "output_logprobs",
            "logprobs_temperature": temperature,
            "logprobs_truncated": False,
            "logprobs_penalised": self.sampling.penalises and not raw,
            "attention": f"{backend} ({'; '.join(substitutes)})" if substitutes else backend,
            "substitutes": substitutes,
            "moe": self.info.moe,
            "moe_backend": f"{info.get('moe_runner_backend')} ({methods})" if methods else None,
            "device": self._facts["device"],
            "model_class": self._facts["model_class"],
            "config": self._facts["config"],
            "enforce_eager": bool(info.get("disable_cuda_graph")),
            "prefix_caching": not info.get("disable_radix_cache"),
            "block_size": info.get("page_size"),
            "chunked_prefill": int(info.get("chunked_prefill_size") or -1) > 0,
            "max_num_batched_tokens": info.get("chunked_prefill_size"),
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "max_model_len": self._arguments["context_length"],
            "seed": info.get("random_seed"),
            "seeding": "per sample" if self._seeded else "engine",
            "generation_config": None,
            "sampling": {"max_tokens": self.sampling.max_tokens, "top_k": self.sampling.top_k}
            | {k: v for k, v in self._sent.items() if k not in ("max_new_tokens", "top_k")},
            "engine_args": dict(self.spec.args),
            "not_tested": to_json(
                [NotTested(ROUTES, f"{self.name}: {self._refused}")] if self._refused else []
            ),
        }
        if lacking := self._facts["lacking"]["weights"]:
            facts["weights_not_comparable"] = f"SGLang {info.get('version')}: {lacking}"
        if self.spec.tensor_parallel_size > 1:
            facts["weights_not_comparable"] = "SGLang's weights are digested on one device only"
        for name in SETTINGS:
            facts[name] = info.get(name)
        return facts

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method in the scheduler and return the first rank's answer; see ``child.call``."""
        return [self.engine.mismatch_called(method, *args)]

    # ------------------------------------------------------------ failures

    def _fail(self) -> None:
        """Fail the requests in flight: a child process failed."""
        if self._failed is not None and not self._failed.done():
            reason = self._scheduler_error()
            fault = f"SGLang failed: {reason or 'one of its processes was ended'}"
            error = MismatchError(fault, wire.LOG_FIX if reason else OUT_OF_MEMORY)
            self._failed.set_exception(error)

    def _scheduler_error(self) -> str:
        """Return the scheduler's last error; "": it left none."""
        with contextlib.suppress(OSError):
            return self._error.read_text().strip()
        return ""

    def _forget(self) -> None:
        os.environ.pop(ERROR_FILE, None)
        self._error.unlink(missing_ok=True)
